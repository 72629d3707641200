"""A worker's process without a model: it answers the controller's calls, or fails at a named one."""

import asyncio
import os
import signal

from moeray.comm.calls import Address
from moeray.comm.errors import CheckpointError, GroupTimeout
from moeray.comm.messages import ExpertCounts, MemberStatus, Tick, TransferReport, Trouble
from moeray.comm.placement import ExpertPlacement
from moeray.comm.sockets import KeyPair
from moeray.comm.topology import Topology
from moeray.worker.actor import WorkerActor
from moeray.worker.config import WorkerConfig, WorkerReady
from moeray.worker.control import WorkerControl

NUM_LAYERS = 2
NUM_EXPERTS = 8
FAILS_AFTER_S = 0.5


class FakeWorkerControl(WorkerControl):
    """`config.model_path` is a script: `slot:call:how`, for example `1:load:die`, or `3.0:connect:hang`.

    With an incarnation only that one fails. `how` is die, hang, hang_once (the first call only), error,
    checkpoint or bug.
    """

    def __init__(
        self, slot: int, incarnation: int, config: WorkerConfig, client: KeyPair, bind_host: str, address: Address
    ) -> None:
        self.slot = slot
        self.incarnation = incarnation
        self.config = config
        self.node = bind_host
        self.client = client
        self.address = address
        self.failed = asyncio.Event()
        self.fraction = 0.0
        self.topology: Topology | None = None
        self.prepared: Topology | None = None
        self.committed: int | None = None
        self.is_serving = False
        self.is_halted = False
        self.hung: set[str] = set()
        self._maybe_fail("create")

    def _is_told(self, phase: str, how: str) -> bool:
        script = self.config.model_path.split(",")
        names = (f"{self.slot}", f"{self.slot}.{self.incarnation}")
        return any(f"{name}:{phase}:{how}" in script for name in names)

    def _maybe_fail(self, phase: str) -> None:
        if self._is_told(phase, "die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._is_told(phase, "checkpoint"):
            raise CheckpointError("model.safetensors: tensor lm_head.weight is missing")
        if self._is_told(phase, "error"):
            raise GroupTimeout("slot 0 did not answer", slots=(0,))
        if self._is_told(phase, "bug"):
            raise KeyError("surprise")

    async def _call(self, phase: str) -> None:
        self._maybe_fail(phase)
        once = self._is_told(phase, "hang_once") and phase not in self.hung
        self.hung.add(phase)
        if once or self._is_told(phase, "hang"):
            await asyncio.Event().wait()

    async def progress(self) -> float:
        return self.fraction

    async def load(self, placement: ExpertPlacement | None, source: Address | None) -> WorkerReady:
        assert (placement is None) == (source is not None)
        assert placement is None or self.slot in placement.slots
        await self._call("load")
        self.fraction = 1.0
        return WorkerReady(
            slot=self.slot,
            incarnation=self.incarnation,
            pid=os.getpid(),
            node=self.node,
            endpoint=f"tcp://127.0.0.1:{20000 + self.slot}",
            public_key=self.client.public,
            dtype="fp32",
            weights="fp32",
            combine="exact",
            num_moe_layers=NUM_LAYERS,
            num_experts=NUM_EXPERTS,
            max_model_len=64,
            vocab_size=100,
            eos_token_ids=(0,),
            num_blocks=10,
            weights_bytes=1000,
            kv_cache_bytes=1000,
            buffer_bytes=1000,
            seat_bytes=100,
            load_s=0.1,
            load_peak_bytes=1000,
            not_finite=(),
            control=self.address,
        )

    async def host_store(self, epoch: int) -> tuple[str, int]:
        await self._call("host_store")
        return "127.0.0.1", 1234 + epoch

    async def join(self, topology: Topology, store: tuple[str, int]) -> str:
        assert topology.slots[topology.rank_of(self.slot)] == self.slot
        assert store == ("127.0.0.1", 1234 + topology.epoch)
        await self._call("join")
        self.prepared = topology
        return "fake"

    async def serve(self) -> None:
        await self._call("serve")
        self.topology, self.prepared, self.is_serving = self.prepared, None, True
        if self._is_told("engine", "fail"):
            asyncio.get_running_loop().call_later(FAILS_AFTER_S, self.failed.set)

    async def connect(self, topology: Topology, store: tuple[str, int]) -> str:
        assert store == ("127.0.0.1", 1234 + topology.epoch)
        await self._call("connect")
        self.prepared = topology
        return topology.digest()

    async def transfer(self, topology: Topology) -> TransferReport:
        await self._call("transfer")
        num_experts = topology.placement.num_experts_of(self.slot)
        return TransferReport(num_experts=num_experts, num_bytes=100 * num_experts, seconds=0.0)

    async def hand_over(self, targets: tuple[int, ...]) -> int:
        await self._call("hand_over")
        assert self.slot not in targets
        return 3

    async def commit(self, epoch: int) -> int:
        """Switches at once: these workers have no step loop that would wait for the others."""
        await self._call("commit")
        self.committed = epoch
        if self.prepared is None:
            self.is_serving = False
        else:
            assert self.prepared.epoch == epoch
            self.topology, self.prepared, self.is_serving, self.is_halted = self.prepared, None, True, False
        return epoch

    async def discard(self, epoch: int) -> None:
        await self._call("discard")
        assert self.committed != epoch
        self.prepared = None

    async def status(self) -> MemberStatus:
        return MemberStatus(
            slot=self.slot,
            incarnation=self.incarnation,
            epoch=self.topology.epoch if self.topology is not None else -1,
            prepared_epoch=self.prepared.epoch if self.prepared is not None else None,
            committed_epoch=self.committed,
            topology=self.topology,
            is_serving=self.is_serving,
            is_halted=self.is_halted,
        )

    async def halt(self, epoch: int) -> int:
        await self._call("halt")
        assert self.topology is not None
        assert epoch > self.topology.epoch
        self.is_halted, self.prepared = True, None
        return self.topology.epoch

    async def tick(self) -> Tick:
        epoch = self.topology.epoch if self.topology is not None else -1
        return Tick(epoch=epoch, position=0, progress=0, is_parked=True, num_requests=0)

    async def expert_load(self) -> ExpertCounts:
        """Nearly all tokens went to the first half of the experts."""
        await self._call("expert_load")
        half = NUM_EXPERTS // 2
        return (((100,) * half + (1,) * (NUM_EXPERTS - half)),) * NUM_LAYERS

    async def nudge(self) -> None:
        await self._call("nudge")

    async def assume(self, topology: Topology) -> None:
        self.topology = topology

    async def wait_trouble(self, seen_epoch: int, timeout_s: float) -> Trouble | None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.failed.wait()
        except TimeoutError:
            return None
        return Trouble(epoch=seen_epoch, reason="KeyError: 'surprise'", is_fatal=True)

    async def stop(self) -> bool:
        await self._call("stop")
        return True


class FakeWorkerActor(WorkerActor):
    """A process with such a worker."""

    control_class = FakeWorkerControl
