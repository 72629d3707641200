"""Filling seats while the worker serves: experts that the next epoch places here come from the checkpoint's memory map.

Only seats that the serving epoch leaves empty are written, so the serving epoch never sees it; kernels and buffers stay
as they are.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from moeray.comm.placement import EMPTY_SEAT, ExpertPlacement
from moeray.worker.loader import Checkpoint
from moeray.worker.models.model import ServedModel

# Bytes of the checkpoint that one slice copies: about a millisecond.
SLICE_BYTES = 1 << 20
# Bytes of experts that are read ahead of being copied.
GROUP_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class SeatFill:
    """An expert that has to come into a seat; `layer` counts MoE layers."""

    layer: int
    seat: int
    expert: int


def seat_fills(current: ExpertPlacement | None, following: ExpertPlacement, slot: int) -> list[SeatFill]:
    """What `slot` has to load for the following placement. Without a current one all its seats are empty.

    Raises `ValueError` if a seat would be overwritten that the current placement uses.
    """
    fills: list[SeatFill] = []
    for layer in range(following.num_layers):
        wanted = following.seats_of(layer, slot)
        held = (
            current.seats_of(layer, slot)
            if current is not None and slot in current.slots
            else (EMPTY_SEAT,) * following.num_seats
        )
        for seat, (old, new) in enumerate(zip(held, wanted, strict=True)):
            if new in (EMPTY_SEAT, old):
                continue
            if old != EMPTY_SEAT:
                raise ValueError(
                    f"layer {layer}, slot {slot}: seat {seat} holds expert {old}, expert {new} needs a free one"
                )
            fills.append(SeatFill(layer, seat, new))
    return fills


@dataclass(frozen=True, slots=True)
class FetchedExpert:
    """An expert's parts in memory, on their way into a seat."""

    fill: SeatFill
    parts: list[tuple[str, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.parts)


def fetch_experts(
    model: ServedModel, checkpoint: Checkpoint, fills: Iterable[SeatFill]
) -> Iterator[list[FetchedExpert]]:
    """Bring the experts into memory, in native calls that hold no lock: pages of a memory map, or from a peer.

    They come in groups of about `GROUP_BYTES`, because what is decoded or comes from a peer takes memory of its own.
    """
    group: list[FetchedExpert] = []
    for fill in fills:
        parts: list[tuple[str, torch.Tensor]] = []
        for source in model.expert_parts(fill.layer, fill.expert):
            tensors = checkpoint.tensors(source)
            for tensor in tensors:
                tensor.reshape(-1).view(torch.uint8)[::4096].sum()
            parts.extend(zip(source.parts, source.split(*tensors), strict=True))
        group.append(FetchedExpert(fill, parts))
        if sum(expert.nbytes for expert in group) >= GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group


def fill_seats(model: ServedModel, experts: list[FetchedExpert]) -> Iterator[None]:
    """Write the experts into their seats; yields after each slice of about a millisecond."""
    runners = model.moe_runners()
    for expert in experts:
        fill = expert.fill
        runner = runners[fill.layer]
        for part, tensor in expert.parts:
            rows = max(1, SLICE_BYTES // tensor[0].nbytes)
            for first in range(0, tensor.shape[0], rows):
                piece = tensor[first : first + rows]
                runner.quant_method.load_expert(runner.routed_experts, fill.seat, part, piece, first)
                yield
