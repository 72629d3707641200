"""MXFP4: 4-bit floating-point numbers in blocks of 32 that share a power of two (OCP Microscaling Formats 1.0).

Legend: R rows, N blocks of a row, b bytes of a block.
"""

import torch

# Sign, two bits of exponent, one of mantissa.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SCALE_BIAS = 127


def decode_mxfp4(blocks_RNb: torch.Tensor, scales_RN: torch.Tensor) -> torch.Tensor:
    """The numbers in bf16, which holds them exactly, [R, 2 * N * b]; a byte's low half comes first."""
    table = torch.tensor(VALUES, dtype=torch.bfloat16)
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=-1)
    numbers = pairs[blocks_RNb.int()].flatten(-2)
    exponents = (scales_RN.int() - SCALE_BIAS).unsqueeze(-1)
    return torch.ldexp(numbers, exponents).to(torch.bfloat16).flatten(1)
