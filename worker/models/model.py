"""The contract of a model that a worker can serve, whoever implements it.

Legend: T tokens of the step, S rows whose logits are wanted, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from moeray.comm.buffers import MoELayerSpec
from moeray.comm.placement import EMPTY_SEAT, ExpertPlacement
from moeray.worker.models.attention_plan import AttentionPlan
from moeray.worker.models.config import ModelConfig
from moeray.worker.models.paged_cache import CacheShape, PagedKVCache
from moeray.worker.models.weights import WeightSource, WeightTarget
from moeray.worker.moe.runner import MoERunner


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One step's input. `logits_rows_S` are the rows of the step whose next token is wanted."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    logits_rows_S: torch.Tensor
    attention: AttentionPlan


class ServedModel(nn.Module, ABC):
    """A model with our MoE layers and our paged cache. It is made with empty parameters, which the loader fills.

    Attention goes over the cache that `cache_shapes` describes, with `attention.paged_attention` or a kernel of its own
    on the same plan. Whatever has experts is a `MoERunner` made by `FusedMoEFactory`.
    """

    config: ModelConfig

    @abstractmethod
    def forward(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        """fp32 logits [S, V]. Every rank calls it in every step that runs, also with T = 0."""

    @abstractmethod
    def moe_runners(self) -> list[MoERunner]:
        """The MoE layers, in order; as many as `config.moe.layers`."""

    @abstractmethod
    def cache_shapes(self) -> Sequence[CacheShape]:
        """What each layer keeps of a token in the cache, in the order of the layers' numbers there."""

    @abstractmethod
    def weight_targets(self, placement: ExpertPlacement | None, slot: int) -> Iterator[WeightTarget]:
        """Every tensor that the checkpoint must hold, with stores for those that this slot needs.

        Without a placement no seat is filled. Targets with an entry share a tensor that holds all experts of a layer.
        """

    @abstractmethod
    def expert_parts(self, moe_layer: int, expert: int) -> Sequence[WeightSource]:
        """All of an expert: parts are named as `load_expert` of the layer's quantisation method knows them."""

    @abstractmethod
    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may carry this tensor unused."""

    @abstractmethod
    def warm_up(self, max_rows: int) -> None:
        """Let the linear algebra library meet the shapes of steps of up to `max_rows` rows, before serving."""

    def seat_targets(self, placement: ExpertPlacement | None, slot: int) -> Iterator[WeightTarget]:
        """The part of `weight_targets` that experts are."""
        for moe_layer, runner in enumerate(self.moe_runners()):
            seats = placement.seats_of(moe_layer, slot) if placement else ()
            seat_of = {expert: seat for seat, expert in enumerate(seats) if expert != EMPTY_SEAT}
            for expert in range(self.config.num_experts):
                for source in self.expert_parts(moe_layer, expert):
                    yield runner.seat_target(source, seat_of.get(expert))

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
