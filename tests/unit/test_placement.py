"""Placement: any number of experts on any number of workers, every expert with a seat, replicas apart."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeray.comm.placement import EMPTY_SEAT, ExpertPlacement


def place(assignments: tuple[tuple[tuple[int, ...], ...], ...], num_experts: int = 3) -> ExpertPlacement:
    num_seats = len(assignments[0][0])
    slots = tuple(range(len(assignments[0])))
    return ExpertPlacement(num_experts=num_experts, num_seats=num_seats, slots=slots, assignments=assignments)


@given(
    num_experts=st.integers(1, 40),
    slots=st.lists(st.integers(0, 20), min_size=1, max_size=9, unique=True),
    spare=st.integers(0, 3),
)
def test_contiguous_gives_every_expert_one_seat_evenly(num_experts: int, slots: list[int], spare: int) -> None:
    num_seats = -(-num_experts // len(slots)) + spare
    placement = ExpertPlacement.contiguous(num_layers=2, num_experts=num_experts, slots=slots, num_seats=num_seats)
    counts = [placement.num_experts_of(slot) for slot in slots]
    assert sum(counts) == 2 * num_experts
    assert max(counts) - min(counts) <= 2  # one for each of two layers
    for layer in range(placement.num_layers):
        homes = placement.logical_to_physical(layer)
        assert [len(home) for home in homes] == [1] * num_experts
        for expert, (physical,) in enumerate(homes):
            slot, seat = divmod(physical, num_seats)
            assert placement.seats_of(layer, slot)[seat] == expert
            assert placement.physical_expert(slot, seat) == physical


def test_eight_experts_on_three_workers() -> None:
    placement = ExpertPlacement.contiguous(num_layers=1, num_experts=8, slots=(0, 1, 2), num_seats=3)
    assert placement.assignments[0] == ((0, 1, 2), (3, 4, 5), (6, 7, EMPTY_SEAT))


def test_too_few_seats_are_refused() -> None:
    with pytest.raises(ValueError, match="num_seats is 2, must be at least 3 for 8 experts on 3"):
        ExpertPlacement.contiguous(num_layers=1, num_experts=8, slots=(0, 1, 2), num_seats=2)
    with pytest.raises(ValueError, match="slots is empty"):
        ExpertPlacement.contiguous(num_layers=1, num_experts=8, slots=(), num_seats=2)


def test_replicas_are_listed_in_rank_order() -> None:
    placement = place((((0, 1), (2, 0)),))
    assert placement.logical_to_physical(0) == ((0, 3), (1,), (2,))


@pytest.mark.parametrize(
    ("assignments", "text"),
    [
        ((((0, 1), (1, EMPTY_SEAT)),), r"experts without a seat: \[2\]"),
        ((((0, 0), (1, 2)),), "two replicas of one expert on one worker"),
        ((((0, 3), (1, 2)),), "outside 0..2"),
        ((((0, 1), (2,)),), "1 seats, must be 2"),
        ((((0, 1), (2, 0)), ((0, 1),)), "layer 1 assigns 1 workers, must be 2"),
    ],
)
def test_impossible_placements_are_refused_by_name(
    assignments: tuple[tuple[tuple[int, ...], ...], ...], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        place(assignments)


def test_digests_tell_placements_apart() -> None:
    assert place((((0, 1), (2, 0)),)).digest() == place((((0, 1), (2, 0)),)).digest()
    assert place((((0, 1), (2, 0)),)).digest() != place((((0, 1), (0, 2)),)).digest()


@pytest.mark.parametrize("module", ["topology", "placement", "messages", "sockets", "errors"])
def test_control_modules_load_no_torch(module: str) -> None:
    code = f"import sys, moeray.comm.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
