"""Quantised checkpoints: the same bits as their decoded weights in an unquantised model, on any number of workers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moeray.worker.messages import SamplingParams
from tests.support.quantized import Quantize, fp8_config, int8_config, save_quantized, to_fp8, to_int8
from tests.support.ranks import Generated, RankSet
from tests.support.workers import FrontEnd, WorkerSet, wait_until

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
PROMPTS = [[(7 * k + n) % 300 for k in range(20 + 9 * n)] for n in range(4)]
# 48 and 96 are no multiples of 32, and 128 is larger than every weight.
FORMATS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "fp8": (to_fp8(32), fp8_config(32)),
    "fp8 in blocks of 128": (to_fp8(128), fp8_config(128)),
    "int8": (to_int8(), int8_config()),
    "int8 packed": (to_int8(packed=True), int8_config("pack-quantized")),
}


def run(path: Path, size: int, **overrides: object) -> list[Generated]:
    with RankSet(path, size, max_num_batched_tokens=40, **overrides) as ranks:
        return ranks.generate(PROMPTS, GREEDY)


def assert_equal(ours: Sequence[Generated], theirs: Sequence[Generated]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens == other.tokens
        assert torch.equal(one.logits, other.logits)


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_experts_compute_what_decoded_ones_do(tmp_path: Path, name: str) -> None:
    quantized, decoded = save_quantized(tmp_path, *FORMATS[name])
    expected = run(decoded, 1)
    assert_equal(run(quantized, 1), expected)
    assert_equal(run(quantized, 3), expected)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_in_bf16_too_each_weight_is_rounded_once(tmp_path: Path, name: str) -> None:
    quantized, decoded = save_quantized(tmp_path, *FORMATS[name])
    assert_equal(run(quantized, 1, dtype="bf16"), run(decoded, 1, dtype="bf16"))


@pytest.mark.parametrize("name", ["fp8", "int8 packed"])
def test_seats_move_with_their_scales(tmp_path: Path, name: str) -> None:
    quantized, decoded = save_quantized(tmp_path, *FORMATS[name])
    expected = [generated.tokens for generated in run(decoded, 1)]
    with WorkerSet(quantized, 2, min_workers=1) as workers:
        for lease, size in enumerate((2, 3, 1)):
            if size != 2:
                workers.reconfigure(range(size))
            front_end = FrontEnd(workers.topology, workers.client, lease + 1)
            front_end.attach()
            for number, prompt in enumerate(PROMPTS):
                front_end.submit(number % size, str(number), prompt, GREEDY)
            wait_until(lambda: all(front_end.is_done(str(n)) for n in range(len(PROMPTS))), f"answers of {size}")  # noqa: B023
            assert [front_end.token_ids(str(n)) for n in range(len(PROMPTS))] == expected
            front_end.close()
