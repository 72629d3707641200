"""Step loops of several workers over real groups and sockets: parking, waking, leases, failures, stopping."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeray.comm.messages import Trouble
from moeray.worker.messages import Attach, SamplingParams
from tests.support.checkpoints import save_qwen3_moe
from tests.support.workers import FrontEnd, WorkerSet, wait_until

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_moe(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def three(tiny: Path) -> Iterator[WorkerSet]:
    with WorkerSet(tiny, 3) as workers:
        yield workers


@pytest.fixture
def front_end(three: WorkerSet) -> Iterator[FrontEnd]:
    lease = time.monotonic_ns()  # newer than every earlier test's
    front_end = FrontEnd(three.topology, three.client, lease)
    front_end.attach()
    yield front_end
    front_end.close()


def steps_of(workers: WorkerSet) -> list[int]:
    return [worker.engine.parts.reporter.counters.steps for worker in workers.workers if worker.engine]


@pytest.mark.parametrize("slot", [2, 0, 1])
def test_one_request_to_any_parked_worker_completes(front_end: FrontEnd, slot: int) -> None:
    front_end.submit(slot, "only", [1, 2, 3], GREEDY)
    wait_until(lambda: front_end.is_done("only"), "the request")
    assert len(front_end.token_ids("only")) == 12
    assert front_end.tokens["only"][-1].finish_reason == "length"
    assert front_end.tokens["only"][0].worker_ttft_s is not None


def test_all_ranks_park_and_run_no_step_while_idle(front_end: FrontEnd, three: WorkerSet) -> None:
    front_end.submit(0, "one", [1], GREEDY)
    wait_until(lambda: front_end.is_done("one"), "the request")
    before = steps_of(three)
    assert len(set(before)) == 1, "idle ranks run every step with an empty batch"
    time.sleep(0.3)
    assert steps_of(three) == before


def test_many_uneven_requests_complete_with_the_same_tokens_wherever_they_run(front_end: FrontEnd) -> None:
    prompts = {f"{number}": [(number * 7 + k) % 300 for k in range(1 + number * 5 % 90)] for number in range(36)}
    for number, (seq_id, prompt) in enumerate(prompts.items()):
        front_end.submit(number % 3, seq_id, prompt, GREEDY)
        front_end.submit((number + 1) % 3, seq_id + "-again", prompt, GREEDY)
    for seq_id in prompts:
        wait_until(lambda seq_id=seq_id: front_end.is_done(seq_id) and front_end.is_done(seq_id + "-again"), seq_id)  # type: ignore[misc]
        assert front_end.token_ids(seq_id) == front_end.token_ids(seq_id + "-again")


def test_a_sequence_continues_after_tokens_that_were_sent_before(front_end: FrontEnd) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=0.8, seed=11, presence_penalty=0.5)
    front_end.submit(0, "whole", [5, 6, 7], sampling)
    wait_until(lambda: front_end.is_done("whole"), "the whole")
    whole = front_end.token_ids("whole")
    front_end.submit(1, "rest", [5, 6, 7], sampling, output=whole[:8])
    wait_until(lambda: front_end.is_done("rest"), "the rest")
    assert [token.token_id for token in front_end.tokens["rest"]] == whole[8:]
    assert front_end.tokens["rest"][0].position == 8


def test_abort_frees_the_blocks_within_a_second(front_end: FrontEnd) -> None:
    front_end.submit(1, "long", [1] * 100, SamplingParams(max_tokens=400, temperature=0.0))
    wait_until(lambda: front_end.pump() and len(front_end.tokens["long"]) > 2, "the first tokens")
    front_end.abort(1, "long")
    aborted_at = time.monotonic()
    wait_until(
        lambda: front_end.pump() and front_end.stats[1].num_free_blocks == front_end.stats[1].num_blocks, "free blocks"
    )
    assert time.monotonic() - aborted_at < 1.0
    count = len(front_end.tokens["long"])
    front_end.submit(1, "next", [1], GREEDY)
    wait_until(lambda: front_end.is_done("next"), "the next request")
    assert len(front_end.tokens["long"]) == count


def test_a_newer_lease_takes_over_and_the_older_is_ignored(front_end: FrontEnd, three: WorkerSet) -> None:
    front_end.submit(0, "old", [1] * 50, SamplingParams(max_tokens=400, temperature=0.0))
    wait_until(lambda: front_end.pump() and bool(front_end.tokens["old"]), "the old one's tokens")
    newer = FrontEnd(three.topology, three.client, front_end.lease + 1)
    try:
        newer.attach()
        assert newer.stats[0].num_running == 0
        dropped = newer.stats[0].dropped_messages
        front_end.submit(0, "late", [1], GREEDY)
        front_end.send(0, Attach(front_end.lease))
        newer.submit(0, "new", [1], GREEDY)
        wait_until(lambda: newer.is_done("new"), "the new front end's request")
        wait_until(
            lambda: front_end.pump() and newer.pump() and newer.stats[0].dropped_messages > dropped, "counted drops"
        )
        assert not front_end.tokens["late"]
        assert not newer.tokens["late"]
    finally:
        newer.close()


def test_an_attach_that_is_said_again_is_answered_again_and_frees_nothing(front_end: FrontEnd) -> None:
    front_end.submit(0, "on", [1, 2], SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    wait_until(lambda: front_end.pump() and bool(front_end.tokens["on"]), "the first token")
    front_end.attached.clear()
    front_end.send(0, Attach(front_end.lease))
    wait_until(lambda: front_end.pump() and front_end.attached == {0}, "the answer")
    wait_until(lambda: front_end.is_done("on"), "the request")
    assert len(front_end.token_ids("on")) == 200


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [([1] * 500, 13, "513 tokens, the limit is 512"), ([], 5, "prompt is empty")],
)
def test_what_cannot_run_is_refused(front_end: FrontEnd, prompt: list[int], max_tokens: int, message: str) -> None:
    front_end.submit(0, "bad", prompt, SamplingParams(max_tokens=max_tokens))
    wait_until(lambda: front_end.pump() and bool(front_end.rejected), "the refusal")
    assert message in front_end.rejected[0].message
    assert front_end.rejected[0].code == "invalid"


def test_exactly_the_maximum_length_completes(front_end: FrontEnd) -> None:
    front_end.submit(2, "max", [3] * 500, GREEDY)
    wait_until(lambda: front_end.is_done("max"), "the longest request")
    assert len(front_end.token_ids("max")) == 12


def test_garbage_on_the_socket_is_dropped(front_end: FrontEnd) -> None:
    front_end._links[0].send(b"\xff\x00 no message")
    front_end.send(0, {"type": "submit", "lease": "no number"})
    front_end.submit(0, "good", [1], GREEDY)
    wait_until(lambda: front_end.is_done("good"), "the good request")


def test_a_failed_engine_says_why_and_its_peers_wait_for_another_group(tiny: Path) -> None:
    workers = WorkerSet(tiny, 2, group_timeout_s=5.0)
    front_end = FrontEnd(workers.topology, workers.client, 1)
    front_end.attach()
    victim, survivor = workers.workers[1], workers.workers[0]
    assert victim.engine is not None
    assert survivor.engine is not None
    victim.engine._run_one = lambda: (_ for _ in ()).throw(ValueError("injected"))  # type: ignore[method-assign]
    front_end.submit(0, "one", [1], GREEDY)
    wait_until(lambda: victim.wait(0.0), "the victim's end")
    assert victim.engine.failure == "ValueError: injected"
    assert victim.engine.trouble.wait(-1, 0.0) == Trouble(epoch=0, reason="ValueError: injected", is_fatal=True)
    victim._close()
    trouble = survivor.engine.trouble.wait(-1, 5.0)
    assert trouble is not None
    assert not trouble.is_fatal
    assert "slot 0) of slots [0, 1]: header exchange failed" in trouble.reason
    assert survivor.status().is_halted
    wait_until(lambda: front_end.pump() and len(front_end.failures) == 1, "the victim's failure told")
    assert survivor.stop(5.0)
    assert survivor.engine.failure is None
    front_end.close()


def test_workers_without_a_front_end_leave_by_themselves(tiny: Path) -> None:
    workers = WorkerSet(tiny, 2, orphan_timeout_s=1.0)
    for worker in workers.workers:
        wait_until(lambda worker=worker: worker.wait(0.0), "the orphan's end", 10.0)  # type: ignore[misc]
    assert any(worker.engine is not None and worker.engine.orphaned for worker in workers.workers)
    for worker in workers.workers:
        worker._close()


def test_wakes_that_cross_do_not_leave_a_rank_alone_later(front_end: FrontEnd, three: WorkerSet) -> None:
    """All leave the park at the same time and wake each other; those wakes must not count for the next park."""
    for number in range(15):
        for slot in range(3):
            front_end.submit(slot, f"{number}-{slot}", [1, 2], SamplingParams(max_tokens=2, temperature=0.0))
        for slot in range(3):
            wait_until(lambda: front_end.is_done(f"{number}-{slot}"), f"request {number} on slot {slot}")  # noqa: B023
    time.sleep(0.1)
    engines = [worker.engine for worker in three.workers if worker.engine]
    assert len({engine._step for engine in engines}) == 1, "a rank went on to a header exchange alone"
