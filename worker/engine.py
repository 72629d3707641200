"""The step loop of one worker: schedule, agree with the other ranks on a header, run, commit, send.

Every rank sees the same headers and so takes the same decision; there is no other consensus. If nobody has rows all
ranks park, each blocked on its inbox; who leaves the park first wakes its peers. Once all ranks say `ready` for the
next epoch they switch to its group between two steps, with the batch that was scheduled; a joiner's first act is the
header exchange of that epoch, and a leaver hands its sequences over.

If the group breaks, the step that ran is forgotten, and the engine halts until the controller has made another group of
those that are left. Sequences, blocks and positions stand, because they advance only when a step is committed.
"""

import logging
import threading
from concurrent.futures import Future

import torch

from moeray.comm import faults
from moeray.comm.errors import EpochMismatch, GroupError
from moeray.comm.group import CommGroup
from moeray.comm.messages import KVBlock, Nudge, StopEngine, Tick, Trouble, Wake
from moeray.worker.batch import prepare_batch
from moeray.worker.beside import SLICE_S, Job, JobQueue
from moeray.worker.commands import CommitEpoch, Halt, PreparedEpoch, StartHandOver
from moeray.worker.engine_parts import EngineParts
from moeray.worker.epoch_change import GIVEN_UP, NOT_READY, EpochChange
from moeray.worker.handover import HandOver, keep_block
from moeray.worker.mailbox import AttachAgain
from moeray.worker.messages import Abort, Attach, HandedOver, HandedOverSequence, Rejected, Submit
from moeray.worker.request import Sequence
from moeray.worker.scheduler import ScheduledBatch
from moeray.worker.trouble import TroubleBox

logger = logging.getLogger(__name__)

# Fields of the step header, int64 each. READY is the epoch that the rank is ready to switch to, or NOT_READY.
EPOCH, STEP, NUM_TOKENS, STOPPING, READY, HEADER_SIZE = 0, 1, 2, 3, 4, 5
NO_STEP = -1
# While halted nothing else is to be done: work for the next epoch gets all the time.
HALTED_SLICE_S = 0.05
# The longest a parked rank sleeps before it looks at its lease again.
PARK_SLICE_S = 1.0


