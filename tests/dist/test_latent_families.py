"""Families with latent attention against transformers, against themselves bit by bit, and while they scale."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moeray.worker.config import BLOCK_SIZE
from moeray.worker.messages import SamplingParams
from moeray.worker.models.decoder import Decoder
from tests.support.latent_checkpoints import save_latent
from tests.support.ranks import Generated, RankSet
from tests.support.workers import FrontEnd, WorkerSet, wait_until

GREEDY_32 = SamplingParams(max_tokens=32, temperature=0.0)
LONG = SamplingParams(max_tokens=100, temperature=0.0)
PROMPT_LENGTHS = (1, 48, 131, 193, 300)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}

SHAPES: dict[str, dict[str, Any]] = {
    "v2-greedy": {"model_type": "deepseek_v2", "q_lora_rank": None},
    "v2-groups-yarn": {
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 4.0,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "v3-groups-yarn": {
        "model_type": "deepseek_v3",
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    },
    "v3-one-group": {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "rope_interleave": False,
        "tie_word_embeddings": True,
    },
    "glm4-moe-lite": {"model_type": "glm4_moe_lite", "n_shared_experts": 1},
}


def prompts() -> list[list[int]]:
    """Random prompts; all but the first share their first 40 tokens, so that prefixes are reused."""
    generator = torch.Generator().manual_seed(1)
    random = [torch.randint(0, 320, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    return [random[-1][:40] + prompt[40:] if len(prompt) > 40 else prompt for prompt in random]


@pytest.fixture(scope="module", params=sorted(SHAPES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_latent(tmp_path_factory.mktemp(request.param), **SHAPES[request.param])


@pytest.fixture(scope="module")
def one_by_one(checkpoint: Path) -> list[Generated]:
    """The reference for bits: one worker, whole prompts in one chunk, one prompt at a time."""
    with RankSet(checkpoint, 1, combine="exact", prefix_caching=False) as ranks:
        return [ranks.generate([prompt], GREEDY_32)[0] for prompt in prompts()]


def test_logits_and_greedy_tokens_are_those_of_transformers(checkpoint: Path, one_by_one: list[Generated]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    chosen: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _module, _inputs, outputs: chosen.append(outputs[2]))
    for prompt, ours in zip(prompts(), one_by_one, strict=True):
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt + ours.tokens])).logits[0, len(prompt) - 1 : -1]
        assert (theirs - ours.logits).abs().max() < 1e-4
        assert theirs.argmax(-1).tolist() == ours.tokens
    assert set(torch.cat(chosen).flatten().tolist()) == set(range(8)), "every expert takes part"


@pytest.mark.parametrize("size", [1, 3])
def test_exact_mode_keeps_every_bit(checkpoint: Path, one_by_one: list[Generated], size: int) -> None:
    """In chunks, batched with others, and again with prefixes in the cache."""
    with RankSet(checkpoint, size, combine="exact", max_num_batched_tokens=40) as ranks:
        batched = ranks.generate(prompts(), GREEDY_32)
        again = ranks.generate(prompts()[2:4], GREEDY_32)
    for ours, reference in zip(batched + again, one_by_one + one_by_one[2:4], strict=True):
        assert ours.tokens == reference.tokens
        assert torch.equal(ours.logits, reference.logits)


@pytest.fixture
def workers(checkpoint: Path) -> Iterator[WorkerSet]:
    with WorkerSet(checkpoint, 2, min_workers=1) as workers:
        yield workers


@pytest.mark.parametrize("checkpoint", ["glm4-moe-lite", "v2-groups-yarn", "v3-groups-yarn"], indirect=True)
def test_streams_go_on_from_two_workers_to_three_to_one(
    checkpoint: Path, workers: WorkerSet, front_end: FrontEnd
) -> None:
    """Expert seats move, and a leaver's latents: the one that is left computes less than a block of each again."""
    with RankSet(checkpoint, 1, combine="exact") as ranks:
        undisturbed = ranks.generate(prompts()[:3], LONG)
    for joining in (True, False):
        for number, prompt in enumerate(prompts()[:3]):
            front_end.submit(0, f"{joining}-{number}", prompt, LONG)
        if joining:
            workers.reconfigure([0, 1, 2])
            front_end.connect(workers.topology)
    wait_until(lambda: front_end.pump() and len(front_end.tokens) == 6, "first tokens")
    last = workers.worker(1).engine
    assert last is not None
    computed = last.parts.reporter.counters.prompt_tokens
    workers.reconfigure([1])
    front_end.connect(workers.topology)
    for seq_id in sorted(front_end.tokens):
        wait_until(lambda seq_id=seq_id: front_end.is_done(seq_id), seq_id)  # type: ignore[misc]
        assert front_end.token_ids(seq_id) == undisturbed[int(seq_id[-1])].tokens
    assert front_end.num_handed_over >= 3
    assert last.parts.reporter.counters.prompt_tokens - computed <= BLOCK_SIZE * front_end.num_handed_over


def test_fp16_does_not_overflow_where_the_guard_is_needed(tmp_path: Path) -> None:
    """Scaled outputs of experts beyond fp16's range, behind a dense layer, leave the logits near those of fp32."""
    shape = {**SHAPES["v2-groups-yarn"], "routed_scaling_factor": 16.0}
    path = save_latent(tmp_path, **shape, down_scale=3e4)
    results, largest = [], []
    for dtype in ("fp32", "fp16"):
        with RankSet(path, 1, dtype=dtype) as ranks:
            model = ranks.ranks[0].loaded.model
            assert isinstance(model, Decoder)
            model.decoder_layers()[-1].register_forward_hook(lambda _module, _inputs, out: largest.append(out.abs().max().item()))
            results.append(ranks.generate(prompts()[1:4], SamplingParams(max_tokens=1, temperature=0.0)))
    assert largest[0] > torch.finfo(torch.float16).max > 2 * largest[1]
    for fp32, fp16 in zip(*results, strict=True):
        assert (fp16.logits - fp32.logits).abs().max() < 0.05 * fp32.logits.std()
