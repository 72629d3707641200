"""Clients that stream the same requests over and over, keep every token with its time, and compare with a reference."""

import asyncio
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from benchmarks.serve import connected, read_body, read_events, read_head

STREAM_S = 120.0


@dataclass(slots=True)
class Stream:
    """One answer: tokens, when it was asked for and when each event came (perf_counter), and what went wrong."""

    number: int
    began: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str | None = None

    def gaps(self) -> list[tuple[float, float]]:
        """(start, seconds) of each pause between two events."""
        return [(a, b - a) for a, b in zip(self.times, self.times[1:], strict=False)]

    def waits(self) -> list[tuple[float, float]]:
        """(start, seconds) of each pause, the one before the first event included."""
        return [(a, b - a) for a, b in zip([self.began, *self.times], self.times, strict=False)]


def requests(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Half greedy, half seeded, prompts of different lengths from printable words."""
    words = ["the", "whale", "was", "a", "great", "sea", "and", "old", "man", "of", "ship", "saw", "it", "had", "been"]
    made = []
    for number in range(count):
        prompt = " ".join(words[(number * 3 + k) % len(words)] for k in range(5 + number * 2))
        sampling = {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "seed": 100 + number, "top_p": 0.95}
        made.append({"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, **sampling})
    return made


def post_head(url: SplitResult, num_bytes: int) -> bytes:
    """The head of a request to /generate on a connection of its own."""
    return (
        f"POST /generate HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {num_bytes}\r\nconnection: close\r\n\r\n"
    ).encode()


async def stream_one(url: str, number: int, fields: dict[str, Any]) -> Stream:
    """Send a request to /generate and follow it; failures are part of the result."""
    stream = Stream(number)
    parts = urlsplit(url)
    body = json.dumps(fields).encode()
    try:
        async with asyncio.timeout(STREAM_S):
            async with connected(parts) as (reader, writer):
                writer.write(post_head(parts, len(body)) + body)
                status, headers = await read_head(reader)
                if status != 200:
                    stream.error = f"HTTP {status}: {b''.join([part async for part in read_body(reader, headers)])!r}"
                    return stream
                done = False
                async for now, data in read_events(reader, headers):
                    if data == b"[DONE]":
                        done = True
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        stream.error = str(event["error"])
                        return stream
                    stream.tokens.extend(event["token_ids"])
                    stream.times.append(now)
                if not done:
                    stream.error = "the stream ended without [DONE]"
    except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    return stream


async def reference(url: str, bodies: Sequence[dict[str, Any]]) -> list[list[int]]:
    """What each request says while nothing happens; raises `RuntimeError` if one fails."""
    streams = await asyncio.gather(*(stream_one(url, number, body) for number, body in enumerate(bodies)))
    for stream in streams:
        if stream.error:
            raise RuntimeError(f"request {stream.number} failed without any disturbance: {stream.error}")
    return [stream.tokens for stream in streams]


class Load:
    """As many clients as bodies, each streaming its own again and again until stopped."""

    def __init__(self, url: str, bodies: Sequence[dict[str, Any]]) -> None:
        self.finished: list[Stream] = []
        self._url = url
        self._bodies = bodies
        self._stopping = False
        self._clients: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._clients = [asyncio.create_task(self._run(number, body)) for number, body in enumerate(self._bodies)]

    async def _run(self, number: int, body: dict[str, Any]) -> None:
        while not self._stopping:
            self.finished.append(await stream_one(self._url, number, body))

    async def stop(self) -> list[Stream]:
        """Let every stream end by itself; returns all."""
        self._stopping = True
        await asyncio.gather(*self._clients)
        return self.finished


def longest_gap_s(streams: Sequence[Stream], start: float, end: float) -> float:
    """The longest pause of any stream that overlaps [start, end]."""
    return max((gap for stream in streams for at, gap in stream.gaps() if at < end and at + gap > start), default=0.0)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def gap_summary(event: str, longest: Sequence[float], step_s: float) -> str:
    """The longest client gaps of all events against the bar, in a sentence."""
    return (
        f"S (median time between two events of a stream) {step_s * 1e3:.1f} ms; longest client gap per {event}: median "
        f"{statistics.median(longest) * 1e3:.0f} ms, p95 (nearest rank) {percentile(longest, 0.95) * 1e3:.0f} ms, "
        f"maximum {max(longest) * 1e3:.0f} ms; bar: p95 of at most max(5 S, 250 ms) = "
        f"{max(5 * step_s, 0.25) * 1e3:.0f} ms."
    )


def wrong(streams: Sequence[Stream], expected: Sequence[Sequence[int]]) -> tuple[int, int]:
    """How many streams failed, and how many said something else than the reference."""
    failed = sum(stream.error is not None for stream in streams)
    changed = sum(stream.error is None and stream.tokens != list(expected[stream.number]) for stream in streams)
    return failed, changed


def now() -> float:
    """The clock that streams are timed by."""
    return time.perf_counter()
