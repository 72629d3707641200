"""What tests share: one local Ray cluster for the whole session, as `moeray serve` makes it, if a test asks for it."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeray.deploy.environment import RAY_EMBEDDED
from moeray.deploy.local import LocalRay

# Ray reads these when it is imported, which a test module may do before the fixture starts the cluster.
os.environ.update(RAY_EMBEDDED)

NAMESPACE = "moeray-tests"
STARTED_IN_TIME_S = 10.0


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[LocalRay]:
    """A connected local cluster. At the end, no actor and no process may be left.

    Tests end the actors that they made, and name them uniquely.
    """
    directory = Path(tempfile.mkdtemp(prefix="moeray-t-"))
    cluster = LocalRay.start(directory, namespace=NAMESPACE)
    try:
        yield cluster
        left = _named_actors_after(STARTED_IN_TIME_S)
    finally:
        killed = cluster.stop()
        shutil.rmtree(directory, ignore_errors=True)
    assert not left, f"tests left actors behind: {left}"
    assert not killed, f"processes did not end with the cluster: {killed}"


def _named_actors_after(timeout_s: float) -> list[str]:
    """Named actors that still exist after a while: a killed actor takes a moment to go."""
    from ray.util import list_named_actors

    deadline = time.monotonic() + timeout_s
    while (left := list_named_actors(all_namespaces=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"{actor['namespace']}/{actor['name']}" for actor in left]
