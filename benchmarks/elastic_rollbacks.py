"""Operations that fail, each in a phase of its own, under load: how long do clients wait, and does the next one work?

Workers fail because a file tells them to (`tests/support/faulty_worker.py`): at a named call they are killed, stopped,
or answer with an error. Run by `python -m benchmarks.elastic rollbacks`.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.deployment import Deployment
from benchmarks.results import Section
from benchmarks.streams import Load, gap_summary, longest_gap_s, now, reference, requests, wrong
from tests.support.faulty_worker import FAULTS

ROOT = Path(__file__).resolve().parent.parent
FOLLOW_S = 60.0
UP: dict[str, Any] = {"workers": 3}
DOWN: dict[str, Any] = {"retire": [1]}


@dataclass(frozen=True, slots=True)
class Failure:
    """What is asked of two workers, and what goes wrong; it must end in `phase`."""

    title: str
    phase: str
    faults: str
    fields: dict[str, Any]


FAILURES = (
    Failure("joiner killed while it loads", "provisioning", "2:load:kill", UP),
    Failure("joiner stopped while it loads, deadline of 5 s", "provisioning", "2:load:stop", {**UP, "deadline_s": 5.0}),
    Failure("deadline of 1 s passes while it loads", "provisioning", "", {**UP, "deadline_s": 1.0}),
    Failure("joiner killed while the group is built", "connecting", "2:connect:kill", UP),
    Failure("joiner stopped while the group is built", "connecting", "2:connect:stop", UP),
    Failure("survivor cannot build the group", "connecting", "1:connect:error", UP),
    Failure("joiner killed while experts move", "transferring", "2:transfer:kill", UP),
    Failure("joiner stopped while experts move", "transferring", "2:transfer:stop", UP),
    Failure("survivor fails while experts move", "transferring", "0:transfer:bug", DOWN),
    Failure("leaver cannot hand over", "transferring", "1:hand_over:error", DOWN),
    Failure("leaver hangs while it hands over", "transferring", "1:hand_over:hang", DOWN),
)


def fail(server: Deployment, faults: Path, failure: Failure) -> dict[str, Any]:
    """Start the operation, let it fail, and return it once it is over."""
    faults.write_text(failure.faults)
    operation: dict[str, Any] = server.post("/scale", failure.fields)
    end = time.monotonic() + FOLLOW_S
    while operation["outcome"] is None and time.monotonic() < end:
        time.sleep(0.02)
        operation = server.get(f"/operations/{operation['operation_id']}")
    faults.write_text("")
    if operation["outcome"] != "rolled_back" or operation["phases"][-2]["name"] != failure.phase:
        raise RuntimeError(f"{failure.title}: not rolled back in {failure.phase}: {operation}")
    return operation


async def rollbacks(arguments: argparse.Namespace, directory: Path, section: Section) -> None:
    """Bar: each is rolled back, p95 of the longest client gap <= max(5 S, 250 ms), and the next operation works."""
    faults = directory / "faults"
    faults.touch()
    variables = {FAULTS: str(faults), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    module = "tests.support.faulty_worker"
    with Deployment("demo", [], directory / "server.log", module=module, variables=variables) as server:
        bodies = requests(arguments.streams, arguments.tokens)
        expected = await reference(server.url, bodies)
        load = Load(server.url, bodies)
        load.start()
        await asyncio.sleep(2.0)
        events: list[tuple[Failure, float, float]] = []
        for failure in itertools.islice(itertools.cycle(FAILURES), max(arguments.operations, 2 * len(FAILURES))):
            started = now()
            await asyncio.to_thread(fail, server, faults, failure)
            events.append((failure, started, now()))
            await asyncio.sleep(arguments.pause_s)
        outcomes = [(await asyncio.to_thread(server.scale, **fields))["outcome"] for fields in (UP, {"workers": 2})]
        streams = await load.stop()
    step_s = statistics.median(gap for stream in streams for _, gap in stream.gaps())
    longest = [longest_gap_s(streams, started, ended) for _, started, ended in events]
    report(section, events, longest)
    failed, changed = wrong(streams, expected)
    section.add(
        "",
        f"{len(events)} rollbacks, {len(streams)} streams: {failed} failed or refused, {changed} with changed tokens; "
        f"the next operations are {' and '.join(outcomes)}.",
        gap_summary("rollback", longest, step_s),
    )


def report(section: Section, events: Sequence[tuple[Failure, float, float]], longest: Sequence[float]) -> None:
    section.add("| what fails | in | times | longest client gap (ms) |", "|---|---|---|---|")
    for failure in FAILURES:
        gaps = [gap for gap, event in zip(longest, events, strict=True) if event[0] is failure]
        if gaps:
            section.add(f"| {failure.title} | {failure.phase} | {len(gaps)} | {max(gaps) * 1e3:.0f} |")
