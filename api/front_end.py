"""The front end's heart: requests go to workers, tokens come back, members come and go.

Everything here runs on one event loop. HTTP handlers open requests with `submit` and end them with `finish`;
the links deliver what workers say; a background task follows the controller's view. A sequence whose worker leaves,
or is gone, goes on at another one after the tokens that it has; while there is none it waits, up to
`recovery_timeout_s`.
"""

import asyncio
import logging

from moeray.api.answers import Answers
from moeray.api.assignment import Assignment
from moeray.api.availability import Availability
from moeray.api.control import ControlClient
from moeray.api.errors import ApiError, timed_out, unavailable
from moeray.api.ledger import Ledger, RequestEntry
from moeray.api.links import LinkFactory, Links
from moeray.api.members import Members
from moeray.api.metrics import Metrics
from moeray.api.operation_watch import OperationWatch
from moeray.api.pulse import Pulse
from moeray.api.router import MemberKey, Router
from moeray.api.settings import ServerSettings
from moeray.api.watch import ControllerWatch
from moeray.api.worker_counters import WorkerCounters
from moeray.elastic.view import Attachment, ClusterView, ModelView, OperationView
from moeray.worker.messages import Attached, EngineFailed, FromWorker, HandedOver, Rejected, StepOutput

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
        self.operations = OperationWatch(control, metrics.operations, metrics.faults, poll_s=settings.view_poll_s)
        self._link_factory = link_factory
        self._metrics = metrics
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._next_id = 0
        self.is_draining = False
        self.superseded = asyncio.Event()
        self.ledger = Ledger(settings.max_queue)
        self.router = Router(settings.max_inflight_per_worker)
        self.counters = WorkerCounters()
        self._members = Members(self.router)
        self._pulse = Pulse(
            control,
            on_change=lambda: self.availability.update(),
            may_end=lambda: self.availability.failure is None,
        )
        self.availability = Availability(
            self.router,
            self._members,
            self._pulse,
            recovery_timeout_s=settings.recovery_timeout_s,
            on_timeout=self._on_recovery_timeout,
        )
        self._assignment = Assignment(self.ledger, self.router, metrics)
        self._answers = Answers(self.ledger, self.router, self._assignment, metrics)

    @property
    def _links(self) -> Links | None:
        return self._assignment.links

    @property
    def view(self) -> ClusterView | None:
        """What the controller told last."""
        return self.availability.view

    # Life of the front end

    async def start(self) -> None:
        """Follow the controller from now on; does not wait for it."""
        work = {
            "watch": self._follow(),
            "pulse": self._pulse.run(),
            "operations": self.operations.run(),
            "heartbeat": self._beat(),
        }
        for name, task in work.items():
            self._tasks.append(asyncio.create_task(task, name=f"front end {name}"))
            self._tasks[-1].add_done_callback(_log_end)

    async def settle(self, timeout_s: float) -> None:
        """Wait until it is known whether requests can be taken, if that comes soon."""
        await self.availability.settle(timeout_s)

    async def close(self) -> None:
        """End what still runs and close the connections."""
        self.availability.close()
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
        return self.availability.cause()

    def require_model(self) -> ModelView:
        """The served model; raises `ApiError` (503) while requests cannot be taken."""
        if self.is_draining:
            raise unavailable("the server is shutting down and takes no new requests", code="draining")
        view = self.view
        is_taking = view is not None and view.state == "serving" and not self.availability.is_given_up
        if view is not None and is_taking and view.model is not None:
            return view.model
        code = "recovering" if view is not None and view.state == "recovering" else "not_serving"
        raise unavailable(f"not serving: {self.cause() or 'the model is not known yet'}", code=code)

    def on_operation(self, view: OperationView) -> None:
        """An operation was begun, or has ended: count it, and hear of its end."""
        self._metrics.operations.on_operation(view)
        self.operations.nudge()

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
                self._answers.on_step(member, message.tokens)
            case Attached():
                self._on_attached(member, message)
            case Rejected():
                self._answers.on_rejected(message)
            case HandedOver():
                self._members.leave(member)
                self._answers.on_handed_over(member, message.sequences)
            case EngineFailed():
                logger.error("[slot %d] the worker failed: %s", member[0], message.message)
                self._members.fail(member)
                self._lose(member, f"worker {member[0]} failed: {message.message}")

    def _on_attached(self, member: MemberKey, message: Attached) -> None:
        self.counters.update(member, message.stats)
        if self._links is None or message.lease != self._links.lease:
            failure = self.availability.failure = "another front end has taken the lease"
            logger.error("[slot %d] %s", member[0], failure)
            self._assignment.fail_all(unavailable(failure, code="superseded"))
            self.superseded.set()
            return
        self._members.route(member)
        self.availability.update()
        self._assignment.pump()

    # Members come and go

    async def _follow(self) -> None:
        try:
            await self._watch.run()
        except Exception as error:
            failure = self.availability.failure = f"the front end lost the controller: {error!r}"
            self._assignment.fail_all(unavailable(failure))
            raise

    def _on_lease(self, attachment: Attachment) -> None:
        self._assignment.links = self.availability.links = Links(
            attachment,
            self._link_factory,
            on_message=self._on_message,
            on_lost=self._on_lost,
            on_broken=self._answers.on_broken,
        )

    def _on_lost(self, member: MemberKey) -> None:
        """Its connection broke: it gets nothing until it answers again. What it has waits a moment for that."""
        self.router.set_away(member)
        self._pulse.nudge()
        self.availability.update()

    def _on_view(self, view: ClusterView) -> None:
        links = self._links
        assert links is not None
        self.availability.view = view
        self._metrics.on_view(view)
        self.operations.nudge()
        logger.info("[epoch %d] %s, members %s", view.epoch, view.state, [m.slot for m in view.members])
        if view.state == "failed":
            self._assignment.fail_all(unavailable(f"the cluster failed: {view.cause}", code="cluster_failed"))
        self._members.update(view)
        lost = links.update(view)
        for member in filter(links.is_attached, self._members.keys):
            self._members.route(member)
        for member in lost:
            self.router.remove(member)  # all of them before one's sequences go to another
        for member in lost:
            self._lose(member, view.cause or f"worker {member[0]} is {self._members.state_of(member)}")
        self.availability.update()
        self._assignment.pump()

    def _lose(self, member: MemberKey, cause: str) -> None:
        """A worker gives no more tokens: its sequences go on elsewhere, or wait; at the very end they have failed."""
        self.router.remove(member)
        self.counters.forget(member)
        sequences = self.ledger.on_member(member)
        if self.view is not None and self.view.state in ("failed", "stopping"):
            for sequence in sequences:
                self._assignment.fail(sequence.request, unavailable(cause, code="worker_lost"))
            self._assignment.pump()
        else:
            self._assignment.resubmit(sequences, "lost")
            self.availability.update()

    def _on_recovery_timeout(self) -> None:
        timeout_s = self._settings.recovery_timeout_s
        message = f"nothing serves for {timeout_s:g} s (recovery_timeout_s): {self.cause()}"
        self._assignment.fail_all(unavailable(message, code="recovery_timeout"))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            if self._links is not None:
                self._links.beat()
                for member in filter(self._links.is_attached, self._members.keys):
                    self._members.route(member)  # one that did not take messages may do so again
                self._assignment.pump()
