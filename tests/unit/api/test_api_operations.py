"""Changing the size over HTTP: what is asked, refused, followed and counted."""

import asyncio
from typing import Any

import httpx
import msgspec
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from moeray.api.operation_metrics import GapWindow
from moeray.comm.errors import ControlTimeout, MoerayError, OperationRefused, WorkerDied
from moeray.deploy.control import RayControl
from moeray.elastic.view import OperationView, RebalanceRequest, ScaleRequest

ALL_PHASES = ("provisioning", "connecting", "transferring", "ready", "switched", "retired")
JSON_BODY = {"content-type": "application/json"}
GREEDY: dict[str, Any] = {"prompt": "the quick brown fox", "temperature": 0, "ignore_eos": True}


def message_of(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


# POST /scale and GET /operations


def test_an_operation_is_started_and_followed(start_server: Any) -> None:
    server = start_server(2)
    assert server.get("/operations").json() == {"operations": []}
    started = server.post("/scale", {"workers": 3, "deadline_s": 30})
    assert started.status_code == 202
    body = started.json()
    fields = {"operation_id", "kind", "phase", "outcome", "reason", "from_epoch", "to_epoch", "phases", "deadline_s"}
    assert fields <= body.keys()
    assert (body["phase"], body["outcome"], body["deadline_s"], body["joiners"]) == ("planned", None, 30, [2])
    assert started.headers["location"] == f"/operations/{body['operation_id']}"
    server.control.go_on("provisioning")
    running = server.get(started.headers["location"]).json()
    assert [phase["name"] for phase in running["phases"]] == ["planned", "provisioning"]
    assert running["phases"][0]["seconds"] == 0.5
    server.control.go_on(*ALL_PHASES[1:], outcome="done")
    done = server.get(started.headers["location"]).json()
    assert (done["phase"], done["outcome"]) == ("retired", "done")
    assert server.get("/operations").json() == {"operations": [done]}
    asked = ScaleRequest(workers=3, deadline_s=30, operation_id=body["operation_id"])
    assert server.control.requests == [asked]


def test_an_unknown_operation_is_404(server: Any) -> None:
    for operation_id in ("nothing", "a/b", "x" * 5000):
        answer = server.get(f"/operations/{operation_id}")
        assert len(message_of(answer, 404)) < 300
        assert answer.json()["error"]["code"] == "operation_not_found"


def test_a_repeated_id_gets_the_first_operation(start_server: Any) -> None:
    server = start_server(2)
    body = {"workers": 3, "operation_id": "mine:1"}
    first = server.post("/scale", body)
    again = server.post("/scale", body)
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json() == again.json()
    server.control.go_on(*ALL_PHASES, outcome="done")
    late = server.post("/scale", {"retire": [0], "operation_id": "mine:1"})
    assert late.status_code == 200
    assert late.json()["outcome"] == "done"
    assert late.headers["location"] == "/operations/mine:1"
    assert len(server.control.requests) == 1


def test_the_same_size_is_done_at_once(start_server: Any) -> None:
    server = start_server(2)
    answer = server.post("/scale", {"workers": 2})
    assert (answer.status_code, answer.json()["outcome"]) == (200, "done")


def test_only_one_at_a_time(start_server: Any) -> None:
    server = start_server(2)
    first = server.post("/scale", {"retire": [0]}).json()["operation_id"]
    for path, body in (("/scale", {"workers": 4}), ("/scale_elastic_ep", {"new_data_parallel_size": 4})):
        answer = server.post(path, body)
        assert first in message_of(answer, 409)
        assert answer.json()["error"]["code"] == "operation_running"
        assert answer.headers["location"] == f"/operations/{first}"


@pytest.mark.parametrize("value", [0, -1, 5, 10**30, "3", "three", True, 2.5, [], {}])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/scale", "workers"),
        ("/scale_elastic_ep", "new_data_parallel_size"),
        ("/scale_elastic_ep", "new_ep_size"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_the_limits(server: Any, path: str, field: str, value: Any) -> None:
    answer = server.post(path, {field: value})
    message = message_of(answer, 400)
    assert answer.json()["error"]["param"] == field
    assert field in message
    assert "from 1 to 4" in message
    assert not server.control.history


@pytest.mark.parametrize("value", [[7], [-1], [0, 0], [0, 1], ["0"], [True], "0", 0, [0, None], []])
def test_slots_that_cannot_retire_are_refused(server: Any, value: Any) -> None:
    answer = server.post("/scale", {"retire": value})
    message = message_of(answer, 400)
    assert "retire" in message
    assert not server.control.history
    if value not in ([0, 0], [0, 1]):
        assert "[0, 1]" in message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "workers and retire are not given, exactly one must be"),
        ({"workers": None}, "exactly one"),
        ({"workers": 3, "retire": [0]}, "both given"),
        ({"workers": 3, "n": 3}, "n is not a field"),
        ({"workers": 3, "deadline_s": 0}, "deadline_s is 0"),
        ({"workers": 3, "deadline_s": "soon"}, "deadline_s"),
        ({"workers": 3, "deadline_s": True}, "deadline_s"),
        ({"workers": 3, "deadline_s": 1e9}, "86400"),
        ({"workers": 3, "operation_id": ""}, "operation_id"),
        ({"workers": 3, "operation_id": "a b"}, "operation_id"),
        ({"workers": 3, "operation_id": "../x"}, "operation_id"),
        ({"workers": 3, "operation_id": "x" * 129}, "operation_id"),
        ({"workers": 3, "operation_id": 7}, "operation_id"),
    ],
)
def test_other_fields_are_refused_by_name(server: Any, body: dict[str, Any], words: str) -> None:
    assert words in message_of(server.post("/scale", body), 400)
    assert not server.control.history


