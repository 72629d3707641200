"""Experts that stay quantised in memory: one weight at a time is decoded, just before it is computed with.

Legend: S seats, R received rows, K experts per token, M rows of one seat, D hidden, F intermediate; f, d how many
scales a weight has along F, D; O outputs, I inputs of any weight.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch

from moeray.worker.models.linear import RowLinear
from moeray.worker.models.parameters import empty_parameter
from moeray.worker.moe.activation import GatedActivation
from moeray.worker.moe.kernel import FusedMoEKernel, PrepareFinalize
from moeray.worker.moe.quant.base import FusedMoEMethodBase, FusedMoEQuantConfig
from moeray.worker.moe.quant.grouped import run_by_seat
from moeray.worker.moe.routed_experts import RoutedExperts

# (numbers_OI, fp32 scales_oi, out_OI) -> out_OI
Decode = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Where an expert's parts go: its numbers, its scales.
TARGETS = {
    "gate": ("w13_S2FD", "scales_13_S2fd"),
    "up": ("w13_S2FD", "scales_13_S2fd"),
    "down": ("w2_SDF", "scales_2_Sdf"),
}


class DecodeBuffer:
    """Room for one decoded weight, which all layers of a worker share; the next weight overwrites it."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def view(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of undefined contents."""
        size = shape.numel()
        if self._flat.numel() < size or (self._flat.dtype, self._flat.device) != (dtype, device):
            self._flat = torch.empty(size, dtype=dtype, device=device)
        return self._flat[:size].view(shape)


class DecodedExperts:
    """Grouped GEMMs on decoded weights, with the rows and in the order of the unquantised method.

    So the results equal those of decoded weights in an unquantised model, bit by bit.
    """

    def __init__(
        self,
        *,
        w13_S2FD: torch.Tensor,
        w2_SDF: torch.Tensor,
        scales_13_S2fd: torch.Tensor,
        scales_2_Sdf: torch.Tensor,
        decode: Decode,
        buffer: DecodeBuffer,
        activation: GatedActivation,
        quant_config: FusedMoEQuantConfig,
    ) -> None:
        self.w13_S2FD = w13_S2FD
        self.w2_SDF = w2_SDF
        self.scales_13_S2fd = scales_13_S2fd
        self.scales_2_Sdf = scales_2_Sdf
        self.decode = decode
        self.buffer = buffer
        self.activation = activation
        self.quant_config = quant_config
        self.linear = RowLinear(quant_config.row_exact)

    def supports(self, quant_config: FusedMoEQuantConfig) -> tuple[bool, str]:
        if quant_config != self.quant_config:
            return False, f"the experts are made for {self.quant_config}"
        return True, ""

    def apply(self, hidden_RD: torch.Tensor, seat_ids_RK: torch.Tensor) -> torch.Tensor:
        pads = self.linear.pads(hidden_RD, hidden_RD)  # decoded weights have the rows' type
        return run_by_seat(hidden_RD, seat_ids_RK, self._run_seat, exact=self.quant_config.row_exact, pads=pads)

    def _run_seat(self, rows_MD: torch.Tensor, seat: int) -> torch.Tensor:
        w13_2FD = self._room_for(self.w13_S2FD[seat])
        halves = zip(self.w13_S2FD[seat].chunk(2), self.scales_13_S2fd[seat], w13_2FD.chunk(2), strict=True)
        for numbers_FD, scales_fd, out_FD in halves:
            self.decode(numbers_FD, scales_fd, out_FD)
        inner_MF = self.activation(self.linear(rows_MD, w13_2FD))
        w2_DF = self.decode(self.w2_SDF[seat], self.scales_2_Sdf[seat], self._room_for(self.w2_SDF[seat]))
        return self.linear(inner_MF, w2_DF)

    def _room_for(self, numbers_OI: torch.Tensor) -> torch.Tensor:
        return self.buffer.view(numbers_OI.shape, self.quant_config.dispatch_dtype, numbers_OI.device)


class DecodedMoEMethod(FusedMoEMethodBase):
    """Numbers of one byte in `w13_S2FD` (gate first) and `w2_SDF`, and fp32 scales beside them. Rows stay as they are.

    Gate and up have scales of their own, so F need not be a multiple of what one scale covers.
    """

    numbers_dtype: ClassVar[torch.dtype]
    weight_format: ClassVar[str]

    def __init__(self, buffer: DecodeBuffer) -> None:
        super().__init__()
        self.buffer = buffer

    @abstractmethod
    def scales_shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """How many scales a weight [O, I] has, along each dim."""

    @abstractmethod
    def decode(self, numbers_OI: torch.Tensor, scales_oi: torch.Tensor, out_OI: torch.Tensor) -> torch.Tensor:
        """Writes numbers times scales, rounded once to the type of `out_OI`, which is returned."""

    def supports(self, layer: RoutedExperts) -> tuple[bool, str]:
        return (False, "experts with biases") if layer.has_bias else (True, "")

    def create_weights(self, layer: RoutedExperts) -> None:
        seats, hidden, inner = layer.num_seats, layer.hidden_size, layer.intermediate_size
        for name, dtype, shape in (
            ("w13_S2FD", self.numbers_dtype, (2 * inner, hidden)),
            ("w2_SDF", self.numbers_dtype, (hidden, inner)),
            ("scales_13_S2fd", torch.float32, (2, *self.scales_shape(inner, hidden))),
            ("scales_2_Sdf", torch.float32, self.scales_shape(hidden, inner)),
        ):
            layer.register_parameter(name, empty_parameter(seats, *shape, dtype=dtype, device=layer.device))

    def load_expert(self, layer: RoutedExperts, seat: int, name: str, tensor: torch.Tensor, first_row: int = 0) -> None:
        """Further names are "gate_scale", "up_scale" and "down_scale"."""
        part, _, kind = name.partition("_")
        target = layer.get_parameter(TARGETS[part][bool(kind)]).data[seat]
        if part != "down":
            target = target.view(2, -1, target.shape[-1])[("gate", "up").index(part)]
        target[first_row : first_row + tensor.shape[0]].copy_(tensor)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        return FusedMoEQuantConfig(
            dispatch_dtype=layer.dtype, weight_format=self.weight_format, row_exact=layer.row_exact
        )

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        quant_config = self.get_fused_moe_quant_config(layer)
        experts = DecodedExperts(
            w13_S2FD=layer.get_parameter("w13_S2FD").data,
            w2_SDF=layer.get_parameter("w2_SDF").data,
            scales_13_S2fd=layer.get_parameter("scales_13_S2fd").data,
            scales_2_Sdf=layer.get_parameter("scales_2_Sdf").data,
            decode=self.decode,
            buffer=self.buffer,
            activation=layer.activation,
            quant_config=quant_config,
        )
        self._moe_kernel = FusedMoEKernel(PrepareFinalize(layer.layer, layer.exchange, quant_config), experts)
