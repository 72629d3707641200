"""Several workers die at the same moment: all but one, and all of them."""

import argparse
import asyncio
import os
import random
import signal
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.deployment import Deployment
from benchmarks.fault_watch import serving, three, until
from benchmarks.results import Section
from benchmarks.streams import Load, Stream, longest_gap_s, now, reference, requests, wrong

AFTERMATH_S = 0.1
HEALTH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Workers that were killed at once. `unhealthy_s` is how long /health said nothing of it, if anybody was left."""

    at: float
    serving_s: float
    unhealthy_s: float | None


def health(server: Deployment) -> int:
    """The status of /health."""
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=HEALTH_TIMEOUT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def lose(server: Deployment, slots: Sequence[int], size: int) -> Loss:
    """Kill them all, and return once as many serve as before."""
    members, epoch = serving(server), server.get("/topology")["epoch"]
    at, unhealthy_s = now(), None
    for slot in slots:
        os.kill(members[slot]["pid"], signal.SIGKILL)
    if len(slots) == size:
        await until(lambda: health(server) == 503, "/health says that nobody serves")
        unhealthy_s = now() - at
        await until(lambda: health(server) == 200, "/health says that somebody serves")
    else:
        await until(lambda: server.get("/topology")["epoch"] > epoch, "the one that is left serves")
    serving_s = now() - at
    await until(lambda: len(serving(server)) == size, "all are replaced")
    return Loss(at=at, serving_s=serving_s, unhealthy_s=unhealthy_s)


async def losses(
    arguments: argparse.Namespace, directory: Path, size: int, num_lost: int
) -> tuple[list[Loss], list[Stream], tuple[int, int]]:
    """So many times, other slots each time, under streams."""
    rng = random.Random(size)
    with Deployment("demo", ["--workers", str(size)], directory / f"server-{size}-{num_lost}.log") as server:
        bodies = requests(arguments.streams, arguments.tokens)
        expected = await reference(server.url, bodies)
        load = Load(server.url, bodies)
        load.start()
        await asyncio.sleep(1.0)
        events = []
        for _ in range(arguments.count):
            events.append(await lose(server, rng.sample(sorted(serving(server)), num_lost), size))
            await asyncio.sleep(arguments.pause_s)
        streams = await load.stop()
    return events, streams, wrong(streams, expected)


async def at_once(arguments: argparse.Namespace, directory: Path, section: Section) -> None:
    """Bars: nothing lost or changed; without any worker /health says so within a second, and the streams go on."""
    cases = [*((size, size - 1) for size in arguments.sizes if size > 2), (2, 2)]
    for size, num_lost in cases:
        events, streams, (failed, changed) = await losses(arguments, directory, size, num_lost)
        gaps = [longest_gap_s(streams, event.at, event.at + AFTERMATH_S) for event in events]
        unhealthy = [event.unhealthy_s for event in events if event.unhealthy_s is not None]
        text = (
            f"{num_lost} of {size} workers, {len(events)} times, {len(streams)} streams: {failed} failed, {changed} "
            f"with changed tokens. Median / p95 / max, ms: somebody serves after "
            f"{three([event.serving_s for event in events])}, longest gap of a stream {three(gaps)}"
        )
        if unhealthy:
            text += f", /health says 503 after {three(unhealthy)} (bar 1000)"
        section.add(text + ".", "")
