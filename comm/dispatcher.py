"""How rows travel to the experts and back: the contract that every dispatcher fulfils.

Shapes: T local tokens, K experts per token, D hidden, R received rows, P = number of (received row, expert) pairs whose
seat is on this rank, ordered row-major: by received row, then by k.

Every rank calls `begin_step`, then `dispatch` and `combine` in turn for each piece of each MoE layer, also with T = 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchHandle:
    """What `combine` needs to bring a dispatched batch home. Opaque outside the dispatcher that made it."""

    num_tokens: int
    topk_weights_TK: torch.Tensor
    state: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedRows:
    """What arrived at this rank's experts.

    `seat_ids_RK` (int64) is the local seat of each (row, k), or -1 where the expert sits elsewhere; a row may have no
    seat here at all, and its values mean nothing then. Rows lie in communication buffers, possibly with a stride: they
    are valid until the next call of the dispatcher. `topk_weights_RK` has no columns where weights stay at home.
    """

    hidden_RD: torch.Tensor
    seat_ids_RK: torch.Tensor
    topk_weights_RK: torch.Tensor
    handle: DispatchHandle


@dataclass(slots=True)
class TrafficCounter:
    """Bytes since the start: useful payload of rows, ids and weights, and all that was handed to the transport."""

    dispatch_payload_bytes: int = 0
    combine_payload_bytes: int = 0
    index_bytes: int = 0
    wire_bytes: int = 0


@runtime_checkable
class Dispatcher(Protocol):
    """Moves rows to the ranks that hold their experts, and the results back."""

    name: str
    traffic: TrafficCounter

    def begin_step(self, num_tokens_per_rank: Sequence[int]) -> None:
        """Take the step header's token counts, in rank order; they bound every later exchange of the step."""

    def pieces(self, num_tokens: int) -> list[slice]:
        """Slices that cover the local tokens; equally many on every rank in this step, some of them empty."""

    def dispatch(
        self, hidden_TD: torch.Tensor, physical_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> DispatchedRows:
        """Send each row once to each rank that holds one of its experts; rows that stay local are not sent.

        `physical_ids_TK` are int64 seats (`slot * num_seats + seat`); weights are fp32. Raises `GroupError`.
        """

    def combine(self, expert_rows_PD: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
        """Bring the experts' unweighted outputs home and return the weighted sum, hidden_TD.

        Exact mode returns one row per (token, expert) and adds them in the order of k, always the same; fast mode adds
        at the expert's side first. Raises `GroupError`.
        """