def test_bodies_that_are_no_object(server: Any) -> None:
    for path in ("/scale", "/scale_elastic_ep", "/rebalance"):
        for content in (b"", b"[]", b"3", b"{"):
            answer = httpx.post(server.url + path, content=content, headers=JSON_BODY, timeout=10)
            assert message_of(answer, 400)


@pytest.mark.parametrize("path", ["/scale", "/scale_elastic_ep", "/rebalance"])
@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_a_page_of_another_site_cannot_change_the_size(server: Any, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = httpx.post(server.url + path, content=b'{"workers": 3}', headers=headers, timeout=10)
    assert "must be application/json" in message_of(answer, 415)
    assert answer.json()["error"]["code"] == "unsupported_media_type"
    assert not server.control.history


def test_the_kind_of_a_body_may_have_parameters(server: Any) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    answer = httpx.post(server.url + "/scale", content=b'{"workers": 9}', headers=headers, timeout=10)
    assert "workers is 9" in message_of(answer, 400)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"retire": [0, 0]}, "retire is [0, 0], must name each slot once"),
        ({"retire": [0, 1]}, "retire is [0, 1], which leaves 0"),
        ({"workers": True}, "workers is true"),
        ({"workers": "3"}, 'workers is "3"'),
        ({"workers": {"n": None}}, 'workers is {"n": null}'),
    ],
)
def test_values_are_shown_as_json(server: Any, body: dict[str, Any], words: str) -> None:
    assert words in message_of(server.post("/scale", body), 400)


def test_control_needs_the_admin_key(start_server: Any) -> None:
    server = start_server(2, api_key="secret", admin_key="boss")
    calls = [("POST", "/scale"), ("GET", "/operations"), ("GET", "/operations/x"), ("POST", "/scale_elastic_ep")]
    for method, path in [*calls, ("POST", "/rebalance"), ("GET", "/is_scaling_elastic_ep")]:
        for headers in ({}, {"authorization": "Bearer secret"}):
            answer = httpx.request(method, server.url + path, headers=headers, json={"workers": 3}, timeout=10)
            assert answer.status_code == 401
    assert not server.control.history
    boss = {"authorization": "Bearer boss"}
    assert httpx.post(server.url + "/scale", headers=boss, json={"workers": 3}, timeout=10).status_code == 202


