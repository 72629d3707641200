"""The front end's heart: requests go to workers, tokens come back, members come and go.

Everything here runs on one event loop. HTTP handlers open requests with `submit` and end them with `finish`;
the links deliver what workers say; a background task follows the controller's view.
"""

import asyncio
import logging
import time
from collections.abc import Iterable

from moeray.api.control import ControlClient
from moeray.api.errors import ApiError, invalid, queue_full, timed_out, unavailable
from moeray.api.ledger import Ledger, RequestEntry, SequenceEntry
from moeray.api.links import LinkFactory, Links
from moeray.api.metrics import Metrics
from moeray.api.router import MemberKey, Router
from moeray.api.settings import ServerSettings
from moeray.comm.errors import MoerayError
from moeray.elastic.view import ClusterView, ModelView
from moeray.worker.messages import (
    Abort,
    Attached,
    EngineFailed,
    FromWorker,
    Rejected,
    StepOutput,
    TokenOutput,
    WorkerStats,
)

logger = logging.getLogger(__name__)

RETRY_S = 1.0
ATTACH_S = 30.0
POLL_SLACK_S = 10.0


class FrontEnd:
    """Owns the ledger, the router and the links of one lease."""

    def __init__(
        self, settings: ServerSettings, control: ControlClient, link_factory: LinkFactory, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._control = control
        self._link_factory = link_factory
        self._metrics = metrics
        self._links: Links | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._next_id = 0
        self._failure: str | None = None
        self.is_draining = False
        self.view: ClusterView | None = None
        self.ledger = Ledger(settings.max_queue)
        self.router = Router(settings.max_inflight_per_worker)
        self.stats: dict[MemberKey, WorkerStats] = {}

    # Life of the front end

    async def start(self) -> None:
        """Follow the controller from now on; does not wait for it."""
        for name, task in (("watch", self._watch()), ("heartbeat", self._beat())):
            self._tasks.append(asyncio.create_task(task, name=f"front end {name}"))

    async def close(self) -> None:
        """End what still runs and close the connections."""
        self._fail_all(unavailable("the server is stopping", code="stopping"))
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
        if not self.router.members:
            return "no worker serves"
        return None

    def require_model(self) -> ModelView:
        """The served model; raises `ApiError` (503) while requests cannot be taken."""
        if self.is_draining:
            raise unavailable("the server is shutting down and takes no new requests", code="draining")
        view = self.view
        if self._failure is None and view is not None and view.state == "serving" and view.model is not None:
            return view.model
        raise unavailable(f"not serving: {self.cause() or 'the model is not known yet'}", code="not_serving")

    # Life of a request

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
        self._pump()

    def cancel(self, request: RequestEntry) -> None:
        """The client has gone: free what the request holds, here and at the workers."""
        if not request.is_done:
            request.is_cancelled = True
            self._end(request.sequences)
            self._pump()

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
        self._fail(request, error)
        self._pump()

    def _fail(self, request: RequestEntry, error: ApiError) -> None:
        if not request.is_done:
            request.error = error
            self._end(request.sequences)

    def _fail_all(self, error: ApiError) -> None:
        for request in list(self.ledger.requests):
            self._fail(request, error)

    def _end(self, sequences: Iterable[SequenceEntry]) -> None:
        """Close sequences here and abort them at their workers, one message per worker."""
        aborted: dict[MemberKey, list[str]] = {}
        for sequence in sequences:
            if sequence.is_open:
                self.ledger.close(sequence)
                if sequence.member is not None:
                    self.router.release(sequence.member, sequence.outstanding_tokens)
                    aborted.setdefault(sequence.member, []).append(sequence.seq_id)
        if self._links is not None:
            for member, seq_ids in aborted.items():
                self._links.send(member, Abort(self._links.lease, seq_ids))

    def _pump(self) -> None:
        """Give waiting sequences to workers that have room."""
        while self.ledger.queue and self._links is not None:
            member = self.router.choose()
            if member is None:
                return
            sequence = self.ledger.queue.popleft()
            sequence.member = member
            self.router.take(member, sequence.outstanding_tokens)
            if not self._links.send(member, sequence.submit(self._links.lease)):
                self._fail(sequence.request, unavailable(f"worker {member[0]} takes no messages", code="worker_lost"))

    # What workers say

    def _on_message(self, member: MemberKey, message: FromWorker) -> None:
        match message:
            case StepOutput():
                self.stats[member] = message.stats
                self._on_step(member, message.tokens)
            case Attached():
                self._on_attached(member, message)
            case Rejected():
                self._on_rejected(message)
            case EngineFailed():
                logger.error("[slot %d] the worker failed: %s", member[0], message.message)
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
            self._pump()

    def _check_gap(self, member: MemberKey, output: TokenOutput) -> None:
        """Tokens lost on the way (a connection broke) never come again: the stream must not wait for them."""
        sequence = self.ledger.current(output.seq_id, output.attempt)
        if sequence is not None and sequence.member == member and output.position > len(sequence.output_ids):
            error = unavailable(f"tokens of worker {member[0]} were lost on the way", code="worker_lost")
            self._fail(sequence.request, error)
            self._pump()

    def _on_attached(self, member: MemberKey, message: Attached) -> None:
        self.stats[member] = message.stats
        if self._links is None or message.lease != self._links.lease:
            self._failure = "another front end has taken the lease"
            logger.error("[slot %d] %s", member[0], self._failure)
            self._fail_all(unavailable(self._failure, code="superseded"))
            return
        self.router.add(member)
        self._pump()

    def _on_rejected(self, message: Rejected) -> None:
        sequence = self.ledger.current(message.seq_id, message.attempt)
        if sequence is not None:
            make = queue_full if message.code == "queue_full" else invalid
            self._fail(sequence.request, make(message.message))
            self._pump()

    # Members come and go

    async def _watch(self) -> None:
        """Attach once, then follow the view; a controller that does not answer is asked again."""
        try:
            while True:
                try:
                    await self._follow()
                except (MoerayError, TimeoutError) as error:
                    logger.warning("the controller did not answer, asking again: %s", error)
                    await asyncio.sleep(RETRY_S)
        except Exception as error:
            self._failure = f"the front end lost the controller: {error!r}"
            logger.exception("the watch over the cluster ended")
            self._fail_all(unavailable(self._failure))
            raise

    async def _follow(self) -> None:
        if self._links is None:
            async with asyncio.timeout(ATTACH_S):
                attachment = await self._control.attach()
            self._links = Links(attachment, self._link_factory, self._on_message)
        while True:
            version = -1 if self.view is None else self.view.version
            poll_s = self._settings.view_poll_s
            async with asyncio.timeout(poll_s + POLL_SLACK_S):
                view = await self._control.view(version, poll_s)
            if view.version != version:
                self._on_view(view, self._links)

    def _on_view(self, view: ClusterView, links: Links) -> None:
        self.view = view
        logger.info("[epoch %d] %s, members %s", view.epoch, view.state, [m.slot for m in view.members])
        if view.state == "failed":
            self._fail_all(unavailable(f"the cluster failed: {view.cause}", code="cluster_failed"))
        states = {(member.slot, member.incarnation): member.state for member in view.members}
        for key in links.update(view):
            cause = view.cause or f"worker {key[0]} is {states.get(key, 'gone')}"
            self._lose(key, cause)

    def _lose(self, member: MemberKey, cause: str) -> None:
        """A worker gives no more tokens: its requests end with the cause."""
        self.router.remove(member)
        self.stats.pop(member, None)
        for sequence in self.ledger.on_member(member):
            self._fail(sequence.request, unavailable(cause, code="worker_lost"))
        self._pump()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            if self._links is not None:
                self._links.beat()
