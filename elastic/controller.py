"""The Ray actor that owns a deployment's topology: it starts the workers, watches them, tells who they are.

It knows no torch and no checkpoint: how a worker comes to life is the matter of the factory that `deploy/`
injects.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.experimental import internal_kv

from moeray.comm.errors import ControlTimeout, GroupError, MoerayError, StartupError, WorkerDied
from moeray.comm.messages import MemberStatus, TransferReport
from moeray.comm.placement import ExpertPlacement
from moeray.comm.sockets import KeyPair
from moeray.comm.topology import Topology
from moeray.elastic.controller_config import ControllerConfig, namespace, worker_name
from moeray.elastic.manager import Manager
from moeray.elastic.member import Member, WorkerFactory, WorkerReport, WorkerSource
from moeray.elastic.state import StateStore
from moeray.elastic.view import Attachment, ClusterView, OperationView, ScaleRequest

T = TypeVar("T")

LOST_POLL_S = 0.2
KILL_POLL_S = 0.02
FREED_TIMEOUT_S = 2.0
FREED_POLL_S = 0.05
STORE_TIMEOUT_S = 10.0
STORE_NAMESPACE = b"moeray"


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
    """A worker actor's handle; Ray's exceptions end here."""

    def __init__(self, slot: int, incarnation: int, handle: Any) -> None:
        self.slot = slot
        self.incarnation = incarnation
        self._handle = handle

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except RayTaskError as error:
            if isinstance(error.cause, GroupError):
                raise GroupError(one_line(error), slots=error.cause.slots) from error
            raise StartupError(one_line(error)) from error
        except RayError as error:
            raise WorkerDied(one_line(error)) from error

    async def created(self) -> None:
        await self._call(self._handle.progress.remote())

    async def load(self, placement: ExpertPlacement | None, source: Member | None = None) -> WorkerReport:
        handle = source._handle if isinstance(source, RayMember) else None
        return cast(WorkerReport, await self._call(self._handle.load.remote(placement, handle)))

    async def progress(self) -> float:
        return float(await self._call(self._handle.progress.remote()))

    async def host_store(self, epoch: int) -> tuple[str, int]:
        return cast("tuple[str, int]", await self._call(self._handle.host_store.remote(epoch)))

    async def join(self, topology: Topology, store: tuple[str, int]) -> str:
        return str(await self._call(self._handle.join.remote(topology, store)))

    async def serve(self) -> None:
        await self._call(self._handle.serve.remote())

    async def connect(self, topology: Topology, store: tuple[str, int]) -> str:
        return str(await self._call(self._handle.connect.remote(topology, store)))

    async def transfer(self, topology: Topology) -> TransferReport:
        return cast(TransferReport, await self._call(self._handle.transfer.remote(topology)))

    async def hand_over(self, targets: tuple[int, ...]) -> int:
        return int(await self._call(self._handle.hand_over.remote(targets)))

    async def commit(self, epoch: int) -> int:
        return int(await self._call(self._handle.commit.remote(epoch)))

    async def discard(self, epoch: int) -> None:
        await self._call(self._handle.discard.remote(epoch))

    async def status(self) -> MemberStatus:
        return cast(MemberStatus, await self._call(self._handle.status.remote()))

    async def lost(self) -> str:
        try:
            while (failure := await self._handle.wait_failure.remote()) is None:
                await asyncio.sleep(LOST_POLL_S)  # no engine yet, or one that was told to stop
        except RayError as error:
            return one_line(error)
        return f"its engine failed: {failure}"

    async def stop(self) -> None:
        await self._call(self._handle.stop.remote())

    async def kill(self) -> None:
        ray.kill(self._handle, no_restart=True)
        with contextlib.suppress(RayError):
            while True:
                await self._handle.progress.remote()
                await asyncio.sleep(KILL_POLL_S)


class RayWorkers(WorkerSource):
    """Worker actors, created by the factory that `deploy/` injects and found by their names."""

    def __init__(self, factory: WorkerFactory) -> None:
        self._factory = factory

    def create(self, slot: int, incarnation: int, client: KeyPair) -> Member:
        try:
            return RayMember(slot, incarnation, self._factory(slot, incarnation, client))
        except (RayError, ValueError) as error:
            raise StartupError(f"worker {slot}: it could not be created: {one_line(error)}") from error

    def find(self, slot: int, incarnation: int) -> Member | None:
        try:
            return RayMember(slot, incarnation, ray.get_actor(worker_name(slot, incarnation)))
        except ValueError:
            return None

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


class RayStateStore(StateStore):
    """One key in the key-value store of Ray's control service, which outlives every actor."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    async def _call(self, what: str, call: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                return await asyncio.to_thread(call)
        except TimeoutError:
            raise ControlTimeout(f"Ray did not {what} the controller's state within {STORE_TIMEOUT_S:g} s") from None
        except (RayError, RuntimeError) as error:
            raise MoerayError(f"Ray did not {what} the controller's state: {one_line(error)}") from error

    async def read(self) -> bytes | None:
        return cast(
            "bytes | None",
            await self._call("read", lambda: internal_kv._internal_kv_get(self._key, namespace=STORE_NAMESPACE)),
        )

    async def write(self, value: bytes) -> None:
        await self._call(
            "write",
            lambda: internal_kv._internal_kv_put(self._key, value, overwrite=True, namespace=STORE_NAMESPACE),
        )

    async def clear(self) -> None:
        await self._call("clear", lambda: internal_kv._internal_kv_del(self._key, namespace=STORE_NAMESPACE))


class Controller:
    """Created detached and named by `deploy/`; all methods run on the actor's one event loop. See `Manager`.

    Its memory is kept under the actor's id, which is the same after a restart and never another deployment's.
    """

    def __init__(self, config: ControllerConfig, worker_factory: WorkerFactory) -> None:
        context = ray.get_runtime_context()
        self._manager = Manager(
            config,
            RayWorkers(worker_factory),
            RayStateStore(f"{namespace(config.deployment)}/{context.get_actor_id()}"),
            exit_process=lambda: ray.kill(context.current_actor, no_restart=True),
        )

    async def start(self) -> None:
        await self._manager.start()

    async def attach(self) -> Attachment:
        return await self._manager.attach()

    async def view(self, after_version: int, timeout_s: float) -> ClusterView:
        return await self._manager.view(after_version, timeout_s)

    async def scale(self, request: ScaleRequest) -> OperationView:
        return await self._manager.scale(request)

    async def operations(self) -> tuple[OperationView, ...]:
        return await self._manager.operations()

    async def operation(self, operation_id: str) -> OperationView | None:
        return await self._manager.operation(operation_id)

    async def wait_operation(self, operation_id: str, timeout_s: float) -> OperationView:
        return await self._manager.wait_operation(operation_id, timeout_s)

    async def stop(self, orderly: bool) -> None:
        await self._manager.stop(orderly)
