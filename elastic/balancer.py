"""From the load of experts to a placement in which workers have equally much to do, with few experts moved. Pure.

In every MoE layer all workers wait for the one with the most rows, so its load is what counts. Layer by layer, the most
loaded worker gives an expert away, for one of less load or, where counts allow it, for none: the exchange that lowers
the higher load of the two workers the most is taken, until none lowers it enough. What a plan promises is what
`elastic/planner.py` does: counts of any two workers differ by one at most, an expert that stays keeps its seat, and one
that moves goes into a seat that is empty in the current placement.

Legend: L MoE layers, E experts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moeray.comm.messages import ExpertCounts
from moeray.comm.placement import EMPTY_SEAT, ExpertPlacement

# An exchange is worth it if it lowers the higher load of two workers by this share of a worker's mean load.
LEAST_GAIN = 0.01
# A layer is left as it is unless its balancedness grows by so much: moving costs.
LEAST_GROWTH = 0.02


def balancedness(placement: ExpertPlacement, load_LE: ExpertCounts) -> tuple[float, ...]:
    """Mean load of the workers / highest load, layer by layer: 1.0 is perfect, and what a layer without load has.

    The measure of DeepSeek's EPLB. Each expert must have one seat. Raises `ValueError` for a load of another shape.
    """
    _check_shape(placement, load_LE)
    return tuple(
        _balancedness([sum(load_E[expert] for expert in seats if expert != EMPTY_SEAT) for seats in layer])
        for layer, load_E in zip(placement.assignments, load_LE, strict=True)
    )


def plan_rebalance(current: ExpertPlacement, load_LE: ExpertCounts) -> ExpertPlacement:
    """The placement on the same slots that this load is spread better by; `current` itself if nothing is to move.

    No layer's balancedness falls. Raises `ValueError` if an expert has several seats, if counts differ by more than one
    already, or for a load of another shape.
    """
    _check_shape(current, load_LE)
    layers = tuple(_plan_layer(current, layer, load_E) for layer, load_E in enumerate(load_LE))
    if layers == current.assignments:
        return current
    return ExpertPlacement(
        num_experts=current.num_experts, num_seats=current.num_seats, slots=current.slots, assignments=layers
    )


def _check_shape(placement: ExpertPlacement, load_LE: ExpertCounts) -> None:
    if len(load_LE) != placement.num_layers or any(len(load_E) != placement.num_experts for load_E in load_LE):
        raise ValueError(
            f"load has {len(load_LE)} layers of {sorted({len(load_E) for load_E in load_LE})} experts, must have "
            f"{placement.num_layers} of {placement.num_experts}"
        )
    if any(load < 0 for load_E in load_LE for load in load_E):
        raise ValueError("load has a count below 0, must have none")


def _balancedness(loads: Sequence[int]) -> float:
    return sum(loads) / len(loads) / max(loads) if any(loads) else 1.0


@dataclass(frozen=True, slots=True)
class _Exchange:
    """`given` goes from one worker to `receiver`, `taken` the other way; None for nothing. Their higher load falls by
    `gain`, and `num_moves` more experts have to be moved, or fewer, if they go home.
    """

    gain: int
    num_moves: int
    given: int
    taken: int | None
    receiver: int

    @property
    def worth(self) -> tuple[int, int]:
        """More is better."""
        return self.gain, -self.num_moves


class _Layer:
    """One layer while it is planned. Workers are numbered by rank; `home` is who holds an expert now, `owner` who will.

    `num_free` is how many more experts may arrive at each worker: a seat that is left is not empty yet.
    """

    def __init__(self, assignments: Sequence[Sequence[int]], load_E: Sequence[int]) -> None:
        self.load_E = load_E
        self.home = [-1] * len(load_E)
        for worker, seats in enumerate(assignments):
            for expert in seats:
                if expert != EMPTY_SEAT:
                    self.home[expert] = worker
        self.owner = list(self.home)
        self.held = [{expert for expert in seats if expert != EMPTY_SEAT} for seats in assignments]
        self.num_free = [sum(expert == EMPTY_SEAT for expert in seats) for seats in assignments]
        self.loads = [sum(load_E[expert] for expert in held) for held in self.held]

    def best_exchange(self) -> _Exchange | None:
        """What lowers the load of the most loaded worker, and does not make another as loaded, the most.

        Of several that do as much, one with the fewest moves.
        """
        giver = max(range(len(self.loads)), key=lambda worker: (self.loads[worker], -worker))
        best: _Exchange | None = None
        for receiver in sorted(range(len(self.loads)), key=lambda worker: (self.loads[worker], worker)):
            # Half of the difference is the most that can be gained, and it is smaller for all that follow.
            if best is not None and 2 * best.gain > self.loads[giver] - self.loads[receiver]:
                break
            for exchange in self._exchanges(giver, receiver):
                if best is None or exchange.worth > best.worth:
                    best = exchange
        return best

    def _exchanges(self, giver: int, receiver: int) -> Iterator[_Exchange]:
        """All that lower the giver's load without making the receiver's as high."""
        difference = self.loads[giver] - self.loads[receiver]
        options: list[int | None] = [*sorted(self.held[receiver])]
        if len(self.held[giver]) > len(self.held[receiver]):
            options.append(None)
        for given in sorted(self.held[giver]):
            for taken in options:
                moved = self.load_E[given] - (self.load_E[taken] if taken is not None else 0)
                if 0 < moved < difference and self._has_room(giver, given, receiver, taken):
                    gain = min(moved, difference - moved)
                    num_moves = self._num_moves(given, receiver) + self._num_moves(taken, giver)
                    yield _Exchange(gain, num_moves, given, taken, receiver)

    def _num_moves(self, expert: int | None, receiver: int) -> int:
        """How many more experts are away from home when this one has gone there."""
        if expert is None:
            return 0
        return (self.home[expert] != receiver) - (self.home[expert] != self.owner[expert])

    def _has_room(self, giver: int, given: int, receiver: int, taken: int | None) -> bool:
        """Whether both find a seat: at home, or one that is empty now and that nobody else goes to."""
        if self.home[given] != receiver:
            is_left = taken is not None and self.home[taken] != receiver
            if self.num_free[receiver] + is_left < 1:
                return False
        if taken is None or self.home[taken] == giver:
            return True
        return self.num_free[giver] + (self.home[given] != giver) >= 1

    def apply(self, exchange: _Exchange) -> None:
        """Let the exchange happen."""
        giver = self.owner[exchange.given]
        self._move(exchange.given, exchange.receiver)
        if exchange.taken is not None:
            self._move(exchange.taken, giver)

    def _move(self, expert: int, receiver: int) -> None:
        giver = self.owner[expert]
        self.num_free[giver] += self.home[expert] != giver
        self.num_free[receiver] -= self.home[expert] != receiver
        self.held[giver].discard(expert)
        self.held[receiver].add(expert)
        self.loads[giver] -= self.load_E[expert]
        self.loads[receiver] += self.load_E[expert]
        self.owner[expert] = receiver


def _plan_layer(current: ExpertPlacement, layer: int, load_E: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    before = current.assignments[layer]
    plan = _Layer(before, load_E)
    counts = [len(held) for held in plan.held]
    if sum(counts) != current.num_experts or max(counts) - min(counts) > 1:
        raise ValueError(
            f"layer {layer}: workers hold {counts} experts, must be {current.num_experts} with counts within one"
        )
    least_gain = LEAST_GAIN * sum(load_E) / len(counts)
    was = best = _balancedness(plan.loads)
    owner = list(plan.owner)
    while (exchange := plan.best_exchange()) is not None and exchange.gain >= least_gain:
        plan.apply(exchange)
        # Several may have to give before the highest load falls; what came after it last fell moves for nothing.
        if (now := _balancedness(plan.loads)) > best:
            best, owner = now, list(plan.owner)
    return _seated(before, owner) if best >= was + LEAST_GROWTH else before


def _seated(before: Sequence[Sequence[int]], owner: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Who stays keeps its seat; who comes takes the next one that was empty."""
    after = [
        [expert if _stays(expert, worker, owner) else EMPTY_SEAT for expert in seats]
        for worker, seats in enumerate(before)
    ]
    for worker, seats in enumerate(before):
        empty = iter([seat for seat, expert in enumerate(seats) if expert == EMPTY_SEAT])
        for expert, new_owner in enumerate(owner):
            if new_owner == worker and expert not in seats:
                after[worker][next(empty)] = expert
    return tuple(tuple(seats) for seats in after)


def _stays(expert: int, worker: int, owner: Sequence[int]) -> bool:
    return expert != EMPTY_SEAT and owner[expert] == worker
