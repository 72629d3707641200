"""Qwen3-MoE: config and weight names."""

from moeray.worker.models.config import DecoderConfig, GroupedQueryConfig, LayerAttention, MoEConfig
from moeray.worker.models.config_reader import ConfigReader
from moeray.worker.models.family import Family


def sparse_layers(reader: ConfigReader) -> tuple[int, ...]:
    """The layers with experts, as Qwen's configs choose them."""
    sparse_step = reader.integer("decoder_sparse_step", default=1)
    dense_layers = set(reader.get("mlp_only_layers", default=[]))
    layers = range(reader.num_layers)
    return tuple(layer for layer in layers if layer not in dense_layers and (layer + 1) % sparse_step == 0)


def read_config(reader: ConfigReader) -> DecoderConfig:
    """Map a Qwen3MoeConfig; raises `CheckpointError` by field for what is not implemented."""
    reader.require("use_sliding_window", False)
    reader.get("sliding_window", "max_window_layers")  # without effect while use_sliding_window is false
    reader.layer_types("full_attention")
    heads = reader.heads()
    attention_bias = reader.flag("attention_bias")
    return DecoderConfig(
        **reader.common(norm_eps=1e-6),
        attention=GroupedQueryConfig(
            **heads,
            layers=(LayerAttention(rope=reader.rope(heads["head_dim"])),) * reader.num_layers,
            qkv_bias=attention_bias,
            o_bias=attention_bias,
            qk_norm="head",
        ),
        dense_intermediate_size=reader.integer("intermediate_size", default=6144),
        dense_activation=reader.activation(),
        moe=MoEConfig(
            layers=sparse_layers(reader),
            **reader.experts("num_experts", "num_local_experts"),
            intermediate_size=reader.integer("moe_intermediate_size"),
            renormalize=reader.flag("norm_topk_prob"),
        ),
    )


FAMILY = Family(architecture="Qwen3MoeForCausalLM", read_config=read_config)
