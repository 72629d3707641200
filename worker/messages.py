"""What the front end and a worker say to each other, over ZeroMQ. No torch here.

A request with n > 1 reaches workers as n sequences, each with its own `seq_id`. Every message names the `lease` of the
front end that sent it, and workers drop those of older leases. Token messages carry (seq_id, attempt, position), and
the ledger takes only the current attempt's token at the position it expects next.
"""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one sequence is sampled. Ranges are checked where the request enters; `__post_init__` is the last guard.

    `temperature` 0 is greedy. `top_k` 0 is off. Penalties follow OpenAI's definitions (presence, frequency: over
    generated tokens) and the usual repetition penalty (over prompt and generated tokens, 1.0 is off). `logprobs` is
    the number of alternatives to report beside the sampled token's own, None for none at all.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("max_tokens", self.max_tokens, 1, 1 << 31),
            ("min_tokens", self.min_tokens, 0, self.max_tokens),
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_k", self.top_k, 0, 1 << 31),
            ("top_p", self.top_p, 1e-9, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("repetition_penalty", self.repetition_penalty, 1e-3, 100.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("seed", self.seed, 0, (1 << 63) - 1),
            ("logprobs", 0 if self.logprobs is None else self.logprobs, 0, 20),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}, must be from {low} to {high}")


# Front end to worker


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """A front end with this lease takes the worker; older leases' sequences are freed."""

    lease: int


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The lease is still held; sent every few seconds."""

    lease: int


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Run one sequence. `output_ids` are tokens already sent to the client: generation goes on after them."""

    lease: int
    seq_id: str
    attempt: int
    index: int
    prompt_ids: list[int]
    output_ids: list[int]
    sampling: SamplingParams


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Free the sequences at once; unknown ids are ignored. No answer is sent for them."""

    lease: int
    seq_ids: list[str]


# Worker to front end


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """One new token of one sequence.

    `position` counts output tokens from 0. `finish_reason` is None, "stop" (eos or a stop token id, named in
    `stop_token_id`) or "length"; with it the sequence is closed at the worker. `top_logprobs` are (token, log
    probability) pairs, best first. `num_cached_tokens` (prompt tokens not recomputed) and `worker_ttft_s` (arrival at
    the worker to this message) come with a sequence's first token only.
    """

    seq_id: str
    attempt: int
    position: int
    token_id: int
    finish_reason: str | None = None
    stop_token_id: int | None = None
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    num_cached_tokens: int | None = None
    worker_ttft_s: float | None = None


class WorkerStats(msgspec.Struct, frozen=True, array_like=True):
    """Counters since the worker started, and gauges of this moment."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    steps: int
    step_s: float
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    preemptions: int
    dropped_messages: int
    dispatch_payload_bytes: int
    dispatch_wire_bytes: int


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The worker belongs to this lease now."""

    lease: int
    slot: int
    incarnation: int
    epoch: int
    stats: WorkerStats


class StepOutput(msgspec.Struct, frozen=True, tag="step"):
    """All tokens of one step, in one message; also sent without tokens when only the stats changed (going idle)."""

    slot: int
    incarnation: int
    epoch: int
    step: int
    tokens: list[TokenOutput]
    stats: WorkerStats


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The worker will not run this sequence; `code` is "queue_full" or "invalid"."""

    seq_id: str
    attempt: int
    code: str
    message: str


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker's step loop ended with an error; nothing more will come from this incarnation."""

    slot: int
    incarnation: int
    message: str


class HandedOverSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that its worker gives up; `target_slot` has its KV cache, None if nobody has."""

    seq_id: str
    attempt: int
    target_slot: int | None


class HandedOver(msgspec.Struct, frozen=True, tag="handed_over"):
    """A leaving worker's last word on these sequences: every token that it computed for them was sent before."""

    slot: int
    incarnation: int
    epoch: int
    sequences: list[HandedOverSequence]


ToWorker = Attach | Heartbeat | Submit | Abort
FromWorker = Attached | StepOutput | Rejected | EngineFailed | HandedOver
