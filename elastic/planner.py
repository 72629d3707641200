"""From one placement of experts to the next: balanced, and with as few experts on the way as possible. Pure.

In every layer the counts of any two workers differ by one at most. An expert that stays keeps its seat, so a running
engine never looks for it anywhere else; one that moves goes into a seat that is empty in the current placement, so it
can be filled while that placement still serves.

Which workers hold one more than the others is free, and only there can moves be saved or wasted: with `current`
experts on a worker and room for `target`, at most `min(current, target)` stay. The ones that have more than the
smaller count anyway are therefore asked first; with the counts so chosen every bound is reached, and no plan moves
fewer.
"""

from collections.abc import Sequence

from moeray.comm.placement import EMPTY_SEAT, ExpertPlacement


def fewest_workers(num_experts: int, num_seats: int) -> int:
    """With fewer workers than this, `num_seats` seats on each cannot hold all experts of a layer."""
    return -(-num_experts // num_seats)


def plan_placement(current: ExpertPlacement, slots: Sequence[int]) -> ExpertPlacement:
    """The placement for these slots (in rank order) that moves the fewest experts away from `current`.

    Each expert has one seat afterwards: of several replicas the one on the emptiest worker stays. Raises `ValueError`
    if the slots are not distinct, or their seats too few.
    """
    if not slots or len(set(slots)) != len(slots):
        raise ValueError(f"slots is {tuple(slots)}, must be distinct and not empty")
    fewest = fewest_workers(current.num_experts, current.num_seats)
    if len(slots) < fewest:
        raise ValueError(
            f"{len(slots)} workers have {len(slots) * current.num_seats} seats a layer, must be at least {fewest} "
            f"workers: num_experts is {current.num_experts}, num_seats is {current.num_seats}"
        )
    num_extras = dict.fromkeys(slots, 0)
    layers = tuple(_plan_layer(current, layer, slots, num_extras) for layer in range(current.num_layers))
    return ExpertPlacement(
        num_experts=current.num_experts, num_seats=current.num_seats, slots=tuple(slots), assignments=layers
    )


def _plan_layer(
    current: ExpertPlacement, layer: int, slots: Sequence[int], num_extras: dict[int, int]
) -> tuple[tuple[int, ...], ...]:
    """One layer of the plan. `num_extras` counts who held one more so far, to spread that over the layers."""
    before = {slot: _seats_before(current, layer, slot) for slot in slots}
    kept = {slot: list(seats) for slot, seats in before.items()}
    _drop_replicas(kept, current.num_experts)
    targets = _targets(kept, current.num_experts, num_extras)
    homeless = set(range(current.num_experts))
    for slot in slots:
        seats = kept[slot]
        for seat in reversed(range(current.num_seats)):
            if seats[seat] != EMPTY_SEAT and _num_held(seats) > targets[slot]:
                seats[seat] = EMPTY_SEAT
        homeless.difference_update(seats)
    waiting = sorted(homeless, reverse=True)
    for slot in slots:
        free = [seat for seat, expert in enumerate(before[slot]) if expert == EMPTY_SEAT]
        missing = targets[slot] - _num_held(kept[slot])
        if missing > len(free):
            raise ValueError(
                f"layer {layer}, slot {slot}: {missing} experts must move in, only {len(free)} of {current.num_seats} "
                "seats are empty: its replicas must go first"
            )
        for seat in free[:missing]:
            kept[slot][seat] = waiting.pop()
    return tuple(tuple(kept[slot]) for slot in slots)


def _seats_before(current: ExpertPlacement, layer: int, slot: int) -> tuple[int, ...]:
    if slot not in current.slots:
        return (EMPTY_SEAT,) * current.num_seats
    return current.seats_of(layer, slot)


def _num_held(seats: Sequence[int]) -> int:
    return sum(expert != EMPTY_SEAT for expert in seats)


def _drop_replicas(kept: dict[int, list[int]], num_experts: int) -> None:
    """Leave one seat to each expert that has several, on the worker that holds the fewest."""
    homes: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, seats in kept.items():
        for expert in seats:
            if expert != EMPTY_SEAT:
                homes[expert].append(slot)
    for expert, owners in enumerate(homes):
        for owner in sorted(owners, key=lambda slot: _num_held(kept[slot]))[1:]:
            kept[owner][kept[owner].index(expert)] = EMPTY_SEAT


def _targets(kept: dict[int, list[int]], num_experts: int, num_extras: dict[int, int]) -> dict[int, int]:
    """How many experts each slot shall hold; see the module's docstring."""
    base, extra = divmod(num_experts, len(kept))
    order = sorted(kept, key=lambda slot: (_num_held(kept[slot]) <= base, num_extras[slot]))
    targets = dict.fromkeys(kept, base)
    for slot in order[:extra]:
        targets[slot] += 1
        num_extras[slot] += 1
    return targets


def moves_to(current: ExpertPlacement, following: ExpertPlacement, slot: int) -> list[tuple[int, int, int]]:
    """(layer, seat, expert) of all seats that `following` fills on this slot and `current` does not."""
    return [
        (layer, seat, expert)
        for layer in range(following.num_layers)
        for seat, (old, expert) in enumerate(
            zip(_seats_before(current, layer, slot), following.seats_of(layer, slot), strict=True)
        )
        if expert not in (EMPTY_SEAT, old)
    ]


def num_moved(current: ExpertPlacement, following: ExpertPlacement) -> int:
    """How many experts, counted in every layer, must be brought to a worker that does not hold them."""
    return sum(len(moves_to(current, following, slot)) for slot in following.slots)
