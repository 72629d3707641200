"""How the server behaves at its edges: keys, limits, disconnects, full queues, lost workers, shutting down."""

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeray.worker.messages import Abort, Attach, Attached, EngineFailed, Heartbeat, Rejected, Submit, TokenOutput

GREEDY: dict[str, Any] = {"prompt": "the quick brown fox", "temperature": 0}


def events_of(text: str) -> list[Any]:
    """The data of each server-sent event; the end mark as a string."""
    datas = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def wait_until(condition: Any, what: str) -> None:
    async def poll() -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.002)

    try:
        asyncio.run(poll())
    except TimeoutError:
        pytest.fail(f"not within 10 s: {what}")


# /generate and its neighbours


def test_generate_answers_in_its_shape(server: Any) -> None:
    answer = server.post("/generate", {**GREEDY, "max_tokens": 3})
    body = answer.json()
    assert set(body) == {"text", "token_ids", "finish_reason", "usage", "request_id"}
    assert len(body["token_ids"]) == 3
    assert body["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert answer.headers["x-request-id"] == body["request_id"]


def test_generate_takes_token_ids_and_streams_the_new_part_only(server: Any) -> None:
    prompt = server.post("/tokenize", {"prompt": "the lazy dog, and héllo"}).json()["tokens"]
    fields = {"input_ids": prompt, "temperature": 0, "max_tokens": len(prompt), "stream": True}
    answer = server.post("/generate", fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last, done = events_of(answer.text)
    assert done == "[DONE]"
    assert all(set(event) == {"index", "text", "token_ids", "finish_reason"} for event in events)
    assert [token for event in [*events, last] for token in event["token_ids"]] == prompt
    assert "".join(event["text"] for event in [*events, last]) == "the lazy dog, and héllo"
    assert last["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == len(prompt)


def test_generate_defaults_to_128_tokens_or_what_fits(server: Any) -> None:
    few = server.post("/generate", {"input_ids": [300], "temperature": 0}).json()
    many = server.post("/generate", {"input_ids": [300] * 200, "temperature": 0}).json()
    assert len(few["token_ids"]) == 128
    assert len(many["token_ids"]) == 56


def test_generate_logprobs(server: Any) -> None:
    body = server.post("/generate", {**GREEDY, "max_tokens": 2, "logprobs": 1}).json()
    assert [entry["token_id"] for entry in body["logprobs"]] == body["token_ids"]
    assert len(body["logprobs"][0]["top_logprobs"]) == 1


@pytest.mark.parametrize(
    ("field", "value"), [("n", 2), ("prompt", ["a", "b"]), ("input_ids", [[1], [2]]), ("best_of", 1)]
)
def test_generate_refuses_what_belongs_to_completions(server: Any, field: str, value: Any) -> None:
    body = {field: value} if field in ("prompt", "input_ids") else {"prompt": "a", field: value}
    answer = server.post("/generate", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_end_token_closes_without_its_text(server: Any) -> None:
    body = server.post("/generate", {"input_ids": [300, 0, 301], "temperature": 0, "max_tokens": 9}).json()
    assert body["token_ids"] == [300, 0]
    assert body["finish_reason"] == "stop"
    ignoring = {"input_ids": [300, 0, 301], "temperature": 0, "max_tokens": 9, "ignore_eos": True}
    assert len(server.post("/generate", ignoring).json()["token_ids"]) == 9


def test_stop_strings_wait_for_min_tokens(server: Any) -> None:
    fields = {**GREEDY, "prompt": "a b ", "max_tokens": 60, "stop": "b"}
    early = server.post("/generate", fields).json()
    late = server.post("/generate", {**fields, "min_tokens": 30}).json()
    assert early["text"] == "a "
    assert late["text"].startswith("a b a b ")
    assert late["finish_reason"] == "stop"
    assert 30 <= len(late["token_ids"]) < 60
    included = server.post("/generate", {**fields, "include_stop_str_in_output": True}).json()
    assert included["text"] == "a b"


def test_tokenize_and_detokenize(server: Any) -> None:
    tokens = server.post("/tokenize", {"prompt": "<|end|>héllo"}).json()
    assert tokens["tokens"][0] == 0
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 256
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "<|end|>héllo"}
    skipped = {"tokens": tokens["tokens"], "skip_special_tokens": True}
    assert server.post("/detokenize", skipped).json() == {"prompt": "héllo"}
    assert server.post("/detokenize", {"tokens": [512]}).status_code == 400
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"] == "user: hi\nassistant: "


def test_chat_template_variables(server: Any) -> None:
    fields = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "temperature": 0}
    body = {**fields, "max_tokens": 40, "chat_template_kwargs": {"shout": True}}
    text = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert text.startswith("user: hi\nassistant: !")
    bad_kwargs: list[dict[str, Any]] = [{"messages": []}, {"shuot": True}]
    for kwargs in bad_kwargs:
        answer = server.post("/v1/chat/completions", {**body, "chat_template_kwargs": kwargs})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "chat_template_kwargs"
    body["messages"] = [{"role": "user", "content": "hi", "name": "Ada"}]
    assert "does not read name" in server.post("/v1/chat/completions", body).json()["error"]["message"]


# Status


def test_status_endpoints(server: Any) -> None:
    assert server.get("/health").json()["status"] == "ok"
    assert server.get("/ready").status_code == 200
    assert set(server.get("/version").json()) == {"version"}
    topology = server.get("/topology").json()
    assert set(topology) == {"epoch", "members", "placement"}
    fields = {"slot", "rank", "pid", "node", "state", "num_requests", "num_experts"}
    assert all(set(member) == fields for member in topology["members"])
    server.post("/generate", {**GREEDY, "max_tokens": 3, "stream": True})
    text = server.get("/metrics").text
    for line in (
        'moeray_requests_total{outcome="length"}',
        "moeray_epoch 1.0",
        'moeray_slot_sequences{slot="1"} 0.0',
    ):
        assert line in text
    assert "moeray_front_end_added_seconds_count" in text


def test_head_answers_as_get_does(start_server: Any) -> None:
    for state, status in (("serving", 200), ("starting", 503)):
        server = start_server(1, state=state)
        for path in ("/health", "/ready"):
            answer = httpx.head(server.url + path, timeout=10)
            assert (answer.status_code, answer.content) == (status, b"")


def test_a_prompt_that_is_too_long_is_told_without_what_was_not_sent(server: Any) -> None:
    body: dict[str, Any] = {"input_ids": [1] * 300}
    error = server.post("/generate", body).json()["error"]
    assert (error["param"], error["code"]) == ("input_ids", "context_length_exceeded")
    assert "300 tokens, must be at most 255" in error["message"]
    assert "max_tokens" not in error["message"]
    assert "max_tokens is 5" in server.post("/generate", {**body, "max_tokens": 5}).json()["error"]["message"]


def test_unknown_paths_and_methods_have_openai_bodies(server: Any) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/health/", 404),
        ("POST", "/generate/", 404),
        ("GET", "/generate", 405),
        ("DELETE", "/health", 405),
    ):
        answer = httpx.request(method, server.url + path, timeout=10)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert server.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_request_id_is_kept_if_it_is_sane(server: Any) -> None:
    for given_id, is_kept in (("my-id.1", True), ("bad id\x01"[:-1], False), ("x" * 200, False)):
        answer = httpx.get(server.url + "/health", headers={"x-request-id": given_id}, timeout=10)
        assert (answer.headers["x-request-id"] == given_id) is is_kept
        assert answer.headers["x-request-id"]


def test_body_limit_with_and_without_a_length(server: Any) -> None:
    big = json.dumps({"prompt": "x" * 60_000}).encode()
    for content in (big, iter([big[:30_000], big[30_000:]])):
        answer = httpx.post(server.url + "/generate", content=content, timeout=10)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"prompt": "\xff"}', b"[" * 20_000, b"\x00"])
