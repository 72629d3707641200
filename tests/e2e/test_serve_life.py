"""The life of a deployment: how it ends when it is told to, when it is killed, and when it cannot start."""

import json
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.serving import END_S, ROOT, Serve, client, poll

DEMO = ROOT / "deploy" / "demo" / "model"
IDLE_S = 8.0
IDLE_TRIES = 3
IDLE_SHARE = 0.03
REFUSED_S = 15.0
LONG = {"prompt": "It", "temperature": 0.0, "ignore_eos": True, "stream": True}


class Streaming:
    """A client that reads a stream on a thread of its own."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.events: list[dict[str, Any]] = []
        self.is_complete = False
        self.is_cut = False
        self._thread = threading.Thread(target=self._read, args=(url, max_tokens))
        self._thread.start()

    def _read(self, url: str, max_tokens: int) -> None:
        body = LONG | {"max_tokens": max_tokens}
        try:
            with client(url) as http, http.stream("POST", "/generate", json=body) as answer:
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        self.is_complete = True
                    elif line.startswith("data: "):
                        self.events.append(json.loads(line[6:]))
        except httpx.TransportError:
            self.is_cut = True

    def wait(self) -> None:
        self._thread.join(END_S)
        assert not self._thread.is_alive()


def test_ctrl_c_lets_streams_end_and_leaves_nothing(tmp_path: Path) -> None:
    with Serve(tmp_path, "demo", "--workers", "2") as serve:
        url = serve.url()
        stream = Streaming(url, max_tokens=200)
        poll("the stream has begun", lambda: stream.events, 30.0)
        serve.signal(signal.SIGINT)
        code = serve.ended()
        stream.wait()
        assert code == 0, serve.output
        serve.assert_nothing_left()
        assert not list(serve.temporary.iterdir())
    assert stream.is_complete
    assert sum(len(event.get("token_ids", ())) for event in stream.events) == 200
    assert "Traceback" not in serve.output


def test_idle_processes_rest_and_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    with Serve(tmp_path, "demo", "--workers", "2", "--drain-timeout-s", "600") as serve:
        url = serve.url()
        with client(url) as http:
            http.post("/generate", json=LONG | {"max_tokens": 4, "stream": False}).raise_for_status()
        own = serve.own_processes()
        assert all(has_torch(process) == ("WorkerActor" in process.cmdline()[0]) for process in own)
        shares = [idle_share(own)]
        while shares[-1] >= IDLE_SHARE and len(shares) < IDLE_TRIES:  # a busy machine makes waking dearer
            shares.append(idle_share(own))
        assert shares[-1] < IDLE_SHARE, shares
        streams = [Streaming(url, max_tokens=450) for _ in range(24)]
        poll("a stream has begun", lambda: streams[0].events, 30.0)
        serve.signal(signal.SIGHUP)  # the terminal was closed
        poll("it drains", lambda: "Finishing running requests" in serve.output, 10.0)
        began = time.monotonic()
        serve.signal(signal.SIGINT)
        assert serve.ended() == 0, serve.output
        assert time.monotonic() - began < 10.0
        serve.assert_nothing_left()
        for stream in streams:
            stream.wait()
        assert any(stream.is_cut for stream in streams)


def has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in mapped.path for mapped in process.memory_maps())


def idle_share(processes: list[psutil.Process]) -> float:
    """The share of one core that they use together while nobody asks for anything."""
    assert len(processes) == 6, [process.cmdline() for process in processes]

    def used_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before, began = used_s(), time.monotonic()
    time.sleep(IDLE_S)
    return (used_s() - before) / (time.monotonic() - began)


def test_a_killed_supervisor_takes_all_with_it(tmp_path: Path) -> None:
    with Serve(tmp_path, "demo", "--workers", "1") as serve:
        streams = [Streaming(serve.url(), max_tokens=450) for _ in range(8)]
        poll("the streams have begun", lambda: all(stream.events for stream in streams), 30.0)
        serve.signal(signal.SIGKILL)
        serve.ended()
        serve.assert_nothing_left(within_s=15.0)
        assert not list(serve.temporary.iterdir())
        for stream in streams:
            stream.wait()


def test_a_worker_that_dies_is_replaced_and_a_raylet_that_dies_is_the_end(tmp_path: Path) -> None:
    with Serve(tmp_path, "demo", "--workers", "2") as serve:
        url = serve.url()
        stream = Streaming(url, max_tokens=450)
        poll("the stream has begun", lambda: stream.events, 30.0)
        with client(url) as http:
            members = http.get("/topology").json()["members"]
            victim = psutil.Process(next(member["pid"] for member in members if member["num_requests"]))
            victim.kill()
            stream.wait()
            poll("it is replaced", lambda: len(serving(http)) == 2, END_S)
            assert victim.pid not in serving(http)
        (raylet,) = serve.processes_called(r"/raylet/raylet ")
        raylet.kill()
        assert serve.ended(10.0) == 1
        (line,) = [line for line in serve.output.splitlines() if line.startswith("moeray:")]
        assert line.startswith(f"moeray: Ray's raylet (pid {raylet.pid}) has died (logs in ")
        assert "Traceback" not in serve.output
        serve.assert_nothing_left(within_s=5.0)
    assert re.search(r"^Worker \d is dead\.$", serve.output, re.MULTILINE), serve.output
    assert stream.is_complete
    assert sum(len(event.get("token_ids", ())) for event in stream.events) == 450


def serving(http: httpx.Client) -> list[int]:
    """Processes of the workers that serve."""
    return [member["pid"] for member in http.get("/topology").json()["members"] if member["state"] == "serving"]


def damaged(tmp_path: Path, change: str) -> Path:
    """A copy of the demo that lacks something."""
    path = tmp_path / "model"
    shutil.copytree(DEMO, path)
    if change == "architecture":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"architectures": ["OddForCausalLM"]}))
    if change == "experts":
        config = json.loads((path / "config.json").read_text())
        key = "num_experts" if "num_experts" in config else "num_local_experts"
        (path / "config.json").write_text(json.dumps(config | {key: 17}))
    if change == "truncated":
        weights = path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:100_000])
    return path


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ("architecture", (), "OddForCausalLM"),
        ("none", ("--port", "{taken}"), "port {taken} on 127.0.0.1 cannot be used: address already in use"),
        ("none", ("--workers", "0"), "workers is 0, must be at least 1"),
        ("none", ("--dtype", "fp7"), "dtype is 'fp7', must be one of"),
        ("none", ("--device", "cuda", "--gpus-per-worker", "64"), "need 64 GPU, the cluster has 0"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path: Path, change: str, options: tuple[str, ...], words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        filled = [option.format(taken=taken) for option in options]
        began = time.monotonic()
        with Serve(tmp_path, damaged(tmp_path, change), *filled) as serve:
            assert serve.ended() == 1
            assert time.monotonic() - began < REFUSED_S
            lines = [line for line in serve.output.splitlines() if line.startswith("moeray:")]
            assert len(lines) == 1, serve.output
            assert words.format(taken=taken) in lines[0]
            assert "Traceback" not in serve.output
            serve.assert_nothing_left()
            assert not list(serve.temporary.iterdir())


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ("experts", ("--workers", "2"), "worker "),
        ("truncated", (), "worker 0: "),
        ("none", ("--kv-cache-gib", "100000"), "worker 0: "),
    ],
)
def test_a_worker_that_cannot_load_is_named_with_its_reason(
    tmp_path: Path, change: str, options: tuple[str, ...], words: str
) -> None:
    with Serve(tmp_path, damaged(tmp_path, change), *options) as serve:
        assert serve.ended(90.0) == 1
        lines = [line for line in serve.output.splitlines() if line.startswith("moeray:")]
        assert len(lines) == 1, serve.output
        assert words in lines[0]
        assert "its process died" not in lines[0]
        serve.assert_nothing_left()


def test_a_worker_that_dies_while_loading_ends_the_start(tmp_path: Path) -> None:
    with Serve(tmp_path, "demo", "--workers", "2") as serve:

        def worker() -> psutil.Process | None:
            found = [process for process in serve.processes() if "WorkerActor" in "".join(process.cmdline()[:1])]
            return found[-1] if found else None

        poll("a worker's process", worker, 60.0).kill()
        assert serve.ended() == 1
        assert "its process died" in serve.output
        serve.assert_nothing_left()


def test_ctrl_c_while_starting_ends_it(tmp_path: Path) -> None:
    with Serve(tmp_path, "demo", "--workers", "2") as serve:
        poll("Ray runs", lambda: "Ray: ready" in serve.output, 60.0)
        serve.signal(signal.SIGINT)
        assert serve.ended() == 0, serve.output
        serve.assert_nothing_left()
