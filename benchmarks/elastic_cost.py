"""What elasticity costs while nothing changes: a deployment against a static group, in turn.

    python -m benchmarks.elastic cost --pairs 30

A is a real deployment's workers: Ray actors under a controller that watches them, ready to scale, each with a lease
and its ledger of steps. B are the same workers as plain processes that were put into a group by hand: no Ray, no
controller. Both serve the demo model; the same client decodes the same sequences on one, then on the other. What of a
step goes into looking for changes is measured beside it, by calling just that many times.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.results import Section
from moeray.comm.placement import ExpertPlacement
from moeray.comm.sockets import KeyPair, new_key_pair
from moeray.comm.topology import Member, Topology
from moeray.deploy.environment import worker_variables
from moeray.deploy.launch import RayWorkerFactory, create_controller
from moeray.deploy.local import LocalRay
from moeray.elastic.controller_config import ControllerConfig
from moeray.elastic.view import ClusterView
from moeray.worker.config import WorkerConfig
from moeray.worker.messages import SamplingParams
from moeray.worker.models.registry import read_model_config
from tests.support.workers import FrontEnd, WorkerSet, member_of, wait_until

MODEL = Path(__file__).parent.parent / "deploy" / "demo" / "model"
SIZE = 2
PER_WORKER = 8
DEADLINE_S = 120.0


def worker_config() -> WorkerConfig:
    experts = read_model_config(MODEL).num_experts
    return WorkerConfig(model_path=str(MODEL), num_seats=experts, max_workers=4, kv_cache_bytes=256 << 20)


def serve_static(slot: int, client: KeyPair, placement: ExpertPlacement, parent: Connection) -> None:
    """The life of one plain worker process, led by the parent through a pipe."""
    from moeray.worker.worker import Worker

    worker = Worker(slot=slot, incarnation=0, config=worker_config(), client=client, bind_host="127.0.0.1")
    parent.send(worker.load(placement))
    if slot == 0:
        parent.send(worker.host_store(0))
    topology, store = parent.recv()
    worker.join(topology, store)
    worker.serve()
    parent.send("serving")
    parent.recv()
    worker.stop(10.0)


class StaticGroup:
    """`SIZE` plain processes in one group."""

    def __init__(self) -> None:
        config = read_model_config(MODEL)
        placement = ExpertPlacement.contiguous(
            num_layers=config.num_moe_layers,
            num_experts=config.num_experts,
            slots=range(SIZE),
            num_seats=config.num_experts,
        )
        self.client = new_key_pair()
        spawn = multiprocessing.get_context("spawn")
        self._pipes = []
        self._processes = []
        for slot in range(SIZE):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve_static, args=(slot, self.client, placement, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        members = tuple(member_of(pipe.recv()) for pipe in self._pipes)
        self.topology = Topology(epoch=0, members=members, placement=placement)
        store = self._pipes[0].recv()
        for pipe in self._pipes:
            pipe.send((self.topology, store))
        for pipe in self._pipes:
            pipe.recv()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send("stop")
        for process in self._processes:
            process.join(20.0)


def start_deployment(directory: Path) -> tuple[Topology, KeyPair, int]:
    """A controller and its workers on an embedded Ray; returns what a client needs, with the lease."""
    import ray

    LocalRay.start(directory, namespace="moeray-idle")
    config, worker = read_model_config(MODEL), worker_config()
    factory = RayWorkerFactory(
        config=worker,
        num_cpus=0.0,
        num_gpus=0.0,
        bind_host="127.0.0.1",
        variables=worker_variables(threads=1, embedded=True),
    )
    controller = create_controller(
        ControllerConfig(
            deployment="idle",
            num_workers=SIZE,
            num_layers=config.num_moe_layers,
            num_experts=config.num_experts,
            num_seats=worker.num_seats,
            max_workers=worker.max_workers,
            orphan_timeout_s=3600.0,
        ),
        factory,
    )
    ray.get(controller.start.remote(), timeout=DEADLINE_S)
    view: ClusterView = ray.get(controller.view.remote(-1, 1.0), timeout=DEADLINE_S)
    end = time.monotonic() + DEADLINE_S
    while view.state != "serving":
        if time.monotonic() > end or view.state == "failed":
            raise RuntimeError(f"the deployment is {view.state}: {view.cause}")
        view = ray.get(controller.view.remote(view.version, 5.0), timeout=DEADLINE_S)
    attachment = ray.get(controller.attach.remote(), timeout=DEADLINE_S)
    placement = ExpertPlacement(
        num_experts=config.num_experts,
        num_seats=worker.num_seats,
        slots=tuple(member.slot for member in view.members),
        assignments=view.placement,
    )
    members = tuple(
        Member(
            slot=member.slot,
            incarnation=member.incarnation,
            node=member.node or "",
            endpoint=member.endpoint or "",
            public_key=member.public_key or "",
        )
        for member in view.members
    )
    keys = KeyPair(public=attachment.public_key, secret=attachment.secret_key)
    return Topology(epoch=view.epoch, members=members, placement=placement), keys, attachment.lease


def decode_rate(front_end: FrontEnd, run: str, num_tokens: int) -> float:
    """Tokens per second of a full batch, from the first token of all sequences to the last of any."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    names = [f"{run}-{slot}-{number}" for slot in range(SIZE) for number in range(PER_WORKER)]
    for name in names:
        slot, number = map(int, name.rsplit("-", 2)[1:])
        front_end.submit(slot, name, [number + 5, 17, 23, 42], sampling)
    wait_until(lambda: front_end.pump() and all(front_end.tokens[name] for name in names), "first tokens", DEADLINE_S)
    already = sum(len(front_end.tokens[name]) for name in names)
    started = time.perf_counter()
    wait_until(lambda: all(front_end.is_done(name) for name in names), "the last token", DEADLINE_S)
    rate = (len(names) * num_tokens - already) / (time.perf_counter() - started)
    for name in names:
        del front_end.tokens[name]
    return rate


