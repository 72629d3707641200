"""From the first commit to the last worker's switch: there is no way back, so the controller only asks.

A rank that got the commit says `ready` in its step header; when the headers of one step say so for all ranks, all
switch between that step and the next. A commit may therefore be sent again, and its answer may be lost.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from types import TracebackType

from moeray.comm.errors import GroupError, MoerayError, WorkerDied
from moeray.comm.messages import MemberStatus
from moeray.elastic.fleet import Fleet
from moeray.elastic.phases import OperationDeadlines
from moeray.elastic.startup import on_all
from moeray.elastic.view import OperationView

logger = logging.getLogger(__name__)

ASK_PERIOD_S = 0.05


class Switch:
    """Entering it sends the commit to all members of both epochs at the same time.

    `must_ask`: some may have got it from an earlier life of the controller, so each is asked first.
    """

    def __init__(
        self, fleet: Fleet, operation: OperationView, deadlines: OperationDeadlines, *, must_ask: bool
    ) -> None:
        self._fleet = fleet
        self._operation = operation
        self._deadlines = deadlines
        self._must_ask = must_ask
        self._calls: dict[int, asyncio.Task[None]] = {}
        self.is_late = False

    async def __aenter__(self) -> "Switch":
        loop = asyncio.get_running_loop()
        slots = {*self._operation.targets, *self._operation.leavers}
        self._calls = {slot: loop.create_task(self._commit(slot)) for slot in sorted(slots)}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for call in self._calls.values():
            call.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)

    async def members(self, lost: asyncio.Event) -> str | None:
        """Wait until all members of the next epoch have switched. Returns why they did not, None if they did.

        `lost` is set when one of them is known to be dead, which the others may not survive in their group.
        """
        limit_s, epoch = self._deadlines.switch_s, self._operation.to_epoch
        calls = {slot: self._calls[slot] for slot in self._operation.targets}
        all_switched = asyncio.create_task(asyncio.wait(calls.values(), return_when=asyncio.FIRST_EXCEPTION))
        one_lost = asyncio.create_task(lost.wait())
        await asyncio.wait({all_switched, one_lost}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        self.is_late = not all_switched.done() and not one_lost.done()
        all_switched.cancel()
        one_lost.cancel()
        behind = {slot: call for slot, call in calls.items() if not call.done() or call.exception() is not None}
        if not behind:
            return None
        if lost.is_set():
            return (
                f"epoch {epoch} was committed and cannot be undone, but one of its workers died before all had switched"
            )
        causes = "".join(f"; worker {slot}: {call.exception()}" for slot, call in behind.items() if call.done())
        return (
            f"epoch {epoch} was committed and cannot be undone, but workers {', '.join(map(str, behind))} did not "
            f"switch within {limit_s:g} s{causes}"
        )

    async def leavers(self) -> None:
        """Wait until the leavers are out of their step loops; those that stay too long are ended anyway."""
        if calls := [self._calls[slot] for slot in self._operation.leavers]:
            await asyncio.wait(calls, timeout=self._deadlines.retire_s)

    async def _commit(self, slot: int) -> None:
        """Returns once the slot's worker has switched, or left. `WorkerDied` or `GroupError` if it never will."""
        epoch, must_ask = self._operation.to_epoch, self._must_ask
        while True:
            member = self._fleet.member(slot)
            try:
                if must_ask and self._has_switched(await member.status()):
                    return
                if await member.commit(epoch) == epoch:
                    return
            except (WorkerDied, GroupError):
                raise  # the group that it should leave, or that it came to, has broken
            except MoerayError as error:
                logger.warning("[epoch %d] worker %d: %s", epoch, slot, error)
            must_ask = True
            await asyncio.sleep(ASK_PERIOD_S)

    def _has_switched(self, status: MemberStatus) -> bool:
        if status.slot in self._operation.leavers:
            return not status.is_serving
        return status.epoch >= self._operation.to_epoch and status.is_serving


async def was_committed(fleet: Fleet, slots: Sequence[int], epoch: int, timeout_s: float) -> bool:
    """Whether any of the slots has switched to the epoch, or was told to. Who does not answer is taken for a no."""

    async def ask(slot: int) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                status = await fleet.member(slot).status()
        except (TimeoutError, MoerayError) as error:
            logger.warning("[epoch %d] worker %d does not tell where it stands: %s", epoch, slot, error)
            return False
        return status.committed_epoch == epoch or status.epoch >= epoch

    answers: Iterable[bool] = await on_all(slots, ask)
    return any(answers)
