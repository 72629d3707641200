"""Real workers that fail at a call which a file names, and a deployment of them that is served like any other.

    python -m tests.support.faulty_worker serve demo --port 0

Each line of the file in `FAULTS` is `slot:call:how`, read at every call: `kill` ends the process, `stop` stops it as
a debugger would, `hang` lets the call never end, `error` lets it fail as if a peer had not answered, and `bug` as
nobody expects.
"""

import argparse
import asyncio
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

from moeray.comm.calls import Address
from moeray.comm.errors import GroupTimeout
from moeray.comm.messages import TransferReport
from moeray.comm.placement import ExpertPlacement
from moeray.comm.topology import Topology
from moeray.deploy import supervisor
from moeray.deploy.config import ServeConfig
from moeray.deploy.launch import RayWorkerFactory
from moeray.elastic.phases import OperationDeadlines
from moeray.worker.actor import WorkerActor
from moeray.worker.config import WorkerReady
from moeray.worker.control import WorkerControl

FAULTS = "MOERAY_TEST_FAULTS"
# Shorter than they are by default, in the same order: who waits for a peer names it before its own time is over.
DEADLINES = OperationDeadlines(connect_s=10.0, transfer_s=4.0)
WARM_TIMEOUT_S = 4.0
MISSED_SLOT = 99


class FaultyWorkerControl(WorkerControl):
    """Fails before it does what it is asked."""

    async def _maybe_fail(self, call: str) -> None:
        lines = Path(os.environ[FAULTS]).read_text().split()
        for how in ("kill", "stop", "hang", "error", "bug"):
            if f"{self.slot}:{call}:{how}" not in lines:
                continue
            if how == "hang":
                await asyncio.Event().wait()
            if how == "error":
                raise GroupTimeout(f"slot {MISSED_SLOT} did not answer", slots=(MISSED_SLOT,))
            if how == "bug":
                raise KeyError("surprise")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    async def load(self, placement: ExpertPlacement | None, source: Address | None) -> WorkerReady:
        await self._maybe_fail("load")
        return await super().load(placement, source)

    async def host_store(self, epoch: int) -> tuple[str, int]:
        await self._maybe_fail("host_store")
        return await super().host_store(epoch)

    async def connect(self, topology: Topology, store_address: tuple[str, int]) -> str:
        await self._maybe_fail("connect")
        from moeray.worker import worker

        worker.WARM_TIMEOUT_S = WARM_TIMEOUT_S
        return await super().connect(topology, store_address)

    async def transfer(self, topology: Topology) -> TransferReport:
        await self._maybe_fail("transfer")
        return await super().transfer(topology)

    async def hand_over(self, targets: tuple[int, ...]) -> int:
        await self._maybe_fail("hand_over")
        return await super().hand_over(targets)


class FaultyWorkerActor(WorkerActor):
    """A process with a worker that fails."""

    control_class = FaultyWorkerControl


def faulty_class() -> Any:
    import ray

    return ray.remote(FaultyWorkerActor)


def main() -> None:
    """Two workers, up to four, as `moeray serve` would start them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--deployment", default="faulty")
    given = parser.parse_args()
    config = ServeConfig(model=given.model, workers=2, port=given.port, deployment=given.deployment, kv_cache_gib=0.05)
    plan = supervisor.make_plan(config)
    assert isinstance(plan.factory, RayWorkerFactory)
    variables = {**plan.factory.variables, FAULTS: os.environ[FAULTS]}
    factory = dataclasses.replace(plan.factory, resolve=faulty_class, variables=variables)
    controller = dataclasses.replace(plan.controller, operation_deadlines=DEADLINES)
    supervisor.run(dataclasses.replace(plan, factory=factory, controller=controller), Console())


if __name__ == "__main__":
    # As a module of its name, and not as `__main__`, so that workers can import the class.
    from tests.support import faulty_worker

    faulty_worker.main()
