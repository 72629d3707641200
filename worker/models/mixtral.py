"""Mixtral: few large experts, and optionally a sliding window in all layers."""

from moeray.worker.models.config import DecoderConfig, GroupedQueryConfig, LayerAttention, MoEConfig
from moeray.worker.models.config_reader import ConfigReader
from moeray.worker.models.family import Family
from moeray.worker.models.weight_names import (
    COMMON_NAMES,
    LAYER,
    Stored,
    WeightNames,
    fused_experts,
    separate_experts,
)

BLOCK = LAYER + "block_sparse_moe."
# Mixtral's names for what a MoE layer has, which some later families took over.
MIXTRAL_PLACES = {**COMMON_NAMES, "router": Stored((BLOCK + "gate.weight", LAYER + "mlp.gate.weight"))}
MIXTRAL_EXPERTS = (
    separate_experts(BLOCK + "experts.{expert}.", gate="w1", up="w3", down="w2"),
    fused_experts(LAYER + "mlp.experts."),
)


def read_config(reader: ConfigReader) -> DecoderConfig:
    """Map a MixtralConfig; raises `CheckpointError` by field for what is not implemented."""
    reader.get("router_jitter_noise")  # for training
    heads = reader.heads()
    rope = reader.rope(heads["head_dim"], default_theta=1e6)
    return DecoderConfig(
        **reader.common(norm_eps=1e-5),
        attention=GroupedQueryConfig(
            **heads, layers=(LayerAttention(rope=rope, window=reader.window()),) * reader.num_layers
        ),
        moe=MoEConfig(
            layers=tuple(range(reader.num_layers)),
            **reader.experts("num_local_experts", "num_experts"),
            intermediate_size=reader.integer("intermediate_size"),
            renormalize=True,
        ),
    )


FAMILY = Family(
    architecture="MixtralForCausalLM",
    read_config=read_config,
    weight_names=WeightNames(places=MIXTRAL_PLACES, experts=MIXTRAL_EXPERTS),
)
