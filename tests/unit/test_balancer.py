"""Plans by load: never worse, as good as can be within a bound, few moves, and safe to fill beside what serves."""

import random
from collections.abc import Iterator, Sequence

import pytest

from moeray.comm.messages import ExpertCounts
from moeray.comm.placement import EMPTY_SEAT, ExpertPlacement
from moeray.elastic.balancer import LEAST_GAIN, LEAST_GROWTH, balancedness, plan_rebalance
from moeray.elastic.planner import moves_to, num_moved, plan_placement

# How much higher than it could be the highest load of a layer may stay. The mean of the excess is far below.
WORST_EXCESS, MEAN_EXCESS = 0.20, 0.01


def start(num_experts: int, num_workers: int, num_free: int, num_layers: int = 2) -> ExpertPlacement:
    """Workers with so many seats more than the fullest of them needs."""
    return ExpertPlacement.contiguous(
        num_layers=num_layers,
        num_experts=num_experts,
        slots=range(num_workers),
        num_seats=-(-num_experts // num_workers) + num_free,
    )


def random_load(rng: random.Random, num_layers: int, num_experts: int) -> ExpertCounts:
    """Even, heavy-tailed, or with experts that nobody wants."""
    kinds = [lambda: rng.randrange(1000), lambda: int(10 * rng.paretovariate(1.2)), lambda: rng.randrange(2) * 50]
    return tuple(tuple(rng.choice(kinds)() for _ in range(num_experts)) for _ in range(num_layers))


def shuffled(rng: random.Random, current: ExpertPlacement) -> ExpertPlacement:
    """Other experts in other seats, as after many changes."""
    layers = []
    for layer in current.assignments:
        names = rng.sample(range(current.num_experts), current.num_experts)
        layers.append(tuple(tuple(rng.sample([names[e] if e >= 0 else EMPTY_SEAT for e in s], len(s))) for s in layer))
    return ExpertPlacement(
        num_experts=current.num_experts, num_seats=current.num_seats, slots=current.slots, assignments=tuple(layers)
    )


def check(current: ExpertPlacement, following: ExpertPlacement, load_LE: ExpertCounts) -> None:
    """All that a plan promises; that none of a worker's experts is there twice, the type checks itself."""
    assert following.slots == current.slots
    for layer, seats_by_worker in enumerate(following.assignments):
        counts = [sum(expert != EMPTY_SEAT for expert in seats) for seats in seats_by_worker]
        assert sum(counts) == current.num_experts
        assert max(counts) - min(counts) <= 1
        for slot in current.slots:
            before, after = current.seats_of(layer, slot), following.seats_of(layer, slot)
            kept = [expert for expert in after if expert != EMPTY_SEAT and expert in before]
            assert all(before.index(expert) == after.index(expert) for expert in kept)
            for seat in [seat for at, seat, _ in moves_to(current, following, slot) if at == layer]:
                assert before[seat] == EMPTY_SEAT
    for was, now, old, new in zip(
        balancedness(current, load_LE),
        balancedness(following, load_LE),
        current.assignments,
        following.assignments,
        strict=True,
    ):
        assert old == new or now >= was + LEAST_GROWTH


@pytest.mark.parametrize("num_free", [0, 1, 2, 20])
@pytest.mark.parametrize("num_workers", range(2, 8))
def test_the_rules_hold_for_any_load_again_and_again(num_workers: int, num_free: int) -> None:
    rng = random.Random(100 * num_workers + num_free)
    num_moves = 0
    for _ in range(12):
        num_experts = rng.randint(num_workers, 24)
        current = shuffled(rng, start(num_experts, num_workers, num_free))
        for _ in range(3):
            load_LE = random_load(rng, 2, num_experts)
            following = plan_rebalance(current, load_LE)
            check(current, following, load_LE)
            assert plan_rebalance(current, load_LE) == following
            num_moves += num_moved(current, following)
            current = following
    assert num_moves > 0


def test_without_an_empty_seat_nothing_can_move() -> None:
    current = start(12, 3, 0)
    load_LE = tuple(tuple(range(12)) for _ in range(2))
    assert plan_rebalance(current, load_LE) is current


def test_one_staging_seat_lets_one_expert_arrive_at_each_worker() -> None:
    current = start(12, 3, 1, num_layers=1)
    load_LE = ((90, 80, 70, 60, 1, 1, 1, 1, 2, 2, 2, 2),)
    following = plan_rebalance(current, load_LE)
    check(current, following, load_LE)
    assert [len(moves_to(current, following, slot)) for slot in (0, 1, 2)] == [1, 1, 0]
    assert balancedness(following, load_LE)[0] > balancedness(current, load_LE)[0] + 0.1
    # What was left is empty in the next placement, so that the next plan goes on from there.
    again = plan_rebalance(following, load_LE)
    check(following, again, load_LE)
    assert balancedness(again, load_LE)[0] > balancedness(following, load_LE)[0] + 0.1


@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_equal_loads_and_none_move_nothing(num_workers: int) -> None:
    current = start(3 * num_workers, num_workers, 5)
    for load in (0, 7):
        load_LE = ((load,) * current.num_experts,) * 2
        assert plan_rebalance(current, load_LE) is current
        assert balancedness(current, load_LE) == (1.0, 1.0)


def test_a_layer_that_gains_too_little_is_left() -> None:
    current = start(4, 2, 4, num_layers=2)
    # Both can be made perfect, by 0.01 and by 0.03.
    load_LE = ((50, 51, 49, 50), (51, 53, 49, 47))
    assert balancedness(current, load_LE) == pytest.approx((200 / 202, 200 / 208))
    following = plan_rebalance(current, load_LE)
    assert following.assignments[0] == current.assignments[0]
    assert balancedness(following, load_LE)[1] > 200 / 208 + LEAST_GROWTH


def test_a_popular_expert_is_exchanged_for_one_that_is_not() -> None:
    current = start(6, 2, 6, num_layers=1)
    load_LE = ((100, 50, 50, 0, 0, 0),)
    following = plan_rebalance(current, load_LE)
    assert balancedness(following, load_LE) == (1.0,)
    assert num_moved(current, following) == 2


def test_where_counts_allow_it_one_way_is_enough() -> None:
    current = start(3, 2, 3, num_layers=1)
    load_LE = ((60, 40, 20),)
    following = plan_rebalance(current, load_LE)
    assert balancedness(following, load_LE) == (1.0,)
    assert [len(moves_to(current, following, slot)) for slot in (0, 1)] == [0, 1]


def placements(current: ExpertPlacement) -> Iterator[list[int]]:
    """Every choice of who owns each expert that the rules allow, from a placement of one layer."""
    (layer,) = current.assignments
    home = {expert: worker for worker, seats in enumerate(layer) for expert in seats if expert != EMPTY_SEAT}
    num_free = [sum(expert == EMPTY_SEAT for expert in seats) for seats in layer]
    most = -(-current.num_experts // len(layer))
    fewest = current.num_experts // len(layer)

    def place(owners: list[int], counts: list[int], free: list[int]) -> Iterator[list[int]]:
        if len(owners) == current.num_experts:
            if min(counts) >= fewest:
                yield owners
            return
        for worker in range(len(layer)):
            arrives = home[len(owners)] != worker
            if counts[worker] < most and free[worker] >= arrives:
                counts[worker] += 1
                free[worker] -= arrives
                yield from place([*owners, worker], counts, free)
                counts[worker] -= 1
                free[worker] += arrives

    yield from place([], [0] * len(layer), num_free)


def highest(owners: Sequence[int], load_E: Sequence[int]) -> int:
    loads = [0] * (max(owners) + 1)
    for expert, worker in enumerate(owners):
        loads[worker] += load_E[expert]
    return max(loads)


@pytest.mark.parametrize("num_free", [0, 1, 9])
def test_the_highest_load_is_close_to_the_lowest_possible(num_free: int) -> None:
    rng = random.Random(num_free)
    excesses = []
    for _ in range(60):
        num_workers = rng.randint(2, 4)
        current = start(rng.randint(num_workers, 8), num_workers, num_free, num_layers=1)
        load_LE = random_load(rng, 1, current.num_experts)
        if not any(load_LE[0]):
            continue
        lowest = min(highest(owners, load_LE[0]) for owners in placements(current))
        mean = sum(load_LE[0]) / num_workers
        found = mean / balancedness(plan_rebalance(current, load_LE), load_LE)[0]
        excesses.append(found / lowest - 1)
    assert max(excesses) <= WORST_EXCESS
    assert sum(excesses) / len(excesses) <= MEAN_EXCESS


def test_a_large_deployment_is_balanced_well() -> None:
    rng = random.Random(7)
    current = start(64, 8, 8, num_layers=4)
    load_LE = tuple(tuple(rng.randrange(10, 1000) for _ in range(64)) for _ in range(4))
    assert max(balancedness(current, load_LE)) < 0.9
    following = plan_rebalance(current, load_LE)
    check(current, following, load_LE)
    assert min(balancedness(following, load_LE)) > 1 - 2 * LEAST_GAIN


def test_a_scale_goes_on_from_a_rebalanced_placement() -> None:
    rng = random.Random(3)
    current = start(16, 4, 16)
    load_LE = random_load(rng, 2, 16)
    balanced = plan_rebalance(current, load_LE)
    assert balanced != current
    assert plan_placement(balanced, balanced.slots) == balanced
    assert num_moved(balanced, plan_placement(balanced, (0, 1, 2))) == 2 * 4


def test_what_it_cannot_read_is_refused() -> None:
    current = start(4, 2, 2)
    for load_LE in (((1, 1, 1, 1),), ((1, 1, 1), (1, 1, 1))):
        with pytest.raises(ValueError, match="must have 2 of 4"):
            plan_rebalance(current, load_LE)
        with pytest.raises(ValueError, match="must have 2 of 4"):
            balancedness(current, load_LE)
    with pytest.raises(ValueError, match="a count below 0"):
        plan_rebalance(current, ((1, 1, 1, -1), (1, 1, 1, 1)))
    replicas = ExpertPlacement(num_experts=2, num_seats=2, slots=(0, 1), assignments=(((0, 1), (1, EMPTY_SEAT)),))
    with pytest.raises(ValueError, match=r"layer 0: workers hold \[2, 1\] experts, must be 2"):
        plan_rebalance(replicas, ((1, 1),))
