"""DeepSeek-V2 and DeepSeek-V3, and what is DeepSeek-V3 under another name: config and weight names."""

from typing import Any

from moeray.comm.errors import CheckpointError
from moeray.worker.models.config import DecoderConfig, LatentAttentionConfig, LayerAttention, MoEConfig
from moeray.worker.models.config_reader import ConfigReader
from moeray.worker.models.family import Family
from moeray.worker.models.rope_config import RopeConfig, yarn_mscale
from moeray.worker.models.weight_names import COMMON_NAMES, LAYER, WeightNames

# Training's, other programs', and what is known from other keys.
WITHOUT_EFFECT = (
    "aux_loss_alpha",
    "ep_size",
    "head_dim",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "pretraining_tp",
    "qk_head_dim",
    "seq_aux",
)
LATENT_NAMES = {
    **COMMON_NAMES,
    "q_a_proj": LAYER + "self_attn.q_a_proj.weight",
    "q_a_norm": LAYER + "self_attn.q_a_layernorm.weight",
    "q_b_proj": LAYER + "self_attn.q_b_proj.weight",
    "kv_a_latent": LAYER + "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_rope": LAYER + "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_norm": LAYER + "self_attn.kv_a_layernorm.weight",
    "kv_b_proj": LAYER + "self_attn.kv_b_proj.weight",
}


def read_v2_config(reader: ConfigReader) -> DecoderConfig:
    """Map a DeepseekV2Config; raises `CheckpointError` by field for what is not implemented."""
    reader.require("scoring_func", "softmax")
    reader.require("mlp_bias", False)
    reader.require("topk_method", "greedy", "group_limited_greedy", None)
    is_limited = reader.get("topk_method") == "group_limited_greedy"
    reader.get("n_group", "topk_group")  # without effect unless the selection is limited to groups
    groups = _expert_groups(reader) if is_limited else {}
    renormalize = reader.flag("norm_topk_prob")
    if renormalize:
        # DeepSeek's code then leaves the factor out, others' applies it.
        reader.require("routed_scaling_factor", 1.0)
    return _decoder_config(reader, interleaved=True, scoring="softmax", renormalize=renormalize, **groups)


def read_v3_config(reader: ConfigReader) -> DecoderConfig:
    """Map a DeepseekV3Config; raises `CheckpointError` by field for what is not implemented."""
    reader.require("scoring_func", "sigmoid")
    reader.require("topk_method", "noaux_tc")
    return _decoder_config(
        reader,
        interleaved=reader.flag("rope_interleave", default=True),
        scoring="sigmoid",
        selection_bias=True,
        renormalize=reader.flag("norm_topk_prob", default=True),
        **_expert_groups(reader),
    )


def _decoder_config(reader: ConfigReader, *, interleaved: bool, **routing: Any) -> DecoderConfig:
    reader.require("attention_bias", False)
    reader.get(*WITHOUT_EFFECT)
    inner = reader.integer("moe_intermediate_size")
    return DecoderConfig(
        **reader.common(norm_eps=1e-6),
        attention=_latent_attention(reader, interleaved=interleaved),
        dense_intermediate_size=reader.integer("intermediate_size"),
        dense_activation=reader.activation(),
        moe=MoEConfig(
            layers=_sparse_layers(reader),
            num_experts=_num_experts(reader),
            top_k=reader.integer("num_experts_per_tok"),
            intermediate_size=inner,
            activation=reader.activation(),
            router_fp32=True,
            routed_scaling_factor=reader.number("routed_scaling_factor"),
            shared_intermediate_size=inner * reader.integer("n_shared_experts", default=0, low=0),
            **routing,
        ),
    )


def _latent_attention(reader: ConfigReader, *, interleaved: bool) -> LatentAttentionConfig:
    num_heads = reader.integer("num_attention_heads")
    reader.require("num_key_value_heads", num_heads, None)
    nope, rotated = reader.integer("qk_nope_head_dim"), reader.integer("qk_rope_head_dim")
    rope = reader.rope(rotated, interleaved=interleaved)
    return LatentAttentionConfig(
        layers=(LayerAttention(rope=rope),) * reader.num_layers,
        num_heads=num_heads,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
        v_head_dim=reader.integer("v_head_dim"),
        kv_lora_rank=reader.integer("kv_lora_rank"),
        q_lora_rank=None if reader.get("q_lora_rank") is None else reader.integer("q_lora_rank"),
        scale=(nope + rotated) ** -0.5 * _softmax_mscale(reader, rope) ** 2,
    )


def _softmax_mscale(reader: ConfigReader, rope: RopeConfig) -> float:
    """YaRN sharpens all dims here, and the rotated ones by the ratio that is `rope.attention_factor`."""
    weight = reader.get("rope_parameters", "rope_scaling", default={}).get("mscale_all_dim")
    return yarn_mscale(rope.factor, weight) if weight else 1.0


def _num_experts(reader: ConfigReader) -> int:
    return reader.integer("n_routed_experts", "num_local_experts", "num_experts")


def _sparse_layers(reader: ConfigReader) -> tuple[int, ...]:
    """The layers with experts: those that are said to, or every `moe_layer_freq`-th behind the dense ones."""
    kinds = reader.get("mlp_layer_types")
    if kinds is None:
        first = reader.integer("first_k_dense_replace", low=0)
        step = reader.integer("moe_layer_freq", default=1)
        return tuple(layer for layer in range(first, reader.num_layers) if layer % step == 0)
    reader.get("first_k_dense_replace", "moe_layer_freq")
    if not isinstance(kinds, list) or len(kinds) != reader.num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise CheckpointError(f"{reader.path}: mlp_layer_types is {kinds!r}, must have dense or sparse for each layer")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def _expert_groups(reader: ConfigReader) -> dict[str, int]:
    """The fields of `MoEConfig` for selection within groups; raises `CheckpointError` for impossible ones."""
    num_experts, top_k = _num_experts(reader), reader.integer("num_experts_per_tok")
    num_groups = reader.integer("n_group", default=1)
    chosen = reader.integer("topk_group", default=1)
    if num_experts % num_groups:
        raise CheckpointError(f"{reader.path}: n_group is {num_groups}, must divide n_routed_experts ({num_experts})")
    if not top_k * num_groups <= chosen * num_experts <= num_groups * num_experts:
        raise CheckpointError(
            f"{reader.path}: topk_group is {chosen}, must be at most n_group ({num_groups}) and hold "
            f"num_experts_per_tok ({top_k}) experts"
        )
    return {"num_expert_groups": num_groups, "topk_groups": chosen}


V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    read_config=read_v2_config,
    weight_names=WeightNames(places=LATENT_NAMES),
)
V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    read_config=read_v3_config,
    weight_names=WeightNames(places=LATENT_NAMES, has_extra_layers=True),
)
GLM4_MOE_LITE = Family(architecture="Glm4MoeLiteForCausalLM", read_config=read_v3_config, weight_names=V3.weight_names)
