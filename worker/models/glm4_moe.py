"""GLM-4 MoE: sigmoid scores in groups, a bias for the selection, shared experts, dense first layers, partial rope."""

from moeray.worker.models.config import DecoderConfig, GroupedQueryConfig, LayerAttention, MoEConfig
from moeray.worker.models.config_reader import ConfigReader
from moeray.worker.models.family import Family
from moeray.worker.models.weight_names import WeightNames


def read_config(reader: ConfigReader) -> DecoderConfig:
    """Map a Glm4MoeConfig; raises `CheckpointError` by field for what is not implemented."""
    reader.get("num_nextn_predict_layers", "num_mtp_layers")  # layers behind the last, which are not used
    heads = reader.heads()
    rope = reader.rope(heads["head_dim"], default_partial=0.5, may_be_partial=True)
    expert_size = reader.integer("moe_intermediate_size")
    return DecoderConfig(
        **reader.common(norm_eps=1e-5),
        attention=GroupedQueryConfig(
            **heads,
            layers=(LayerAttention(rope=rope),) * reader.num_layers,
            qkv_bias=reader.flag("attention_bias"),
            qk_norm="head" if reader.flag("use_qk_norm") else None,
        ),
        dense_intermediate_size=reader.integer("intermediate_size"),
        dense_activation=reader.activation(),
        moe=MoEConfig(
            layers=tuple(range(reader.integer("first_k_dense_replace", default=1, low=0), reader.num_layers)),
            **reader.experts("n_routed_experts", "num_local_experts"),
            intermediate_size=expert_size,
            renormalize=reader.flag("norm_topk_prob", default=True),
            scoring="sigmoid",
            num_expert_groups=reader.integer("n_group", default=1),
            topk_groups=reader.integer("topk_group", default=1),
            routed_scaling_factor=reader.number("routed_scaling_factor", default=1.0),
            router_fp32=True,
            selection_bias=True,
            shared_intermediate_size=expert_size * reader.integer("n_shared_experts", default=1),
        ),
    )


FAMILY = Family(
    architecture="Glm4MoeForCausalLM", read_config=read_config, weight_names=WeightNames(has_extra_layers=True)
)
