"""Which worker has which sequence: given out in order of arrival, taken back when a worker leaves or is lost."""

from collections.abc import Iterable, Mapping

from moeray.api.errors import ApiError
from moeray.api.ledger import Ledger, RequestEntry, SequenceEntry
from moeray.api.links import Links
from moeray.api.metrics import Metrics
from moeray.api.router import MemberKey, Router
from moeray.worker.messages import Abort


class Assignment:
    """Keeps ledger, router and workers in step. `links` is None until the front end has its lease."""

    def __init__(self, ledger: Ledger, router: Router, metrics: Metrics) -> None:
        self.links: Links | None = None
        self._ledger = ledger
        self._router = router
        self._metrics = metrics

    def pump(self) -> None:
        """Give waiting sequences to workers that have room."""
        while self._ledger.queue and self.links is not None:
            member = self._router.choose()
            if member is None:
                return
            self._give(self._ledger.queue.popleft(), member, self.links)

    def _give(self, sequence: SequenceEntry, member: MemberKey, links: Links) -> None:
        sequence.member = member
        self._router.take(member, sequence.outstanding_tokens)
        if not links.send(member, sequence.submit(links.lease)):
            # Nothing more for this one until its next heartbeat.
            self._router.release(member, sequence.outstanding_tokens)
            self._router.set_leaving(member, True)
            self._ledger.requeue([sequence])

    def resubmit(
        self, sequences: Iterable[SequenceEntry], reason: str, targets: Mapping[str, int | None] | None = None
    ) -> None:
        """Open sequences of one worker go on elsewhere after the tokens that they have.

        `targets` names the slots that have their KV cache: a sequence goes there if that slot serves, else where the
        router says, before all that came later.
        """
        moved = list(sequences)
        for sequence in moved:
            if sequence.member is not None:
                self._router.release(sequence.member, sequence.outstanding_tokens)
        self._ledger.requeue(moved)
        self._metrics.on_resubmitted(len(moved), reason)
        for sequence in moved:
            member = self._router.at_slot(targets.get(sequence.seq_id)) if targets else None
            # A target takes its sequences also beyond its room: waiting there costs less than a prefill elsewhere.
            if member is not None and self.links is not None and sequence.is_open:
                self._ledger.queue.remove(sequence)
                self._give(sequence, member, self.links)
        self.pump()

    def fail(self, request: RequestEntry, error: ApiError) -> None:
        """End a request with an error, unless it is over."""
        if not request.is_done:
            request.error = error
            self.end(request.sequences)

    def fail_all(self, error: ApiError) -> None:
        for request in list(self._ledger.requests):
            self.fail(request, error)

    def end(self, sequences: Iterable[SequenceEntry]) -> None:
        """Close sequences here and abort them at their workers, one message per worker."""
        aborted: dict[MemberKey, list[str]] = {}
        for sequence in sequences:
            if sequence.is_open:
                self._ledger.close(sequence)
                if sequence.member is not None:
                    self._router.release(sequence.member, sequence.outstanding_tokens)
                    aborted.setdefault(sequence.member, []).append(sequence.seq_id)
        for member, seq_ids in aborted.items():
            self.abort(member, seq_ids)

    def abort(self, member: MemberKey, seq_ids: list[str]) -> None:
        """Tell a worker to drop sequences; what it still says of them is dropped by the ledger."""
        if seq_ids and self.links is not None:
            self.links.send(member, Abort(self.links.lease, seq_ids))
