"""Experts' products, grouped: the pairs of a batch sorted by the seat that they belong to.

Legend: S seats, R received rows, K experts per token, P pairs, Q pairs with padding, D hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from moeray.worker.models.linear import padded_rows_of


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Pairs of one batch, sorted by seat; each seat's run may be padded to a number of rows that keeps its bits.

    `runs` are (seat, start, end) over the Q sorted places; `source_rows_Q` is the received row of each place and
    `place_of_pair_P` where each pair's result lies.
    """

    runs: list[tuple[int, int, int]]
    source_rows_Q: torch.Tensor
    place_of_pair_P: torch.Tensor


def group_by_seat(seat_ids_RK: torch.Tensor, *, exact: bool, pads: bool = True) -> ExpertGroups:
    """Sort a batch's pairs by seat. With `pads` runs are as long as `padded_rows`; what is added repeats row 0."""
    top_k = seat_ids_RK.shape[1]
    flat = seat_ids_RK.reshape(-1).cpu().numpy()
    pair_positions = np.flatnonzero(flat >= 0)
    seats_P = flat[pair_positions]
    order = np.argsort(seats_P, kind="stable")
    counts = np.bincount(seats_P)
    filled = np.flatnonzero(counts)
    widths = padded_rows_of(counts[filled], exact=exact) if pads else counts[filled]
    ends = np.cumsum(widths)
    starts = ends - widths
    first_of_seat = np.cumsum(counts[filled]) - counts[filled]
    offsets = np.repeat(starts - first_of_seat, counts[filled])
    places_sorted = np.arange(len(order)) + offsets
    source_rows_Q = np.zeros(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    source_rows_Q[places_sorted] = pair_positions[order] // top_k
    place_of_pair_P = np.empty(len(order), dtype=np.int64)
    place_of_pair_P[order] = places_sorted
    return ExpertGroups(
        runs=list(zip(filled.tolist(), starts.tolist(), ends.tolist(), strict=True)),
        source_rows_Q=torch.from_numpy(source_rows_Q).to(seat_ids_RK.device),
        place_of_pair_P=torch.from_numpy(place_of_pair_P).to(seat_ids_RK.device),
    )


def run_by_seat(
    hidden_RD: torch.Tensor,
    seat_ids_RK: torch.Tensor,
    run_seat: Callable[[torch.Tensor, int], torch.Tensor],
    *,
    exact: bool,
    pads: bool,
) -> torch.Tensor:
    """`run_seat(rows_MD, seat)` for each seat that got rows; the outputs of all pairs, in the order of row, then k.

    `exact` and `pads` as for `group_by_seat`.
    """
    groups = group_by_seat(seat_ids_RK, exact=exact, pads=pads)
    rows_QD = hidden_RD.index_select(0, groups.source_rows_Q)
    out_QD = torch.empty_like(rows_QD)
    for seat, start, end in groups.runs:
        out_QD[start:end] = run_seat(rows_QD[start:end], seat)
    return out_QD.index_select(0, groups.place_of_pair_P)
