"""Weights stay in the checkpoint's own type: half of the memory, and not one bit of the answers changes."""

from pathlib import Path

import pytest
import torch

from moeray.worker.memory import choose_weights
from moeray.worker.messages import SamplingParams
from tests.support.checkpoints import save_qwen3_moe
from tests.support.ranks import Generated, RankSet

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[(7 * k + start) % 320 for k in range(length)] for start, length in ((3, 40), (100, 5), (50, 17))]


def generate(path: Path, size: int, **options: object) -> list[Generated]:
    with RankSet(path, size, max_num_batched_tokens=32, **options) as ranks:
        return ranks.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_checkpoints_own_type_loses_nothing(tmp_path: Path, dtype: str, tied: bool) -> None:
    path = save_qwen3_moe(tmp_path, dtype=dtype, tie_word_embeddings=tied)
    expected = generate(path, 1, weights="fp32")
    for size in (1, 3):
        found = generate(path, size)
        assert [one.tokens for one in found] == [one.tokens for one in expected]
        assert all(torch.equal(one.logits, other.logits) for one, other in zip(found, expected, strict=True))


def test_it_halves_the_memory_of_projections(tmp_path: Path) -> None:
    path = save_qwen3_moe(tmp_path, dtype="bfloat16")
    with RankSet(path, 1) as own, RankSet(path, 1, weights="fp32") as wide:
        (narrow,), (whole,) = own.ranks, wide.ranks
        assert (narrow.loaded.dtype, narrow.loaded.weights) == ("fp32", "bf16")
        vectors = sum(p.nbytes for p in narrow.loaded.model.parameters() if p.dtype == torch.float32)
        assert 2 * (narrow.loaded.weights_bytes - vectors) == whole.loaded.weights_bytes - vectors
        assert vectors < 0.05 * whole.loaded.weights_bytes


def test_fp32_weights_may_be_rounded_if_somebody_wants_that(tmp_path: Path) -> None:
    path = save_qwen3_moe(tmp_path)
    exact, rounded = generate(path, 1), generate(path, 1, weights="fp16")
    difference = (exact[0].logits[0] - rounded[0].logits[0]).abs().max()
    assert 0 < difference < 0.05


@pytest.mark.parametrize(
    ("requested", "dtype", "stored", "device", "expected"),
    [
        ("auto", "fp32", {"bfloat16"}, "cpu", "bf16"),
        ("auto", "fp32", {"float16"}, "cpu", "fp16"),
        ("auto", "fp32", {"float32"}, "cpu", "fp32"),
        ("auto", "fp32", {"float32", "bfloat16"}, "cpu", "fp32"),
        ("auto", "fp32", {"U8"}, "cpu", "fp32"),
        ("auto", "bf16", {"bfloat16"}, "cpu", "bf16"),
        ("auto", "bf16", {"float32"}, "cuda", "bf16"),
        ("fp16", "fp32", {"float32"}, "cpu", "fp16"),
        ("fp32", "fp32", {"bfloat16"}, "cpu", "fp32"),
    ],
)
def test_the_choice(requested: str, dtype: str, stored: set[str], device: str, expected: str) -> None:
    assert choose_weights(requested, dtype, stored, device) == expected


@pytest.mark.parametrize(("requested", "dtype", "device"), [("fp16", "bf16", "cpu"), ("fp16", "fp32", "cuda")])
def test_what_nothing_can_compute_with_is_refused(requested: str, dtype: str, device: str) -> None:
    with pytest.raises(ValueError, match=f"weights is 'fp16', must be auto or {dtype}"):
        choose_weights(requested, dtype, {"bfloat16"}, device)


def test_without_a_kernel_weights_have_the_type_that_is_computed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeray.worker.memory.row_kernel", lambda: None)
    assert choose_weights("auto", "fp32", {"bfloat16"}, "cpu") == "fp32"
    with pytest.raises(ValueError, match="compiler"):
        choose_weights("bf16", "fp32", {"bfloat16"}, "cpu")
