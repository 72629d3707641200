"""Workers die, all of them if it must be: requests wait, go on with the same tokens, or end with an error in time."""

import asyncio
import json
import time
from concurrent.futures import Future
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from moeray.api.assignment import Assignment
from moeray.api.fault_metrics import FaultMetrics
from moeray.api.ledger import Ledger
from moeray.api.metrics import Metrics
from moeray.api.recovery import Recovery
from moeray.api.router import Router
from moeray.comm.errors import OperationRefused
from moeray.deploy.cli import app
from moeray.deploy.front_end_keeper import DEATHS_WITHIN_S, Restarts
from moeray.elastic.view import FaultView, OperationView, ScaleRequest
from tests.unit.api.test_api_elastic import GREEDY, SEEDED, run_some, submits_of, token_ids
from tests.unit.api.test_api_ledger import make_request

CAUSE = "worker 1: its process died; no worker is left: waiting for 1 to start"


def fault(fault_id: int = 0, **changes: Any) -> FaultView:
    """Worker 1 has died."""
    values: dict[str, Any] = {
        "fault_id": fault_id,
        "slot": 1,
        "incarnation": 0,
        "kind": "died",
        "cause": "its process died",
        "epoch": 3,
        "at": time.time(),
        "recovered_s": None,
        "to_epoch": None,
    }
    return FaultView(**(values | changes))


def kill_all(server: Any) -> None:
    """All workers die: first the view shows that, then that nothing serves until others have started."""
    server.publish(server.workers, **{f"slot_{worker.slot}": "dead" for worker in server.workers})
    server.publish([], cluster="recovering", cause=CAUSE)


def error_of(answer: "Future[httpx.Response]") -> dict[str, Any]:
    """The error of an answer to /generate, which is the last event if it has begun to stream."""
    response = answer.result(20)
    if response.status_code != 200:
        assert response.headers["retry-after"]
        return {"status": response.status_code, **response.json()["error"]}
    datas = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert datas[-1] == "[DONE]"
    return {"status": 200, **json.loads(datas[-2])["error"]}


# All workers die


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_when_all_die_requests_wait_and_go_on_with_the_same_tokens(
    start_server: Any, pool: Any, until: Any, sampling: dict[str, Any]
) -> None:
    server = start_server(2)
    fields = {**sampling, "max_tokens": 40}
    expected = token_ids(pool.submit(server.post, "/generate", fields))
    for worker in server.workers:
        worker.is_paused = True
    streams = [bool(number % 2) for number in range(4)]
    answers = [pool.submit(server.post, "/generate", {**fields, "stream": stream}) for stream in streams]
    until(lambda: all(len(worker.running) == 2 for worker in server.workers), "all run")
    run_some(until, *server.workers)
    server.publish(server.workers, slot_0="dead", slot_1="dead")
    health = server.get("/health")
    assert (health.status_code, health.json()["cause"]) == (503, "workers [0, 1] are dead: waiting for a new group")
    late = pool.submit(server.post, "/generate", fields)
    until(lambda: len(server.front_end.ledger.queue) == 5, "what comes before it is known waits as well")
    server.publish([], cluster="recovering", cause=CAUSE)
    for path in ("/health", "/ready"):
        answer = server.get(path)
        assert (answer.status_code, answer.json()["cause"], answer.json()["cluster"]) == (503, CAUSE, "recovering")
    refused = error_of(pool.submit(server.post, "/generate", fields))
    assert (refused["status"], refused["code"], refused["message"]) == (503, "recovering", f"not serving: {CAUSE}")
    joiner = server.add_worker(0, incarnation=1)
    server.publish([joiner], cluster="recovering", cause=CAUSE, slot_0="joining")
    assert not any(answer.done() for answer in answers)
    server.publish([joiner], epoch=2)
    assert [token_ids(answer) for answer in (*answers, late)] == [expected] * 5
    assert [submit.attempt for submit in submits_of(joiner)] == [1, 1, 1, 1, 0]
    assert server.get("/health").status_code == 200
    assert server.metric('moeray_resubmitted_sequences_total{reason="lost"}') == 4


