"""Quantisation methods by the name that config.json gives them. No torch is imported with this module.

Others register theirs with `register`, or as an entry point of the group `moeray.quantization` in their package's
metadata: that way the command line and every worker's process find it.
"""

from collections.abc import Callable, Collection
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from moeray.worker.moe.quant import fp8_checkpoint, int8_checkpoint
from moeray.worker.moe.quant.checkpoint import QuantizedCheckpoint
from moeray.worker.moe.quant.options import QuantOptions

if TYPE_CHECKING:
    from moeray.worker.moe.quant.base import FusedMoEMethodBase
    from moeray.worker.moe.quant.decoded import DecodeBuffer

ENTRY_POINTS = "moeray.quantization"

QuantizationReader = Callable[[QuantOptions], QuantizedCheckpoint]

_READERS: dict[str, QuantizationReader] = {
    "fp8": fp8_checkpoint.read,
    "compressed-tensors": int8_checkpoint.read,
}


def register(quant_method: str, reader: QuantizationReader) -> None:
    """From now on this process reads checkpoints of this `quant_method` so. `ValueError` if it is known already."""
    if quant_method in _READERS:
        raise ValueError(f"quant_method is {quant_method!r}, which is registered already")
    _READERS[quant_method] = reader


def read_quantization(raw: object, where: str, also: Collection[str] = ()) -> QuantizedCheckpoint:
    """What a quantization_config says; `where` names it, `also` are methods that others than this registry read.

    Raises `CheckpointError` naming the method or the option that is not implemented, and what is.
    """
    options = QuantOptions(raw, where)
    name = options.get("quant_method")
    reader = _READERS.get(name)
    if reader is None:
        external = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
        if name not in external:
            raise options.refusal("quant_method", ", ".join(map(repr, (*_READERS, *external, *also))))
        reader = external[name].load()
    checkpoint = reader(options)
    options.finish()
    checkpoint.leaves_out("")  # a list that cannot be read is refused before anything starts
    return checkpoint


def make_quant_method(
    checkpoint: QuantizedCheckpoint, quantized_layers: Collection[int], buffer: "DecodeBuffer", layer: int
) -> "FusedMoEMethodBase":
    """The method of MoE layer number `layer`: the checkpoint's if its experts are quantised, else the plain one."""
    from moeray.worker.moe.quant.unquantized import UnquantizedMoEMethod

    return checkpoint.make_method(buffer) if layer in quantized_layers else UnquantizedMoEMethod()
