"""Rotary position embeddings, and whatever else depends on a token's position only.

Legend: T tokens of the step, L positions, d rotated dims of a head.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from moeray.worker.models.config import TemperatureTuning
from moeray.worker.models.rope_config import RopeConfig

CosSin = tuple[torch.Tensor, torch.Tensor]


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """[d / 2] in fp32; the kinds as in transformers' `modeling_rope_utils`."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    if rope.type == "longrope":
        return 1.0 / (torch.tensor(rope.short_factor) * rope.theta**exponents)
    plain = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, plain)
    if rope.type == "yarn":
        return _yarn(rope, rope.theta**exponents)
    return plain


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched, short ones kept, and those between interpolated (Llama 3.1)."""
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = torch.where(wavelength > original / rope.low_freq_factor, plain / rope.factor, between)
    return torch.where(wavelength < original / rope.high_freq_factor, plain, stretched)


def _yarn(rope: RopeConfig, waves: torch.Tensor) -> torch.Tensor:
    """Interpolates slow dims, keeps fast ones, with a ramp between (Peng et al. 2023)."""

    def dim_of(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    span = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return 1.0 / (rope.factor * waves) * (1 - kept) + 1.0 / waves * kept


def rotary_tables(rope: RopeConfig, length: int, device: torch.device) -> CosSin:
    """cos and sin for every position, [L, d] each, fp32, with the attention factor (Su et al. 2021)."""
    angles = torch.outer(torch.arange(length).float(), inverse_frequencies(rope))
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return cos.to(device), sin.to(device)


def rotate(heads_THd: torch.Tensor, cos_T1d: torch.Tensor, sin_T1d: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding, halves layout, to the first d dims of each head."""
    dim = cos_T1d.shape[-1]
    if dim < heads_THd.shape[-1]:
        rotated = rotate(heads_THd[..., :dim], cos_T1d, sin_T1d)
        return torch.cat((rotated, heads_THd[..., dim:]), dim=-1)
    first, second = heads_THd.chunk(2, dim=-1)
    return heads_THd * cos_T1d + torch.cat((-second, first), dim=-1) * sin_T1d


def pairs_to_halves(weight: torch.Tensor, head_dim: int, dim: int) -> torch.Tensor:
    """Reorder a projection's rows so that `rotate` does what the interleaved layout means.

    Scores do not change, because queries and keys are reordered alike.
    """
    heads = weight.reshape(-1, head_dim, *weight.shape[1:])
    pairs = heads[:, :dim].reshape(len(heads), dim // 2, 2, *weight.shape[1:])
    rotated = pairs.transpose(1, 2).flatten(1, 2)
    return torch.cat((rotated, heads[:, dim:]), dim=1).flatten(0, 1)


def temperature_table(tuning: TemperatureTuning, length: int, device: torch.device) -> torch.Tensor:
    """How much queries are scaled up at every position, [L] (Llama 4)."""
    chunks = torch.floor((torch.arange(length).float() + 1.0) / tuning.floor_scale)
    return (torch.log1p(chunks) * tuning.scale + 1.0).to(device)


@dataclass(frozen=True, slots=True)
class StepPositions:
    """What attention takes of the step's positions: [T, 1, d] of each rope, [T, 1, 1] of the temperature."""

    rotary: Mapping[RopeConfig, CosSin]
    temperature_T11: torch.Tensor | None


class PositionTables:
    """Tables for all positions of all rotary embeddings that a model uses."""

    def __init__(
        self,
        ropes: Iterable[RopeConfig | None],
        temperature: TemperatureTuning | None,
        length: int,
        device: torch.device,
    ) -> None:
        distinct = {rope for rope in ropes if rope is not None}
        self._tables = {rope: rotary_tables(rope, length, device) for rope in distinct}
        self._temperature = None if temperature is None else temperature_table(temperature, length, device)

    def at(self, positions_T: torch.Tensor, dtype: torch.dtype) -> StepPositions:
        def rows(table: torch.Tensor) -> torch.Tensor:
            return table.index_select(0, positions_T).unsqueeze(1).to(dtype)

        rotary = {rope: (rows(cos), rows(sin)) for rope, (cos, sin) in self._tables.items()}
        temperature = self._temperature
        return StepPositions(rotary, None if temperature is None else rows(temperature).unsqueeze(-1))
