"""What a client sees when something is refused or goes wrong: one exception, one body, OpenAI's shape.

    ApiError                  status, message, type, param, code; raised from the socket to the ledger
    ├── invalid()             400 invalid_request_error, names the field in `param`
    ├── unauthorized()        401 authentication_error
    ├── not_found()           404 invalid_request_error
    ├── not_in_time()         408 timeout_error: an operation was rolled back at its deadline
    ├── conflict()            409 conflict_error: another operation runs
    ├── too_large()           413 invalid_request_error
    ├── not_json()            415 invalid_request_error: control takes bodies that say they are JSON
    ├── queue_full()          429 rate_limit_error with Retry-After
    ├── failed()              500 server_error: an operation was rolled back, or ended badly
    ├── unavailable()         503 server_error with Retry-After: starting, draining, recovering, failed
    ├── no_controller()       503 ... the controller does not answer
    └── timed_out()           504 timeout_error

The branches are functions and not subclasses: nobody catches one branch only.
"""

import logging
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
CLIENT_CLOSED = 499  # nginx's number


class ApiError(Exception):
    """A refusal or a failure as the client sees it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON object `{"error": {...}}`, as OpenAI's clients parse it; also the data of an SSE error event."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, headers=self.headers, media_type="application/json")


def invalid(message: str, *, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, kind="invalid_request_error", param=param, code=code)


def not_found(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(404, message, kind="invalid_request_error", param=param, code=code)


def unauthorized(message: str) -> ApiError:
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)


def not_in_time(message: str) -> ApiError:
    return ApiError(408, message, kind="timeout_error", code="operation_deadline")


def conflict(message: str, *, location: str) -> ApiError:
    """`location` is where the other operation can be followed."""
    return ApiError(409, message, kind="conflict_error", code="operation_running", headers={"location": location})


def too_large(message: str) -> ApiError:
    return ApiError(413, message, kind="invalid_request_error", code="request_too_large")


def not_json(message: str) -> ApiError:
    return ApiError(415, message, kind="invalid_request_error", param="content-type", code="unsupported_media_type")


def queue_full(message: str) -> ApiError:
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)


def failed(message: str, *, code: str) -> ApiError:
    return ApiError(500, message, kind="server_error", code=code)


def unavailable(message: str, *, code: str = "unavailable") -> ApiError:
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return ApiError(503, message, kind="server_error", code=code, headers=headers)


def no_controller(error: Exception, advice: str = "") -> ApiError:
    return unavailable(f"the controller does not answer: {error}{advice}", code="controller_unavailable")


def timed_out(message: str) -> ApiError:
    return ApiError(504, message, kind="timeout_error", code="timeout")


_KINDS_OF_STATUS = {404: "not_found", 405: "method_not_allowed"}


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = _KINDS_OF_STATUS.get(error.status_code)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return ApiError(error.status_code, message, kind=kind, code=code, headers=error.headers).response()


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """The client has gone in the middle of its body: nobody reads this, and nothing is wrong here."""
    return Response(status_code=CLIENT_CLOSED)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed: %r", request.method, request.url.path, error)
    response = ApiError(500, "internal error", kind="server_error", code="internal_error").response()
    if request_id := request.scope.get("moeray.request_id"):
        response.headers["x-request-id"] = request_id
    return response


def install_error_handlers(app: FastAPI) -> None:
    """Every answer that is no success has OpenAI's error body, 404 and 405 included."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)
