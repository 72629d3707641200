"""Parameters that are read from a checkpoint and never trained."""

import torch
from torch import nn


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without gradient whose values are undefined until a loader writes them."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
