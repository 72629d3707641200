"""What a worker tells its front end: tokens, once per step, with counters beside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moeray.comm.exchange import ExpertExchange
from moeray.worker.mailbox import Mailbox
from moeray.worker.messages import Attached, EngineFailed, StepOutput, TokenOutput, WorkerStats
from moeray.worker.request import Sequence as RequestSequence
from moeray.worker.sampler import SampledToken
from moeray.worker.scheduler import Finished, ScheduledBatch, Scheduler


@dataclass(slots=True)
class Counters:
    """What an engine has done since it started."""

    steps: int = 0
    step_s: float = 0.0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0


class Reporter:
    """Builds and sends messages to the lease's holder. Belongs to the engine's thread."""

    def __init__(
        self,
        *,
        slot: int,
        incarnation: int,
        mailbox: Mailbox,
        scheduler: Scheduler,
        exchange: ExpertExchange,
        clock: Callable[[], float],
    ) -> None:
        self.slot = slot
        self.incarnation = incarnation
        self.counters = Counters()
        self._mailbox = mailbox
        self._scheduler = scheduler
        self._exchange = exchange
        self._clock = clock
        self._stats_sent: WorkerStats | None = None

    def count_scheduled(self, batch: ScheduledBatch) -> None:
        """Count a step's prompt tokens; before it is committed."""
        for item in batch.items:
            remaining = item.sequence.num_prompt_tokens - item.sequence.num_computed_tokens
            self.counters.prompt_tokens += max(0, min(item.num_tokens, remaining))

    def send_step(
        self,
        epoch: int,
        step: int,
        sequences: Sequence[RequestSequence],
        tokens: Sequence[SampledToken],
        verdicts: Sequence[Finished | None],
    ) -> None:
        """One message with all of the step's tokens."""
        outputs = [self._output(*line) for line in zip(sequences, tokens, verdicts, strict=True)]
        self.counters.output_tokens += len(outputs)
        self._send(epoch, step, outputs)

    def send_stats_if_changed(self, epoch: int, step: int) -> None:
        """Before a sleep: the front end shall know the last state."""
        if self.stats() != self._stats_sent:
            self._send(epoch, step, [])

    def send_attached(self, epoch: int) -> None:
        """The lease was taken: its holder is told, and who held it before."""
        attached = Attached(self._mailbox.lease, self.slot, self.incarnation, epoch, self.stats())
        self._mailbox.send(attached)
        self._mailbox.send_to_former(attached)

    def send_failure(self, message: str) -> None:
        self._mailbox.send(EngineFailed(self.slot, self.incarnation, message))

    def _send(self, epoch: int, step: int, outputs: list[TokenOutput]) -> None:
        stats = self._stats_sent = self.stats()
        self._mailbox.send(
            StepOutput(
                slot=self.slot, incarnation=self.incarnation, epoch=epoch, step=step, tokens=outputs, stats=stats
            )
        )

    def _output(self, sequence: RequestSequence, token: SampledToken, verdict: Finished | None) -> TokenOutput:
        first = not sequence.first_token_sent
        sequence.first_token_sent = True
        if first:
            self.counters.cached_prompt_tokens += sequence.num_cached_tokens or 0
        return TokenOutput(
            seq_id=sequence.seq_id,
            attempt=sequence.attempt,
            position=sequence.num_output_tokens - 1,
            token_id=token.token_id,
            finish_reason=verdict.reason if verdict else None,
            stop_token_id=verdict.stop_token_id if verdict else None,
            logprob=token.logprob,
            top_logprobs=token.top_logprobs,
            num_cached_tokens=sequence.num_cached_tokens if first else None,
            worker_ttft_s=self._clock() - sequence.arrived_at if first else None,
        )

    def stats(self) -> WorkerStats:
        """Counters and gauges of this moment."""
        scheduler, traffic, counters = self._scheduler, self._exchange.traffic, self.counters
        return WorkerStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_free_blocks=scheduler.pool.num_free,
            num_blocks=scheduler.pool.num_blocks,
            steps=counters.steps,
            step_s=counters.step_s,
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            output_tokens=counters.output_tokens,
            preemptions=scheduler.num_preemptions,
            dropped_messages=self._mailbox.num_dropped,
            dispatch_payload_bytes=traffic.dispatch_payload_bytes + traffic.combine_payload_bytes,
            dispatch_wire_bytes=traffic.wire_bytes,
        )
