"""A cluster of two nodes with two (pretended) GPUs each, made and ended by `moeray cluster`."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import Cluster, moeray, ray_test_cluster, started
from tests.support.elastic import Elastic, Streams
from tests.support.serving import client, poll

NAME = f"mt{os.getpid()}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(NAME, tmp_path_factory.mktemp("token") / "token", num_nodes=2, num_gpus=2) as cluster:
        yield cluster


@pytest.fixture
def ray_own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ray_test_cluster(tmp_path / "ray-token", num_nodes=2, num_gpus=2) as cluster:
        yield cluster


@pytest.mark.parametrize("kind", ["cluster", "ray_own_cluster"])
def test_four_workers_land_two_and_two(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    cluster: Cluster = request.getfixturevalue(kind)
    with cluster.serve(tmp_path, "--workers", "4", "--gpus-per-worker", "1") as served:
        with client(served.url()) as http:
            members = http.get("/topology").json()["members"]
            answer = http.post("/generate", json={"prompt": "It", "max_tokens": 8, "ignore_eos": True})
        assert len(answer.json()["token_ids"]) == 8
        workers = [psutil.Process(member["pid"]) for member in members]
        assert sorted(Counter(worker.ppid() for worker in workers).values()) == [2, 2]
        served.signal(signal.SIGINT)
        assert served.ended() == 0, served.output
        assert psutil.wait_procs(workers, timeout=10.0)[1] == []
        poll("nothing is left of it", lambda: not served.processes(), 10.0)


def test_more_gpus_than_there_are_is_told_at_once(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.serve(tmp_path, "--workers", "5", "--gpus-per-worker", "1") as served:
        assert served.ended() == 1
        assert "5 workers of 1 GPU each need 5 GPU, the cluster has 4" in served.output


def test_a_stranger_without_the_token_is_told_so(cluster: Cluster, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("0" * 64)
    with cluster.serve(tmp_path, "--workers", "1", token=other) as served:
        assert served.ended() == 1
        assert f"the cluster's access token, {other} here, is missing or wrong: copy it from the head" in served.output
        lines = served.output.splitlines()
        assert [line for line in lines if not line.startswith("Ray: ")] == lines[-1:], "Ray's own words"
        assert not list(served.temporary.iterdir())


def test_a_node_without_the_token_cannot_join(tmp_path: Path) -> None:
    done = moeray("cluster", "start", "--join", "127.0.0.1:9", "--name", NAME, token=tmp_path / "none")
    assert done.returncode == 1
    assert "copy it from the head" in done.stderr
    both = moeray("cluster", "start", "--join", "127.0.0.1:9", "--head")
    assert "exactly one of --head and --join" in both.stderr


def has_controller(raylet: int) -> bool:
    """Whether the controller runs on this node."""
    return any("ControllerActor" in " ".join(child.cmdline()) for child in psutil.Process(raylet).children())


def test_a_node_that_dies_takes_its_workers_and_no_request(tmp_path: Path) -> None:
    name, token = f"{NAME}n", tmp_path / "token"
    with started(name, token, num_nodes=2, num_gpus=2) as cluster:
        options = ("--workers", "3", "--max-workers", "4", "--gpus-per-worker", "1")
        with cluster.serve(tmp_path, *options) as served, client(served.url()) as http:
            server = Elastic(served.url(), http)
            nodes = {slot: psutil.Process(pid).ppid() for slot, pid in server.pids().items()}
            home = next(node for node in nodes.values() if has_controller(node))
            lost = [slot for slot, node in nodes.items() if node != home]
            assert 1 <= len(lost) <= 2
            with Streams(served.url(), count=4, max_tokens=150).running():
                time.sleep(1.0)
                raylet = psutil.Process(nodes[lost[0]])
                for process in [raylet, *raylet.children(recursive=True)]:
                    process.kill()
                remaining = sorted(set(nodes) - set(lost))
                poll("those of the other node serve", lambda: server.slots == remaining, 15.0)
            faults = http.get("/faults").json()["faults"]
            assert {fault["slot"] for fault in faults} <= set(nodes)
            assert all(fault["recovered_s"] is not None for fault in faults)
            served.signal(signal.SIGINT)
            assert served.ended() == 0, served.output
