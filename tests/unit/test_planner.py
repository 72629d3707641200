"""Plans for the next placement: balanced, minimal, and safe to fill beside the placement that serves."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeray.comm.placement import EMPTY_SEAT, ExpertPlacement
from moeray.elastic.planner import fewest_workers, moves_to, num_moved, plan_placement


def counts(placement: ExpertPlacement, layer: int) -> list[int]:
    return [sum(e != EMPTY_SEAT for e in placement.seats_of(layer, slot)) for slot in placement.slots]


def held(placement: ExpertPlacement, layer: int, slot: int) -> int:
    if slot not in placement.slots:
        return 0
    return sum(expert != EMPTY_SEAT for expert in placement.seats_of(layer, slot))


def fewest_moves(current: ExpertPlacement, layer: int, slots: tuple[int, ...]) -> int:
    """By trying every choice of who holds one more: E - sum(min(current, target))."""
    base, extra = divmod(current.num_experts, len(slots))
    return min(
        current.num_experts - sum(min(held(current, layer, slot), base + (slot in more)) for slot in slots)
        for more in itertools.combinations(slots, extra)
    )


def check(current: ExpertPlacement, following: ExpertPlacement) -> None:
    """All that a plan promises; that every expert has a seat and none two on one worker, the type checks itself."""
    for layer in range(current.num_layers):
        per_worker = counts(following, layer)
        assert sum(per_worker) == current.num_experts
        assert max(per_worker) - min(per_worker) <= 1
        moved = [move for slot in following.slots for move in moves_to(current, following, slot) if move[0] == layer]
        assert len(moved) == fewest_moves(current, layer, following.slots)
    for slot in following.slots:
        for layer, seat, _ in moves_to(current, following, slot):
            assert slot not in current.slots or current.seats_of(layer, slot)[seat] == EMPTY_SEAT
        if slot not in current.slots:
            continue
        for layer in range(current.num_layers):
            before, after = current.seats_of(layer, slot), following.seats_of(layer, slot)
            stayed = [expert for expert in after if expert != EMPTY_SEAT and expert in before]
            assert all(before.index(expert) == after.index(expert) for expert in stayed)


def start(num_experts: int, slots: tuple[int, ...], num_seats: int, num_layers: int = 2) -> ExpertPlacement:
    return ExpertPlacement.contiguous(num_layers=num_layers, num_experts=num_experts, slots=slots, num_seats=num_seats)


@settings(deadline=None, max_examples=60)
@given(
    num_experts=st.integers(1, 24),
    min_workers=st.integers(1, 7),
    scales=st.lists(st.sets(st.integers(0, 8), min_size=1, max_size=7), min_size=1, max_size=6),
)
def test_any_sequence_of_scales_is_balanced_and_minimal(
    num_experts: int, min_workers: int, scales: list[set[int]]
) -> None:
    num_seats = -(-num_experts // min_workers)
    current = start(num_experts, tuple(range(7)), num_seats)
    for slots in scales:
        if len(slots) < fewest_workers(num_experts, num_seats):
            continue
        following = plan_placement(current, sorted(slots))
        check(current, following)
        current = following


@pytest.mark.parametrize(("num_experts", "workers"), [(8, 3), (8, 5), (8, 7), (60, 7), (3, 5), (1, 4)])
def test_experts_need_not_be_divisible_by_workers(num_experts: int, workers: int) -> None:
    current = start(num_experts, (0, 1), num_experts)
    following = plan_placement(current, range(workers))
    check(current, following)
    check(following, plan_placement(following, (0, 1)))


def test_the_same_slots_move_nothing() -> None:
    current = start(60, tuple(range(7)), 60)
    assert plan_placement(current, current.slots) == current


def test_slot_zero_may_leave() -> None:
    current = start(8, (0, 1, 2), 8)
    following = plan_placement(current, (1, 2))
    check(current, following)
    assert num_moved(current, following) == 2 * 3


def test_who_holds_one_more_is_spread_over_the_layers() -> None:
    following = plan_placement(start(9, (0,), 9, num_layers=8), (0, 1, 2, 3))
    joined = [following.num_experts_of(slot) for slot in (1, 2, 3)]
    assert max(joined) - min(joined) <= 1


def test_replicas_are_reduced_to_one() -> None:
    current = ExpertPlacement(
        num_experts=3, num_seats=3, slots=(0, 1), assignments=(((0, 1, EMPTY_SEAT), (2, 0, EMPTY_SEAT)),)
    )
    following = plan_placement(current, (0, 1))
    assert sorted(counts(following, 0)) == [1, 2]
    assert num_moved(current, following) == 0


def test_replicas_without_a_free_seat_are_refused() -> None:
    current = ExpertPlacement(
        num_experts=4,
        num_seats=2,
        slots=(0, 1, 2, 3),
        assignments=(((0, 1), (0, 1), (2, 3), (2, 3)),),
    )
    with pytest.raises(ValueError, match="of 2 seats are empty: its replicas must go first"):
        plan_placement(current, (0, 1))


def test_limits_are_named() -> None:
    current = start(8, (0, 1, 2), 3)
    with pytest.raises(ValueError, match="2 workers have 6 seats a layer, must be at least 3 workers"):
        plan_placement(current, (0, 1))
    with pytest.raises(ValueError, match="must be distinct"):
        plan_placement(current, (0, 1, 1))
