"""Workers as processes that Ray starts, ends and watches, and whose commands go over sockets of their own."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from functools import cached_property
from types import NoneType
from typing import Any, TypeVar, cast

import psutil
import ray
import zmq.asyncio
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from moeray.comm.calls import Address, Caller
from moeray.comm.errors import MoerayError, StartupError, WorkerDied
from moeray.comm.messages import ExpertCounts, MemberStatus, Tick, TransferReport, Trouble
from moeray.comm.placement import ExpertPlacement
from moeray.comm.sockets import KeyPair
from moeray.comm.topology import Topology
from moeray.elastic.controller_config import worker_name
from moeray.elastic.member import Member, WorkerFactory, WorkerReport, WorkerSource
from moeray.elastic.state import SavedReport

T = TypeVar("T")

# How long one question whether there is trouble may stay unanswered, and the pause after one that went wrong.
TROUBLE_SLICE_S = 20.0
TROUBLE_POLL_S = 0.2
MAYBE_TROUBLE = cast("type[Trouble | None]", Trouble | None)
KILL_POLL_S = 0.02
FREED_TIMEOUT_S = 2.0
FREED_POLL_S = 0.05


def one_line(error: BaseException) -> str:
    """The root cause of Ray's many-line errors, for a person to read."""
    cause = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if isinstance(cause, MoerayError | ValueError):
        return lines[0] if lines else type(cause).__name__
    if not isinstance(cause, RayError):
        return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__
    if lines and "creation task" in lines[0]:
        return f"it could not be created: {lines[-1]}"
    for line in lines:
        if "running low on memory" in line:
            return f"not enough memory: {line}"
    if isinstance(cause, ActorUnavailableError):
        return "its process cannot be reached"
    return "its process died; if nobody ended it, the kernel may have for lack of memory"


