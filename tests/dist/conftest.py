"""What tests share that build groups: their environment, and a front end for a module's `workers`."""

import os
from collections.abc import Iterator

import pytest

from tests.support.workers import FrontEnd, WorkerSet

# torch asks the name server for the names of addresses; a lost answer would cost 5 s a try.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def front_end(workers: WorkerSet) -> Iterator[FrontEnd]:
    front_end = FrontEnd(workers.topology, workers.client, 1)
    front_end.attach()
    yield front_end
    front_end.close()
