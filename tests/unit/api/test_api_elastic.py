"""Workers join, leave and vanish while requests stream: nothing is lost, doubled, refused or changed."""

import json
import random
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from moeray.api.worker_counters import COUNTERS, WorkerCounters
from moeray.worker.messages import Rejected, Submit, WorkerStats

SEEDED: dict[str, Any] = {"prompt": "the quick brown fox", "seed": 11, "ignore_eos": True}
GREEDY: dict[str, Any] = {**SEEDED, "temperature": 0}


def token_ids(answer: "Future[httpx.Response]") -> list[int]:
    """The tokens of an answer to /generate, streamed or not."""
    response = answer.result(20)
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return list(response.json()["token_ids"])
    datas = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert datas[-1] == "[DONE]"
    events = [json.loads(data) for data in datas[:-1]]
    assert not [event for event in events if "error" in event]
    return [token for event in events for token in event["token_ids"]]


def submits_of(worker: Any) -> list[Submit]:
    return [message for message in worker.received if isinstance(message, Submit)]


def run_some(until: Any, *workers: Any) -> None:
    """Let workers make at least a few tokens of all that they have, then hold them."""
    for worker in workers:
        worker.is_paused = False
    until(lambda: all(worker.num_tokens and min(worker.num_tokens) > 2 for worker in workers), "they run")
    for worker in workers:
        worker.is_paused = True


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_what_a_leaver_hands_over_goes_on_with_the_same_tokens(
    start_server: Any, pool: Any, until: Any, stream: bool, sampling: dict[str, Any]
) -> None:
    server = start_server(2)
    leaver, stayer = server.workers
    fields = {**sampling, "max_tokens": 40}
    expected = token_ids(pool.submit(server.post, "/generate", fields))
    for worker in server.workers:
        worker.is_paused = True
    answers = [pool.submit(server.post, "/generate", {**fields, "stream": stream}) for _ in range(6)]
    until(lambda: len(leaver.running) == len(stayer.running) == 3, "all were submitted")
    run_some(until, leaver)
    server.publish(server.workers, slot_0="leaving")
    leaver.leave(1, None)
    until(lambda: len(stayer.running) == 6, "all are at the stayer")
    handed_over = submits_of(stayer)[-3:]
    assert all(submit.attempt == 1 and len(submit.output_ids) > 2 for submit in handed_over)
    server.publish([stayer], epoch=2)
    stayer.is_paused = False
    assert [token_ids(answer) for answer in answers] == [expected] * 6
    assert server.metric('moeray_resubmitted_sequences_total{reason="handed_over"}') == 3
    assert server.metric("moeray_dropped_tokens_total") == 0
    assert server.front_end.router.load((1, 0)).outstanding_tokens == 0


def test_a_leaving_member_keeps_its_requests_and_gets_no_new_ones(start_server: Any, pool: Any, until: Any) -> None:
    server = start_server(2)
    leaver, stayer = server.workers
    for worker in server.workers:
        worker.is_paused = True
    first = [pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 5}) for _ in range(2)]
    until(lambda: leaver.running and stayer.running, "both run")
    server.publish(server.workers, slot_0="leaving")
    later = [pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 5}) for _ in range(4)]
    until(lambda: len(stayer.running) == 5, "the later ones are at the stayer")
    assert len(leaver.running) == 1
    leaver.is_paused = stayer.is_paused = False
    assert {answer.result().status_code for answer in [*first, *later]} == {200}
    assert len(submits_of(leaver)) == 1
    # Rolled back: it stays after all.
    server.publish(server.workers)
    answers = [pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 5}) for _ in range(4)]
    assert {answer.result().status_code for answer in answers} == {200}
    assert len(submits_of(leaver)) > 1


def test_the_leavers_word_counts_also_before_and_after_an_older_view(start_server: Any, pool: Any, until: Any) -> None:
    server = start_server(2)
    leaver, stayer = server.workers
    stayer.is_paused = True
    leaver.leave(1)
    until(lambda: server.front_end.router.at_slot(0) is None, "it gets no more")
    server.publish(server.workers)
    answers = [pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 5}) for _ in range(4)]
    until(lambda: len(stayer.running) == 4, "all are at the stayer")
    assert not submits_of(leaver)
    stayer.is_paused = False
    assert {answer.result().status_code for answer in answers} == {200}


