"""Llama-4 (text): layers without rope, chunked attention, one expert per token whose input is weighted."""

from moeray.worker.models.config import (
    DecoderConfig,
    GroupedQueryConfig,
    LayerAttention,
    MoEConfig,
    TemperatureTuning,
)
from moeray.worker.models.config_reader import ConfigReader
from moeray.worker.models.family import Family
from moeray.worker.models.weight_names import COMMON_NAMES, LAYER, ExpertLayout, ExpertTensor, WeightNames

BLOCK = LAYER + "feed_forward."
FULL, CHUNKED = "full_attention", "chunked_attention"


def read_config(reader: ConfigReader) -> DecoderConfig:
    """Map a Llama4TextConfig; raises `CheckpointError` by field for what is not implemented."""
    reader.get("router_jitter_noise", "for_llm_compressor")
    reader.require("num_experts_per_tok", 1)
    heads = reader.heads()
    attention_bias = reader.flag("attention_bias")
    expert_size = reader.integer("intermediate_size")
    return DecoderConfig(
        **reader.common(norm_eps=1e-5),
        attention=GroupedQueryConfig(
            **heads,
            layers=_layers(reader, heads["head_dim"]),
            qkv_bias=attention_bias,
            o_bias=attention_bias,
            qk_norm="l2" if reader.flag("use_qk_norm", default=True) else None,
            temperature=_temperature(reader),
        ),
        dense_intermediate_size=reader.integer("intermediate_size_mlp"),
        dense_activation=reader.activation(),
        moe=MoEConfig(
            layers=_sparse_layers(reader),
            num_experts=reader.integer("num_local_experts", "num_experts"),
            top_k=1,
            intermediate_size=expert_size,
            activation=reader.activation(),
            scoring="sigmoid",
            weights_on_input=True,
            shared_intermediate_size=expert_size,
        ),
    )


def _layers(reader: ConfigReader, head_dim: int) -> tuple[LayerAttention, ...]:
    interval = reader.integer("no_rope_layer_interval", default=4)
    default = [int((layer + 1) % interval != 0) for layer in range(reader.num_layers)]
    has_rope = reader.get("no_rope_layers") or default
    rope = reader.rope(head_dim, default_theta=500000.0, interleaved=True)
    window = reader.window("attention_chunk_size", is_chunked=True)
    types = reader.layer_types(FULL, CHUNKED) or [CHUNKED if rotated else FULL for rotated in has_rope]
    return tuple(
        LayerAttention(rope=rope if rotated else None, window=window if kind == CHUNKED else None)
        for rotated, kind in zip(has_rope, types, strict=True)
    )


def _temperature(reader: ConfigReader) -> TemperatureTuning | None:
    floor_scale = reader.number("floor_scale", default=8192.0)
    scale = reader.number("attn_scale", default=0.1)
    return TemperatureTuning(floor_scale, scale) if reader.get("attn_temperature_tuning", default=True) else None


def _sparse_layers(reader: ConfigReader) -> tuple[int, ...]:
    step = reader.integer("interleave_moe_layer_step", default=1)
    layers = reader.get("moe_layers")
    return tuple(range(step - 1, reader.num_layers, step)) if layers is None else tuple(layers)


FUSED_TRANSPOSED: ExpertLayout = (
    ExpertTensor(
        names=(BLOCK + "experts.gate_up_proj",),
        parts=("gate", "up"),
        shapes=lambda hidden, inner: ((hidden, 2 * inner),),
        split=lambda gate_up: gate_up.t().chunk(2),
    ),
    ExpertTensor(
        names=(BLOCK + "experts.down_proj",),
        parts=("down",),
        shapes=lambda hidden, inner: ((inner, hidden),),
        split=lambda down: (down.t(),),
    ),
)
FAMILY = Family(
    architecture="Llama4ForCausalLM",
    read_config=read_config,
    weight_names=WeightNames(
        places={
            **COMMON_NAMES,
            "dense_gate": BLOCK + "gate_proj.weight",
            "dense_up": BLOCK + "up_proj.weight",
            "dense_down": BLOCK + "down_proj.weight",
            "router": BLOCK + "router.weight",
            "shared_gate": BLOCK + "shared_expert.gate_proj.weight",
            "shared_up": BLOCK + "shared_expert.up_proj.weight",
            "shared_down": BLOCK + "shared_expert.down_proj.weight",
        },
        experts=(FUSED_TRANSPOSED,),
    ),
)