def test_what_waits_too_long_ends_with_an_error_and_the_next_request_is_served(
    start_server: Any, pool: Any, until: Any
) -> None:
    server = start_server(2, recovery_timeout_s=0.5)
    for worker in server.workers:
        worker.is_paused = True
    answers = [pool.submit(server.post, "/generate", {**SEEDED, "stream": stream}) for stream in (True, True, False)]
    until(lambda: sum(len(worker.running) for worker in server.workers) == 3, "all run")
    run_some(until, *server.workers)
    began = time.monotonic()
    kill_all(server)
    errors = [error_of(answer) for answer in answers]
    assert 0.4 < time.monotonic() - began < 5.0
    assert [error["status"] for error in errors] == [200, 200, 503]
    for error in errors:
        assert (error["type"], error["code"]) == ("server_error", "recovery_timeout")
        assert error["message"] == f"nothing serves for 0.5 s (recovery_timeout_s): {CAUSE}"
    assert not server.front_end.ledger.queue
    assert server.metric('moeray_requests_total{outcome="recovery_timeout"}') == 3
    server.publish([server.add_worker(0, incarnation=1)], epoch=2)
    until(lambda: server.get("/health").status_code == 200, "it serves")
    assert server.post("/generate", {**GREEDY, "max_tokens": 3}).status_code == 200


def test_survivors_that_cannot_serve_alone_keep_what_they_have(start_server: Any, pool: Any, until: Any) -> None:
    server = start_server(2)
    fields = {**GREEDY, "max_tokens": 20}
    survivor = server.workers[0]
    for worker in server.workers:
        worker.is_paused = True
    answers = [pool.submit(server.post, "/generate", {**fields, "stream": True}) for _ in range(2)]
    until(lambda: all(worker.running for worker in server.workers), "both run")
    server.publish(server.workers, cluster="recovering", cause=CAUSE, slot_1="dead")
    assert server.get("/health").json()["cause"] == CAUSE
    again = server.add_worker(1, incarnation=1)
    server.publish([survivor, again], epoch=2)
    survivor.is_paused = False
    tokens = [token_ids(answer) for answer in answers]
    assert tokens[0] == tokens[1]
    assert {submit.attempt for submit in submits_of(survivor)} <= {0, 1}


def test_a_group_that_is_never_made_again_is_given_up_in_time(start_server: Any, pool: Any, until: Any) -> None:
    server = start_server(2, recovery_timeout_s=0.4)
    for worker in server.workers:
        worker.is_paused = True
    answer = pool.submit(server.post, "/generate", GREEDY)
    until(lambda: server.workers[0].running, "it runs")
    server.publish(server.workers, slot_1="dead")
    assert server.get("/health").status_code == 200
    assert error_of(answer)["code"] == "recovery_timeout"
    assert "workers [1] are dead" in server.get("/health").json()["cause"]
    assert server.post("/generate", GREEDY).status_code == 503
    until(lambda: not server.workers[0].running, "it was aborted")
    server.publish(server.workers[:1], epoch=2)
    assert server.get("/health").status_code == 200


def test_the_clock_runs_from_where_serving_stopped_and_is_set_back() -> None:
    async def story() -> None:
        ends: list[float] = []
        given_up: list[bool] = []
        recovery = Recovery(0.3, lambda: ends.append(time.monotonic()))
        began = time.monotonic()
        recovery.update(False)
        await asyncio.sleep(0.2)
        recovery.update(False)
        await asyncio.sleep(0.2)
        assert 0.29 < ends[0] - began < 0.39
        given_up.append(recovery.is_over)
        recovery.update(False)
        await asyncio.sleep(0.4)
        assert len(ends) == 1
        recovery.update(True)
        given_up.append(recovery.is_over)
        assert given_up == [True, False]
        recovery.update(False)
        await asyncio.sleep(0.2)
        recovery.update(True)
        await asyncio.sleep(0.2)
        assert len(ends) == 1

    asyncio.run(story())


