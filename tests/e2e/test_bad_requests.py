"""A thousand bad requests, one after the other and many at a time, change nothing for the good one after them."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.serving import Serve, client, gauges, poll

SEED = 7
NUM_HTTP = 800
NUM_LARGE = 20
NUM_RAW = 200
AT_ONCE = 16
HEALTHY_S = 1.0
ANSWER_S = 20.0
GENERATION = ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
CONTROL = ("/scale", "/scale_elastic_ep", "/rebalance", "/is_scaling_elastic_ep")
GET_ONLY = ("/health", "/ready", "/version", "/topology", "/operations", "/faults", "/metrics", "/v1/models")
METHODS = ("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
FIELDS = (
    *("prompt", "input_ids", "messages", "model", "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k"),
    *("min_p", "seed", "stop", "stop_token_ids", "logprobs", "top_logprobs", "logit_bias", "stream", "stream_options"),
    *("echo", "best_of", "tools", "chat_template_kwargs", "ignore_eos", "presence_penalty", "tokens", "workers"),
    *("retire", "operation_id", "deadline_s", "new_data_parallel_size", "new_ep_size", "drain_timeout", "é\x00"),
)
# Good enough to get as far as the field that is wrong.
BASES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "a", "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
GREEDY: dict[str, Any] = {"prompt": "It was a dark evening, and", "max_tokens": 40, "temperature": 0.0}


@dataclass(frozen=True, slots=True)
class Bad:
    """A request that must be refused; `kind` says what is bad about it."""

    kind: str
    method: str
    path: str
    body: bytes = b""
    content_type: str = "application/json"


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """Something of the wrong type, or absurd."""
    simple: tuple[Any, ...] = (
        *(True, -1, 10**400, -(10**30), 1 << 63, 1e308, float("nan"), float("inf"), float("-inf"), 0.5),
        *("", "x" * 5000, "\x00", "\ud800", "‮\U0001f600", "NaN", "1e999", "null", [], {}, [[]], [None], [{}]),
    )
    pick = rng.random()
    if depth < 3 and pick < 0.2:
        return [odd_value(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    if depth < 3 and pick < 0.4:
        return {rng.choice(FIELDS): odd_value(rng, depth + 1) for _ in range(rng.randint(1, 3))}
    return rng.choice(simple)


def wrong_field(rng: random.Random) -> Bad:
    """A field that no request may have like this, beside good ones."""
    path = rng.choice(GENERATION)
    wrong = {"max_tokens": [10**400], "seed": -1.5, "prompt": {"a": 1}, "messages": 1, "model": ["demo"], "tokens": "1"}
    name = rng.choice(sorted(wrong))
    value = rng.choice((wrong[name], {"x": odd_value(rng)}))
    return Bad("wrong field", "POST", path, json.dumps({**BASES[path], name: value}).encode())


def wrong_number(rng: random.Random) -> Bad:
    name = rng.choice(
        ("max_tokens", "temperature", "top_p", "top_k", "seed", "min_p", "presence_penalty", "min_tokens")
    )
    number = rng.choice(
        (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e308", b"9" * 5000, b"-" + b"9" * 400, b"0x1")
    )
    path = rng.choice(GENERATION[:3])
    base = json.dumps(BASES[path] | {"max_completion_tokens": None}).encode().replace(b', "max_tokens": 1', b"")
    return Bad("wrong number", "POST", path, base[:-1] + b', "' + name.encode() + b'": ' + number + b"}")


def odd_object(rng: random.Random) -> Bad:
    """Any fields with any values, and one that nobody knows."""
    path = rng.choice((*GENERATION, *CONTROL[:3]))
    odd = {rng.choice(FIELDS): odd_value(rng) for _ in range(rng.randint(1, 6))}
    return Bad("odd object", "POST", path, json.dumps({**BASES.get(path, {}), **odd, "nobody_knows_this": 1}).encode())


def broken_json(rng: random.Random) -> Bad:
    """A good body with some bytes changed until it is no JSON object."""
    path = rng.choice((*GENERATION, *CONTROL[:3]))
    body = bytearray(json.dumps({**BASES.get(path, {"workers": 1}), "stop": ["x", "é"]}).encode())
    while True:
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        if rng.random() < 0.3:
            del body[rng.randrange(len(body)) :]
        if not body or not _is_object(bytes(body)):
            return Bad("broken JSON", "POST", path, bytes(body))


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


def not_utf8(rng: random.Random) -> Bad:
    path = rng.choice((*GENERATION, *CONTROL[:3]))
    bad = rng.choice((b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\xaf", b"\x80"))
    return Bad("invalid UTF-8", "POST", path, b'{"prompt": "' + bad + b'", "workers": 1}')


def deep(rng: random.Random) -> Bad:
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    depth = rng.choice((200, 5_000, 100_000))
    inner = opening * depth + b"1" + rng.choice((b"", closing * depth))
    body = rng.choice((inner, b'{"prompt": ' + inner + b"}", b'{"chat_template_kwargs": ' + inner + b"}"))
    return Bad("deep", "POST", rng.choice((*GENERATION, *CONTROL[:3])), body)


def unknown_model(rng: random.Random) -> Bad:
    path = rng.choice(GENERATION)
    name = rng.choice(("", "other", "demo ", "DEMO", "../demo", "x" * 3000, "\x00", "demo\n"))
    return Bad("unknown model", "POST", path, json.dumps({**BASES[path], "model": name}).encode())


def too_much(rng: random.Random) -> Bad:
    """More tokens, answers, entries or words than there may be."""
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/generate", {"input_ids": [1] * rng.choice((1_025, 200_000))}),
        ("/generate", {"input_ids": [rng.choice((4096, 1 << 31, -1))]}),
        ("/generate", {"prompt": "a", "max_tokens": rng.choice((1024, 1 << 31, 10**20))}),
        ("/generate", {"prompt": "a", "stop": ["x"] * 10_000}),
        ("/generate", {"prompt": "a", "logit_bias": {str(number): 1 for number in range(5_000)}}),
        ("/generate", {f"field_{number}": 1 for number in range(5_000)}),
        ("/v1/completions", {"prompt": "a", "n": rng.choice((0, 129, 10**9))}),
        ("/v1/completions", {"prompt": ["a"] * 5_000}),
        ("/v1/completions", {"prompt": [[]] * 100_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 5_000}),
        ("/v1/chat/completions", {"messages": [{}] * 100_000}),
        ("/detokenize", {"tokens": [1 << 30]}),
        ("/scale", {"workers": rng.choice((0, -1, 5, 10**30))}),
        ("/scale", {"retire": [rng.choice((-1, 99, 10**30))]}),
        ("/scale_elastic_ep", {"new_ep_size": rng.choice((0, 99))}),
    )
    path, fields = rng.choice(bodies)
    return Bad("too much", "POST", path, json.dumps(fields).encode())


def too_large(rng: random.Random) -> Bad:
    return Bad("too large", "POST", rng.choice((*GENERATION, *CONTROL[:3])), b" " * ((8 << 20) + rng.randint(1, 99)))


def wrong_type(rng: random.Random) -> Bad:
    kinds = ("text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx", "é" * 9)
    kind = rng.choice(kinds)
    if rng.random() < 0.5:
        return Bad("wrong type", "POST", rng.choice(CONTROL[:3]), b'{"workers": 2}', kind)
    body = b'--x\r\ncontent-disposition: form-data; name="prompt"\r\n\r\na\r\n--x--\r\n'
    return Bad("wrong type", "POST", rng.choice(GENERATION), body, kind)


def nowhere(rng: random.Random) -> Bad:
    paths = ("/nowhere", "/generate/", "//", "/v1", "/%00", "/..%2f..%2fetc/passwd", "/v1/models/" + "x" * 4000, "/é")
    unknown = ("/operations/none", "/operations/..", "/operations/%0a", "/v1/models/other")
    return Bad("nowhere", rng.choice(("GET", "POST")) if rng.random() < 0.5 else "GET", rng.choice(paths + unknown))


def wrong_method(rng: random.Random) -> Bad:
    if rng.random() < 0.5:
        return Bad("wrong method", rng.choice((*METHODS, "POST")), rng.choice(GET_ONLY))
    return Bad("wrong method", rng.choice((*METHODS, "GET")), rng.choice((*GENERATION, *CONTROL[:3])))


MAKERS: tuple[Callable[[random.Random], Bad], ...] = (
    *(wrong_field, wrong_number, odd_object, broken_json, not_utf8, deep, unknown_model, too_much, wrong_type),
    *(nowhere, wrong_method),
)


def bad_requests(rng: random.Random) -> list[Bad]:
    large = [too_large(rng) for _ in range(NUM_LARGE)]
    return [*large, *(MAKERS[number % len(MAKERS)](rng) for number in range(NUM_HTTP - NUM_LARGE))]


def malformed(rng: random.Random) -> bytes:
    """Bytes on a connection that are no good HTTP, or end in the middle."""
    good = b'POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n{"prompt": "a",'
    kinds: tuple[bytes, ...] = (
        rng.randbytes(rng.randint(1, 400)),
        good[: rng.randrange(len(good))],
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET\r\n\r\n",
        b"\r\n" * 50,
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /scale HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"POST /generate HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 5_000 + b"\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\x00: \xff\r\n\r\n",
        b"GET /health HTTP/1.1\nhost: x\n\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    )
    return rng.choice(kinds)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("serve"), "demo", "--workers", "2", "--kv-cache-gib", "0.05") as serve:
        serve.url()
        yield serve


def is_openai(answer: httpx.Response) -> bool:
    """Whether the body is `{"error": {...}}` as OpenAI's clients parse it."""
    try:
        error = answer.json()["error"]
        return set(error) == {"message", "type", "param", "code"} and bool(error["message"])
    except (ValueError, KeyError, TypeError):
        return False


