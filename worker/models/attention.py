"""Grouped-query attention over a paged KV cache, with bits that do not depend on the batch.

Legend: T tokens of the step, B sequences of a decode group, N keys with padding, H KV heads, G query heads per KV head,
d head dimension, P pages (blocks) of the cache, C tokens per page.

SDPA's CPU kernel splits queries and keys into tiles whose sizes follow from the shape. A row keeps its bits if the mask
is an explicit float mask, query rows come in multiples of 4, and keys are padded so that no tile ends between 193 and
383 keys (docs/exactness.md has the measurements). Page 0 is never written and pads block tables.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from moeray.worker.config import BLOCK_SIZE

ROW_MULTIPLE = 4
TILE = 512
# A decode group whose gathered keys and values fit into a core's cache is faster as one call.
GROUP_BYTES = 2 << 20


def padded_keys(num_keys: int) -> int:
    """The number of keys to attend over so that the tiles, and with them the bits, stay the same."""
    padded = -(-num_keys // BLOCK_SIZE) * BLOCK_SIZE
    in_tile = padded % TILE
    return padded - in_tile + 384 if 192 < in_tile <= 384 else padded


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take no memory on CPU until they are written: anonymous pages of the operating system."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class PagedKVCache:
    """Keys and values of all layers, [H, P, C, d] each; allocated once, zero from the start."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_kv_heads, num_blocks, BLOCK_SIZE, head_dim)
        self.keys = [lazy_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.values = [lazy_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.num_blocks = num_blocks
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self._scratch = [torch.empty(0, dtype=dtype, device=device) for _ in range(2)]

    @property
    def nbytes(self) -> int:
        return sum(page.nbytes for page in (*self.keys, *self.values))

    def write(self, layer: int, keys_THd: torch.Tensor, values_THd: torch.Tensor, slots_T: torch.Tensor) -> None:
        """Store the step's keys and values at their slots (block * C + offset)."""
        flat = (self.num_kv_heads, self.num_blocks * BLOCK_SIZE, self.head_dim)
        self.keys[layer].view(flat).index_copy_(1, slots_T, keys_THd.transpose(0, 1))
        self.values[layer].view(flat).index_copy_(1, slots_T, values_THd.transpose(0, 1))

    def read_block(self, block: int) -> bytes:
        """A block's keys and values of all layers, in one piece."""
        pages = torch.stack([page[:, block] for page in (*self.keys, *self.values)])
        return pages.cpu().view(torch.uint8).numpy().tobytes()

    def write_block(self, block: int, payload: bytes) -> None:
        """Store what `read_block` of an equal cache gave. Raises `ValueError` if the size is another."""
        num_layers = len(self.keys)
        shape = (2 * num_layers, self.num_kv_heads, BLOCK_SIZE, self.head_dim)
        expected = 2 * num_layers * self.num_kv_heads * BLOCK_SIZE * self.head_dim * self.keys[0].element_size()
        if len(payload) != expected:
            raise ValueError(f"a KV block has {len(payload)} bytes, must have {expected}")
        pages = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(self.keys[0].dtype).view(shape)
        for page, target in zip(pages, (*self.keys, *self.values), strict=True):
            target[:, block].copy_(page)

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these blocks in a row, [H, len(blocks) * C, d]; valid until the next call."""
        num_keys = len(blocks) * BLOCK_SIZE
        size = self.num_kv_heads * num_keys * self.head_dim
        if self._scratch[0].numel() < size:
            grown = 1 << (size - 1).bit_length()
            self._scratch = [scratch.new_empty(grown) for scratch in self._scratch]
        out = []
        for cache, scratch in zip((self.keys[layer], self.values[layer]), self._scratch, strict=True):
            pages = cache.view(self.num_kv_heads, self.num_blocks, -1)
            target = scratch[:size].view(self.num_kv_heads, len(blocks), -1)
            torch.index_select(pages, 1, blocks, out=target)
            out.append(target.view(self.num_kv_heads, num_keys, self.head_dim))
        return out[0], out[1]


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
class AttentionPlan:
    """What attention needs to know about a step; made once and used by every layer."""

    decode_groups: list[DecodeGroup]
    prefills: list[PrefillSegment]


def padded_table(block_table: Sequence[int], num_keys: int) -> list[int]:
    """The blocks that hold the first `num_keys` keys, padded with page 0 to `padded_keys`."""
    used = -(-num_keys // BLOCK_SIZE)
    return list(block_table[:used]) + [0] * (padded_keys(num_keys) // BLOCK_SIZE - used)


def _mask(num_keys: int, last_keys: "npt.NDArray[np.int64]") -> torch.Tensor:
    """[rows, num_keys]: 0 up to each row's last key, -inf behind it. numpy is ten times faster at this size."""
    hidden = np.arange(num_keys) > last_keys[:, None]
    return torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0.0)))


