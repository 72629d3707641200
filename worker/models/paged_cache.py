"""The memory of keys and values: pages (blocks) of all layers, whose shapes may differ from layer to layer.

Legend: H KV heads, P pages (blocks) of the cache, C tokens per page, d key dimension, e value dimension, N keys.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeray.worker.config import BLOCK_SIZE
from moeray.worker.models.config import KeyWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What a layer keeps of each token, and which keys its queries see.

    `value_dim` 0: no values are kept, because they are a slice of the keys.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: KeyWindow | None = None

    @property
    def numbers_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take no memory on CPU until they are written: anonymous pages of the operating system."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class PagedKVCache:
    """Keys [H, P, C, d] and values [H, P, C, e] of each layer; allocated once, zero from the start."""

    def __init__(
        self, shapes: Sequence[CacheShape], *, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = tuple(shapes)
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.device = device
        self.keys, self.values = (
            [
                lazy_zeros((shape.num_kv_heads, num_blocks, BLOCK_SIZE, dim), dtype, device)
                for shape, dim in zip(self.shapes, dims, strict=True)
            ]
            for dims in ([shape.key_dim for shape in self.shapes], [shape.value_dim for shape in self.shapes])
        )
        self._scratch = [torch.empty(0, dtype=dtype, device=device) for _ in range(2)]

    @property
    def nbytes(self) -> int:
        return sum(page.nbytes for page in (*self.keys, *self.values))

    def bytes_per_key(self, window: KeyWindow | None) -> int:
        """The most that a layer with this window gathers for one key."""
        sizes = [shape.numbers_per_token for shape in self.shapes if shape.window == window]
        return max(sizes, default=0) * self.dtype.itemsize

    def write(self, layer: int, keys_THd: torch.Tensor, values_THe: torch.Tensor | None, slots_T: torch.Tensor) -> None:
        """Store the step's keys and values at their slots (block * C + offset); no values where none are kept."""
        _flat(self.keys[layer]).index_copy_(1, slots_T, keys_THd.transpose(0, 1))
        if values_THe is not None:
            _flat(self.values[layer]).index_copy_(1, slots_T, values_THe.transpose(0, 1))

    def read_block(self, block: int) -> bytes:
        """A block's keys and values of all layers, in one piece."""
        pages = torch.cat([page[:, block].reshape(-1) for page in (*self.keys, *self.values)])
        return pages.cpu().view(torch.uint8).numpy().tobytes()

    def write_block(self, block: int, payload: bytes) -> None:
        """Store what `read_block` of an equal cache gave. Raises `ValueError` if the size is another."""
        targets = [page[:, block] for page in (*self.keys, *self.values)]
        expected = sum(target.numel() for target in targets) * self.dtype.itemsize
        if len(payload) != expected:
            raise ValueError(f"a KV block has {len(payload)} bytes, must have {expected}")
        flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(self.dtype)
        for target, part in zip(targets, torch.split(flat, [target.numel() for target in targets]), strict=True):
            target.copy_(part.view(target.shape))

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these blocks in a row, [H, N, d] and [H, N, e]; valid until the next call.

        Where a layer keeps no values, the keys come in their place.
        """
        keys = self._gather(0, self.keys[layer], blocks)
        return keys, keys if self.shapes[layer].value_dim == 0 else self._gather(1, self.values[layer], blocks)

    def _gather(self, which: int, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        num_kv_heads, _, _, dim = cache.shape
        num_keys = len(blocks) * BLOCK_SIZE
        size = num_kv_heads * num_keys * dim
        if self._scratch[which].numel() < size:
            self._scratch[which] = self._scratch[which].new_empty(1 << (size - 1).bit_length())
        target = self._scratch[which][:size].view(num_kv_heads, len(blocks), -1)
        torch.index_select(cache.view(num_kv_heads, self.num_blocks, -1), 1, blocks, out=target)
        return target.view(num_kv_heads, num_keys, dim)


def _flat(cache_HPCd: torch.Tensor) -> torch.Tensor:
    return cache_HPCd.view(cache_HPCd.shape[0], -1, cache_HPCd.shape[3])
