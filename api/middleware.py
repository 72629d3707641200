"""What happens to every request before a handler sees it. Plain ASGI: Starlette's own base class costs four
times as much.
"""

import hmac
import re
import time
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeray.api.errors import ApiError, too_large, unauthorized

_SANE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_GENERATION_PATHS = ("/v1/", "/generate", "/tokenize", "/detokenize")
_CONTROL_PATHS = ("/topology", "/scale", "/rebalance", "/operations", "/faults", "/is_scaling_elastic_ep")


def _header(scope: Scope, name: bytes) -> str | None:
    value: bytes | None = next((value for key, value in scope["headers"] if key == name), None)
    return None if value is None else value.decode("latin-1")


class RequestId:
    """Gives each request an id (the client's own if it is sane) and the time of its arrival, and answers with
    the id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        request_id = given if given is not None and _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        scope["moeray.request_id"] = request_id
        scope["moeray.arrived_s"] = time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


class KeyGuard:
    """Bearer keys: one for generation, one for control; without a key that part is open."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, admin_key: str | None) -> None:
        self._app = app
        self._api_key = api_key
        self._admin_key = admin_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            key, name = self._key_for(scope["path"])
            if key is not None and (error := _check_bearer(_header(scope, b"authorization"), key, name)):
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _key_for(self, path: str) -> tuple[str | None, str]:
        if path.startswith(_CONTROL_PATHS):
            return self._admin_key, "admin key"
        return (self._api_key if path.startswith(_GENERATION_PATHS) else None), "API key"


def _check_bearer(header: str | None, key: str, name: str) -> ApiError | None:
    scheme, _, given = (header or "").partition(" ")
    if not given or scheme.lower() != "bearer":
        return unauthorized(f"the {name} is missing, send it as 'Authorization: Bearer KEY'")
    if not hmac.compare_digest(given.strip().encode("utf-8"), key.encode("utf-8")):
        return unauthorized(f"the {name} is wrong")
    return None


class BodyLimit:
    """Refuses bodies beyond `max_bytes`, by the header before anything is read, and while reading without one."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = _header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > self._max_bytes:
            await self._refusal().response()(scope, receive, send)
            return
        num_read = 0

        async def receive_limited() -> Message:
            nonlocal num_read
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_bytes:
                raise self._refusal()
            return message

        await self._app(scope, receive_limited, send)

    def _refusal(self) -> ApiError:
        return too_large(f"the body is larger than {self._max_bytes} bytes (max_body_bytes)")


class RefusalCounter:
    """Reports the status of answers to generation that are errors and were not streams."""

    def __init__(self, app: ASGIApp, *, on_refused: Callable[[int], None]) -> None:
        self._app = app
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in (400, 401, 404, 413, 429):
                self._on_refused(message["status"])
            await send(message)

        is_counted = scope["type"] == "http" and scope["path"].startswith(_GENERATION_PATHS)
        await self._app(scope, receive, count if is_counted else send)
