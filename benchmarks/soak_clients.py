"""Clients of the soak: streams that begin anew for ever, and others that ask for four answers, leave, talk nonsense or
come in crowds. Every answer is judged against what the same request said before anything happened.
"""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.serve import connected
from benchmarks.streams import STREAM_S, Stream, now, post_head, reference, requests, stream_one

CROWD = 160
HEALTH_PERIOD_S = 0.2
HEALTH_TIMEOUT_S = 10.0
RETRY_S = 0.2
SLOW_HEALTH_S = 2.0

# Path, body and the status that is right for it.
NONSENSE: tuple[tuple[str, bytes, int], ...] = (
    ("/generate", b"{", 400),
    ("/generate", b'{"prompt": "\xff"}', 400),
    ("/generate", b'{"prompt": "a", "temperature": NaN}', 400),
    ("/generate", b'{"prompt": "a", "max_tokens": 1e400}', 400),
    ("/generate", b'{"prompt": "a", "unknown": 1}', 400),
    ("/v1/completions", b'{"prompt": "a", "model": "other"}', 404),
    ("/v1/completions", b"[" * 100_000, 400),
    ("/v1/chat/completions", b'{"messages": [{"role": "user"}]}', 400),
    ("/detokenize", b'{"tokens": [99999999]}', 400),
    ("/scale", b'{"workers": "three"}', 400),
    ("/scale", b'{"retire": []}', 400),
    ("/nowhere", b"{}", 404),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request ended.

    `verdict` is "complete", "changed" (not what it said before), "lost", "busy" (429), "unavailable" (503 instead of
    an answer), "gave up" (the recovery time-out), "left" (by the client's own will), or "refused" for nonsense.
    """

    what: str
    began: float
    ended: float
    verdict: str
    detail: str = ""


class Health:
    """Asks /health a few times a second, and knows when nothing served."""

    def __init__(self, url: str) -> None:
        self.slowest_s = 0.0
        self._url = url
        self._samples: list[tuple[float, bool]] = []

    async def watch(self) -> None:
        """Until it is cancelled. Asks from a thread: the time shall not be that of the other clients."""
        with httpx.Client(base_url=self._url, timeout=HEALTH_TIMEOUT_S, trust_env=False) as http:
            while True:
                await asyncio.to_thread(self._ask, http)
                await asyncio.sleep(HEALTH_PERIOD_S)

    def _ask(self, http: httpx.Client) -> None:
        asked = now()
        try:
            is_ok = http.get("/health").status_code == 200
        except httpx.HTTPError:
            is_ok = False
        self.slowest_s = max(self.slowest_s, now() - asked)
        self._samples.append((asked, is_ok))

    def outages(self) -> list[tuple[float, float]]:
        """(start, end) of each time without service, from the last good answer to the next one."""
        found: list[tuple[float, float]] = []
        last_good, is_out = self._samples[0][0] if self._samples else 0.0, False
        for at, is_ok in self._samples:
            if is_ok and is_out:
                found.append((last_good, at))
            if is_ok:
                last_good = at
            is_out = not is_ok
        return [*found, (last_good, now())] if is_out else found


class Clients:
    """All of them, with every answer and the times of the crowds."""

    def __init__(self, url: str, http: httpx.AsyncClient, rng: random.Random, *, streams: int, tokens: int) -> None:
        self.answers: list[Answer] = []
        self.streams: list[Stream] = []
        self.crowds: list[tuple[float, float]] = []
        self._url = url
        self._http = http
        self._rng = rng
        self._bodies = requests(streams, tokens)
        self._four = {"prompt": "The old man and", "n": 4, "max_tokens": 40, "temperature": 0.9, "seed": 11}
        self._one = {"prompt": "It was", "max_tokens": 10, "temperature": 0.0, "ignore_eos": True}
        self._leaver = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0.0, "ignore_eos": True}
        self._expected: list[list[int]] = []
        self._said: dict[str, Any] = {}

    async def learn(self) -> None:
        """What everything says while nothing happens. Raises `RuntimeError` if something fails."""
        self._expected = await reference(self._url, self._bodies)
        for path, fields in (("/v1/completions", self._four), ("/generate", self._one)):
            answer = await self._http.post(path, json=fields)
            if answer.status_code != 200:
                raise RuntimeError(f"{path} failed without any disturbance: {answer.text}")
            self._said[path] = _content(answer)

    def _judge(self, what: str, began: float, status: int, detail: str, is_equal: bool) -> Answer:
        if status == 200 and not detail:
            verdict = "complete" if is_equal else "changed"
        elif "recovery_timeout" in detail:
            verdict = "gave up"
        else:
            verdict = {429: "busy", 503: "unavailable"}.get(status, "lost")
        answer = Answer(what, began, now(), verdict, detail)
        self.answers.append(answer)
        return answer

    # The steady ones

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        """As many streams as bodies, each again and again; at the end all come to theirs."""
        is_over = asyncio.Event()
        steady = [asyncio.create_task(self._stream(number, is_over)) for number in range(len(self._bodies))]
        try:
            yield
        finally:
            is_over.set()
            await asyncio.gather(*steady)

    async def _stream(self, number: int, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            began = now()
            stream = await stream_one(self._url, number, self._bodies[number])
            self.streams.append(stream)
            detail = stream.error or ""
            found = re.match(r"HTTP (\d+)", detail)
            status = int(found[1]) if found else 200
            answer = self._judge("stream", began, status, detail, stream.tokens == self._expected[number])
            if answer.verdict != "complete":
                await asyncio.sleep(RETRY_S)

    # The others

    async def others(self, end: float) -> None:
        """A crowd to begin with, then one after the other, drawn by lot, until `end`."""
        kinds = (self._four_answers, self._leave, self._talk_nonsense, self._come_in_a_crowd)
        await self._come_in_a_crowd()
        while now() < end:
            await self._rng.choices(kinds, weights=(3, 6, 3, 1))[0]()
            await asyncio.sleep(self._rng.uniform(0.2, 1.2))

    async def ask_once(self) -> bool:
        """Whether one request is answered as before."""
        return (await self._ask("one", "/generate", self._one)).verdict == "complete"

    async def _ask(self, what: str, path: str, fields: dict[str, Any]) -> Answer:
        began = now()
        try:
            answer = await self._http.post(path, json=fields)
        except httpx.HTTPError as error:
            return self._judge(what, began, 0, repr(error), False)
        if answer.status_code != 200:
            return self._judge(what, began, answer.status_code, answer.text, False)
        return self._judge(what, began, 200, "", _content(answer) == self._said[path])

    async def _four_answers(self) -> None:
        await self._ask("four answers", "/v1/completions", self._four)

    async def _leave(self) -> None:
        """The client is gone before the answer is complete, in the queue, while it runs or while it is written."""
        began, stream = now(), self._rng.random() < 0.5
        stays_s = self._rng.choice((0.0, 0.05, 0.3, 1.0))
        url, body = urlsplit(self._url), json.dumps({**self._leaver, "stream": stream}).encode()
        try:
            async with connected(url) as (_, writer):
                writer.write(post_head(url, len(body)) + body)
                await asyncio.sleep(stays_s)
        except (OSError, TimeoutError) as error:
            self._judge("leaver", began, 0, repr(error), False)
            return
        self.answers.append(Answer("leaver, streaming" if stream else "leaver", began, now(), "left"))

    async def _talk_nonsense(self) -> None:
        for path, body, status in self._rng.sample(NONSENSE, 4):
            began = now()
            headers = {"content-type": "application/json"}
            try:
                answer = await self._http.post(path, content=body, headers=headers)
                said = f"{path} answers {answer.status_code}: {answer.text[:200]}"
                is_right = answer.status_code == status and "message" in answer.json()["error"]
            except (httpx.HTTPError, ValueError, KeyError) as error:
                said, is_right = f"{path}: {error!r}", False
            self.answers.append(Answer("nonsense", began, now(), "refused" if is_right else "lost", said))

    async def _come_in_a_crowd(self) -> None:
        began = now()
        await asyncio.gather(*(self._ask("one of a crowd", "/generate", self._one) for _ in range(CROWD)))
        self.crowds.append((began, now()))


def _content(answer: httpx.Response) -> Any:
    """What must be the same each time."""
    body = answer.json()
    if "token_ids" in body:
        return body["token_ids"]
    return [(choice["index"], choice["text"], choice["finish_reason"]) for choice in body["choices"]]


@asynccontextmanager
async def http_client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Waits as long as a stream may take, and takes crowds."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
    async with httpx.AsyncClient(base_url=url, timeout=STREAM_S, trust_env=False, limits=limits) as http:
        yield http
