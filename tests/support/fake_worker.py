"""A worker actor without a model: it answers the controller's calls, or fails at a named one."""

import asyncio
import os
import signal

from moeray.comm.errors import CheckpointError
from moeray.comm.placement import ExpertPlacement
from moeray.comm.sockets import KeyPair
from moeray.comm.topology import Topology
from moeray.worker.config import WorkerConfig, WorkerReady


class FakeWorker:
    """`config.model_path` is a script: `slot:phase:how`, for example `1:load:die`."""

    def __init__(self, slot: int, incarnation: int, config: WorkerConfig, client: KeyPair, bind_host: str) -> None:
        self.slot = slot
        self.incarnation = incarnation
        self.config = config
        self.node = bind_host
        self.client = client
        self.failed = asyncio.Event()
        self.fraction = 0.0
        self._maybe_fail("create")

    def _maybe_fail(self, phase: str) -> None:
        for step in self.config.model_path.split(","):
            if step == f"{self.slot}:{phase}:die":
                os.kill(os.getpid(), signal.SIGKILL)
            if step == f"{self.slot}:{phase}:checkpoint":
                raise CheckpointError("model.safetensors: tensor lm_head.weight is missing")
            if step == f"{self.slot}:{phase}:bug":
                raise KeyError("surprise")

    async def progress(self) -> float:
        return self.fraction

    async def load(self, placement: ExpertPlacement) -> WorkerReady:
        self._maybe_fail("load")
        if f"{self.slot}:load:hang" in self.config.model_path:
            await asyncio.sleep(3600)
        self.fraction = 1.0
        return WorkerReady(
            slot=self.slot,
            incarnation=self.incarnation,
            pid=os.getpid(),
            node=self.node,
            endpoint=f"tcp://127.0.0.1:{20000 + self.slot}",
            public_key=self.client.public,
            dtype="fp32",
            combine="exact",
            num_moe_layers=placement.num_layers,
            num_experts=placement.num_experts,
            max_model_len=64,
            vocab_size=100,
            eos_token_ids=(0,),
            num_blocks=10,
            weights_bytes=1000,
            kv_cache_bytes=1000,
            buffer_bytes=1000,
            load_s=0.1,
        )

    async def host_store(self, epoch: int) -> tuple[str, int]:
        self._maybe_fail("host_store")
        return "127.0.0.1", 1234 + epoch

    async def join(self, topology: Topology, store: tuple[str, int]) -> str:
        assert topology.slots[topology.rank_of(self.slot)] == self.slot
        assert store == ("127.0.0.1", 1234)
        self._maybe_fail("join")
        return "fake"

    async def serve(self) -> None:
        self._maybe_fail("serve")
        if f"{self.slot}:engine:fail" in self.config.model_path:
            self.failed.set()

    async def wait_failure(self) -> str | None:
        await self.failed.wait()
        return "GroupError: a rank left"

    async def stop(self) -> None:
        return None
