"""Whole workers in one process, without Ray: real model, groups, engines and sockets, and a front end to drive them."""

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from moeray.comm.placement import ExpertPlacement
from moeray.comm.sockets import KeyPair, new_key_pair
from moeray.comm.topology import Member, Topology
from moeray.worker.config import WorkerConfig
from moeray.worker.messages import (
    Abort,
    Attach,
    Attached,
    EngineFailed,
    FromWorker,
    Rejected,
    SamplingParams,
    StepOutput,
    Submit,
    TokenOutput,
    WorkerStats,
)
from moeray.worker.models.registry import read_decoder_config
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
    """`size` serving workers. Use as a context manager."""

    def __init__(self, path: Path, size: int, **overrides: object) -> None:
        config = read_decoder_config(path)
        num_seats = -(-config.num_experts // size)
        self.client = new_key_pair()
        settings: dict[str, object] = {
            "model_path": str(path),
            "num_seats": num_seats,
            "max_workers": size,
            "kv_cache_bytes": 16 << 20,
            "group_timeout_s": 20.0,
            **overrides,
        }
        worker_config = WorkerConfig(**settings)  # type: ignore[arg-type]
        placement = ExpertPlacement.contiguous(
            num_layers=config.num_moe_layers, num_experts=config.num_experts, slots=range(size), num_seats=num_seats
        )
        self.workers = [
            Worker(slot=slot, incarnation=0, config=worker_config, client=self.client, bind_host="127.0.0.1")
            for slot in range(size)
        ]
        ready = [worker.load(placement) for worker in self.workers]
        members = tuple(
            Member(slot=r.slot, incarnation=0, node=r.node, endpoint=r.endpoint, public_key=r.public_key) for r in ready
        )
        self.topology = Topology(epoch=0, members=members, placement=placement)
        store = self.workers[0].host_store(0)
        on_every_rank(size, lambda rank: self.workers[rank].join(self.topology, store))
        for worker in self.workers:
            worker.serve()

    def __enter__(self) -> "WorkerSet":
        return self

    def __exit__(self, *_: object) -> None:
        on_every_rank(len(self.workers), lambda rank: self.workers[rank].stop(20.0))


class FrontEnd:
    """A synchronous front end with a lease: submits, and collects what comes back."""

    def __init__(self, topology: Topology, client: KeyPair, lease: int) -> None:
        self.lease = lease
        self.tokens: dict[str, list[TokenOutput]] = defaultdict(list)
        self.rejected: list[Rejected] = []
        self.failures: list[EngineFailed] = []
        self.stats: dict[int, WorkerStats] = {}
        self.attached: set[int] = set()
        self._context = zmq.Context()
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._links = []
        for member in topology.members:
            socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.curve_serverkey = member.public_key.encode()
            socket.curve_publickey = client.public.encode()
            socket.curve_secretkey = client.secret.encode()
            socket.routing_id = f"front-end-{lease}".encode()
            socket.connect(member.endpoint)
            self._links.append(socket)

    def attach(self) -> None:
        for slot in range(len(self._links)):
            self.send(slot, Attach(self.lease))
        wait_until(lambda: self.pump() and len(self.attached) == len(self._links), "all workers attached")

    def send(self, slot: int, message: object) -> None:
        self._links[slot].send(msgspec.msgpack.encode(message))

    def submit(
        self, slot: int, seq_id: str, prompt: list[int], sampling: SamplingParams, output: list[int] | None = None
    ) -> None:
        self.send(
            slot,
            Submit(
                lease=self.lease,
                seq_id=seq_id,
                attempt=0,
                index=0,
                prompt_ids=prompt,
                output_ids=output or [],
                sampling=sampling,
            ),
        )

    def abort(self, slot: int, *seq_ids: str) -> None:
        self.send(slot, Abort(self.lease, list(seq_ids)))

    def pump(self) -> bool:
        """Take everything that has arrived; always true, to be used in conditions."""
        for socket in self._links:
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

    def is_done(self, seq_id: str) -> bool:
        self.pump()
        return bool(self.tokens[seq_id]) and self.tokens[seq_id][-1].finish_reason is not None

    def token_ids(self, seq_id: str) -> list[int]:
        assert [token.position for token in self.tokens[seq_id]] == list(range(len(self.tokens[seq_id])))
        return [token.token_id for token in self.tokens[seq_id]]

    def close(self) -> None:
        self._context.destroy(linger=0)
