"""One MoE layer's work as two halves: bring rows to their experts and back, and compute on what arrived.

Legend: T local tokens, K experts per token, R received rows, P (row, expert) pairs on this rank, D hidden.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from moeray.comm.dispatcher import DispatchedRows
from moeray.comm.exchange import ExpertExchange
from moeray.worker.moe.quant.base import FusedMoEQuantConfig


class Experts(Protocol):
    """The compute half: grouped GEMMs and activation over this rank's seats."""

    quant_config: FusedMoEQuantConfig

    def supports(self, quant_config: FusedMoEQuantConfig) -> tuple[bool, str]:
        """Whether rows of this format can be computed on; the reason if not."""

    def apply(self, hidden_RD: torch.Tensor, seat_ids_RK: torch.Tensor) -> torch.Tensor:
        """Unweighted outputs expert_rows_PD, in the order of received row, then k; pairs with seat -1 are left out."""


@dataclass(frozen=True, slots=True)
class PrepareFinalize:
    """The transport half: quantise and dispatch, then combine.

    It holds the worker's one `ExpertExchange`, which outlives every epoch.
    """

    layer: int
    exchange: ExpertExchange
    quant_config: FusedMoEQuantConfig

    def prepare(
        self, hidden_TD: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> DispatchedRows:
        """Send the rows to the ranks that hold their experts; `topk_ids_TK` are logical."""
        if hidden_TD.dtype != self.quant_config.dispatch_dtype:
            hidden_TD = hidden_TD.to(self.quant_config.dispatch_dtype)
        physical_ids_TK = self.exchange.physical_ids(self.layer, topk_ids_TK)
        return self.exchange.dispatch(hidden_TD, physical_ids_TK, topk_weights_TK)

    def finalize(self, expert_rows_PD: torch.Tensor, rows: DispatchedRows) -> torch.Tensor:
        """Bring the results home and add them up: hidden_TD."""
        return self.exchange.combine(expert_rows_PD, rows.handle)


class FusedMoEKernel:
    """Prepare, experts, finalise, piece by piece if the step is larger than the communication buffers.

    Raises `ValueError` at construction if the halves do not agree on the format.
    """

    def __init__(self, prepare_finalize: PrepareFinalize, experts: Experts) -> None:
        supported, reason = experts.supports(prepare_finalize.quant_config)
        if not supported:
            raise ValueError(f"{type(experts).__name__} cannot take {prepare_finalize.quant_config}: {reason}")
        self.prepare_finalize = prepare_finalize
        self.experts = experts

    def __call__(
        self, hidden_TD: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of each token's experts, hidden_TD."""
        pieces = self.prepare_finalize.exchange.pieces(hidden_TD.shape[0])
        if len(pieces) == 1:
            return self._run_piece(hidden_TD, topk_ids_TK, topk_weights_TK)
        out_TD = torch.empty_like(hidden_TD)
        for piece in pieces:
            out_TD[piece] = self._run_piece(hidden_TD[piece], topk_ids_TK[piece], topk_weights_TK[piece])
        return out_TD

    def _run_piece(
        self, hidden_TD: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> torch.Tensor:
        rows = self.prepare_finalize.prepare(hidden_TD, topk_ids_TK, topk_weights_TK)
        expert_rows_PD = self.experts.apply(rows.hidden_RD, rows.seat_ids_RK)
        return self.prepare_finalize.finalize(expert_rows_PD, rows)
