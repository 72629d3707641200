"""Grouped-query attention of the native decoder.

Legend: T tokens of the step, D hidden, H KV heads, G query heads per KV head, d head dimension.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from moeray.worker.models.attention import paged_attention
from moeray.worker.models.config import DecoderConfig, GroupedQueryConfig
from moeray.worker.models.linear import RowLinear
from moeray.worker.models.model import ForwardBatch
from moeray.worker.models.norm import rms_norm
from moeray.worker.models.paged_cache import CacheShape, PagedKVCache
from moeray.worker.models.parameters import empty_parameter
from moeray.worker.models.rope import StepPositions, pairs_to_halves, rotate
from moeray.worker.models.weights import Place
from moeray.worker.moe.factory import MoEEnvironment


class GroupedQueryAttention(nn.Module):
    """One fused QKV projection, optional biases and norms, rotary embedding, sinks; all as the config says."""

    def __init__(self, config: DecoderConfig, layer: int, environment: MoEEnvironment) -> None:
        super().__init__()
        attention = config.attention
        assert isinstance(attention, GroupedQueryConfig)
        self.layer = layer
        self.config = attention
        self.eps = config.norm_eps
        self.rope = attention.layers[layer].rope
        self.linear = RowLinear(environment.row_exact)
        self.scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
        self.q_size = attention.num_heads * attention.head_dim
        self.kv_size = attention.num_kv_heads * attention.head_dim
        parameter = partial(empty_parameter, dtype=environment.dtype, device=environment.device)
        projection = partial(empty_parameter, dtype=environment.weights_dtype, device=environment.device)
        self.qkv_proj = projection(self.q_size + 2 * self.kv_size, config.hidden_size)
        self.o_proj = projection(config.hidden_size, self.q_size)
        self.qkv_bias = parameter(self.q_size + 2 * self.kv_size) if attention.qkv_bias else None
        self.o_bias = parameter(config.hidden_size) if attention.o_bias else None
        norm_sizes = {"head": (attention.head_dim, attention.head_dim), "full": (self.q_size, self.kv_size)}
        q_norm_size, k_norm_size = norm_sizes.get(attention.qk_norm or "", (0, 0))
        self.q_norm = parameter(q_norm_size) if q_norm_size else None
        self.k_norm = parameter(k_norm_size) if k_norm_size else None
        self.sinks = parameter(attention.num_heads) if attention.sinks else None

    def cache_shape(self) -> CacheShape:
        config = self.config
        return CacheShape(
            num_kv_heads=config.num_kv_heads,
            key_dim=config.head_dim,
            value_dim=config.head_dim,
            window=config.layers[self.layer].window,
        )

    def places(self) -> Iterator[Place]:
        reorder = None
        if self.rope is not None and self.rope.interleaved:
            reorder = partial(pairs_to_halves, head_dim=self.config.head_dim, dim=self.rope.dim)
        sizes = [self.q_size, self.kv_size, self.kv_size]
        for name, part in zip("qkv", torch.split(self.qkv_proj.data, sizes), strict=True):
            yield Place(f"{name}_proj", part, self.layer, None if name == "v" else reorder)
        if self.qkv_bias is not None:
            for name, part in zip("qkv", torch.split(self.qkv_bias.data, sizes), strict=True):
                yield Place(f"{name}_bias", part, self.layer, None if name == "v" else reorder)
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                yield Place(name, norm.data, self.layer, reorder)
        for name, parameter in (("o_proj", self.o_proj), ("o_bias", self.o_bias), ("sinks", self.sinks)):
            if parameter is not None:
                yield Place(name, parameter.data, self.layer)

    def forward(
        self, hidden_TD: torch.Tensor, positions: StepPositions, batch: ForwardBatch, cache: PagedKVCache
    ) -> torch.Tensor:
        config = self.config
        num_tokens = hidden_TD.shape[0]
        qkv = self.linear(hidden_TD, self.qkv_proj, self.qkv_bias)
        query, keys, values = torch.split(qkv, [self.q_size, self.kv_size, self.kv_size], dim=-1)
        if config.qk_norm == "full":
            query, keys = rms_norm(query, self.q_norm, self.eps), rms_norm(keys, self.k_norm, self.eps)
        if config.clip_qkv is not None:
            query, keys, values = (part.clamp(-config.clip_qkv, config.clip_qkv) for part in (query, keys, values))
        query = query.reshape(num_tokens, config.num_heads, config.head_dim)
        kv_shape = (num_tokens, config.num_kv_heads, config.head_dim)
        keys = keys.reshape(kv_shape)
        if config.qk_norm == "head":
            query, keys = rms_norm(query, self.q_norm, self.eps), rms_norm(keys, self.k_norm, self.eps)
        query, keys = self._place(query, keys, positions)
        cache.write(self.layer, keys, values.reshape(kv_shape), batch.slots_T)
        query_THGd = query.view(num_tokens, config.num_kv_heads, config.num_groups, config.head_dim)
        sinks = None if self.sinks is None else self.sinks.view(config.num_kv_heads, config.num_groups)
        out = paged_attention(self.layer, query_THGd, cache, batch.attention, self.scale, sinks)
        return self.linear(out.reshape(num_tokens, self.q_size), self.o_proj, self.o_bias)

    def _place(
        self, query: torch.Tensor, keys: torch.Tensor, positions: StepPositions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring the tokens' positions into queries and keys."""
        if self.rope is None:
            temperature = positions.temperature_T11
            return (query if temperature is None else query * temperature), keys
        rotary = positions.rotary[self.rope]
        query, keys = rotate(query, *rotary), rotate(keys, *rotary)
        if self.config.qk_norm == "l2":
            query, keys = rms_norm(query, None, self.eps), rms_norm(keys, None, self.eps)
        return query, keys
