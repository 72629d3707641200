"""The step loop of one worker: schedule, agree with the other ranks on a header, run, commit, send.

Every rank sees the same headers and so takes the same decision; there is no other consensus. If nobody has rows all
ranks park, each blocked on its inbox; who leaves the park first wakes its peers.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moeray.comm.errors import EpochMismatch, GroupError
from moeray.comm.exchange import ExpertExchange
from moeray.comm.group import CommGroup
from moeray.comm.messages import StopEngine, Wake
from moeray.comm.sockets import PeerLinks
from moeray.comm.topology import Topology
from moeray.worker.batch import prepare_batch
from moeray.worker.mailbox import Mailbox
from moeray.worker.messages import (
    Abort,
    Attach,
    Attached,
    EngineFailed,
    Rejected,
    StepOutput,
    Submit,
    TokenOutput,
    WorkerStats,
)
from moeray.worker.models.attention import PagedKVCache
from moeray.worker.models.decoder import Decoder
from moeray.worker.moe.expert_load import ExpertLoad
from moeray.worker.request import Sequence
from moeray.worker.sampler import SampledToken, Sampler
from moeray.worker.scheduler import Finished, ScheduledBatch, Scheduler

logger = logging.getLogger(__name__)

# Fields of the step header, int64 each.
EPOCH, STEP, NUM_TOKENS, STOPPING, HEADER_SIZE = 0, 1, 2, 3, 4
# The longest a parked rank sleeps before it looks at its lease again.
PARK_SLICE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of; all of it lives as long as the worker."""

    slot: int
    incarnation: int
    model: Decoder
    cache: PagedKVCache
    scheduler: Scheduler
    sampler: Sampler
    exchange: ExpertExchange
    expert_load: ExpertLoad
    mailbox: Mailbox
    peers: PeerLinks
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class Counters:
    """What an engine has done since it started."""

    steps: int = 0
    step_s: float = 0.0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0


