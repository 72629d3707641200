"""A minute of everything at once: what `python -m benchmarks.soak` does for ten."""

import asyncio
import gc
from pathlib import Path

import pytest

from benchmarks.deployment import Deployment
from benchmarks.soak import OPTIONS, Plan, soak

FAULTS = ("kill -9", "kill -9 of two at once", "SIGSTOP", "SIGSTOP, SIGCONT after 0.5 s")


# On a machine that is busy with other things, start and end take their time.
@pytest.mark.timeout(270)
def test_everything_at_once_loses_and_changes_nothing_and_leaves_nothing_behind(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with Deployment("demo", OPTIONS, log) as server:
        outcome = asyncio.run(soak(server, Plan(seconds=60.0, seed=4)))
    gc.collect()  # what a client left open is this test's fault, not that of one that runs later
    assert not outcome.troubles, "\n".join([*outcome.troubles, log.read_text()])
    assert server.process.returncode == 0
    assert sum(outcome.events[name] for name in FAULTS) >= 3, outcome.events
    assert outcome.answered("complete") > 50
    assert outcome.answered("busy") > 0
    assert outcome.answered("left") > 0
    assert outcome.answered("refused") > 0
