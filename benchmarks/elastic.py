"""What changing the size costs: pauses of clients, seconds of operations, leaks after many cycles.

    python -m benchmarks.elastic operations     20 operations between 1 and 4 workers under 16 streams
    python -m benchmarks.elastic start          how fast a worker joins, from a warm spare and cold
    python -m benchmarks.elastic rollbacks      20 scales up that fail: the joiner killed, stopped, or too late
    python -m benchmarks.elastic cycles         50 cycles of up and down; memory, threads, descriptors, processes

All on the demo model, real processes, clients over HTTP. Every stream is compared token by token with a run without
any operation. Prints Markdown.
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import signal
import statistics
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.deployment import Deployment
from benchmarks.streams import Load, Stream, longest_gap_s, now, reference, requests, wrong

MAX_WORKERS = 4
JOINER_S = 30.0
OWN_PROCESSES = ("moeray.deploy", "ray::ControllerActor", "ray::WorkerActor")


def walk_over_all_pairs(count: int) -> list[int]:
    """Sizes to go to, one after the other, from 1: every ordered pair of sizes is met, then again from the start."""
    pairs = set(itertools.permutations(range(1, MAX_WORKERS + 1), 2))
    path, here = [], 1
    while pairs:
        following = max(
            (to for at, to in pairs if at == here), key=lambda to: sum(a == to for a, _ in pairs), default=0
        )
        if not following:
            following = next(iter(sorted(pairs)))[0]
        pairs.discard((here, following))
        path.append(following)
        here = following
    return list(itertools.islice(itertools.cycle(path), count))


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


async def operations(arguments: argparse.Namespace, log: Path) -> None:
    """Bar: p95 of the longest client gap per operation <= max(5 S, 250 ms), nothing failed, nothing changed."""
    options = ["--workers", "1", "--max-workers", str(MAX_WORKERS), "--spares", str(arguments.spares)]
    with Deployment("demo", options, log) as server:
        bodies = requests(arguments.streams, arguments.tokens)
        expected = await reference(server.url, bodies)
        load = Load(server.url, bodies)
        load.start()
        await asyncio.sleep(2.0)
        rows: list[tuple[int, int, float, float, dict[str, Any]]] = []
        here = 1
        for size in walk_over_all_pairs(arguments.operations):
            if size == here:
                continue
            started = now()
            operation = await asyncio.to_thread(server.scale, workers=size)
            rows.append((here, size, started, now(), operation))
            here = size
            await asyncio.sleep(arguments.pause_s)
        streams = await load.stop()
    report_operations(rows, streams, expected)


def report_operations(
    rows: Sequence[tuple[int, int, float, float, dict[str, Any]]],
    streams: Sequence[Stream],
    expected: Sequence[Sequence[int]],
) -> None:
    gaps = [gap for stream in streams for _, gap in stream.gaps()]
    step_s = statistics.median(gaps)
    longest = [longest_gap_s(streams, started, ended) for _, _, started, ended, _ in rows]
    failed, changed = wrong(streams, expected)
    print("| from | to | seconds | moved experts | KV blocks | longest client gap (ms) |")
    print("|---|---|---|---|---|---|")
    for (old, new, started, ended, operation), gap in zip(rows, longest, strict=True):
        moved, blocks = operation.get("moved_experts"), operation.get("kv_blocks")
        print(f"| {old} | {new} | {ended - started:.2f} | {moved} | {blocks} | {gap * 1e3:.0f} |")
    bar = max(5 * step_s, 0.25)
    print(
        f"\n{len(rows)} operations, {len(streams)} streams: {failed} failed, {changed} with changed tokens. "
        f"S (median time between two events) {step_s * 1e3:.1f} ms; longest gap per operation: median "
        f"{statistics.median(longest) * 1e3:.0f} ms, p95 {percentile(longest, 0.95) * 1e3:.0f} ms, "
        f"maximum {max(longest) * 1e3:.0f} ms; bar {bar * 1e3:.0f} ms."
    )


async def start(arguments: argparse.Namespace, log: Path) -> None:
    """Bar: a warm spare is in within a second of the request. Cold is stated, with its phases."""
    for spares in (1, 0):
        options = ["--workers", "1", "--max-workers", "2", "--spares", str(spares)]
        with Deployment("demo", options, log) as server:
            await asyncio.sleep(arguments.settle_s)
            seconds = []
            for _ in range(arguments.rounds):
                operation = await asyncio.to_thread(server.scale, workers=2)
                phases = {phase["name"]: round(phase["seconds"] or 0.0, 3) for phase in operation["phases"]}
                # `switched` is reached when the phases before it are over.
                until = list(phases).index("switched") if "switched" in phases else len(phases)
                seconds.append(sum(list(phases.values())[:until]))
                print(f"- {'warm spare' if spares else 'cold'}: {seconds[-1]:.2f} s to the switch; phases {phases}")
                await asyncio.to_thread(server.scale, workers=1)
                await asyncio.sleep(arguments.settle_s)
            print(f"- {'warm spare' if spares else 'cold'}: median {statistics.median(seconds):.2f} s\n")


def worker_processes(server: Deployment) -> dict[int, psutil.Process]:
    """The workers' processes by pid. A process may have been an idle one of Ray's before."""
    found = {}
    for process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ray::WorkerActor" in " ".join(process.cmdline()):
                found[process.pid] = process
    return found


def joiner_of(server: Deployment, known: Collection[int]) -> psutil.Process:
    """The process of a worker that was not there before; waits for it."""
    end = time.monotonic() + JOINER_S
    while time.monotonic() < end:
        for pid, process in worker_processes(server).items():
            if pid not in known:
                return process
        time.sleep(0.02)
    raise RuntimeError(f"no joiner within {JOINER_S} s")


def fail_one(server: Deployment, how: str) -> dict[str, Any]:
    """Start a scale up, spoil it, and wait for its end."""
    known = worker_processes(server)
    operation: dict[str, Any] = server.post("/scale", {"workers": 3, "deadline_s": 1.0 if how == "late" else 5.0})
    if how != "late":
        joiner = joiner_of(server, known)
        joiner.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    end = time.monotonic() + JOINER_S
    while operation["outcome"] is None and time.monotonic() < end:
        time.sleep(0.02)
        operation = server.get(f"/operations/{operation['operation_id']}")
    return operation


async def rollbacks(arguments: argparse.Namespace, log: Path) -> None:
    """Bar: each is rolled back, p95 of the longest client gap <= max(5 S, 250 ms), and the next scale works."""
    with Deployment("demo", ["--workers", "2", "--max-workers", "4"], log) as server:
        bodies = requests(arguments.streams, arguments.tokens)
        expected = await reference(server.url, bodies)
        load = Load(server.url, bodies)
        load.start()
        await asyncio.sleep(2.0)
        events: list[tuple[str, float, float, str]] = []
        for how in itertools.islice(itertools.cycle(["killed", "stopped", "late"]), arguments.operations):
            started = now()
            operation = await asyncio.to_thread(fail_one, server, how)
            if operation["outcome"] != "rolled_back":
                raise RuntimeError(f"a {how} joiner's operation is {operation['outcome']}: {operation}")
            events.append((how, started, now(), operation["phases"][-2]["name"]))
        following = await asyncio.to_thread(server.scale, workers=3)
        streams = await load.stop()
    longest = [longest_gap_s(streams, started, ended) for _, started, ended, _ in events]
    step_s = statistics.median(gap for stream in streams for _, gap in stream.gaps())
    for how in ("killed", "stopped", "late"):
        gaps = [gap for gap, event in zip(longest, events, strict=True) if event[0] == how]
        phases = sorted({event[3] for event in events if event[0] == how})
        print(f"- {how} in {', '.join(phases)}: {len(gaps)} events, longest gap up to {max(gaps) * 1e3:.0f} ms")
    failed, changed = wrong(streams, expected)
    print(
        f"\n{len(events)} rollbacks, {len(streams)} streams: {failed} failed, {changed} with changed tokens; the next "
        f"scale is {following['outcome']}. S {step_s * 1e3:.1f} ms, p95 {percentile(longest, 0.95) * 1e3:.0f} ms, "
        f"maximum {max(longest) * 1e3:.0f} ms; bar {max(5 * step_s, 0.25) * 1e3:.0f} ms."
    )


def inventory(server: Deployment) -> dict[str, float]:
    """What could leak of moeray's own processes (supervisor, front end, controller, workers), and Ray's descriptors."""
    counts = {"processes": 0.0, "threads": 0.0, "descriptors": 0.0, "MiB": 0.0, "descriptors of Ray's daemons": 0.0}
    for process in server.processes():
        try:
            name = " ".join(process.cmdline())
            if not any(own in name for own in OWN_PROCESSES):
                counts["descriptors of Ray's daemons"] += process.num_fds()
                continue
            with process.oneshot():
                counts["processes"] += 1
                counts["threads"] += process.num_threads()
                counts["descriptors"] += process.num_fds()
                counts["MiB"] += process.memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            continue
    return counts


async def cycles(arguments: argparse.Namespace, log: Path) -> None:
    """Bar: memory +5 % at most, everything else back to the start."""
    options = ["--workers", "2", "--max-workers", "3", "--spares", "0"]
    with Deployment("demo", options, log) as server:
        bodies = requests(4, 64)
        expected = await reference(server.url, bodies)
        load = Load(server.url, bodies)
        load.start()
        snapshots = []
        for number in range(arguments.cycles + 1):
            if number:
                await asyncio.to_thread(server.scale, workers=3)
                await asyncio.to_thread(server.scale, workers=2)
            if number in (0, 1, 2, 5) or number % 10 == 0:
                await asyncio.sleep(arguments.settle_s)
                snapshots.append((number, inventory(server)))
                print(f"- after {number} cycles: " + ", ".join(f"{v:.0f} {k}" for k, v in snapshots[-1][1].items()))
        failed, changed = wrong(await load.stop(), expected)
        print(f"\n{failed} streams failed, {changed} said something else. Slots now: {server.slots()}.")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["operations", "start", "rollbacks", "cycles"])
    parser.add_argument("--operations", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--pause-s", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settle-s", type=float, default=3.0)
    parser.add_argument("--cycles", type=int, default=50)
    arguments = parser.parse_args(argv)
    work = {"operations": operations, "start": start, "rollbacks": rollbacks, "cycles": cycles}[arguments.what]
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(work(arguments, Path(directory) / "server.log"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