def test_a_late_submit_to_a_leaver_comes_back(start_server: Any, pool: Any, until: Any) -> None:
    server = start_server(1)
    leaver = server.workers[0]
    leaver.is_paused = True
    answers = [pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 5}) for _ in range(3)]
    until(lambda: len(leaver.running) == 3, "all were submitted")
    leaver.leave(None)
    until(lambda: len(server.front_end.ledger.queue) == 3, "nobody takes them yet")
    answers.append(pool.submit(server.post, "/generate", {**GREEDY, "prompt": "héllo", "max_tokens": 5}))
    until(lambda: len(server.front_end.ledger.queue) == 4, "the newest waits behind them")
    assert server.get("/health").status_code == 200
    joiner = server.add_worker(1)
    server.publish([joiner], epoch=2)
    assert {answer.result().status_code for answer in answers} == {200}
    submits = submits_of(joiner)
    assert [submit.attempt for submit in submits] == [1, 1, 1, 0]
    assert [submit.seq_id for submit in submits[:3]] == [submit.seq_id for submit in submits_of(leaver)]


def test_a_target_takes_its_sequences_beyond_its_room(start_server: Any, pool: Any, until: Any) -> None:
    server = start_server(3, max_inflight_per_worker=2, max_queue=1)
    leaver, target, other = server.workers
    for worker in server.workers:
        worker.is_paused = True
    answers = [pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 9}) for _ in range(6)]
    until(lambda: all(len(worker.running) == 2 for worker in server.workers), "all are full")
    answers.append(pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 9}))
    until(lambda: len(server.front_end.ledger.queue) == 1, "the queue is full")
    leaver.leave(1, 7)
    until(lambda: len(target.running) == 3 and len(server.front_end.ledger.queue) == 2, "one by name, one waits first")
    assert [entry.attempt for entry in server.front_end.ledger.queue] == [1, 0]
    assert server.post("/generate", GREEDY).status_code == 429
    other.is_paused = target.is_paused = False
    assert {answer.result().status_code for answer in answers} == {200}


def test_a_sequence_that_was_taken_once_is_not_refused_for_a_full_queue(
    start_server: Any, pool: Any, until: Any
) -> None:
    server = start_server(2)
    leaver, stayer = server.workers
    leaver.is_paused = stayer.is_paused = True
    answer = pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 9})
    until(lambda: leaver.running, "it was submitted")
    leaver.leave(1)
    until(lambda: stayer.running, "it was handed over")
    seq_id = next(iter(stayer.running))
    stayer.running.clear()
    stayer.say(Rejected(seq_id, 1, "queue_full", "no room"))
    until(lambda: stayer.running, "it was tried again")
    stayer.is_paused = False
    assert len(token_ids(answer)) == 9
    assert [submit.attempt for submit in submits_of(stayer)] == [1, 2]


def test_what_a_vanished_member_had_goes_on_elsewhere(start_server: Any, pool: Any, until: Any) -> None:
    server = start_server(3)
    victim = server.workers[1]
    fields = {**SEEDED, "max_tokens": 50}
    expected = token_ids(pool.submit(server.post, "/generate", fields))
    for worker in server.workers:
        worker.is_paused = True
    answers = [pool.submit(server.post, "/generate", {**fields, "stream": True}) for _ in range(6)]
    until(lambda: all(len(worker.running) == 2 for worker in server.workers), "all run")
    run_some(until, *server.workers)
    server.publish([worker for worker in server.workers if worker is not victim], epoch=2)
    for worker in server.workers:
        worker.is_paused = False
    assert [token_ids(answer) for answer in answers] == [expected] * 6
    assert server.metric('moeray_resubmitted_sequences_total{reason="lost"}') == 2