class Engine:
    """Runs steps in the thread that calls `run`.

    Other threads may read `failure`, `orphaned`, `has_left`, `is_halted`, `num_requests`, `epoch` and `topology`, and
    wait for `trouble`. While it is halted they may set `topology`.
    """

    def __init__(self, parts: EngineParts, epoch: PreparedEpoch, joined: "Future[int] | None" = None) -> None:
        """Serve this epoch; `joined` gets its number once the first header came round."""
        self.parts = parts
        self.failure: str | None = None
        self.orphaned = False
        self.has_left = False
        self.trouble = TroubleBox()
        self.topology = epoch.topology
        self._group: CommGroup = epoch.group
        self._change = EpochChange(joined)
        self._hand_over: HandOver | None = None
        self._is_parked = False
        self._jobs = JobQueue()
        self._kept: ScheduledBatch | None = None
        self._step = 0
        self._stopping = False
        self._woken_step = NO_STEP
        self._calls_peers = False
        self._header = torch.zeros(HEADER_SIZE, dtype=torch.int64)
        parts.exchange.switch(epoch.exchange)
        parts.peers.update(epoch.topology.members, parts.slot)

    @property
    def num_requests(self) -> int:
        """Sequences that run or wait."""
        return len(self.parts.scheduler.running) + len(self.parts.scheduler.waiting)

    @property
    def epoch(self) -> int:
        return self.topology.epoch

    @property
    def is_halted(self) -> bool:
        """Out of its epoch's group, and waiting for another."""
        return self._change.is_halted

    def tick(self) -> Tick:
        """How far this rank is; from any thread."""
        counters = self.parts.reporter.counters
        return Tick(
            epoch=self.epoch,
            position=self._group.num_begun,
            progress=counters.steps + self.parts.exchange.num_finished,
            is_parked=self._is_parked,
            num_requests=self.num_requests,
        )

    @torch.inference_mode()
    def run(self) -> None:
        """Step until told to stop, orphaned, or failed; a failure is kept in `failure` and told to the front end."""
        self.parts.mailbox.start_waiting()
        try:
            while self._run_or_halt():
                pass
        except Exception as error:
            logger.exception("%s step loop ended", self._where())
            self._fail(error)
        self._jobs.fail_all(GroupError("the step loop has ended"))

    def abort_exchange(self) -> int:
        """Let an exchange that hangs fail; from any thread. See `CommGroup.abort`."""
        return self._group.abort()

    def close(self) -> None:
        """Give the group's connections back; the loop has ended."""
        self._group.close()

    def _fail(self, error: Exception) -> None:
        self.failure = f"{type(error).__name__}: {error}"
        self.parts.reporter.send_failure(self.failure)
        self._change.let_go(self.failure)
        self.trouble.put(Trouble(epoch=self.epoch, reason=self.failure, is_fatal=True))

    def _where(self) -> str:
        return f"[{self.parts.slot}.{self.parts.incarnation} epoch {self.epoch} step {self._step}]"

    def _run_or_halt(self) -> bool:
        """One round, or the wait for another group if this one is given up; False when the loop ends."""
        try:
            if self._change.halt is None:
                return self._run_one()
            reason = GIVEN_UP
        except GroupError as error:
            # While all stop, a peer that has left already is no failure.
            if self._stopping:
                return False
            logger.warning("%s lost its group: %s", self._where(), error)
            self.trouble.put(Trouble(epoch=self.epoch, reason=str(error), is_fatal=False))
            reason = str(error)
        return self._wait_halted(reason)

    def _run_one(self) -> bool:
        """One round of the header exchange and what it decides; False when the loop ends."""
        batch = self._kept
        if batch is None:
            self._receive(0.0)
            self._work_beside()
            batch = self.parts.scheduler.schedule()
        self._kept = None
        headers = self._exchange_header(batch.num_tokens)
        # A wake for this step, and this rank's own wish for a header exchange, are served with it.
        self._step += 1
        self._calls_peers = False
        if all(header[STOPPING] for header in headers):
            return False
        ready_epoch = self._change.ready_epoch
        if ready_epoch != NOT_READY and all(header[READY] == ready_epoch for header in headers):
            return self._switch(batch)
        # One rank's wish to stop is everyone's: all leave at the next step.
        self._stopping = self._stopping or any(header[STOPPING] for header in headers)
        num_tokens_per_rank = [header[NUM_TOKENS] for header in headers]
        if any(num_tokens_per_rank):
            self._run_step(batch, num_tokens_per_rank)
            return self._may_go_on()
        return self._stopping or self._park()

    def _exchange_header(self, num_tokens: int) -> list[list[int]]:
        header = self._header
        header[EPOCH], header[STEP], header[NUM_TOKENS] = self.epoch, self._step, num_tokens
        header[STOPPING] = int(self._stopping)
        header[READY] = self._change.ready_epoch
        if faults.armed:
            faults.points.step = self._step
            faults.reach("before_header" if self._change.next is None else "ready_header")
        rows: list[list[int]] = self._group.exchange_header(header).tolist()
        for rank, row in enumerate(rows):
            if row[EPOCH] != self.epoch or row[STEP] != self._step:
                slot = self.topology.slots[rank]
                raise EpochMismatch(f"{self._where()} met slot {slot} at epoch {row[EPOCH]}, step {row[STEP]}")
        self._change.met(self.epoch)
        return rows

    def _run_step(self, batch: ScheduledBatch, num_tokens_per_rank: list[int]) -> None:
        parts, counters = self.parts, self.parts.reporter.counters
        started = parts.clock()
        parts.exchange.begin_step(num_tokens_per_rank)
        prepared = prepare_batch(batch, parts.cache)
        logits_SV = parts.model(prepared.forward, parts.cache)
        sequences = [item.sequence for item in prepared.sampled]
        tokens = parts.sampler.sample(logits_SV, sequences)
        parts.reporter.count_scheduled(batch)
        faults.reach("before_commit")
        verdicts = parts.scheduler.commit(batch, [token.token_id for token in tokens])
        parts.expert_load.commit()
        faults.reach("after_commit")
        counters.steps += 1
        counters.step_s += parts.clock() - started
        if tokens:
            parts.reporter.send_step(self.epoch, self._step, sequences, tokens, verdicts)

    # Between steps

    def _work_beside(self) -> None:
        """At most a slice of work for the next epoch: seats to fill, KV blocks to copy."""
        self._jobs.run_slice()
        if self._hand_over is not None:
            end = self.parts.clock() + SLICE_S
            while self._hand_over.copy_one(self.parts.scheduler.running) and self.parts.clock() < end:
                pass

    def _park(self) -> bool:
        """Sleep until there is work here or at a peer; False if orphaned."""
        self.parts.reporter.send_stats_if_changed(self.epoch, self._step)
        self._is_parked = True
        while not (self._has_cause_to_step or self._change.halt is not None):
            self._receive(0.0 if self._jobs else PARK_SLICE_S)
            self._work_beside()
            if not self._may_go_on():
                return False
        self._is_parked = False
        if not self._is_woken and self._change.halt is None:
            self.parts.peers.send_all(Wake(self.epoch, self._step, self.parts.slot))
        return True

    @property
    def _has_cause_to_step(self) -> bool:
        return self.parts.scheduler.has_work or self._is_woken or self._stopping or self._calls_peers

    @property
    def _is_woken(self) -> bool:
        """A peer waits in this step's header exchange."""
        return self._woken_step >= self._step

    def _may_go_on(self) -> bool:
        mailbox = self.parts.mailbox
        if not mailbox.is_orphaned:
            return True
        freed = self.parts.scheduler.abort_all()
        logger.warning("%s no front end for %.0f s, leaving, freed %d", self._where(), mailbox.silent_s, freed)
        self.orphaned = True
        return False

    # The switch

    def _switch(self, batch: ScheduledBatch) -> bool:
        """All ranks are ready: take the next epoch's group, placement and peers; False for a rank that leaves."""
        faults.reach("at_switch")
        commit = self._change.take()
        # Closing takes tens of milliseconds, and nobody waits for it.
        threading.Thread(target=self._group.close, name="close group", daemon=True).start()
        if commit.prepared is None:
            self._leave(commit.epoch)
            self.has_left = True
            commit.done.set_result(commit.epoch)
            self._linger()
            return False
        self._kept = batch
        self._enter(commit.prepared)
        return True

    def _enter(self, prepared: PreparedEpoch) -> None:
        self.topology, self._group = prepared.topology, prepared.group
        self.parts.exchange.switch(prepared.exchange)
        self.parts.peers.update(prepared.topology.members, self.parts.slot)
        self._step, self._woken_step = 0, NO_STEP
        logger.info("%s switched, %d members", self._where(), prepared.topology.size)

    def _leave(self, epoch: int) -> None:
        scheduler = self.parts.scheduler
        sequences = [*scheduler.running, *scheduler.waiting]
        if self._hand_over is None:
            self._hand_over = HandOver((), self.parts.cache, self._send_block, Future())
        self._send_handed_over(epoch, self._hand_over.finish(sequences))
        scheduler.abort_all()
        logger.info("%s left at epoch %d, handed %d sequences over", self._where(), epoch, len(sequences))

    def _send_handed_over(self, epoch: int, sequences: list[HandedOverSequence]) -> None:
        self.parts.mailbox.send(HandedOver(self.parts.slot, self.parts.incarnation, epoch, sequences))

    def _linger(self) -> None:
        """Out of the group: pass on what still arrives until told to stop."""
        while not self._stopping and self._may_go_on():
            self._receive(PARK_SLICE_S)
            if self._change.next is not None:  # asked again: the answer was lost
                again = self._change.take()
                again.done.set_result(again.epoch)
            late = [HandedOverSequence(seq.seq_id, seq.attempt, None) for seq in self.parts.scheduler.waiting]
            if late:
                self._send_handed_over(self.epoch, late)
                self.parts.scheduler.abort_all()

    # A lost group

    def _wait_halted(self, reason: str) -> bool:
        """Out of the group until the controller commits another epoch; False if the loop ends.

        The step that ran is forgotten. It is scheduled again, because sequences advance by what is committed only.
        """
        # Peers that wait in an exchange hear of it by this; closing takes longer.
        self._group.abort()
        threading.Thread(target=self._group.close, name="close group", daemon=True).start()
        self._kept, self._hand_over, self._calls_peers = None, None, False
        self.parts.expert_load.discard()
        self._change.begin_halted(self.epoch, reason)
        while self._change.next is None:
            if self._stopping or not self._may_go_on():
                return False
            self._receive(0.0 if self._jobs else PARK_SLICE_S)
            self._jobs.run_slice(HALTED_SLICE_S)
        self._calls_peers = False
        prepared = self._change.take().prepared
        assert prepared is not None
        self._enter(prepared)
        return True

    # What arrives

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
                    self.parts.reporter.send_attached(self.epoch)
                case AttachAgain():
                    self.parts.reporter.send_attached(self.epoch)
                case Wake():
                    if message.epoch == self.epoch:
                        self._woken_step = max(self._woken_step, message.step)
                case Nudge():
                    self._calls_peers = True
                case KVBlock():
                    keep_block(message, self.parts.scheduler.pool, self.parts.cache)
                case StopEngine():
                    self._stopping = True
                case Job():
                    self._jobs.add(message)
                case StartHandOver():
                    self._on_hand_over(message)
                case CommitEpoch():
                    self._calls_peers = self._change.on_commit(message) or self._calls_peers
                case Halt():
                    self._change.on_halt(message, self.epoch)

    def _on_hand_over(self, message: StartHandOver) -> None:
        if message.targets:
            self._hand_over = HandOver(message.targets, self.parts.cache, self._send_block, message.done)
            # Nothing to copy is an answer too, also while parked.
            self._hand_over.copy_one(self.parts.scheduler.running)
        else:
            self._hand_over = None
            message.done.set_result(0)

    def _on_submit(self, message: Submit) -> None:
        sequence = Sequence.from_submit(message, now=self.parts.clock())
        refusal = self.parts.scheduler.refusal(sequence)
        if refusal is None:
            self.parts.scheduler.add(sequence)
        else:
            self.parts.mailbox.send(Rejected(message.seq_id, message.attempt, *refusal))

    def _send_block(self, slot: int, block: KVBlock) -> bool:
        return self.parts.peers.send(slot, block)