class Engine:
    """Runs steps in the thread that calls `run`; other threads may read `failure`, `orphaned` and `num_requests`."""

    def __init__(self, parts: EngineParts, topology: Topology, group: CommGroup) -> None:
        """The group is warm and the exchange installed for this topology."""
        self.parts = parts
        self.failure: str | None = None
        self.orphaned = False
        self.counters = Counters()
        self._topology = topology
        self._group = group
        self._step = 0
        self._stopping = False
        self._woken = False
        self._stats_sent: WorkerStats | None = None
        self._header = torch.zeros(HEADER_SIZE, dtype=torch.int64)

    @property
    def num_requests(self) -> int:
        """Sequences that run or wait."""
        return len(self.parts.scheduler.running) + len(self.parts.scheduler.waiting)

    @torch.inference_mode()
    def run(self) -> None:
        """Step until told to stop, orphaned, or failed; a failure is kept in `failure` and told to the front end."""
        self.parts.mailbox.start_waiting()
        try:
            while self._run_one():
                pass
        except GroupError as error:
            # While all stop, a peer that has left already is no failure.
            if not self._stopping:
                logger.error("%s step loop ended: %s", self._where(), error)
                self._fail(error)
        except Exception as error:
            logger.exception("%s step loop ended", self._where())
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        self.parts.mailbox.send(EngineFailed(self.parts.slot, self.parts.incarnation, self.failure))

    def _where(self) -> str:
        return f"[{self.parts.slot}.{self.parts.incarnation} epoch {self._topology.epoch} step {self._step}]"

    def _run_one(self) -> bool:
        """One round of the header exchange and what it decides; False when the loop ends."""
        self._receive(0.0)
        batch = self.parts.scheduler.schedule()
        headers = self._exchange_header(batch.num_tokens)
        self._step += 1
        if all(header[STOPPING] for header in headers):
            return False
        # One rank's wish to stop is everyone's: all leave at the next step.
        self._stopping = self._stopping or any(header[STOPPING] for header in headers)
        num_tokens_per_rank = [header[NUM_TOKENS] for header in headers]
        if any(num_tokens_per_rank):
            self._run_step(batch, num_tokens_per_rank)
            return self._may_go_on()
        return self._stopping or self._park()

    def _exchange_header(self, num_tokens: int) -> list[list[int]]:
        header = self._header
        header[EPOCH], header[STEP] = self._topology.epoch, self._step
        header[NUM_TOKENS], header[STOPPING] = num_tokens, int(self._stopping)
        rows: list[list[int]] = self._group.exchange_header(header).tolist()
        for rank, row in enumerate(rows):
            if row[EPOCH] != self._topology.epoch or row[STEP] != self._step:
                slot = self._topology.slots[rank]
                raise EpochMismatch(f"{self._where()} met slot {slot} at epoch {row[EPOCH]}, step {row[STEP]}")
        return rows

    def _run_step(self, batch: ScheduledBatch, num_tokens_per_rank: list[int]) -> None:
        parts = self.parts
        started = parts.clock()
        parts.exchange.begin_step(num_tokens_per_rank)
        prepared = prepare_batch(batch, parts.cache)
        logits_SV = parts.model(prepared.forward, parts.cache)
        sequences = [item.sequence for item in prepared.sampled]
        tokens = parts.sampler.sample(logits_SV, sequences)
        for item in batch.items:
            remaining = item.sequence.num_prompt_tokens - item.sequence.num_computed_tokens
            self.counters.prompt_tokens += max(0, min(item.num_tokens, remaining))
        verdicts = parts.scheduler.commit(batch, [token.token_id for token in tokens])
        parts.expert_load.commit()
        self.counters.steps += 1
        self.counters.step_s += parts.clock() - started
        self.counters.output_tokens += len(tokens)
        if tokens:
            outputs = [self._output(*line) for line in zip(sequences, tokens, verdicts, strict=True)]
            self._send_step(outputs)

    def _output(self, sequence: Sequence, token: SampledToken, verdict: Finished | None) -> TokenOutput:
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
            worker_ttft_s=self.parts.clock() - sequence.arrived_at if first else None,
        )

    def _send_step(self, outputs: list[TokenOutput]) -> None:
        self._stats_sent = self._stats()
        self.parts.mailbox.send(
            StepOutput(
                slot=self.parts.slot,
                incarnation=self.parts.incarnation,
                epoch=self._topology.epoch,
                step=self._step,
                tokens=outputs,
                stats=self._stats_sent,
            )
        )

    def _park(self) -> bool:
        """Sleep until there is work here or at a peer; False if orphaned."""
        if self._stats() != self._stats_sent:
            self._send_step([])
        while not (self.parts.scheduler.has_work or self._woken or self._stopping):
            self._receive(PARK_SLICE_S)
            if not self._may_go_on():
                return False
        if not self._woken:
            self.parts.peers.send_all(Wake(self._topology.epoch, self._step, self.parts.slot))
        self._woken = False
        return True

    def _may_go_on(self) -> bool:
        mailbox = self.parts.mailbox
        if not mailbox.is_orphaned:
            return True
        freed = self.parts.scheduler.abort_all()
        logger.warning("%s no front end for %.0f s, leaving, freed %d", self._where(), mailbox.silent_s, freed)
        self.orphaned = True
        return False

    def _receive(self, timeout_s: float) -> None:
        for message in self.parts.mailbox.receive(timeout_s):
            match message:
                case Submit():
                    self._on_submit(message)
                case Abort():
                    self.parts.scheduler.abort(set(message.seq_ids))
                case Attach():
                    freed = self.parts.scheduler.abort_all()
                    logger.info("%s lease %d attached, freed %d", self._where(), message.lease, freed)
                    ids = (self.parts.slot, self.parts.incarnation, self._topology.epoch)
                    self.parts.mailbox.send(Attached(message.lease, *ids, self._stats()))
                case Wake():
                    # An older step's wake was for a park that has ended.
                    if message.epoch == self._topology.epoch and message.step >= self._step:
                        self._woken = True
                case StopEngine():
                    self._stopping = True

    def _on_submit(self, message: Submit) -> None:
        sequence = Sequence.from_submit(message, now=self.parts.clock())
        refusal = self.parts.scheduler.refusal(sequence)
        if refusal is None:
            self.parts.scheduler.add(sequence)
        else:
            self.parts.mailbox.send(Rejected(message.seq_id, message.attempt, *refusal))

    def _stats(self) -> WorkerStats:
        scheduler, traffic, counters = self.parts.scheduler, self.parts.exchange.traffic, self.counters
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
            dropped_messages=self.parts.mailbox.num_dropped,
            dispatch_payload_bytes=traffic.dispatch_payload_bytes + traffic.combine_payload_bytes,
            dispatch_wire_bytes=traffic.wire_bytes,
        )
