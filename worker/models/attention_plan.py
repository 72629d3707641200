"""What attention needs to know about a step, made once for all layers: which pages to gather, and who sees which key.

Legend: T tokens of the step, B sequences of a decode group, N keys with padding, P pages (blocks) of the cache.

SDPA's CPU kernel splits queries and keys into tiles whose sizes follow from the shape. A row keeps its bits if the mask
is an explicit float mask, query rows come in multiples of 4, and keys are padded so that no tile ends between 193 and
383 keys (docs/exactness.md has the measurements). Layers with a window gather from the start of the tile, counted from
the sequence's start, that holds the first key that is seen, so that all tiles are those of a layer without one. Page 0
is never written and pads block tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moeray.worker.config import BLOCK_SIZE
from moeray.worker.models.config import KeyWindow

ROW_MULTIPLE = 4
TILE = 512
# A decode group whose gathered keys and values fit into a core's cache is faster as one call.
GROUP_BYTES = 2 << 20

Table = Sequence[int]


def padded_keys(num_keys: int) -> int:
    """The number of keys to attend over so that the tiles, and with them the bits, stay the same."""
    padded = -(-num_keys // BLOCK_SIZE) * BLOCK_SIZE
    in_tile = padded % TILE
    return padded - in_tile + 384 if 192 < in_tile <= 384 else padded


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences that decode one token each and attend in one call: rows [start, end) of the step.

    `blocks` are the padded block tables one after another; `mask` is [B, 1, 1, N], 0 or -inf.
    """

    start: int
    end: int
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """A chunk of one sequence's prompt: rows [start, end) of the step; `mask` is [1, 1, T padded, N]."""

    start: int
    end: int
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The step for all layers with one window."""

    decode_groups: list[DecodeGroup]
    prefills: list[PrefillSegment]


# A step's plans by window, None for layers that see all keys.
AttentionPlan = Mapping[KeyWindow | None, WindowPlan]


def first_gathered_key(position: int, window: KeyWindow | None) -> int:
    """Where gathering starts for a query at this position: at a tile's start."""
    return 0 if window is None else window.first_key(position) // TILE * TILE


def _mask(num_keys: int, last_keys: "npt.NDArray[np.int64]") -> torch.Tensor:
    """[rows, num_keys]: 0 up to each row's last key, -inf behind it. numpy is ten times faster at this size."""
    hidden = np.arange(num_keys) > last_keys[:, None]
    return torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0.0)))


def _window_mask(
    num_keys: int, last_keys: "npt.NDArray[np.int64]", starts: "npt.NDArray[np.int64]", window: KeyWindow | None
) -> torch.Tensor:
    """Like `_mask`, for rows whose keys begin at `starts`, and -inf before each row's window."""
    if window is None:
        return _mask(num_keys, last_keys)
    first_keys = np.array([window.first_key(int(last)) for last in last_keys])
    keys = np.arange(num_keys) + starts[:, None]
    hidden = (keys > last_keys[:, None]) | (keys < first_keys[:, None])
    return torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0.0)))


def _blocks(table: Table, start: int, num_keys: int, num_padded: int) -> list[int]:
    """The blocks from key `start` up to `num_keys`, padded with page 0 to `num_padded` keys."""
    blocks = list(table[start // BLOCK_SIZE : -(-num_keys // BLOCK_SIZE)])
    return blocks + [0] * (num_padded // BLOCK_SIZE - len(blocks))


def decode_group(
    start: int, tables: Sequence[Table], num_keys: Sequence[int], window: KeyWindow | None = None
) -> DecodeGroup:
    """Plan rows from `start` on, one per block table, each with its number of keys."""
    starts = [first_gathered_key(count - 1, window) for count in num_keys]
    num_padded = padded_keys(max(count - first for count, first in zip(num_keys, starts, strict=True)))
    blocks: list[int] = []
    for table, count, first in zip(tables, num_keys, starts, strict=True):
        blocks.extend(_blocks(table, first, count, num_padded))
    mask = _window_mask(num_padded, np.array(num_keys) - 1, np.array(starts), window)
    return DecodeGroup(start, start + len(tables), torch.tensor(blocks), mask[:, None, None, :])


def prefill_segment(
    start: int, num_tokens: int, num_computed: int, table: Table, window: KeyWindow | None = None
) -> PrefillSegment:
    """Plan a chunk of `num_tokens` that follows `num_computed` tokens of its sequence."""
    num_keys = num_computed + num_tokens
    num_rows = -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
    last_keys = np.minimum(np.arange(num_computed, num_computed + num_rows), num_keys - 1)
    first = first_gathered_key(num_computed, window)
    num_padded = padded_keys(num_keys - first)
    mask = _window_mask(num_padded, last_keys, np.full(num_rows, first), window)
    blocks = torch.tensor(_blocks(table, first, num_keys, num_padded))
    return PrefillSegment(start, start + num_tokens, blocks, mask[None, None])


def decode_groups(
    tables: Sequence[Table], num_keys: Sequence[int], bytes_per_key: int, window: KeyWindow | None
) -> list[DecodeGroup]:
    """Cut sequences, sorted by context length, into groups whose padded keys and values fit into `GROUP_BYTES`."""
    gathered = [count - first_gathered_key(count - 1, window) for count in num_keys]
    groups: list[DecodeGroup] = []
    start, most = 0, max(gathered[:1], default=0)
    for end in range(1, len(tables) + 1):
        following = gathered[end] if end < len(tables) else 0
        most = max(most, following)
        if end == len(tables) or (end + 1 - start) * padded_keys(most) * bytes_per_key > GROUP_BYTES:
            groups.append(decode_group(start, tables[start:end], num_keys[start:end], window))
            start, most = end, following
    return groups


def plan_to(plan: WindowPlan, device: torch.device, dtype: torch.dtype) -> WindowPlan:
    """The plan with its tensors on the device and masks in the query's type."""
    return WindowPlan(
        [DecodeGroup(g.start, g.end, g.blocks.to(device), g.mask.to(device, dtype)) for g in plan.decode_groups],
        [PrefillSegment(p.start, p.end, p.blocks.to(device), p.mask.to(device, dtype)) for p in plan.prefills],
    )
