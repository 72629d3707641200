"""Reading a checkpoint's config.json. No torch here: the command line reads it too.

Every key of config.json must be accounted for: used by the family, known not to change the mathematics, or refused by
name. A silently ignored field is a silently wrong text.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeray.comm.errors import CheckpointError
from moeray.worker.models.config import KeyWindow
from moeray.worker.models.json_object import read_object
from moeray.worker.models.rope_config import (
    ROPE_TYPES,
    RopeConfig,
    longrope_attention_factor,
    yarn_attention_factor,
)

# Keys that transformers writes into every config.json and that inference does not depend on.
NEUTRAL_KEYS = frozenset(
    [
        "architectures",
        "attention_dropout",
        "auto_map",
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


# Activations that transformers may name and that are implemented.
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


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

    def number(self, *names: str, default: float | None = None) -> float:
        """A required number; raises `CheckpointError` naming the key."""
        return self._number(names[0], self.get(*names, default=default))

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.path}: {name} is {value!r}, must be a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false; raises `CheckpointError` naming the key."""
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {name} is {value!r}, must be true or false")
        return value

    def common(self, *, norm_eps: float, tied: bool = False) -> dict[str, Any]:
        """The fields of `DecoderConfig` that all families have, with the family's defaults."""
        return {
            "architecture": self.raw["architectures"][0],
            "num_layers": self.num_layers,
            "hidden_size": self.integer("hidden_size"),
            "vocab_size": self.integer("vocab_size"),
            "max_position_embeddings": self.integer("max_position_embeddings", low=2),
            "checkpoint_dtype": str(self.get("dtype", "torch_dtype", default="float32")),
            "norm_eps": self.number("rms_norm_eps", default=norm_eps),
            "tie_word_embeddings": self.flag("tie_word_embeddings", default=tied),
            "eos_token_ids": self.eos_token_ids(),
            "bos_token_id": self.raw.get("bos_token_id"),
        }

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers")

    def heads(self) -> dict[str, Any]:
        """Numbers of heads, and their size."""
        num_heads = self.integer("num_attention_heads")
        return {
            "num_heads": num_heads,
            "num_kv_heads": self.integer("num_key_value_heads", default=num_heads),
            "head_dim": self.integer("head_dim", default=self.integer("hidden_size") // num_heads),
        }

    def experts(self, *names: str) -> dict[str, Any]:
        """How many experts there are, by the first of these keys that is there, how many a token has, and what is
        between their projections.
        """
        return {
            "num_experts": self.integer(*names),
            "top_k": self.integer("num_experts_per_tok"),
            "activation": self.activation(),
        }

    def activation(self) -> str:
        """The activation of experts and dense layers."""
        self.require("hidden_act", *ACTIVATIONS)
        return str(self.get("hidden_act", default="silu"))

    def window(self, name: str = "sliding_window", *, is_chunked: bool = False) -> KeyWindow | None:
        """The attention window of this key, None if it is absent or null."""
        return None if self.get(name) is None else KeyWindow(self.integer(name), is_chunked)

    def layer_types(self, *supported: str) -> list[str] | None:
        """The kind of attention of each layer, None if the config leaves it to the family."""
        types = self.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list) or len(types) != self.num_layers or not set(types) <= set(supported):
            raise CheckpointError(
                f"{self.path}: layer_types is {types!r}, must have one of {', '.join(supported)} for each layer"
            )
        return types

    def rope(
        self,
        head_dim: int,
        *,
        default_theta: float = 10000.0,
        default_partial: float = 1.0,
        may_be_partial: bool = False,
        interleaved: bool = False,
    ) -> RopeConfig:
        """The rotary embedding, in either of transformers' layouts; unknown kinds and parameters are refused by name.

        `default_partial` is the family's share of dims that are rotated; `may_be_partial` lets the config say another.
        """
        parameters = dict(self.get("rope_parameters", "rope_scaling", default={}))
        kind = parameters.pop("rope_type", parameters.pop("type", "default"))
        parameters.pop("type", None)
        if kind not in ROPE_TYPES:
            raise CheckpointError(
                f"{self.path}: rope_type is {kind!r}, which is not implemented (supported: {', '.join(ROPE_TYPES)})"
            )
        theta = self._first("rope_theta", parameters.pop("rope_theta", None), self.get("rope_theta"), default_theta)
        partial = self._first(
            "partial_rotary_factor",
            parameters.pop("partial_rotary_factor", None),
            self.get("partial_rotary_factor"),
            default_partial,
        )
        if partial != default_partial and not may_be_partial:
            raise CheckpointError(f"{self.path}: partial_rotary_factor is {partial}, which is not implemented")
        fields = self._scaling(kind, parameters)
        if parameters:
            raise CheckpointError(f"{self.path}: rope_parameters has {sorted(parameters)}, which are not implemented")
        dim = int(head_dim * partial)
        if not 0 < dim <= head_dim or dim % 2:
            raise CheckpointError(f"{self.path}: partial_rotary_factor {partial} rotates {dim} of {head_dim} dims")
        return RopeConfig(type=kind, theta=theta, dim=dim, interleaved=interleaved, **fields)

    def _first(self, name: str, *values: Any) -> float:
        return self._number(name, next(value for value in values if value is not None))

    def _scaling(self, kind: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """The fields of `RopeConfig` that only this kind has; takes what it uses out of `parameters`."""

        def take(name: str, default: float | None = None) -> float:
            value = parameters.pop(name, None)
            return self._number(f"rope_parameters.{name}", default if value is None else value)

        if kind == "default":
            return {}
        if kind == "linear":
            return {"factor": take("factor")}
        longest = self.integer("max_position_embeddings", low=2)
        known = self.get("original_max_position_embeddings", default=longest)
        original = int(take("original_max_position_embeddings", known))
        fields: dict[str, Any] = {"original_max_position_embeddings": original}
        fields["factor"] = factor = take("factor", longest / original)
        if kind == "llama3":
            return {
                **fields,
                "low_freq_factor": take("low_freq_factor"),
                "high_freq_factor": take("high_freq_factor"),
            }
        if kind == "yarn":
            return {
                **fields,
                "attention_factor": yarn_attention_factor(parameters, factor),
                "beta_fast": take("beta_fast", 32.0),
                "beta_slow": take("beta_slow", 1.0),
                "truncate": bool(parameters.pop("truncate", True)),
            }
        parameters.pop("long_factor", None)
        parameters.pop("long_mscale", None)
        short_mscale = parameters.pop("short_mscale", None)
        inferred = longrope_attention_factor(parameters, factor, original)
        return {
            **fields,
            "attention_factor": inferred if short_mscale is None else self._number("short_mscale", short_mscale),
            "short_factor": tuple(float(value) for value in parameters.pop("short_factor", ())),
        }

    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of config.json, joined with generation_config.json's."""
        ids: list[int] = []
        generation = self.path.parent / "generation_config.json"
        extra = read_object(generation) if generation.is_file() else {}
        for path, value in ((generation, extra.get("eos_token_id")), (self.path, self.raw.get("eos_token_id"))):
            given = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in given):
                raise CheckpointError(f"{path}: eos_token_id is {value!r}, must be a token id or a list of them")
            ids.extend(given)
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
    return read_object(path), path
