"""Experts that every token goes to: a dense gated MLP beside the routed ones, never dispatched.

Legend: T tokens, D hidden, F intermediate, C equal columns.
"""

from functools import partial

import torch
from torch import nn

from moeray.worker.models.linear import RowLinear
from moeray.worker.models.parameters import empty_parameter
from moeray.worker.moe.activation import gated_activation

# More than torch's loops over vectors take at once, on any processor.
GATE_COLUMNS = 64


class SharedExperts(nn.Module):
    """down(act(gate_up(x))), times sigmoid(gate(x)) if the family gates its shared expert (Qwen2-MoE)."""

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        linear: RowLinear,
        dtype: torch.dtype,
        device: torch.device,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.linear = linear
        self.activation = gated_activation(activation)
        parameter = partial(empty_parameter, dtype=dtype, device=device)
        self.gate_up_proj = parameter(2 * intermediate_size, hidden_size)
        self.down_proj = parameter(hidden_size, intermediate_size)
        self.gate = parameter(1, hidden_size) if gated else None

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        gate_up_T2F = self.linear(hidden_TD, self.gate_up_proj)
        out_TD = self.linear(self.activation(gate_up_T2F), self.down_proj)
        if self.gate is not None:
            # In columns that fill whole vectors: what is left behind them would be computed by another function.
            gate_TC = self.linear(hidden_TD, self.gate).expand(-1, GATE_COLUMNS).contiguous()
            out_TD = out_TD * torch.sigmoid(gate_TC)[:, :1]
        return out_TD
