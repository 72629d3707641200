"""Workers made of coroutines in one event loop, which behave as the contract says and outlive their controller.

Faults are named: `cluster.fail(slot, "connect", how)` with `hang`, `die`, `error(...)`.
"""

import asyncio
from collections.abc import Awaitable, Callable

from moeray.comm.calls import Address
from moeray.comm.errors import MoerayError, StartupError, WorkerDied
from moeray.comm.messages import ExpertCounts, MemberStatus, Tick, TransferReport, Trouble
from moeray.comm.placement import EMPTY_SEAT, ExpertPlacement
from moeray.comm.sockets import KeyPair
from moeray.comm.topology import Topology
from moeray.elastic.member import Member, WorkerSource
from moeray.elastic.planner import moves_to
from moeray.elastic.state import SavedReport

NUM_LAYERS = 2


class FakeProcess:
    """One incarnation of a worker."""

    def __init__(self, cluster: "FakeCluster", slot: int, incarnation: int) -> None:
        self.cluster = cluster
        self.slot = slot
        self.incarnation = incarnation
        self.died = asyncio.Event()
        self.topology: Topology | None = None
        self.prepared: Topology | None = None
        self.committed: int | None = None
        self.is_serving = False
        self.is_handing_over = False
        self.is_loaded = False
        self.is_halted = False
        self.void_before = 0
        self.trouble: Trouble | None = None
        self.has_trouble = asyncio.Event()
        self.switched: dict[int, asyncio.Event] = {}

    @property
    def epoch(self) -> int:
        return self.topology.epoch if self.topology is not None else -1

    def lose_group(self, reason: str = "connection reset") -> None:
        """An exchange failed: the step loop leaves its group, and says so."""
        self.is_halted = True
        self.trouble = Trouble(epoch=self.epoch, reason=reason, is_fatal=False)
        self.has_trouble.set()

    async def run(self, name: str) -> None:
        """What each call does first: it is noted, and fails if a fault is set."""
        self.cluster.calls.append((self.slot, name))
        fault = self.cluster.faults.get((self.slot, name))
        if fault is not None:
            await fault(self)


Fault = Callable[[FakeProcess], Awaitable[None]]


async def hang(_: FakeProcess) -> None:
    await asyncio.Event().wait()


async def die(process: FakeProcess) -> None:
    process.died.set()
    await asyncio.Event().wait()


def error(failure: MoerayError) -> Fault:
    async def fail(_: FakeProcess) -> None:
        raise failure

    return fail


