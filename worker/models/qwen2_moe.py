"""Qwen2-MoE: biased QKV projections, and a shared expert with a gate of its own."""

from moeray.worker.models.config import DecoderConfig, GroupedQueryConfig, LayerAttention, MoEConfig
from moeray.worker.models.config_reader import ConfigReader
from moeray.worker.models.family import Family
from moeray.worker.models.qwen3_moe import sparse_layers
from moeray.worker.models.weight_names import COMMON_NAMES, LAYER, WeightNames


def read_config(reader: ConfigReader) -> DecoderConfig:
    """Map a Qwen2MoeConfig; raises `CheckpointError` by field for what is not implemented."""
    reader.require("use_sliding_window", False)
    reader.get("sliding_window", "max_window_layers")  # without effect while use_sliding_window is false
    reader.layer_types("full_attention")
    heads = reader.heads()
    return DecoderConfig(
        **reader.common(norm_eps=1e-6),
        attention=GroupedQueryConfig(
            **heads,
            layers=(LayerAttention(rope=reader.rope(heads["head_dim"])),) * reader.num_layers,
            qkv_bias=reader.flag("qkv_bias", default=True),
        ),
        dense_intermediate_size=reader.integer("intermediate_size", default=5632),
        dense_activation=reader.activation(),
        moe=MoEConfig(
            layers=sparse_layers(reader),
            **reader.experts("num_experts", "num_local_experts"),
            intermediate_size=reader.integer("moe_intermediate_size"),
            renormalize=reader.flag("norm_topk_prob"),
            shared_intermediate_size=reader.integer("shared_expert_intermediate_size", default=5632),
            shared_gated=True,
        ),
    )


SHARED = LAYER + "mlp.shared_expert."
FAMILY = Family(
    architecture="Qwen2MoeForCausalLM",
    read_config=read_config,
    weight_names=WeightNames(
        places={
            **COMMON_NAMES,
            "shared_gate": SHARED + "gate_proj.weight",
            "shared_up": SHARED + "up_proj.weight",
            "shared_down": SHARED + "down_proj.weight",
            "shared_weight": LAYER + "mlp.shared_expert_gate.weight",
        }
    ),
)
