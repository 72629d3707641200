"""Keeps the group alive: when members are lost, those that are left serve on, and others take the lost places.

One repair at a time. It comes before every other operation: one that runs is rolled back first, or ends as failed if it
was at its switch. Who is dead is decided here and nowhere else; what survivors say is evidence.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from moeray.comm.errors import MoerayError
from moeray.elastic.board import Board
from moeray.elastic.controller_config import ControllerConfig
from moeray.elastic.faults import FaultLog
from moeray.elastic.fleet import Fleet
from moeray.elastic.operations import EVIDENCE_WAIT_S
from moeray.elastic.phases import entered
from moeray.elastic.planner import fewest_workers
from moeray.elastic.repair import Repair
from moeray.elastic.scaler import Scaler
from moeray.elastic.spares import Spares
from moeray.elastic.startup import on_all
from moeray.elastic.state import InFlight
from moeray.elastic.view import OperationView, ScaleRequest

logger = logging.getLogger(__name__)

FENCE_TIMEOUT_S = 2.5
RETRY_S = 0.1
PATIENT_ATTEMPTS = 3
LONGEST_RETRY_S = 10.0


@dataclass(frozen=True, slots=True)
class Evidence:
    """A member whose exchange failed, in which epoch, and what it says of it."""

    slot: int
    incarnation: int
    epoch: int
    reason: str


class Repairs:
    """All calls come from one event loop. `save` writes the controller's state.

    `wanted_size` is how many workers there are to be: those of the start, or of the last scale that was done.
    """

    def __init__(
        self,
        config: ControllerConfig,
        *,
        fleet: Fleet,
        spares: Spares,
        scaler: Scaler,
        board: Board,
        save: Callable[[], Awaitable[None]],
    ) -> None:
        self.faults = FaultLog(config.history_limit)
        self.wanted_size = config.num_workers
        self._config = config
        self._fleet = fleet
        self._spares = spares
        self._scaler = scaler
        self._board = board
        self._save = save
        self._is_broken = False
        self._failure: str | None = None
        self._waiting_for = ""
        self._current: Repair | None = None
        self._work: asyncio.Task[None] | None = None
        self._replacing: asyncio.Task[None] | None = None
        self._evidence: Evidence | None = None
        self._weighing: asyncio.Task[None] | None = None
        self._fences: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        return self._work is None or self._work.done()

    @property
    def in_flight(self) -> InFlight | None:
        """The attempt that runs, as a restarted controller needs it."""
        return self._current.in_flight if self._current is not None else None

    def want(self, size: int) -> None:
        """Somebody changed the size: lost workers are replaced up to that from now on."""
        self.wanted_size = size

    def lost(self, slot: int, incarnation: int, reason: str, *, kind: str = "died") -> None:
        """A member of the group is dead, or shall be."""
        now = self._board.current
        assert now.topology is not None
        if slot not in now.survivors:
            # It is known, and whatever takes its place may be on the board already.
            self._begin()
            return
        self.faults.add(slot=slot, incarnation=incarnation, kind=kind, cause=reason, epoch=now.topology.epoch)
        self._board.update(lambda now: now.lost((slot,)))
        # It is ended before anything else: what hangs in an exchange with it ends by that, and it writes nowhere again.
        # One that cannot be reached leaves by itself, and has no way into another epoch's group meanwhile.
        timeout_s = min(FENCE_TIMEOUT_S, self._config.stop_timeout_s)
        fence = asyncio.get_running_loop().create_task(self._fleet.kill(slot, timeout_s=timeout_s))
        self._fences.add(fence)
        fence.add_done_callback(self._fences.discard)
        self._begin()
        if self._current is not None:
            self._current.interrupt(slot, reason)

    def broken(self, slot: int, incarnation: int, epoch: int, reason: str) -> None:
        """A member's exchange failed: the peer that caused it, if it died, is the cause and is heard of soon."""
        if self._evidence is None or self._evidence.epoch < epoch:
            self._evidence = Evidence(slot, incarnation, epoch, reason)
            if self._weighing is None or self._weighing.done():
                self._weighing = asyncio.get_running_loop().create_task(self._weigh())

    def failed_at_switch(self, reason: str) -> None:
        """An operation was committed and did not come to its end: some members may have switched, others not."""
        logger.warning("the group is made again: %s", reason)
        self._begin()

    def resume(self) -> None:
        """A restarted controller found the group broken."""
        self._begin()

    async def stop(self) -> None:
        """Let go of all: the workers are going to be ended."""
        tasks = [task for task in (self._work, self._replacing, self._weighing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _weigh(self) -> None:
        await asyncio.sleep(EVIDENCE_WAIT_S)
        while not (self.is_idle and self._scaler.is_idle):
            await asyncio.sleep(EVIDENCE_WAIT_S)
        evidence, topology = self._evidence, self._board.current.topology
        assert evidence is not None
        assert topology is not None
        if topology.epoch <= evidence.epoch and evidence.slot in self._board.current.survivors:
            self.faults.add(
                slot=evidence.slot,
                incarnation=evidence.incarnation,
                kind="lost its group",
                cause=evidence.reason,
                epoch=evidence.epoch,
            )
            self._begin()

    def _begin(self) -> None:
        self._is_broken = True
        if self.is_idle:
            self._work = asyncio.get_running_loop().create_task(self._repair())

    # From broken to serving

    async def _repair(self) -> None:
        async with self._scaler.paused():
            if self._replacing is not None:
                self._replacing.cancel()
            while self._is_broken:  # again, if another member was lost while all was put away
                await self._until_served()
                await self._settle()
        if self._config.replace and self._is_too_small():
            self._replacing = asyncio.get_running_loop().create_task(self._replace(self.wanted_size))

    async def _until_served(self) -> None:
        pause_s, num_failed = RETRY_S, 0
        self._failure = None
        while self._is_broken:
            self._is_broken = False
            attempt: Repair | None = None
            try:
                attempt = await self._attempt()
                self._failure = None if attempt.view.outcome == "done" else attempt.view.reason
            except (MoerayError, ValueError) as error:
                self._failure = f"it could not begin: {error}"
            if self._failure is not None:
                self._is_broken = True
                num_failed += 1
                if not self._blame(attempt, with_errors=num_failed > PATIENT_ATTEMPTS):
                    self._tell_failure(pause_s)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    def _tell_failure(self, pause_s: float) -> None:
        logger.warning("the group is not repaired yet: %s; the next attempt comes in %g s", self._failure, pause_s)
        if self._board.current.state == "recovering":
            cause = f"{self._waiting_for}; the last attempt failed: {self._failure}; the next comes in {pause_s:g} s"
            self._board.update(lambda now: now.recovering(cause))

    def _blame(self, attempt: Repair | None, *, with_errors: bool) -> bool:
        """Members that did not answer in an attempt are given up; whether there were any.

        One that answers with an error is to blame only in the end: a connection that breaks once more is not its fault.
        """
        if attempt is None:
            return False
        slots, reason = attempt.harmed if with_errors else attempt.silent, attempt.view.reason
        for slot in sorted(slots & set(self._board.current.survivors)):
            incarnation = self._board.current.member(slot).incarnation
            self.lost(slot, incarnation, reason or "it did not answer", kind="was silent")
        return bool(slots)

    async def _attempt(self) -> Repair:
        """Plan with those that are left, and carry it out."""
        now = self._board.current
        topology = now.topology
        assert topology is not None
        dead = now.slots_in("dead")
        while self._fences:
            await asyncio.wait(self._fences)
        survivors = now.survivors
        await self._end_strays(survivors)
        joiners, spares = self._choose_joiners(survivors, dead)
        epoch = self._scaler.take_epoch()
        view = OperationView(
            operation_id=f"repair-{uuid.uuid4().hex[:12]}",
            kind="repair",
            requested={},
            phase="",
            outcome=None,
            reason=None,
            from_epoch=topology.epoch,
            to_epoch=epoch,
            phases=(),
            deadline_s=self._config.operation_deadlines.overall_s,
            targets=tuple(sorted((*survivors, *joiners))),
            joiners=joiners,
            leavers=(),
        )
        view = entered(view, "planned")
        self._scaler.history.put(view)
        repair = Repair(self._scaler.tools(), InFlight(view=view, topology=None, spares=spares), None)
        self._current = repair
        try:
            await repair.run()
        finally:
            self._current = None
        return repair

    def _choose_joiners(
        self, survivors: tuple[int, ...], dead: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None while the survivors can hold all experts. Which of those that have to join are spares comes second."""
        placement = self._board.current.placement
        missing = max(1, fewest_workers(placement.num_experts, placement.num_seats)) - len(survivors)
        if missing <= 0:
            return (), ()
        left = "no worker is left" if not survivors else f"workers {list(survivors)} cannot hold all experts"
        last = self.faults.views()[-1] if self.faults.views() else None
        cause = f"worker {last.slot}: {last.cause}; " if last is not None else ""
        self._waiting_for = f"{cause}{left}: waiting for {missing} to start"
        failed = f"; the last attempt failed: {self._failure}" if self._failure is not None else ""
        self._board.update(lambda now: now.recovering(f"{self._waiting_for}{failed}"))
        spares = self._spares.slots[:missing]
        free = sorted({*self._spares.free_slots(), *dead})
        joiners = tuple(sorted((*spares, *free[: missing - len(spares)])))
        for slot in spares:
            self._spares.take(slot)
        return joiners, tuple(sorted(spares))

    async def _end_strays(self, survivors: tuple[int, ...]) -> None:
        """Joiners of an operation that broke, and what an earlier attempt began: they hold nothing that counts."""
        now = self._board.current
        kept = {*survivors, *self._spares.slots, *now.slots_in("dead")}
        strays = [slot for slot in now.slots if slot not in kept]
        await on_all(strays, lambda slot: self._fleet.end(slot, orderly=False, timeout_s=self._config.stop_timeout_s))

    async def _settle(self) -> None:
        """The group serves: put away what is not part of it."""
        topology = self._board.current.topology
        assert topology is not None
        self.faults.recovered(topology.epoch)
        gone = [slot for slot in self._board.current.slots_in("dead", "leaving") if slot not in topology.slots]
        await on_all(gone, lambda slot: self._fleet.end(slot, orderly=False, timeout_s=self._config.stop_timeout_s))
        try:
            await self._save()
        except MoerayError as error:
            logger.warning("the controller's state could not be saved: %s", error)
        self._spares.refill()

    def _is_too_small(self) -> bool:
        topology = self._board.current.topology
        return topology is not None and topology.size < self.wanted_size

    async def _replace(self, wanted: int) -> None:
        """Scale back to the size before the fault, unless somebody wants another since."""
        pause_s = self._config.spare_retry_s
        while self.wanted_size == wanted and self._is_too_small():
            try:
                view = await self._scaler.scale(ScaleRequest(workers=wanted), kind="replace")
                if view.outcome is None:
                    view = await self._scaler.wait(view.operation_id, self._config.operation_deadlines.overall_s)
                if view.outcome == "done":
                    return
                failure = view.reason or f"operation {view.operation_id} is still {view.phase}"
            except (MoerayError, ValueError) as error:
                failure = str(error)
            logger.warning("a lost worker is not replaced yet: %s; the next attempt comes in %g s", failure, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)