def share_of_a_step() -> tuple[float, float]:
    """Seconds of a step that go into looking for changes, and of the step itself, batch 8 on one worker."""
    with WorkerSet(MODEL, 1) as workers:
        engine = workers.workers[0].engine
        assert engine is not None
        front_end = FrontEnd(workers.topology, workers.client, 1)
        front_end.attach()
        for number in range(PER_WORKER):
            front_end.submit(
                0, str(number), [number + 5], SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
            )
        wait_until(lambda: all(front_end.is_done(str(number)) for number in range(PER_WORKER)), "the batch", DEADLINE_S)
        counters = engine.parts.reporter.counters
        step_s = counters.step_s / counters.steps
        front_end.close()
    rounds = 20_000
    started = time.perf_counter()
    for _ in range(rounds):
        engine._work_beside()
        engine._may_go_on()
        engine._header[4] = engine._change.ready_epoch
    return (time.perf_counter() - started) / rounds, step_s


def measure(num_pairs: int, section: Section, num_tokens: int = 250) -> None:
    """Bar: median ratio >= 0.99 over at least 30 pairs, looking for changes at most 1 % of a step."""
    os.environ.update({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})
    looking_s, step_s = share_of_a_step()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mr-")))
        static = StaticGroup()
        stack.callback(static.close)
        topology, keys, lease = start_deployment(directory)
        sides = {
            "deployment": FrontEnd(topology, keys, lease),
            "static": FrontEnd(static.topology, static.client, 1),
        }
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for front_end in sides.values():
            stack.callback(front_end.close)
            front_end.attach()
            decode_rate(front_end, "warm", 50)
        for number in range(num_pairs):
            # Who goes first changes, so that a drift of the machine falls on both.
            for name in sorted(sides, reverse=bool(number % 2)):
                rates[name].append(decode_rate(sides[name], str(number), num_tokens))
    ratios = [a / b for a, b in zip(rates["deployment"], rates["static"], strict=True)]
    low, median, high = statistics.quantiles(ratios)
    fast, slow = (statistics.median(rates[name]) for name in sides)
    section.add(
        f"{len(ratios)} pairs, {SIZE} workers, {SIZE * PER_WORKER} sequences of {num_tokens} tokens. Deployment to "
        f"static group: median {median:.3f} (quartiles {low:.3f} to {high:.3f}; bar 0.99), {fast:.0f} and {slow:.0f} "
        f"tokens/s. Looking for changes takes {looking_s * 1e6:.1f} us of a step of {step_s * 1e3:.1f} ms: "
        f"{looking_s / step_s:.2%} (bar 1 %)."
    )
