"""Looks how far each member is, a few times a second while they work, and tells of one that holds the others up."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from moeray.comm.errors import MoerayError
from moeray.comm.messages import Tick
from moeray.comm.topology import Topology
from moeray.elastic.board import Board
from moeray.elastic.fleet import Fleet
from moeray.elastic.health import StallWatch, Suspect

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
    ) -> None:
        """Nothing is judged while `is_watching` says no: the group is being made again. `may_judge` is asked last: it
        tells whether it is not this process that is cut off from all others.
        """
        self._fleet = fleet
        self._board = board
        self._timeout_s = timeout_s
        self._is_watching = is_watching
        self._may_judge = may_judge
        self._on_stalled = on_stalled

    async def watch(self) -> None:
        """Runs as long as the deployment."""
        while True:
            topology = self._board.current.topology
            if topology is None or self._board.current.state != "serving" or not self._is_watching():
                await self._keep_in_touch()
            else:
                await self._watch_epoch(topology)

    async def _keep_in_touch(self) -> None:
        """Nothing is judged; but a worker that is not asked for long takes itself for lost."""
        asked = [asyncio.create_task(member.tick()) for member in self._fleet.members]
        await asyncio.sleep(PERIOD_S)
        for call in asked:
            call.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    async def _watch_epoch(self, topology: Topology) -> None:
        watch = StallWatch(topology.slots, self._timeout_s)
        asked: dict[int, asyncio.Task[Tick]] = {}
        nudged: dict[int, asyncio.Task[None]] = {}
        try:
            last = time.monotonic()
            while self._is_watching() and self._board.current.topology is topology:
                for slot in topology.slots:
                    if slot not in asked and self._fleet.has(slot):
                        asked[slot] = asyncio.create_task(self._fleet.member(slot).tick())
                period_s = RESTING_PERIOD_S if watch.is_resting else ANXIOUS_PERIOD_S if watch.is_anxious else PERIOD_S
                await asyncio.sleep(period_s)
                now = time.monotonic()
                # What is longer cannot be blamed on others: the watcher itself did not run.
                watch.elapsed(min(now - last, 2 * period_s))
                last = now
                self._note(watch, topology, asked)
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
            calls: list[asyncio.Task[Any]] = [*asked.values(), *nudged.values()]
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _nudge(self, slot: int) -> None:
        logger.warning("worker %d rests while others wait for it", slot)
        with contextlib.suppress(MoerayError):
            await self._fleet.member(slot).nudge()

    @staticmethod
    def _note(watch: StallWatch, topology: Topology, asked: dict[int, asyncio.Task[Tick]]) -> None:
        for slot, call in list(asked.items()):
            if not call.done():
                continue
            del asked[slot]
            error = call.exception()
            if isinstance(error, MoerayError):
                continue  # its death is heard of elsewhere
            if error is not None:
                logger.error("worker %d does not tell how far it is", slot, exc_info=error)
            elif call.result().epoch == topology.epoch:
                watch.saw(slot, call.result())