class FakeMember(Member):
    """A controller's handle on a process; a call in flight fails when the process dies."""

    def __init__(self, process: FakeProcess) -> None:
        self.process = process
        self.slot = process.slot
        self.incarnation = process.incarnation

    async def _call(self, name: str) -> None:
        if self.process.died.is_set():
            raise WorkerDied("its process died")
        work = asyncio.create_task(self.process.run(name))
        death = asyncio.create_task(self.process.died.wait())
        try:
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            if self.process.died.is_set():
                raise WorkerDied("its process died")
            await work
        finally:
            for task in (work, death):
                task.cancel()
            await asyncio.gather(work, death, return_exceptions=True)

    async def created(self) -> None:
        await self._call("created")

    async def load(self, placement: ExpertPlacement | None, source: Member | None = None) -> SavedReport:
        await self._call("load")
        assert placement is None or source is None, "a first worker needs no source"
        self.process.is_loaded = True
        return SavedReport(
            slot=self.slot,
            incarnation=self.incarnation,
            pid=1000 + 10 * self.incarnation + self.slot,
            node="n",
            endpoint=f"tcp://n:{self.slot}",
            public_key="k",
            control=Address(f"tcp://c:{self.slot}", "k"),
            dtype="fp32",
            weights="fp32",
            combine="exact",
            num_moe_layers=NUM_LAYERS if placement is None else placement.num_layers,
            num_experts=self.process.cluster.num_experts,
            max_model_len=8,
            vocab_size=8,
            eos_token_ids=(),
            num_blocks=1,
            weights_bytes=1,
            buffer_bytes=1,
            seat_bytes=1,
            load_s=0.1,
            load_peak_bytes=1,
            not_finite=(),
        )

    async def progress(self) -> float:
        return 0.5

    async def host_store(self, epoch: int) -> tuple[str, int]:
        await self._call("host_store")
        return "h", 100 + epoch

    async def join(self, topology: Topology, store: tuple[str, int]) -> str:
        await self._call("join")
        assert store == ("h", 100 + topology.epoch)
        self.process.topology = topology
        return f"dispatcher of {self.slot}"

    async def serve(self) -> None:
        await self._call("serve")
        self.process.is_serving = True

    async def connect(self, topology: Topology, store: tuple[str, int]) -> str:
        await self._call("connect")
        assert store == ("h", 100 + topology.epoch)
        assert topology.epoch > self.process.epoch
        assert self.process.prepared is None, "an epoch was prepared and never discarded"
        assert self.process.is_loaded
        self.process.prepared = topology
        return self.process.cluster.digests.get(self.slot, topology.digest())

    async def transfer(self, topology: Topology) -> TransferReport:
        await self._call("transfer")
        assert self.process.prepared == topology
        before = self.process.topology.placement if self.process.topology is not None else topology.placement
        moves = moves_to(before, topology.placement, self.slot) if self.process.topology is not None else []
        for layer, seat, _ in moves:
            assert before.seats_of(layer, self.slot)[seat] == EMPTY_SEAT
        return TransferReport(num_experts=len(moves), num_bytes=10 * len(moves), seconds=0.0)

    async def hand_over(self, targets: tuple[int, ...]) -> int:
        await self._call("hand_over")
        assert self.slot not in targets
        self.process.is_handing_over = True
        return 7

    async def commit(self, epoch: int) -> int:
        if epoch in self.process.switched:
            raise StartupError(f"cannot commit epoch {epoch}, it was not prepared here")
        process, cluster = self.process, self.process.cluster
        if epoch < process.void_before or (process.prepared is None and not process.is_handing_over):
            raise StartupError(f"cannot commit epoch {epoch}, it was not prepared here")
        await self._call("commit")
        process.committed = epoch
        event = process.switched[epoch] = asyncio.Event()
        cluster.switch_if_all_are_ready(epoch)
        waiting = asyncio.create_task(event.wait())
        try:
            await waiting
        finally:
            waiting.cancel()
        return epoch

    async def discard(self, epoch: int) -> None:
        await self._call("discard")
        assert self.process.committed != epoch, "a committed epoch cannot be discarded"
        self.process.is_handing_over = False
        if self.process.prepared is not None and self.process.prepared.epoch == epoch:
            self.process.prepared = None

    async def status(self) -> MemberStatus:
        await self._call("status")
        process = self.process
        return MemberStatus(
            slot=self.slot,
            incarnation=self.incarnation,
            epoch=process.epoch,
            prepared_epoch=process.prepared.epoch if process.prepared is not None else None,
            committed_epoch=process.committed,
            topology=process.topology,
            is_serving=process.is_serving,
            is_halted=process.is_halted,
        )

    async def halt(self, epoch: int) -> int:
        await self._call("halt")
        process = self.process
        assert process.is_serving
        process.is_halted, process.is_handing_over, process.prepared = True, False, None
        process.void_before = max(process.void_before, epoch)
        return process.epoch

    async def tick(self) -> Tick:
        await self._call("tick")
        process = self.process
        return Tick(epoch=process.epoch, position=0, progress=0, is_parked=True, num_requests=0)

    async def expert_load(self) -> ExpertCounts:
        await self._call("expert_load")
        cluster = self.process.cluster
        return cluster.loads.get(self.slot, ((0,) * cluster.num_experts,) * NUM_LAYERS)

    async def nudge(self) -> None:
        await self._call("nudge")

    async def assume(self, topology: Topology) -> None:
        await self._call("assume")
        assert self.process.is_halted
        assert topology.epoch > self.process.epoch
        self.process.topology = topology

    async def trouble(self, seen_epoch: int) -> Trouble:
        process = self.process
        while not process.died.is_set():
            if process.trouble is not None and process.trouble.epoch > seen_epoch:
                return process.trouble
            process.has_trouble.clear()
            events = [asyncio.create_task(event.wait()) for event in (process.died, process.has_trouble)]
            try:
                await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for event in events:
                    event.cancel()
        return Trouble(epoch=seen_epoch, reason="its process died", is_fatal=True)

    async def stop(self) -> None:
        await self._call("stop")

    async def kill(self) -> None:
        self.process.cluster.calls.append((self.slot, "kill"))
        if (fault := self.process.cluster.faults.get((self.slot, "kill"))) is not None:
            await fault(self.process)
        self.process.died.set()


