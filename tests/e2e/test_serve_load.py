"""Four workers behind one URL: every worker serves, limits hold, and what clients drop is freed."""

import asyncio
import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import Serve, client, gauges, poll

WORKERS = 4
MAX_LEN = 256
FREED_S = 1.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ("--workers", str(WORKERS), "--max-model-len", str(MAX_LEN), "--kv-cache-gib", "0.05")
    with Serve(tmp_path_factory.mktemp("serve"), "demo", *options) as serve:
        yield serve.url()


def body(prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    kind = "prompt" if isinstance(prompt, str) else "input_ids"
    return {kind: prompt, "temperature": 0.0, "ignore_eos": True, **fields}


def outstanding(http: httpx.Client) -> dict[int, int]:
    members = http.get("/topology").json()["members"]
    return {member["slot"]: member["num_requests"] for member in members}


def all_free(http: httpx.Client) -> bool:
    """No sequence anywhere, and all KV is free or kept for prefixes only."""
    return not any(outstanding(http).values()) and not any(gauges(http, "worker_num_running").values())


def test_one_request_completes(served: str) -> None:
    with client(served) as http:
        answer = http.post("/generate", json=body("It was a dark evening, and", max_tokens=20)).json()
    assert len(answer["token_ids"]) == 20
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 20


def test_a_stream_carries_the_same_text(served: str) -> None:
    with client(served) as http:
        whole = http.post("/generate", json=body("The old house", max_tokens=24)).json()
        events = []
        with http.stream("POST", "/generate", json=body("The old house", max_tokens=24, stream=True)) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert "".join(event["text"] for event in events) == whole["text"]
    assert [token for event in events for token in event["token_ids"]] == whole["token_ids"]
    assert events[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"]
    }


def test_the_first_request_to_the_last_worker_completes(served: str) -> None:
    """Requests in flight occupy the other workers, so each gets one; all give the same tokens."""

    async def together() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=served, timeout=120.0, trust_env=False) as http:
            jobs = [http.post("/generate", json=body("Whale", max_tokens=100)) for _ in range(WORKERS)]
            requests = asyncio.gather(*jobs)
            busy: dict[int, int] = {}
            while not requests.done() and busy.get(WORKERS - 1, 0) < 1:
                topology = (await http.get("/topology")).json()
                busy = {member["slot"]: member["num_requests"] for member in topology["members"]}
            assert busy == dict.fromkeys(range(WORKERS), 1)
            return [answer.json() for answer in await requests]

    answers = asyncio.run(together())
    assert all(answer["token_ids"] == answers[0]["token_ids"] for answer in answers)


def test_a_burst_spreads_evenly(served: str) -> None:
    """64 identical requests on 4 idle workers land 16 each, give or take one."""

    async def burst() -> dict[int, int]:
        limits = httpx.Limits(max_connections=80)
        async with httpx.AsyncClient(base_url=served, timeout=120.0, trust_env=False, limits=limits) as http:
            jobs = [http.post("/generate", json=body("It", max_tokens=120)) for _ in range(64)]
            requests = asyncio.gather(*jobs)
            landed: dict[int, int] = {}
            while not requests.done() and sum(landed.values()) < 64:
                topology = (await http.get("/topology")).json()
                landed = {member["slot"]: member["num_requests"] for member in topology["members"]}
            assert all(answer.status_code == 200 for answer in await requests)
            return landed

    with client(served) as http:
        poll("the workers are idle", lambda: all_free(http), 10.0)
    landed = asyncio.run(burst())
    assert sum(landed.values()) == 64
    assert all(15 <= count <= 17 for count in landed.values()), landed


def test_many_uneven_requests_complete(served: str) -> None:
    rng = random.Random(5)
    shapes = [(rng.randint(1, 120), rng.choice([1, 2, 5, 20, 60])) for _ in range(128)]

    async def all_of_them() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=128)
        async with httpx.AsyncClient(base_url=served, timeout=150.0, trust_env=False, limits=limits) as http:
            return await asyncio.gather(
                *(
                    http.post(
                        "/generate",
                        json=body([rng.randint(10, 3000) for _ in range(prompt)], max_tokens=output),
                    )
                    for prompt, output in shapes
                )
            )

    answers = asyncio.run(all_of_them())
    assert [answer.status_code for answer in answers] == [200] * 128
    assert [len(answer.json()["token_ids"]) for answer in answers] == [output for _, output in shapes]


def test_exactly_the_longest_request_completes_and_a_longer_one_is_refused(served: str) -> None:
    prompt = [7] * (MAX_LEN - 16)
    with client(served) as http:
        answer = http.post("/generate", json=body(prompt, max_tokens=16))
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["token_ids"]) == 16
        refused = http.post("/generate", json=body(prompt, max_tokens=17))
        assert refused.status_code == 400
        assert str(MAX_LEN) in refused.json()["error"]["message"]
        assert http.post("/generate", json=body([7] * (MAX_LEN + 1), max_tokens=1)).status_code == 400


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place_within_a_second(served: str, stream: bool) -> None:
    url = httpx.URL(served)
    content = json.dumps(body("Once", max_tokens=MAX_LEN - 10, stream=stream)).encode()
    head = (
        "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    with client(served) as http:
        poll("the workers are idle", lambda: all_free(http), 10.0)
        for _ in range(8):
            with socket.create_connection((url.host, url.port or 80), timeout=10.0) as connection:
                connection.sendall(head.encode() + content)
                poll("the request runs", lambda: sum(gauges(http, "worker_num_running").values()), 10.0)
        poll("the place is free", lambda: all_free(http), FREED_S)


def test_the_command_line_talks_to_it(served: str, tmp_path: Path) -> None:
    def moeray(*words: str) -> str:
        command = [sys.executable, "-m", "moeray.deploy.cli", *words, "--url", served]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with client(served) as http:
        expected = http.post("/generate", json=body("The sea", max_tokens=12)).json()["text"]
    assert moeray("generate", "The sea", "--max-tokens", "12", "--temperature", "0", "--ignore-eos") == expected + "\n"
    shown = moeray("status")
    assert "demo" in shown
    assert shown.count("serving") >= WORKERS


def test_the_command_line_says_why_it_cannot(served: str) -> None:
    command = [sys.executable, "-m", "moeray.deploy.cli", "generate", "x", "--url"]
    for url, options, words in (
        ("http://127.0.0.1:9", (), "nothing answers at http://127.0.0.1:9"),
        (served, ("--max-tokens", "100000"), str(MAX_LEN)),
    ):
        done = subprocess.run([*command, url, *options], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert words in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
