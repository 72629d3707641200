"""The experts that live on this worker: per-seat weights of one layer.

Legend: S seats, D hidden, F intermediate.
"""

import torch
from torch import nn

from moeray.comm.exchange import ExpertExchange
from moeray.worker.moe.activation import GatedActivation, gated_activation
from moeray.worker.moe.quant.base import FusedMoEMethodBase


class RoutedExperts(nn.Module):
    """Holds what a quantisation method registers on it; seats are filled by the loader and may change contents later.

    `layer` counts MoE layers. `row_exact`: a row's result must not depend on the batch that it is in. Rows and biases
    have `dtype`, projections `weights_dtype`.
    """

    def __init__(
        self,
        *,
        layer: int,
        num_experts: int,
        num_seats: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str | GatedActivation,
        has_bias: bool,
        dtype: torch.dtype,
        weights_dtype: torch.dtype,
        device: torch.device,
        row_exact: bool,
        exchange: ExpertExchange,
        quant_method: FusedMoEMethodBase,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.num_experts = num_experts
        self.num_seats = num_seats
        self.top_k = top_k
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.has_bias = has_bias
        self.activation = gated_activation(activation)
        self.dtype = dtype
        self.weights_dtype = weights_dtype
        self.device = device
        self.row_exact = row_exact
        self.exchange = exchange
        self._check(quant_method)
        quant_method.create_weights(self)

    @property
    def seat_nbytes(self) -> int:
        """Bytes of one seat."""
        return sum(parameter.nbytes for parameter in self.parameters()) // self.num_seats

    def replace_weights(self, quant_method: FusedMoEMethodBase) -> None:
        """Drops the parameters of the old method and registers those of the new one (before loading only).

        Raises `ValueError`, and changes nothing, if the new method does not support this layer.
        """
        self._check(quant_method)
        for name in list(self._parameters):
            delattr(self, name)
        quant_method.create_weights(self)

    def empty_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros in the shapes and the type of the weights that one expert is computed with."""
        shapes = ((2 * self.intermediate_size, self.hidden_size), (self.hidden_size, self.intermediate_size))
        first, second = (torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes)
        return first, second

    def _check(self, quant_method: FusedMoEMethodBase) -> None:
        supported, reason = quant_method.supports(self)
        if not supported:
            raise ValueError(f"{type(quant_method).__name__} does not support {reason} (MoE layer {self.layer})")
