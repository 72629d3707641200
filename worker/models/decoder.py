"""The native decoder: embeddings, attention and MoE or dense layers, head. Config-driven; families only map names.

Legend: T tokens of the step, S rows whose logits are wanted, D hidden, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from moeray.comm.placement import ExpertPlacement
from moeray.worker.models.config import DecoderConfig, LatentAttentionConfig
from moeray.worker.models.grouped_query import GroupedQueryAttention
from moeray.worker.models.latent_attention import LatentAttention
from moeray.worker.models.linear import RowLinear
from moeray.worker.models.model import ForwardBatch, ServedModel
from moeray.worker.models.moe_layer import dense_mlp, make_moe_layer, mlp_places, residual_scale
from moeray.worker.models.norm import Norm
from moeray.worker.models.paged_cache import CacheShape, PagedKVCache
from moeray.worker.models.parameters import empty_parameter
from moeray.worker.models.place_targets import place_targets
from moeray.worker.models.quantized_weights import QuantizedWeights
from moeray.worker.models.rope import PositionTables, StepPositions
from moeray.worker.models.weight_names import WeightNames
from moeray.worker.models.weights import Place, WeightSource, WeightTarget
from moeray.worker.moe.factory import MoEEnvironment
from moeray.worker.moe.runner import MoERunner
from moeray.worker.moe.shared_experts import SharedExperts


class DecoderLayer(nn.Module):
    """Attention, then experts or a dense MLP, each behind a norm and a residual."""

    def __init__(self, config: DecoderConfig, layer: int, environment: MoEEnvironment) -> None:
        super().__init__()
        self.layer = layer
        self.residual_scale = residual_scale(config, environment.dtype)
        self.input_norm = Norm(config, environment)
        self.post_norm = Norm(config, environment)
        self.attention: GroupedQueryAttention | LatentAttention = (
            LatentAttention(config, layer, environment)
            if isinstance(config.attention, LatentAttentionConfig)
            else GroupedQueryAttention(config, layer, environment)
        )
        self.mlp: MoERunner | SharedExperts
        if layer in config.moe.layers:
            self.mlp = make_moe_layer(config, config.moe.layers.index(layer), environment)
        else:
            self.mlp = dense_mlp(config, config.dense_intermediate_size, config.dense_activation, environment)

    def places(self) -> Iterator[Place]:
        yield from self.input_norm.places("input_norm", self.layer)
        yield from self.attention.places()
        yield from self.post_norm.places("post_norm", self.layer)
        yield from mlp_places(self.mlp, self.layer)

    def forward(
        self, hidden_TD: torch.Tensor, positions: StepPositions, batch: ForwardBatch, cache: PagedKVCache
    ) -> torch.Tensor:
        attention_TD: torch.Tensor = self.attention(self.input_norm(hidden_TD), positions, batch, cache)
        if self.residual_scale != 1.0:
            attention_TD = attention_TD * self.residual_scale
        hidden_TD = hidden_TD + attention_TD
        mlp_TD: torch.Tensor = self.mlp(self.post_norm(hidden_TD))
        if self.residual_scale != 1.0 and isinstance(self.mlp, SharedExperts):
            mlp_TD = mlp_TD * self.residual_scale
        return hidden_TD + mlp_TD


class Decoder(ServedModel):
    """The whole model. `present` are the names of the checkpoint's tensors, which tell in which layout it is."""

    config: DecoderConfig

    def __init__(
        self,
        config: DecoderConfig,
        names: WeightNames,
        present: Collection[str],
        environment: MoEEnvironment,
        max_model_len: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.names = names
        self.present = present
        self.quantization = QuantizedWeights(config, names, present)
        environment = self.quantization.environment(environment)
        self.linear = RowLinear(environment.row_exact)
        self.residual_scale = residual_scale(config, environment.dtype)
        parameter = partial(empty_parameter, dtype=environment.dtype, device=environment.device)
        projection = partial(empty_parameter, dtype=environment.weights_dtype, device=environment.device)
        self.dtype = environment.dtype
        self.embed = projection(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, environment) for layer in range(config.num_layers))
        self.norm = Norm(config, environment)
        self.lm_head = self.embed if config.tie_word_embeddings else projection(config.vocab_size, config.hidden_size)
        self.lm_head_bias = parameter(config.vocab_size) if config.lm_head_bias else None
        attention = config.attention
        ropes = [layer.rope for layer in attention.layers]
        self.positions = PositionTables(ropes, attention.temperature, max_model_len, environment.device)

    def decoder_layers(self) -> Sequence[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def moe_runners(self) -> list[MoERunner]:
        return [layer.mlp for layer in self.decoder_layers() if isinstance(layer.mlp, MoERunner)]

    def cache_shapes(self) -> Sequence[CacheShape]:
        return [layer.attention.cache_shape() for layer in self.decoder_layers()]

    def places(self) -> Iterator[Place]:
        """Where weights go that every worker has."""
        yield Place("embed", self.embed.data)
        yield from self.norm.places("norm")
        if self.lm_head is not self.embed:
            yield Place("lm_head", self.lm_head.data)
        if self.lm_head_bias is not None:
            yield Place("lm_head_bias", self.lm_head_bias.data)
        for layer in self.decoder_layers():
            yield from layer.places()

    def weight_targets(self, placement: ExpertPlacement | None, slot: int) -> Iterator[WeightTarget]:
        for target in place_targets(self.places(), self.names, self.present):
            yield WeightTarget(self.quantization.dense(target.source), target.stores)
        yield from self.seat_targets(placement, slot)

    def expert_parts(self, moe_layer: int, expert: int) -> Sequence[WeightSource]:
        layer = self.config.moe.layers[moe_layer]
        sources = [
            tensor.source(
                layer=layer,
                expert=expert,
                num_experts=self.config.num_experts,
                hidden=self.config.hidden_size,
                inner=self.config.moe.intermediate_size,
            )
            for tensor in self.names.layout(layer, self.present)
        ]
        return self.quantization.expert(moe_layer, sources)

    def ignores(self, name: str) -> bool:
        is_tied_head = self.lm_head is self.embed and name == self.names.places["lm_head"]
        return is_tied_head or self.names.ignores(name, self.config.num_layers)

    def warm_up(self, max_rows: int) -> None:
        seats = {id(parameter) for runner in self.moe_runners() for parameter in runner.routed_experts.parameters()}
        weights: list[torch.Tensor] = [
            weight for weight in self.parameters() if weight.dim() == 2 and id(weight) not in seats
        ]
        for runner in self.moe_runners()[:1]:
            weights.extend(runner.routed_experts.empty_projections())
        with torch.inference_mode():
            self.linear.warm_up(weights, max_rows, self.dtype)

    def forward(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        hidden_TD = self.embed.index_select(0, batch.token_ids_T).to(self.dtype)
        if self.residual_scale != 1.0:
            hidden_TD = hidden_TD * self.residual_scale
        positions = self.positions.at(batch.positions_T, hidden_TD.dtype)
        for layer in self.layers:
            hidden_TD = layer(hidden_TD, positions, batch, cache)
        rows_SD = hidden_TD.index_select(0, batch.logits_rows_S)
        return self.linear(self.norm(rows_SD), self.lm_head, self.lm_head_bias).float()
