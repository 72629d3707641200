"""transformers' attention interface on our paged cache.

The keyword argument `moeray` of the model's call reaches each attention layer and says what is done there: a dry run
looks at the layers (`transformers_probe.py`), a step attends over the cache.

Legend: T rows of the step, U rows with padding, Q query heads, H KV heads, G query heads per KV head, d key dimension,
e value dimension.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from moeray.worker.models.attention import paged_attention
from moeray.worker.models.config import KeyWindow
from moeray.worker.models.model import ForwardBatch
from moeray.worker.models.paged_cache import CacheShape, PagedKVCache

# Without a mask function of this name transformers makes no masks.
PAGED = "moeray_paged"


class Attends(Protocol):
    """What `moeray` may be."""

    def attend(
        self,
        module: nn.Module,
        query_1QUd: torch.Tensor,
        keys_1HUd: torch.Tensor,
        values_1HUe: torch.Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> torch.Tensor:
        """The layer's output, [1, U, Q, e]."""


def attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    moeray: Attends,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What `AttentionInterface` asks for."""
    return moeray.attend(module, query, key, value, attention_mask, **options), None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """An attention layer as the model's code uses it; `layer_idx` is the number that its module has."""

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: KeyWindow | None

    @property
    def cached_dim(self) -> int:
        """Keys and values are filled up to one size: only for that there is a fused kernel on CPU."""
        return max(self.key_dim, self.value_dim)

    def cache_shape(self) -> CacheShape:
        return CacheShape(
            num_kv_heads=self.num_kv_heads, key_dim=self.cached_dim, value_dim=self.cached_dim, window=self.window
        )


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step's attention; `layers` maps a module's number to its place in the cache and its layer."""

    batch: ForwardBatch
    cache: PagedKVCache
    layers: Mapping[int, tuple[int, AttentionLayer]]

    def attend(
        self,
        module: nn.Module,
        query_1QUd: torch.Tensor,
        keys_1HUd: torch.Tensor,
        values_1HUe: torch.Tensor,
        attention_mask: Any,  # noqa: ARG002
        *,
        scaling: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        place, layer = self.layers[module.layer_idx]  # type: ignore[index]
        num_rows, num_padded = self.batch.token_ids_T.shape[0], query_1QUd.shape[2]
        out_1UQe = query_1QUd.new_zeros((1, num_padded, layer.num_heads, layer.value_dim))
        if num_rows == 0:
            return out_1UQe
        query_TQd, keys_THd, values_THe = (
            _filled(part[0, :, :num_rows].transpose(0, 1), layer.cached_dim)
            for part in (query_1QUd, keys_1HUd, values_1HUe)
        )
        self.cache.write(place, keys_THd, values_THe, self.batch.slots_T)
        query_THGd = query_TQd.reshape(num_rows, layer.num_kv_heads, -1, layer.cached_dim)
        scale = layer.key_dim**-0.5 if scaling is None else scaling
        sinks_HG = None if s_aux is None else s_aux.reshape(layer.num_kv_heads, -1)
        out_THGe = paged_attention(place, query_THGd, self.cache, self.batch.attention, scale, sinks_HG)
        out_1UQe[0, :num_rows] = out_THGe.flatten(1, 2)[..., : layer.value_dim]
        return out_1UQe


def _filled(part: torch.Tensor, dim: int) -> torch.Tensor:
    """With zeros up to `dim` numbers, which change no product."""
    return part if part.shape[-1] == dim else F.pad(part, (0, dim - part.shape[-1]))


AttentionInterface.register(PAGED, attention_function)
