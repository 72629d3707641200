"""A front end without a cluster: a tiny tokenizer, workers that answer by rule, and a real HTTP server on loopback."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers, trainers

from moeray.api.front_end import FrontEnd
from moeray.api.server import create_app
from moeray.api.settings import ServerSettings
from moeray.comm.sockets import new_key_pair
from tests.support.api_control import VOCAB_SIZE, FakeControl, make_view
from tests.support.api_worker import FakeWorker

MODEL_NAME = "tiny"
DEADLINE_S = 20.0
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' and loop.first %}"
    "{{ raise_exception('the user speaks first') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{% if shout %}!{% endif %}"
)


def make_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE over a few words: every byte has a token, so any text can be written."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog, and héllo wörld 你好"] * 20, trainer)
    return tokenizer


@dataclass
class Server:
    """A running front end: where it is, and what stands behind it."""

    url: str
    workers: list[FakeWorker]
    control: FakeControl
    front_end: FrontEnd
    loop: asyncio.AbstractEventLoop

    def add_worker(self, slot: int, incarnation: int = 0) -> FakeWorker:
        """A further worker, which no view shows yet."""
        worker = FakeWorker(slot, self.control.keys.public, incarnation)
        self.workers.append(worker)
        return worker

    def publish(
        self,
        workers: Sequence[FakeWorker],
        epoch: int = 1,
        *,
        cluster: str = "serving",
        cause: str | None = None,
        **states: str,
    ) -> None:
        """The next view has these workers; `slot_1="leaving"` gives a state."""
        by_slot = {int(name.removeprefix("slot_")): state for name, state in states.items()}
        version = self.control.current.version + 1
        view = make_view(workers, cluster, states=by_slot, version=version, epoch=epoch)
        self.control.publish(msgspec.structs.replace(view, cause=cause))
        wait_until(lambda: (view := self.front_end.view) is not None and view.version == version, "the view came")

    def metric(self, name: str) -> float:
        """The value of a metric with its labels, 0 if it is not there."""
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(f"{name} ")]
        return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=DEADLINE_S)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=DEADLINE_S)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=DEADLINE_S)


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll until `condition` holds; fail with `what` after the deadline."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
        time.sleep(0.002)


@pytest.fixture
def until() -> Callable[[Callable[[], bool], str], None]:
    """`until(condition, what)`: poll with a deadline."""
    return wait_until


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests that wait for something else."""
    with ThreadPoolExecutor(32) as threads:
        yield threads


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tokenizer's files."""
    path = tmp_path_factory.mktemp("model")
    make_tokenizer().save(str(path / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


class Servers:
    """Starts servers on free ports, and ends them all."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._running: list[tuple[uvicorn.Server, threading.Thread, list[FakeWorker]]] = []

    def start(self, num_workers: int = 2, *, state: str = "serving", **settings: Any) -> Server:
        """A server that listens and, if the cluster's `state` is serving, serves."""
        keys = new_key_pair()
        workers = [FakeWorker(slot, keys.public) for slot in range(num_workers)]
        control = FakeControl(make_view(workers, state), keys)
        app = create_app(ServerSettings(model_path=str(self._model_path), served_name=MODEL_NAME, **settings), control)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        loops: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve(sockets=[listener])

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        self._running.append((server, thread, workers))
        wait_until(lambda: server.started, "the server listens")
        front_end = app.state.front_end
        if state == "serving":
            wait_until(lambda: len(front_end.router.members) == num_workers, "the workers serve")
        return Server(f"http://127.0.0.1:{listener.getsockname()[1]}", workers, control, front_end, loops[0])

    def stop(self) -> None:
        for server, _, _ in self._running:
            server.should_exit = True
        for _, thread, workers in self._running:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
            for worker in workers:
                worker.stop()


@pytest.fixture
def start_server(model_path: Path) -> Iterator[Callable[..., Server]]:
    """`start_server(num_workers=2, state="serving", **settings)`; all servers end with the test."""
    servers = Servers(model_path)
    yield servers.start
    servers.stop()


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[Server]:
    """One server with two workers for all tests of a file that leave it as it was."""
    servers = Servers(model_path)
    yield servers.start(2, max_body_bytes=50_000)
    servers.stop()