class Watched:
    """A server that is asked for its health all the time."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self.url = url
        self.http = http
        self.slowest_s = 0.0
        self.statuses: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def watch(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S, trust_env=False) as http:
            while True:
                began = asyncio.get_running_loop().time()
                answer = await http.get("/health")
                self.slowest_s = max(self.slowest_s, asyncio.get_running_loop().time() - began)
                if answer.status_code != 200:
                    self.wrong.append(f"/health {answer.status_code} {answer.text}")
                await asyncio.sleep(0.05)

    async def send(self, bad: Bad) -> None:
        content_type = httpx.Headers({b"content-type": bad.content_type.encode()})
        try:
            answer = await self.http.request(bad.method, bad.path, content=bad.body, headers=content_type)
        except httpx.HTTPError as failure:
            self.wrong.append(f"{str(bad)[:300]}: {failure!r}")
            return
        self.statuses[f"{bad.kind}: {answer.status_code}"] += 1
        if not 400 <= answer.status_code < 500:
            self.wrong.append(f"{str(bad)[:1000]} is not refused: {answer.status_code} {answer.text[:300]}")
        # What is no HTTP for the server below the application is refused by it, in plain text.
        elif answer.text != "Invalid HTTP request received." and not is_openai(answer):
            self.wrong.append(f"{str(bad)[:300]} has not OpenAI's error body: {answer.text[:300]}")

    async def send_raw(self, data: bytes, *, is_rude: bool) -> None:
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        said = b""
        try:
            writer.write(data)
            if is_rude:
                self.statuses["raw: broken off"] += 1
                await asyncio.sleep(0.005)
                writer.transport.abort()
                return
            writer.write_eof()
            async with asyncio.timeout(ANSWER_S):
                said = await reader.read(1 << 20)
        except ConnectionError:
            pass
        except TimeoutError:
            self.wrong.append(f"nothing within {ANSWER_S:g} s: {data[:200]!r}")
        finally:
            writer.close()
        status = said.split(b" ", 2)[1:2]
        self.statuses[f"raw: {status[0].decode() if status else 'closed'}"] += 1
        if status and status[0].startswith(b"5"):
            self.wrong.append(f"{data[:200]!r}: {said[:300]!r}")


async def send_all(url: str) -> Watched:
    """All of them, some at a time, in an order that depends on the seed only."""
    rng = random.Random(SEED)
    every: list[Bad | tuple[bytes, bool]] = [*bad_requests(rng)]
    every += [(malformed(rng), rng.random() < 0.3) for _ in range(NUM_RAW)]
    rng.shuffle(every)
    left = iter(every)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, trust_env=False) as http:
        watched = Watched(url, http)

        async def send_some() -> None:
            for bad in left:
                await (watched.send(bad) if isinstance(bad, Bad) else watched.send_raw(bad[0], is_rude=bad[1]))

        watch = asyncio.create_task(watched.watch())
        await asyncio.gather(*(send_some() for _ in range(AT_ONCE)))
        assert not watch.done()
        watch.cancel()
    return watched


def test_a_thousand_bad_requests_change_nothing(served: Serve) -> None:
    with client(served.url()) as http:
        before = http.post("/generate", json=GREEDY).json()
        topology = http.get("/topology").json()
        watched = asyncio.run(send_all(served.url()))
        assert not watched.wrong, "\n".join([f"{len(watched.wrong)} wrong", *watched.wrong[:20]])
        assert watched.slowest_s < HEALTHY_S, f"/health took {watched.slowest_s:.2f} s"
        assert watched.statuses.total() == NUM_HTTP + NUM_RAW
        after = http.post("/generate", json=GREEDY).json()
        assert after["token_ids"] == before["token_ids"]
        assert http.get("/topology").json() == topology
        assert http.get("/operations").json() == {"operations": []}
        assert http.get("/faults").json() == {"faults": []}
        poll("the workers are idle", lambda: not any(gauges(http, "worker_num_running").values()), 5.0)
        assert gauges(http, "worker_num_free_blocks") == gauges(http, "worker_num_blocks")
    (log,) = served.temporary.glob("moeray-*/front-end.log")
    assert not [line for line in log.read_text().splitlines() if "Traceback" in line or " ERROR " in line]
