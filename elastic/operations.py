"""One reconfiguration: make the next epoch beside the serving one, switch, break the old one; or leave no trace.

    planned -> provisioning -> connecting -> transferring -> ready -> switched -> retired
       └──────────────┴─────────────┴─────────────┴────────────┴──> rolled_back(reason)

The line is crossed with the first `commit`: before it any failure, death or deadline rolls everything back; after it
a worker may already serve the next epoch, so the controller only asks, and asks again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from moeray.comm.errors import GroupError, MoerayError, WorkerDied
from moeray.comm.placement import ExpertPlacement
from moeray.comm.topology import Topology
from moeray.elastic.board import Board
from moeray.elastic.discard import discard
from moeray.elastic.fleet import Fleet
from moeray.elastic.member import Member
from moeray.elastic.phases import OperationDeadlines, PhaseClock, ended, entered
from moeray.elastic.planner import moves_to
from moeray.elastic.startup import on_all
from moeray.elastic.state import InFlight
from moeray.elastic.switch import Switch, was_committed
from moeray.elastic.view import OperationView

logger = logging.getLogger(__name__)
T = TypeVar("T")

# How long the death of a peer may take to be heard of after a member's exchange failed.
EVIDENCE_WAIT_S = 0.3


class PhaseFailed(MoerayError):
    """A phase before the switch did not succeed; the message names the slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What an operation works with. `publish` shows and saves the operation as it stands; it raises `MoerayError`."""

    fleet: Fleet
    board: Board
    deadlines: OperationDeadlines
    publish: Callable[[OperationView], Awaitable[None]]


class Reconfiguration:
    """Carries one planned operation out. Either `run` or, after the controller's death, `resume` is called, once.

    `placement` is the plan; None if `in_flight` has the next topology already, or never will.
    """

    def __init__(self, tools: Tools, in_flight: InFlight, placement: ExpertPlacement | None) -> None:
        self.view = in_flight.view
        self.topology = in_flight.topology
        self._spares = set(in_flight.spares)
        self._placement = placement
        self._fleet = tools.fleet
        self._board = tools.board
        self._deadlines = tools.deadlines
        self._publish = tools.publish
        self._clock = PhaseClock(tools.deadlines, in_flight.view.deadline_s)
        self._harmed: set[int] = set()
        self._silent: set[int] = set()
        self._work: asyncio.Task[None] | None = None
        self.interruption: str | None = None
        self._interrupted = asyncio.Event()
        self._is_committed = False
        self._lost_at_switch = asyncio.Event()
        self._is_late = False
        self._is_resumed = False

    @property
    def in_flight(self) -> InFlight:
        """What a restarted controller needs to know."""
        return InFlight(view=self.view, topology=self.topology, spares=tuple(sorted(self._spares)))

    @property
    def epoch(self) -> int:
        return self.view.to_epoch

    @property
    def stayers(self) -> tuple[int, ...]:
        """Members of both epochs."""
        return tuple(slot for slot in self.view.targets if slot not in self.view.joiners)

    @property
    def everyone(self) -> tuple[int, ...]:
        """Members of one epoch or the other."""
        return tuple(sorted({*self.view.targets, *self.view.leavers}))

    def interrupt(self, slot: int, reason: str) -> bool:
        """A worker is lost: give up, if the switch has not begun. Returns whether this operation deals with it."""
        self._harmed.add(slot)
        if self._is_committed:
            if slot not in self.view.leavers:
                self._lost_at_switch.set()
            return False
        self.interruption = self.interruption or f"worker {slot}: {reason}"
        self._interrupted.set()
        if self._work is not None:
            self._work.cancel()
        return True

    async def run(self) -> None:
        """From plan to end; `view` has the outcome. No failure of a worker is raised."""
        reason = await self._prepare_or_reason()
        if reason is not None:
            await self._roll_back(reason)
        else:
            await self._finish()

    async def resume(self) -> None:
        """Finish what any member was told to switch to; roll back what none was."""
        self._is_resumed = True
        if await self._was_committed():
            await self._finish()
            return
        await self._discard()
        # A commit that was on its way when the controller died may have come after the question.
        if await self._was_committed():
            await self._finish()
        else:
            await self._roll_back(f"the controller was restarted in phase {self.view.phase}")

    # Before the line

    async def _prepare_or_reason(self) -> str | None:
        """None if all is ready for the switch, else why not."""
        self._work = asyncio.get_running_loop().create_task(self._prepare())
        try:
            await asyncio.wait({self._work})
        finally:
            self._work.cancel()
        error = None if self._work.cancelled() else self._work.exception()
        if error is not None and isinstance(error.__cause__, GroupError):
            # The peer that caused it, if it died, is the reason to give.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVIDENCE_WAIT_S):
                    await self._interrupted.wait()
        if self.interruption is not None:
            return self.interruption
        if self._work.cancelled():
            return "it was cancelled"
        if error is not None and not isinstance(error, MoerayError):
            logger.error("operation %s failed", self.view.operation_id, exc_info=error)
            return f"{type(error).__name__}: {error}"
        return None if error is None else str(error)

    async def _prepare(self) -> None:
        self._clock.enter("planned")
        await self._enter("provisioning")
        self._clock.enter("provisioning")
        for slot in self.view.joiners:
            if slot not in self._spares:
                self._fleet.begin(slot)
        await self._on(self.view.joiners, "start", self._fleet.ready)
        await self._halt()
        await self._connect()
        await self._transfer()
        await self._enter("ready")

    async def _halt(self) -> None:
        """What has to be before the next group is made; nothing while the old one serves."""

    async def _connect(self) -> None:
        placement = self._placement
        assert placement is not None
        now = self._board.current
        topology = Topology(
            epoch=self.epoch, members=tuple(now.joining_as(slot) for slot in placement.slots), placement=placement
        )
        self.topology = topology
        await self._enter("connecting")
        self._clock.enter("connecting")
        await self._discard_burned()
        host = self.view.targets[0] if not self.stayers else self.stayers[0]
        store = (await self._on([host], "open the group's store", lambda s: self._member(s).host_store(self.epoch)))[0]
        digests = await self._on(
            self.view.targets, "connect to the next group", lambda s: self._member(s).connect(topology, store)
        )
        for slot, digest in zip(self.view.targets, digests, strict=True):
            if digest != digests[0]:
                self._harmed.add(slot)
                raise PhaseFailed(
                    f"worker {slot}: it prepared {digest!r}, worker {self.view.targets[0]} {digests[0]!r}"
                )

    async def _transfer(self) -> None:
        topology = self.topology
        assert topology is not None
        self._board.update(lambda now: now.marked(self.view.leavers, "leaving"))
        await self._enter("transferring")
        self._clock.enter("transferring")
        before = self._board.current.placement
        receivers = [
            slot
            for slot in self.view.targets
            if slot in self.view.joiners or moves_to(before, topology.placement, slot)
        ]
        reports = await self._on(receivers, "fill its seats", lambda s: self._member(s).transfer(topology))
        self.view = msgspec.structs.replace(self.view, moved_bytes=sum(report.num_bytes for report in reports))
        blocks = await self._on(
            self.view.leavers, "hand its requests over", lambda s: self._member(s).hand_over(self.stayers)
        )
        self.view = msgspec.structs.replace(self.view, kv_blocks=sum(blocks))

    def _member(self, slot: int) -> Member:
        return self._fleet.member(slot)

    async def _on(self, slots: Sequence[int], what: str, call: Callable[[int], Awaitable[T]]) -> list[T]:
        """Call all slots at once, within the phase. `PhaseFailed` names the first one that failed, and how."""

        async def ask(slot: int) -> T:
            try:
                async with asyncio.timeout_at(self._clock.end):
                    return await call(slot)
            except TimeoutError:
                self._harmed.add(slot)
                self._silent.add(slot)
                raise PhaseFailed(f"worker {slot}: did not {what} within {self._clock.limit}") from None
            except MoerayError as error:
                # A member that misses others in the group's warm-up is not harmed itself.
                missed = error.slots if isinstance(error, GroupError) else ()
                if isinstance(error, WorkerDied):
                    self._silent.add(slot)
                self._harmed.update(missed or (slot,))
                prefix, text = f"worker {slot}: ", str(error)
                raise PhaseFailed(text if text.startswith(prefix) else prefix + text) from error

        return await on_all(slots, ask)

    # Behind the line

    async def _finish(self) -> None:
        """All are ready: switch, and end who left."""
        self._is_committed = True
        topology = self.topology
        assert topology is not None
        async with Switch(self._fleet, self.view, self._deadlines, must_ask=self._is_resumed) as switch:
            failure = await switch.members(self._lost_at_switch)
            if failure is not None:
                self._is_late = switch.is_late
                await self._close("failed", failure)
                return
            self._board.update(lambda now: now.switched(topology))
            logger.info("[epoch %d] serves with slots %s", self.epoch, topology.slots)
            await self._enter_quietly("switched")
            await self._describe()
            await switch.leavers()
        await self._end(self.view.leavers, orderly=True, timeout_s=self._deadlines.retire_s)
        await self._enter_quietly("retired")
        await self._close("done", None)

    async def _describe(self) -> None:
        """Show how rows travel in the new epoch; a member that does not answer leaves it as it was."""
        try:
            async with asyncio.timeout(self._deadlines.status_s):
                status = await self._member(self.view.targets[0]).status()
        except (TimeoutError, MoerayError) as error:
            logger.warning("[epoch %d] the dispatcher is not known: %s", self.epoch, error)
            return
        self._board.update(lambda now: now.described(status.dispatcher))

    async def _was_committed(self) -> bool:
        """Whether any member has switched to the next epoch, or was told to."""
        if self.topology is None:
            return False
        return await was_committed(self._fleet, self.everyone, self.epoch, self._deadlines.status_s)

    # Back

    async def _roll_back(self, reason: str) -> None:
        """The old epoch stays as it is; nothing is left of the next one."""
        logger.warning("operation %s is rolled back: %s", self.view.operation_id, reason)
        now = self._board.current
        serving = now.topology.slots if now.topology is not None else ()
        leaving = [slot for slot in self.view.leavers if slot in serving and now.member(slot).state == "leaving"]
        self._board.update(lambda now: now.marked(leaving, "serving"))
        await self._enter_quietly("rolled_back")
        await self._discard()
        kept = [slot for slot in self._spares - self._harmed if self._is_loaded(slot)]
        joiners = [slot for slot in self.view.joiners if slot not in kept]
        await self._end(joiners, orderly=False, timeout_s=self._deadlines.rollback_s)
        self._board.update(lambda now: now.marked(kept, "spare"))
        await self._close("rolled_back", reason)

    def _is_loaded(self, slot: int) -> bool:
        now = self._board.current
        return self._fleet.has(slot) and slot in now.slots and now.member(slot).ready is not None

    async def _discard(self) -> None:
        if self.topology is None:
            return
        # Joiners that are dead or hang are ended anyway; asking them would only take time.
        asked = [slot for slot in self.everyone if slot not in self._harmed or slot not in self.view.joiners]
        self._harmed |= await discard(self._fleet, asked, self.epoch, self._deadlines.rollback_s)

    async def _discard_burned(self) -> None:
        """Epochs between the serving one and ours were rolled back; a member may have missed that."""
        members = sorted({*self.stayers, *self.view.leavers})
        for epoch in range(self.view.from_epoch + 1, self.epoch):
            await self._on(
                members,
                f"discard epoch {epoch}",
                lambda s, epoch=epoch: self._member(s).discard(epoch),  # type: ignore[misc]
            )

    async def _end(self, slots: Sequence[int], *, orderly: bool, timeout_s: float) -> None:
        async def end(slot: int) -> None:
            await self._fleet.end(slot, orderly=orderly, timeout_s=timeout_s)

        await on_all(slots, end)

    # The record

    async def _enter(self, phase: str) -> None:
        self.view = entered(self.view, phase)
        logger.info("operation %s is %s", self.view.operation_id, phase)
        await self._publish(self.view)

    async def _enter_quietly(self, phase: str) -> None:
        """When there is no way back, a state that cannot be saved changes nothing."""
        try:
            await self._enter(phase)
        except MoerayError as error:
            logger.warning("phase %s could not be saved: %s", phase, error)

    async def _close(self, outcome: str, reason: str | None) -> None:
        self.view = ended(self.view, outcome, reason)
        logger.info("operation %s is %s %s", self.view.operation_id, outcome, reason or "")
        try:
            await self._publish(self.view)
        except MoerayError as error:
            logger.warning("outcome %s could not be saved: %s", outcome, error)
