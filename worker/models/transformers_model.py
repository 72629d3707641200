"""A served model whose layers are transformers' own code, on our MoE layers, paged cache and scheduler.

Rows of a step are padded at the model's input (`transformers_rows.py`), so that all of its code keeps bits, and so
that a step without tokens runs as well: padding attends to nothing, and no expert sees it.

Legend: T tokens of the step, U rows with padding, S rows whose logits are wanted, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
import torch.nn.functional as F

from moeray.comm.errors import CheckpointError
from moeray.comm.placement import ExpertPlacement
from moeray.worker.models.linear import RowLinear
from moeray.worker.models.model import ForwardBatch, ServedModel
from moeray.worker.models.paged_cache import CacheShape, PagedKVCache
from moeray.worker.models.transformers_attention import PAGED, PagedStep
from moeray.worker.models.transformers_config import TransformersConfig
from moeray.worker.models.transformers_experts import ExpertsModule, RunnerExperts, find_experts, make_runners
from moeray.worker.models.transformers_names import CheckpointNames
from moeray.worker.models.transformers_probe import PROBE, probe
from moeray.worker.models.transformers_rows import StepRows
from moeray.worker.models.transformers_skeleton import ExactLinear, give_memory, make_skeleton, use_exact_linear
from moeray.worker.models.weights import WeightSource, WeightTarget
from moeray.worker.moe.factory import MoEEnvironment
from moeray.worker.moe.runner import MoERunner


class TransformersModel(ServedModel):
    """`present` are the names of the checkpoint's tensors. Raises `CheckpointError` for what cannot be served."""

    config: TransformersConfig

    def __init__(self, config: TransformersConfig, present: Collection[str], environment: MoEEnvironment) -> None:
        super().__init__()
        self.config = config
        self.dtype = environment.dtype
        self.linear = RowLinear(environment.row_exact)
        self.rows = StepRows(exact=environment.row_exact)
        skeleton = make_skeleton(config.directory, config.architecture, environment.dtype, PROBE)
        self.experts = find_experts(skeleton)
        _check_experts(config, self.experts)
        layers, top_ks = probe(skeleton, {module.name: module.module for module in self.experts})
        self.attention_layers = layers
        self.places = {layer.layer_idx: (place, layer) for place, layer in enumerate(layers)}
        self.names = CheckpointNames(skeleton, self.experts, present)
        self.runners = make_runners(self.experts, top_ks, environment)
        for module in self.experts:
            skeleton.set_submodule(module.name, torch.nn.Identity())
        use_exact_linear(skeleton, self.linear, self.rows)
        give_memory(skeleton, environment.device)
        for module, runner in zip(self.experts, self.runners, strict=True):
            skeleton.set_submodule(module.name, RunnerExperts(runner, self.rows))
        skeleton.config._attn_implementation = PAGED
        self.model = skeleton

    def moe_runners(self) -> list[MoERunner]:
        return self.runners

    def cache_shapes(self) -> Sequence[CacheShape]:
        return [layer.cache_shape() for layer in self.attention_layers]

    def weight_targets(self, placement: ExpertPlacement | None, slot: int) -> Iterator[WeightTarget]:
        tensors = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers())
        for source in self.names.dense_sources():
            yield WeightTarget(source, tuple(tensors[part].data.copy_ for part in source.parts))
        yield from self.seat_targets(placement, slot)

    def expert_parts(self, moe_layer: int, expert: int) -> Sequence[WeightSource]:
        return self.names.expert_sources(self.experts[moe_layer], expert)

    def ignores(self, name: str) -> bool:
        return self.names.ignores(name)

    def warm_up(self, max_rows: int) -> None:
        weights: list[torch.Tensor] = [
            module.weight for module in self.model.modules() if isinstance(module, ExactLinear)
        ]
        weights.extend(self.runners[0].routed_experts.empty_projections())
        with torch.inference_mode():
            self.linear.warm_up(weights, max_rows, self.dtype)

    def forward(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        self.rows.begin(batch.token_ids_T.shape[0])
        num_padding = self.rows.num_padded - self.rows.num_real
        out = self.model(
            input_ids=F.pad(batch.token_ids_T, (0, num_padding)).unsqueeze(0),
            position_ids=F.pad(batch.positions_T, (0, num_padding)).unsqueeze(0),
            use_cache=False,
            logits_to_keep=batch.logits_rows_S,
            moeray=PagedStep(batch, cache, self.places),
        )
        logits_SV: torch.Tensor = out.logits[0]
        return logits_SV.float()


def _check_experts(config: TransformersConfig, experts: Sequence[ExpertsModule]) -> None:
    """The model must have the experts that config.json was read to have: the placement is made for those."""
    layers = tuple(module.layer for module in experts)
    counts = {module.num_experts for module in experts}
    if layers != config.moe.layers or counts != {config.num_experts}:
        raise CheckpointError(
            f"{config.directory}: {config.architecture} has {sorted(counts)} experts in layers {list(layers)}, "
            f"config.json was read as {config.num_experts} in layers {list(config.moe.layers)}"
        )