def test_bodies_that_are_no_json_object(server: Any, body: bytes) -> None:
    answer = httpx.post(server.url + "/generate", content=body, timeout=10)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


NAMES = [
    *["prompt", "input_ids", "messages", "model", "n", "max_tokens", "min_tokens", "temperature", "top_p"],
    *["top_k", "min_p", "seed", "stop", "stop_token_ids", "logprobs", "top_logprobs", "logit_bias", "stream"],
    *["stream_options", "echo", "best_of", "tools", "user", "chat_template_kwargs", "ignore_eos"],
    *["response_format", "odd"],
]
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 600)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["tiny", "the quick", "user", "text"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "1", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    path=st.sampled_from(["/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]),
    body=st.dictionaries(st.sampled_from(NAMES), JSON_VALUES, max_size=6),
    base=st.sampled_from([{}, {"prompt": "the"}, {"messages": [{"role": "user", "content": "the"}]}, {"tokens": [1]}]),
)
def test_no_body_makes_the_server_fail(server: Any, path: str, body: dict[str, Any], base: dict[str, Any]) -> None:
    content = json.dumps({**base, **body}).encode()
    answer = httpx.post(server.url + path, content=content, timeout=20)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]


def test_a_bug_is_a_500_in_openais_shape(start_server: Any) -> None:
    server = start_server(1)
    server.front_end.new_seq_id = lambda: 1 // 0
    answer = server.post("/generate", GREEDY)
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "internal error",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert answer.headers["x-request-id"]


# Keys


def test_keys_guard_generation_and_control(start_server: Any) -> None:
    server = start_server(1, api_key="secret", admin_key="boss")
    body = {**GREEDY, "max_tokens": 1}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
        answer = httpx.post(server.url + "/generate", json=body, headers=headers, timeout=10)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    good = httpx.post(server.url + "/generate", json=body, headers={"authorization": "Bearer secret"}, timeout=10)
    assert good.status_code == 200
    assert server.get("/v1/models").status_code == 401
    for path in ("/health", "/ready", "/version"):
        assert server.get(path).status_code == 200
    assert server.get("/topology").status_code == 401
    control = httpx.get(server.url + "/topology", headers={"authorization": "Bearer boss"}, timeout=10)
    assert control.status_code == 200


# Load, queue, disconnect


def test_a_burst_is_spread_evenly(start_server: Any) -> None:
    server = start_server(4)
    for worker in server.workers:
        worker.is_paused = True
    with ThreadPoolExecutor(64) as pool:
        answers = [pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 4}) for _ in range(64)]
        wait_until(lambda: sum(len(worker.running) for worker in server.workers) == 64, "all were submitted")
        assert [len(worker.running) for worker in server.workers] == [16] * 4
        assert [member["num_requests"] for member in server.get("/topology").json()["members"]] == [16] * 4
        for worker in server.workers:
            worker.is_paused = False
        assert {answer.result().status_code for answer in answers} == {200}
    assert [server.front_end.router.load((slot, 0)).outstanding_tokens for slot in range(4)] == [0] * 4


