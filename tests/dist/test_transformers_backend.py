"""Models whose layers are transformers' code, on our experts, cache and scheduler: the same answers as transformers alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.models_table import DOCUMENT, compare
from benchmarks.tiny_models import expert_models, save_tiny
from moeray.comm.errors import CheckpointError
from moeray.comm.placement import ExpertPlacement
from moeray.worker.config import WorkerConfig
from moeray.worker.loaded_model import LoadedModel, load_model
from moeray.worker.messages import SamplingParams
from moeray.worker.models.registry import read_model_config
from tests.support.ranks import RankSet
from tests.support.workers import WorkerSet, answers

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
SAMPLINGS = {"greedy": SamplingParams(max_tokens=16, temperature=0.0)}
PROMPT = [number * 7 % 300 for number in range(40)]

SHAPES: dict[str, dict[str, Any]] = {
    # Grouped queries, tied head.
    "olmoe": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    # Latent attention through expanded keys longer than values, groups of experts, biased selection, shared experts.
    "deepseek_v3": {"num_hidden_layers": 3, "first_k_dense_replace": 1, "rope_interleave": True},
    # Windows and sinks; experts transposed, interleaved, with biases and a gate of their own, fused on disk.
    "gpt_oss": {"num_hidden_layers": 2},
    # Fused on disk under another name, shared experts.
    "granitemoeshared": {"num_hidden_layers": 2},
}


@pytest.fixture(scope="module", params=sorted(SHAPES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param), **SHAPES[request.param])


def test_answers_are_those_of_transformers_and_no_bit_depends_on_batch_or_workers(checkpoint: Path) -> None:
    """On one and three workers, alone and batched, in chunks, with prefixes from the cache."""
    assert re.fullmatch(r"logits within \de-0[5-7]", compare(checkpoint, model_impl="transformers"))


def test_a_native_family_says_the_same_through_transformers(tmp_path: Path) -> None:
    path = save_tiny("qwen3_moe", tmp_path, num_hidden_layers=2)
    found = []
    for model_impl in ("native", "transformers"):
        with RankSet(path, 2, model_impl=model_impl) as ranks:
            found.append(ranks.generate([PROMPT], GREEDY)[0])
    assert found[0].tokens == found[1].tokens
    assert 0 < (found[0].logits - found[1].logits).abs().max() < 1e-4


@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3"])
def test_experts_move_with_all_their_tensors(tmp_path: Path, model_type: str) -> None:
    path = save_tiny(model_type, tmp_path, **SHAPES[model_type])
    with WorkerSet(path, 2, min_workers=1, model_impl="transformers") as workers:
        expected = answers(workers, 1, SAMPLINGS)["greedy"][:1]
        for lease, slots in ((2, (0, 1, 2)), (3, (2,))):
            workers.reconfigure(slots)
            assert answers(workers, lease, SAMPLINGS)["greedy"] == expected * len(slots)


def half_precision_tokens(path: Path, **overrides: Any) -> list[int]:
    with RankSet(path, 2, model_impl="transformers", **overrides) as ranks:
        assert {parameter.dtype for parameter in ranks.ranks[0].loaded.model.parameters()} == {torch.bfloat16}
        return ranks.generate([PROMPT], GREEDY)[0].tokens


def test_half_precision_in_fast_mode_runs(tmp_path: Path) -> None:
    path = save_tiny("olmoe", tmp_path, num_hidden_layers=2)
    assert len(half_precision_tokens(path, dtype="bf16", combine="fast")) == GREEDY.max_tokens


def rewrite(path: Path, **fields: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))
    return path


def edited(path: Path, drop: str = "", **tensors: torch.Tensor) -> Path:
    found = load_file(path / "model.safetensors")
    found = {name: tensor for name, tensor in found.items() if name != drop} | tensors
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    return path


def load(path: Path) -> LoadedModel:
    config = read_model_config(path, "transformers")
    placement = ExpertPlacement.contiguous(
        num_layers=config.num_moe_layers, num_experts=config.num_experts, slots=[0], num_seats=config.num_experts
    )
    worker = WorkerConfig(
        model_path=str(path),
        num_seats=config.num_experts,
        max_workers=1,
        kv_cache_bytes=16 << 20,
        model_impl="transformers",
    )
    return load_model(worker, placement, 0, lambda _: None)


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"drop": EXPERT}, rf"lacks 1 tensors: {EXPERT}"),
        ({EXPERT: torch.zeros(96, 63)}, rf"wrong shape: {EXPERT} \[96, 63\], must be \[96, 64\]"),
        ({"drop": "model.norm.weight"}, r"lacks 1 tensors: model\.norm\.weight"),
        ({"model.layers.0.odd": torch.zeros(1)}, r"does not use: model\.layers\.0\.odd"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, edit: dict[str, Any], message: str) -> None:
    path = edited(save_tiny("olmoe", tmp_path, num_hidden_layers=2), **edit)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_a_second_copy_of_a_tied_head_and_fused_experts_are_read(tmp_path: Path) -> None:
    path = save_tiny("olmoe", tmp_path, num_hidden_layers=2, tie_word_embeddings=True)
    with RankSet(path, 2, model_impl="transformers") as ranks:
        expected = ranks.generate([PROMPT], GREEDY)[0]
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(8)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{prefix}.gate_up_proj"], tensors[f"{prefix}.down_proj"] = torch.cat([gate, up], 1), down
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with RankSet(path, 3, model_impl="transformers") as ranks:
        assert torch.equal(ranks.generate([PROMPT], GREEDY)[0].logits, expected.logits)


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("olmoe", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type is 'dynamic'"),
        ("olmoe", {"architectures": ["NoSuchForCausalLM"]}, "'NoSuchForCausalLM' is not supported: .* does not know it"),
        ("olmoe", {"num_experts": 9}, "has"),
        ("olmoe", {"num_attention_heads": 3}, "transformers cannot make|dry run without weights fails"),
        ("doge", {}, "no module uses transformers' experts interface"),
        ("nemotron_h", {}, "layers keep a state"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, model_type: str, fields: dict[str, Any], message: str
) -> None:
    path = rewrite(save_tiny(model_type, tmp_path), **fields)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_the_table_names_every_architecture_with_experts() -> None:
    section = DOCUMENT.read_text().split("<!-- models -->")[1].split("<!-- end of models -->")[0]
    rows = re.findall(r"^\| (\w+ForC\w+) \| (\w+) \|", section, re.MULTILINE)
    assert {name for name, _ in rows} == set(expert_models().values())
    assert sum(way == "transformers" for _, way in rows) >= 20
    assert not [name for name, way in rows if way == "wrong"]