def test_members_that_vanish_together_get_nothing_of_each_other(start_server: Any, pool: Any, until: Any) -> None:
    server = start_server(4)
    stayer = server.workers[3]
    for worker in server.workers:
        worker.is_paused = True
    answers = [pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 5}) for _ in range(8)]
    until(lambda: all(len(worker.running) == 2 for worker in server.workers), "all run")
    server.publish([stayer], epoch=2)
    until(lambda: len(stayer.running) == 8, "all are at the stayer")
    assert [submit.attempt for submit in submits_of(stayer)] == [0] * 2 + [1] * 6
    stayer.is_paused = False
    assert {answer.result().status_code for answer in answers} == {200}


def test_choices_logprobs_stops_and_usage_survive(start_server: Any, pool: Any, until: Any) -> None:
    server = start_server(2)
    leaver, stayer = server.workers
    fields = {**SEEDED, "n": 4, "max_tokens": 30, "logprobs": 1, "stop": ["zzz", "zz"]}
    expected = server.post("/v1/completions", fields).json()
    for worker in server.workers:
        worker.is_paused = True
    answer = pool.submit(server.post, "/v1/completions", fields)
    until(lambda: len(leaver.running) == len(stayer.running) == 2, "all were submitted")
    run_some(until, leaver)
    leaver.leave(1)
    until(lambda: len(stayer.running) == 4, "all are at the stayer")
    stayer.is_paused = False
    body = answer.result().json()
    assert body["choices"] == expected["choices"]
    assert body["usage"] == expected["usage"]


def test_a_handed_over_request_keeps_its_deadline(start_server: Any, pool: Any, until: Any) -> None:
    server = start_server(2, request_timeout_s=1.0)
    for worker in server.workers:
        worker.is_paused = True
    answer = pool.submit(server.post, "/generate", GREEDY)
    until(lambda: server.workers[0].running, "it was submitted")
    server.workers[0].leave(1)
    until(lambda: server.workers[1].running, "it was handed over")
    assert answer.result().status_code == 504
    until(lambda: not server.workers[1].running, "it was aborted where it is now")


def test_a_client_that_leaves_frees_the_next_worker(start_server: Any, until: Any) -> None:
    server = start_server(2)
    for worker in server.workers:
        worker.is_paused = True
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(httpx.post, server.url + "/generate", json=GREEDY, timeout=1.0)
        until(lambda: server.workers[0].running, "it was submitted")
        server.workers[0].leave(1)
        until(lambda: server.workers[1].running, "it was handed over")
        with pytest.raises(httpx.ReadTimeout):
            late.result()
    until(lambda: not server.workers[1].running, "it was aborted where it is now")


def test_a_joiner_is_attached_before_it_serves(start_server: Any, pool: Any, until: Any) -> None:
    server = start_server(1, max_inflight_per_worker=2)
    joiner = server.add_worker(1)
    server.workers[0].is_paused = True
    server.publish(server.workers, slot_1="loading")
    assert not joiner.received
    server.publish(server.workers, slot_1="joining")
    until(lambda: joiner.received, "it is attached")
    answers = [pool.submit(server.post, "/generate", {**GREEDY, "max_tokens": 3}) for _ in range(3)]
    until(lambda: len(server.front_end.ledger.queue) == 1, "one waits for room")
    assert server.front_end.router.members == ((0, 0),)
    server.publish(server.workers, epoch=2)
    until(lambda: submits_of(joiner), "it takes what waits")
    server.workers[0].is_paused = False
    assert {answer.result().status_code for answer in answers} == {200}
    assert server.get("/topology").json()["epoch"] == 2


def test_a_joiner_that_is_rolled_back_leaves_no_trace(start_server: Any, until: Any) -> None:
    server = start_server(1)
    joiner = server.add_worker(1)
    server.publish(server.workers, slot_1="joining")
    until(lambda: joiner.received, "it is attached")
    server.publish(server.workers[:1])
    assert server.front_end.router.members == ((0, 0),)
    assert server.get("/health").json()["num_serving"] == 1
    assert server.post("/generate", {**GREEDY, "max_tokens": 2}).status_code == 200
    assert server.metric('moeray_resubmitted_sequences_total{reason="lost"}') == 0


