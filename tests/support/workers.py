"""Whole workers in one process, without Ray: real model, groups, engines and sockets, and a front end to drive them."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import zmq

from moeray.comm.placement import ExpertPlacement
from moeray.comm.sockets import KeyPair, new_key_pair
from moeray.comm.topology import Member, Topology
from moeray.elastic.planner import plan_placement
from moeray.worker.config import WorkerConfig, WorkerReady
from moeray.worker.messages import (
    Abort,
    Attach,
    Attached,
    EngineFailed,
    FromWorker,
    HandedOver,
    HandedOverSequence,
    Rejected,
    SamplingParams,
    StepOutput,
    Submit,
    TokenOutput,
    WorkerStats,
)
from moeray.worker.models.registry import read_model_config
from moeray.worker.worker import Worker
from tests.support.ranks import on_every_rank

DEADLINE_S = 30.0


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until true; fails naming what did not happen."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"did not happen within {deadline_s} s: {what}"
        time.sleep(0.005)


class WorkerSet:
    """Serving workers, `size` of them at the start. Use as a context manager.

    `reconfigure` does what the controller does, one phase after the other.
    """

    def __init__(self, path: Path, size: int, *, min_workers: int | None = None, **overrides: object) -> None:
        config = read_model_config(path, str(overrides.get("model_impl", "auto")))
        num_seats = -(-config.num_experts // (min_workers or size))
        self.client = new_key_pair()
        self.next_epoch = 1
        settings: dict[str, object] = {
            "model_path": str(path),
            "num_seats": num_seats,
            "max_workers": max(size, 4),
            "kv_cache_bytes": 16 << 20,
            "group_timeout_s": 20.0,
            **overrides,
        }
        self.config = WorkerConfig(**settings)  # type: ignore[arg-type]
        placement = ExpertPlacement.contiguous(
            num_layers=config.num_moe_layers, num_experts=config.num_experts, slots=range(size), num_seats=num_seats
        )
        self.workers = [
            Worker(slot=slot, incarnation=0, config=self.config, client=self.client, bind_host="127.0.0.1")
            for slot in range(size)
        ]
        self.members = {worker.slot: member_of(worker.load(placement)) for worker in self.workers}
        self.topology = Topology(epoch=0, members=tuple(self.members.values()), placement=placement)
        store = self.workers[0].host_store(0)
        on_every_rank(size, lambda rank: self.workers[rank].join(self.topology, store))
        for worker in self.workers:
            worker.serve()

    def reconfigure(self, slots: Sequence[int], *, hand_over: bool = True) -> None:
        """Make these slots the members, joiners first loaded, leavers handing over; returns when all have switched."""
        prepared = self.prepare(slots, hand_over=hand_over)
        self.commit(prepared)

    def prepare(self, slots: Sequence[int], *, hand_over: bool = True) -> Topology:
        """Every phase before the commit."""
        for slot in slots:
            if slot not in self.members:
                worker = Worker(slot=slot, incarnation=0, config=self.config, client=self.client, bind_host="127.0.0.1")
                self.members[slot] = member_of(worker.load(None))
                self.workers.append(worker)
        placement = plan_placement(self.topology.placement, slots)
        members = tuple(self.members[slot] for slot in placement.slots)
        topology = Topology(epoch=self.next_epoch, members=members, placement=placement)
        self.next_epoch += 1
        staying = [self.worker(slot) for slot in topology.slots]
        store = staying[0].host_store(topology.epoch)
        digests = on_every_rank(len(staying), lambda rank: staying[rank].connect(topology, store))
        assert len(set(digests)) == 1
        on_every_rank(len(staying), lambda rank: staying[rank].transfer(topology))
        if hand_over:
            for leaver in self.leavers(topology):
                targets = tuple(slot for slot in topology.slots if slot in self.topology.slots)
                leaver.hand_over(targets).result(DEADLINE_S)
        return topology

    def commit(self, topology: Topology) -> None:
        leavers = self.leavers(topology)
        for leaver in leavers:
            leaver._leaving = True
        everyone = [*(self.worker(slot) for slot in topology.slots), *leavers]
        for done in [worker.commit(topology.epoch) for worker in everyone]:
            assert done.result(DEADLINE_S) == topology.epoch
        self.topology = topology

    def leavers(self, topology: Topology) -> list[Worker]:
        return [self.worker(slot) for slot in self.topology.slots if slot not in topology.slots]

    def worker(self, slot: int) -> Worker:
        return next(worker for worker in self.workers if worker.slot == slot)

    def remove(self, slot: int) -> None:
        """A leaver's process ends."""
        worker = self.worker(slot)
        assert worker.stop(DEADLINE_S)
        self.workers.remove(worker)
        del self.members[slot]

    def __enter__(self) -> "WorkerSet":
        return self

    def __exit__(self, *_: object) -> None:
        on_every_rank(len(self.workers), lambda rank: self.workers[rank].stop(20.0))


