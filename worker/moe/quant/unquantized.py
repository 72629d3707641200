"""Experts in the model's own floating-point type.

Legend: S seats, R received rows, K experts per token, M rows of one seat, D hidden, F intermediate.
"""

import torch

from moeray.worker.models.linear import RowLinear
from moeray.worker.models.parameters import empty_parameter
from moeray.worker.moe.activation import GatedActivation
from moeray.worker.moe.kernel import FusedMoEKernel, PrepareFinalize
from moeray.worker.moe.quant.base import FusedMoEMethodBase, FusedMoEQuantConfig
from moeray.worker.moe.quant.grouped import run_by_seat
from moeray.worker.moe.routed_experts import RoutedExperts

PARAMETER_OF = {
    "gate": "w13_S2FD",
    "up": "w13_S2FD",
    "down": "w2_SDF",
    "gate_bias": "bias_13_S2F",
    "up_bias": "bias_13_S2F",
    "down_bias": "bias_2_SD",
}


class UnquantizedExperts:
    """Grouped GEMMs as one matrix product per filled seat that got rows.

    With `row_exact` a row's bits do not depend on how many rows its expert got (see `worker/models/linear.py`).
    """

    def __init__(
        self,
        w13_S2FD: torch.Tensor,
        w2_SDF: torch.Tensor,
        activation: GatedActivation,
        quant_config: FusedMoEQuantConfig,
        bias_13_S2F: torch.Tensor | None = None,
        bias_2_SD: torch.Tensor | None = None,
    ) -> None:
        self.w13_S2FD = w13_S2FD
        self.w2_SDF = w2_SDF
        self.bias_13_S2F = bias_13_S2F
        self.bias_2_SD = bias_2_SD
        self.activation = activation
        self.quant_config = quant_config
        self.linear = RowLinear(quant_config.row_exact)

    def supports(self, quant_config: FusedMoEQuantConfig) -> tuple[bool, str]:
        rows = torch.empty((0, self.w13_S2FD.shape[2]), dtype=quant_config.dispatch_dtype)
        if rows.dtype != self.w13_S2FD.dtype and self.linear.pads(rows, self.w13_S2FD[0]):
            return False, f"weights are {self.w13_S2FD.dtype}, rows would be {quant_config.dispatch_dtype}"
        return True, ""

    def apply(self, hidden_RD: torch.Tensor, seat_ids_RK: torch.Tensor) -> torch.Tensor:
        pads = self.linear.pads(hidden_RD, self.w13_S2FD[0])
        return run_by_seat(hidden_RD, seat_ids_RK, self._run_seat, exact=self.quant_config.row_exact, pads=pads)

    def _run_seat(self, rows_MD: torch.Tensor, seat: int) -> torch.Tensor:
        bias_2F = None if self.bias_13_S2F is None else self.bias_13_S2F[seat]
        bias_D = None if self.bias_2_SD is None else self.bias_2_SD[seat]
        gate_up_M2F = self.linear(rows_MD, self.w13_S2FD[seat], bias_2F)
        return self.linear(self.activation(gate_up_M2F), self.w2_SDF[seat], bias_D)


class UnquantizedMoEMethod(FusedMoEMethodBase):
    """w13 [S, 2F, D] (gate first) and w2 [S, D, F] as the layer stores weights, and biases if the experts have any."""

    def create_weights(self, layer: RoutedExperts) -> None:
        shape_13 = (layer.num_seats, 2 * layer.intermediate_size, layer.hidden_size)
        shape_2 = (layer.num_seats, layer.hidden_size, layer.intermediate_size)
        for name, shape in (("w13_S2FD", shape_13), ("w2_SDF", shape_2)):
            layer.register_parameter(name, empty_parameter(*shape, dtype=layer.weights_dtype, device=layer.device))
        if layer.has_bias:
            for name, num_outputs in (("bias_13_S2F", shape_13[1]), ("bias_2_SD", shape_2[1])):
                bias = empty_parameter(layer.num_seats, num_outputs, dtype=layer.dtype, device=layer.device)
                layer.register_parameter(name, bias)

    def load_expert(self, layer: RoutedExperts, seat: int, name: str, tensor: torch.Tensor, first_row: int = 0) -> None:
        weights = layer.get_parameter(PARAMETER_OF[name]).data[seat]
        start = first_row + (layer.intermediate_size if name in ("up", "up_bias") else 0)
        weights[start : start + tensor.shape[0]].copy_(tensor)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        return FusedMoEQuantConfig(dispatch_dtype=layer.dtype, weight_format="unquantized", row_exact=layer.row_exact)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        quant_config = self.get_fused_moe_quant_config(layer)
        experts = UnquantizedExperts(
            layer.get_parameter("w13_S2FD").data,
            layer.get_parameter("w2_SDF").data,
            layer.activation,
            quant_config,
            layer.get_parameter("bias_13_S2F").data if layer.has_bias else None,
            layer.get_parameter("bias_2_SD").data if layer.has_bias else None,
        )
        self._moe_kernel = FusedMoEKernel(PrepareFinalize(layer.layer, layer.exchange, quant_config), experts)
