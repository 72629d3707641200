"""ERNIE-4.5 MoE: softmax scores with a bias for the selection, shared experts, dense layers, interleaved rope."""

from moeray.worker.models.config import DecoderConfig, GroupedQueryConfig, LayerAttention, MoEConfig
from moeray.worker.models.config_reader import ConfigReader
from moeray.worker.models.family import Family
from moeray.worker.models.weight_names import COMMON_NAMES, LAYER, ONE_ENTRY, Stored, WeightNames


def read_config(reader: ConfigReader) -> DecoderConfig:
    """Map an Ernie4_5_MoeConfig; raises `CheckpointError` by field for what is not implemented."""
    reader.get("moe_capacity", "num_nextn_predict_layers")  # for training; layers that are not used
    reader.require("use_bias", False, None)
    reader.require("moe_gate", "topk")
    reader.require("moe_use_aux_free", True)
    reader.require("moe_norm_min", 1e-12)
    heads = reader.heads()
    rope = reader.rope(heads["head_dim"], default_theta=500000.0, interleaved=True)
    expert_size = reader.integer("moe_intermediate_size")
    return DecoderConfig(
        **reader.common(norm_eps=1e-5, tied=True),
        attention=GroupedQueryConfig(**heads, layers=(LayerAttention(rope=rope),) * reader.num_layers),
        dense_intermediate_size=reader.integer("intermediate_size"),
        dense_activation=reader.activation(),
        moe=MoEConfig(
            layers=_sparse_layers(reader),
            num_experts=reader.integer("moe_num_experts", "num_experts"),
            top_k=reader.integer("moe_k", "num_experts_per_tok"),
            intermediate_size=expert_size,
            renormalize=True,
            activation=reader.activation(),
            router_fp32=True,
            selection_bias=True,
            shared_intermediate_size=expert_size * reader.integer("moe_num_shared_experts", default=2, low=0),
        ),
    )


def _sparse_layers(reader: ConfigReader) -> tuple[int, ...]:
    first = reader.integer("moe_layer_start_index", default=1, low=0)
    last = reader.integer("moe_layer_end_index", default=-1, low=-1)
    interval = reader.integer("moe_layer_interval", default=1)
    end = reader.num_layers if last == -1 else min(last + 1, reader.num_layers)
    return tuple(layer for layer in range(first, end) if (layer + 1) % interval == 0)


FAMILY = Family(
    architecture="Ernie4_5_MoeForCausalLM",
    read_config=read_config,
    weight_names=WeightNames(
        places={
            **COMMON_NAMES,
            "selection_bias": Stored((LAYER + "mlp.moe_statics.e_score_correction_bias",), ONE_ENTRY),
        },
        ignored=(r"rotary_emb\.inv_freq$", r"^model\.mtp_"),
    ),
)