def test_counters_go_on_in_the_next_incarnation_and_epoch(start_server: Any, until: Any) -> None:
    server = start_server(2)
    for _ in range(2):
        server.post("/generate", {**GREEDY, "max_tokens": 5})
    name = 'moeray_worker_steps_total{slot="0"}'
    until(lambda: server.metric(name) > 0, "it counts")
    before, tokens = server.metric(name), server.metric("moeray_output_tokens_total")
    server.publish(server.workers[1:], epoch=2)
    assert server.metric(name) == before
    assert 'moeray_worker_num_running{slot="0"}' not in server.get("/metrics").text
    again = server.add_worker(0, incarnation=1)
    server.publish([again, server.workers[1]], epoch=3)
    until(lambda: len(server.front_end.router.members) == 2, "it is back")
    assert server.metric("moeray_epoch") == 3
    assert server.metric("moeray_epoch_changes_total") == 2
    assert server.metric("moeray_epoch_output_tokens") == 0
    assert server.post("/generate", {**GREEDY, "max_tokens": 5}).status_code == 200
    until(lambda: server.metric(name) > before, "it counts on")
    assert server.metric("moeray_output_tokens_total") == tokens + 5
    assert server.metric("moeray_epoch_output_tokens") == 5
    assert server.metric("moeray_epoch_workers") == 2


def test_counters_never_go_back_whatever_is_set_back() -> None:
    rng = random.Random(5)
    counters = WorkerCounters()
    zero = WorkerStats(*[0] * len(WorkerStats.__struct_fields__))
    values, incarnations = dict.fromkeys((0, 1), zero), {0: 0, 1: 0}
    shown: dict[int, dict[str, float]] = {}
    for _ in range(400):
        slot = rng.randrange(2)
        kind = rng.random()
        if kind < 0.1:
            counters.forget((slot, incarnations[slot]))
            incarnations[slot] += 1
            values[slot] = zero
        else:
            name = rng.choice(COUNTERS)
            number = 0 if kind < 0.2 else getattr(values[slot], name) + rng.randrange(5)
            values[slot] = msgspec.structs.replace(values[slot], **{name: number})
            counters.update((slot, incarnations[slot]), values[slot])
        totals = dict(counters.totals())
        for known, sums in shown.items():
            assert all(totals[known][name] >= value for name, value in sums.items())
        shown = totals
    assert {slot for slot, _ in counters.gauges()} <= {0, 1}


def test_streams_survive_many_changes(start_server: Any, pool: Any, until: Any) -> None:
    rng = random.Random(2)
    server = start_server(2)
    expected = {
        length: token_ids(pool.submit(server.post, "/generate", {**SEEDED, "max_tokens": length}))
        for length in (60, 150)
    }
    lengths = [rng.choice([60, 150]) for _ in range(24)]
    answers = [
        pool.submit(server.post, "/generate", {**SEEDED, "max_tokens": length, "stream": rng.random() < 0.5})
        for length in lengths
    ]
    serving = list(server.workers)
    for epoch in range(2, 8):
        leaver = rng.choice(serving)
        slot = next(slot for slot in range(4) if slot not in [worker.slot for worker in serving])
        joiner = server.add_worker(slot, incarnation=epoch)
        server.publish([*serving, joiner], epoch - 1, **{f"slot_{leaver.slot}": "leaving", f"slot_{slot}": "joining"})
        targets = [worker.slot for worker in serving if worker is not leaver]
        if rng.random() < 0.7:
            leaver.leave(*targets, slot, None)
            until(lambda leaver=leaver: leaver.has_left, "it has left")
        serving = [worker for worker in (*serving, joiner) if worker is not leaver]
        server.publish(serving, epoch)
    assert [token_ids(answer) for answer in answers] == [expected[length] for length in lengths]
    assert server.metric('moeray_requests_total{outcome="length"}') == 26
    loads = [server.front_end.router.load(member) for member in server.front_end.router.members]
    assert [(load.num_sequences, load.outstanding_tokens) for load in loads] == [(0, 0)] * len(serving)
