"""What workers say about sequences: tokens, refusals, and that they give them up."""

import logging
import time
from collections.abc import Sequence

from moeray.api.assignment import Assignment
from moeray.api.errors import invalid, queue_full
from moeray.api.ledger import Ledger
from moeray.api.metrics import Metrics
from moeray.api.router import MemberKey, Router
from moeray.worker.messages import HandedOverSequence, Rejected, TokenOutput

logger = logging.getLogger(__name__)


class Answers:
    """Enters them in the ledger, and lets sequences go on elsewhere that have to."""

    def __init__(self, ledger: Ledger, router: Router, assignment: Assignment, metrics: Metrics) -> None:
        self._ledger = ledger
        self._router = router
        self._assignment = assignment
        self._metrics = metrics

    def on_step(self, member: MemberKey, tokens: Sequence[TokenOutput]) -> None:
        """All tokens of one step of a worker."""
        now = time.monotonic()
        surplus: list[str] = []
        any_closed = False
        for output in tokens:
            sequence = self._ledger.accept(output, member)
            if sequence is None:
                self._check_gap(member, output)
                continue
            self._metrics.on_token(sequence, output, now)
            is_first = len(sequence.output_ids) == 1
            self._router.progress(member, 1 + (len(sequence.prompt_ids) if is_first else 0))
            if not sequence.is_open:
                any_closed = True
                self._router.release(member, sequence.outstanding_tokens)
                if output.finish_reason is None:
                    surplus.append(sequence.seq_id)
        self._assignment.abort(member, surplus)
        if any_closed:
            self._assignment.pump()

    def _check_gap(self, member: MemberKey, output: TokenOutput) -> None:
        """Tokens lost on the way (a connection broke) never come again: they are made again."""
        sequence = self._ledger.current(output.seq_id, output.attempt)
        if sequence is not None and sequence.member == member and output.position > len(sequence.output_ids):
            logger.warning("[slot %d] tokens of %s were lost on the way", member[0], output.seq_id)
            self._assignment.abort(member, [output.seq_id])
            self._assignment.resubmit([sequence], "lost_tokens")

    def on_broken(self, member: MemberKey) -> None:
        """Messages may be missing, a submit or a last token among them: all that the worker has begins another attempt.

        It goes on after the tokens that are there, with the blocks that the worker still knows.
        """
        sequences = self._ledger.on_member(member)
        self._assignment.abort(member, [sequence.seq_id for sequence in sequences])
        self._assignment.resubmit(sequences, "lost_connection")

    def on_handed_over(self, member: MemberKey, handed_over: Sequence[HandedOverSequence]) -> None:
        """Nothing more comes of these from this worker."""
        current = [(handed, self._ledger.current(handed.seq_id, handed.attempt)) for handed in handed_over]
        sequences = [sequence for _, sequence in current if sequence is not None and sequence.member == member]
        targets = {handed.seq_id: handed.target_slot for handed, _ in current}
        self._assignment.resubmit(sequences, "handed_over", targets)

    def on_rejected(self, message: Rejected) -> None:
        """A worker will not run a sequence: its request fails, unless it was taken once."""
        sequence = self._ledger.current(message.seq_id, message.attempt)
        if sequence is None:
            return
        if message.code == "queue_full" and sequence.attempt > 0:
            # It was taken once, so it is not refused any more.
            self._assignment.resubmit([sequence], "no_room")
        else:
            make = queue_full if message.code == "queue_full" else invalid
            self._assignment.fail(sequence.request, make(message.message))
            self._assignment.pump()
