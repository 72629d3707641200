"""The dispatcher of a group of one: every expert is here, no row moves.

Legend: T tokens, K experts per token, D hidden, P = T * K pairs.
"""

from collections.abc import Sequence

import torch

from moeray.comm.buffers import CommunicationBuffers
from moeray.comm.combine import weighted_sum
from moeray.comm.dispatcher import DispatchedRows, DispatchHandle, TrafficCounter


class LoopbackDispatcher:
    """Rows go to this worker's own seats. Exact and fast are the same here: nothing would be sent."""

    name = "loopback"

    def __init__(self, *, buffers: CommunicationBuffers, slot: int, num_seats: int, traffic: TrafficCounter) -> None:
        self.traffic = traffic
        self._buffers = buffers
        self._first_physical_expert = slot * num_seats

    def begin_step(self, num_tokens_per_rank: Sequence[int]) -> None:
        if len(num_tokens_per_rank) != 1:
            raise ValueError(f"num_tokens_per_rank has {len(num_tokens_per_rank)} entries, loopback takes 1")

    def pieces(self, num_tokens: int) -> list[slice]:
        """Nothing is sent, so nothing has to be cut."""
        return [slice(0, num_tokens)]

    def dispatch(
        self, hidden_TD: torch.Tensor, physical_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> DispatchedRows:
        handle = DispatchHandle(num_tokens=hidden_TD.shape[0], topk_weights_TK=topk_weights_TK)
        return DispatchedRows(
            hidden_RD=hidden_TD,
            seat_ids_RK=physical_ids_TK - self._first_physical_expert,
            topk_weights_RK=topk_weights_TK,
            handle=handle,
        )

    def combine(self, expert_rows_PD: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        expert_rows_PD = expert_rows_PD.contiguous()
        num_tokens, top_k = handle.topk_weights_TK.shape
        hidden = expert_rows_PD.shape[1]
        room = self._buffers.piece_tokens
        products = self._buffers.view("sums", min(num_tokens, room) * top_k, hidden, torch.float32)
        weights_TK = handle.topk_weights_TK
        if num_tokens <= room:
            return weighted_sum(expert_rows_PD, None, weights_TK, products, products)
        out_TD = expert_rows_PD.new_empty(num_tokens, hidden)
        for first in range(0, num_tokens, room):
            last = min(first + room, num_tokens)
            rows_PD = expert_rows_PD[first * top_k : last * top_k]
            out_TD[first:last] = weighted_sum(rows_PD, None, weights_TK[first:last], products, products)
        return out_TD
