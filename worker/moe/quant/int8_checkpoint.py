"""Checkpoints of compressed-tensors with int8 weights and a scale for each output channel. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeray.worker.moe.quant.checkpoint import FLOATS, QuantizedCheckpoint, StoredTensor, any_of
from moeray.worker.moe.quant.options import QuantOptions

if TYPE_CHECKING:
    import torch

    from moeray.worker.models.weights import Shape
    from moeray.worker.moe.quant.base import FusedMoEMethodBase
    from moeray.worker.moe.quant.decoded import DecodeBuffer

EXPRESSION = "re:"
PACKED = "pack-quantized"
FORMATS = ("int-quantized", "naive-quantized", PACKED)
# Of a group's weights and input activations: what is only about how scales were found.
HISTORY = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "dynamic", "group_size", "block_structure")
NUMBERS_IN_INT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Checkpoint(QuantizedCheckpoint):
    """`weight_scale` [O, 1] belongs to `weight` int8 [O, I], or to `weight_packed`, four numbers in an int32.

    `targets` and `ignore` hold names of modules, or patterns behind `re:`; the target Linear means all.
    """

    is_packed: bool = False
    targets: tuple[str, ...] = ("Linear",)
    ignore: tuple[str, ...] = ()

    def make_method(self, buffer: "DecodeBuffer") -> "FusedMoEMethodBase":
        from moeray.worker.moe.quant.int8 import Int8MoEMethod

        return Int8MoEMethod(buffer)

    def leaves_out(self, module: str) -> bool:
        return _names(self.ignore, module) or not ("Linear" in self.targets or _names(self.targets, module))

    def stored(self, module: str, shape: "Shape") -> tuple[StoredTensor, ...]:
        outputs, inputs = shape
        scale = StoredTensor(f"{module}.weight_scale", (outputs, 1), FLOATS)
        if not self.is_packed:
            return StoredTensor(f"{module}.weight", shape, ("int8",)), scale
        packed = (outputs, -(-inputs // NUMBERS_IN_INT32))
        return (
            StoredTensor(f"{module}.weight_packed", packed, ("int32",)),
            scale,
            StoredTensor(f"{module}.weight_shape", (2,), ("int32", "int64")),
        )

    def expert_parts(self, shape: "Shape", *tensors: "torch.Tensor") -> "Sequence[torch.Tensor]":
        """What `weight_shape` would say is known from the model, and has been held against the packed shape."""
        numbers, scale = tensors[:2]
        if not self.is_packed:
            return numbers, scale
        from moeray.worker.moe.quant.int8 import unpack_int8

        return unpack_int8(numbers, shape[1]), scale

    def decode(self, shape: "Shape", *tensors: "torch.Tensor") -> "torch.Tensor":
        import torch

        from moeray.worker.moe.quant.int8 import decode_int8

        numbers_OI, scale_O1 = self.expert_parts(shape, *tensors)
        return decode_int8(numbers_OI, scale_O1.float(), torch.empty(shape, dtype=torch.float32))


def _names(patterns: tuple[str, ...], module: str) -> bool:
    expressions = tuple(pattern.removeprefix(EXPRESSION) for pattern in patterns if pattern.startswith(EXPRESSION))
    return module in patterns or (bool(expressions) and any_of(expressions).match(module) is not None)


def read(options: QuantOptions) -> Int8Checkpoint:
    """One group of int8 weights, symmetric, per channel.

    Where activations are int8 too (W8A8), they must be quantised as they come: that leaves nothing in the checkpoint,
    and here they stay in the model's type.
    """
    for name in ("quantization_status", "global_compression_ratio", "version", "run_compressed"):
        options.get(name)
    options.require("kv_cache_scheme")
    form = options.require("format", *FORMATS, optional=False)
    groups = options.nested("config_groups")
    if len(groups.names()) != 1:
        raise options.refusal("config_groups", "one group")
    group = groups.nested(groups.names()[0])
    group.require("format", form)
    group.require("output_activations")
    _check_weights(group.nested("weights"))
    if group.get("input_activations") is not None:
        _check_activations(group.nested("input_activations"))
    targets = group.strings("targets")
    group.finish()
    return Int8Checkpoint(is_packed=form == PACKED, targets=targets, ignore=options.strings("ignore"))


def _check_weights(weights: QuantOptions) -> None:
    weights.require("num_bits", 8, optional=False)
    weights.require("type", "int")
    weights.require("symmetric", True)
    weights.require("strategy", "channel", optional=False)
    weights.require("dynamic", False)
    weights.require("actorder")
    for name in HISTORY:
        weights.get(name)
    weights.finish()


def _check_activations(activations: QuantOptions) -> None:
    activations.require("dynamic", True, optional=False)
    for name in (*HISTORY, "num_bits", "type", "symmetric", "strategy", "actorder"):
        activations.get(name)
    activations.finish()