def test_a_controller_that_does_not_answer_is_a_503(start_server: Any) -> None:
    server = start_server(2)
    server.control.is_silent = True
    answers = [
        server.post("/scale", {"workers": 3}),
        server.post("/scale_elastic_ep", {"new_ep_size": 3}),
        server.post("/rebalance", {}),
        server.get("/operations/x"),
    ]
    for answer in answers:
        assert "controller does not answer" in message_of(answer, 503)
        assert answer.headers["retry-after"]
    for path in ("/health", "/topology", "/metrics"):
        assert server.get(path).status_code == 200
    assert server.post("/generate", {**GREEDY, "max_tokens": 1}).status_code == 200


# POST /rebalance


@pytest.mark.parametrize("fields", [{}, {"operation_id": "mine:1", "deadline_s": 30}])
def test_a_rebalance_is_started_and_followed(start_server: Any, until: Any, fields: dict[str, Any]) -> None:
    server = start_server(2)
    started = server.post("/rebalance", fields)
    assert started.status_code == 202
    body = started.json()
    assert (body["kind"], body["phase"], body["outcome"], body["requested"]) == ("rebalance", "planned", None, {})
    assert (body["targets"], body["joiners"], body["leavers"]) == ([0, 1], [], [])
    operation_id = fields.get("operation_id", body["operation_id"])
    assert started.headers["location"] == f"/operations/{operation_id}"
    asked = RebalanceRequest(operation_id=operation_id, deadline_s=fields.get("deadline_s"))
    assert server.control.requests == [asked]
    refused = server.post("/rebalance", {})
    assert operation_id in message_of(refused, 409)
    assert refused.headers["location"] == f"/operations/{operation_id}"
    server.control.go_on(*ALL_PHASES, outcome="done")
    again = server.post("/rebalance", {"operation_id": operation_id})
    assert (again.status_code, again.json()["outcome"]) == (200, "done")
    until(lambda: server.metric('moeray_operations_total{kind="rebalance",outcome="done"}') == 1, "it was counted")
    assert server.metric('moeray_operation_phase_seconds_sum{kind="rebalance",phase="ready"}') == 0.5
    assert server.get("/is_scaling_elastic_ep").json()["scale_phase"] == "serving"


def test_a_rebalance_with_nothing_to_do_is_done_at_once(start_server: Any) -> None:
    server = start_server(2)
    server.control.is_balanced = True
    answer = server.post("/rebalance", {})
    assert (answer.status_code, answer.json()["outcome"]) == (200, "done")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"workers": 3}, "workers is not a field"),
        ({"deadline_s": 0}, "deadline_s is 0"),
        ({"deadline_s": "soon"}, "deadline_s"),
        ({"operation_id": "a b"}, "operation_id"),
    ],
)
def test_a_rebalance_refuses_by_name(server: Any, body: dict[str, Any], words: str) -> None:
    assert words in message_of(server.post("/rebalance", body), 400)
    assert not server.control.history