def member_of(ready: WorkerReady) -> Member:
    """The member that a loaded worker is."""
    return Member(
        slot=ready.slot,
        incarnation=ready.incarnation,
        node=ready.node,
        endpoint=ready.endpoint,
        public_key=ready.public_key,
    )


class FrontEnd:
    """A synchronous front end with a lease: submits, collects what comes back, and moves what is handed over."""

    def __init__(self, topology: Topology, client: KeyPair, lease: int) -> None:
        self.lease = lease
        self.tokens: dict[str, list[TokenOutput]] = defaultdict(list)
        self.rejected: list[Rejected] = []
        self.failures: list[EngineFailed] = []
        self.stats: dict[int, WorkerStats] = {}
        self.attached: set[int] = set()
        self.num_handed_over = 0
        self._submitted: dict[str, Submit] = {}
        self._client = client
        self._context = zmq.Context()
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._links: dict[int, zmq.Socket[bytes]] = {}
        self.connect(topology)

    def connect(self, topology: Topology) -> None:
        """Link to members that are new; requests go to members of this topology from now on."""
        client, lease = self._client, self.lease
        self._serving = topology.slots
        for member in topology.members:
            if member.slot in self._links:
                continue
            socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.curve_serverkey = member.public_key.encode()
            socket.curve_publickey = client.public.encode()
            socket.curve_secretkey = client.secret.encode()
            socket.routing_id = f"front-end-{lease}".encode()
            socket.connect(member.endpoint)
            self._links[member.slot] = socket
            self.send(member.slot, Attach(self.lease))

    def attach(self) -> None:
        wait_until(lambda: self.pump() and self.attached >= set(self._links), "all workers attached")

    def disconnect(self, slot: int) -> None:
        self._links.pop(slot).close(linger=0)
        self.attached.discard(slot)

    def send(self, slot: int, message: object) -> None:
        self._links[slot].send(msgspec.msgpack.encode(message))

    def submit(
        self, slot: int, seq_id: str, prompt: list[int], sampling: SamplingParams, output: list[int] | None = None
    ) -> None:
        submit = Submit(
            lease=self.lease,
            seq_id=seq_id,
            attempt=0,
            index=0,
            prompt_ids=prompt,
            output_ids=output or [],
            sampling=sampling,
        )
        self._submitted[seq_id] = submit
        self.send(slot, submit)

    def abort(self, slot: int, *seq_ids: str) -> None:
        self.send(slot, Abort(self.lease, list(seq_ids)))

    def pump(self) -> bool:
        """Take everything that has arrived; always true, to be used in conditions."""
        for socket in list(self._links.values()):
            while True:
                try:
                    payload = socket.recv(zmq.DONTWAIT)
                except zmq.Again:
                    break
                self._take(self._decoder.decode(payload))
        return True

    def _take(self, message: FromWorker) -> None:
        match message:
            case Attached():
                self.attached.add(message.slot)
                self.stats[message.slot] = message.stats
            case StepOutput():
                self.stats[message.slot] = message.stats
                for token in message.tokens:
                    self.tokens[token.seq_id].append(token)
            case Rejected():
                self.rejected.append(message)
            case EngineFailed():
                self.failures.append(message)
            case HandedOver():
                for sequence in message.sequences:
                    self._go_on(sequence)

    def _go_on(self, sequence: HandedOverSequence) -> None:
        old = self._submitted[sequence.seq_id]
        output = [token.token_id for token in self.tokens[sequence.seq_id]]
        again = msgspec.structs.replace(old, attempt=old.attempt + 1, output_ids=output)
        target = sequence.target_slot if sequence.target_slot in self._serving else self._serving[0]
        self._submitted[sequence.seq_id] = again
        self.num_handed_over += 1
        self.send(target, again)

    def is_done(self, seq_id: str) -> bool:
        self.pump()
        return bool(self.tokens[seq_id]) and self.tokens[seq_id][-1].finish_reason is not None

    def token_ids(self, seq_id: str) -> list[int]:
        assert [token.position for token in self.tokens[seq_id]] == list(range(len(self.tokens[seq_id])))
        return [token.token_id for token in self.tokens[seq_id]]

    def close(self) -> None:
        self._context.destroy(linger=0)


def answers(workers: WorkerSet, lease: int, samplings: Mapping[str, SamplingParams]) -> dict[str, list[list[int]]]:
    """What each worker says to a request of each kind; all get theirs at the same time."""
    front_end = FrontEnd(workers.topology, workers.client, lease)
    front_end.attach()
    tokens: dict[str, list[list[int]]] = {}
    for name, sampling in samplings.items():
        for slot in workers.topology.slots:
            front_end.submit(slot, f"{name}-{slot}", [(k * 7) % 300 for k in range(30)], sampling)
    for name in samplings:
        for slot in workers.topology.slots:
            wait_until(lambda seq_id=f"{name}-{slot}": front_end.is_done(seq_id), f"{name} at {slot}")  # type: ignore[misc]
        tokens[name] = [front_end.token_ids(f"{name}-{slot}") for slot in workers.topology.slots]
    assert not front_end.failures
    front_end.close()
    return tokens
