"""What `moeray generate` and `moeray status` do, and how the command line talks to a running server."""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx
from rich.markup import escape
from rich.table import Table

from moeray.comm.errors import MoerayError

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 120.0
JSON_BODY = {"content-type": "application/json"}


class ServerError(MoerayError):
    """The server cannot be reached, refused, or is none of ours; the message is its own where it has one."""


def bearer(name: str, key: str | None) -> dict[str, str]:
    """The header that sends a key. Raises `ValueError` that names the option for what a header cannot carry."""
    if key and not (key.isascii() and key.isprintable()):
        raise ValueError(f"{name} is given, must be printable ASCII")
    return {"authorization": f"Bearer {key}"} if key else {}


def encode_fields(fields: Mapping[str, Any]) -> bytes:
    """A request's body. Raises `ValueError` that names the field for what JSON cannot carry."""
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}, must be a finite number")
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} has bytes that are no text at character {error.start}, must be UTF-8") from error
    return json.dumps(fields).encode()


class Connection:
    """To a running server: answers are JSON objects with the fields that are asked for, all else is `ServerError`."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self._url = url
        self._client = client

    def get(self, path: str, *names: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The answer of 200."""
        return self._fields(self._client.get(path, headers=headers), names)

    def get_state(self, path: str, *names: str) -> dict[str, Any]:
        """As `get`; an answer of 503 is a state as well."""
        return self._fields(self._client.get(path), names, accepted=(200, 503))

    def post(self, path: str, fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
        """The answer of 200 or 202; `ValueError` for what cannot be sent."""
        answer = self._client.post(path, content=encode_fields(fields), headers=JSON_BODY)
        return self._fields(answer, names, accepted=(200, 202))

    def events(self, path: str, fields: Mapping[str, Any], name: str) -> Iterator[Any]:
        """This field of each event of a stream, up to its orderly end."""
        body = encode_fields(fields)
        with self._client.stream("POST", path, content=body, headers=JSON_BODY) as answer:
            if answer.status_code != 200 or not _kind(answer).startswith("text/event-stream"):
                answer.read()
                self._fields(answer, (), accepted=())
            for line in answer.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                event = _object(data.encode())
                if (message := _refusal(event)) is not None:
                    raise ServerError(message)
                if name not in event:
                    raise self._foreign(answer)
                yield event[name]
        raise ServerError("the stream ended early")

    def _fields(
        self, answer: httpx.Response, names: Sequence[str], *, accepted: Sequence[int] = (200,)
    ) -> dict[str, Any]:
        body = _object(answer.content)
        if answer.status_code in accepted and body and all(name in body for name in names):
            return body
        if answer.status_code != 200 and (message := _refusal(body)) is not None:
            raise ServerError(message)
        raise self._foreign(answer)

    def _foreign(self, answer: httpx.Response) -> ServerError:
        request = f"{answer.request.method} {answer.request.url.path}"
        said = f"{answer.status_code} and {_kind(answer) or 'no content type'}"
        return ServerError(f"{self._url} is not a moeray server: it answers {request} with {said} of other content")


def _kind(answer: httpx.Response) -> str:
    return str(answer.headers.get("content-type", "")).partition(";")[0].strip()[:100]


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, an empty one if it is something else."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _refusal(body: Mapping[str, Any]) -> str | None:
    """The message of OpenAI's error body; None if it is none."""
    error = body.get("error")
    return str(error["message"]) if isinstance(error, dict) and "message" in error else None


@contextmanager
def connect(url: str, headers: Mapping[str, str]) -> Iterator[Connection]:
    """A connection that sends these headers; all of its failures are `ServerError`."""
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False) as client:
            yield Connection(url, client)
    except httpx.ConnectError:
        raise ServerError(f"nothing answers at {url}; `moeray serve` starts a server") from None
    except httpx.TimeoutException:
        raise ServerError(f"{url} did not answer in time") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"{url}: {error}") from error


def stream(url: str, prompt: str, fields: Mapping[str, Any], *, api_key: str | None) -> Iterator[str]:
    """The text that follows the prompt, piece by piece as the server sends it.

    Raises `ServerError`, and `ValueError` for what cannot be sent.
    """
    body = {"prompt": prompt, "stream": True, **fields}
    with connect(url, bearer("api_key", api_key)) as server:
        for text in server.events("/generate", body, "text"):
            yield str(text)


def status(url: str, *, api_key: str | None, admin_key: str | None = None) -> Mapping[str, Any]:
    """Health, version, topology, and what may be told of models and faults. Raises `ServerError`."""
    admin = bearer("admin_key", admin_key)
    with connect(url, bearer("api_key", api_key)) as server:
        result: dict[str, Any] = {
            "url": url,
            "health": server.get_state("/health", "status"),
            "version": server.get("/version", "version"),
            "topology": server.get("/topology", "epoch", "members", headers=admin),
        }
        with suppress(ServerError):  # its name is for those who may generate
            result["models"] = [model["id"] for model in server.get("/v1/models", "data")["data"]]
        with suppress(ServerError):  # only the controller knows, and it may be away
            result["faults"] = server.get("/faults", "faults", headers=admin)["faults"]
    return result


def _fault_line(fault: Mapping[str, Any]) -> str:
    """A fault in one line."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fault["at"]))
    seconds = fault["recovered_s"]
    outcome = "not over" if seconds is None else f"over after {seconds:.2f} s, as epoch {fault['to_epoch']}"
    return f"last fault: {at}, worker {fault['slot']} {fault['kind']}: {fault['cause']} ({outcome})"


def status_table(state: Mapping[str, Any]) -> Table:
    """For a terminal."""
    topology = state["topology"]
    health = " ".join(f"{key}: {value}" for key, value in state["health"].items() if value is not None)
    table = Table(
        title=f"{', '.join(state.get('models', ['?']))} at {state['url']}, epoch {topology.get('epoch')}",
        caption=escape("\n".join([health, *map(_fault_line, state.get("faults", [])[-1:])])),
    )
    columns = ("slot", "rank", "state", "node", "pid", "num_experts", "num_requests")
    for column in columns:
        table.add_column(column)
    for member in topology.get("members", []):
        table.add_row(*(str(member.get(column)) for column in columns))
    return table
