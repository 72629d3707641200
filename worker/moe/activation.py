"""Gated activations between an expert's two projections.

Legend: M rows, F intermediate. Input is the first projection's output, gate half first.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

GatedActivation = Callable[[torch.Tensor], torch.Tensor]

SWIGLU_OAI_ALPHA = 1.702
SWIGLU_OAI_LIMIT = 7.0


def silu_and_mul(gate_up_M2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, shape [M, F]."""
    gate_MF, up_MF = gate_up_M2F.chunk(2, dim=-1)
    return F.silu(gate_MF).mul_(up_MF)


def gelu_and_mul(gate_up_M2F: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the exact (erf) gelu, shape [M, F]."""
    gate_MF, up_MF = gate_up_M2F.chunk(2, dim=-1)
    return F.gelu(gate_MF).mul_(up_MF)


def gelu_tanh_and_mul(gate_up_M2F: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the tanh approximation, shape [M, F]."""
    gate_MF, up_MF = gate_up_M2F.chunk(2, dim=-1)
    return F.gelu(gate_MF, approximate="tanh").mul_(up_MF)


def swiglu_oai_and_mul(gate_up_M2F: torch.Tensor) -> torch.Tensor:
    """gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), both halves clamped to the limit, shape [M, F].

    The gate is clamped from above only. Source: the gpt-oss reference implementation. The halves are expected apart
    (gate first), not interleaved as in its checkpoints.
    """
    gate_MF, up_MF = gate_up_M2F.chunk(2, dim=-1)
    gate_MF = gate_MF.clamp(max=SWIGLU_OAI_LIMIT)
    up_MF = up_MF.clamp(min=-SWIGLU_OAI_LIMIT, max=SWIGLU_OAI_LIMIT)
    return torch.sigmoid(gate_MF * SWIGLU_OAI_ALPHA).mul_(gate_MF).mul_(up_MF + 1.0)


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
