"""The group made again from what is left of it: an operation whose old epoch serves no more.

    planned -> provisioning -> halting -> connecting -> transferring -> ready -> switched -> retired

It takes the way of every other operation, with two differences. Members leave the broken epoch first, each before a
step, whatever it was doing (`halting`). And nothing can be rolled back: an attempt that fails is followed by another,
with those that are left then.
"""

import asyncio

import msgspec

from moeray.comm.errors import MoerayError
from moeray.comm.messages import MemberStatus
from moeray.comm.topology import Topology
from moeray.elastic.operations import Reconfiguration
from moeray.elastic.planner import num_moved, plan_placement
from moeray.elastic.startup import on_all


class Repair(Reconfiguration):
    """One attempt; the placement is planned on the way. Afterwards `view.outcome` is "done" or "failed"."""

    @property
    def silent(self) -> frozenset[int]:
        """Slots that died or did not answer in this attempt."""
        return frozenset(self._silent)

    @property
    def harmed(self) -> frozenset[int]:
        """Slots that this attempt failed with, in whatever way."""
        return frozenset(self._harmed | self._silent)

    async def run(self) -> None:
        """From plan to end; no failure of a worker is raised."""
        reason = await self._prepare_or_reason()
        if reason is not None:
            await self._close("failed", reason)
            return
        await self._finish()
        if self._is_late:
            await on_all(self.view.targets, self._note_if_uncommitted)

    async def resume(self) -> None:
        """A restarted controller begins a repair of its own."""
        await self._close("failed", f"the controller was restarted in phase {self.view.phase}")

    async def _note_if_uncommitted(self, slot: int) -> None:
        """Not all have switched: those are to blame that do not know that they should have."""
        try:
            async with asyncio.timeout(self._deadlines.status_s):
                status = await self._member(slot).status()
        except (TimeoutError, MoerayError):
            self._silent.add(slot)
        else:
            if status.committed_epoch != self.epoch:
                self._silent.add(slot)

    async def _halt(self) -> None:
        await self._enter("halting")
        self._clock.enter("halting")
        first = await self._statuses(self.stayers)
        # A leaver of an operation that was at its switch: it has handed all over.
        left = {status.slot for status in first if not status.is_serving}
        staying = tuple(slot for slot in self.stayers if slot not in left)
        await self._on(staying, "leave the broken group", lambda slot: self._member(slot).halt(self.epoch))
        statuses = await self._statuses(staying)
        newest = self._newest(statuses)
        behind = [s.slot for s in statuses if s.topology is None or s.topology.epoch < newest.epoch]
        await self._on(behind, "assume the newest epoch", lambda slot: self._member(slot).assume(newest))
        targets = tuple(slot for slot in self.view.targets if slot not in left)
        self._placement = plan_placement(newest.placement, targets)
        moved = num_moved(newest.placement, self._placement)
        self.view = msgspec.structs.replace(self.view, targets=targets, moved_experts=moved)

    async def _discard_burned(self) -> None:
        """Members that were halted have none of them any more."""

    async def _statuses(self, slots: tuple[int, ...]) -> list[MemberStatus]:
        return await self._on(slots, "tell where it stands", lambda slot: self._member(slot).status())

    def _newest(self, statuses: list[MemberStatus]) -> Topology:
        """What counts as the old epoch.

        A member may have switched to the epoch of an operation already. All had filled their seats for it before any
        was told to switch, so the others can count from it as well.
        """
        serving = self._board.current.topology
        assert serving is not None
        known = [status.topology for status in statuses if status.topology is not None]
        newest = max([serving, *known], key=lambda topology: topology.epoch)
        if newest.epoch > serving.epoch:
            self._board.update(lambda now: now.switched(newest))
        return newest
