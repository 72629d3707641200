"""What changing size or placement costs: pauses of clients, seconds of operations, leaks after many cycles.

    python -m benchmarks.elastic operations     20 operations between 1 and 4 workers under 16 streams
    python -m benchmarks.elastic rebalance      24 exchanges of experts between 3 workers under 16 streams
    python -m benchmarks.elastic start          how fast a worker joins, from a warm spare and cold
    python -m benchmarks.elastic rollbacks      operations that fail in every phase
    python -m benchmarks.elastic cycles         50 cycles of up and down; memory, threads, descriptors, processes
    python -m benchmarks.elastic cost           what elasticity costs while nothing changes

All on the demo model, real processes, clients over HTTP. Every stream is compared token by token with a run without
any operation. Prints Markdown and writes it into its section of RESULTS.md.
"""

import argparse
import asyncio
import contextlib
import itertools
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import elastic_cost, elastic_rebalance, elastic_rollbacks
from benchmarks.deployment import Deployment, own_processes
from benchmarks.results import Section
from benchmarks.streams import Load, Stream, gap_summary, longest_gap_s, now, reference, requests, wrong

MAX_WORKERS = 4


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


async def operations(arguments: argparse.Namespace, directory: Path, section: Section) -> None:
    """Bar: p95 of the longest client gap per operation <= max(5 S, 250 ms), nothing failed, nothing changed."""
    options = ["--workers", "1", "--max-workers", str(MAX_WORKERS), "--spares", str(arguments.spares)]
    with Deployment("demo", options, directory / "server.log") as server:
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
    report_operations(section, rows, streams, expected)


def report_operations(
    section: Section,
    rows: Sequence[tuple[int, int, float, float, dict[str, Any]]],
    streams: Sequence[Stream],
    expected: Sequence[Sequence[int]],
) -> None:
    gaps = [gap for stream in streams for _, gap in stream.gaps()]
    step_s = statistics.median(gaps)
    longest = [longest_gap_s(streams, started, ended) for _, _, started, ended, _ in rows]
    failed, changed = wrong(streams, expected)
    section.add(
        "| from | to | seconds | moved experts | KV blocks | longest client gap (ms) |", "|---|---|---|---|---|---|"
    )
    for (old, new, started, ended, operation), gap in zip(rows, longest, strict=True):
        moved, blocks = operation.get("moved_experts"), operation.get("kv_blocks")
        section.add(f"| {old} | {new} | {ended - started:.2f} | {moved} | {blocks} | {gap * 1e3:.0f} |")
    section.add(
        "",
        f"{len(rows)} operations, {len(streams)} streams: {failed} failed or refused, {changed} with changed tokens.",
        gap_summary("operation", longest, step_s),
    )


async def start(arguments: argparse.Namespace, directory: Path, section: Section) -> None:
    """Bar: a warm spare is in within a second of the request. Cold is stated, with its phases."""
    for spares in (1, 0):
        options = ["--workers", "1", "--max-workers", "2", "--spares", str(spares)]
        with Deployment("demo", options, directory / "server.log") as server:
            await asyncio.sleep(arguments.settle_s)
            totals, by_phase = [], defaultdict(list)
            for _ in range(arguments.rounds):
                operation = await asyncio.to_thread(server.scale, workers=2)
                phases = {phase["name"]: phase["seconds"] or 0.0 for phase in operation["phases"]}
                # `switched` is reached when the phases before it are over.
                before = list(phases)[: list(phases).index("switched")]
                totals.append(sum(phases[name] for name in before))
                for name in before:
                    by_phase[name].append(phases[name])
                await asyncio.to_thread(server.scale, workers=1)
                await asyncio.sleep(arguments.settle_s)
            where = ", ".join(f"{name} {statistics.median(seconds):.3f} s" for name, seconds in by_phase.items())
            section.add(
                f"- {'warm spare' if spares else 'cold'}: median {statistics.median(totals):.2f} s of {len(totals)}, "
                f"maximum {max(totals):.2f} s; medians of the phases: {where}"
            )


def inventory(server: Deployment) -> dict[str, float]:
    """What could leak of moeray's own processes (supervisor, front end, controller, workers), and Ray's descriptors."""
    counts = {"processes": 0.0, "threads": 0.0, "descriptors": 0.0, "MiB": 0.0, "descriptors of Ray's daemons": 0.0}
    own = set(own_processes(server).values())
    for process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
            if process not in own:
                counts["descriptors of Ray's daemons"] += process.num_fds()
                continue
            counts["processes"] += 1
            counts["threads"] += process.num_threads()
            counts["descriptors"] += process.num_fds()
            counts["MiB"] += process.memory_info().rss / 2**20
    return counts


async def cycles(arguments: argparse.Namespace, directory: Path, section: Section) -> None:
    """Bar: memory +5 % at most, everything else back to the start."""
    options = ["--workers", "2", "--max-workers", "3", "--spares", "0"]
    with Deployment("demo", options, directory / "server.log") as server:
        bodies = requests(4, 64)
        expected = await reference(server.url, bodies)
        load = Load(server.url, bodies)
        load.start()
        for number in range(arguments.cycles + 1):
            if number:
                await asyncio.to_thread(server.scale, workers=3)
                await asyncio.to_thread(server.scale, workers=2)
            if number in (0, 1, 2, 5) or number % 10 == 0:
                await asyncio.sleep(arguments.settle_s)
                counts = inventory(server)
                if not number:
                    section.add("| after cycles | " + " | ".join(counts) + " |", "|---" * (len(counts) + 1) + "|")
                section.add(f"| {number} | " + " | ".join(f"{value:.0f}" for value in counts.values()) + " |")
        streams = await load.stop()
        failed, changed = wrong(streams, expected)
        section.add(
            "",
            f"{len(streams)} streams: {failed} failed, {changed} with changed tokens. Slots then: {server.slots()}.",
        )


WORK = {
    "operations": operations,
    "rebalance": elastic_rebalance.rebalance,
    "start": start,
    "rollbacks": elastic_rollbacks.rollbacks,
    "cycles": cycles,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*WORK, "cost"])
    parser.add_argument("--operations", type=int, default=20)
    parser.add_argument("--rebalances", type=int, default=24)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--pause-s", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settle-s", type=float, default=3.0)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--dry", action="store_true", help="print only, leave RESULTS.md as it is")
    arguments = parser.parse_args(argv)
    section = Section(f"elastic {arguments.what}")
    if arguments.what == "cost":
        elastic_cost.measure(arguments.pairs, section)
    else:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(WORK[arguments.what](arguments, Path(directory), section))
    if not arguments.dry:
        section.write()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