def test_a_worker_that_does_not_tell_its_load_is_named(start_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(2)

    async def fail(_: RebalanceRequest) -> OperationView:
        raise MoerayError("worker 1: did not tell its load within 10 s")

    monkeypatch.setattr(server.control, "rebalance", fail)
    assert "worker 1: did not tell its load" in message_of(server.post("/rebalance", {}), 503)


# vLLM's and SGLang's words


@pytest.mark.parametrize(
    "body", [{"new_data_parallel_size": 3, "drain_timeout": 120}, {"new_ep_size": 3}, {"new_data_parallel_size": 3}]
)
def test_scale_elastic_ep_waits_for_the_end(start_server: Any, pool: Any, until: Any, body: dict[str, Any]) -> None:
    server = start_server(2, view_poll_s=0.05)
    asked = {"is_scaling_elastic_ep": False, "effective_ep_size": 2, "scale_phase": "serving", "last_error": None}
    assert server.get("/is_scaling_elastic_ep").json() == asked
    answer = pool.submit(server.post, "/scale_elastic_ep", body)
    until(lambda: server.control.running, "it has begun")
    state = server.post("/is_scaling_elastic_ep", {}).json()
    assert (state["is_scaling_elastic_ep"], state["scale_phase"]) == (True, "planned")
    server.control.go_on(*ALL_PHASES[:4])
    assert not answer.done()
    server.add_worker(2)
    server.publish(server.workers, epoch=2)
    server.control.go_on(*ALL_PHASES[4:], outcome="done")
    result = answer.result()
    assert result.status_code == 200
    assert result.json()["message"] == "Scaled to 3 data parallel engines"
    assert (result.json()["old_ep_size"], result.json()["new_ep_size"]) == (2, 3)
    state = server.get("/is_scaling_elastic_ep").json()
    assert state == {**asked, "effective_ep_size": 3, "scale_phase": "serving_expanded"}


@pytest.mark.parametrize(("seconds", "status"), [(0.5, 500), (70.0, 408)])
def test_scale_elastic_ep_tells_why_it_failed(
    start_server: Any, pool: Any, until: Any, seconds: float, status: int
) -> None:
    server = start_server(2)
    answer = pool.submit(server.post, "/scale_elastic_ep", {"new_data_parallel_size": 1})
    until(lambda: server.control.running, "it has begun")
    reason = "worker 1: did not connect within 60 s"
    server.control.go_on("connecting", "rolled_back", outcome="rolled_back", reason=reason, seconds=seconds)
    assert reason in message_of(answer.result(), status)
    state = server.get("/is_scaling_elastic_ep").json()
    assert (state["is_scaling_elastic_ep"], state["scale_phase"], state["last_error"]) == (False, "serving", reason)


def test_scale_elastic_ep_outlives_a_controller_that_is_started_anew(start_server: Any, pool: Any, until: Any) -> None:
    server = start_server(2)
    answer = pool.submit(server.post, "/scale_elastic_ep", {"new_ep_size": 1})
    until(lambda: server.control.running, "it has begun")
    server.control.is_silent = True
    server.control.go_on(*ALL_PHASES, outcome="done")
    server.control.is_silent = False
    assert answer.result().status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "new_data_parallel_size and new_ep_size are not given"),
        ({"new_ep_size": 2, "new_data_parallel_size": 2}, "both given"),
        ({"new_ep_size": 2, "drain_timeout": 0}, "drain_timeout"),
        ({"new_ep_size": 2, "workers": 2}, "workers is not a field"),
    ],
)
def test_scale_elastic_ep_refuses_by_name(server: Any, body: dict[str, Any], words: str) -> None:
    assert words in message_of(server.post("/scale_elastic_ep", body), 400)


# Metrics


def test_operations_are_counted_once_whoever_began_them(start_server: Any, until: Any) -> None:
    server = start_server(2)
    done = 'moeray_operations_total{kind="scale",outcome="done"}'
    server.post("/scale", {"workers": 3})
    assert server.metric("moeray_operation_running") == 1
    server.control.go_on(*ALL_PHASES, outcome="done")
    until(lambda: server.metric(done) == 1, "it was counted")
    assert server.metric("moeray_operation_running") == 0
    assert server.metric('moeray_operation_phase_seconds_sum{kind="scale",phase="ready"}') == 0.5
    assert server.metric('moeray_last_operation_phase_seconds{phase="connecting"}') == 0.5
    assert server.metric("moeray_moved_experts_total") == 4
    assert server.metric("moeray_moved_bytes_total") == 1000
    assert server.metric("moeray_moved_kv_blocks_total") == 3
    # Another client's, of which this front end hears by the view only.
    started = asyncio.run(server.control.scale(ScaleRequest(workers=1)))
    server.publish(server.workers, slot_1="leaving")
    until(lambda: server.metric("moeray_operation_running") == 1, "it was heard of")
    server.control.go_on("rolled_back", outcome="rolled_back", reason="late")
    until(lambda: server.metric(done.replace("done", "rolled_back")) == 1, "it was counted")
    server.publish(server.workers)
    assert server.post("/scale", {"workers": 1, "operation_id": started.operation_id}).status_code == 200
    assert (server.metric(done), server.metric(done.replace("done", "rolled_back"))) == (1, 1)
    assert server.metric("moeray_moved_experts_total") == 4


