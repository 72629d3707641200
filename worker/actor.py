"""The Ray actor around a worker: commands in, answers out. The only file here that knows Ray.

Tokens never pass through it; they go over the worker's own sockets.
"""

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import RayError

from moeray.comm.errors import CheckpointError
from moeray.comm.messages import MemberStatus, TransferReport
from moeray.comm.placement import ExpertPlacement
from moeray.comm.sockets import KeyPair
from moeray.comm.topology import Topology
from moeray.worker.config import WorkerConfig, WorkerReady

if TYPE_CHECKING:
    from moeray.worker.peer_checkpoint import TensorInfo


logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0
WAIT_SLICE_S = 60.0
SOURCE_TIMEOUT_S = 30.0
# Time for the answer to a last call to leave before the process ends.
EXIT_DELAY_S = 0.2


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


@ray.remote(max_restarts=0, max_task_retries=0, num_cpus=0)
class WorkerActor:
    """One worker's process. Methods are asynchronous so that it answers while it loads and serves."""

    def __init__(self, slot: int, incarnation: int, config: WorkerConfig, client: KeyPair, bind_host: str) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        # Only here, because the controller imports this module too, to create the actor, and needs no torch.
        from moeray.worker.worker import Worker

        host = bind_host or ray.util.get_node_ip_address()
        self._serving = asyncio.Event()
        self.worker: Worker = Worker(slot=slot, incarnation=incarnation, config=config, client=client, bind_host=host)

    async def load(self, placement: ExpertPlacement | None, source: Any = None) -> WorkerReady:
        """See `Worker.load`; `source` is the actor of a worker that has the checkpoint."""
        peer = RayCheckpointSource(source) if source is not None else None
        return await asyncio.to_thread(self.worker.load, placement, peer)

    async def checkpoint_manifest(self) -> "tuple[dict[str, bytes], dict[str, TensorInfo]]":
        """See `LocalSource.manifest`."""
        return await asyncio.to_thread(self.worker.checkpoint_source().manifest)

    async def checkpoint_rows(self, name: str, first: int, count: int) -> bytes:
        """See `LocalSource.rows`."""
        return await asyncio.to_thread(self.worker.checkpoint_source().rows, name, first, count)

    async def progress(self) -> float:
        """How much of the weights is loaded, 0 to 1."""
        return self.worker.loaded_fraction

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
        return self.worker.engine.num_requests if self.worker.engine else 0

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
