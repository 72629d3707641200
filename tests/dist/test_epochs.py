"""Changes of membership at the workers: prepare beside, switch between two steps, hand over, discard."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moeray.comm.errors import GroupError
from moeray.worker.messages import SamplingParams
from tests.support.checkpoints import save_qwen3_moe
from tests.support.ranks import on_every_rank
from tests.support.workers import FrontEnd, WorkerSet, wait_until

LONG = 120
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=LONG, temperature=0.0),
    "seeded": SamplingParams(max_tokens=LONG, temperature=0.9, seed=5, frequency_penalty=0.3),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_moe(tmp_path_factory.mktemp("tiny"))


def prompt(number: int) -> list[int]:
    return [(number * 31 + k * 7) % 300 for k in range(20 + number * 3)]


@pytest.fixture(scope="module")
def undisturbed(tiny: Path) -> dict[str, list[int]]:
    """What every stream says without any change of membership, from one worker."""
    tokens: dict[str, list[int]] = {}
    with WorkerSet(tiny, 1) as workers:
        front_end = FrontEnd(workers.topology, workers.client, 1)
        front_end.attach()
        for name, sampling in SAMPLINGS.items():
            for number in range(6):
                front_end.submit(0, f"{name}-{number}", prompt(number), sampling)
        for name in SAMPLINGS:
            for number in range(6):
                seq_id = f"{name}-{number}"
                wait_until(lambda seq_id=seq_id: front_end.is_done(seq_id), seq_id)  # type: ignore[misc]
                tokens[seq_id] = front_end.token_ids(seq_id)
        front_end.close()
    return tokens


@pytest.fixture
def workers(tiny: Path) -> Iterator[WorkerSet]:
    with WorkerSet(tiny, 2, min_workers=1) as workers:
        yield workers


def submit_all(front_end: FrontEnd, slots: tuple[int, ...]) -> None:
    for name, sampling in SAMPLINGS.items():
        for number in range(6):
            front_end.submit(slots[number % len(slots)], f"{name}-{number}", prompt(number), sampling)
    wait_until(lambda: front_end.pump() and len(front_end.tokens) == 12, "first tokens of all streams")


def expect_undisturbed(front_end: FrontEnd, undisturbed: dict[str, list[int]]) -> None:
    for seq_id, tokens in undisturbed.items():
        wait_until(lambda seq_id=seq_id: front_end.is_done(seq_id), seq_id)  # type: ignore[misc]
        assert front_end.token_ids(seq_id) == tokens
    assert not front_end.failures


def test_streams_are_undisturbed_by_growing_and_shrinking(
    workers: WorkerSet, front_end: FrontEnd, undisturbed: dict[str, list[int]]
) -> None:
    submit_all(front_end, (0, 1))
    workers.reconfigure([0, 1, 2])
    front_end.connect(workers.topology)
    front_end.attach()
    for slots in ([0, 1, 2, 3], [1, 2], [2]):  # slot 0 leaves, then nobody is left of the first epoch
        workers.reconfigure(slots)
        front_end.connect(workers.topology)
        front_end.pump()
    expect_undisturbed(front_end, undisturbed)
    assert front_end.num_handed_over > 0


def test_handed_over_sequences_find_their_cache(workers: WorkerSet, front_end: FrontEnd) -> None:
    """The target recomputes less than a block for each sequence, beside its own work."""
    for number in range(4):
        front_end.submit(0, str(number), prompt(number) * 4, SAMPLINGS["greedy"])
    wait_until(lambda: front_end.pump() and all(len(front_end.tokens[str(n)]) > 3 for n in range(4)), "tokens")
    before = workers.worker(1).engine
    assert before is not None
    computed = before.parts.reporter.counters.prompt_tokens
    workers.reconfigure([1])
    front_end.connect(workers.topology)
    for number in range(4):
        wait_until(lambda number=number: front_end.is_done(str(number)), str(number))  # type: ignore[misc]
    assert front_end.num_handed_over == 4
    # Prompts of 80 to 116 tokens: without copied blocks all of it would be prefilled again.
    assert before.parts.reporter.counters.prompt_tokens - computed <= 4 * 16


def test_a_late_submit_to_a_leaver_is_passed_on(workers: WorkerSet, front_end: FrontEnd) -> None:
    workers.reconfigure([1])
    assert not workers.worker(0).status().is_serving
    assert workers.worker(0).commit(1).result(5.0) == 1, "a leaver that is asked again answers again"
    front_end.connect(workers.topology)
    front_end.submit(0, "late", [1, 2, 3], SAMPLINGS["greedy"])
    wait_until(lambda: front_end.is_done("late"), "the late request")
    assert front_end.num_handed_over == 1


def test_switching_while_all_are_parked(workers: WorkerSet, front_end: FrontEnd) -> None:
    workers.reconfigure([0, 1, 2])
    workers.reconfigure([0, 2])
    front_end.connect(workers.topology)
    front_end.attach()
    front_end.submit(2, "after", [1], SAMPLINGS["greedy"])
    wait_until(lambda: front_end.is_done("after"), "a request on the joiner")


def test_a_discarded_epoch_changes_nothing_and_the_next_works(
    workers: WorkerSet, front_end: FrontEnd, undisturbed: dict[str, list[int]]
) -> None:
    submit_all(front_end, (0, 1))
    topology = workers.prepare([1])
    assert workers.worker(1).status().prepared_epoch == topology.epoch
    for worker in workers.workers:
        worker.discard(topology.epoch)
        worker.discard(topology.epoch)  # harmless
    assert workers.worker(1).status().prepared_epoch is None
    assert workers.worker(0).status().epoch == 0
    workers.reconfigure([0])
    front_end.connect(workers.topology)
    expect_undisturbed(front_end, undisturbed)


def test_a_member_that_does_not_come_is_named_and_serving_goes_on(
    workers: WorkerSet, front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moeray.worker import worker as worker_module

    monkeypatch.setattr(worker_module, "WARM_TIMEOUT_S", 1.0)
    topology = workers.topology
    store = workers.worker(0).host_store(7)
    following = type(topology)(epoch=7, members=topology.members, placement=topology.placement)
    with pytest.raises(GroupError, match="slots? .*1") as caught:
        workers.worker(0).connect(following, store)
    assert caught.value.slots == (1,)
    front_end.submit(0, "still", [1], SAMPLINGS["greedy"])
    wait_until(lambda: front_end.is_done("still"), "a request in the old epoch")


def test_kernels_and_buffers_are_built_once_and_keep_their_addresses(workers: WorkerSet, front_end: FrontEnd) -> None:
    def identities(slot: int) -> list[int]:
        loaded = workers.worker(slot)._require_loaded()
        runners = loaded.model.moe_runners()
        return [
            *(id(runner.quant_method.moe_kernel) for runner in runners),
            *(parameter.data_ptr() for parameter in loaded.model.parameters()),
            *(tensor.data_ptr() for tensor in loaded.buffers.tensors.values()),
            *(page.data_ptr() for page in (*loaded.cache.keys, *loaded.cache.values)),
        ]

    before = identities(0)
    for number in range(10):
        workers.reconfigure([0] if number % 2 else [0, 1, 2][: 2 + number % 3])
        for slot in [worker.slot for worker in workers.workers if worker.slot not in workers.topology.slots]:
            if slot in front_end._links:
                front_end.disconnect(slot)
            workers.remove(slot)
        front_end.submit(0, str(number), [number], SamplingParams(max_tokens=3, temperature=0.0))
        wait_until(lambda number=number: front_end.is_done(str(number)), f"request {number}")  # type: ignore[misc]
    assert identities(0) == before


def test_a_seat_in_use_is_never_overwritten(workers: WorkerSet) -> None:
    from moeray.worker.expert_transfer import seat_fills

    current = workers.topology.placement
    swapped = tuple(tuple(reversed(members)) for members in current.assignments)
    following = type(current)(
        num_experts=current.num_experts, num_seats=current.num_seats, slots=current.slots, assignments=swapped
    )
    with pytest.raises(ValueError, match=r"seat 0 holds expert 0, expert 4 needs a free one"):
        seat_fills(current, following, 0)


def test_an_epoch_that_was_not_prepared_cannot_be_committed(workers: WorkerSet) -> None:
    from moeray.comm.errors import StartupError

    with pytest.raises(StartupError, match="cannot commit epoch 9"):
        workers.worker(0).commit(9)
    assert on_every_rank(2, lambda rank: workers.worker(rank).status().is_serving) == [True, True]
