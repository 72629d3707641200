"""Rows go only where their experts are: one exchange out, one back, both as all-to-all.

On gloo a message may be shorter than the posted receive, so the step header's token counts are bound enough: a receive
is posted for every token of the source, unfilled records keep seat -1, and no counts travel. Where that is not possible
(NCCL) counts are exchanged first. This rank's own rows lie in front of the received ones and are never sent.

Legend: T tokens, K experts per token, D hidden, R received rows, P (received row, expert) pairs, N sent rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moeray.comm.buffers import CommunicationBuffers
from moeray.comm.dispatcher import DispatchedRows, DispatchHandle, TrafficCounter
from moeray.comm.group import CommGroup
from moeray.comm.home import WayHome, exchange_rows, sum_at_experts
from moeray.comm.pieces import StepPieces
from moeray.comm.records import RecordFormat, RecordViews
from moeray.comm.seats import NO_SEAT, PairPlan, RowPlan, SeatMap, count_segments


@dataclass(frozen=True, slots=True)
class _Layout:
    """Views for one kind of layer, over whole buffers."""

    row_bytes: int
    index_bytes: int
    record_bytes: int
    records: RecordViews
    outgoing: RecordViews


@dataclass(frozen=True, slots=True)
class _InFlight:
    """What combine needs to know of its dispatch. `arrived_pairs` (by rank) is None if counts came in-band."""

    plan: PairPlan
    rows: RowPlan
    recv_splits: list[int]
    arrived_pairs: list[int] | None
    seats_RK: torch.Tensor
    weights_RK: torch.Tensor


class AllToAllDispatcher:
    """See `moeray.comm.dispatcher.Dispatcher`."""

    name = "all_to_all"

    def __init__(
        self,
        *,
        group: CommGroup,
        buffers: CommunicationBuffers,
        seats: SeatMap,
        fast: bool,
        traffic: TrafficCounter,
        counts_first: bool | None = None,
    ) -> None:
        """`seats` must put this rank first. `counts_first` None: only where short messages are not accepted."""
        if not seats.own_first:
            raise ValueError("seats must put this rank first")
        self.traffic = traffic
        self._group = group
        self._buffers = buffers
        self._seats = seats
        self._fast = fast
        self._counts_first = not group.accepts_short_messages if counts_first is None else counts_first
        self._way_home = WayHome(group=group, buffers=buffers, seats=seats, traffic=traffic)
        self._steps = StepPieces(buffers, group.rank, group.size)
        self._layouts: dict[tuple[int, int, torch.dtype], _Layout] = {}

    def begin_step(self, num_tokens_per_rank: Sequence[int]) -> None:
        self._steps.begin_step(num_tokens_per_rank)

    def pieces(self, num_tokens: int) -> list[slice]:
        return self._steps.slices(num_tokens)

    def dispatch(
        self, hidden_TD: torch.Tensor, physical_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> DispatchedRows:
        num_own = hidden_TD.shape[0]
        bounds = self._steps.take(num_own)
        layout = self._layout(hidden_TD.shape[1], physical_ids_TK.shape[1], hidden_TD.dtype)
        plan = self._seats.plan_pairs(physical_ids_TK)
        rows = self._seats.plan_rows(plan)
        send_splits = self._seats.by_rank(rows.rows_per_peer)
        if self._counts_first:
            recv_splits, arrived_pairs = self._exchange_counts(send_splits, plan)
        else:
            recv_splits, arrived_pairs = list(bounds), None
            recv_splits[self._group.rank] = 0
        num_rows = num_own + sum(recv_splits)
        records = layout.records
        seats_NK = records.seats_NK[:num_rows]
        seats_NK[num_own:].fill_(NO_SEAT)
        seats_NK[:num_own].copy_(rows.own_seats_TK)
        records.hidden_ND[:num_own].copy_(hidden_TD)
        if self._fast:
            records.weights_NK[:num_own].copy_(topk_weights_TK)
        sent_NB = self._gather(layout, rows, num_own)
        self._group.exchange(sent_NB, send_splits, records.bytes_NB[num_own:num_rows], recv_splits)
        self._count(layout, sent_NB.shape[0])
        seats_RK = seats_NK.to(torch.int64)
        weights_RK = records.weights_NK[:num_rows]
        state = _InFlight(plan, rows, recv_splits, arrived_pairs, seats_RK, weights_RK)
        return DispatchedRows(
            hidden_RD=records.hidden_ND[:num_rows],
            seat_ids_RK=seats_RK,
            topk_weights_RK=weights_RK,
            handle=DispatchHandle(num_tokens=num_own, topk_weights_TK=topk_weights_TK, state=state),
        )

    def combine(self, expert_rows_PD: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        state = handle.state
        assert isinstance(state, _InFlight)
        if self._fast:
            return self._combine_fast(expert_rows_PD, handle, state)
        arrived = state.arrived_pairs
        if arrived is None:
            top_k = state.seats_RK.shape[1]
            here_P = state.seats_RK.cpu().numpy()[handle.num_tokens :].ravel() >= 0
            arrived = count_segments(here_P, [rows * top_k for rows in state.recv_splits])
        arrived[self._group.rank] = state.plan.pairs_per_peer[0]
        return self._way_home.combine(expert_rows_PD, state.plan, handle.topk_weights_TK, arrived)

    def _combine_fast(self, expert_rows_PD: torch.Tensor, handle: DispatchHandle, state: _InFlight) -> torch.Tensor:
        """Send one sum for each received row; at home add them to this rank's own."""
        num_own, num_rows = handle.num_tokens, state.seats_RK.shape[0]
        hidden, dtype = expert_rows_PD.shape[1], expert_rows_PD.dtype
        sums_RD = self._buffers.view("sums", num_rows, hidden, torch.float32)
        sum_at_experts(expert_rows_PD, state.seats_RK, state.weights_RK, sums_RD)
        filled_N = np.any(state.seats_RK.cpu().numpy()[num_own:] >= 0, axis=1)
        send_splits = count_segments(filled_N, state.recv_splits)
        filled_rows_N = torch.from_numpy(filled_N.nonzero()[0]).to(sums_RD.device)
        send_ND = self._buffers.view("outgoing", filled_rows_N.shape[0], hidden, dtype)
        send_ND.copy_(sums_RD[num_own:].index_select(0, filled_rows_N))
        home_ND = self._buffers.view("returned", state.rows.tokens_N.shape[0], hidden, dtype)
        recv_splits = self._seats.by_rank(state.rows.rows_per_peer)
        exchange_rows(self._group, send_ND, send_splits, home_ND, recv_splits)
        self.traffic.combine_payload_bytes += send_ND.nbytes
        self.traffic.wire_bytes += send_ND.nbytes
        out_TD = sums_RD[:num_own].clone()
        out_TD.index_add_(0, state.rows.tokens_N, home_ND.to(torch.float32))
        return out_TD.to(dtype)

    def _gather(self, layout: _Layout, rows: RowPlan, num_own: int) -> torch.Tensor:
        """The records to send, in the order of peers, each with its destination's seats."""
        num_sent = rows.tokens_N.shape[0]
        sent_NB = layout.outgoing.bytes_NB[:num_sent]
        torch.index_select(layout.records.bytes_NB[:num_own], 0, rows.tokens_N, out=sent_NB)
        layout.outgoing.seats_NK[:num_sent].copy_(rows.seats_NK)
        return sent_NB

    def _exchange_counts(self, send_splits: list[int], plan: PairPlan) -> tuple[list[int], list[int]]:
        """Rows and pairs that will come from each rank."""
        size = self._group.size
        counts_out, counts_in = self._buffers.counts_out[:size], self._buffers.counts_in[:size]
        pairs = self._seats.by_rank(plan.pairs_per_peer)
        counts_out.copy_(torch.tensor([send_splits, pairs], dtype=torch.int64).t())
        self._group.exchange_counts(counts_in, counts_out)
        recv_splits, arrived_pairs = counts_in.t().tolist()
        return recv_splits, arrived_pairs

    def _count(self, layout: _Layout, num_sent: int) -> None:
        self.traffic.dispatch_payload_bytes += num_sent * layout.row_bytes
        self.traffic.index_bytes += num_sent * layout.index_bytes
        self.traffic.wire_bytes += num_sent * layout.record_bytes

    def _layout(self, hidden_size: int, top_k: int, dtype: torch.dtype) -> _Layout:
        key = (hidden_size, top_k, dtype)
        layout = self._layouts.get(key)
        if layout is None:
            record = RecordFormat(
                hidden_size=hidden_size,
                top_k=top_k,
                dtype=dtype,
                seat_dtype=self._seats.seat_dtype,
                carries_weights=self._fast,
            )
            room = self._group.size * self._buffers.piece_tokens
            layout = _Layout(
                record.row_bytes,
                record.index_bytes,
                record.num_bytes,
                record.views(self._buffers.records, room),
                record.views(self._buffers.outgoing, room),
            )
            self._layouts[key] = layout
        return layout
