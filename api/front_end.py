"""The front end's heart: requests go to workers, tokens come back, members come and go.

Everything here runs on one event loop. HTTP handlers open requests with `submit` and end them with `finish`;
the links deliver what workers say; a background task follows the controller's view. A sequence whose worker leaves,
or is gone, goes on at another one after the tokens that it has.
"""

import asyncio
import logging
import time

from moeray.api.assignment import Assignment
from moeray.api.control import ControlClient
from moeray.api.errors import ApiError, invalid, queue_full, timed_out, unavailable
from moeray.api.ledger import Ledger, RequestEntry
from moeray.api.links import LinkFactory, Links
from moeray.api.metrics import Metrics
from moeray.api.operation_watch import OperationWatch
from moeray.api.router import MemberKey, Router
from moeray.api.settings import ServerSettings
from moeray.api.watch import ControllerWatch
from moeray.api.worker_counters import WorkerCounters
from moeray.elastic.view import Attachment, ClusterView, ModelView, OperationView
from moeray.worker.messages import (
    Abort,
    Attached,
    EngineFailed,
    FromWorker,
    HandedOver,
    Rejected,
    StepOutput,
    TokenOutput,
)

logger = logging.getLogger(__name__)


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s ended: %r", task.get_name(), error)


class FrontEnd:
    """Owns the ledger, the router and the links of one lease."""

    def __init__(
        self, settings: ServerSettings, control: ControlClient, link_factory: LinkFactory, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._watch = ControllerWatch(
            control, poll_s=settings.view_poll_s, on_attached=self._on_lease, on_view=self._on_view
        )
        self._operations = OperationWatch(control, metrics.operations, poll_s=settings.view_poll_s)
        self._link_factory = link_factory
        self._metrics = metrics
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._next_id = 0
        self._failure: str | None = None
        # Members of the last view by their state; those that have left their group or failed, whatever it says.
        self._states: dict[MemberKey, str] = {}
        self._emptied: set[MemberKey] = set()
        self._failed: set[MemberKey] = set()
        self._has_served = False
        self.is_draining = False
        self.view: ClusterView | None = None
        self.ledger = Ledger(settings.max_queue)
        self.router = Router(settings.max_inflight_per_worker)
        self.counters = WorkerCounters()
        self._assignment = Assignment(self.ledger, self.router, metrics)

    @property
    def _links(self) -> Links | None:
        return self._assignment.links

    # Life of the front end

    async def start(self) -> None:
        """Follow the controller from now on; does not wait for it."""
        work = {"watch": self._follow(), "operations": self._operations.run(), "heartbeat": self._beat()}
        for name, task in work.items():
            self._tasks.append(asyncio.create_task(task, name=f"front end {name}"))
            self._tasks[-1].add_done_callback(_log_end)

    async def close(self) -> None:
        """End what still runs and close the connections."""
        self._assignment.fail_all(unavailable("the server is stopping", code="stopping"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._links is not None:
            await self._links.close()
        self._link_factory.close()

    def begin_drain(self) -> None:
        """Refuse new requests from now on; running ones finish."""
        self.is_draining = True

    async def drained(self, timeout_s: float) -> bool:
        """Whether all requests were answered within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def cause(self) -> str | None:
        """Why nothing can be generated now, in one line; None if it can."""
        view = self.view
        if self._failure is not None:
            return self._failure
        if view is None:
            return "the controller has not answered yet"
        if view.state != "serving":
            return view.cause or f"the cluster is {view.state}"
        if not self.router.members and not self._is_between_workers():
            return "no worker serves"
        return None

    def _is_between_workers(self) -> bool:
        """The last worker of an epoch has left, and those of the next one are about to answer."""
        return self._has_served and self._links is not None and self._links.is_connecting

    def require_model(self) -> ModelView:
        """The served model; raises `ApiError` (503) while requests cannot be taken."""
        if self.is_draining:
            raise unavailable("the server is shutting down and takes no new requests", code="draining")
        view = self.view
        if self._failure is None and view is not None and view.state == "serving" and view.model is not None:
            return view.model
        raise unavailable(f"not serving: {self.cause() or 'the model is not known yet'}", code="not_serving")

    def on_operation(self, view: OperationView) -> None:
        """An operation was begun, or has ended: count it, and hear of its end."""
        self._metrics.operations.on_operation(view)
        self._operations.nudge()

    # Life of a request

    def max_sequences(self) -> int:
        """The most that one request may have: what waits and what runs at once at the present size."""
        num_serving = 0 if self.view is None else sum(member.rank is not None for member in self.view.members)
        return self._settings.max_queue + num_serving * self._settings.max_inflight_per_worker

    def new_seq_id(self) -> str:
        """Unique over the life of the deployment, whatever request ids clients choose."""
        self._next_id += 1
        return f"{0 if self._links is None else self._links.lease}-{self._next_id}"

    def submit(self, request: RequestEntry) -> None:
        """Take a request; from now on `finish` must be called. Raises `ApiError` (429, 503)."""
        self.require_model()
        self.ledger.open(request, self.router.num_free())
        self._idle.clear()
        timeout_s = self._settings.request_timeout_s
        if timeout_s is not None:
            error = timed_out(f"the request took longer than {timeout_s} s (request_timeout_s)")
            loop = asyncio.get_running_loop()
            request.deadline = loop.call_later(timeout_s, self._expire, request, error)
        self._assignment.pump()

    def cancel(self, request: RequestEntry) -> None:
        """The client has gone: free what the request holds, here and at the workers."""
        if not request.is_done:
            request.is_cancelled = True
            self._assignment.end(request.sequences)
            self._assignment.pump()

    def finish(self, request: RequestEntry) -> None:
        """The answer was written, or cannot be any more."""
        self.cancel(request)
        if request.deadline is not None:
            request.deadline.cancel()
        self.ledger.forget(request)
        self._metrics.on_finished(request)
        if not self.ledger.requests:
            self._idle.set()

    def _expire(self, request: RequestEntry, error: ApiError) -> None:
        self._assignment.fail(request, error)
        self._assignment.pump()

    # What workers say

    def _on_message(self, member: MemberKey, message: FromWorker) -> None:
        match message:
            case StepOutput():
                self.counters.update(member, message.stats)
                self._on_step(member, message.tokens)
            case Attached():
                self._on_attached(member, message)
            case Rejected():
                self._on_rejected(message)
            case HandedOver():
                self._on_handed_over(member, message)
            case EngineFailed():
                logger.error("[slot %d] the worker failed: %s", member[0], message.message)
                self._failed.add(member)
                self._lose(member, f"worker {member[0]} failed: {message.message}")

    def _on_step(self, member: MemberKey, tokens: list[TokenOutput]) -> None:
        now = time.monotonic()
        surplus: list[str] = []
        any_closed = False
        for output in tokens:
            sequence = self.ledger.accept(output, member)
            if sequence is None:
                self._check_gap(member, output)
                continue
            self._metrics.on_token(sequence, output, now)
            is_first = len(sequence.output_ids) == 1
            self.router.progress(member, 1 + (len(sequence.prompt_ids) if is_first else 0))
            if not sequence.is_open:
                any_closed = True
                self.router.release(member, sequence.outstanding_tokens)
                if output.finish_reason is None:
                    surplus.append(sequence.seq_id)
        if surplus and self._links is not None:
            self._links.send(member, Abort(self._links.lease, surplus))
        if any_closed:
            self._assignment.pump()

    def _check_gap(self, member: MemberKey, output: TokenOutput) -> None:
        """Tokens lost on the way (a connection broke) never come again: the stream must not wait for them."""
        sequence = self.ledger.current(output.seq_id, output.attempt)
        if sequence is not None and sequence.member == member and output.position > len(sequence.output_ids):
            error = unavailable(f"tokens of worker {member[0]} were lost on the way", code="worker_lost")
            self._assignment.fail(sequence.request, error)
            self._assignment.pump()

    def _on_attached(self, member: MemberKey, message: Attached) -> None:
        self.counters.update(member, message.stats)
        if self._links is None or message.lease != self._links.lease:
            self._failure = "another front end has taken the lease"
            logger.error("[slot %d] %s", member[0], self._failure)
            self._assignment.fail_all(unavailable(self._failure, code="superseded"))
            return
        self._route(member)
        self._assignment.pump()

    def _on_handed_over(self, member: MemberKey, message: HandedOver) -> None:
        """Nothing more comes of these; the worker has left its group, whatever the last view says."""
        self._emptied.add(member)
        self.router.set_leaving(member, True)
        current = [(handed, self.ledger.current(handed.seq_id, handed.attempt)) for handed in message.sequences]
        sequences = [sequence for _, sequence in current if sequence is not None and sequence.member == member]
        self._assignment.resubmit(
            sequences, "handed_over", {handed.seq_id: handed.target_slot for handed, _ in current}
        )

    def _on_rejected(self, message: Rejected) -> None:
        sequence = self.ledger.current(message.seq_id, message.attempt)
        if sequence is None:
            return
        if message.code == "queue_full" and sequence.attempt > 0:
            # It was taken once, so it is not refused any more.
            self._assignment.resubmit([sequence], "no_room")
        else:
            make = queue_full if message.code == "queue_full" else invalid
            self._assignment.fail(sequence.request, make(message.message))
            self._assignment.pump()

    # Members come and go

    async def _follow(self) -> None:
        try:
            await self._watch.run()
        except Exception as error:
            self._failure = f"the front end lost the controller: {error!r}"
            self._assignment.fail_all(unavailable(self._failure))
            raise

    def _on_lease(self, attachment: Attachment) -> None:
        self._assignment.links = Links(attachment, self._link_factory, self._on_message)

    def _on_view(self, view: ClusterView) -> None:
        links = self._links
        assert links is not None
        self.view = view
        self._metrics.on_view(view)
        self._operations.nudge()
        logger.info("[epoch %d] %s, members %s", view.epoch, view.state, [m.slot for m in view.members])
        if view.state == "failed":
            self._assignment.fail_all(unavailable(f"the cluster failed: {view.cause}", code="cluster_failed"))
        self._states = {(member.slot, member.incarnation): member.state for member in view.members}
        self._emptied &= self._states.keys()
        self._failed &= self._states.keys()
        lost = links.update(view)
        for member in filter(links.is_attached, self._states):
            self._route(member)
        for member in lost:
            self.router.remove(member)  # all of them before one's sequences go to another
        for member in lost:
            self._lose(member, view.cause or f"worker {member[0]} is {self._states.get(member, 'gone')}")
        self._assignment.pump()

    def _route(self, member: MemberKey) -> None:
        """An attached member gets requests if it serves; one that leaves ends those that it has."""
        state = self._states.get(member)
        if state in ("serving", "leaving") and member not in self._failed:
            self._has_served = True
            self.router.add(member)
            self.router.set_leaving(member, state == "leaving" or member in self._emptied)

    def _lose(self, member: MemberKey, cause: str) -> None:
        """A worker gives no more tokens: its sequences go on elsewhere, or end with the cause if nothing serves."""
        self.router.remove(member)
        self.counters.forget(member)
        sequences = self.ledger.on_member(member)
        if self.view is not None and self.view.state == "serving":
            self._assignment.resubmit(sequences, "lost")
            return
        for sequence in sequences:
            self._assignment.fail(sequence.request, unavailable(cause, code="worker_lost"))
        self._assignment.pump()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            if self._links is not None:
                self._links.beat()
