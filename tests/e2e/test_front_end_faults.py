"""All workers, the front end or the controller die by kill -9: what clients see, and that the rest goes on."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.streams import Stream, reference, requests, stream_one
from moeray.api.pulse import HUNG_S
from moeray.deploy.front_end_keeper import MOST_DEATHS
from tests.support.cluster import Cluster, moeray, started
from tests.support.elastic import Elastic
from tests.support.serving import Serve, client, gauges, poll

NUM_STREAMS = 4
MAX_TOKENS = 450
REPLACED_S = 40.0
FOLLOWED_S = 8.0
STOPPED_S = 1.5
CONTROLLER = "ControllerActor"
FRONT_END = r"moeray\.deploy\.frontend"


class Clients:
    """Streams that begin now, one for each body, on a thread of their own."""

    def __init__(self, url: str, bodies: list[dict[str, Any]]) -> None:
        self.streams: list[Stream] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(url, bodies)), name="clients")
        self._thread.start()

    async def _run(self, url: str, bodies: list[dict[str, Any]]) -> None:
        self.streams = await asyncio.gather(*(stream_one(url, n, body) for n, body in enumerate(bodies)))

    def wait(self) -> list[Stream]:
        """What they got, once all are over."""
        self._thread.join(120.0)
        assert not self._thread.is_alive()
        return self.streams


class Faulty(Elastic):
    """A server of which processes are killed."""

    def __init__(self, serve: Serve, url: str, http: httpx.Client) -> None:
        super().__init__(url, http)
        self.serve = serve
        self.bodies = requests(NUM_STREAMS, MAX_TOKENS)
        self.short = self.bodies[1] | {"stream": False, "max_tokens": 5}
        self.expected = asyncio.run(reference(url, self.bodies))

    def begin(self) -> Clients:
        """Streams that run on every worker when this returns."""
        clients = Clients(self.url, self.bodies)
        poll("streams run", lambda: all(m["num_requests"] for m in self.members().values()), 10.0)
        time.sleep(0.3)
        return clients

    def kill(self, pattern: str) -> None:
        """kill -9 of the one process with this command line."""
        (process,) = self.serve.processes_called(pattern)
        process.kill()
        process.wait(5.0)

    def kill_workers(self) -> None:
        for pid in self.pids().values():
            psutil.Process(pid).kill()


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    with Serve(tmp_path_factory.mktemp("serve"), "demo", "--workers", "2") as serve, client(serve.url()) as http:
        yield Faulty(serve, serve.url(), http)


def test_all_workers_die_and_the_streams_go_on(faulty: Faulty) -> None:
    clients = faulty.begin()
    began = time.monotonic()
    faulty.kill_workers()
    poll("health says so", lambda: faulty.http.get("/health").status_code == 503, 1.0)
    poll("and why", lambda: "its process died" in str(faulty.http.get("/health").json()["cause"]), 2.0)
    health = faulty.http.get("/health")
    assert time.monotonic() - began < 3.0
    assert "waiting for 1 to start" in health.json()["cause"], health.text
    refused = faulty.http.post("/generate", json=faulty.bodies[0])
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "recovering")
    assert health.json()["cause"] in refused.json()["error"]["message"]
    poll("it serves again", lambda: faulty.http.get("/health").status_code == 200, REPLACED_S)
    streams = clients.wait()
    assert [stream.error for stream in streams] == [None] * NUM_STREAMS
    assert [stream.tokens for stream in streams] == faulty.expected
    poll("both are back", lambda: len(faulty.slots) == 2, REPLACED_S)
    faults = faulty.http.get("/faults").json()["faults"]
    assert sorted(fault["slot"] for fault in faults) == [0, 1]
    assert {fault["kind"] for fault in faults} <= {"died", "was silent"}
    assert all(fault["recovered_s"] > 0 for fault in faults)
    kinds = [operation["kind"] for operation in faulty.operations()]
    assert kinds[-2:] == ["repair", "replace"]
    metrics = faulty.http.get("/metrics").text
    assert 'moeray_faults_total{kind="died"}' in metrics
    assert "moeray_recovery_seconds_count 2.0" in metrics
    shown = moeray("status", "--url", faulty.url).stdout
    assert "last fault:" in shown
    assert "Nothing serves: " in faulty.serve.output
    assert "It serves again, as epoch" in faulty.serve.output


def test_a_front_end_that_is_killed_is_followed_by_another(faulty: Faulty) -> None:
    pids = faulty.pids()
    poll("nothing runs", lambda: not any(gauges(faulty.http, "worker_num_running").values()), 5.0)
    free = gauges(faulty.http, "worker_num_free_blocks")
    clients = faulty.begin()
    faulty.kill(FRONT_END)
    began = time.monotonic()
    answer = httpx.post(f"{faulty.url}/generate", json=faulty.short, timeout=60.0)
    assert time.monotonic() - began < FOLLOWED_S
    assert answer.json().get("token_ids") == faulty.expected[1][:5], answer.text
    assert all(stream.error is not None for stream in clients.wait())
    poll("all are attached", lambda: len(gauges(faulty.http, "worker_num_running")) == len(pids), 5.0)
    assert faulty.pids() == pids
    poll("what the old one asked for is freed", lambda: gauges(faulty.http, "worker_num_free_blocks") == free, 5.0)
    assert not any(gauges(faulty.http, "worker_num_running").values())
    poll("it is told", lambda: "The front end serves again, pid" in faulty.serve.output, 5.0)
    assert "the front end was ended by SIGKILL" in faulty.serve.output


def test_a_controller_that_is_killed_is_not_missed_and_comes_back(faulty: Faulty) -> None:
    pids, num_faults = faulty.pids(), len(faulty.http.get("/faults").json()["faults"])
    clients = faulty.begin()
    faulty.kill(CONTROLLER)
    assert faulty.http.get("/health").status_code == 200
    streams = clients.wait()
    assert [stream.error for stream in streams] == [None] * NUM_STREAMS
    assert [stream.tokens for stream in streams] == faulty.expected
    poll("it is there again", lambda: "age_s" not in faulty.http.get("/operations").json(), REPLACED_S)
    assert faulty.pids() == pids
    operation = faulty.scale(retire=[0])
    assert operation["targets"] == [1]
    assert faulty.http.post("/generate", json=faulty.short).json()["token_ids"] == faulty.expected[1][:5]
    assert len(faulty.http.get("/faults").json()["faults"]) == num_faults


def test_a_controller_that_stops_for_a_while_is_left_alone_and_one_that_hangs_is_ended(faulty: Faulty) -> None:
    (controller,) = faulty.serve.processes_called(CONTROLLER)
    clients = faulty.begin()
    controller.suspend()
    time.sleep(STOPPED_S)
    began = time.monotonic()
    assert faulty.http.get("/faults").json()["age_s"] >= 0
    assert time.monotonic() - began < 1.2
    controller.resume()
    poll("it answers", lambda: "age_s" not in faulty.http.get("/faults").json(), 5.0)
    assert [stream.tokens for stream in clients.wait()] == faulty.expected
    assert controller.is_running()
    clients = faulty.begin()
    pids = faulty.pids()
    controller.suspend()
    faulty.kill_workers()
    poll("health says so", lambda: faulty.http.get("/health").status_code == 503, 1.0)
    assert psutil.wait_procs([controller], timeout=HUNG_S + 5.0)[1] == []
    streams = clients.wait()
    assert [stream.error for stream in streams] == [None] * NUM_STREAMS
    assert [stream.tokens for stream in streams] == faulty.expected
    poll("others serve", lambda: not set(faulty.pids().values()) & set(pids.values()), REPLACED_S)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(f"mf{os.getpid()}", tmp_path_factory.mktemp("token") / "token") as cluster:
        yield cluster


def test_further_front_ends_come_and_go_while_the_deployment_runs(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.serve(tmp_path, "--attach", "--deployment", "none") as lost:
        assert lost.ended() == 1
        assert f"no deployment 'none' runs in the cluster at {cluster.address}" in lost.output
        assert not list(lost.temporary.iterdir())
    with cluster.serve(tmp_path) as first:
        first.url()
        with cluster.serve(tmp_path, "--attach") as second, client(second.url()) as http:
            faulty = Faulty(second, second.url(), http)
            pids = faulty.pids()
            assert first.ended(10.0) == 0
            assert "Another front end has taken deployment default over: this one ends" in first.output
            first.assert_nothing_left()
            assert "It has taken deployment default over: a front end that served it before ends." in second.output
            assert "deployment default goes on" in second.output
            second.signal(signal.SIGTERM)
            assert second.ended() == 0, second.output
            second.assert_nothing_left()
        with cluster.serve(tmp_path, "--attach", "--recovery-timeout-s", "1") as third, client(third.url()) as http:
            faulty = Faulty(third, third.url(), http)
            assert faulty.pids() == pids
            gives_up_in_time(faulty)
            dies_too_often(faulty)


def gives_up_in_time(faulty: Faulty) -> None:
    """All workers die, and streams that wait for others end with an error; later requests are served."""
    clients = faulty.begin()
    began = time.monotonic()
    faulty.kill_workers()
    streams = clients.wait()
    assert 0.9 < time.monotonic() - began < 3.0
    for stream, expected in zip(streams, faulty.expected, strict=True):
        assert "recovery_timeout" in str(stream.error), stream.error
        assert "worker 0: its process died" in str(stream.error)
        assert stream.tokens == expected[: len(stream.tokens)]
    poll("it serves again", lambda: faulty.http.get("/health").status_code == 200, REPLACED_S)
    assert faulty.http.post("/generate", json=faulty.short).json()["token_ids"] == faulty.expected[1][:5]


def dies_too_often(faulty: Faulty) -> None:
    """One front end after another is killed, until none follows."""
    for _ in range(MOST_DEATHS):
        poll("a front end runs", lambda: faulty.serve.processes_called(FRONT_END), 10.0)
        faulty.kill(FRONT_END)
    assert faulty.serve.ended() == 1
    (line,) = [line for line in faulty.serve.output.splitlines() if line.startswith("moeray:")]
    assert "the front end was ended by SIGKILL" in line
    assert f"({MOST_DEATHS} of them within 60 s)" in line
    faulty.serve.assert_nothing_left()
