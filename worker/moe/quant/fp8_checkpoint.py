"""Checkpoints in FP8 with a scale for each block of a weight, as DeepSeek-V3 introduced them. No torch here."""

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

Block = tuple[int, int]
BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Checkpoint(QuantizedCheckpoint):
    """`weight` is float8_e4m3fn [O, I], `weight_scale_inv` what each block of `block` rows and columns is times."""

    block: Block
    modules_to_not_convert: tuple[str, ...] = ()

    def make_method(self, buffer: "DecodeBuffer") -> "FusedMoEMethodBase":
        from moeray.worker.moe.quant.fp8 import Fp8MoEMethod

        return Fp8MoEMethod(self.block, buffer)

    def leaves_out(self, module: str) -> bool:
        """As transformers reads the list: a pattern for the beginning up to a dot or the end, or an ending."""
        patterns = self.modules_to_not_convert
        if not patterns:
            return False
        return module.endswith(patterns) or any_of(patterns, BOUNDARY).match(module) is not None

    def stored(self, module: str, shape: "Shape") -> tuple[StoredTensor, ...]:
        blocks = tuple(-(-size // edge) for size, edge in zip(shape, self.block, strict=True))
        return (
            StoredTensor(f"{module}.weight", shape, ("float8_e4m3fn",)),
            StoredTensor(f"{module}.weight_scale_inv", blocks, (*FLOATS, "float8_e8m0fnu")),
        )

    def expert_parts(self, shape: "Shape", *tensors: "torch.Tensor") -> "Sequence[torch.Tensor]":  # noqa: ARG002
        return tensors

    def decode(self, shape: "Shape", *tensors: "torch.Tensor") -> "torch.Tensor":
        import torch

        from moeray.worker.moe.quant.fp8 import decode_fp8

        numbers_OI, scales = tensors
        return decode_fp8(numbers_OI, scales.float(), self.block, torch.empty(shape, dtype=torch.float32))


def read(options: QuantOptions) -> Fp8Checkpoint:
    """Activations stay in the model's type, so `activation_scheme` dynamic, which leaves no tensors, has no effect."""
    options.require("activation_scheme", "dynamic")
    options.require("fmt", "e4m3")
    options.require("scale_fmt", "float", "ue8m0")
    options.require("expert_dtype", "fp8")
    options.require("dequantize", False)
    block = options.get("weight_block_size")
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(isinstance(edge, int) and edge > 0 for edge in block):
        raise options.refusal("weight_block_size", "two whole numbers, as in [128, 128]")
    return Fp8Checkpoint(
        block=(block[0], block[1]),
        modules_to_not_convert=options.strings("modules_to_not_convert", "ignored_layers"),
    )