class StuckLinks:
    """Links of which one member takes no messages."""

    lease = 7

    def __init__(self, stuck: tuple[int, int]) -> None:
        self.stuck = stuck
        self.sent: list[tuple[tuple[int, int], object]] = []

    def send(self, member: tuple[int, int], message: object) -> bool:
        if member != self.stuck:
            self.sent.append((member, message))
        return member != self.stuck


@pytest.mark.parametrize("others", [1, 0])
def test_a_member_that_takes_no_messages_fails_nothing(others: int) -> None:
    ledger, router = Ledger(10), Router(2)
    assignment = Assignment(ledger, router, Metrics())
    links = StuckLinks((0, 0))
    assignment.links = links  # type: ignore[assignment]
    for slot in range(1 + others):
        router.add((slot, 0))
    request = make_request(2)
    ledger.open(request, 2)
    assignment.pump()
    assert [member for member, _ in links.sent] == [(1, 0)] * 2 * others
    assert len(ledger.queue) == (0 if others else 2)
    assert router.load((0, 0)).num_sequences == router.load((0, 0)).outstanding_tokens == 0
    assert request.error is None
    links.stuck = (9, 0)
    router.set_leaving((0, 0), False)
    assignment.pump()
    assert len(links.sent) == 2


# What is told of faults


def test_faults_are_told_the_newest_last(start_server: Any) -> None:
    server = start_server(1, admin_key="secret")
    assert httpx.get(server.url + "/faults", timeout=10).status_code == 401
    headers = {"authorization": "Bearer secret"}
    assert httpx.get(server.url + "/faults", headers=headers, timeout=10).json() == {"faults": []}
    server.control.faulty = [fault(0, recovered_s=0.05, to_epoch=4), fault(1, kind="stalled", epoch=4)]
    faults = httpx.get(server.url + "/faults", headers=headers, timeout=10).json()["faults"]
    assert faults == [msgspec.structs.asdict(view) for view in server.control.faulty]


@pytest.mark.parametrize("how", ["is_silent", "is_hung"])
def test_without_a_controller_the_last_news_are_told_with_their_age(start_server: Any, until: Any, how: str) -> None:
    server = start_server(2)
    server.post("/scale", {"workers": 3, "operation_id": "one"})
    server.control.go_on("rolled_back", outcome="rolled_back")
    server.control.faulty = [fault()]
    server.publish(server.workers, slot_1="dead")
    until(lambda: server.metric('moeray_faults_total{kind="died"}') == 1, "it was heard of")
    setattr(server.control, how, True)
    began = time.monotonic()
    faults, operations, one = (server.get(path).json() for path in ("/faults", "/operations", "/operations/one"))
    assert time.monotonic() - began < 3 * 1.2
    assert [view["slot"] for view in faults["faults"]] == [1]
    assert [view["operation_id"] for view in operations["operations"]] == [one["operation_id"]] == ["one"]
    for body in (faults, operations, one):
        assert body["age_s"] >= 0
        assert body["reason"].startswith("the controller does not answer: ")
    unknown = server.get("/operations/two")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "controller_unavailable")


def test_without_a_controller_and_without_news_nothing_is_told(start_server: Any) -> None:
    server = start_server(1, state="starting")
    server.control.is_hung = True
    server.front_end.operations.told_faults._last = None
    answer = server.get("/faults")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "controller_unavailable")
    assert "no answer within" in answer.json()["error"]["message"]


