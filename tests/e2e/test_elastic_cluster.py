"""Two deployments in one cluster: limits of its resources, cycles that leave nothing, an end that nobody notices."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from tests.support.cluster import Cluster, started
from tests.support.elastic import Elastic, Streams, assert_no_more_than, holdings
from tests.support.serving import Serve, client, poll

NAME = f"me{os.getpid()}"
NUM_CPUS = 3
CYCLES = 5
GROWTH = 1.05
BACK_S = 10.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(NAME, tmp_path_factory.mktemp("token") / "token", num_cpus=NUM_CPUS) as cluster:
        yield cluster


def called(process: psutil.Process) -> str:
    """How Ray calls an actor's process, without what it does now; empty if it is about to end."""
    try:
        return " ".join(process.cmdline()).split(".")[0]
    except psutil.NoSuchProcess:
        return ""


class Deployed(Elastic):
    """One of the deployments, and its processes."""

    def __init__(self, serve: Serve, http_stack: ExitStack) -> None:
        self.serve = serve
        super().__init__(serve.url(), http_stack.enter_context(client(serve.url())))

    def actors(self) -> list[psutil.Process]:
        """Processes of actors on the node of its workers, of all deployments."""
        raylet = psutil.Process(next(iter(self.pids().values()))).parent()
        assert raylet is not None
        return [process for process in raylet.children() if "Actor" in called(process)]

    def long_lived(self) -> list[int]:
        """Supervisor, front end, controllers and the workers that serve now."""
        controllers = [process.pid for process in self.actors() if "Controller" in called(process)]
        return [*(process.pid for process in self.serve.processes()), *controllers, *self.pids().values()]


@pytest.fixture(scope="module")
def deployments(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployed, Deployed]]:
    """One of 2 workers of a whole CPU each, of which there are 3; and one of a single worker that takes none."""
    directory = tmp_path_factory.mktemp("serve")
    common = ("--kv-cache-gib", "0.02", "--max-workers", "4", "--drain-timeout-s", "5")
    with ExitStack() as stack:
        first = ("--deployment", "first", "--workers", "2", "--min-workers", "2", "--cpus-per-worker", "1")
        second = ("--deployment", "second", "--workers", "1", "--cpus-per-worker", "0")
        serves = [stack.enter_context(cluster.serve(directory, *options, *common)) for options in (first, second)]
        yield Deployed(serves[0], stack), Deployed(serves[1], stack)


@pytest.fixture(scope="module")
def streams(deployments: tuple[Deployed, Deployed]) -> tuple[Streams, Streams]:
    first, second = deployments
    return Streams(first.url, count=4, max_tokens=100), Streams(second.url, count=2, max_tokens=100)


def refusal(elastic: Elastic, workers: int) -> str:
    """Why the deployment cannot become so large."""
    answer = elastic.http.post("/scale", json={"workers": workers})
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    return message


def test_a_size_below_the_minimum_or_beyond_the_resources_is_refused(deployments: tuple[Deployed, Deployed]) -> None:
    first, _ = deployments
    before, history = first.topology(), first.operations()
    assert "from 2 to 4" in refusal(first, 1)
    assert "from 2 to 4" in refusal(first, 5)
    assert "2 more workers of 1 CPU each need 2 CPU, the cluster has 1 of 3 CPUs free" in refusal(first, 4)
    assert (first.topology(), first.operations()) == (before, history)


def test_cycles_of_growing_and_shrinking_leave_nothing(
    deployments: tuple[Deployed, Deployed], streams: tuple[Streams, Streams]
) -> None:
    """Memory, descriptors and threads of the processes that stay; actors; the CPUs that Ray counts as free."""
    first, _ = deployments
    with streams[0].running():
        for number in range(CYCLES + 1):
            first.scale(workers=3)
            first.scale(workers=2)
            if number == 0:
                survivors = first.long_lived()
                before, there, room = holdings(survivors), len(first.actors()), refusal(first, 4)
                memory = {pid: psutil.Process(pid).memory_info().rss for pid in survivors}
    assert first.long_lived() == survivors
    grown = {pid: (rss, psutil.Process(pid).memory_info().rss) for pid, rss in memory.items()}
    assert all(now <= GROWTH * rss for rss, now in grown.values()), grown
    poll(f"there are {there} actors again", lambda: len(first.actors()) == there, BACK_S)
    assert refusal(first, 4) == room
    # The front end's pool for tokenising grows when several requests come at once.
    assert_no_more_than(before, BACK_S, more_threads=2)


def test_a_deployment_that_grows_and_ends_is_not_noticed_by_the_other(
    deployments: tuple[Deployed, Deployed], streams: tuple[Streams, Streams]
) -> None:
    first, second = deployments
    before = first.topology()
    with streams[0].running():
        with streams[1].running():
            second.scale(workers=2)
            pids = list(second.pids().values())
        second.serve.signal(signal.SIGINT)
        assert second.serve.ended() == 0, second.serve.output
        poll("its workers are gone", lambda: not any(map(psutil.pid_exists, pids)), BACK_S)
        assert first.topology()["epoch"] == before["epoch"]
    assert len(first.actors()) == 1 + len(before["members"])
