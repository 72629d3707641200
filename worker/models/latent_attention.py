"""Multi-head latent attention with its compressed KV cache (DeepSeek-V2, arXiv 2405.04434).

The cache holds one key for all heads: the token's normed latent and its rotated part. A head's keys and values are
linear in the latent, so they are never made: `up_key` goes into the query and `up_value` comes after attention
(absorption), and values are the latent itself. Prefill does the same, so that a token's bits do not depend on how its
prompt was cut. It costs (2 * kv_lora_rank + 2 * qk_rope_head_dim) multiplications for each head, query and key, where
expanded heads would cost (qk_head_dim + v_head_dim): 3.6 times as many with DeepSeek's sizes.

Legend: T tokens of the step, D hidden, H heads, R latent, d dims of a head's query, of which r are rotated and n not, v
dims of its value, C = R + r of the cache.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from moeray.worker.models.attention import paged_attention
from moeray.worker.models.config import DecoderConfig, LatentAttentionConfig
from moeray.worker.models.linear import RowLinear
from moeray.worker.models.model import ForwardBatch
from moeray.worker.models.norm import rms_norm
from moeray.worker.models.paged_cache import CacheShape, PagedKVCache
from moeray.worker.models.parameters import empty_parameter
from moeray.worker.models.rope import StepPositions, pairs_to_halves, rotate
from moeray.worker.models.weights import Place
from moeray.worker.moe.factory import MoEEnvironment

# Latents are normed with this whatever rms_norm_eps is, in DeepSeek's code as in transformers'.
LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """`in_proj` yields the query (or its latent, if it has one), the latent and the rotated part of the key."""

    def __init__(self, config: DecoderConfig, layer: int, environment: MoEEnvironment) -> None:
        super().__init__()
        attention = config.attention
        assert isinstance(attention, LatentAttentionConfig)
        rope = attention.layers[layer].rope
        assert rope is not None
        self.layer = layer
        self.config = attention
        self.rope = rope
        self.linear = RowLinear(environment.row_exact)
        q_size = attention.num_heads * attention.qk_head_dim
        self.in_sizes = [attention.q_lora_rank or q_size, attention.kv_lora_rank, attention.qk_rope_head_dim]
        parameter = partial(empty_parameter, dtype=environment.dtype, device=environment.device)
        self.in_proj = parameter(sum(self.in_sizes), config.hidden_size)
        self.q_norm = self.q_b_proj = None
        if attention.q_lora_rank is not None:
            self.q_norm = parameter(attention.q_lora_rank)
            self.q_b_proj = parameter(q_size, attention.q_lora_rank)
        self.kv_norm = parameter(attention.kv_lora_rank)
        self.kv_b_proj = parameter(
            attention.num_heads, attention.qk_nope_head_dim + attention.v_head_dim, attention.kv_lora_rank
        )
        self.o_proj = parameter(config.hidden_size, attention.num_heads * attention.v_head_dim)

    def cache_shape(self) -> CacheShape:
        return CacheShape(
            num_kv_heads=1,
            key_dim=self.config.kv_lora_rank + self.config.qk_rope_head_dim,
            value_dim=0,
            window=self.config.layers[self.layer].window,
        )

    def places(self) -> Iterator[Place]:
        reorder_query = reorder_key = None
        if self.rope.interleaved:
            reorder_query = partial(_pairs_to_halves_behind, size=self.config.qk_head_dim, dim=self.rope.dim)
            reorder_key = partial(pairs_to_halves, head_dim=self.rope.dim, dim=self.rope.dim)
        query, latent, rope_key = torch.split(self.in_proj.data, self.in_sizes)
        if self.q_b_proj is None or self.q_norm is None:
            yield Place("q_proj", query, self.layer, reorder_query)
        else:
            yield Place("q_a_proj", query, self.layer)
            yield Place("q_a_norm", self.q_norm.data, self.layer)
            yield Place("q_b_proj", self.q_b_proj.data, self.layer, reorder_query)
        yield Place("kv_a_latent", latent, self.layer)
        yield Place("kv_a_rope", rope_key, self.layer, reorder_key)
        yield Place("kv_a_norm", self.kv_norm.data, self.layer)
        yield Place("kv_b_proj", self.kv_b_proj.data.flatten(0, 1), self.layer)
        yield Place("o_proj", self.o_proj.data, self.layer)

    def forward(
        self, hidden_TD: torch.Tensor, positions: StepPositions, batch: ForwardBatch, cache: PagedKVCache
    ) -> torch.Tensor:
        config = self.config
        rotary = positions.rotary[self.rope]
        query, latent_TR, rope_key_Tr = torch.split(self.linear(hidden_TD, self.in_proj), self.in_sizes, dim=-1)
        latent_TR = rms_norm(latent_TR, self.kv_norm, LATENT_NORM_EPS)
        keys_TC = torch.cat((latent_TR, rotate(rope_key_Tr.unsqueeze(1), *rotary).squeeze(1)), dim=-1)
        cache.write(self.layer, keys_TC.unsqueeze(1), None, batch.slots_T)
        if self.q_b_proj is not None:
            query = self.linear(rms_norm(query, self.q_norm, LATENT_NORM_EPS), self.q_b_proj)
        query_THd = query.reshape(-1, config.num_heads, config.qk_head_dim)
        query_THn, query_THr = torch.split(query_THd, [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        up_key_HnR, up_value_HvR = torch.split(self.kv_b_proj, [config.qk_nope_head_dim, config.v_head_dim], dim=1)
        query_THC = torch.cat((self.linear.per_head(query_THn, up_key_HnR), rotate(query_THr, *rotary)), dim=-1)
        out_T1HC = paged_attention(self.layer, query_THC.unsqueeze(1), cache, batch.attention, config.scale)
        out_THR = out_T1HC[:, 0, :, : config.kv_lora_rank]
        out_THv = self.linear.per_head(out_THR, up_value_HvR.transpose(1, 2))
        return self.linear(out_THv.flatten(1), self.o_proj)


def _pairs_to_halves_behind(weight: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """`pairs_to_halves` for heads of `size` rows whose last `dim` are rotated."""
    heads = weight.reshape(-1, size, weight.shape[-1])
    rotated = pairs_to_halves(heads[:, size - dim :].flatten(0, 1), dim, dim)
    return torch.cat((heads[:, : size - dim], rotated.view(len(heads), dim, -1)), dim=1).flatten(0, 1)
