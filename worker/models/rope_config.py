"""Rotary position embeddings as a checkpoint's config.json describes them. No torch here."""

import math
from dataclasses import dataclass
from typing import Any, Literal

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """`dim` of each head's dims are rotated, the first ones. Names follow transformers' `rope_parameters`.

    `interleaved`: a pair of dims lies side by side on disk, not half a head apart. `attention_factor` multiplies cos
    and sin. `longrope` holds for positions up to `original_max_position_embeddings`, with `short_factor`.
    """

    type: RopeType
    theta: float
    dim: int
    interleaved: bool = False
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    short_factor: tuple[float, ...] = ()


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """How much YaRN sharpens attention for contexts `factor` times as long; the weight is DeepSeek's."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    """How much YaRN scales cos and sin (Peng et al. 2023; the two mscales are DeepSeek's). Takes what it uses out."""
    given = parameters.pop("attention_factor", None)
    over, under = parameters.pop("mscale", None), parameters.pop("mscale_all_dim", None)
    if given is not None:
        return float(given)
    return yarn_mscale(factor, over) / yarn_mscale(factor, under) if over and under else yarn_mscale(factor)


def longrope_attention_factor(parameters: dict[str, Any], factor: float, original_max: int) -> float:
    """How much LongRoPE scales cos and sin (Ding et al. 2024). Takes what it uses out."""
    given = parameters.pop("attention_factor", None)
    if given is not None:
        return float(given)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_max))