def decode_group(start: int, tables: Sequence[Sequence[int]], num_keys: Sequence[int]) -> DecodeGroup:
    """Plan rows from `start` on, one per block table, each with its number of keys."""
    num_padded = padded_keys(max(num_keys))
    blocks: list[int] = []
    for table, count in zip(tables, num_keys, strict=True):
        used = -(-count // BLOCK_SIZE)
        blocks.extend(table[:used])
        blocks.extend([0] * (num_padded // BLOCK_SIZE - used))
    mask = _mask(num_padded, np.array(num_keys) - 1)
    return DecodeGroup(start, start + len(tables), torch.tensor(blocks), mask[:, None, None, :])


def prefill_segment(start: int, num_tokens: int, num_computed: int, table: Sequence[int]) -> PrefillSegment:
    """Plan a chunk of `num_tokens` that follows `num_computed` tokens of its sequence."""
    num_keys = num_computed + num_tokens
    num_rows = -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
    last_keys = np.minimum(np.arange(num_computed, num_computed + num_rows), num_keys - 1)
    mask = _mask(padded_keys(num_keys), last_keys)
    blocks = torch.tensor(padded_table(table, num_keys))
    return PrefillSegment(start, start + num_tokens, blocks, mask[None, None])


def plan_to(plan: AttentionPlan, device: torch.device, dtype: torch.dtype) -> AttentionPlan:
    """The plan with its tensors on the device and masks in the query's type."""
    return AttentionPlan(
        [DecodeGroup(g.start, g.end, g.blocks.to(device), g.mask.to(device, dtype)) for g in plan.decode_groups],
        [PrefillSegment(p.start, p.end, p.blocks.to(device), p.mask.to(device, dtype)) for p in plan.prefills],
    )


def paged_attention(
    layer: int, query_THGd: torch.Tensor, cache: PagedKVCache, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """Attention output [T, H, G, d]; the step's own keys and values must have been written."""
    out_THGd = torch.empty_like(query_THGd)
    for group in plan.decode_groups:
        out_THGd[group.start : group.end] = _decode(layer, query_THGd, cache, group, scale)
    for segment in plan.prefills:
        out_THGd[segment.start : segment.end] = _prefill(layer, query_THGd, cache, segment, scale)
    return out_THGd


def _decode(
    layer: int, query_THGd: torch.Tensor, cache: PagedKVCache, group: DecodeGroup, scale: float
) -> torch.Tensor:
    query_BHGd = query_THGd[group.start : group.end]
    num_seqs, num_kv_heads, num_groups, head_dim = query_BHGd.shape
    padded = -(-num_groups // ROW_MULTIPLE) * ROW_MULTIPLE
    if padded != num_groups:
        rows = query_BHGd.new_zeros((num_seqs, num_kv_heads, padded, head_dim))
        rows[:, :, :num_groups] = query_BHGd
        query_BHGd = rows
    keys, values = cache.gather(layer, group.blocks)
    shape = (num_kv_heads, num_seqs, -1, head_dim)
    out_BHGd = F.scaled_dot_product_attention(
        query_BHGd,
        keys.view(shape).transpose(0, 1),
        values.view(shape).transpose(0, 1),
        attn_mask=group.mask,
        scale=scale,
    )
    return out_BHGd[:, :, :num_groups]


def _prefill(
    layer: int, query_THGd: torch.Tensor, cache: PagedKVCache, segment: PrefillSegment, scale: float
) -> torch.Tensor:
    chunk_THGd = query_THGd[segment.start : segment.end]
    num_tokens, num_kv_heads, num_groups, head_dim = chunk_THGd.shape
    rows_HGTd = chunk_THGd.new_zeros((num_kv_heads, num_groups, segment.mask.shape[2], head_dim))
    rows_HGTd[:, :, :num_tokens] = chunk_THGd.permute(1, 2, 0, 3)
    keys, values = cache.gather(layer, segment.blocks)
    shape = (num_kv_heads, num_groups, keys.shape[1], head_dim)
    out_HGTd = F.scaled_dot_product_attention(
        rows_HGTd,
        keys.unsqueeze(1).expand(shape),
        values.unsqueeze(1).expand(shape),
        attn_mask=segment.mask,
        scale=scale,
    )
    return out_HGTd[:, :, :num_tokens].permute(2, 0, 1, 3)
