"""A front end without a cluster: a tiny tokenizer, workers that answer by rule, and a real HTTP server on loopback."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from moeray.comm.errors import ControlTimeout
from moeray.comm.sockets import Inbox, KeyPair, new_key_pair
from moeray.elastic.view import Attachment, ClusterView, MemberView, ModelView
from moeray.worker.messages import (
    Abort,
    Attach,
    Attached,
    FromWorker,
    Heartbeat,
    StepOutput,
    Submit,
    TokenOutput,
    ToWorker,
    WorkerStats,
)

MODEL_NAME = "tiny"
VOCAB_SIZE = 512
MAX_MODEL_LEN = 256
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


class FakeWorker:
    """Answers like a worker, over a real socket in a thread of its own, by rule: greedy repeats the prompt, sampling is
    a hash of (seed, index, position).

    `is_paused` holds all tokens back. A step takes `step_s`. `say` sends any message as if the worker had made it up.
    """

    def __init__(self, slot: int, client_key: str) -> None:
        self.slot = slot
        self.step_s = 0.002
        self.is_paused = False
        self.received: list[ToWorker] = []
        self.running: dict[str, tuple[Submit, int]] = {}
        self.step = 0
        self._arrived_s: dict[str, float] = {}
        self._client: bytes | None = None
        self._is_stopping = False
        self.inbox = Inbox(
            host="127.0.0.1", keys=new_key_pair(), client_keys=[client_key], decoder=msgspec.msgpack.Decoder(ToWorker)
        )
        self._thread = threading.Thread(target=self._run, name=f"fake worker {slot}", daemon=True)
        self._thread.start()

    def say(self, message: FromWorker) -> None:
        """Send `message` to the front end, from any thread."""
        self.inbox.post(message)

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join(DEADLINE_S)
        self.inbox.close()

    @property
    def num_tokens(self) -> list[int]:
        """Tokens made so far, of each running sequence."""
        return [done for _, done in self.running.copy().values()]

    def _run(self) -> None:
        next_step = time.monotonic()
        while not self._is_stopping:
            is_idle = self.is_paused or not self.running
            wait_s = 0.02 if is_idle else max(0.0, next_step - time.monotonic())
            for sender, message in self.inbox.receive(wait_s):
                if sender is None:
                    self._reply(message)
                else:
                    self._client = sender
                    self._handle(message)
            if not self.is_paused and self.running and time.monotonic() >= next_step:
                next_step = time.monotonic() + self.step_s
                self._run_step()

    def _reply(self, message: FromWorker) -> None:
        assert self._client is not None
        self.inbox.send(self._client, message)

    def stats(self) -> WorkerStats:
        return WorkerStats(len(self.running), 0, 100, 100, self.step, 0.1, 0, 0, 0, 0, 0, 0, 0)

    def _handle(self, message: ToWorker) -> None:
        self.received.append(message)
        match message:
            case Attach():
                self._reply(Attached(message.lease, self.slot, 0, 1, self.stats()))
            case Submit():
                self._arrived_s[message.seq_id] = time.monotonic()
                self.running[message.seq_id] = (message, len(message.output_ids))
            case Abort():
                for seq_id in message.seq_ids:
                    self.running.pop(seq_id, None)
            case Heartbeat():
                pass

    def _run_step(self) -> None:
        """One token for each running sequence, in one message."""
        outputs = [self._output(submit, position) for submit, position in list(self.running.values())]
        self.step += 1
        self._reply(self.step_of(outputs))

    def step_of(self, outputs: list[TokenOutput]) -> StepOutput:
        return StepOutput(self.slot, 0, 1, self.step, outputs, self.stats())

    def _output(self, submit: Submit, position: int) -> TokenOutput:
        params = submit.sampling
        token = default_token(submit, position)
        done = position + 1
        stop_id = token if token in params.stop_token_ids or (token == 0 and not params.ignore_eos) else None
        if done < params.min_tokens:
            stop_id = None
        reason = "stop" if stop_id is not None else "length" if done == params.max_tokens else None
        if reason is None:
            self.running[submit.seq_id] = (submit, done)
        else:
            del self.running[submit.seq_id]
        top = None if params.logprobs is None else [(token - n, -0.5 - n) for n in range(params.logprobs)]
        return TokenOutput(
            seq_id=submit.seq_id,
            attempt=submit.attempt,
            position=position,
            token_id=token,
            finish_reason=reason,
            stop_token_id=stop_id,
            logprob=None if params.logprobs is None else -0.5,
            top_logprobs=top,
            num_cached_tokens=1 if position == 0 else None,
            worker_ttft_s=time.monotonic() - self._arrived_s.pop(submit.seq_id) if position == 0 else None,
        )


def default_token(submit: Submit, position: int) -> int:
    params = submit.sampling
    if params.temperature == 0:
        return submit.prompt_ids[position % len(submit.prompt_ids)]
    return 256 + hash((params.seed, submit.index, position)) % 128


def make_view(workers: Sequence[FakeWorker], state: str) -> ClusterView:
    members = tuple(
        MemberView(
            slot=worker.slot,
            incarnation=0,
            rank=rank,
            pid=1000 + worker.slot,
            node="127.0.0.1",
            state="serving",
            num_experts=4,
            endpoint=worker.inbox.endpoint,
            public_key=worker.inbox.public_key,
        )
        for rank, worker in enumerate(workers)
    )
    model = ModelView(
        dtype="fp32",
        combine="exact",
        dispatcher="all_to_all",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(0,),
        num_moe_layers=1,
        num_experts=8,
        num_seats=8,
        kv_blocks_per_worker=100,
        weights_bytes_per_worker=1,
        buffer_bytes_per_worker=1,
    )
    placement = (tuple(tuple(range(2)) for _ in workers),)
    return ClusterView(version=1, state=state, cause=None, epoch=1, members=members, placement=placement, model=model)


class FakeControl:
    """The controller's side: `publish` makes a new view."""

    def __init__(self, view: ClusterView, keys: KeyPair) -> None:
        self.current = view
        self.is_silent = False
        self._keys = keys

    async def attach(self) -> Attachment:
        return Attachment(lease=7, public_key=self._keys.public, secret_key=self._keys.secret)

    async def view(self, after_version: int, timeout_s: float) -> ClusterView:
        if self.is_silent:
            raise ControlTimeout("the controller does not answer")
        deadline = time.monotonic() + timeout_s
        while self.current.version <= after_version and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
            if self.is_silent:
                raise ControlTimeout("the controller does not answer")
        return self.current

    def publish(self, view: ClusterView) -> None:
        self.current = view


@dataclass
class Server:
    """A running front end: where it is, and what stands behind it."""

    url: str
    workers: list[FakeWorker]
    control: FakeControl
    front_end: FrontEnd
    loop: asyncio.AbstractEventLoop

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