class FakeCluster(WorkerSource):
    """All processes, and what they agreed on. `room` is how many more workers can start, None for any number.

    `loads` are the counts of experts that slots tell; those that are not named have counted nothing.
    """

    def __init__(self, num_experts: int = 8) -> None:
        self.num_experts = num_experts
        self.calls: list[tuple[int, str]] = []
        self.faults: dict[tuple[int, str], Fault] = {}
        self.digests: dict[int, str] = {}
        self.processes: list[FakeProcess] = []
        self.loads: dict[int, ExpertCounts] = {}
        self.room: int | None = None

    def fail(self, slot: int, call: str, how: Fault) -> None:
        """The next calls of this name to this slot end so, until `heal`."""
        self.faults[slot, call] = how

    def heal(self) -> None:
        self.faults.clear()
        self.digests.clear()

    @property
    def alive(self) -> dict[int, FakeProcess]:
        return {process.slot: process for process in self.processes if not process.died.is_set()}

    def create(self, slot: int, incarnation: int, client: KeyPair) -> Member:
        assert slot not in self.alive, "two processes in one slot"
        assert (slot, incarnation) not in {(p.slot, p.incarnation) for p in self.processes}
        assert client.public
        assert client.secret
        process = FakeProcess(self, slot, incarnation)
        self.processes.append(process)
        return FakeMember(process)

    def find(self, slot: int, incarnation: int, client: KeyPair, control: Address | None) -> Member | None:
        assert client.secret
        assert control in (None, Address(f"tcp://c:{slot}", "k"))
        process = self.alive.get(slot)
        if process is None or process.incarnation != incarnation:
            return None
        return FakeMember(process)

    def lacks_room_for(self, num_workers: int) -> str | None:
        if self.room is None or num_workers <= self.room:
            return None
        return f"{num_workers} more workers need {num_workers} seats, {self.describe_room()}"

    def describe_room(self) -> str:
        return f"the cluster has {self.room} seats free"

    def switch_if_all_are_ready(self, epoch: int) -> None:
        """The header exchange: when the last rank of both epochs is ready, all switch between two steps."""
        alive = self.alive.values()
        prepared = [p for p in alive if p.prepared is not None and p.prepared.epoch == epoch]
        topology = prepared[0].prepared
        assert topology is not None
        ranks = [p for p in alive if p.is_serving or p.slot in topology.slots]
        if {p.slot for p in prepared} != set(topology.slots) or any(p.committed != epoch for p in ranks):
            return
        for process in ranks:
            if process.slot in topology.slots:
                process.topology, process.prepared, process.is_serving = topology, None, True
                process.is_halted = False
            else:
                process.is_serving = False
            if epoch in process.switched:
                process.switched[epoch].set()

    def check(self) -> None:
        """What must hold whenever nothing is going on: those that serve agree on who they are."""
        serving = [p for p in self.alive.values() if p.is_serving]
        assert len({p.topology for p in serving}) == 1
        topology = serving[0].topology
        assert topology is not None
        assert {p.slot for p in serving} == set(topology.slots)
        assert all(p.prepared is None for p in self.alive.values()), "a prepared epoch was left behind"
        assert not any(p.is_handing_over for p in serving), "a survivor hands over"
        assert not any(p.is_halted for p in serving), "a survivor was left halted"
