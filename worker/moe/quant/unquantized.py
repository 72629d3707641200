"""Experts in the model's own floating-point type.

Legend: S seats, R received rows, K experts per token, P pairs, Q pairs with padding, D hidden, F intermediate.
"""

from dataclasses import dataclass

import numpy as np
import torch

from moeray.worker.models.linear import RowLinear, padded_rows_of
from moeray.worker.models.parameters import empty_parameter
from moeray.worker.moe.activation import GatedActivation
from moeray.worker.moe.kernel import FusedMoEKernel, PrepareFinalize
from moeray.worker.moe.quant.base import FusedMoEMethodBase, FusedMoEQuantConfig
from moeray.worker.moe.routed_experts import RoutedExperts

PARAMETER_OF = {
    "gate": "w13_S2FD",
    "up": "w13_S2FD",
    "down": "w2_SDF",
    "gate_bias": "bias_13_S2F",
    "up_bias": "bias_13_S2F",
    "down_bias": "bias_2_SD",
}


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Pairs of one batch, sorted by seat; each seat's run may be padded to a number of rows that keeps its bits.

    `runs` are (seat, start, end) over the Q sorted places; `source_rows_Q` is the received row of each place and
    `place_of_pair_P` where each pair's result lies.
    """

    runs: list[tuple[int, int, int]]
    source_rows_Q: torch.Tensor
    place_of_pair_P: torch.Tensor


def group_by_seat(seat_ids_RK: torch.Tensor, *, exact: bool, pads: bool = True) -> ExpertGroups:
    """Sort a batch's pairs by seat. With `pads` runs are as long as `padded_rows`; what is added repeats row 0."""
    top_k = seat_ids_RK.shape[1]
    flat = seat_ids_RK.reshape(-1).cpu().numpy()
    pair_positions = np.flatnonzero(flat >= 0)
    seats_P = flat[pair_positions]
    order = np.argsort(seats_P, kind="stable")
    counts = np.bincount(seats_P)
    filled = np.flatnonzero(counts)
    widths = padded_rows_of(counts[filled], exact=exact) if pads else counts[filled]
    ends = np.cumsum(widths)
    starts = ends - widths
    first_of_seat = np.cumsum(counts[filled]) - counts[filled]
    offsets = np.repeat(starts - first_of_seat, counts[filled])
    places_sorted = np.arange(len(order)) + offsets
    source_rows_Q = np.zeros(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    source_rows_Q[places_sorted] = pair_positions[order] // top_k
    place_of_pair_P = np.empty(len(order), dtype=np.int64)
    place_of_pair_P[order] = places_sorted
    return ExpertGroups(
        runs=list(zip(filled.tolist(), starts.tolist(), ends.tolist(), strict=True)),
        source_rows_Q=torch.from_numpy(source_rows_Q).to(seat_ids_RK.device),
        place_of_pair_P=torch.from_numpy(place_of_pair_P).to(seat_ids_RK.device),
    )


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
        groups = group_by_seat(seat_ids_RK, exact=self.quant_config.row_exact, pads=pads)
        rows_QD = hidden_RD.index_select(0, groups.source_rows_Q)
        out_QD = torch.empty_like(rows_QD)
        for seat, start, end in groups.runs:
            bias_2F = None if self.bias_13_S2F is None else self.bias_13_S2F[seat]
            bias_D = None if self.bias_2_SD is None else self.bias_2_SD[seat]
            gate_up_M2F = self.linear(rows_QD[start:end], self.w13_S2FD[seat], bias_2F)
            out_QD[start:end] = self.linear(self.activation(gate_up_M2F), self.w2_SDF[seat], bias_D)
        return out_QD.index_select(0, groups.place_of_pair_P)


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
