"""Who is it that the others wait for? Decides from ticks alone. Pure: the time is passed in.

All members of an epoch take part in the same collectives in the same order. `position` counts those that a member has
begun, so the one furthest behind is the one that all wait for; `progress` counts whatever it finishes, layer by layer,
so that a long step is no stall. Nobody is suspected while any member gets on, nor while all are parked, unless it does
not answer at all.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from moeray.comm.messages import Tick


@dataclass(slots=True)
class _Watched:
    tick: Tick | None = None
    still_s: float = 0.0
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Suspect:
    """A member that holds the others up, with what points at it, in one line."""

    slot: int
    evidence: str


class StallWatch:
    """The members of one epoch; another epoch needs another watch.

    Seconds are counted by `elapsed`, so time in which the watcher itself did not run can be left out.
    """

    def __init__(self, slots: Iterable[int], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._members = {slot: _Watched() for slot in slots}

    @property
    def is_resting(self) -> bool:
        """Whether all are parked, as far as is known."""
        return all(watched.tick is not None and watched.tick.is_parked for watched in self._members.values())

    @property
    def is_anxious(self) -> bool:
        """Whether nobody has got on for half of the time that is granted: look closer."""
        if self.is_resting or any(watched.tick is None for watched in self._members.values()):
            return False
        return min(watched.still_s for watched in self._members.values()) >= self._timeout_s / 2

    @property
    def silent_s(self) -> dict[int, float]:
        """For how long each member has not answered."""
        return {slot: watched.silent_s for slot, watched in self._members.items()}

    @property
    def overslept(self) -> list[int]:
        """Parked members that others wait for: a wake may have got lost."""
        if not self.is_anxious:
            return []
        return [slot for slot, watched in self._members.items() if watched.tick is not None and watched.tick.is_parked]

    def saw(self, slot: int, tick: Tick) -> None:
        """The member answered."""
        watched = self._members[slot]
        before = watched.tick
        if before is None or (before.position, before.progress, before.is_parked) != (
            tick.position,
            tick.progress,
            tick.is_parked,
        ):
            watched.still_s = 0.0
        watched.tick = tick
        watched.silent_s = 0.0

    def elapsed(self, seconds: float) -> None:
        """So much time has passed for all who did not get on, and for those who have not answered yet."""
        for watched in self._members.values():
            watched.still_s += seconds
            watched.silent_s += seconds

    def suspect(self) -> Suspect | None:
        """Who has to go, if anybody has."""
        timeout_s, members = self._timeout_s, self._members
        unheard = [slot for slot, watched in members.items() if watched.tick is None]
        if unheard:  # the epoch has only begun, or somebody never came to it
            late = [slot for slot in unheard if members[slot].silent_s >= 4 * timeout_s]
            return Suspect(late[0], f"it has not told of this epoch for {4 * timeout_s:g} s") if late else None
        if self.is_resting:
            # Nobody waits for it, but a request that is sent to it would.
            mute = [slot for slot, watched in members.items() if watched.silent_s >= 2 * timeout_s]
            return Suspect(mute[0], f"it has not answered for {2 * timeout_s:g} s") if mute else None
        if min(watched.still_s for watched in members.values()) < timeout_s:
            return None
        ticks = {slot: watched.tick for slot, watched in members.items() if watched.tick is not None}
        # First those that are furthest behind, then those that do not answer, then those with fewer requests.
        slot = min(
            ticks,
            key=lambda s: (ticks[s].position, members[s].silent_s < timeout_s, ticks[s].num_requests, s),
        )
        behind = max(tick.position for tick in ticks.values()) - ticks[slot].position
        words = f"{behind} exchanges behind" if behind else "in the same exchange as all"
        if members[slot].silent_s >= timeout_s:
            words += ", without an answer"
        return Suspect(slot, f"nobody got on for {timeout_s:g} s, and it is {words}")
