"""Workers that have started and loaded all but experts, so that a scale up need not wait for that."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from moeray.comm.errors import MoerayError
from moeray.elastic.board import Board
from moeray.elastic.fleet import Fleet
from moeray.elastic.member import WorkerSource

logger = logging.getLogger(__name__)

LONGEST_RETRY_S = 60.0


class Spares:
    """Keeps `num_spares` of them, or as many as there are free slots; one starts at a time, beside the service.

    A spare has a slot and no rank. One that fails or dies is replaced, after a pause that doubles; nobody else hears
    of it. `may_fill` says whether one may be started now.
    """

    def __init__(
        self,
        fleet: Fleet,
        board: Board,
        source: WorkerSource,
        *,
        num_spares: int,
        max_workers: int,
        end_timeout_s: float,
        retry_s: float,
        may_fill: Callable[[], bool],
        save: Callable[[], Awaitable[None]],
    ) -> None:
        self._fleet = fleet
        self._board = board
        self._source = source
        self._num_spares = num_spares
        self._max_workers = max_workers
        self._end_timeout_s = end_timeout_s
        self._retry_s = retry_s
        self._may_fill = may_fill
        self._save = save
        self._loading: int | None = None
        self._short = asyncio.Event()

    @property
    def slots(self) -> tuple[int, ...]:
        """Those that can be taken: the loaded ones first."""
        loaded = self._board.current.slots_in("spare")
        return loaded if self._loading is None else (*loaded, self._loading)

    def free_slots(self) -> list[int]:
        """Slots that no process has, the lowest first."""
        taken = self._board.current.slots
        return [slot for slot in range(self._max_workers) if slot not in taken]

    def take(self, slot: int) -> None:
        """The slot is not a spare any more. `Fleet.ready` tells when its load, if it was not over, is."""
        if self._loading == slot:
            self._loading = None
        self._board.update(lambda now: now.marked({slot} & set(now.slots_in("spare")), "joining"))

    def refill(self) -> None:
        """Look whether spares are missing."""
        self._short.set()

    async def replace(self, slot: int) -> None:
        """The spare is dead: forget it, and start another."""
        if slot in self._board.current.slots_in("spare"):
            await self._fleet.end(slot, orderly=False, timeout_s=self._end_timeout_s)
            self.refill()

    async def keep(self) -> None:
        """Runs as long as the deployment."""
        pause_s = self._retry_s
        while True:
            await self._short.wait()
            slot = self._next_slot()
            if slot is None:
                self._short.clear()
            elif await self._fill(slot):
                pause_s = self._retry_s
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    def _next_slot(self) -> int | None:
        if not self._may_fill() or len(self.slots) >= self._num_spares:
            return None
        return next(iter(self.free_slots()), None)

    async def _fill(self, slot: int) -> bool:
        lack = await asyncio.to_thread(self._source.lacks_room_for, 1)
        if lack is not None:
            logger.warning("no room for a spare: %s", lack)
            return False
        if slot != self._next_slot():
            return True  # an operation began meanwhile
        self._loading = slot
        self._fleet.begin(slot)
        try:
            await self._fleet.ready(slot)
        except MoerayError as error:
            if self._loading != slot:
                return True  # an operation took it, and deals with it
            logger.warning("a spare did not start: %s", error)
            self._loading = None
            await self._fleet.end(slot, orderly=False, timeout_s=self._end_timeout_s)
            return False
        if self._loading == slot:
            self._loading = None
            self._board.update(lambda now: now.marked((slot,), "spare"))
            await self._save()
            logger.info("worker %d is a spare", slot)
        return True