def test_full_queue_is_429_and_waiting_requests_run_in_order(start_server: Any) -> None:
    server = start_server(1, max_inflight_per_worker=1, max_queue=2)
    worker = server.workers[0]
    worker.is_paused = True
    with ThreadPoolExecutor(3) as pool:
        answers = []
        for num in range(3):
            answers.append(pool.submit(server.post, "/generate", {"input_ids": [300 + num], "max_tokens": 2}))
            wait_until(lambda num=num: len(server.front_end.ledger.requests) == num + 1, "it was taken")
        refused = server.post("/generate", GREEDY)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        too_many = server.post("/v1/completions", {"prompt": "a", "n": 3})
        assert too_many.status_code == 429
        for path, prompt in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            never = server.post(path, {**prompt, "n": 4})
            assert never.status_code == 400
            assert never.json()["error"]["param"] == "n"
            assert "n is 4, must be at most 3" in never.json()["error"]["message"]
        worker.is_paused = False
        assert {answer.result().status_code for answer in answers} == {200}
    submits = [message for message in worker.received if isinstance(message, Submit)]
    assert [submit.prompt_ids for submit in submits] == [[300], [301], [302]]
    assert 'outcome="refused_429"} 2.0' in server.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_client_that_leaves_frees_the_worker(start_server: Any, stream: bool, has_tokens: bool) -> None:
    server = start_server(1)
    worker = server.workers[0]
    worker.step_s = 0.02
    worker.is_paused = not has_tokens
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({**GREEDY, "max_tokens": 200, "stream": stream}).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(head + body)
        wait_until(lambda: worker.running and (worker.step > 0 or not has_tokens), "the worker has it")
        if stream and has_tokens:
            assert client.recv(10)
    wait_until(lambda: not worker.running, "the worker is free")
    assert any(isinstance(message, Abort) for message in worker.received)
    wait_until(lambda: not server.front_end.ledger.requests, "the ledger is empty")
    assert 'outcome="disconnected"} 1.0' in server.get("/metrics").text


