"""A worker by rule, for tests of the front end: a real socket, and no model behind it."""

import threading
import time

import msgspec

from moeray.comm.sockets import Inbox, new_key_pair
from moeray.worker.messages import (
    Abort,
    Attach,
    Attached,
    FromWorker,
    HandedOver,
    HandedOverSequence,
    Heartbeat,
    StepOutput,
    Submit,
    TokenOutput,
    ToWorker,
    WorkerStats,
)

STOP_DEADLINE_S = 20.0


class FakeWorker:
    """Answers like a worker, over a real socket in a thread of its own, by rule: greedy repeats the prompt, sampling is
    a hash of (seed, index, position).

    `is_paused` holds all tokens back. A step takes `step_s`. `say` sends any message as if the worker had made it up.
    `leave` hands all sequences over, and from then on those that still come.
    """

    def __init__(self, slot: int, client_key: str, incarnation: int = 0) -> None:
        self.slot = slot
        self.incarnation = incarnation
        self.step_s = 0.002
        self.is_paused = False
        self.received: list[ToWorker] = []
        self.running: dict[str, tuple[Submit, int]] = {}
        self.step = 0
        self._arrived_s: dict[str, float] = {}
        self._client: bytes | None = None
        self._is_stopping = False
        self._targets: list[int | None] | None = None
        self.has_left = False
        self.inbox = Inbox(
            host="127.0.0.1", keys=new_key_pair(), client_keys=[client_key], decoder=msgspec.msgpack.Decoder(ToWorker)
        )
        self._thread = threading.Thread(target=self._run, name=f"fake worker {slot}", daemon=True)
        self._thread.start()

    def say(self, message: FromWorker) -> None:
        """Send `message` to the front end, from any thread."""
        self.inbox.post(message)

    def leave(self, *targets: int | None) -> None:
        """At the next step, say where each running sequence goes: to the targets in turn."""
        self._targets = list(targets) or [None]

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join(STOP_DEADLINE_S)
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
            if self._targets is not None:
                self._hand_over(self._targets)
            if not self.is_paused and self.running and time.monotonic() >= next_step:
                next_step = time.monotonic() + self.step_s
                self._run_step()

    def _reply(self, message: FromWorker) -> None:
        assert self._client is not None
        self.inbox.send(self._client, message)

    def _hand_over(self, targets: list[int | None]) -> None:
        running = list(self.running.copy().values())
        self.running.clear()
        if running or not self.has_left:
            handed = [
                HandedOverSequence(submit.seq_id, submit.attempt, targets[number % len(targets)])
                for number, (submit, _) in enumerate(running)
            ]
            self._reply(HandedOver(self.slot, self.incarnation, 1, handed))
        self.has_left = True
        self._targets = [None]

    def stats(self) -> WorkerStats:
        return WorkerStats(len(self.running), 0, 100, 100, self.step, 0.1, 0, 0, 0, 0, 0, 0, 0)

    def _handle(self, message: ToWorker) -> None:
        self.received.append(message)
        match message:
            case Attach():
                self._reply(Attached(message.lease, self.slot, self.incarnation, 1, self.stats()))
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
        return StepOutput(self.slot, self.incarnation, 1, self.step, outputs, self.stats())

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
