"""Experts exchanged between workers by load, under load: how long do clients wait, and does any stream change?

Before each rebalance a worker joins and another leaves, which places experts by their number and not by their load, so
that there is something to move. Run by `python -m benchmarks.elastic rebalance`.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.deployment import Deployment
from benchmarks.results import Section
from benchmarks.streams import Load, gap_summary, longest_gap_s, now, reference, requests, wrong

WORKERS = 3
SPARE_S = 60.0


async def rebalance(arguments: argparse.Namespace, directory: Path, section: Section) -> None:
    """Bar: p95 of the longest client gap per rebalance <= max(5 S, 250 ms), nothing failed, nothing changed."""
    options = ["--workers", str(WORKERS), "--max-workers", str(WORKERS + 2), "--spares", "1"]
    with Deployment("demo", options, directory / "server.log") as server:
        bodies = requests(arguments.streams, arguments.tokens)
        expected = await reference(server.url, bodies)
        load = Load(server.url, bodies)
        load.start()
        rows: list[tuple[float, float, dict[str, Any]]] = []
        for _ in range(arguments.rebalances):
            await asyncio.to_thread(unbalance, server)
            await asyncio.sleep(arguments.pause_s)
            started = now()
            operation = await asyncio.to_thread(server.rebalance)
            rows.append((started, now(), operation))
            await asyncio.sleep(arguments.pause_s)
        streams = await load.stop()
    step_s = statistics.median(gap for stream in streams for _, gap in stream.gaps())
    longest = [longest_gap_s(streams, started, ended) for started, ended, _ in rows]
    failed, changed = wrong(streams, expected)
    section.add("| rebalance | seconds | moved experts | longest client gap (ms) |", "|---|---|---|---|")
    for number, ((started, ended, operation), gap) in enumerate(zip(rows, longest, strict=True), 1):
        section.add(f"| {number} | {ended - started:.2f} | {operation['moved_experts']} | {gap * 1e3:.0f} |")
    num_idle = sum(operation["from_epoch"] == operation["to_epoch"] for _, _, operation in rows)
    section.add(
        "",
        f"{len(rows)} rebalances, {num_idle} of them with nothing to move, {len(streams)} streams: {failed} failed or "
        f"refused, {changed} with changed tokens.",
        gap_summary("rebalance", longest, step_s),
    )


def unbalance(server: Deployment) -> None:
    """A spare joins, the lowest slot leaves, and the next spare is there. Raises `RuntimeError` if it does not come."""
    wait_for_spare(server)
    server.scale(workers=WORKERS + 1)
    server.scale(retire=[min(server.slots())])
    wait_for_spare(server)


def wait_for_spare(server: Deployment) -> None:
    """What starts beside the service must not be measured with it."""
    end = time.monotonic() + SPARE_S
    while not any(member["state"] == "spare" for member in server.get("/topology")["members"]):
        if time.monotonic() > end:
            raise RuntimeError(f"no spare within {SPARE_S:g} s")
        time.sleep(0.1)
