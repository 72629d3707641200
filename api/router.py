"""Which worker gets the next sequence: the one with the fewest outstanding tokens."""

from dataclasses import dataclass

# A worker in this life: (slot, incarnation).
MemberKey = tuple[int, int]


@dataclass(slots=True)
class MemberLoad:
    """What a worker still has to do for this front end. One that is leaving gets no more, one that is away nothing
    until it is back.
    """

    num_sequences: int = 0
    outstanding_tokens: int = 0
    is_leaving: bool = False
    is_away: bool = False

    @property
    def takes_more(self) -> bool:
        return not (self.is_leaving or self.is_away)


class Router:
    """Knows the serving members and their load. Pure bookkeeping: the caller sends and reports progress."""

    def __init__(self, max_inflight_per_worker: int) -> None:
        self._max_inflight = max_inflight_per_worker
        self._loads: dict[MemberKey, MemberLoad] = {}

    @property
    def members(self) -> tuple[MemberKey, ...]:
        """Serving members by slot, those included that are leaving, and none that is away."""
        return tuple(sorted(member for member, load in self._loads.items() if not load.is_away))

    def add(self, member: MemberKey) -> None:
        """From now on `member` gets sequences, also if it was away; adding it twice changes nothing."""
        self._loads.setdefault(member, MemberLoad()).is_away = False

    def remove(self, member: MemberKey) -> None:
        """`member` gets nothing more and its load is forgotten."""
        self._loads.pop(member, None)

    def set_away(self, member: MemberKey) -> None:
        """`member` cannot be reached: it gets nothing until it is added again, and keeps its load."""
        if (load := self._loads.get(member)) is not None:
            load.is_away = True

    def set_leaving(self, member: MemberKey, leaving: bool) -> None:
        """Whether `member` only ends what it has; a leaver that stays after all is as before."""
        if (load := self._loads.get(member)) is not None:
            load.is_leaving = leaving

    def at_slot(self, slot: int | None) -> MemberKey | None:
        """The member in this slot that takes sequences, full or not; None if there is none."""
        members = (member for member, load in self._loads.items() if member[0] == slot and load.takes_more)
        return next(members, None)

    def load(self, member: MemberKey) -> MemberLoad:
        return self._loads.get(member) or MemberLoad()

    def num_free(self) -> int:
        """How many more sequences the members take at once. One that is away counts: it is expected back."""
        staying = (load for load in self._loads.values() if not load.is_leaving)
        return sum(max(0, self._max_inflight - load.num_sequences) for load in staying)

    def choose(self) -> MemberKey | None:
        """The member with the fewest outstanding tokens that has room, ties by slot; None if all are full."""
        free = [
            (load.outstanding_tokens, member)
            for member, load in self._loads.items()
            if load.num_sequences < self._max_inflight and load.takes_more
        ]
        return min(free)[1] if free else None

    def take(self, member: MemberKey, tokens: int) -> None:
        """A sequence with `tokens` outstanding (prompt to prefill and tokens to come) was given to `member`."""
        load = self._loads[member]
        load.num_sequences += 1
        load.outstanding_tokens += tokens

    def progress(self, member: MemberKey, tokens: int) -> None:
        """`tokens` of what was outstanding are done."""
        if (load := self._loads.get(member)) is not None:
            load.outstanding_tokens -= tokens

    def release(self, member: MemberKey, tokens: int) -> None:
        """A sequence has left `member`, with `tokens` still outstanding that will not be done."""
        if (load := self._loads.get(member)) is not None:
            load.num_sequences -= 1
            load.outstanding_tokens -= tokens
