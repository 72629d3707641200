"""The Ray actor around a worker: commands in, answers out. The only file here that knows Ray.

Tokens never pass through it; they go over the worker's own sockets.
"""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray.exceptions import RayError

from moeray.comm.errors import CheckpointError, StartupError
from moeray.comm.messages import MemberStatus, TransferReport
from moeray.comm.placement import ExpertPlacement
from moeray.comm.sockets import KeyPair
from moeray.comm.topology import Topology
from moeray.worker.config import WorkerConfig, WorkerReady

if TYPE_CHECKING:
    from moeray.worker.peer_checkpoint import TensorInfo
    from moeray.worker.worker import Worker


logger = logging.getLogger(__name__)
T = TypeVar("T")

STOP_TIMEOUT_S = 10.0
WAIT_SLICE_S = 60.0
SOURCE_TIMEOUT_S = 30.0
# Time for the answer to a last call to leave before the process ends.
EXIT_DELAY_S = 0.2
LOWEST_PRIORITY = 19


class RayCheckpointSource:
    """Reads a checkpoint through the actor that has it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def _get(self, answer: Any) -> Any:
        try:
            return ray.get(answer, timeout=SOURCE_TIMEOUT_S)
        except RayError as error:
            raise CheckpointError(f"the worker that has the checkpoint did not answer: {error}") from error

    def manifest(self) -> "tuple[dict[str, bytes], dict[str, TensorInfo]]":
        return cast(
            "tuple[dict[str, bytes], dict[str, TensorInfo]]", self._get(self._actor.checkpoint_manifest.remote())
        )

    def rows(self, name: str, first: int, count: int) -> bytes:
        return cast(bytes, self._get(self._actor.checkpoint_rows.remote(name, first, count)))


async def in_the_background(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a thread of its own that takes only the time that nobody else wants.

    The thread cannot get its priority back, so it is not one of the pool's, and no thread that serves is made in it.
    """
    done: Future[T] = Future()

    def run() -> None:
        if sys.platform == "linux":  # elsewhere the call would be about the whole process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            done.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - reported to whoever waits
            done.set_exception(error)

    threading.Thread(target=run, name="background", daemon=True).start()
    return await asyncio.wrap_future(done)


class WorkerActor:
    """One worker's process; `deploy/` makes a Ray actor of it. It answers while it loads and serves."""

    def __init__(self, slot: int, incarnation: int, config: WorkerConfig, client: KeyPair, bind_host: str) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        self._serving = asyncio.Event()
        self._settings: dict[str, Any] = {
            "slot": slot,
            "incarnation": incarnation,
            "config": config,
            "client": client,
            "bind_host": bind_host or ray.util.get_node_ip_address(),
        }
        self._worker: Worker | None = None

    @property
    def worker(self) -> "Worker":
        if self._worker is None:
            raise StartupError(f"slot {self._settings['slot']} has not loaded its weights")
        return self._worker

    async def load(self, placement: ExpertPlacement | None, source: Any = None) -> WorkerReady:
        """See `Worker.load`; `source` is the actor of a worker that has the checkpoint.

        Runs at the lowest priority, imports included: others on this host serve meanwhile.
        """
        peer = RayCheckpointSource(source) if source is not None else None
        return await in_the_background(self._load, placement, peer)

    def _load(self, placement: ExpertPlacement | None, source: "RayCheckpointSource | None") -> WorkerReady:
        # Only here, because the controller imports this module too, to create the actor, and needs no torch.
        from moeray.worker.worker import Worker

        self._worker = Worker(**self._settings)
        return self._worker.load(placement, source)

    async def checkpoint_manifest(self) -> "tuple[dict[str, bytes], dict[str, TensorInfo]]":
        """See `LocalSource.manifest`."""
        return await asyncio.to_thread(self.worker.checkpoint_source().manifest)

    async def checkpoint_rows(self, name: str, first: int, count: int) -> bytes:
        """See `LocalSource.rows`."""
        return await asyncio.to_thread(self.worker.checkpoint_source().rows, name, first, count)

    async def progress(self) -> float:
        """How much of the weights is loaded, 0 to 1."""
        return self._worker.loaded_fraction if self._worker is not None else 0.0

    async def host_store(self, epoch: int) -> tuple[str, int]:
        """See `Worker.host_store`."""
        return await asyncio.to_thread(self.worker.host_store, epoch)

    async def join(self, topology: Topology, store_address: tuple[str, int]) -> str:
        """See `Worker.join`."""
        return await asyncio.to_thread(self.worker.join, topology, store_address)

    async def serve(self) -> None:
        """See `Worker.serve`; the process ends by itself if no front end is seen for the orphan time-out."""
        self.worker.serve()
        self._note_serving()

    def _note_serving(self) -> None:
        if not self._serving.is_set():
            self._serving.set()
            self._orphan_watch = asyncio.create_task(self._exit_if_orphaned())

    async def connect(self, topology: Topology, store_address: tuple[str, int]) -> str:
        """See `Worker.connect`."""
        return await asyncio.to_thread(self.worker.connect, topology, store_address)

    async def transfer(self, topology: Topology) -> TransferReport:
        """See `Worker.transfer`."""
        return await asyncio.to_thread(self.worker.transfer, topology)

    async def hand_over(self, targets: tuple[int, ...]) -> int:
        """See `Worker.hand_over`; returns the number of blocks once all full ones are copied."""
        return await asyncio.wrap_future(self.worker.hand_over(targets))

    async def commit(self, epoch: int) -> int:
        """See `Worker.commit`; returns the epoch once this worker has switched."""
        done = self.worker.commit(epoch)
        self._note_serving()
        return await asyncio.wrap_future(done)

    async def discard(self, epoch: int) -> None:
        """See `Worker.discard`."""
        await asyncio.to_thread(self.worker.discard, epoch)

    async def status(self) -> MemberStatus:
        """See `Worker.status`."""
        return self.worker.status()

    async def num_requests(self) -> int:
        """Sequences that run or wait here."""
        return self._worker.engine.num_requests if self._worker is not None and self._worker.engine else 0

    async def wait_failure(self) -> str | None:
        """Returns once the engine has ended: what it failed with, None if it was told to stop or orphaned.

        Before `serve` it waits, so that a call in flight always tells of the death of this process.
        """
        await self._serving.wait()
        while not await asyncio.to_thread(self.worker.wait, WAIT_SLICE_S):
            pass
        return self.worker.engine.failure if self.worker.engine else None

    async def _exit_if_orphaned(self) -> None:
        await self.wait_failure()
        if self.worker.engine is not None and self.worker.engine.orphaned:
            await asyncio.sleep(EXIT_DELAY_S)
            os._exit(0)

    async def stop(self) -> bool:
        """See `Worker.stop`."""
        return await asyncio.to_thread(self.worker.stop, STOP_TIMEOUT_S)
