"""What `moeray generate` and `moeray status` do, and how the command line talks to a running server."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
from rich.table import Table

from moeray.comm.errors import MoerayError

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 120.0


class ServerError(MoerayError):
    """The server cannot be reached, or refused; the message is its own."""


def _bearer(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@contextmanager
def http_client(url: str, key: str | None) -> Iterator[httpx.Client]:
    """A connection that sends this key; all of its failures are `ServerError`."""
    headers = _bearer(key)
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False) as client:
            yield client
    except httpx.ConnectError:
        raise ServerError(f"nothing answers at {url}; `moeray serve` starts a server") from None
    except httpx.TimeoutException:
        raise ServerError(f"{url} did not answer in time") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"{url}: {error}") from error


def error_message(body: bytes) -> str:
    """OpenAI's error body in one line."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def stream(url: str, prompt: str, fields: Mapping[str, Any], *, api_key: str | None) -> Iterator[str]:
    """The text that follows the prompt, piece by piece as the server sends it. Raises `ServerError`."""
    body = {"prompt": prompt, "stream": True, **fields}
    with http_client(url, api_key) as client, client.stream("POST", "/generate", json=body) as answer:
        if answer.status_code != 200:
            raise ServerError(error_message(answer.read()))
        for line in answer.iter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ServerError(error_message(data.encode()))
            yield event["text"]
    raise ServerError("the stream ended early")


def status(url: str, *, api_key: str | None, admin_key: str | None = None) -> Mapping[str, Any]:
    """Health, version and topology. Raises `ServerError`."""
    with http_client(url, api_key) as client:
        answers = {name: client.get(f"/{name}") for name in ("health", "version")}
        answers["topology"] = client.get("/topology", headers=_bearer(admin_key))
        models = client.get("/v1/models")
    result: dict[str, Any] = {"url": url}
    for name, answer in answers.items():
        if answer.status_code not in (200, 503):
            raise ServerError(f"{url}/{name}: {error_message(answer.content)}")
        result[name] = answer.json()
    if models.status_code == 200:
        result["models"] = [model["id"] for model in models.json()["data"]]
    return result


def status_table(state: Mapping[str, Any]) -> Table:
    """For a terminal."""
    topology = state["topology"]
    table = Table(
        title=f"{', '.join(state.get('models', ['?']))} at {state['url']}, epoch {topology.get('epoch')}",
        caption=" ".join(f"{key}: {value}" for key, value in state["health"].items() if value is not None),
    )
    columns = ("slot", "rank", "state", "node", "pid", "num_experts", "num_requests")
    for column in columns:
        table.add_column(column)
    for member in topology.get("members", []):
        table.add_row(*(str(member.get(column)) for column in columns))
    return table
