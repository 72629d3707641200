"""What a checkpoint's config.json says, in the decoder's own terms. No torch here: the command line reads it too.

Every key of config.json must be accounted for: used by the family, known not to change the mathematics, or refused by
name. A silently ignored field is a silently wrong text.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moeray.comm.errors import CheckpointError

# Keys that transformers writes into every config.json and that inference does not depend on.
NEUTRAL_KEYS = frozenset(
    [
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "torch_dtype",
        "transformers_version",
        "unsloth_version",
        "use_cache",
        "_name_or_path",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The expert layers of a decoder; `layers` are the decoder layers that have experts, in order.

    `scoring` turns router logits into scores; `renormalize` scales the selected weights to a sum of 1.
    """

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    activation: str = "silu"
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    num_expert_groups: int = 1
    topk_groups: int = 1
    routed_scaling_factor: float = 1.0
    shared_intermediate_size: int = 0

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise CheckpointError(f"num_experts is {self.num_experts}, must be at least 1")
        if not 1 <= self.top_k <= self.num_experts:
            raise CheckpointError(f"num_experts_per_tok is {self.top_k}, must be from 1 to {self.num_experts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder's sizes and choices. `moe.layers` have experts, the other layers a dense MLP."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    dense_intermediate_size: int
    dense_activation: str
    checkpoint_dtype: str
    moe: MoEConfig
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

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

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe.layers)

    @property
    def num_experts(self) -> int:
        return self.moe.num_experts


class ConfigReader:
    """Reads keys of a config.json by name and remembers which, so that `finish` can refuse the rest."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self.raw = raw
        self.path = path
        self.used: set[str] = set()

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these keys that is present and not null, else `default`."""
        self.used.update(names)
        for name in names:
            if self.raw.get(name) is not None:
                return self.raw[name]
        return default

    def integer(self, *names: str, default: int | None = None, low: int = 1) -> int:
        """A required whole number of at least `low`; raises `CheckpointError` naming the key."""
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise CheckpointError(f"{self.path}: {names[0]} is {value!r}, must be a whole number of at least {low}")
        return value

    def require(self, name: str, *allowed: Any) -> None:
        """The key must be absent or one of `allowed`: any other value changes the mathematics."""
        self.used.add(name)
        if name in self.raw and self.raw[name] not in allowed:
            raise CheckpointError(
                f"{self.path}: {name} is {self.raw[name]!r}, which is not implemented "
                f"(supported: {', '.join(repr(value) for value in allowed)})"
            )

    def rope_theta(self) -> float:
        """Theta of the default rotary embedding, in either of transformers' layouts; other kinds are refused."""
        parameters = dict(self.get("rope_parameters", "rope_scaling", default={}) or {})
        kind = parameters.pop("rope_type", parameters.pop("type", "default"))
        if kind != "default":
            raise CheckpointError(
                f"{self.path}: rope_type is {kind!r}, which is not implemented (supported: 'default')"
            )
        theta = parameters.pop("rope_theta", None)
        top_level = self.get("rope_theta")
        partial = parameters.pop("partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise CheckpointError(f"{self.path}: partial_rotary_factor is {partial}, which is not implemented")
        if parameters:
            raise CheckpointError(f"{self.path}: rope_parameters has {sorted(parameters)}, which are not implemented")
        return float(theta if theta is not None else top_level if top_level is not None else 10000.0)

    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of config.json, joined with generation_config.json's."""
        ids: list[int] = []
        generation = self.path.parent / "generation_config.json"
        extra = json.loads(generation.read_text()) if generation.is_file() else {}
        for value in (extra.get("eos_token_id"), self.raw.get("eos_token_id")):
            ids.extend(value if isinstance(value, list) else [] if value is None else [value])
        return tuple(dict.fromkeys(ids))

    def finish(self) -> None:
        """Raises `CheckpointError` naming every key that nobody accounted for."""
        unknown = sorted(key for key in set(self.raw) - self.used - NEUTRAL_KEYS if self.raw[key] not in (None, False))
        if unknown:
            raise CheckpointError(
                f"{self.path}: fields that {self.raw.get('architectures')} does not implement: "
                + ", ".join(f"{key}={self.raw[key]!r}" for key in unknown)
            )


def read_raw_config(model_path: str | Path) -> tuple[dict[str, Any], Path]:
    """config.json of a checkpoint directory; raises `CheckpointError` if it is missing or no JSON object."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: {model_path} is no checkpoint directory")
    try:
        raw = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, must hold an object")
    return raw, path