def test_leaving_the_queue_makes_room(start_server: Any) -> None:
    server = start_server(1, max_inflight_per_worker=1, max_queue=1)
    server.workers[0].is_paused = True
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 1})
        wait_until(lambda: server.workers[0].running, "the first runs")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/generate", json=GREEDY, timeout=0.3)
        wait_until(lambda: not server.front_end.ledger.queue, "the second has left")
        third = pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 1})
        wait_until(lambda: server.front_end.ledger.queue, "the third waits")
        server.workers[0].is_paused = False
        assert first.result().status_code == third.result().status_code == 200


def test_time_out_is_an_error_before_and_after_the_headers(start_server: Any) -> None:
    server = start_server(1, request_timeout_s=0.3)
    server.workers[0].is_paused = True
    answer = server.post("/generate", GREEDY)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"
    server.workers[0].is_paused = False
    server.workers[0].step_s = 0.05
    events = events_of(server.post("/generate", {**GREEDY, "max_tokens": 200, "stream": True}).text)
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "timeout"
    assert events[0]["token_ids"]
    wait_until(lambda: not server.workers[0].running, "the worker is free")


def test_many_streams_at_once(start_server: Any) -> None:
    server = start_server(2)

    async def one(client: httpx.AsyncClient, tokens: int) -> int:
        fields = {"input_ids": [300 + tokens], "max_tokens": tokens, "stream": True, "temperature": 0}
        answer = await client.post("/generate", json=fields)
        return sum(len(event["token_ids"]) for event in events_of(answer.text)[:-1])

    async def all_of_them() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=30, limits=limits) as client:
            return await asyncio.gather(*(one(client, 1 + num) for num in range(128)))

    assert asyncio.run(all_of_them()) == [1 + num for num in range(128)]


# Workers and the cluster


def test_a_worker_that_refuses(start_server: Any) -> None:
    server = start_server(1)
    worker = server.workers[0]
    worker.is_paused = True
    with ThreadPoolExecutor(1) as pool:
        for code, status in (("queue_full", 429), ("invalid", 400)):
            answer = pool.submit(server.post, "/generate", GREEDY)
            wait_until(lambda: worker.running, "it was submitted")
            seq_id = next(iter(worker.running))
            worker.say(Rejected(seq_id, 0, code, "no room"))
            assert answer.result().status_code == status
            assert answer.result().json()["error"]["message"] == "no room"
            wait_until(lambda: not worker.running, "it was aborted")


def test_unexpected_tokens_are_dropped_and_counted(start_server: Any) -> None:
    server = start_server(1)
    worker = server.workers[0]
    worker.is_paused = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 3})
        wait_until(lambda: worker.running, "it was submitted")
        seq_id = next(iter(worker.running))
        for attempt, position in ((1, 0), (1, 1), (0, -1)):
            output = TokenOutput(seq_id, attempt, position, 400)
            worker.say(worker.step_of([output, TokenOutput("other", 0, 0, 400)]))
        wait_until(lambda: server.front_end.ledger.num_dropped_tokens == 6, "all were dropped")
        worker.is_paused = False
        assert 400 not in answer.result().json()["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_lost_on_the_way_are_made_again(start_server: Any, stream: bool) -> None:
    server = start_server(1)
    worker = server.workers[0]
    fields = {**GREEDY, "max_tokens": 3}
    expected = server.post("/generate", fields).json()["token_ids"]
    worker.is_paused = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/generate", {**fields, "stream": stream})
        wait_until(lambda: worker.running, "it was submitted")
        seq_id = next(iter(worker.running))
        worker.say(worker.step_of([TokenOutput(seq_id, 0, 1, 400)]))
        wait_until(lambda: worker.running and worker.running[seq_id][0].attempt == 1, "it was submitted again")
        assert Abort(7, [seq_id]) in worker.received
        worker.is_paused = False
        events = events_of(answer.result().text)[:-1] if stream else [answer.result().json()]
        assert [token for event in events for token in event["token_ids"]] == expected
    assert server.metric('moeray_resubmitted_sequences_total{reason="lost_tokens"}') == 1


def test_without_a_cluster_that_serves_a_lost_worker_ends_its_requests_with_the_cause(start_server: Any) -> None:
    server = start_server(2)
    for worker in server.workers:
        worker.is_paused = True
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 60}) for _ in range(2)]
        wait_until(lambda: all(worker.running for worker in server.workers), "both workers run")
        view = server.control.current
        dead = msgspec.structs.replace(view.members[1], state="dead")
        members, cause = (view.members[0], dead), "worker 1 exited (9)"
        server.control.publish(msgspec.structs.replace(view, version=2, state="stopping", members=members, cause=cause))
        wait_until(lambda: any(answer.done() for answer in answers), "one has ended")
        ended = next(answer for answer in answers if answer.done())
        assert ended.result().status_code == 503
        assert ended.result().json()["error"]["message"] == "worker 1 exited (9)"
        server.workers[0].is_paused = False
        assert sorted(answer.result().status_code for answer in answers) == [200, 503]


