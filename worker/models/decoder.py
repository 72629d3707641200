"""The native decoder: embeddings, attention and MoE or dense layers, head. Config-driven; families only map names.

Legend: T tokens of the step, S rows whose logits are wanted, D hidden, V vocabulary, H KV heads, G query heads per KV
head, d head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from moeray.comm.buffers import MoELayerSpec
from moeray.worker.models.attention import AttentionPlan, PagedKVCache, paged_attention
from moeray.worker.models.config import DecoderConfig
from moeray.worker.models.linear import RowLinear
from moeray.worker.models.parameters import empty_parameter
from moeray.worker.moe.factory import FusedMoEFactory, MoEEnvironment
from moeray.worker.moe.router import TopKRouter
from moeray.worker.moe.runner import MoERunner
from moeray.worker.moe.shared_experts import SharedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step's input. `logits_rows_S` are the rows of the step whose next token is wanted."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    logits_rows_S: torch.Tensor
    attention: AttentionPlan


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dim, computed in fp32 (Zhang and Sennrich 2019)."""
    hidden_f = hidden.float()
    scale = torch.rsqrt(hidden_f.square().mean(-1, keepdim=True) + eps)
    return (hidden_f * scale).to(hidden.dtype) * weight


def rotary_tables(config: DecoderConfig, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the default rotary embedding for every position, [length, d], fp32 (Su et al. 2021)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inverse_frequencies = 1.0 / (config.rope_theta**exponents)
    angles = torch.outer(torch.arange(length).float(), inverse_frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(device), angles.sin().to(device)


def rotate(heads_THd: torch.Tensor, cos_T1d: torch.Tensor, sin_T1d: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding, halves layout."""
    first, second = heads_THd.chunk(2, dim=-1)
    return heads_THd * cos_T1d + torch.cat((-second, first), dim=-1) * sin_T1d


class Attention(nn.Module):
    """Grouped-query attention with one fused QKV projection and optional norms of each head."""

    def __init__(self, config: DecoderConfig, layer: int, environment: MoEEnvironment) -> None:
        super().__init__()
        self.layer = layer
        self.config = config
        self.linear = RowLinear(environment.row_exact)
        self.scale = config.head_dim**-0.5
        self.q_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        parameter = partial(empty_parameter, dtype=environment.dtype, device=environment.device)
        self.qkv_proj = parameter(self.q_size + 2 * self.kv_size, config.hidden_size)
        self.o_proj = parameter(config.hidden_size, self.q_size)
        self.qkv_bias = parameter(self.q_size + 2 * self.kv_size) if config.attention_bias else None
        self.o_bias = parameter(config.hidden_size) if config.attention_bias else None
        self.q_norm = parameter(config.head_dim) if config.qk_norm else None
        self.k_norm = parameter(config.head_dim) if config.qk_norm else None

    def forward(
        self,
        hidden_TD: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        cache: PagedKVCache,
    ) -> torch.Tensor:
        config = self.config
        num_tokens = hidden_TD.shape[0]
        qkv = self.linear(hidden_TD, self.qkv_proj, self.qkv_bias)
        query, keys, values = torch.split(qkv, [self.q_size, self.kv_size, self.kv_size], dim=-1)
        query = query.reshape(num_tokens, config.num_heads, config.head_dim)
        kv_shape = (num_tokens, config.num_kv_heads, config.head_dim)
        keys = keys.reshape(kv_shape)
        if self.q_norm is not None and self.k_norm is not None:
            query = rms_norm(query, self.q_norm, config.rms_norm_eps)
            keys = rms_norm(keys, self.k_norm, config.rms_norm_eps)
        query, keys = rotate(query, *rotary), rotate(keys, *rotary)
        cache.write(self.layer, keys, values.reshape(kv_shape), batch.slots_T)
        query_THGd = query.view(num_tokens, config.num_kv_heads, config.num_groups, config.head_dim)
        out = paged_attention(self.layer, query_THGd, cache, batch.attention, self.scale)
        return self.linear(out.reshape(num_tokens, self.q_size), self.o_proj, self.o_bias)


class DecoderLayer(nn.Module):
    """Attention, then experts or a dense MLP, each behind a norm and a residual."""

    def __init__(self, config: DecoderConfig, layer: int, environment: MoEEnvironment) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        parameter = partial(empty_parameter, dtype=environment.dtype, device=environment.device)
        self.input_norm = parameter(config.hidden_size)
        self.post_norm = parameter(config.hidden_size)
        self.attention = Attention(config, layer, environment)
        self.mlp: MoERunner | SharedExperts
        if layer in config.moe.layers:
            self.mlp = _moe_runner(config, config.moe.layers.index(layer), environment)
        else:
            self.mlp = SharedExperts(
                hidden_size=config.hidden_size,
                intermediate_size=config.dense_intermediate_size,
                activation=config.dense_activation,
                linear=RowLinear(environment.row_exact),
                dtype=environment.dtype,
                device=environment.device,
            )

    def forward(
        self,
        hidden_TD: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        cache: PagedKVCache,
    ) -> torch.Tensor:
        hidden_TD = hidden_TD + self.attention(rms_norm(hidden_TD, self.input_norm, self.eps), rotary, batch, cache)
        mlp_TD: torch.Tensor = self.mlp(rms_norm(hidden_TD, self.post_norm, self.eps))
        return hidden_TD + mlp_TD


def _moe_runner(config: DecoderConfig, moe_layer: int, environment: MoEEnvironment) -> MoERunner:
    moe = config.moe
    return FusedMoEFactory(
        environment=environment,
        layer=moe_layer,
        router=TopKRouter(
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            renormalize=moe.renormalize,
            scoring=moe.scoring,
            num_expert_groups=moe.num_expert_groups,
            topk_groups=moe.topk_groups,
        ),
        num_experts=moe.num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=moe.intermediate_size,
        activation=moe.activation,
        routed_scaling_factor=moe.routed_scaling_factor,
    )


class Decoder(nn.Module):
    """The whole model. Parameters are allocated here and filled by `worker/loader.py`."""

    def __init__(self, config: DecoderConfig, environment: MoEEnvironment, max_model_len: int) -> None:
        super().__init__()
        self.config = config
        self.environment = environment
        self.linear = RowLinear(environment.row_exact)
        parameter = partial(empty_parameter, dtype=environment.dtype, device=environment.device)
        self.embed = parameter(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, environment) for layer in range(config.num_layers))
        self.norm = parameter(config.hidden_size)
        self.lm_head = self.embed if config.tie_word_embeddings else parameter(config.vocab_size, config.hidden_size)
        self.cos, self.sin = rotary_tables(config, max_model_len, environment.device)

    def decoder_layers(self) -> Sequence[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def moe_runners(self) -> list[MoERunner]:
        """The MoE layers, in order."""
        return [layer.mlp for layer in self.decoder_layers() if isinstance(layer.mlp, MoERunner)]

    def moe_layer_specs(self) -> Sequence[MoELayerSpec]:
        """Sizes that the communication buffers are made for."""
        return [
            MoELayerSpec(
                layer=runner.routed_experts.layer,
                hidden_size=runner.routed_experts.hidden_size,
                top_k=runner.routed_experts.top_k,
                num_experts=runner.routed_experts.num_experts,
                dtype=runner.routed_experts.dtype,
            )
            for runner in self.moe_runners()
        ]

    def warm_up(self, max_rows: int) -> None:
        """Let the linear algebra library meet the shapes of steps of up to `max_rows` rows, before serving."""
        weights: list[torch.Tensor] = [parameter for parameter in self.parameters() if parameter.dim() == 2]
        for runner in self.moe_runners()[:1]:
            experts = runner.routed_experts.parameters()
            weights.extend(parameter[0] for parameter in experts if parameter.dim() == 3)
        with torch.inference_mode():
            self.linear.warm_up(weights, max_rows)

    def forward(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        """fp32 logits [S, V]. Every rank calls it in every step that runs, also with T = 0."""
        hidden_TD = self.embed.index_select(0, batch.token_ids_T)
        rotary = (
            self.cos.index_select(0, batch.positions_T).unsqueeze(1).to(hidden_TD.dtype),
            self.sin.index_select(0, batch.positions_T).unsqueeze(1).to(hidden_TD.dtype),
        )
        for layer in self.layers:
            hidden_TD = layer(hidden_TD, rotary, batch, cache)
        rows_SD = hidden_TD.index_select(0, batch.logits_rows_S)
        return self.linear(rms_norm(rows_SD, self.norm, self.config.rms_norm_eps), self.lm_head).float()
