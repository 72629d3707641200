"""What a quantisation method of MoE layers has to provide.

A method owns the format of its experts' weights: it creates them, finishes them once they are loaded, and builds its
kernel there and nowhere else. Scaling, a change of epoch or a new worker never build a kernel again.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from moeray.worker.moe.kernel import FusedMoEKernel
    from moeray.worker.moe.routed_experts import RoutedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedMoEQuantConfig:
    """The format that both halves of a kernel agree on at construction.

    `dispatch_dtype` is that of rows on their way to the experts, `weight_format` names how experts are stored, and
    `row_exact` says whether a row's bits may not depend on the batch.
    """

    dispatch_dtype: torch.dtype
    weight_format: str
    row_exact: bool


class FusedMoEMethodBase(ABC):
    """Creates, finishes and runs the experts of one layer."""

    def __init__(self) -> None:
        self._moe_kernel: FusedMoEKernel | None = None

    def supports(self, layer: "RoutedExperts") -> tuple[bool, str]:  # noqa: ARG002
        """Whether the method can hold and compute this layer's experts; what it cannot do if not."""
        return True, ""

    @abstractmethod
    def create_weights(self, layer: "RoutedExperts") -> None:
        """Registers the parameters on `layer`, one row a seat; values are undefined until loaded."""

    @abstractmethod
    def process_weights_after_loading(self, layer: "RoutedExperts") -> None:
        """Brings loaded weights into the kernel's format and builds the kernel. Called once."""

    @abstractmethod
    def get_fused_moe_quant_config(self, layer: "RoutedExperts") -> FusedMoEQuantConfig:
        """The format that the kernel's two halves agree on."""

    @abstractmethod
    def load_expert(
        self, layer: "RoutedExperts", seat: int, name: str, tensor: torch.Tensor, first_row: int = 0
    ) -> None:
        """Writes rows of one weight of an expert into a seat, from `first_row` on.

        Names are "gate", "up" and "down" with shapes [F, D], [F, D] and [D, F], their biases "gate_bias" and so on, and
        what else the method keeps of an expert. Works before and after the kernel was built: a seat's contents may
        change while the kernel lives.
        """

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        """What the kernel wants expert ids in; None takes them as the router gives them (int64)."""
        return None

    @property
    def moe_kernel(self) -> "FusedMoEKernel":
        """The kernel; only there once `process_weights_after_loading` has run."""
        if self._moe_kernel is None:
            raise RuntimeError(f"{type(self).__name__} has no kernel yet: weights are not loaded")
        return self._moe_kernel

    @property
    def has_kernel(self) -> bool:
        return self._moe_kernel is not None
