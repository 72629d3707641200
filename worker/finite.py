"""Whether weights are numbers at all, found out at the price of reading them once more."""

import torch

# The codes of e4m3 without their sign end here, and this one is NaN.
FP8_NAN = 0x7F


def is_finite(tensor: torch.Tensor) -> bool:
    """False if there is a NaN or an infinity: a sum shows both. Only if it overflows, entries are looked at."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    if tensor.dtype == torch.float8_e4m3fn:
        return int((tensor.view(torch.int8) & FP8_NAN).max()) != FP8_NAN
    if tensor.element_size() == 1:
        tensor = tensor.float()
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
