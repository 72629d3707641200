"""Every rank sees every row, and picks what its experts need: for few workers and many experts per token.

The exchange needs no destinations and no counts: all ranks send as many records as the fullest has tokens. In fast mode
each rank adds what its experts made of every row, and a reduce-scatter brings the sums home. In exact mode the experts'
rows come home one by one, because a reduce-scatter adds in an order that depends on the number of ranks.

Legend: T tokens, K experts per token, D hidden, M records of each rank, R = W * M received rows, W workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moeray.comm.buffers import CommunicationBuffers
from moeray.comm.dispatcher import DispatchedRows, DispatchHandle, TrafficCounter
from moeray.comm.group import CommGroup
from moeray.comm.home import WayHome, sum_at_experts
from moeray.comm.pieces import StepPieces
from moeray.comm.records import RecordFormat, RecordViews
from moeray.comm.seats import NO_SEAT, PairPlan, SeatMap


@dataclass(frozen=True, slots=True)
class _InFlight:
    """What combine needs to know of its dispatch."""

    plan: PairPlan | None
    tokens_per_rank: list[int]
    seats_RK: torch.Tensor
    weights_RK: torch.Tensor


class AllGatherDispatcher:
    """See `moeray.comm.dispatcher.Dispatcher`. Records carry physical experts, which mean the same everywhere."""

    name = "all_gather"

    def __init__(
        self,
        *,
        group: CommGroup,
        buffers: CommunicationBuffers,
        seats: SeatMap,
        fast: bool,
        traffic: TrafficCounter,
    ) -> None:
        """`seats` must be in rank order."""
        if seats.own_first:
            raise ValueError("seats must be in rank order")
        self.traffic = traffic
        self._group = group
        self._buffers = buffers
        self._seats = seats
        self._fast = fast
        self._way_home = WayHome(group=group, buffers=buffers, seats=seats, traffic=traffic)
        self._steps = StepPieces(buffers, group.rank, group.size)
        self._layouts: dict[tuple[int, int, torch.dtype], tuple[RecordFormat, RecordViews]] = {}

    def begin_step(self, num_tokens_per_rank: Sequence[int]) -> None:
        self._steps.begin_step(num_tokens_per_rank)

    def pieces(self, num_tokens: int) -> list[slice]:
        return self._steps.slices(num_tokens)

    def dispatch(
        self, hidden_TD: torch.Tensor, physical_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> DispatchedRows:
        num_own, rank, size = hidden_TD.shape[0], self._group.rank, self._group.size
        tokens_per_rank = self._steps.take(num_own)
        most = max(tokens_per_rank)
        record, views = self._layout(hidden_TD.shape[1], physical_ids_TK.shape[1], hidden_TD.dtype)
        received = views.part(0, size * most)
        own = received.part(rank * most, (rank + 1) * most)
        own.hidden_ND[:num_own].copy_(hidden_TD)
        if self._fast:
            own.weights_NK[:num_own].copy_(topk_weights_TK)
        own.seats_NK[:num_own].copy_(physical_ids_TK)
        own.seats_NK[num_own:].fill_(NO_SEAT)
        if most:
            self._group.all_gather(received.bytes_NB.view(-1), own.bytes_NB.view(-1))
        self._count(record, num_own, most)
        seats_RK = self._seats.own_seats(received.seats_NK)
        plan = None if self._fast else self._seats.plan_pairs(physical_ids_TK)
        state = _InFlight(plan, tokens_per_rank, seats_RK, received.weights_NK)
        return DispatchedRows(
            hidden_RD=received.hidden_ND,
            seat_ids_RK=seats_RK,
            topk_weights_RK=received.weights_NK,
            handle=DispatchHandle(num_tokens=num_own, topk_weights_TK=topk_weights_TK, state=state),
        )

    def combine(self, expert_rows_PD: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        state = handle.state
        assert isinstance(state, _InFlight)
        if state.plan is None:
            return self._combine_fast(expert_rows_PD, handle, state)
        arrived_pairs = state.seats_RK.ge(0).view(self._group.size, -1).sum(1).tolist()
        return self._way_home.combine(expert_rows_PD, state.plan, handle.topk_weights_TK, arrived_pairs)

    def _combine_fast(self, expert_rows_PD: torch.Tensor, handle: DispatchHandle, state: _InFlight) -> torch.Tensor:
        num_rows = state.seats_RK.shape[0]
        most = num_rows // self._group.size
        hidden, dtype = expert_rows_PD.shape[1], expert_rows_PD.dtype
        if most == 0:
            return expert_rows_PD.new_empty(0, hidden)
        parts_RD = self._buffers.view("sums", num_rows, hidden, torch.float32)
        sum_at_experts(expert_rows_PD, state.seats_RK, state.weights_RK, parts_RD)
        if dtype != torch.float32:
            parts_RD = self._buffers.view("outgoing", num_rows, hidden, dtype).copy_(parts_RD)
        home_MD = self._buffers.view("returned", most, hidden, dtype)
        self._group.reduce_scatter(home_MD.view(-1), parts_RD.view(-1))
        row_bytes = hidden * dtype.itemsize
        others = sum(state.tokens_per_rank) - state.tokens_per_rank[self._group.rank]
        self.traffic.combine_payload_bytes += others * row_bytes
        self.traffic.wire_bytes += (self._group.size - 1) * most * row_bytes
        return home_MD[: handle.num_tokens].clone()

    def _count(self, record: RecordFormat, num_own: int, most: int) -> None:
        others = self._group.size - 1
        self.traffic.dispatch_payload_bytes += others * num_own * record.row_bytes
        self.traffic.index_bytes += others * num_own * record.index_bytes
        self.traffic.wire_bytes += others * most * record.num_bytes

    def _layout(self, hidden_size: int, top_k: int, dtype: torch.dtype) -> tuple[RecordFormat, RecordViews]:
        key = (hidden_size, top_k, dtype)
        layout = self._layouts.get(key)
        if layout is None:
            record = RecordFormat(
                hidden_size=hidden_size,
                top_k=top_k,
                dtype=dtype,
                seat_dtype=torch.int32,
                carries_weights=self._fast,
            )
            room = self._group.size * self._buffers.piece_tokens
            layout = (record, record.views(self._buffers.records, room))
            self._layouts[key] = layout
        return layout
