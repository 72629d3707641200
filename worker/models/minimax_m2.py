"""MiniMax-M2: sigmoid scores with a bias for the selection, norms over whole projections, partial rope."""

from moeray.worker.models.config import DecoderConfig, GroupedQueryConfig, LayerAttention, MoEConfig
from moeray.worker.models.config_reader import ConfigReader
from moeray.worker.models.family import Family
from moeray.worker.models.mixtral import BLOCK, MIXTRAL_EXPERTS, MIXTRAL_PLACES
from moeray.worker.models.weight_names import LAYER, Stored, WeightNames

SELECTION_BIAS = "e_score_correction_bias"


def read_config(reader: ConfigReader) -> DecoderConfig:
    """Map a MiniMaxM2Config; raises `CheckpointError` by field for what is not implemented."""
    _check_released_fields(reader)
    heads = reader.heads()
    rope = reader.rope(
        heads["head_dim"],
        default_theta=5e6,
        default_partial=reader.integer("rotary_dim", default=heads["head_dim"]) / heads["head_dim"],
        may_be_partial=True,
    )
    return DecoderConfig(
        **reader.common(norm_eps=1e-6),
        attention=GroupedQueryConfig(**heads, layers=(LayerAttention(rope=rope),) * reader.num_layers, qk_norm="full"),
        moe=MoEConfig(
            layers=tuple(range(reader.num_layers)),
            **reader.experts("num_local_experts", "num_experts"),
            intermediate_size=reader.integer("intermediate_size"),
            renormalize=True,
            scoring="sigmoid",
            selection_bias=True,
        ),
    )


def _check_released_fields(reader: ConfigReader) -> None:
    """Fields that the released checkpoints have besides transformers': what else they could say is refused."""
    reader.get("router_jitter_noise", "num_mtp_modules", "mtp_transformer_layers", "use_mtp", "mlp_intermediate_size")
    reader.get("shared_moe_mode")  # without effect while there are no shared experts
    reader.require("attn_type_list", None, [1] * reader.num_layers)
    reader.require("sliding_window", None)
    reader.require("scoring_func", "sigmoid")
    reader.require("use_routing_bias", True)
    reader.require("use_qk_norm", True)
    reader.require("qk_norm_type", "per_layer")
    reader.require("shared_intermediate_size", 0)
    for name in ("full_attention", "linear_attention", "mlp"):
        reader.require(f"layernorm_{name}_beta", 1.0)


FAMILY = Family(
    architecture="MiniMaxM2ForCausalLM",
    read_config=read_config,
    weight_names=WeightNames(
        places={
            **MIXTRAL_PLACES,
            "selection_bias": Stored((BLOCK + SELECTION_BIAS, LAYER + "mlp." + SELECTION_BIAS)),
        },
        experts=MIXTRAL_EXPERTS,
        has_extra_layers=True,
    ),
)
