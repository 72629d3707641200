"""What a worker does when it is told to: the controller's calls, and those of peers that lack the checkpoint.

Tokens never pass through it; they go over the worker's own sockets.
"""

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from moeray.comm.calls import Address, BlockingCaller
from moeray.comm.errors import StartupError
from moeray.comm.messages import ExpertCounts, MemberStatus, Tick, TransferReport, Trouble
from moeray.comm.placement import ExpertPlacement
from moeray.comm.sockets import KeyPair
from moeray.comm.topology import Topology
from moeray.worker.config import Manifest, WorkerConfig, WorkerReady

if TYPE_CHECKING:
    from moeray.worker.engine import Engine
    from moeray.worker.worker import Worker


logger = logging.getLogger(__name__)
T = TypeVar("T")

STOP_TIMEOUT_S = 10.0
SOURCE_TIMEOUT_S = 30.0
# Time for the answer to a last call to leave before the process ends.
EXIT_DELAY_S = 0.2
ORPHAN_CHECK_S = 60.0
# How long a step may take to end when its group is given up, before its exchange is broken.
ABORT_AFTER_S = 0.5
# The controller asks once a second at least; without its question for so long, it has counted this worker as lost.
LEASE_S = 15.0
LOWEST_PRIORITY = 19


class PeerSource:
    """Reads a checkpoint through a worker that has it."""

    def __init__(self, peer: Address, client: KeyPair) -> None:
        self._caller = BlockingCaller(peer, client)

    def manifest(self) -> Manifest:
        return self._caller.call("checkpoint_manifest", returns=Manifest, timeout_s=SOURCE_TIMEOUT_S)

    def rows(self, name: str, first: int, count: int) -> bytes:
        call = "checkpoint_rows"
        return self._caller.call(call, name, first, count, returns=bytes, timeout_s=SOURCE_TIMEOUT_S)

    def close(self) -> None:
        self._caller.close()


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


class WorkerControl:
    """One worker's commands; they may come at any time and side by side. Everything slow runs beside the event loop.

    `address` is where the calls come in; it is passed on with the answer to `load`, so that others find the worker.
    """

    def __init__(
        self, slot: int, incarnation: int, config: WorkerConfig, client: KeyPair, bind_host: str, address: Address
    ) -> None:
        self.slot = slot
        self._incarnation = incarnation
        self._config = config
        self._client = client
        self._bind_host = bind_host
        self._address = address
        self._serving = asyncio.Event()
        self._heard_at = 0.0
        self._worker: Worker | None = None

    @property
    def worker(self) -> "Worker":
        if self._worker is None:
            raise StartupError(f"slot {self.slot} has not loaded its weights")
        return self._worker

    async def load(self, placement: ExpertPlacement | None, source: Address | None) -> WorkerReady:
        """See `Worker.load`; `source` takes the calls of a worker that has the checkpoint.

        Runs at the lowest priority, imports included: others on this host serve meanwhile.
        """
        ready = await in_the_background(self._load, placement, source)
        return replace(ready, control=self._address)

    def _load(self, placement: ExpertPlacement | None, peer: Address | None) -> WorkerReady:
        # Only here: a process that is being created answers before torch is there.
        from moeray.worker.worker import Worker

        worker = self._worker = Worker(
            slot=self.slot,
            incarnation=self._incarnation,
            config=self._config,
            client=self._client,
            bind_host=self._bind_host,
        )
        if peer is None:
            return worker.load(placement)
        with closing(PeerSource(peer, self._client)) as source:
            return worker.load(placement, source)

    async def checkpoint_manifest(self) -> Manifest:
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
            self._lease_watch = asyncio.create_task(self._exit_if_cut_off())

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

    async def halt(self, epoch: int) -> int:
        """See `Worker.halt`. An exchange that hangs for long is made to fail: what it waits for does not come."""
        left = asyncio.wrap_future(self.worker.halt(epoch))
        await asyncio.wait({left}, timeout=ABORT_AFTER_S)
        engine = self.worker.engine
        if not left.done() and engine is not None:
            num_broken = engine.abort_exchange()
            logger.warning("slot %d: its exchange hangs, %d connections broken", self.slot, num_broken)
        return await left

    def _serving_engine(self) -> "Engine":
        engine = self.worker.engine
        if engine is None:
            raise StartupError(f"slot {self.slot} does not serve yet")
        return engine

    async def tick(self) -> Tick:
        """See `Engine.tick`."""
        engine = self._serving_engine()
        self._heard_at = time.monotonic()
        return engine.tick()

    async def expert_load(self) -> ExpertCounts:
        """See `ExpertLoad.counts`."""
        return self._serving_engine().parts.expert_load.counts()

    async def nudge(self) -> None:
        """See `Worker.nudge`."""
        self.worker.nudge()

    async def assume(self, topology: Topology) -> None:
        """See `Worker.assume`."""
        self.worker.assume(topology)

    async def wait_trouble(self, seen_epoch: int, timeout_s: float) -> Trouble | None:
        """See `TroubleBox.wait`; None too if the engine does not run yet after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._serving.wait()
        except TimeoutError:
            return None
        engine = self.worker.engine
        assert engine is not None
        return await asyncio.to_thread(engine.trouble.wait, seen_epoch, timeout_s)

    async def _exit_if_orphaned(self) -> None:
        while not await asyncio.to_thread(self.worker.wait, ORPHAN_CHECK_S):
            pass
        if self.worker.engine is not None and self.worker.engine.orphaned:
            await asyncio.sleep(EXIT_DELAY_S)
            os._exit(0)

    async def _exit_if_cut_off(self) -> None:
        """A worker that gets nowhere and hears nothing of the controller is given up elsewhere: it must not come back.

        While only the controller is started anew the group goes on, or rests, and nobody has to leave.
        """
        engine = self.worker.engine
        assert engine is not None
        self._heard_at = time.monotonic()
        progress, moved_at = -1, self._heard_at
        while True:
            await asyncio.sleep(LEASE_S / 5)
            tick, now = engine.tick(), time.monotonic()
            if tick.progress != progress or tick.is_parked:
                progress, moved_at = tick.progress, now
            if now - self._heard_at > LEASE_S and (now - moved_at > LEASE_S or engine.is_halted):
                logger.error("slot %d: cut off from the controller for %.0f s, leaving", self.slot, LEASE_S)
                os._exit(1)

    async def stop(self) -> bool:
        """See `Worker.stop`."""
        return await asyncio.to_thread(self.worker.stop, STOP_TIMEOUT_S)
