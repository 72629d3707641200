"""Checkpoints: what is read, and what is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moeray.comm.errors import CapacityError, CheckpointError
from moeray.comm.placement import ExpertPlacement
from moeray.worker.config import WorkerConfig
from moeray.worker.finite import is_finite
from moeray.worker.loaded_model import LoadedModel, load_model
from moeray.worker.memory import TORCH_DTYPES
from moeray.worker.models.registry import read_model_config
from tests.support.checkpoints import CountingSource, save_qwen3_moe

EDITED = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_qwen3_moe(tmp_path / "model")


def load(path: Path, *, size: int = 2, slot: int = 0, **fields: Any) -> LoadedModel:
    config = read_model_config(path)
    num_seats = fields.pop("num_seats", -(-config.num_experts // size))
    placement = ExpertPlacement.contiguous(
        num_layers=config.num_moe_layers, num_experts=config.num_experts, slots=range(size), num_seats=num_seats
    )
    settings = {"num_seats": num_seats, "max_workers": size, "kv_cache_bytes": 32 << 20, **fields}
    return load_model(WorkerConfig(model_path=str(path), **settings), placement, slot, lambda _: None)


def edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def edit_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config.update(fields)
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_seats_hold_this_slots_experts_and_nothing_else_is_touched(checkpoint: Path, slot: int) -> None:
    loaded = load(checkpoint, size=3, slot=slot, num_seats=5)
    tensors = load_file(checkpoint / "model.safetensors")
    held = {0: [0, 1, 2], 1: [3, 4, 5], 2: [6, 7]}[slot]
    for layer, runner in enumerate(loaded.model.moe_runners()):
        w13 = runner.routed_experts.get_parameter("w13_S2FD")
        w2 = runner.routed_experts.get_parameter("w2_SDF")
        assert w13.shape[0] == 5
        for seat, expert in enumerate(held):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}."
            gate, up = tensors[prefix + "gate_proj.weight"], tensors[prefix + "up_proj.weight"]
            assert torch.equal(w13[seat], torch.cat((gate, up)))
            assert torch.equal(w2[seat], tensors[prefix + "down_proj.weight"])


def test_only_own_experts_are_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    from moeray.worker import loader

    original = loader.Checkpoint.tensor

    def recording(self: loader.Checkpoint, name: str) -> torch.Tensor:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(loader.Checkpoint, "tensor", recording)
    load(checkpoint, size=4, slot=2)
    experts = {int(name.split("experts.")[1].split(".")[0]) for name in read if "experts." in name}
    assert experts == {4, 5}
    assert len(read) == len(set(read))


@pytest.mark.parametrize(
    ("dtype", "has_bf16_units", "expected"),
    [
        ("fp32", True, torch.float32),
        ("bf16", False, torch.bfloat16),
        ("fp16", False, torch.float16),
        ("auto", False, torch.float32),
        ("auto", True, torch.bfloat16),
    ],
)
def test_dtype_is_converted_and_auto_is_what_is_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, has_bf16_units: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_bf16_units)
    path = save_qwen3_moe(tmp_path / "half", dtype="bfloat16")
    loaded = load(path, dtype=dtype)
    assert loaded.cache.dtype == loaded.model.state_dict()["norm.weight"].dtype == expected


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("served", ["fp32", "bf16", "fp16"])
def test_every_type_is_loaded_as_every_type(tmp_path: Path, stored: str, served: str) -> None:
    path = save_qwen3_moe(tmp_path, dtype=stored, num_hidden_layers=1)
    weights = load(path, dtype=served, size=1).model.state_dict()
    embed = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    assert embed.dtype == getattr(torch, stored)
    assert torch.equal(weights["embed"], embed.to(TORCH_DTYPES[served]))


def test_sharded_checkpoint_equals_the_single_file(tmp_path: Path) -> None:
    single = save_qwen3_moe(tmp_path / "single")
    sharded = save_qwen3_moe(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    for ours, theirs in zip(
        load(single).model.state_dict().items(), load(sharded).model.state_dict().items(), strict=True
    ):
        assert torch.equal(ours[1], theirs[1]), ours[0]


def test_progress_ends_at_one(checkpoint: Path) -> None:
    seen: list[float] = []
    config = read_model_config(checkpoint)
    placement = ExpertPlacement.contiguous(num_layers=config.num_moe_layers, num_experts=8, slots=(0,), num_seats=8)
    worker = WorkerConfig(model_path=str(checkpoint), num_seats=8, max_workers=1, kv_cache_bytes=32 << 20)
    load_model(worker, placement, 0, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize("slot", [0, 1])  # expert 3 belongs to slot 0, and both must notice
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(EDITED), f"lacks 1 tensors: {EDITED}"),
        (lambda tensors: tensors.update(surprise=torch.zeros(1)), "does not use: surprise"),
        (
            lambda tensors: tensors.update({EDITED: torch.zeros(48, 63)}),
            rf"{EDITED} \[48, 63\], must be \[48, 64\]",
        ),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_named(
    checkpoint: Path, slot: int, edit: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    edit_weights(checkpoint, edit)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint, slot=slot)


def test_many_missing_tensors_are_counted(checkpoint: Path) -> None:
    def drop_layer(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            del tensors[name]

    edit_weights(checkpoint, drop_layer)
    with pytest.raises(CheckpointError, match="and 28 more"):
        load(checkpoint)


@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
def test_truncated_file_is_named(tmp_path: Path, max_shard_size: str) -> None:
    path = save_qwen3_moe(tmp_path, max_shard_size=max_shard_size)
    file = sorted(path.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=rf"{file.name} cannot be read, truncated"):
        load(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_that_are_no_numbers_are_loaded_with_a_warning_that_names_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str, value: float
) -> None:
    path = save_qwen3_moe(tmp_path, dtype=dtype)
    assert load(path).report.not_finite == ()

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EDITED][7, 3] = value
        tensors["lm_head.weight"][-1, -1] = value

    edit_weights(path, spoil)
    assert load(path).report.not_finite == ("lm_head.weight", EDITED)
    (record,) = caplog.records
    assert record.getMessage() == f"{path} has NaNs or infinities in lm_head.weight, {EDITED}"
    assert load(path, slot=1).report.not_finite == ("lm_head.weight",), "expert 3 is the other worker's"


def test_finiteness_of_odd_tensors() -> None:
    assert is_finite(torch.full((4, 4), 65504.0, dtype=torch.float16)), "the sum overflows fp16"
    assert is_finite(torch.full((4, 4), 3e38)), "the sum overflows fp32"
    assert is_finite(torch.empty(0))
    assert is_finite(torch.full((3,), 127, dtype=torch.int8))
    codes = torch.arange(256, dtype=torch.uint8)
    fp8 = torch.tensor([is_finite(code.view(torch.float8_e4m3fn)) for code in codes.view(-1, 1)])
    assert codes[~fp8].tolist() == [0x7F, 0xFF]
    assert not is_finite(torch.tensor([0xFF], dtype=torch.uint8).view(torch.float8_e8m0fnu))


def test_integer_weights_are_refused(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has type int8, must be float32"):
        load(checkpoint)


def test_a_directory_without_weights_and_an_index_without_its_files(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "elsewhere")
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors"):
        load(checkpoint)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"files that do not exist: model-00001-of-00002\.safetensors"):
        load(checkpoint)


def test_tied_head_and_computed_buffers_may_be_there(tmp_path: Path) -> None:
    path = save_qwen3_moe(tmp_path / "tied", tie_word_embeddings=True)
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - no mapping

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)

    edit_weights(path, add)
    model = load(path).model
    assert model.lm_head is model.embed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BertModel"]}, "'BertModel' is not supported"),
        ({"architectures": None}, "must name exactly one"),
        ({"rope_parameters": {"rope_type": "spiral", "factor": 4.0}}, "rope_type is 'spiral'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"attention_sinks": 4}, "attention_sinks=4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(checkpoint: Path, fields: dict[str, Any], message: str) -> None:
    edit_config(checkpoint, **fields)
    with pytest.raises(CheckpointError, match=message):
        read_model_config(checkpoint)


def test_old_and_new_config_layouts_read_the_same(checkpoint: Path) -> None:
    new = read_model_config(checkpoint)
    raw = json.loads((checkpoint / "config.json").read_text())
    raw["num_experts"] = raw.pop("num_local_experts")
    raw["rope_theta"] = raw.pop("rope_parameters")["rope_theta"]
    raw["torch_dtype"] = raw.pop("dtype")
    raw["rope_scaling"] = None
    (checkpoint / "config.json").write_text(json.dumps(raw))
    assert read_model_config(checkpoint) == new


def test_no_checkpoint_and_broken_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint directory"):
        read_model_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_model_config(tmp_path)


def test_eos_ids_join_both_files(checkpoint: Path) -> None:
    edit_config(checkpoint, eos_token_id=5)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert read_model_config(checkpoint).eos_token_ids == (7, 5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"generation_config\.json cannot be read"),
        ("[]", r"generation_config\.json holds list"),
        ('{"eos_token_id": "</s>"}', r"generation_config\.json: eos_token_id is '</s>', must be a token id"),
    ],
)
def test_a_broken_generation_config_is_named_and_none_is_fine(checkpoint: Path, content: str, words: str) -> None:
    file = checkpoint / "generation_config.json"
    file.write_text(content)
    with pytest.raises(CheckpointError, match=words):
        read_model_config(checkpoint)
    file.unlink()
    assert read_model_config(checkpoint).eos_token_ids == ()


def test_too_little_memory_is_said_with_numbers(checkpoint: Path) -> None:
    with pytest.raises(CapacityError, match="one sequence of 512 tokens needs 1 MiB"):
        load(checkpoint, kv_cache_bytes=1 << 18)
    with pytest.raises(CapacityError, match="KV cache"):
        load(checkpoint, kv_cache_bytes=1 << 50)
    with pytest.raises(ValueError, match="max_model_len is 513, the checkpoint's limit is 512"):
        load(checkpoint, max_model_len=513)


def test_a_checkpoint_that_is_not_on_this_node_comes_from_a_peer(checkpoint: Path, tmp_path: Path) -> None:
    here = load(checkpoint, slot=0)
    source = CountingSource(here.checkpoint)
    config = read_model_config(checkpoint)
    placement = ExpertPlacement.contiguous(num_layers=2, num_experts=config.num_experts, slots=range(2), num_seats=4)
    elsewhere = WorkerConfig(model_path=str(tmp_path / "no"), num_seats=4, max_workers=2, kv_cache_bytes=32 << 20)
    there = load_model(elsewhere, placement, 0, lambda _: None, source)
    for ours, theirs in zip(there.model.state_dict().items(), here.model.state_dict().items(), strict=True):
        assert torch.equal(ours[1], theirs[1]), ours[0]
    assert sum(source.asked) < (checkpoint / "model.safetensors").stat().st_size * 0.8, "only what the slot needs"
    assert max(source.asked) <= 1 << 20
    there.checkpoint.close()
    with pytest.raises(CheckpointError, match="is no checkpoint directory"):
        load_model(elsewhere, placement, 0, lambda _: None)
