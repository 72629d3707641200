"""Connections to workers break, and the controller may be silent meanwhile.

Nobody waits for ever, and nobody is refused for a moment's sake.
"""

import asyncio
import time
from typing import Any

import pytest

from moeray.api import pulse
from moeray.api.pulse import Pulse
from tests.support.api_control import FakeControl
from tests.unit.api.test_api_elastic import GREEDY, SEEDED, run_some, submits_of, token_ids
from tests.unit.api.test_api_faults import error_of


@pytest.mark.parametrize("stream", [True, False])
def test_workers_that_vanish_while_the_controller_hangs_end_their_requests_in_time(
    start_server: Any, pool: Any, until: Any, stream: bool
) -> None:
    server = start_server(2, recovery_timeout_s=1.2)
    for worker in server.workers:
        worker.is_paused = True
    answers = [pool.submit(server.post, "/generate", {**SEEDED, "stream": stream}) for _ in range(4)]
    until(lambda: all(len(worker.running) == 2 for worker in server.workers), "all run")
    run_some(until, *server.workers)
    server.control.is_hung = True
    began = time.monotonic()
    for worker in server.workers:
        worker.stop()
    late = pool.submit(server.post, "/generate", GREEDY)
    until(lambda: server.get("/health").status_code == 503, "health says so", 1.0)
    health = server.get("/health").json()
    assert health["num_serving"] == 0
    assert "worker 0: its connection was lost; worker 1: its connection was lost" in health["cause"]
    until(lambda: "the controller has not answered for" in server.get("/health").json()["cause"], "and who", 1.0)
    errors = [error_of(answer) for answer in (*answers, late)]
    assert 1.1 < time.monotonic() - began < 4.0
    assert {error["code"] for error in errors} == {"recovery_timeout"}
    assert all("worker 0: its connection was lost" in error["message"] for error in errors)
    assert server.post("/generate", GREEDY).status_code == 503


def test_one_of_the_group_vanishes_while_the_controller_hangs(start_server: Any, pool: Any, until: Any) -> None:
    server = start_server(2, recovery_timeout_s=0.9)
    victim, other = server.workers
    other.is_paused = True  # it waits for the other in an exchange
    answer = pool.submit(server.post, "/generate", {**GREEDY, "stream": True})
    server.control.is_hung = True
    victim.stop()
    until(lambda: server.get("/health").status_code == 503, "health says so", 1.0)
    body = server.get("/health").json()
    assert body["num_serving"] == 0
    assert body["cause"].startswith("worker 0: its connection was lost; the controller has not answered for ")
    assert error_of(answer)["code"] == "recovery_timeout"
    server.control.is_hung = False
    server.publish([other], epoch=2)
    other.is_paused = False
    assert server.get("/health").json()["num_serving"] == 1
    assert server.post("/generate", {**GREEDY, "max_tokens": 3}).status_code == 200


def test_one_that_cannot_be_reached_is_left_out_while_the_controller_answers(
    start_server: Any, pool: Any, until: Any
) -> None:
    server = start_server(2, recovery_timeout_s=0.9)
    fields = {**SEEDED, "max_tokens": 20}
    expected = token_ids(pool.submit(server.post, "/generate", fields))
    gone = server.workers[0]
    gone.is_paused = True
    answers = [pool.submit(server.post, "/generate", fields) for _ in range(2)]
    until(lambda: gone.running, "one is there")
    gone.stop()
    until(lambda: server.front_end.router.members == ((1, 0),), "it gets nothing more", 1.0)
    answers.append(pool.submit(server.post, "/generate", fields))
    assert [token_ids(answer) for answer in answers] == [expected] * 3
    time.sleep(1.0)
    health = server.get("/health")
    assert (health.status_code, health.json()["num_serving"]) == (200, 1)


def test_a_moment_without_connections_refuses_nobody(start_server: Any, pool: Any, until: Any) -> None:
    server = start_server(2, max_queue=1, max_inflight_per_worker=4)
    links = server.front_end._links
    for worker in server.workers:
        worker.is_paused = True
    first = [pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 5}) for _ in range(4)]
    until(lambda: all(len(worker.running) == 2 for worker in server.workers), "they run")

    def lose() -> None:
        for key, peer in links._peers.items():
            peer.is_attached, peer.is_lost = False, True
            server.front_end._on_lost(key)

    server.loop.call_soon_threadsafe(lose)
    until(lambda: not server.front_end.router.members, "none can be reached")
    assert server.get("/health").status_code == 200
    later = [pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 5}) for _ in range(4)]
    until(lambda: len(server.front_end.ledger.queue) == 4, "they queue, beyond the bound")
    assert all(len(submits_of(worker)) == 2 for worker in server.workers)
    server.loop.call_soon_threadsafe(links.beat)
    until(lambda: all(len(submits_of(worker)) == 4 for worker in server.workers), "they are given out")
    for worker in server.workers:
        worker.is_paused = False
    assert {answer.result().status_code for answer in [*first, *later]} == {200}
    assert not links.lost


def test_a_hung_controller_is_ended_once_and_a_slow_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "PERIOD_S", 0.01)
    monkeypatch.setattr(pulse, "SLICE_S", 0.02)

    async def story() -> None:
        control = FakeControl(None, None)  # type: ignore[arg-type]
        may_end = [True]
        watch = Pulse(control, on_change=lambda: None, may_end=lambda: may_end[0], hung_s=0.3)
        running = asyncio.create_task(watch.run())
        control.is_hung = True
        await asyncio.sleep(0.15)
        assert watch.silent_s > 0.05
        control.is_hung = False
        await asyncio.sleep(0.1)
        assert (watch.silent_s, control.num_ended) == (0.0, 0)
        control.is_silent = True  # it cannot be reached, which is another matter
        await asyncio.sleep(0.5)
        assert control.num_ended == 0
        control.is_silent, control.is_hung, may_end[0] = False, True, False
        await asyncio.sleep(0.5)
        assert control.num_ended == 0
        may_end[0] = True
        await asyncio.sleep(0.5)
        assert (watch.silent_s, control.num_ended) == (0.0, 1)
        running.cancel()

    asyncio.run(story())