def test_a_history_from_before_is_not_counted_and_idle_asks_nothing(start_server: Any, until: Any) -> None:
    server = start_server(2)
    until(lambda: server.control.num_questions == 1, "it has asked once")
    other = start_server(2, state="starting")
    asyncio.run(other.control.scale(ScaleRequest(workers=2)))
    other.control.publish(msgspec.structs.replace(other.control.current, version=2, state="serving"))
    until(lambda: len(other.front_end.router.members) == 2, "it serves")
    assert server.control.num_questions == 1


def test_the_longest_pause_of_any_stream_that_overlaps_the_operation() -> None:
    gap = GapWindow()
    gap.observe(0.0, 9.0)
    assert gap.longest_s == 0
    gap.begin(10.0)
    gap.observe(9.5, 10.25)
    gap.observe(10.5, 10.75)
    assert gap.longest_s == 0.75
    gap.end(11.0)
    gap.observe(10.75, 12.0)
    gap.observe(11.5, 90.0)
    assert gap.longest_s == 1.25
    gap.begin(100.0)
    gap.observe(0.0, 99.0)
    assert gap.longest_s == 0


def test_a_pause_at_the_switch_is_seen(start_server: Any, pool: Any, until: Any) -> None:
    server = start_server(1)
    worker = server.workers[0]
    worker.step_s = 0.01
    answer = pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 60})
    until(lambda: worker.num_tokens and worker.num_tokens[0] > 5, "it streams")
    server.post("/scale", {"workers": 2})
    worker.is_paused = True
    paused_at = worker.num_tokens[0]
    pool.submit(lambda: asyncio.run(asyncio.sleep(0.2))).result()
    worker.is_paused = False
    until(lambda: not worker.num_tokens or worker.num_tokens[0] > paused_at + 2, "it streams again")
    server.control.go_on(*ALL_PHASES, outcome="done")
    assert answer.result().status_code == 200
    assert 0.15 < server.metric("moeray_operation_client_gap_seconds") < 5


# Over Ray


class Method:
    """An actor's method; `error` is what its caller gets."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def remote(self, *_: object) -> None:
        raise self._error


class Handle:
    def __init__(self, error: Exception) -> None:
        self.scale = self.rebalance = self.operation = self.operations = Method(error)
        self.wait_operation = self.faults = Method(error)


def thrown_over_ray(error: Exception) -> Exception:
    """What the caller of an actor's method gets that raises `error`."""
    result: Exception = RayTaskError("scale", "Traceback ...", error).as_instanceof_cause()
    return result


@pytest.mark.parametrize(
    ("thrown", "expected"),
    [
        (thrown_over_ray(ValueError("workers is 9, must be from 1 to 4")), ValueError),
        (thrown_over_ray(OperationRefused("busy", operation_id="one")), OperationRefused),
        (thrown_over_ray(ControlTimeout("a worker did not answer")), MoerayError),
        (thrown_over_ray(RuntimeError("a bug")), MoerayError),
        (ActorDiedError(), WorkerDied),
        (ActorUnavailableError("gone for now", None), ControlTimeout),
    ],
)
def test_errors_of_the_controller_come_through_ray(thrown: Exception, expected: type[Exception]) -> None:
    control = RayControl(Handle(thrown))
    for call in (
        lambda: control.scale(ScaleRequest(workers=9)),
        lambda: control.rebalance(RebalanceRequest()),
        lambda: control.operation("one"),
        lambda: control.operations(),
        lambda: control.wait_operation("one", 0.1),
        lambda: control.faults(),
    ):
        with pytest.raises(expected) as caught:
            asyncio.run(call())
        assert type(caught.value) is expected
        if isinstance(caught.value, OperationRefused):
            assert caught.value.operation_id == "one"
