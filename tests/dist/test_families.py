"""Every native family against transformers, on one and on three workers, and through a change of their number."""

import random
from pathlib import Path

import pytest
import torch

from moeray.worker.messages import SamplingParams
from tests.support.families import FAMILIES, save_family
from tests.support.ranks import Generated, RankSet
from tests.support.workers import FrontEnd, WorkerSet, wait_until

GREEDY = SamplingParams(max_tokens=32, temperature=0.0)
# Chunks of prompts, and windows, end in the middle of blocks.
SETTINGS = {"combine": "exact", "max_num_seqs": 8, "max_num_batched_tokens": 21}


def prompts() -> list[list[int]]:
    """Random prompts; the last two begin alike, so that a prefix is reused."""
    rng = random.Random(7)
    lengths = (1, 13, 70, 66)
    drawn = [[rng.randrange(160) for _ in range(length)] for length in lengths]
    return [*drawn[:3], drawn[2][:40] + drawn[3][40:]]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> list[Generated]:
    with RankSet(checkpoint, 1, **SETTINGS) as ranks:
        return ranks.generate(prompts(), GREEDY)


def test_logits_and_greedy_tokens_are_those_of_transformers(checkpoint: Path, reference: list[Generated]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    chosen = set()
    for prompt, ours in zip(prompts(), reference, strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt + ours.tokens])).logits[0, len(prompt) - 1 : -1]
        assert (theirs - ours.logits).abs().max() < 1e-3
        assert theirs.argmax(-1).tolist() == ours.tokens
        chosen.update(ours.tokens)
    assert len(chosen) > 16, "a flat or stuck model shows nothing"


def test_three_workers_give_the_same_bits(checkpoint: Path, reference: list[Generated]) -> None:
    with RankSet(checkpoint, 3, **SETTINGS) as ranks:
        first = ranks.generate(prompts(), GREEDY)
        again = ranks.generate(prompts()[2:], GREEDY)  # in another batch, their prefixes in the cache
    for ours, wanted in zip(first + again, reference + reference[2:], strict=True):
        assert ours.tokens == wanted.tokens
        assert torch.equal(ours.logits, wanted.logits)


def test_in_fp16_shared_experts_and_all_else_leave_out_the_same_factor(tmp_path: Path) -> None:
    first_token = SamplingParams(max_tokens=1, temperature=0.0)
    path = save_family(tmp_path, "glm4_moe", routed_scaling_factor=4.0)
    logits = {}
    for dtype in ("fp32", "fp16"):
        with RankSet(path, 1, dtype=dtype) as ranks:
            logits[dtype] = torch.cat([result.logits for result in ranks.generate(prompts(), first_token)])
    assert (logits["fp16"] - logits["fp32"]).abs().max() < 0.1 * logits["fp32"].std()


def test_tokens_are_the_same_while_workers_come_and_go(checkpoint: Path, reference: list[Generated]) -> None:
    """From two workers to three to one, which joined last: all experts have moved, and running requests went along."""
    with WorkerSet(checkpoint, 2, min_workers=1, **SETTINGS) as workers:
        front_end = FrontEnd(workers.topology, workers.client, 1)
        front_end.attach()
        following: list[tuple[int, ...]] = [(0, 1, 2), (2,), ()]
        for slots in following:
            serving = workers.topology.slots
            for number, prompt in enumerate(prompts()):
                front_end.submit(serving[number % len(serving)], f"{serving}-{number}", prompt, GREEDY)
            if slots:
                workers.reconfigure(slots)
                front_end.connect(workers.topology)
                front_end.attach()
            for number, wanted in enumerate(reference):
                seq_id = f"{serving}-{number}"
                wait_until(lambda seq_id=seq_id: front_end.is_done(seq_id), seq_id)  # type: ignore[misc]
                assert front_end.token_ids(seq_id) == wanted.tokens
        assert not front_end.failures
        front_end.close()
