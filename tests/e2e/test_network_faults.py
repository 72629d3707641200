"""Two hosts whose link is slow or cut while clients stream: slow is not dead, what is cut off does not come back."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.streams import Stream, now
from tests.support.cluster import Cluster, moeray
from tests.support.elastic import Elastic, Streams
from tests.support.hosts import LINK, Hosts, NoHostsError, two_hosts
from tests.support.serving import Serve, client, poll

logger = logging.getLogger(__name__)

PORT = 6379
ADMIN_KEY = "k"
DELAY_S = 0.05
SLOW_S = 10.0
SHORT_CUT_S = 0.5
# Over when the group is being made again: what was given up can be reached once more.
MIDDLE_CUT_S = 2.0
LONGEST_PAUSE_S = 20.0
GONE_S = 30.0
WHOLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """One worker on each host; the controller and the front end are on the first."""

    hosts: Hosts
    cluster: Cluster
    name: str
    serve: Serve
    server: Elastic
    streams: Streams

    def join(self) -> None:
        """The second host becomes a node of the cluster."""
        join(self.hosts, self.cluster, self.name)

    def faults(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self.server.http.get("/faults").json()["faults"]
        return answer

    def remote_slot(self) -> int:
        """The slot of the worker on the second host."""
        (slot,) = (slot for slot, pid in self.server.pids().items() if self.hosts.second.has(pid))
        return slot

    def whole(self) -> None:
        """Wait until there is one worker on each host, and nothing goes on."""
        poll("a worker on each host", self._is_whole, WHOLE_S)
        self.remote_slot()

    def _is_whole(self) -> bool:
        return len(self.server.slots) == 2 and all(o["outcome"] for o in self.server.operations())

    def answers(self) -> bool:
        answer = self.server.http.post("/generate", json={"prompt": "It", "max_tokens": 8, "ignore_eos": True})
        return len(answer.json()["token_ids"]) == 8


def join(hosts: Hosts, cluster: Cluster, name: str) -> None:
    node = ("--node-ip", hosts.second.address, "--num-cpus", "1", "--num-gpus", "0", "--name", name)
    done = hosts.second.moeray("cluster", "start", "--join", cluster.address, *node, "--token-file", f"{cluster.token}")
    assert done.returncode == 0, done.stderr


def pauses(streams: Sequence[Stream], start: float, end: float) -> list[float]:
    """The longest pause of each stream that overlaps [start, end], the longest first."""
    found = []
    for stream in streams:
        waits = [wait for at, wait in stream.waits() if at < end and at + wait > start]
        found.append(max(waits, default=0.0))
    return sorted(found, reverse=True)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("hosts")
    try:
        with two_hosts() as hosts:
            yield from deployed(hosts, directory)
    except NoHostsError as error:
        pytest.skip(f"no network namespaces here: {error}")


def deployed(hosts: Hosts, directory: Path) -> Iterator[Deployment]:
    name = hosts.first.namespace
    cluster = Cluster(f"{hosts.first.address}:{PORT}", directory / "token")
    node = ("--node-ip", hosts.first.address, "--num-cpus", "1", "--num-gpus", "0", "--name", name)
    try:
        head = hosts.first.moeray("cluster", "start", "--head", *node, "--token-file", f"{cluster.token}")
        assert head.returncode == 0, head.stderr
        join(hosts, cluster, name)
        size = ("--workers", "2", "--max-workers", "3", "--cpus-per-worker", "1", "--kv-cache-gib", "0.05")
        access = ("--ray-address", cluster.address, "--admin-key", ADMIN_KEY)
        variables = cluster.variables() | {"GLOO_SOCKET_IFNAME": LINK}
        serve = hosts.serve(directory, *size, *access, variables=variables)
        with serve, client(serve.url(), headers={"authorization": f"Bearer {ADMIN_KEY}"}) as http:
            streams = Streams(serve.url(), count=6, max_tokens=100)
            yield Deployment(hosts, cluster, name, serve, Elastic(serve.url(), http), streams)
    finally:
        hosts.heal()
        hosts.delay(0.0)
        ended = moeray("cluster", "stop", "--name", name)
    assert ended.returncode == 0, ended.stderr


def test_the_controller_is_on_the_host_that_serves(deployment: Deployment) -> None:
    assert deployment.hosts.first.runs("ControllerActor")
    assert not deployment.hosts.second.runs("ControllerActor")


def test_a_short_cut_loses_nothing(deployment: Deployment) -> None:
    deployment.whole()
    before, known = deployment.server.pids(), len(deployment.faults())
    with deployment.streams.running() as load:
        time.sleep(0.5)
        start = now()
        deployment.hosts.cut()
        time.sleep(SHORT_CUT_S)
        deployment.hosts.heal()
        time.sleep(1.5)
    found = pauses(load.finished, start, start + SHORT_CUT_S)
    logger.info("a cut of %g s: longest pause %.2f s", SHORT_CUT_S, found[0])
    assert found[0] >= SHORT_CUT_S, "the workers do not talk over this link"
    assert deployment.server.pids() == before
    assert {fault["kind"] for fault in deployment.faults()[known:]} <= {"lost its group"}


def test_a_slow_link_is_not_a_dead_one(deployment: Deployment) -> None:
    before, known = deployment.server.pids(), len(deployment.faults())
    with deployment.streams.running() as load:
        time.sleep(0.5)
        start = now()
        deployment.hosts.delay(DELAY_S)
        time.sleep(SLOW_S)
        deployment.hosts.delay(0.0)
        end = now()
    found = pauses(load.finished, start, end)
    logger.info("%g ms in each direction: longest pause %.2f s", DELAY_S * 1e3, found[0])
    assert found[0] > 2 * DELAY_S
    assert deployment.faults()[known:] == []
    assert deployment.server.pids() == before


def test_a_host_that_is_cut_off_is_given_up_and_its_worker_leaves(deployment: Deployment) -> None:
    before, known = deployment.server.pids(), len(deployment.faults())
    lost = deployment.remote_slot()
    old = psutil.Process(before[lost])
    (kept,) = set(before) - {lost}
    with deployment.streams.running() as load:
        time.sleep(0.5)
        start = now()
        deployment.hosts.cut()
        poll("the other host serves alone", lambda: deployment.server.slots == [kept], LONGEST_PAUSE_S)
        serves_s = now() - start
        assert psutil.wait_procs([old], timeout=GONE_S)[1] == [], "nobody can end it, so it has to leave by itself"
        logger.info("a cut: serves after %.2f s, the old worker is gone after %.1f s", serves_s, now() - start)
        deployment.hosts.heal()
        time.sleep(1.0)
    found = pauses(load.finished, start, now())
    logger.info("a cut: longest pauses %s s", [f"{pause:.2f}" for pause in found[: len(deployment.streams.bodies)]])
    assert found[0] < LONGEST_PAUSE_S
    assert [fault["slot"] for fault in deployment.faults()[known:]] == [lost]
    # A worker takes all of a host's CPU, so there is no room for another on the first one.
    assert deployment.server.pids() == {kept: before[kept]}
    assert deployment.answers()


def test_a_host_that_was_cut_off_may_join_again(deployment: Deployment) -> None:
    with deployment.streams.running():
        deployment.join()
        deployment.whole()


def test_a_link_that_heals_while_the_group_is_made_again(deployment: Deployment) -> None:
    before, known = deployment.server.pids(), len(deployment.faults())
    lost = deployment.remote_slot()
    (kept,) = set(before) - {lost}
    old = psutil.Process(before[lost])
    with deployment.streams.running() as load:
        time.sleep(0.5)
        start = now()
        deployment.hosts.cut()
        time.sleep(MIDDLE_CUT_S)
        deployment.hosts.heal()
        assert psutil.wait_procs([old], timeout=GONE_S)[1] == []
        logger.info("a cut of %g s: the old worker is gone after %.1f s", MIDDLE_CUT_S, now() - start)
    found = pauses(load.finished, start, now())
    logger.info("a cut of %g s: longest pause %.2f s", MIDDLE_CUT_S, found[0])
    assert found[0] < LONGEST_PAUSE_S
    assert [fault["slot"] for fault in deployment.faults()[known:]] == [lost]
    assert deployment.server.pids()[kept] == before[kept]
    assert deployment.answers()
