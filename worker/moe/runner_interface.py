"""The abstract contract of a running MoE layer: what a model may rely on."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from moeray.worker.moe.shared_experts import SharedExperts


class MoERunnerInterface(nn.Module, ABC):
    """A MoE layer that runs: hidden states in, hidden states out, over all workers.

    Legend: T tokens, D hidden, E experts.
    """

    @abstractmethod
    def forward(self, hidden_TD: torch.Tensor, router_logits_TE: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's output for the local tokens, hidden_TD. Every rank of the group must call it, also with T = 0.

        `router_logits_TE` is given if and only if the router is not internal. Raises `GroupError` if a peer fails.
        """

    @property
    @abstractmethod
    def is_internal_router(self) -> bool:
        """True if the layer computes its own router logits."""

    @property
    @abstractmethod
    def shared_experts(self) -> "SharedExperts | None":
        """Experts that every token goes to, if the layer has any."""
