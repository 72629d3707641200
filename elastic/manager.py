"""The life of a deployment without Ray: it starts, serves, is scaled, may lose its controller, fails or is stopped.

The controller's actor is a shell around this. What it needs of the world (workers, a place for its memory, a way to
end its own process) is injected.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from moeray.comm.errors import MoerayError
from moeray.comm.messages import Trouble
from moeray.comm.sockets import KeyPair, new_key_pair
from moeray.elastic.board import Board
from moeray.elastic.controller_config import ControllerConfig
from moeray.elastic.fleet import Fleet
from moeray.elastic.health import Suspect
from moeray.elastic.member import Member, WorkerSource
from moeray.elastic.membership import Membership
from moeray.elastic.recovery import adopt_members, restored
from moeray.elastic.repairs import Repairs
from moeray.elastic.scaler import Scaler
from moeray.elastic.spares import Spares
from moeray.elastic.stalls import Stalls
from moeray.elastic.startup import bring_up
from moeray.elastic.state import Journal, SavedMember, SavedState, StateStore
from moeray.elastic.view import Attachment, ClusterView, FaultView, OperationView, RebalanceRequest, ScaleRequest

logger = logging.getLogger(__name__)

# How long the store may take to tell that this is still the controller.
IN_CHARGE_S = 0.5


class Manager:
    """All calls come from one event loop. `exit_process` ends the controller, if nobody needs it; `leave` only this
    process, if another one is the controller now.
    """

    def __init__(
        self,
        config: ControllerConfig,
        source: WorkerSource,
        store: StateStore,
        *,
        exit_process: Callable[[], None] = lambda: None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._source = source
        self._exit_process = exit_process
        self._checking: asyncio.Task[None] | None = None
        self._board = Board(self._starting())
        self._journal = Journal(store, self._collect, on_superseded=leave)
        self._fleet = Fleet(
            source,
            self._board,
            client=new_key_pair(),
            deadlines=config.deadlines,
            save=self._journal.save,
            on_trouble=self._on_trouble,
        )
        self._spares = Spares(
            self._fleet,
            self._board,
            source,
            num_spares=config.num_spares,
            max_workers=config.max_workers,
            end_timeout_s=config.stop_timeout_s,
            retry_s=config.spare_retry_s,
            may_fill=self._may_fill,
            save=self._save_quietly,
        )
        self._scaler = Scaler(
            config,
            source=source,
            fleet=self._fleet,
            spares=self._spares,
            board=self._board,
            save=self._journal.save,
            on_failed=lambda reason: self._repairs.failed_at_switch(reason),
            on_scaled=lambda size: self._repairs.want(size),
        )
        self._repairs = Repairs(
            config,
            fleet=self._fleet,
            spares=self._spares,
            scaler=self._scaler,
            board=self._board,
            save=self._journal.save,
        )
        self._stalls = Stalls(
            self._fleet,
            self._board,
            timeout_s=config.stall_timeout_s,
            is_watching=lambda: self._repairs.is_idle,
            may_judge=self._is_in_charge,
            on_stalled=self._on_stalled,
            on_mute=self._on_mute,
        )
        self._generation = 0
        self._lease = 0
        self._adopted = asyncio.Event()
        self._adopted.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waking: asyncio.Task[None] | None = None
        self._start: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._num_readers = 0
        self._last_read = time.monotonic()

    # What the actor offers

    async def start(self) -> None:
        """Begin to bring the workers up and return; `view` shows how it goes. Later calls do nothing."""
        await self._awake()
        if self._start is None:
            self._start = self._spawn(self._bring_up())
            self._spawn(self._watch_readers())

    async def attach(self) -> Attachment:
        """A new lease, which takes the place of all older ones."""
        await self._awake()
        self._lease += 1
        await self._journal.save()
        logger.info("front end attached, lease %d", self._lease)
        client = self._fleet.client
        return Attachment(lease=self._lease, public_key=client.public, secret_key=client.secret)

    async def view(self, after_version: int, timeout_s: float) -> ClusterView:
        """The view as soon as it is newer than `after_version`, at the latest after `timeout_s`."""
        await self._awake()
        self._num_readers += 1
        try:
            return (await self._board.newer_than(after_version, timeout_s)).view()
        finally:
            self._num_readers -= 1
            self._last_read = time.monotonic()

    async def scale(self, request: ScaleRequest) -> OperationView:
        """See `Scaler.scale`."""
        await self._adoption()
        return await self._scaler.scale(request)

    async def rebalance(self, request: RebalanceRequest) -> OperationView:
        """See `Scaler.rebalance`."""
        await self._adoption()
        return await self._scaler.rebalance(request)

    async def operations(self) -> tuple[OperationView, ...]:
        """All that are remembered, the oldest first."""
        await self._awake()
        return self._scaler.history.views()

    async def operation(self, operation_id: str) -> OperationView | None:
        """The operation as it stands, None if it is unknown or forgotten."""
        await self._awake()
        return self._scaler.history.get(operation_id)

    async def wait_operation(self, operation_id: str, timeout_s: float) -> OperationView:
        """The operation once it is over; after `timeout_s` as it stands. `ValueError` if it is unknown."""
        await self._awake()
        return await self._scaler.history.wait(operation_id, timeout_s)

    async def faults(self) -> tuple[FaultView, ...]:
        """What went wrong with members of the group, the oldest first."""
        await self._awake()
        return self._repairs.faults.views()

    async def stop(self, orderly: bool) -> None:
        """End all workers, in agreement if they serve and it is wished; returns when they are gone."""
        await self._awake()
        orderly = orderly and self._board.current.state == "serving" and self._is_idle
        self._board.update(lambda now: now.stopping())
        await self._end_members(orderly=orderly)

    # Beginning, and beginning again

    def _starting(self, incarnation: int = 0) -> Membership:
        return Membership.starting(
            num_workers=self._config.num_workers,
            num_layers=self._config.num_layers,
            num_experts=self._config.num_experts,
            num_seats=self._config.num_seats,
            incarnation=incarnation,
        )

    async def _awake(self) -> None:
        """The first call of each life of the controller remembers the lives before."""
        if self._waking is None or (self._waking.done() and self._waking.exception() is not None):
            self._waking = self._spawn(self._wake())
        await asyncio.shield(self._waking)

    async def _adoption(self) -> None:
        """Until it is known who is there; it ends within the deadlines of `adopt_members`."""
        await self._awake()
        await self._adopted.wait()

    async def _wake(self) -> None:
        saved = await self._journal.load()
        if saved is None:
            return
        self._generation = saved.generation + 1
        self._lease = saved.lease
        self._fleet.client = KeyPair(public=saved.public_key, secret=saved.secret_key)
        self._fleet.incarnations = dict(saved.incarnations)
        self._scaler.restore(saved)
        self._repairs.faults.restore(saved.faults)
        self._repairs.wanted_size = saved.wanted_size
        logger.warning("the controller was restarted, life %d", self._generation)
        again = self._starting(max(saved.incarnations.values(), default=-1) + 1)
        membership = restored(saved, again, self._generation)
        self._board.update(lambda _: membership)
        self._adopted.clear()
        await self._journal.save()  # from now on an earlier life that still runs, cut off, knows that it is over
        self._start = self._spawn(self._go_on(saved))
        self._spawn(self._watch_readers())

    async def _go_on(self, saved: SavedState) -> None:
        """With the workers that are there; from the start again if the first epoch never served."""
        try:
            try:
                found = await adopt_members(saved, self._fleet, self._source, self._board, self._config)
            finally:
                self._adopted.set()
            if saved.topology is None:
                await self._bring_up()
                return
            self._scaler.resume()
            self._begin_to_serve()
            for slot, incarnation in found.gone:
                reason = "its process died while the controller was restarted"
                self._scaler.lost(slot, reason)
                self._repairs.lost(slot, incarnation, reason)
            if found.is_broken:
                self._repairs.resume()
            await self._save_quietly()
        except MoerayError as error:
            self._fail(f"after a restart of the controller: {error}")

    async def _bring_up(self) -> None:
        try:
            epoch = self._scaler.next_epoch
            self._scaler.next_epoch += 1
            for record in self._board.current.members:
                self._fleet.incarnations[record.slot] = record.incarnation
            await self._journal.save()
            members = [self._fleet.create(r.slot, r.incarnation) for r in self._board.current.members]
            await bring_up(members, self._board, self._config.deadlines, self._source.describe_room, epoch=epoch)
            logger.info("[epoch %d] serves with %d workers", epoch, len(members))
            self._begin_to_serve()
            await self._journal.save()
        except (MoerayError, ValueError) as error:
            self._fail(str(error))

    def _begin_to_serve(self) -> None:
        self._spawn(self._spares.keep())
        self._spawn(self._stalls.watch())
        self._spares.refill()

    # Memory

    def _collect(self) -> SavedState:
        now, client = self._board.current, self._fleet.client
        return SavedState(
            generation=self._generation,
            topology=now.topology if now.state in ("serving", "recovering") else None,
            dispatcher=now.dispatcher,
            members=tuple(SavedMember.of(record) for record in now.members),
            incarnations=self._fleet.incarnations,
            next_epoch=self._scaler.next_epoch,
            lease=self._lease,
            public_key=client.public,
            secret_key=client.secret,
            history=tuple(view for view in self._scaler.history.views() if view.outcome is not None),
            faults=self._repairs.faults.views(),
            wanted_size=self._repairs.wanted_size,
            in_flight=self._repairs.in_flight or self._scaler.in_flight,
        )

    async def _save_quietly(self) -> None:
        try:
            await self._journal.save()
        except MoerayError as error:
            logger.warning("the controller's state could not be saved: %s", error)

    async def _is_in_charge(self) -> bool:
        """Whether the store answers, soon, and knows of no later life of the controller.

        A controller that is cut off from it suspects those that are not, while Ray starts another one elsewhere.
        """
        if self._checking is None or self._checking.done():
            self._checking = self._spawn(self._journal.check())
        try:
            async with asyncio.timeout(IN_CHARGE_S):
                await asyncio.shield(self._checking)
        except (TimeoutError, MoerayError):
            logger.warning("the controller's store does not answer: nobody is suspected from here")
            return False
        return True

    # Ends

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @property
    def _is_idle(self) -> bool:
        return self._scaler.is_idle and self._repairs.is_idle

    def _may_fill(self) -> bool:
        return self._board.current.state == "serving" and self._is_idle

    def _on_trouble(self, member: Member, trouble: Trouble) -> None:
        slot, incarnation, now = member.slot, member.incarnation, self._board.current
        if now.state not in ("starting", "serving", "recovering") or slot not in now.slots:
            return
        in_group = now.is_in_group(slot, incarnation)
        if not trouble.is_fatal:
            if now.state != "starting":
                self._repairs.broken(slot, incarnation, trouble.epoch, trouble.reason)
        elif slot in now.slots_in("spare"):
            logger.warning("spare worker %d: %s", slot, trouble.reason)
            self._spawn(self._spares.replace(slot))
        elif now.state == "starting":
            self._fail(f"worker {slot}: {trouble.reason}", dead=slot)
        elif slot not in self._spares.slots and not self._scaler.lost(slot, trouble.reason) and in_group:
            self._repairs.lost(slot, incarnation, trouble.reason)
        # Else whoever waits for it hears of it.

    def _on_stalled(self, suspect: Suspect) -> None:
        if suspect.slot in self._board.current.survivors:
            incarnation = self._board.current.member(suspect.slot).incarnation
            self._scaler.lost(suspect.slot, suspect.evidence)
            self._repairs.lost(suspect.slot, incarnation, suspect.evidence, kind="stalled")

    def _on_mute(self, suspect: Suspect) -> None:
        if suspect.slot in self._board.current.survivors:
            incarnation = self._board.current.member(suspect.slot).incarnation
            self._repairs.lost(suspect.slot, incarnation, suspect.evidence, kind="was silent")

    def _fail(self, cause: str, dead: int | None = None) -> None:
        if self._board.current.state in ("failed", "stopping"):
            return
        logger.error("the deployment failed: %s", cause)
        self._board.update(lambda now: now.failed(cause, dead=dead))
        self._spawn(self._end_members(orderly=False))

    async def _end_members(self, *, orderly: bool) -> None:
        """Runs once; later callers wait for the first."""
        if self._ending is None:
            self._ending = self._spawn(self._end_all(orderly=orderly))
        await asyncio.shield(self._ending)

    async def _end_all(self, *, orderly: bool) -> None:
        await self._adopted.wait()
        if self._start is not None:
            self._start.cancel()
        await self._repairs.stop()
        await self._scaler.stop()
        try:
            await self._fleet.take_down(orderly=orderly, timeout_s=self._config.stop_timeout_s)
        finally:
            await self._forget()

    async def _forget(self) -> None:
        try:
            await self._journal.close()
        except MoerayError as error:
            logger.warning("the controller's state could not be cleared: %s", error)

    async def _watch_readers(self) -> None:
        """Ends everything when nobody has read the view for `orphan_timeout_s`: who started us is gone."""
        limit_s = self._config.orphan_timeout_s
        self._last_read = time.monotonic()
        while self._num_readers or time.monotonic() - self._last_read < limit_s:
            await asyncio.sleep(limit_s / 4)
        self._fail(f"nobody has read the view for {limit_s:g} s")
        await self._end_members(orderly=False)
        self._exit_process()