def test_faults_are_counted_once_and_their_recovery_when_it_is_over(start_server: Any, until: Any) -> None:
    server = start_server(2)
    died = 'moeray_faults_total{kind="died"}'
    server.control.faulty = [fault(0)]
    server.publish(server.workers, slot_1="dead")
    until(lambda: server.metric(died) == 1, "it was counted")
    assert server.metric("moeray_recovery_seconds_count") == 0
    server.control.faulty = [fault(0, recovered_s=0.5, to_epoch=4)]
    until(lambda: server.metric("moeray_recovery_seconds_count") == 1, "it is over, without a further view")
    assert (server.metric(died), server.metric("moeray_recovery_seconds_sum")) == (1, 0.5)


def test_faults_of_before_and_forgotten_ones_are_not_counted() -> None:
    registry = CollectorRegistry()
    metrics = FaultMetrics(registry)
    assert metrics.on_faults([fault(0, recovered_s=1.0), fault(1)])
    assert not metrics.on_faults([fault(1, recovered_s=2.0)])
    assert not metrics.on_faults([fault(1, recovered_s=2.0)])
    assert registry.get_sample_value("moeray_faults_total", {"kind": "died"}) == 1
    assert registry.get_sample_value("moeray_recovery_seconds_sum") == 2.0


def test_status_shows_the_last_fault(start_server: Any) -> None:
    server = start_server(2)
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert "fault" not in runner.invoke(app, ["status", "--url", server.url]).output
    cause = "its exchange failed: slots [0] are gone"
    server.control.faulty = [fault(0), fault(1, kind="lost its group", cause=cause, recovered_s=0.123, to_epoch=4)]
    shown = " ".join(runner.invoke(app, ["status", "--url", server.url]).output.split())
    assert f"worker 1 lost its group: {cause} (over after 0.12 s, as epoch 4)" in shown
    server.control.is_silent = True
    assert runner.invoke(app, ["status", "--url", server.url]).exit_code == 0


# A change of size during a repair


def test_a_scale_during_a_repair_is_refused(start_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(2)

    async def refuse(_: ScaleRequest) -> OperationView:
        raise OperationRefused("the group is being repaired, it must serve before it can be changed")

    monkeypatch.setattr(server.control, "scale", refuse)
    answer = server.post("/scale", {"workers": 3})
    assert (answer.status_code, answer.headers["location"]) == (409, "/operations")
    assert "is being repaired" in answer.json()["error"]["message"]
    kill_all(server)
    assert server.post("/scale", {"workers": 3}).status_code == 503


def test_a_repair_is_shown_as_an_operation(start_server: Any, until: Any) -> None:
    server = start_server(2)
    server.post("/scale", {"retire": [1], "operation_id": "repair-1"})
    view = server.control.history["repair-1"]
    server.control.history["repair-1"] = msgspec.structs.replace(view, kind="repair", leavers=())
    assert server.post("/scale", {"workers": 3}).status_code == 409
    server.control.go_on("provisioning", "halting")
    assert server.get("/operations/repair-1").json()["phase"] == "halting"
    assert server.get("/is_scaling_elastic_ep").json()["scale_phase"] == "halting"
    server.publish(server.workers, slot_1="dead")
    assert server.get("/is_scaling_elastic_ep").json()["effective_ep_size"] == 1
    server.control.go_on("connecting", "transferring", "ready", "switched", "retired", outcome="done", seconds=0.01)
    until(lambda: server.metric('moeray_operations_total{kind="repair",outcome="done"}') == 1, "it was counted")
    halting = 'moeray_operation_phase_seconds_count{kind="repair",phase="halting"}'
    assert server.metric(halting) == 1


# The supervisor's patience with front ends


def test_front_ends_that_die_follow_each_other_ever_slower_and_not_for_ever() -> None:
    now = [1000.0]
    restarts = Restarts(lambda: now[0])
    pauses = []
    for _ in range(5):
        pauses.append(restarts.pause_s())
        now[0] += 5.0
    assert pauses == [0.2, 0.4, 0.8, 1.6, None]
    now[0] += DEATHS_WITHIN_S
    assert restarts.pause_s() == 0.2
