"""The way to the controller over Ray, for the front end and the supervisor."""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec
import psutil
import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from moeray.api.control import ControlClient
from moeray.comm.errors import ControlTimeout, MoerayError, OperationRefused, WorkerDied
from moeray.elastic.ray_workers import one_line
from moeray.elastic.view import Attachment, ClusterView, FaultView, OperationView, RebalanceRequest, ScaleRequest

T = TypeVar("T")

CALL_TIMEOUT_S = 10.0


class RayControl(ControlClient):
    """Calls the controller's actor; Ray's exceptions end here."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self._home: tuple[int, str] | None = None
        self._local_process: psutil.Process | None = None

    async def _call(self, name: str, call: Awaitable[T], timeout_s: float | None) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await call
        except TimeoutError:
            assert timeout_s is not None
            raise ControlTimeout(f"the controller did not answer {name} within {timeout_s:g} s") from None
        except RayTaskError as error:
            if isinstance(error.cause, ValueError | OperationRefused):
                raise error.cause from None
            raise MoerayError(f"the controller failed in {name}: {one_line(error)}") from error
        except ActorUnavailableError:
            raise ControlTimeout(f"the controller did not answer {name}: its process cannot be reached") from None
        except RayError as error:
            raise WorkerDied(f"the controller: {one_line(error)}") from error

    async def ping(self) -> None:
        home: tuple[int, str] = await self._call("ping", self._controller.ping.remote(), None)
        if home != self._home:
            self._home, self._local_process = home, None
            pid, node = home
            if node == ray.get_runtime_context().get_node_id():
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._local_process = psutil.Process(pid)

    async def end_hung(self) -> str | None:
        if self._home is None:
            return None
        pid, node = self._home
        if node == ray.get_runtime_context().get_node_id():
            # Only the process that has answered before: another one may just be starting.
            if self._local_process is None or not self._local_process.is_running():
                return None
            self._local_process.kill()
        else:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await asyncio.to_thread(ray.kill, self._controller, no_restart=False)
            except (RayError, ValueError, TimeoutError) as error:
                raise MoerayError(f"Ray did not end it: {one_line(error)}") from error
        return f"its process {pid}"

    async def start(self) -> None:
        await self._call("start", self._controller.start.remote(), CALL_TIMEOUT_S * 6)

    async def attach(self) -> Attachment:
        attachment: Attachment = await self._call("attach", self._controller.attach.remote(), CALL_TIMEOUT_S)
        return attachment

    async def view(self, after_version: int, timeout_s: float) -> ClusterView:
        call = self._controller.view.remote(after_version, timeout_s)
        view: ClusterView = await self._call("view", call, timeout_s + CALL_TIMEOUT_S)
        return view

    async def scale(self, request: ScaleRequest) -> OperationView:
        # With an id of its own a call that Ray repeats, after a restart of the controller, starts nothing twice.
        named = msgspec.structs.replace(request, operation_id=request.operation_id or uuid.uuid4().hex)
        view: OperationView = await self._call("scale", self._controller.scale.remote(named), CALL_TIMEOUT_S)
        return view

    async def rebalance(self, request: RebalanceRequest) -> OperationView:
        named = msgspec.structs.replace(request, operation_id=request.operation_id or uuid.uuid4().hex)
        # The controller waits for its workers' answers first.
        call = self._controller.rebalance.remote(named)
        view: OperationView = await self._call("rebalance", call, 2 * CALL_TIMEOUT_S)
        return view

    async def operations(self) -> tuple[OperationView, ...]:
        views: tuple[OperationView, ...] = await self._call(
            "operations", self._controller.operations.remote(), CALL_TIMEOUT_S
        )
        return views

    async def operation(self, operation_id: str) -> OperationView | None:
        view: OperationView | None = await self._call(
            "operation", self._controller.operation.remote(operation_id), CALL_TIMEOUT_S
        )
        return view

    async def wait_operation(self, operation_id: str, timeout_s: float) -> OperationView:
        call = self._controller.wait_operation.remote(operation_id, timeout_s)
        view: OperationView = await self._call("wait_operation", call, timeout_s + CALL_TIMEOUT_S)
        return view

    async def faults(self) -> tuple[FaultView, ...]:
        views: tuple[FaultView, ...] = await self._call("faults", self._controller.faults.remote(), CALL_TIMEOUT_S)
        return views

    async def stop(self, *, orderly: bool) -> None:
        await self._call("stop", self._controller.stop.remote(orderly), CALL_TIMEOUT_S * 2)
