"""The Ray actor that owns a deployment's topology: it starts the workers, watches them, tells who they are.

It knows no torch and no checkpoint: how a worker comes to life is the matter of the factory that `deploy/`
injects.
"""

import asyncio
import os
from collections.abc import Callable
from typing import TypeVar, cast

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv

from moeray.comm.errors import ControlTimeout, MoerayError
from moeray.elastic.controller_config import ControllerConfig, namespace
from moeray.elastic.manager import Manager
from moeray.elastic.member import WorkerFactory
from moeray.elastic.ray_workers import RayWorkers, one_line
from moeray.elastic.state import StateStore
from moeray.elastic.view import Attachment, ClusterView, FaultView, OperationView, RebalanceRequest, ScaleRequest

T = TypeVar("T")

STORE_TIMEOUT_S = 10.0
STORE_NAMESPACE = b"moeray"


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
            leave=lambda: os._exit(1),
        )

    async def ping(self) -> tuple[int, str]:
        """A sign of life: this process's id, and its node's."""
        return os.getpid(), ray.get_runtime_context().get_node_id()

    async def start(self) -> None:
        await self._manager.start()

    async def attach(self) -> Attachment:
        return await self._manager.attach()

    async def view(self, after_version: int, timeout_s: float) -> ClusterView:
        return await self._manager.view(after_version, timeout_s)

    async def scale(self, request: ScaleRequest) -> OperationView:
        return await self._manager.scale(request)

    async def rebalance(self, request: RebalanceRequest) -> OperationView:
        return await self._manager.rebalance(request)

    async def operations(self) -> tuple[OperationView, ...]:
        return await self._manager.operations()

    async def operation(self, operation_id: str) -> OperationView | None:
        return await self._manager.operation(operation_id)

    async def wait_operation(self, operation_id: str, timeout_s: float) -> OperationView:
        return await self._manager.wait_operation(operation_id, timeout_s)

    async def faults(self) -> tuple[FaultView, ...]:
        return await self._manager.faults()

    async def stop(self, orderly: bool) -> None:
        await self._manager.stop(orderly)
