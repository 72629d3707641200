"""Sizes that do not divide the number of experts: the same tokens as from one worker, and a balanced placement."""

from pathlib import Path

import pytest

from moeray.comm.placement import ExpertPlacement
from moeray.worker.messages import SamplingParams
from tests.support.checkpoints import save_qwen3_moe
from tests.support.workers import WorkerSet, answers

MAX_WORKERS = 7
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0.0),
    "seeded": SamplingParams(max_tokens=24, temperature=0.9, seed=5),
}


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
        expected = answers(workers, 1, SAMPLINGS)
        for number, size in enumerate(sizes):
            workers.reconfigure(range(size))
            assert_balanced(workers.topology.placement)
            for name, found in answers(workers, 2 + number, SAMPLINGS).items():
                assert found == expected[name] * size
