"""Who is in the group: one immutable value per epoch, swapped whole."""

import hashlib
from dataclasses import dataclass

from moeray.comm.placement import ExpertPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker's place in an epoch.

    `endpoint` is the ZeroMQ address of its inbox and `public_key` the CURVE key (Z85) that the inbox proves.
    """

    slot: int
    incarnation: int
    node: str
    endpoint: str
    public_key: str

    @property
    def identity(self) -> str:
        """`slot.incarnation`: unique over the life of the deployment."""
        return f"{self.slot}.{self.incarnation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The members of an epoch in rank order, and where each expert sits."""

    epoch: int
    members: tuple[Member, ...]
    placement: ExpertPlacement

    def __post_init__(self) -> None:
        if self.epoch < 0:
            raise ValueError(f"epoch is {self.epoch}, must be at least 0")
        slots = tuple(member.slot for member in self.members)
        if slots != self.placement.slots:
            raise ValueError(f"members have slots {slots}, the placement has {self.placement.slots}")

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def slots(self) -> tuple[int, ...]:
        return self.placement.slots

    def rank_of(self, slot: int) -> int:
        """The slot's position in this epoch's group; `ValueError` if it is no member."""
        if slot not in self.slots:
            raise ValueError(f"slot {slot} is not a member of epoch {self.epoch}, members are {self.slots}")
        return self.slots.index(slot)

    def has(self, slot: int, incarnation: int) -> bool:
        """Whether this worker, in this life, is a member."""
        return any((member.slot, member.incarnation) == (slot, incarnation) for member in self.members)

    def digest(self) -> str:
        """A short hash that all members compare before an epoch may serve."""
        text = repr((self.epoch, [member.identity for member in self.members], self.placement.digest()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
