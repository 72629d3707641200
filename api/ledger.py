"""The front end's record of every request: what was asked, what was sent, what is expected next.

A request has one sequence per choice. The ledger takes a token only from the sequence's current attempt and
at the position that it expects next; everything else is counted and dropped. What a worker would need to go
on elsewhere (prompt, tokens so far, seed, attempt) is all here, in `SequenceEntry.submit`.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moeray.api.detokenizer import Detokenizer
from moeray.api.errors import ApiError, queue_full
from moeray.api.router import MemberKey
from moeray.api.stop import StopMatcher
from moeray.worker.messages import SamplingParams, Submit, TokenOutput


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """`text_offset` counts characters of the answer before this token's text; `top` is best first."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]
    text_offset: int


@dataclass(slots=True)
class Delta:
    """What a sequence produced since the client was last written to."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceEntry:
    """One choice of a request. `index` goes into the sampler's randomness, `choice` is its number in the answer.

    `order` counts sequences in the order in which they came. `attempt` counts the workers that had it before.
    """

    request: "RequestEntry"
    seq_id: str
    choice: int
    index: int
    prompt_ids: list[int]
    sampling: SamplingParams
    detokenizer: Detokenizer
    stop: StopMatcher
    order: int = 0
    attempt: int = 0
    member: MemberKey | None = None
    output_ids: list[int] = field(default_factory=list)
    delta: Delta | None = None
    num_chars: int = 0
    num_cached_tokens: int = 0
    last_token_s: float | None = None
    is_open: bool = True
    finish_reason: str | None = None

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens still to prefill and output tokens still to come, at most."""
        prefill = 0 if self.output_ids else len(self.prompt_ids)
        return prefill + self.sampling.max_tokens - len(self.output_ids)

    def submit(self, lease: int) -> Submit:
        """What a worker needs to run this sequence, or to go on with it."""
        return Submit(
            lease=lease,
            seq_id=self.seq_id,
            attempt=self.attempt,
            index=self.index,
            prompt_ids=self.prompt_ids,
            output_ids=list(self.output_ids),
            sampling=self.sampling,
        )

    def take_delta(self) -> Delta | None:
        """What is new for the client, once."""
        delta, self.delta = self.delta, None
        return delta

    def append(self, output: TokenOutput) -> None:
        """Take the next token: its text up to a stop string, and the end if it is one."""
        self.output_ids.append(output.token_id)
        if output.num_cached_tokens is not None and len(self.output_ids) == 1:
            self.num_cached_tokens = output.num_cached_tokens
        delta = self.delta = self.delta or Delta()
        delta.token_ids.append(output.token_id)
        if output.logprob is not None:
            top = output.top_logprobs or ()
            delta.logprobs.append(TokenLogprob(output.token_id, output.logprob, top, self.num_chars))
        delta.text += self._text_of(output)
        if self.stop.matched is not None:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            self.finish_reason = output.finish_reason
        delta.finish_reason = self.finish_reason

    def _text_of(self, output: TokenOutput) -> str:
        """Text that may be sent now. A stop token's own text is not part of the answer."""
        text = "" if output.stop_token_id is not None else self.detokenizer.push(output.token_id)
        is_last = output.finish_reason is not None
        if is_last:
            text += self.detokenizer.flush()
        self.num_chars += len(text)
        sent = self.stop.push(text, armed=len(self.output_ids) >= self.sampling.min_tokens)
        return sent + self.stop.flush() if is_last and self.stop.matched is None else sent


@dataclass(slots=True, kw_only=True, eq=False)
class RequestEntry:
    """A request while it is answered. `waker` is set whenever its handler has something to do.

    `arrived_s` and `worker_ttft_s`: when it came (monotonic clock), and the worker's own time to its first
    token.
    """

    request_id: str
    arrived_s: float
    sequences: list[SequenceEntry] = field(default_factory=list)
    waker: asyncio.Event = field(default_factory=asyncio.Event)
    error: ApiError | None = None
    is_cancelled: bool = False
    num_open: int = 0
    worker_ttft_s: float | None = None
    deadline: asyncio.TimerHandle | None = None

    @property
    def is_done(self) -> bool:
        return self.num_open == 0

    def usage(self) -> Usage:
        """Each prompt counts once, however many choices it has."""
        firsts = [sequence for sequence in self.sequences if sequence.index == 0]
        return Usage(
            prompt_tokens=sum(len(sequence.prompt_ids) for sequence in firsts),
            completion_tokens=sum(len(sequence.output_ids) for sequence in self.sequences),
            cached_tokens=sum(sequence.num_cached_tokens for sequence in firsts),
        )


class Ledger:
    """All open requests, and the queue of sequences that no worker has yet, in order of arrival."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._open: dict[str, SequenceEntry] = {}
        self.requests: set[RequestEntry] = set()
        self.queue: deque[SequenceEntry] = deque()
        self.num_dropped_tokens = 0
        self._num_opened = 0

    def open(self, request: RequestEntry, num_free: int) -> None:
        """Enter a request and queue its sequences.

        `num_free` sequences would leave the queue at once. Raises `ApiError` (429) if more than the bound
        would wait.
        """
        num_waiting = len(self.queue) + len(request.sequences) - num_free
        if num_waiting > self._max_queue:
            raise queue_full(
                f"{len(self.queue)} sequences wait and {len(request.sequences)} more came, "
                f"at most {self._max_queue} may wait (max_queue)"
            )
        self.requests.add(request)
        request.num_open = len(request.sequences)
        for sequence in request.sequences:
            sequence.order = self._num_opened
            self._num_opened += 1
            self._open[sequence.seq_id] = sequence
            self.queue.append(sequence)

    def requeue(self, sequences: Iterable[SequenceEntry]) -> None:
        """Open sequences have lost their worker and go on elsewhere after the tokens that they have.

        They wait before all that came later, whatever the bound; what the earlier worker still sends is dropped.
        """
        for sequence in sequences:
            sequence.attempt += 1
            sequence.member = None
            self.queue.append(sequence)
        self.queue = deque(sorted(self.queue, key=lambda entry: entry.order))

    def accept(self, output: TokenOutput, member: MemberKey) -> SequenceEntry | None:
        """Enter a token and return its sequence, closed if this was its end; None if the token is not the
        expected one.
        """
        sequence = self._open.get(output.seq_id)
        if (
            sequence is None
            or sequence.member != member
            or output.attempt != sequence.attempt
            or output.position != len(sequence.output_ids)
        ):
            self.num_dropped_tokens += 1
            return None
        sequence.append(output)
        if sequence.finish_reason is not None:
            self.close(sequence)
        sequence.request.waker.set()
        return sequence

    def current(self, seq_id: str, attempt: int) -> SequenceEntry | None:
        """The open sequence, if this is its current attempt."""
        sequence = self._open.get(seq_id)
        return sequence if sequence is not None and sequence.attempt == attempt else None

    def close(self, sequence: SequenceEntry) -> None:
        """The sequence is over; what it still sends will be dropped. Closing twice changes nothing."""
        if not sequence.is_open:
            return
        if sequence.member is None:
            self.queue.remove(sequence)
        sequence.is_open = False
        del self._open[sequence.seq_id]
        sequence.request.num_open -= 1
        sequence.request.waker.set()

    def forget(self, request: RequestEntry) -> None:
        """The request was answered; all its sequences are closed."""
        assert request.is_done, request.request_id
        self.requests.discard(request)

    def on_member(self, member: MemberKey) -> list[SequenceEntry]:
        """Open sequences that a worker has."""
        return [sequence for sequence in self._open.values() if sequence.member == member]
