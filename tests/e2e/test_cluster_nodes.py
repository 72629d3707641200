"""A cluster of two nodes with two (pretended) GPUs each, made and ended by `moeray cluster`."""

import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.serving import ROOT, Serve, client, poll

NAME = f"mt{os.getpid()}"


def moeray(*words: str, token: Path | None = None, within_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = str(ROOT / "src")
    command = [sys.executable, "-m", "moeray.deploy.cli", *words]
    if token is not None:
        command += ["--token-file", str(token)]
    return subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False, env=environment)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The head's address and the token's path."""
    token = tmp_path_factory.mktemp("token") / "token"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    node = ("--node-ip", "127.0.0.1", "--num-cpus", "1", "--num-gpus", "2", "--name", NAME)
    try:
        head = moeray("cluster", "start", "--head", "--port", str(port), *node, token=token)
        assert head.returncode == 0, head.stderr
        assert f"--join 127.0.0.1:{port}" in head.stdout
        joined = moeray("cluster", "start", "--join", address, *node, token=token)
        assert joined.returncode == 0, joined.stderr
        yield address, token
    finally:
        ended = moeray("cluster", "stop", "--name", NAME)
    assert ended.returncode == 0, ended.stderr
    assert "processes ended" in ended.stdout
    assert "Nothing runs here" in moeray("cluster", "stop", "--name", NAME).stdout


def serve(tmp_path: Path, cluster: tuple[str, Path], *options: str) -> Serve:
    return Serve(
        tmp_path,
        "demo",
        "--ray-address",
        cluster[0],
        *options,
        variables={
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(cluster[1]),
            "RAY_NUM_REDIS_GET_RETRIES": "3",
            "GLOO_SOCKET_IFNAME": "lo",
        },
    )


def test_four_workers_land_two_and_two(cluster: tuple[str, Path], tmp_path: Path) -> None:
    with serve(tmp_path, cluster, "--workers", "4", "--gpus-per-worker", "1") as served:
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


def test_more_gpus_than_there_are_is_told_at_once(cluster: tuple[str, Path], tmp_path: Path) -> None:
    with serve(tmp_path, cluster, "--workers", "5", "--gpus-per-worker", "1") as served:
        assert served.ended() == 1
        assert "5 workers of 1 GPU each need 5 GPU, the cluster has 4" in served.output


def test_a_stranger_without_the_token_is_told_so(cluster: tuple[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("0" * 64)
    with serve(tmp_path, (cluster[0], other), "--workers", "1") as served:
        assert served.ended() == 1
        assert "moeray: no way to Ray at" in served.output


def test_a_node_without_the_token_cannot_join(tmp_path: Path) -> None:
    done = moeray("cluster", "start", "--join", "127.0.0.1:9", "--name", NAME, token=tmp_path / "none")
    assert done.returncode == 1
    assert "copy it from the head" in done.stderr
    both = moeray("cluster", "start", "--join", "127.0.0.1:9", "--head")
    assert "exactly one of --head and --join" in both.stderr
