"""Looks how far each member is, a few times a second while they work, and tells of one that holds the others up.

While the group is being made again nobody can hold others up, but a member may give no sign of life.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from moeray.comm.errors import MoerayError
from moeray.comm.messages import Tick
from moeray.comm.topology import Topology
from moeray.elastic.board import Board
from moeray.elastic.fleet import Fleet
from moeray.elastic.health import StallWatch, Suspect
from moeray.elastic.ticks import Ticks

logger = logging.getLogger(__name__)

PERIOD_S = 0.2
ANXIOUS_PERIOD_S = 0.05
RESTING_PERIOD_S = 1.0


class Stalls:
    """Runs beside the controller's other work, on its event loop. `on_stalled` decides what becomes of a suspect."""

    def __init__(
        self,
        fleet: Fleet,
        board: Board,
        *,
        timeout_s: float,
        is_watching: Callable[[], bool],
        may_judge: Callable[[], Awaitable[bool]],
        on_stalled: Callable[[Suspect], None],
        on_mute: Callable[[Suspect], None],
    ) -> None:
        """While `is_watching` says no, the group is being made again: then `on_mute` hears of each member that does not
        even tell where it is. `may_judge` is asked last: it tells whether it is not this process that is cut off from
        all others.
        """
        self._fleet = fleet
        self._board = board
        self._timeout_s = timeout_s
        self._is_watching = is_watching
        self._may_judge = may_judge
        self._on_stalled = on_stalled
        self._on_mute = on_mute
        self._silent_s: dict[int, float] = {}

    async def watch(self) -> None:
        """Runs as long as the deployment."""
        while True:
            topology = self._board.current.topology
            if topology is None or not self._is_serving():
                await self._keep_in_touch()
            else:
                await self._watch_epoch(topology)

    def _is_serving(self) -> bool:
        return self._board.current.state == "serving" and self._is_watching()

    async def _keep_in_touch(self) -> None:
        """Until the group serves; a worker that is not asked for long would take itself for lost."""
        ticks = Ticks()
        silent_s = {slot: min(seconds, self._timeout_s / 2) for slot, seconds in self._silent_s.items()}
        try:
            last = time.monotonic()
            while self._board.current.topology is None or not self._is_serving():
                ticks.ask(self._fleet.members)
                await asyncio.sleep(PERIOD_S)
                now = time.monotonic()
                elapsed_s, last = min(now - last, 2 * PERIOD_S), now
                for member, answer in ticks.take().items():  # a death is heard of elsewhere
                    silent_s[member.slot] = silent_s.get(member.slot, 0.0) + elapsed_s if answer is None else 0.0
                await self._judge_mute(silent_s)
        finally:
            await ticks.close()

    async def _judge_mute(self, silent_s: dict[int, float]) -> None:
        """All that have to go, at once: one of them alone would hold the repair up."""
        mute = [slot for slot in self._board.current.survivors if silent_s.get(slot, 0.0) >= self._timeout_s]
        if mute and await self._may_judge() and not self._is_watching():
            for slot in mute:
                silent_s[slot] = 0.0
                self._on_mute(Suspect(slot, f"it has not answered for {self._timeout_s:g} s"))

    async def _watch_epoch(self, topology: Topology) -> None:
        watch = StallWatch(topology.slots, self._timeout_s)
        ticks = Ticks()
        nudged: dict[int, asyncio.Task[None]] = {}
        try:
            last = time.monotonic()
            while self._is_watching() and self._board.current.topology is topology:
                ticks.ask(self._fleet.member(slot) for slot in topology.slots if self._fleet.has(slot))
                period_s = RESTING_PERIOD_S if watch.is_resting else ANXIOUS_PERIOD_S if watch.is_anxious else PERIOD_S
                await asyncio.sleep(period_s)
                now = time.monotonic()
                # What is longer cannot be blamed on others: the watcher itself did not run.
                watch.elapsed(min(now - last, 2 * period_s))
                last = now
                self._note(watch, topology, ticks)
                for slot in watch.overslept:
                    if self._fleet.has(slot) and (slot not in nudged or nudged[slot].done()):
                        nudged[slot] = asyncio.create_task(self._nudge(slot))
                suspect = watch.suspect()
                if suspect is None or not await self._may_judge():
                    continue
                if self._is_watching() and self._board.current.topology is topology:
                    self._on_stalled(suspect)
                    return
        finally:
            self._silent_s = watch.silent_s
            for call in nudged.values():
                call.cancel()
            await asyncio.gather(ticks.close(), *nudged.values(), return_exceptions=True)

    async def _nudge(self, slot: int) -> None:
        logger.warning("worker %d rests while others wait for it", slot)
        with contextlib.suppress(MoerayError):
            await self._fleet.member(slot).nudge()

    @staticmethod
    def _note(watch: StallWatch, topology: Topology, ticks: Ticks) -> None:
        for member, answer in ticks.take().items():
            if isinstance(answer, Tick):
                if answer.epoch == topology.epoch:
                    watch.saw(member.slot, answer)
            elif answer is not None and not isinstance(answer, MoerayError):  # a death is heard of elsewhere
                logger.error("worker %d does not tell how far it is", member.slot, exc_info=answer)
