"""The native decoder against transformers, and against itself bit by bit: workers, batches, chunks, prefixes."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moeray.worker.messages import SamplingParams
from tests.support.checkpoints import save_qwen3_moe
from tests.support.ranks import Generated, RankSet

GREEDY_64 = SamplingParams(max_tokens=64, temperature=0.0)
PROMPT_LENGTHS = (1, 2, 7, 16, 31, 64, 100, 130, 191, 193, 222, 256, 299, 300, 5, 48)

SHAPES: dict[str, dict[str, Any]] = {
    "untied-8-experts": {},
    "tied-10-experts": {"num_experts": 10, "tie_word_embeddings": True, "num_experts_per_tok": 3},
    "one-kv-head-dense-first": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "hidden_size": 48,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [0],
        "norm_topk_prob": False,
        "attention_bias": True,
    },
    "wide-heads": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_size": 192,
        "moe_intermediate_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}


def prompts_of(lengths: tuple[int, ...], vocab_size: int = 320, seed: int = 1) -> list[list[int]]:
    """Random prompts; every other one shares its first 40 tokens with the longest, so that prefixes are reused."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    longest = max(prompts, key=len)
    return [
        longest[:40] + prompt[40:] if number % 2 and len(prompt) > 40 else prompt
        for number, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module", params=sorted(SHAPES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_moe(tmp_path_factory.mktemp(request.param), **SHAPES[request.param])


@pytest.fixture(scope="module")
def exact_on_one(checkpoint: Path) -> list[Generated]:
    """The reference for bits: one worker, no prefix reuse, whole prompts in one chunk, one prompt at a time."""
    with RankSet(checkpoint, 1, combine="exact", prefix_caching=False) as ranks:
        return [ranks.generate([prompt], GREEDY_64)[0] for prompt in prompts_of(PROMPT_LENGTHS)]


def test_logits_and_greedy_tokens_are_those_of_transformers(checkpoint: Path, exact_on_one: list[Generated]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for prompt, ours in zip(prompts_of(PROMPT_LENGTHS), exact_on_one, strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt + ours.tokens])).logits[0, len(prompt) - 1 : -1]
        assert (theirs - ours.logits).abs().max() < 1e-4
        assert theirs.argmax(-1).tolist() == ours.tokens


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 40}, {"prefix_caching": False}])
def test_exact_mode_keeps_every_bit(
    checkpoint: Path, exact_on_one: list[Generated], size: int, settings: dict[str, Any]
) -> None:
    with RankSet(checkpoint, size, combine="exact", **settings) as ranks:
        batched = ranks.generate(prompts_of(PROMPT_LENGTHS), GREEDY_64)
        again = ranks.generate(prompts_of(PROMPT_LENGTHS)[5:9], GREEDY_64)  # another batch, prefixes in the cache
    for ours, reference in zip(batched + again, exact_on_one + exact_on_one[5:9], strict=True):
        assert ours.tokens == reference.tokens
        assert torch.equal(ours.logits, reference.logits)


@pytest.mark.parametrize("dispatcher", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("size", [2, 3])
def test_fast_mode_stays_close_and_keeps_greedy_tokens(
    checkpoint: Path, exact_on_one: list[Generated], size: int, dispatcher: str
) -> None:
    with RankSet(checkpoint, size, combine="fast", dispatcher=dispatcher) as ranks:
        results = ranks.generate(prompts_of(PROMPT_LENGTHS), GREEDY_64)
    for ours, reference in zip(results, exact_on_one, strict=True):
        assert ours.tokens == reference.tokens
        assert (ours.logits - reference.logits).abs().max() < 1e-4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_moe(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def preempting(tiny: Path) -> Iterator[RankSet]:
    # 2 layers, 2 heads of 32 in fp32: 16 KiB a block. 45 blocks hold one sequence of full length and little more.
    with RankSet(tiny, 2, combine="exact", kv_cache_bytes=45 << 14, max_model_len=512) as ranks:
        yield ranks


def test_preemption_changes_no_bit(tiny: Path, preempting: RankSet) -> None:
    prompts = prompts_of((150, 160, 170, 180, 190, 200, 210, 220))
    results = preempting.generate(prompts, GREEDY_64)
    assert any(rank.scheduler.num_preemptions for rank in preempting.ranks), "the cache was not small enough"
    with RankSet(tiny, 1, combine="exact") as ranks:
        reference = ranks.generate(prompts, GREEDY_64)
    for ours, theirs in zip(results, reference, strict=True):
        assert torch.equal(ours.logits, theirs.logits)


def test_seeded_sampling_is_the_same_on_any_number_of_workers(tiny: Path) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, top_k=50, seed=7, repetition_penalty=1.1)
    tokens = []
    for size in (1, 3):
        with RankSet(tiny, size, combine="exact") as ranks:
            tokens.append([result.tokens for result in ranks.generate(prompts_of((3, 9, 100, 20)), sampling)])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("combine", ["exact", "fast"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_stays_near_fp32(tiny: Path, dtype: str, combine: str) -> None:
    """First tokens only: rounding may tip a later choice between two near logits."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    prompts = prompts_of((3, 40, 100, 17))
    with RankSet(tiny, 1) as ranks:
        reference = ranks.generate(prompts, sampling)
    with RankSet(tiny, 2, dtype=dtype, combine=combine) as ranks:
        results = ranks.generate(prompts, sampling)
    for ours, theirs in zip(results, reference, strict=True):
        spread = theirs.logits.std()
        assert (ours.logits - theirs.logits).abs().max() < spread * (0.25 if dtype == "bf16" else 0.05)
