"""Load generator over HTTP: so many requests, so many at a time; what clients feel, and tokens per second.

    python benchmarks/serve.py --url http://127.0.0.1:8000 --requests 64 --concurrency 16 \\
        --prompt-len 128 --output-len 64 --json result.json

Prompts are random token ids (the same for the same seed), outputs have exactly the length asked for (`ignore_eos`), and
answers are streamed. `--endpoint completions` speaks to any OpenAI-compatible server. TTFT is from the first byte sent
to the first event, ITL between two events of a stream, TPOT (last event - first) / (tokens - 1). Sockets are read
directly, because an HTTP client library costs more CPU per event than the server under test. From a moeray server's
metrics it also says how much lies between the workers' own TTFT and the clients' (`ttft_at_worker_ms`).
"""

import argparse
import asyncio
import contextlib
import json
import random
import resource
import ssl
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import psutil

PERCENTILES = (50, 90, 95, 99)
CONNECT_S = 10.0
MAX_ERROR_CHARS = 300
WORKER_TTFT = "moeray_worker_time_to_first_token_seconds_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to send, to whom. Lengths are (lowest, highest) in tokens, drawn evenly."""

    url: str
    endpoint: str
    model: str | None
    api_key: str | None
    num_requests: int
    concurrency: int
    prompt_len: tuple[int, int]
    output_len: tuple[int, int]
    token_ids: tuple[int, int]
    temperature: float
    seed: int
    request_timeout_s: float
    total_timeout_s: float

    def __post_init__(self) -> None:
        for name, (low, high), least in (
            ("prompt_len", self.prompt_len, 1),
            ("output_len", self.output_len, 1),
            ("token_ids", self.token_ids, 0),
        ):
            if not least <= low <= high:
                raise ValueError(f"{name} is {low}:{high}, must be LOW:HIGH with {least} <= LOW <= HIGH")
        for name, number in (
            ("requests", self.num_requests),
            ("concurrency", self.concurrency),
            ("request_timeout_s", self.request_timeout_s),
            ("total_timeout_s", self.total_timeout_s),
        ):
            if number <= 0:
                raise ValueError(f"{name} is {number}, must be more than 0")


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it; times on the monotonic clock, seconds."""

    sent_s: float = 0.0
    event_times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None


class BadAnswer(Exception):
    """The server answered, but not with the tokens that were asked for."""


def make_bodies(plan: Plan) -> list[bytes]:
    """The request bodies, from the seed alone."""
    rng = random.Random(plan.seed)
    bodies = []
    for num in range(plan.num_requests):
        prompt = [rng.randint(*plan.token_ids) for _ in range(rng.randint(*plan.prompt_len))]
        fields: dict[str, Any] = {
            "max_tokens": rng.randint(*plan.output_len),
            "temperature": plan.temperature,
            "seed": plan.seed + num,
            "ignore_eos": True,
            "stream": True,
        }
        if plan.endpoint == "generate":
            fields["input_ids"] = prompt
        else:
            fields.update(prompt=prompt, stream_options={"include_usage": True})
        if plan.model is not None:
            fields["model"] = plan.model
        bodies.append(json.dumps(fields).encode())
    return bodies


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, names in lower case."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    return int(lines[0].split(" ", 2)[1]), {name.lower(): value for name, value in headers.items()}


async def read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body as it comes, without the chunked encoding."""
    if headers.get("transfer-encoding", "").lower() != "chunked":
        while data := await reader.read(1 << 16):
            yield data
        return
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def read_events(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[tuple[float, bytes]]:
    """The data of each server-sent event, and when it came."""
    rest = b""
    async for data in read_body(reader, headers):
        now = time.perf_counter()
        *blocks, rest = (rest + data).split(b"\n\n")
        for block in blocks:
            yield now, block.removeprefix(b"data: ")


def tokens_of(event: dict[str, Any], endpoint: str) -> int | None:
    """New tokens (/generate), or the total in OpenAI's usage, or None if the event does not say."""
    if "error" in event:
        raise BadAnswer(str(event["error"])[:MAX_ERROR_CHARS])
    if endpoint == "generate":
        return len(event["token_ids"])
    usage = event.get("usage")
    return None if usage is None else int(usage["completion_tokens"])


@contextlib.asynccontextmanager
async def connected(url: SplitResult) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to the server of this URL; its socket is closed when this is left, however that happens."""
    secure = ssl.create_default_context() if url.scheme == "https" else None
    port = url.port or (443 if secure else 80)
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await asyncio.open_connection(url.hostname, port, ssl=secure)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def exchange(plan: Plan, body: bytes, outcome: Outcome) -> None:
    """Send one request and follow its stream to the end."""
    url = urlsplit(plan.url)
    async with connected(url) as (reader, writer):
        path = "/generate" if plan.endpoint == "generate" else "/v1/completions"
        key = f"authorization: Bearer {plan.api_key}\r\n" if plan.api_key else ""
        head = (
            f"POST {url.path.rstrip('/')}{path} HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
            f"{key}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        outcome.sent_s = time.perf_counter()
        writer.write(head.encode() + body)
        status, headers = await read_head(reader)
        if status != 200:
            text = b"".join([data async for data in read_body(reader, headers)])
            raise BadAnswer(f"HTTP {status}: {text[:MAX_ERROR_CHARS].decode(errors='replace')}")
        is_complete = False
        async for now, data in read_events(reader, headers):
            if data == b"[DONE]":
                is_complete = True
                continue
            event = json.loads(data)
            count = tokens_of(event, plan.endpoint)
            if plan.endpoint == "generate":
                outcome.num_tokens += count or 0
            elif count is not None:
                outcome.num_tokens = count
            if plan.endpoint == "generate" or event["choices"]:
                outcome.event_times.append(now)
        if not is_complete:
            raise BadAnswer("the stream ended without [DONE]")


async def one_request(plan: Plan, body: bytes) -> Outcome:
    """An exchange whose failures are part of the result."""
    outcome = Outcome()
    try:
        async with asyncio.timeout(plan.request_timeout_s):
            await exchange(plan, body, outcome)
        wanted = json.loads(body)["max_tokens"]
        if outcome.num_tokens != wanted:
            raise BadAnswer(f"{outcome.num_tokens} tokens came, {wanted} were asked for")
    except TimeoutError:
        outcome.error = f"no answer within {plan.request_timeout_s} s"
    except (OSError, asyncio.IncompleteReadError, ValueError, KeyError, BadAnswer) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


async def run_all(plan: Plan) -> tuple[list[Outcome], float]:
    """All requests, `concurrency` at a time; outcomes and wall time. What is unfinished at the deadline is an error."""
    bodies = make_bodies(plan)
    outcomes = [Outcome(error=f"not finished within {plan.total_timeout_s} s") for _ in bodies]
    waiting = iter(enumerate(bodies))

    async def client() -> None:
        for num, body in waiting:
            outcomes[num] = await one_request(plan, body)

    started = time.perf_counter()
    clients = [asyncio.create_task(client()) for _ in range(min(plan.concurrency, len(bodies)))]
    _, late = await asyncio.wait(clients, timeout=plan.total_timeout_s)
    for task in late:
        task.cancel()
    results = await asyncio.gather(*clients, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return outcomes, time.perf_counter() - started


def worker_ttft(plan: Plan) -> tuple[float, float] | None:
    """Sum (seconds) and count of the workers' own times to first token, from a moeray server's metrics; else None."""
    totals: dict[str, float] = {}
    try:
        with urllib.request.urlopen(plan.url.rstrip("/") + "/metrics", timeout=CONNECT_S) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(WORKER_TTFT):
                    name, value = line.removeprefix(WORKER_TTFT).split(" ")
                    totals[name] = float(value)
    except (OSError, ValueError):
        return None
    return (totals["sum"], totals["count"]) if {"sum", "count"} <= totals.keys() else None


def added_ttft(
    outcomes: Sequence[Outcome], before: tuple[float, float] | None, after: tuple[float, float] | None
) -> dict[str, float] | None:
    """What lies between the workers' own time to first token and the clients', on average.

    None if the server does not tell, or if it had other requests meanwhile.
    """
    first = [outcome.event_times[0] - outcome.sent_s for outcome in outcomes if outcome.event_times]
    if before is None or after is None or not first or after[1] - before[1] != len(first):
        return None
    at_worker = (after[0] - before[0]) / len(first)
    added = sum(first) / len(first) - at_worker
    return {"worker_mean": round(at_worker * 1e3, 3), "added_mean": round(added * 1e3, 3)}


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (nearest rank) and maximum in milliseconds; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {f"p{p}": ordered[max(0, -(-len(ordered) * p // 100) - 1)] for p in PERCENTILES}
    numbers = {"mean": sum(ordered) / len(ordered), **ranks, "max": ordered[-1]}
    return {name: round(value * 1e3, 3) for name, value in numbers.items()}


def report(plan: Plan, outcomes: Sequence[Outcome], wall_s: float, busy_share: float) -> dict[str, Any]:
    """Everything that was measured, ready for JSON."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    gaps = [b - a for o in good for a, b in zip(o.event_times, o.event_times[1:], strict=False)]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    num_tokens = sum(outcome.num_tokens for outcome in good)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    return {
        "plan": {name: value for name, value in asdict(plan).items() if name != "api_key"},
        "wall_s": round(wall_s, 3),
        "completed": len(good),
        "failed": len(errors),
        "errors": sorted(set(errors))[:10],
        "output_tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / wall_s, 2),
        "requests_per_s": round(len(good) / wall_s, 3),
        "ttft_ms": summary([o.event_times[0] - o.sent_s for o in good if o.event_times]),
        "itl_ms": summary(gaps),
        "tpot_ms": summary(
            [
                (o.event_times[-1] - o.event_times[0]) / (o.num_tokens - 1)
                for o in good
                if o.num_tokens > 1 and o.event_times
            ]
        ),
        "longest_gap_ms": round(max(gaps) * 1e3, 3) if gaps else None,
        "generator_cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
        "machine_busy_share": round(busy_share, 3),
    }


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Load generator for moeray and OpenAI-compatible servers.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--endpoint", choices=("generate", "completions"), default="generate")
    parser.add_argument("--model", help="the served model's name, if the server wants one")
    parser.add_argument("--api-key")
    parser.add_argument("--requests", type=int, default=32, help="how many in all")
    parser.add_argument("--concurrency", type=int, default=8, help="how many at a time")
    parser.add_argument("--prompt-len", type=_range, default=(64, 64), metavar="N|LOW:HIGH", help="tokens")
    parser.add_argument("--output-len", type=_range, default=(32, 32), metavar="N|LOW:HIGH", help="tokens")
    parser.add_argument("--token-ids", type=_range, default=(10, 1000), metavar="LOW:HIGH", help="prompt vocabulary")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--request-timeout-s", type=float, default=120.0)
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for the whole run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; 0 if every request was answered in full."""
    args = _arguments(argv)
    try:
        plan = Plan(
            url=args.url,
            endpoint=args.endpoint,
            model=args.model,
            api_key=args.api_key,
            num_requests=args.requests,
            concurrency=args.concurrency,
            prompt_len=args.prompt_len,
            output_len=args.output_len,
            token_ids=args.token_ids,
            temperature=args.temperature,
            seed=args.seed,
            request_timeout_s=args.request_timeout_s,
            total_timeout_s=args.timeout_s,
        )
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    before = worker_ttft(plan)
    psutil.cpu_percent()
    outcomes, wall_s = asyncio.run(run_all(plan))
    result = report(plan, outcomes, wall_s, psutil.cpu_percent() / 100)
    result["ttft_at_worker_ms"] = added_ttft(outcomes, before, worker_ttft(plan))
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 0 if result["failed"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
