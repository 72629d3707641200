"""Where a batch's pairs go: from physical experts to peers, their local seats, and the order in which rows come home.

Plans are made on the host with numpy: the host needs the counts anyway, and for the few rows of a decode step numpy's
calls cost a third of torch's. On CUDA that takes one copy of the ids to the host and one of each index back.

A *peer* is a position in the order in which a dispatcher lays out sources and destinations: rank order, or this rank
first and the others in rank order behind it.

Legend: T tokens, K experts per token, W workers (by peer), N sent rows, R received rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

NO_SEAT = -1
MAX_INT8_SEATS = 127

Ints = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class PairPlan:
    """Where a batch's (token, expert) pairs go, and where their rows will lie when they are home.

    `pairs_per_peer` counts them. `positions_KT` is the place of each pair's row among all that come home, which are
    ordered by peer, then token, then k.
    """

    peers_TK: Ints
    seats_TK: Ints
    pairs_per_peer: list[int]
    positions_KT: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which rows are sent, each once to a destination however many of its experts a token picked.

    `tokens_N` are ordered by peer, then token; `rows_per_peer` counts them, with 0 for this rank, the first peer.
    `seats_NK` are the destinations' seats of the rows, `own_seats_TK` this rank's seats; -1 elsewhere.
    """

    tokens_N: torch.Tensor
    rows_per_peer: list[int]
    seats_NK: torch.Tensor
    own_seats_TK: torch.Tensor


class SeatMap:
    """Tables of one epoch's placement sizes. What the seats hold does not matter here, so replicas and moves do not."""

    def __init__(
        self, slots: Sequence[int], num_seats: int, rank: int, device: torch.device, *, own_first: bool
    ) -> None:
        ranks = list(range(len(slots)))
        self.rank = rank
        self.size = len(slots)
        self.own_first = own_first
        self.peers = [rank, *(r for r in ranks if r != rank)] if own_first else ranks
        self.seat_dtype = torch.int8 if num_seats <= MAX_INT8_SEATS else torch.int16
        seat_dtype = np.int8 if num_seats <= MAX_INT8_SEATS else np.int16
        num_physical = (max(slots) + 1) * num_seats
        # Seats of slots that are no members count as one more peer, so that they can be seen in the counts.
        self._peer_of = np.full(num_physical, self.size, dtype=np.int16)
        self._seat_of = np.tile(np.arange(num_seats, dtype=seat_dtype), max(slots) + 1)
        for peer, peer_rank in enumerate(self.peers):
            first = slots[peer_rank] * num_seats
            self._peer_of[first : first + num_seats] = peer
        # One more entry than there are physical experts: id -1 finds it at the end.
        own_seat = np.full(num_physical + 1, NO_SEAT, dtype=np.int64)
        first = slots[rank] * num_seats
        own_seat[first : first + num_seats] = np.arange(num_seats)
        self._own_seat = torch.from_numpy(own_seat).to(device)
        self._device = device
        self._on_host = device.type == "cpu"
        self._counting = np.arange(0)

    def plan_pairs(self, physical_ids_TK: torch.Tensor) -> PairPlan:
        """The destinations of a batch. On CUDA this waits for the device.

        Raises `ValueError` if a pair's seat belongs to no member of this epoch.
        """
        num_tokens, top_k = physical_ids_TK.shape
        num_pairs = num_tokens * top_k
        ids_TK = physical_ids_TK.cpu().numpy()
        peers_TK = self._peer_of.take(ids_TK)
        peers_P = peers_TK.ravel()
        pairs_per_peer: list[int] = np.bincount(peers_P, minlength=self.size).tolist()
        if len(pairs_per_peer) > self.size:
            raise ValueError(f"{pairs_per_peer[-1]} of {num_pairs} pairs go to seats of slots that are no members")
        positions_P = np.empty(num_pairs, dtype=np.int64)
        positions_P[peers_P.argsort(kind="stable")] = self._arange(num_pairs)
        positions_KT = np.ascontiguousarray(positions_P.reshape(num_tokens, top_k).T)
        return PairPlan(peers_TK, self._seat_of.take(ids_TK), pairs_per_peer, self._to_device(positions_KT))

    def plan_rows(self, pairs: PairPlan) -> RowPlan:
        """The rows for the other ranks; this rank must be the first peer."""
        num_tokens = pairs.peers_TK.shape[0]
        goes_WT = np.zeros((self.size, num_tokens), dtype=np.bool_)
        goes_WT[pairs.peers_TK, self._arange(num_tokens)[:, None]] = True
        goes_WT[0] = False
        peers_N, tokens_N = goes_WT.nonzero()
        sent_NK = pairs.peers_TK.take(tokens_N, axis=0) == peers_N[:, None]
        seats_NK = np.where(sent_NK, pairs.seats_TK.take(tokens_N, axis=0), NO_SEAT)
        own_seats_TK = np.where(pairs.peers_TK == 0, pairs.seats_TK, NO_SEAT)
        return RowPlan(
            self._to_device(tokens_N),
            np.bincount(peers_N, minlength=self.size).tolist(),
            self._to_device(seats_NK),
            self._to_device(own_seats_TK),
        )

    def own_seats(self, physical_ids_RK: torch.Tensor) -> torch.Tensor:
        """This rank's seats (int64), -1 for experts that sit elsewhere and for ids of -1."""
        return self._own_seat[physical_ids_RK.long()]

    def by_rank(self, per_peer: Sequence[int]) -> list[int]:
        """The same numbers in rank order, as collectives take them."""
        numbers = [0] * self.size
        for rank, number in zip(self.peers, per_peer, strict=True):
            numbers[rank] = number
        return numbers

    def _arange(self, length: int) -> Ints:
        if self._counting.shape[0] < length:
            self._counting = np.arange(2 * length)
        return self._counting[:length]

    def _to_device(self, array: Ints) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._on_host else tensor.to(self._device)


def count_segments(flags_R: Ints, lengths: Sequence[int]) -> list[int]:
    """How many flags are set in each of consecutive segments, some of which may be empty."""
    counts: list[int] = []
    start = 0
    for length in lengths:
        counts.append(int(np.count_nonzero(flags_R[start : start + length])) if length else 0)
        start += length
    return counts
