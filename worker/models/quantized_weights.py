"""The weights of a native model whose checkpoint may be quantised: which are, and how they are read."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from moeray.comm.errors import CheckpointError
from moeray.worker.models.config import DecoderConfig
from moeray.worker.models.weight_names import WeightNames
from moeray.worker.models.weights import WeightSource
from moeray.worker.moe.factory import MoEEnvironment
from moeray.worker.moe.quant.checkpoint import WEIGHT, QuantizedCheckpoint
from moeray.worker.moe.quant.decoded import DecodeBuffer
from moeray.worker.moe.quant.registry import make_quant_method


class QuantizedWeights:
    """Experts stay as they are on disk, all else is decoded when it is read. Without quantisation nothing changes.

    Raises `CheckpointError` if only some of a layer's experts are quantised, or if they are and are fused.
    """

    def __init__(self, config: DecoderConfig, names: WeightNames, present: Collection[str]) -> None:
        self._checkpoint = config.quantization
        self._present = present
        self._layers = frozenset(
            moe_layer
            for moe_layer, layer in enumerate(config.moe.layers)
            if self._checkpoint is not None
            and _has_quantized_experts(self._checkpoint, layer, config.num_experts, names, present)
        )

    def environment(self, environment: MoEEnvironment) -> MoEEnvironment:
        """The same with the checkpoint's quantisation methods."""
        if self._checkpoint is None:
            return environment
        make = partial(make_quant_method, self._checkpoint, self._layers, DecodeBuffer())
        return replace(environment, make_quant_method=make)

    def dense(self, source: WeightSource) -> WeightSource:
        """The source of a weight that every worker has."""
        return source if self._checkpoint is None else self._checkpoint.dense(source, self._present)

    def expert(self, moe_layer: int, sources: Sequence[WeightSource]) -> Sequence[WeightSource]:
        """The sources of an expert."""
        if self._checkpoint is None or moe_layer not in self._layers:
            return sources
        return [self._checkpoint.expert(source) for source in sources]


def _has_quantized_experts(
    checkpoint: QuantizedCheckpoint, layer: int, num_experts: int, names: WeightNames, present: Collection[str]
) -> bool:
    layout = names.layout(layer, present)
    modules = [
        name.format(layer=layer, expert=expert).removesuffix(WEIGHT)
        for expert in range(num_experts)
        for tensor in layout
        for name in tensor.names
    ]
    left_out = [module for module in modules if checkpoint.leaves_out(module)]
    if len(left_out) == len(modules):
        return False
    if left_out:
        raise CheckpointError(
            f"quantization_config leaves out {left_out[0]} and {len(left_out) - 1} more of the experts of layer "
            f"{layer}, must leave out all or none"
        )
    if any(tensor.is_fused for tensor in layout):
        raise CheckpointError(
            f"experts of layer {layer} are quantised and fused in one tensor, must be separate tensors"
        )
    return True