class RayMember(Member):
    """A worker's process: Ray starts it, ends it and tells of its death, commands go over its own socket."""

    def __init__(
        self,
        slot: int,
        incarnation: int,
        handle: Any,
        *,
        client: KeyPair,
        context: zmq.asyncio.Context,
        control: Address | None = None,
        listening: Awaitable[tuple[Address, int, str]] | None = None,
    ) -> None:
        """`control` is known of a worker that was found, `listening` gives it for one that is being created."""
        self.slot = slot
        self.incarnation = incarnation
        self._handle = handle
        self._client = client
        self._context = context
        self._listening = listening
        self._caller: Caller | None = None
        self._death: asyncio.Task[str] | None = None
        self.control: Address | None = None
        self._local_process: psutil.Process | None = None
        self._can_call = asyncio.Event()
        if control is not None:
            self._connect(control)

    def _connect(self, control: Address) -> None:
        self.control = control
        self._caller = Caller(control, self._client, self._context)
        self._can_call.set()

    def _watch_death(self) -> "asyncio.Task[str]":
        """Ends when the process does, with the reason; nobody may cancel it."""
        if self._death is None:
            self._death = asyncio.create_task(self._wait_death())
        return self._death

    async def _wait_death(self) -> str:
        try:
            while True:
                await self._handle.run.remote()
                await asyncio.sleep(TROUBLE_POLL_S)
        except RayError as error:
            return one_line(error)

    async def _call(self, name: str, *arguments: object, returns: type[T]) -> T:
        death = self._watch_death()
        if self._caller is None and not death.done():
            raise StartupError("it has not said where it takes commands")
        calls: set[asyncio.Task[Any]] = {death}
        if self._caller is not None:
            calls.add(asyncio.create_task(self._caller.call(name, *arguments, returns=returns)))
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            for call in calls - {death}:
                if call.done():
                    return cast(T, call.result())
            raise WorkerDied(death.result())
        finally:
            for call in calls - {death}:
                call.cancel()

    async def created(self) -> None:
        assert self._listening is not None
        try:
            control, pid, node = await self._listening
        except RayError as error:
            raise WorkerDied(one_line(error)) from error
        self._connect(control)
        if node == ray.get_runtime_context().get_node_id():
            with contextlib.suppress(psutil.NoSuchProcess):  # its death is heard of elsewhere
                self._local_process = psutil.Process(pid)

    async def load(self, placement: ExpertPlacement | None, source: Member | None = None) -> WorkerReport:
        peer = source.control if isinstance(source, RayMember) else None
        return await self._call("load", placement, peer, returns=SavedReport)

    async def progress(self) -> float:
        return await self._call("progress", returns=float)

    async def host_store(self, epoch: int) -> tuple[str, int]:
        return await self._call("host_store", epoch, returns=tuple[str, int])

    async def join(self, topology: Topology, store: tuple[str, int]) -> str:
        return await self._call("join", topology, store, returns=str)

    async def serve(self) -> None:
        await self._call("serve", returns=NoneType)

    async def connect(self, topology: Topology, store: tuple[str, int]) -> str:
        return await self._call("connect", topology, store, returns=str)

    async def transfer(self, topology: Topology) -> TransferReport:
        return await self._call("transfer", topology, returns=TransferReport)

    async def hand_over(self, targets: tuple[int, ...]) -> int:
        return await self._call("hand_over", targets, returns=int)

    async def commit(self, epoch: int) -> int:
        return await self._call("commit", epoch, returns=int)

    async def discard(self, epoch: int) -> None:
        await self._call("discard", epoch, returns=NoneType)

    async def status(self) -> MemberStatus:
        return await self._call("status", returns=MemberStatus)

    async def halt(self, epoch: int) -> int:
        return await self._call("halt", epoch, returns=int)

    async def tick(self) -> Tick:
        return await self._call("tick", returns=Tick)

    async def expert_load(self) -> ExpertCounts:
        return await self._call("expert_load", returns=ExpertCounts)

    async def nudge(self) -> None:
        await self._call("nudge", returns=NoneType)

    async def assume(self, topology: Topology) -> None:
        await self._call("assume", topology, returns=NoneType)

    async def trouble(self, seen_epoch: int) -> Trouble:
        death = self._watch_death()
        can_call = asyncio.create_task(self._can_call.wait())
        try:
            await asyncio.wait({death, can_call}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            can_call.cancel()
        while not death.done():
            asked, found = time.monotonic(), None
            with contextlib.suppress(TimeoutError, MoerayError):
                async with asyncio.timeout(2 * TROUBLE_SLICE_S):  # an answer may be lost together with a connection
                    found = await self._call("wait_trouble", seen_epoch, TROUBLE_SLICE_S, returns=MAYBE_TROUBLE)
            if found is not None:
                reason = f"its engine failed: {found.reason}" if found.is_fatal else found.reason
                return replace(found, reason=reason)
            if time.monotonic() - asked < TROUBLE_SLICE_S:
                await asyncio.wait({death}, timeout=TROUBLE_POLL_S)
        return Trouble(epoch=seen_epoch, reason=death.result(), is_fatal=True)

    async def stop(self) -> None:
        await self._call("stop", returns=bool)

    async def kill(self) -> None:
        if self._local_process is not None:
            # Ray asks a process to end itself first, and waits; one that hangs holds up all others meanwhile.
            with contextlib.suppress(psutil.Error):
                self._local_process.kill()
        ray.kill(self._handle, no_restart=True)
        with contextlib.suppress(RayError):
            while True:  # while `run` blocks, this call fails with the process
                await self._handle.listen.remote()
                await asyncio.sleep(KILL_POLL_S)
        if self._caller is not None:
            self._caller.close()


class RayWorkers(WorkerSource):
    """Worker actors, created by the factory that `deploy/` injects and found by their names."""

    def __init__(self, factory: WorkerFactory) -> None:
        self._factory = factory

    @cached_property
    def _context(self) -> zmq.asyncio.Context:
        return zmq.asyncio.Context()

    def create(self, slot: int, incarnation: int, client: KeyPair) -> Member:
        try:
            handle = self._factory(slot, incarnation, client)
            listening = handle.listen.remote()
        except (RayError, ValueError) as error:
            raise StartupError(f"worker {slot}: it could not be created: {one_line(error)}") from error
        return RayMember(slot, incarnation, handle, client=client, context=self._context, listening=listening)

    def find(self, slot: int, incarnation: int, client: KeyPair, control: Address | None) -> Member | None:
        try:
            handle = ray.get_actor(worker_name(slot, incarnation))
        except ValueError:
            return None
        return RayMember(slot, incarnation, handle, client=client, context=self._context, control=control)

    def lacks_room_for(self, num_workers: int) -> str | None:
        """See `WorkerSource`. What an ended worker had counts as free only a moment later, which is waited for."""
        deadline = time.monotonic() + FREED_TIMEOUT_S
        while (name := self._lacking(num_workers, ray.available_resources())) is not None:
            if time.monotonic() > deadline or self._lacking(num_workers, ray.cluster_resources()) is not None:
                each = self._factory.resources[name]
                return (
                    f"{num_workers} more workers of {each:g} {name} each need {each * num_workers:g} {name}, "
                    f"{self.describe_room()}"
                )
            time.sleep(FREED_POLL_S)
        return None

    def _lacking(self, num_workers: int, there: Mapping[str, float]) -> str | None:
        """The first resource of which so many workers need more than that."""
        needed = self._factory.resources.items()
        return next((name for name, each in needed if each * num_workers > there.get(name, 0.0)), None)

    def describe_room(self) -> str:
        total, free = ray.cluster_resources(), ray.available_resources()
        parts = [f"{free.get(name, 0.0):g} of {total.get(name, 0.0):g} {name}s free" for name in ("CPU", "GPU")]
        return "the cluster has " + " and ".join(parts)
