"""No request that follows the server's own description, or nearly does, makes it fail: 500 never comes."""

import json
import logging
import socket
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from moeray.api.links import LinkFactory
from moeray.api.scale_schemas import RebalanceFields, ScaleElasticEPFields, ScaleFields
from moeray.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, GenerateRequest, TokenizeRequest
from moeray.api.server import create_app
from moeray.api.settings import ServerSettings
from moeray.comm.sockets import new_key_pair
from moeray.elastic.view import OperationView, RebalanceRequest, ScaleRequest
from tests.support.api_control import FakeControl, make_view

NUM_EXAMPLES = 300
MAX_FIELDS = 4
MODELS: dict[str, type[BaseModel]] = {
    "/generate": GenerateRequest,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/scale": ScaleFields,
    "/rebalance": RebalanceFields,
    "/scale_elastic_ep": ScaleElasticEPFields,
}
# With these, more of the other fields are looked at, and are read.
GOOD: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "the", "max_tokens": 2},
    "/v1/completions": {"prompt": "the"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the"}], "max_tokens": 2},
    "/scale": {"workers": 2},
}
WORDS = ("tiny", "the quick", "user", "text", "", "\x00", "\u202e", "<|end|>", "{{ 1 }}", "1", "NaN")
TEXT = st.sampled_from(WORDS) | st.text(max_size=12)
INTEGERS = st.integers(0, 4) | st.integers(-2, 600) | st.integers()
NUMBERS = st.sampled_from([0, 1, 0.5, 1e-9, -0.0, 1e308]) | st.floats()
ANYTHING = st.recursive(
    st.none() | st.booleans() | INTEGERS | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)

Schema = Mapping[str, Any]


def values(schema: Schema, definitions: Mapping[str, Schema]) -> st.SearchStrategy[Any]:
    """Values that a JSON schema allows; small ones more often. What it does not say can be anything."""
    if "$ref" in schema:
        return values(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if branches := schema.get("anyOf") or schema.get("oneOf"):
        return st.one_of([values(branch, definitions) for branch in branches])
    match schema.get("type"):
        case "object":
            return objects(schema, definitions)
        case "array":
            return st.lists(
                values(schema.get("items", {}), definitions), min_size=schema.get("minItems", 0), max_size=4
            )
        case "string":
            return st.from_regex(schema["pattern"]) if "pattern" in schema else TEXT
        case "integer":
            return INTEGERS
        case "number":
            return NUMBERS | INTEGERS
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return ANYTHING


def objects(schema: Schema, definitions: Mapping[str, Schema]) -> st.SearchStrategy[dict[str, Any]]:
    """What is required and a few of the other fields; or any fields, where the schema names none."""
    properties = {name: values(field, definitions) for name, field in schema.get("properties", {}).items()}
    if not properties:
        inner = schema.get("additionalProperties")
        return st.dictionaries(TEXT, values(inner if isinstance(inner, dict) else {}, definitions), max_size=3)
    required = {name: properties[name] for name in schema.get("required", ())}
    others = st.lists(st.sampled_from(sorted(properties)), max_size=MAX_FIELDS, unique=True)
    return others.flatmap(
        lambda names: st.fixed_dictionaries({**required, **{name: properties[name] for name in names}})
    )


def bodies(path: str) -> st.SearchStrategy[bytes]:
    """As the path's model describes them, sometimes with a field that is anything; now and then no JSON."""
    if path not in MODELS:
        return st.just(b"") | st.binary(max_size=20)
    schema = MODELS[path].model_json_schema()
    described = values(schema, schema.get("$defs", {}))
    names = st.sampled_from([*sorted(schema["properties"]), "n", "best_of", "tools", "odd"])
    odd = st.tuples(described, st.dictionaries(names, ANYTHING, max_size=1)).map(lambda both: {**both[0], **both[1]})
    good = described.map(lambda fields: {**fields, **GOOD.get(path, {})})
    return (described | odd | good | good).map(lambda body: json.dumps(body).encode()) | st.binary(max_size=20)


def described_requests(model_path: Path) -> st.SearchStrategy[tuple[str, str, bytes]]:
    """(method, path, body) of every operation in the application's OpenAPI description."""
    app_settings = ServerSettings(model_path=str(model_path), served_name="tiny")
    control = FakeControl(make_view(()), new_key_pair())
    app = create_app(app_settings, control, link_factory=cast(LinkFactory, object()))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Duplicate Operation ID")  # GET and HEAD share a handler
        paths = app.openapi()["paths"]
    assert set(MODELS) <= set(paths)
    routes = [(method.upper(), path) for path, methods in sorted(paths.items()) for method in sorted(methods)]
    often = [route for route in routes if route[1] in MODELS]
    return st.one_of(
        [st.tuples(st.just(method), filled(path), bodies(path)) for method, path in [*routes, *often, *often]]
    )


def filled(path: str) -> st.SearchStrategy[str]:
    """The path with something in the place of its parameter."""
    before, brace, _ = path.partition("{")
    if not brace:
        return st.just(path)
    return (TEXT | st.text(max_size=300)).map(lambda text: before + "".join(f"%{byte:02x}" for byte in text.encode()))


def finish_at_once(control: FakeControl) -> None:
    """Every operation is done as soon as it has begun."""
    begin_scale, begin_rebalance = control.scale, control.rebalance

    def finished(view: OperationView) -> OperationView:
        if control.running is not None:
            control.go_on("switched", "retired", outcome="done")
        return view

    async def scale(request: ScaleRequest) -> OperationView:
        return finished(await begin_scale(request))

    async def rebalance(request: RebalanceRequest) -> OperationView:
        return finished(await begin_rebalance(request))

    control.scale, control.rebalance = scale, rebalance  # type: ignore[method-assign]


def test_no_request_in_the_words_of_the_description_makes_the_server_fail(
    start_server: Any, model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(2)
    finish_at_once(server.control)
    for worker in server.workers:
        worker.step_s = 0.0
    statuses: Counter[int] = Counter()

    @settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, database=None)
    @given(request=described_requests(model_path))
    def send(request: tuple[str, str, bytes]) -> None:
        method, path, body = request
        headers = {"content-type": "application/json"}
        answer = http.request(method, path, content=body, headers=headers)
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400 and method != "HEAD":
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "internal_error" not in answer.text

    with server.client() as http, caplog.at_level(logging.ERROR):
        send()
    assert not caplog.records
    assert statuses[200] >= 20, statuses
    assert statuses[400] >= 20, statuses


def test_a_client_that_leaves_within_its_body_is_no_failure(
    start_server: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(1)
    url = httpx.URL(server.url)
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            with socket.create_connection((url.host, url.port or 80), timeout=10.0) as connection:
                connection.sendall(head)
        assert server.post("/generate", {"prompt": "the", "max_tokens": 1}).status_code == 200
        until(lambda: not server.front_end.ledger.requests, "the ledger is empty")
    assert not caplog.records
