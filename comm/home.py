"""The way home, shared by the dispatchers that move rows: experts' rows back to their tokens, one by one.

Legend: T tokens, K experts per token, D hidden, P (received row, expert) pairs, N rows, R received rows.
"""

from collections.abc import Sequence

import torch

from moeray.comm.buffers import CommunicationBuffers
from moeray.comm.combine import weighted_sum
from moeray.comm.dispatcher import TrafficCounter
from moeray.comm.group import CommGroup
from moeray.comm.seats import PairPlan, SeatMap


class WayHome:
    """Exact combine over one group: every pair's row comes home, and the sum is formed there in the order of k."""

    def __init__(
        self, *, group: CommGroup, buffers: CommunicationBuffers, seats: SeatMap, traffic: TrafficCounter
    ) -> None:
        self._group = group
        self._buffers = buffers
        self._seats = seats
        self._traffic = traffic
        self._views: dict[tuple[int, int, torch.dtype], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def combine(
        self,
        expert_rows_PD: torch.Tensor,
        plan: PairPlan,
        weights_TK: torch.Tensor,
        arrived_pairs: Sequence[int],
    ) -> torch.Tensor:
        """The weighted sums, hidden_TD. `arrived_pairs` are the pairs on this rank by source rank.

        Raises `ValueError` if the experts returned another number of rows than there are pairs.
        """
        if expert_rows_PD.shape[0] != sum(arrived_pairs):
            raise ValueError(f"expert_rows_PD has {expert_rows_PD.shape[0]} rows, must be {sum(arrived_pairs)}")
        rows_PD = expert_rows_PD.contiguous()
        num_rows = weights_TK.numel()
        home_ND, gathered_ND, sums_ND = self._scratch(rows_PD, weights_TK.shape[1])
        home_ND = home_ND[:num_rows]
        send_splits, recv_splits = list(arrived_pairs), self._seats.by_rank(plan.pairs_per_peer)
        rank = self._seats.rank
        num_own = recv_splits[rank]
        if self._seats.own_first:
            home_ND[:num_own].copy_(rows_PD[:num_own])
            send_splits[rank] = recv_splits[rank] = 0
            exchange_rows(self._group, rows_PD[num_own:], send_splits, home_ND[num_own:], recv_splits)
        else:
            exchange_rows(self._group, rows_PD, send_splits, home_ND, recv_splits)
        sent_bytes = (rows_PD.shape[0] - num_own) * rows_PD.shape[1] * rows_PD.element_size()
        self._traffic.combine_payload_bytes += sent_bytes
        self._traffic.wire_bytes += sent_bytes
        return weighted_sum(home_ND, plan.positions_KT, weights_TK, gathered_ND, sums_ND)

    def _scratch(self, rows_PD: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Whole buffers as matrices of this width: rows at home, the same in the order of k, fp32 products."""
        hidden, dtype = rows_PD.shape[1], rows_PD.dtype
        views = self._views.get((hidden, top_k, dtype))
        if views is None:
            room = self._buffers.piece_tokens * top_k
            sums = self._buffers.view("sums", room, hidden, torch.float32)
            if dtype == torch.float32:
                views = (self._buffers.view("returned", room, hidden, dtype), sums, sums)
            else:
                both = self._buffers.view("returned", 2 * room, hidden, dtype)
                views = (both[:room], both[room:], sums)
            self._views[hidden, top_k, dtype] = views
        return views


def sum_at_experts(
    expert_rows_PD: torch.Tensor, seats_RK: torch.Tensor, weights_RK: torch.Tensor, sums_RD: torch.Tensor
) -> None:
    """Fill `sums_RD` (fp32) with each received row's weighted sum over the experts that are here, zero for none."""
    here_RK = seats_RK.ge(0)
    row_P = here_RK.nonzero()[:, 0]
    weights_P = weights_RK[here_RK].to(torch.float32)
    sums_RD.zero_()
    sums_RD.index_add_(0, row_P, expert_rows_PD * weights_P.unsqueeze(1))


def exchange_rows(
    group: CommGroup,
    send_ND: torch.Tensor,
    send_splits: Sequence[int],
    recv_ND: torch.Tensor,
    recv_splits: Sequence[int],
) -> None:
    """Like `CommGroup.exchange`, but as bytes: the transports do not know every dtype that a row may have."""
    group.exchange(send_ND.view(torch.uint8), send_splits, recv_ND.view(torch.uint8), recv_splits)
