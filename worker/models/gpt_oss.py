"""gpt-oss: attention sinks, alternating sliding windows, biased experts, and checkpoints in MXFP4."""

from typing import TYPE_CHECKING

from moeray.worker.models.config import DecoderConfig, GroupedQueryConfig, LayerAttention, MoEConfig
from moeray.worker.models.config_reader import ConfigReader
from moeray.worker.models.family import Family
from moeray.worker.models.weight_names import COMMON_NAMES, LAYER, ExpertLayout, ExpertTensor, WeightNames

if TYPE_CHECKING:
    import torch

EXPERTS = LAYER + "mlp.experts."
MXFP4_BLOCK = 32
FULL, SLIDING = "full_attention", "sliding_attention"


def read_config(reader: ConfigReader) -> DecoderConfig:
    """Map a GptOssConfig; raises `CheckpointError` by field for what is not implemented."""
    reader.require("hidden_act", "silu")
    reader.require("swiglu_alpha", 1.702)
    reader.require("swiglu_limit", 7.0)
    reader.get("experts_per_token", "initial_context_length")  # repeat other fields
    heads = reader.heads()
    rope = reader.rope(heads["head_dim"], default_theta=150000.0)
    types = reader.layer_types(FULL, SLIDING) or [(SLIDING, FULL)[layer % 2] for layer in range(reader.num_layers)]
    window = reader.window()
    attention_bias = reader.flag("attention_bias", default=True)
    return DecoderConfig(
        **reader.common(norm_eps=1e-5),
        attention=GroupedQueryConfig(
            **heads,
            layers=tuple(LayerAttention(rope=rope, window=window if kind == SLIDING else None) for kind in types),
            qkv_bias=attention_bias,
            o_bias=attention_bias,
            sinks=True,
        ),
        moe=MoEConfig(
            layers=tuple(range(reader.num_layers)),
            num_experts=reader.integer("num_local_experts", "num_experts"),
            top_k=reader.integer("num_experts_per_tok"),
            intermediate_size=reader.integer("intermediate_size"),
            renormalize=True,  # equals a softmax over the selected logits
            activation="swiglu_oai",
            router_bias=True,
            expert_bias=True,
        ),
    )


def _interleaved(gate_up: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    return gate_up[0::2], gate_up[1::2]


def _decode(blocks: "torch.Tensor", scales: "torch.Tensor") -> "torch.Tensor":
    from moeray.worker.models.mxfp4 import decode_mxfp4

    return decode_mxfp4(blocks, scales)


BIASES: ExpertLayout = (
    ExpertTensor(
        names=(EXPERTS + "gate_up_proj_bias",),
        parts=("gate_bias", "up_bias"),
        shapes=lambda hidden, inner: ((2 * inner,),),  # noqa: ARG005
        split=_interleaved,
    ),
    ExpertTensor(
        names=(EXPERTS + "down_proj_bias",),
        parts=("down_bias",),
        shapes=lambda hidden, inner: ((hidden,),),  # noqa: ARG005
    ),
)
PLAIN: ExpertLayout = (
    ExpertTensor(
        names=(EXPERTS + "gate_up_proj",),
        parts=("gate", "up"),
        shapes=lambda hidden, inner: ((hidden, 2 * inner),),
        split=lambda gate_up: _interleaved(gate_up.t()),
    ),
    ExpertTensor(
        names=(EXPERTS + "down_proj",),
        parts=("down",),
        shapes=lambda hidden, inner: ((inner, hidden),),
        split=lambda down: (down.t(),),
    ),
)
MXFP4: ExpertLayout = (
    ExpertTensor(
        names=(EXPERTS + "gate_up_proj_blocks", EXPERTS + "gate_up_proj_scales"),
        parts=("gate", "up"),
        shapes=lambda hidden, inner: (
            (2 * inner, hidden // MXFP4_BLOCK, MXFP4_BLOCK // 2),
            (2 * inner, hidden // MXFP4_BLOCK),
        ),
        split=lambda blocks, scales: _interleaved(_decode(blocks, scales)),
        is_packed=True,
    ),
    ExpertTensor(
        names=(EXPERTS + "down_proj_blocks", EXPERTS + "down_proj_scales"),
        parts=("down",),
        shapes=lambda hidden, inner: (
            (hidden, inner // MXFP4_BLOCK, MXFP4_BLOCK // 2),
            (hidden, inner // MXFP4_BLOCK),
        ),
        split=lambda blocks, scales: (_decode(blocks, scales),),
        is_packed=True,
    ),
)

FAMILY = Family(
    architecture="GptOssForCausalLM",
    read_config=read_config,
    weight_names=WeightNames(
        places={
            **COMMON_NAMES,
            "router": LAYER + "mlp.router.weight",
            "router_bias": LAYER + "mlp.router.bias",
        },
        experts=(PLAIN + BIASES, MXFP4 + BIASES),
    ),
    quant_methods=("mxfp4",),
)