def test_what_a_worker_had_whose_engine_failed_goes_on_elsewhere(start_server: Any) -> None:
    server = start_server(2)
    for worker in server.workers:
        worker.is_paused = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/generate", GREEDY)
        wait_until(lambda: server.workers[0].running, "it was submitted")
        server.workers[0].say(EngineFailed(0, 0, "out of blocks"))
        wait_until(lambda: server.workers[1].running, "it was submitted again")
        server.publish(server.workers)
        server.workers[1].is_paused = False
        assert answer.result().status_code == 200
    assert server.post("/generate", {**GREEDY, "max_tokens": 1}).status_code == 200
    assert server.get("/health").json()["num_serving"] == 1


def test_the_lease_is_held(start_server: Any) -> None:
    server = start_server(1, heartbeat_s=0.02)
    received = server.workers[0].received
    wait_until(lambda: Heartbeat(7) in received, "a heartbeat")
    assert received[0] == Attach(7)


def test_a_silent_controller_does_not_stop_the_service(start_server: Any) -> None:
    server = start_server(1)
    server.control.is_silent = True
    assert server.post("/generate", {**GREEDY, "max_tokens": 1}).status_code == 200
    view = server.control.current
    server.control.publish(msgspec.structs.replace(view, version=2, state="failed", cause="it is over"))
    server.control.is_silent = False
    wait_until(lambda: server.get("/health").json()["cause"] == "it is over", "the view was read again")


def test_a_failed_cluster_says_why(start_server: Any) -> None:
    server = start_server(1)
    server.workers[0].is_paused = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/generate", GREEDY)
        wait_until(lambda: server.workers[0].running, "it was submitted")
        view = server.control.current
        server.control.publish(
            msgspec.structs.replace(view, version=2, state="failed", cause="slot 0 ran out of memory")
        )
        assert answer.result().status_code == 503
    for path in ("/health", "/ready"):
        answer = server.get(path)
        assert answer.status_code == 503
        assert answer.json()["cause"] == "slot 0 ran out of memory"
    refused = server.post("/generate", GREEDY)
    assert refused.status_code == 503
    assert "out of memory" in refused.json()["error"]["message"]


def test_starting_is_not_ready(start_server: Any) -> None:
    server = start_server(1, state="starting")
    wait_until(lambda: server.front_end.view is not None, "the view came")
    assert server.get("/ready").status_code == 503
    assert server.post("/generate", GREEDY).headers["retry-after"]
    server.control.publish(msgspec.structs.replace(server.control.current, version=2, state="serving"))
    wait_until(lambda: server.get("/ready").status_code == 200, "ready")


def test_another_front_end_took_the_lease(start_server: Any) -> None:
    server = start_server(1)
    worker = server.workers[0]
    worker.say(Attached(8, 0, 0, 1, worker.stats()))
    wait_until(lambda: server.get("/health").status_code == 503, "unhealthy")
    assert "lease" in server.get("/health").json()["cause"]


def test_draining_refuses_new_requests_and_finishes_old_ones(start_server: Any) -> None:
    server = start_server(1)
    worker = server.workers[0]
    worker.is_paused = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 2})
        wait_until(lambda: worker.running, "it was submitted")
        server.loop.call_soon_threadsafe(server.front_end.begin_drain)
        wait_until(lambda: server.get("/ready").status_code == 503, "not ready")
        refused = server.post("/generate", GREEDY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
        early = asyncio.run_coroutine_threadsafe(server.front_end.drained(0.05), server.loop)
        assert early.result(10) is False
        worker.is_paused = False
        late = asyncio.run_coroutine_threadsafe(server.front_end.drained(10), server.loop)
        assert late.result(15) is True
        assert answer.result().status_code == 200
