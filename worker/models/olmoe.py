"""OLMoE: norms over whole query and key projections, optionally clipped."""

from moeray.worker.models.config import DecoderConfig, GroupedQueryConfig, LayerAttention, MoEConfig
from moeray.worker.models.config_reader import ConfigReader
from moeray.worker.models.family import Family


def read_config(reader: ConfigReader) -> DecoderConfig:
    """Map an OlmoeConfig; raises `CheckpointError` by field for what is not implemented."""
    heads = reader.heads()
    attention_bias = reader.flag("attention_bias")
    return DecoderConfig(
        **reader.common(norm_eps=1e-5),
        attention=GroupedQueryConfig(
            **heads,
            layers=(LayerAttention(rope=reader.rope(heads["head_dim"])),) * reader.num_layers,
            qkv_bias=attention_bias,
            o_bias=attention_bias,
            qk_norm="full",
            clip_qkv=None if reader.get("clip_qkv") is None else reader.number("clip_qkv"),
        ),
        moe=MoEConfig(
            layers=tuple(range(reader.num_layers)),
            **reader.experts("num_experts", "num_local_experts"),
            intermediate_size=reader.integer("intermediate_size"),
            renormalize=reader.flag("norm_topk_prob"),
        ),
    )


FAMILY = Family(architecture="OlmoeForCausalLM", read_config=read_config)
