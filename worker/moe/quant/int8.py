"""Experts in int8 with a scale for each output channel.

Legend: O outputs, I inputs of a weight.
"""

import torch

from moeray.worker.moe.quant.decoded import DecodedMoEMethod

SIGN_BIT = 0x80


def unpack_int8(packed_Oi: torch.Tensor, inputs: int) -> torch.Tensor:
    """int8 [O, I] of compressed-tensors' int32: four numbers plus 128 in each, the first in the lowest byte."""
    return packed_Oi.contiguous().view(torch.uint8)[:, :inputs].bitwise_xor(SIGN_BIT).view(torch.int8)


def decode_int8(numbers_OI: torch.Tensor, scales_O1: torch.Tensor, out_OI: torch.Tensor) -> torch.Tensor:
    """Writes numbers times fp32 scales, rounded once, and returns `out_OI`."""
    return out_OI.copy_(numbers_OI).mul_(scales_O1)


class Int8MoEMethod(DecodedMoEMethod):
    """compressed-tensors' symmetric int8: one byte a weight in memory, and an fp32 scale an output channel."""

    numbers_dtype = torch.int8
    weight_format = "int8-channel"

    def scales_shape(self, outputs: int, inputs: int) -> tuple[int, int]:  # noqa: ARG002
        return outputs, 1

    def decode(self, numbers_OI: torch.Tensor, scales_oi: torch.Tensor, out_OI: torch.Tensor) -> torch.Tensor:
        return decode_int8(numbers_OI, scales_oi, out_OI)
