"""Gated activations between an expert's two projections.

Legend: M rows, F intermediate. Input is the first projection's output, gate half first.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

GatedActivation = Callable[[torch.Tensor], torch.Tensor]

SWIGLU_OAI_ALPHA = 1.702
SWIGLU_OAI_LIMIT = 7.0


def _rows_apart(gate_up_M2F: torch.Tensor) -> torch.Tensor:
    """Room for a result [M, F] whose rows are cut into vectors one by one: bits do not depend on their number."""
    return torch.empty_like(gate_up_M2F).chunk(2, dim=-1)[0]


def silu_and_mul(gate_up_M2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, shape [M, F]."""
    gate_MF, up_MF = gate_up_M2F.chunk(2, dim=-1)
    return F.silu(gate_MF).mul_(up_MF)


def gelu_and_mul(gate_up_M2F: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the exact (erf) gelu, shape [M, F]."""
    gate_MF, up_MF = gate_up_M2F.chunk(2, dim=-1)
    # Not F.gelu, which takes another kernel for a single row than for several that are apart in memory.
    work_MF = torch.mul(gate_MF, math.sqrt(0.5), out=_rows_apart(gate_up_M2F))
    return work_MF.erf_().add_(1.0).mul_(gate_MF).mul_(0.5).mul_(up_MF)


def gelu_tanh_and_mul(gate_up_M2F: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the tanh approximation, shape [M, F]."""
    gate_MF, up_MF = gate_up_M2F.chunk(2, dim=-1)
    return F.gelu(gate_MF, approximate="tanh").mul_(up_MF)


def swiglu_oai_and_mul(gate_up_M2F: torch.Tensor) -> torch.Tensor:
    """gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), both halves clamped to the limit, shape [M, F].

    The gate is clamped from above only. Source: the gpt-oss reference implementation. The halves are expected apart
    (gate first), not interleaved as in its checkpoints.
    """
    clamped_M2F = gate_up_M2F.clamp(max=SWIGLU_OAI_LIMIT)
    gate_MF, up_MF = clamped_M2F.chunk(2, dim=-1)
    sigmoid_MF = torch.mul(gate_MF, SWIGLU_OAI_ALPHA, out=_rows_apart(gate_up_M2F)).sigmoid_()
    return sigmoid_MF.mul_(gate_MF).mul_(up_MF.clamp_(min=-SWIGLU_OAI_LIMIT).add_(1.0))


ACTIVATIONS: dict[str, GatedActivation] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_pytorch_tanh": gelu_tanh_and_mul,
    "swiglu_oai": swiglu_oai_and_mul,
}


def gated_activation(name: str | GatedActivation) -> GatedActivation:
    """The function of this name, or the function itself; `ValueError` naming those there are."""
    if callable(name):
        return name
    if name not in ACTIVATIONS:
        raise ValueError(f"activation is {name!r}, must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
