"""Phi-MoE: LayerNorm, biases everywhere, and SparseMixer's routing."""

from dataclasses import replace

from moeray.worker.models.config import DecoderConfig, GroupedQueryConfig, LayerAttention, MoEConfig
from moeray.worker.models.config_reader import ConfigReader
from moeray.worker.models.family import Family
from moeray.worker.models.mixtral import BLOCK, MIXTRAL_EXPERTS, MIXTRAL_PLACES
from moeray.worker.models.weight_names import LAYER, Stored, WeightNames


def read_config(reader: ConfigReader) -> DecoderConfig:
    """Map a PhimoeConfig; raises `CheckpointError` by field for what is not implemented.

    With LongRoPE the limit of positions is that of the original training: behind it, the factors would depend on a
    sequence's length, and keys in the cache would have to change.
    """
    reader.get("input_jitter_noise")  # for training
    reader.require("num_experts_per_tok", 2)
    heads = reader.heads()
    rope = reader.rope(heads["head_dim"], default_theta=1e6)
    attention_bias = reader.flag("attention_bias")
    config = DecoderConfig(
        **reader.common(norm_eps=1e-5),
        norm="layer",
        lm_head_bias=reader.flag("lm_head_bias"),
        attention=GroupedQueryConfig(
            **heads,
            layers=(LayerAttention(rope=rope, window=reader.window()),) * reader.num_layers,
            qkv_bias=attention_bias,
            o_bias=attention_bias,
        ),
        moe=MoEConfig(
            layers=tuple(range(reader.num_layers)),
            num_experts=reader.integer("num_local_experts", "num_experts"),
            top_k=2,
            intermediate_size=reader.integer("intermediate_size"),
            activation=reader.activation(),
            routing="sparsemixer",
            router_jitter=reader.number("router_jitter_noise", default=0.01),
        ),
    )
    if rope.type == "longrope":
        limit = min(config.max_position_embeddings, rope.original_max_position_embeddings)
        return replace(config, max_position_embeddings=limit)
    return config


FAMILY = Family(
    architecture="PhimoeForCausalLM",
    aliases=("PhiMoEForCausalLM",),
    read_config=read_config,
    weight_names=WeightNames(
        places={**MIXTRAL_PLACES, "router": Stored((BLOCK + "gate.weight", LAYER + "mlp.router.weight"))},
        experts=MIXTRAL_EXPERTS,
    ),
)
