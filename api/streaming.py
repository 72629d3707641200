"""Writing an answer to the client's socket, whole or as server-sent events, and noticing when the client leaves."""

import asyncio
import time

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moeray.api.formats import DONE_EVENT, Format, event
from moeray.api.front_end import FrontEnd
from moeray.api.ledger import RequestEntry
from moeray.api.metrics import Metrics

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would otherwise collect the stream before it passes it on.
    (b"x-accel-buffering", b"no"),
]
_JSON_HEADERS = [(b"content-type", b"application/json")]


class Reply(Response):
    """The answer to a request that the front end has taken; when it ends, for whatever reason, so does the
    request.

    A stream is written at most once per wake-up, that is once per step of its workers. Headers wait for the
    first token, so a request that fails before it gets a proper status; later errors become an event in
    OpenAI's shape.
    """

    def __init__(
        self, front_end: FrontEnd, metrics: Metrics, request: RequestEntry, form: Format, *, stream: bool
    ) -> None:
        super().__init__()
        self._front_end = front_end
        self._metrics = metrics
        self._request = request
        self._format = form
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            write = self._write_stream if self._stream else self._write_whole
            await write(scope, receive, send)
        finally:
            watcher.cancel()
            self._front_end.finish(self._request)

    async def _watch(self, receive: Receive) -> None:
        """Nobody reads the answer any more: free the workers at once."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._front_end.cancel(self._request)

    async def _write_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._request
        while not request.is_done:
            await self._next_wake()
        if request.is_cancelled:
            return
        if request.error is not None:
            await request.error.response()(scope, receive, send)
            return
        body = self._format.whole(request)
        headers = [*_JSON_HEADERS, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _write_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._request
        is_started = False
        while True:
            await self._next_wake()
            if request.is_cancelled:
                return
            if request.error is not None and not is_started:
                await request.error.response()(scope, receive, send)
                return
            chunk, is_last = self._new_events()
            if not chunk:
                continue
            if not is_started:
                is_started = True
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                self._metrics.on_first_write(request, time.monotonic())
            await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})
            if is_last:
                return

    async def _next_wake(self) -> None:
        # No time-out here: request_timeout_s, the watcher and the loss of a worker all end the request and
        # set it.
        await self._request.waker.wait()
        self._request.waker.clear()

    def _new_events(self) -> tuple[bytes, bool]:
        """All that is new since the last write, and whether that is the end of the stream."""
        request = self._request
        parts: list[bytes] = []
        for sequence in request.sequences:
            delta = sequence.take_delta()
            if delta is not None:
                parts.append(self._format.chunk(sequence, delta))
        if request.is_done:
            parts.append(event(request.error.body()) if request.error else self._format.tail(request))
            parts.append(DONE_EVENT)
        return b"".join(parts), request.is_done
