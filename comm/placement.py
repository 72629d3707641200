"""Which seat holds which expert: the map that routing, loading and every move of experts go by.

A *logical expert* is what the router picks. A *seat* is a place on a worker, per layer, that can hold one expert; its
*physical expert* id is `slot * num_seats + seat`, stable for as long as the slot lives, whatever the epoch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

EMPTY_SEAT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """An immutable assignment of logical experts to seats, layer by layer.

    `assignments[layer][member][seat]` is a logical expert id or `EMPTY_SEAT`; `member` indexes `slots`, which are the
    slots of the epoch in rank order. `layer` counts MoE layers only.
    """

    num_experts: int
    num_seats: int
    slots: tuple[int, ...]
    assignments: tuple[tuple[tuple[int, ...], ...], ...]

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise ValueError(f"num_experts is {self.num_experts}, must be at least 1")
        if len(set(self.slots)) != len(self.slots) or not self.slots:
            raise ValueError(f"slots is {self.slots}, must be distinct and not empty")
        for layer, members in enumerate(self.assignments):
            self._check_layer(layer, members)

    def _check_layer(self, layer: int, members: Sequence[Sequence[int]]) -> None:
        if len(members) != len(self.slots):
            raise ValueError(f"layer {layer} assigns {len(members)} workers, must be {len(self.slots)}")
        seen: set[int] = set()
        for slot, seats in zip(self.slots, members, strict=True):
            if len(seats) != self.num_seats:
                raise ValueError(f"layer {layer}, slot {slot}: {len(seats)} seats, must be {self.num_seats}")
            held = [expert for expert in seats if expert != EMPTY_SEAT]
            if any(not 0 <= expert < self.num_experts for expert in held):
                raise ValueError(f"layer {layer}, slot {slot}: an expert id is outside 0..{self.num_experts - 1}")
            if len(set(held)) != len(held):
                raise ValueError(f"layer {layer}, slot {slot}: two replicas of one expert on one worker")
            seen.update(held)
        if len(seen) != self.num_experts:
            missing = sorted(set(range(self.num_experts)) - seen)
            raise ValueError(f"layer {layer}: experts without a seat: {missing}")

    @classmethod
    def contiguous(
        cls, *, num_layers: int, num_experts: int, slots: Sequence[int], num_seats: int
    ) -> "ExpertPlacement":
        """Give each worker a contiguous run of experts, counts within one of each other, the same in every layer.

        Raises `ValueError` if `num_seats` is below what the fullest worker needs.
        """
        size = len(slots)
        if size < 1:
            raise ValueError("slots is empty, must name at least one worker")
        fullest = -(-num_experts // size)
        if num_seats < fullest:
            raise ValueError(
                f"num_seats is {num_seats}, must be at least {fullest} for {num_experts} experts on {size}"
            )
        base, extra = divmod(num_experts, size)
        members: list[tuple[int, ...]] = []
        first = 0
        for rank in range(size):
            count = base + (1 if rank < extra else 0)
            held = tuple(range(first, first + count))
            members.append(held + (EMPTY_SEAT,) * (num_seats - count))
            first += count
        return cls(
            num_experts=num_experts,
            num_seats=num_seats,
            slots=tuple(slots),
            assignments=(tuple(members),) * num_layers,
        )

    @property
    def num_layers(self) -> int:
        return len(self.assignments)

    def physical_expert(self, slot: int, seat: int) -> int:
        """The id of a seat: stable across epochs."""
        return slot * self.num_seats + seat

    def seats_of(self, layer: int, slot: int) -> tuple[int, ...]:
        """What each of the slot's seats holds in this layer: logical ids, `EMPTY_SEAT` for none."""
        return self.assignments[layer][self.slots.index(slot)]

    def logical_to_physical(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """For each logical expert the physical experts that hold it, in rank order; never empty."""
        homes: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, seats in zip(self.slots, self.assignments[layer], strict=True):
            for seat, expert in enumerate(seats):
                if expert != EMPTY_SEAT:
                    homes[expert].append(self.physical_expert(slot, seat))
        return tuple(tuple(home) for home in homes)

    def num_experts_of(self, slot: int) -> int:
        """Filled seats of a worker over all layers."""
        return sum(e != EMPTY_SEAT for layer in range(self.num_layers) for e in self.seats_of(layer, slot))

    def digest(self) -> str:
        """A short hash that equal placements share on every host."""
        text = repr((self.num_experts, self.num_seats, self.slots, self.assignments))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
