"""What a model is, in the system's own terms. No torch here: the command line reads it too."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from moeray.comm.errors import CheckpointError
from moeray.worker.models.rope_config import RopeConfig
from moeray.worker.moe.quant.checkpoint import QuantizedCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The expert layers of a model; `layers` are the model's layers that have experts, in order.

    `scoring` turns router logits into scores; `renormalize` scales the selected weights to a sum of 1. `routing` names
    a function of `moe/routing_functions.py` instead, which takes `router_jitter`. `selection_bias` is added to scores
    for the selection only. `weights_on_input` scales an expert's input instead of its output.
    """

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool = False
    activation: str = "silu"
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    routing: str | None = None
    router_jitter: float = 0.0
    num_expert_groups: int = 1
    topk_groups: int = 1
    routed_scaling_factor: float = 1.0
    router_bias: bool = False
    router_fp32: bool = False
    selection_bias: bool = False
    weights_on_input: bool = False
    expert_bias: bool = False
    shared_intermediate_size: int = 0
    shared_gated: bool = False

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise CheckpointError(f"num_experts is {self.num_experts}, must be at least 1")
        if not 1 <= self.top_k <= self.num_experts:
            raise CheckpointError(f"num_experts_per_tok is {self.top_k}, must be from 1 to {self.num_experts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the rest of the system needs to know of a model that it serves.

    `quantization` is None if weights are in floating point, or in a form that only the family's own weight names know.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    checkpoint_dtype: str
    moe: MoEConfig
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    quantization: QuantizedCheckpoint | None = None

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe.layers)

    @property
    def num_experts(self) -> int:
        return self.moe.num_experts


@dataclass(frozen=True, slots=True)
class KeyWindow:
    """Which keys up to its own a query sees: the last `size`, or, if chunked, those in its own chunk of `size`."""

    size: int
    is_chunked: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise CheckpointError(f"an attention window is {self.size}, must be at least 1")

    def first_key(self, position: int) -> int:
        """The first key that a query at this position sees."""
        return position // self.size * self.size if self.is_chunked else max(0, position - self.size + 1)


@dataclass(frozen=True, slots=True)
class TemperatureTuning:
    """Queries at far positions are scaled up: 1 + scale * log(1 + floor((position + 1) / floor_scale))."""

    floor_scale: float
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """What may differ from layer to layer: rotary embedding (None: none) and window (None: all keys)."""

    rope: RopeConfig | None
    window: KeyWindow | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryConfig:
    """Grouped-query attention. `layers` has an entry for each layer of the decoder.

    `qk_norm`: of each head, of all heads of a projection together (`full`), or the root mean square without a weight
    after the rotary embedding (`l2`). `scale` None is 1 / sqrt(head_dim). Temperature tuning: in layers without rope.
    """

    layers: tuple[LayerAttention, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "full", "l2"] | None = None
    sinks: bool = False
    clip_qkv: float | None = None
    scale: float | None = None
    temperature: TemperatureTuning | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads is {self.num_heads}, must be a multiple of num_key_value_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim is {self.head_dim}, must be even for rotary embeddings")

    @property
    def num_groups(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention; dims and ranks are named as in DeepSeek's configs. `layers` is as above.

    A head's query and key have `qk_nope_head_dim` dims that are not rotated, then `qk_rope_head_dim` that are. Without
    `q_lora_rank` queries are projected in one step.
    """

    temperature: ClassVar[None] = None

    layers: tuple[LayerAttention, ...]
    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    q_lora_rank: int | None
    scale: float

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A native decoder's sizes and choices. `moe.layers` have experts, the other layers a dense MLP."""

    attention: GroupedQueryConfig | LatentAttentionConfig
    norm_eps: float
    norm: Literal["rms", "layer"] = "rms"
    tie_word_embeddings: bool = False
    lm_head_bias: bool = False
    dense_intermediate_size: int = 0
    dense_activation: str = "silu"
