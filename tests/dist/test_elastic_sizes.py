"""Sizes that do not divide the number of experts: the same tokens as from one worker, and a balanced placement."""

from pathlib import Path

import pytest

from moeray.comm.placement import ExpertPlacement
from moeray.worker.messages import SamplingParams
from tests.support.checkpoints import save_qwen3_moe
from tests.support.workers import FrontEnd, WorkerSet, wait_until

MAX_WORKERS = 7
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0.0),
    "seeded": SamplingParams(max_tokens=24, temperature=0.9, seed=5),
}


def answers(workers: WorkerSet, lease: int) -> dict[str, list[list[int]]]:
    """What each worker says to each kind of request; all get theirs at the same time."""
    front_end = FrontEnd(workers.topology, workers.client, lease)
    front_end.attach()
    tokens: dict[str, list[list[int]]] = {}
    for name, sampling in SAMPLINGS.items():
        for slot in workers.topology.slots:
            front_end.submit(slot, f"{name}-{slot}", [(k * 7) % 300 for k in range(30)], sampling)
    for name in SAMPLINGS:
        for slot in workers.topology.slots:
            wait_until(lambda seq_id=f"{name}-{slot}": front_end.is_done(seq_id), f"{name} at {slot}")  # type: ignore[misc]
        tokens[name] = [front_end.token_ids(f"{name}-{slot}") for slot in workers.topology.slots]
    assert not front_end.failures
    front_end.close()
    return tokens


def assert_balanced(placement: ExpertPlacement) -> None:
    """In each layer every expert has one seat, and any two workers hold as many, give or take one."""
    for layer in range(placement.num_layers):
        held = [[e for e in placement.seats_of(layer, slot) if e >= 0] for slot in placement.slots]
        assert sorted(expert for experts in held for expert in experts) == list(range(placement.num_experts))
        counts = [len(experts) for experts in held]
        assert max(counts) - min(counts) <= 1, counts


@pytest.mark.parametrize(("num_experts", "sizes"), [(8, [3, 5, 7, 2]), (60, [7, 4])])
def test_any_size_serves_any_number_of_experts(tmp_path: Path, num_experts: int, sizes: list[int]) -> None:
    path = save_qwen3_moe(tmp_path, num_experts=num_experts)
    with WorkerSet(path, 1, max_workers=MAX_WORKERS) as workers:
        expected = answers(workers, 1)
        for number, size in enumerate(sizes):
            workers.reconfigure(range(size))
            assert_balanced(workers.topology.placement)
            for name, found in answers(workers, 2 + number).items():
                assert found == expected[name] * size
