"""Layouts of checkpoints: fused and separate experts, old and new names and configs, MXFP4."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeray.comm.errors import CheckpointError
from moeray.comm.placement import ExpertPlacement
from moeray.worker import expert_transfer
from moeray.worker.config import WorkerConfig
from moeray.worker.expert_transfer import SeatFill, fetch_experts, fill_seats
from moeray.worker.loaded_model import LoadedModel, load_model
from moeray.worker.loader import Checkpoint
from moeray.worker.models.mxfp4 import decode_mxfp4
from moeray.worker.models.place_targets import place_targets
from moeray.worker.models.registry import read_model_config
from moeray.worker.models.weight_names import Form, Stored, WeightNames
from moeray.worker.models.weights import Place
from tests.support.checkpoints import CountingSource, save_qwen3_moe
from tests.support.families import FAMILIES, save_family

Tensors = dict[str, torch.Tensor]
FILE = "model.safetensors"


def load(path: Path, *, size: int = 1, slot: int = 0, **fields: Any) -> LoadedModel:
    source = fields.pop("source", None)
    config = read_model_config(path if source is None else fields.pop("config_path"))
    num_seats = -(-config.num_experts // size)
    placement = ExpertPlacement.contiguous(
        num_layers=config.num_moe_layers, num_experts=config.num_experts, slots=range(size), num_seats=num_seats
    )
    settings = {"num_seats": num_seats, "max_workers": size, "kv_cache_bytes": 8 << 20, "max_model_len": 64, **fields}
    worker = WorkerConfig(model_path=str(path), max_num_seqs=4, max_num_batched_tokens=16, **settings)
    return load_model(worker, placement, slot, lambda _: None, source)


def assert_same_weights(ours: LoadedModel, theirs: LoadedModel) -> None:
    for (name, found), wanted in zip(ours.model.state_dict().items(), theirs.model.state_dict().values(), strict=True):
        assert torch.equal(found, wanted), name


def rewrite(path: Path, target: Path, tensors: Tensors, **config: Any) -> Path:
    target.mkdir()
    raw = json.loads((path / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, **config}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / FILE)
    return target


def fuse_experts(tensors: Tensors, block: str, gate: str, up: str, down: str, target: str) -> Tensors:
    """All experts of a layer in one tensor, as transformers 5 holds them in memory."""
    fused = {name: tensor for name, tensor in tensors.items() if f"{block}.experts." not in name}
    for layer in range(4):
        prefix = f"model.layers.{layer}.{block}.experts."
        experts = range(sum(name.startswith(prefix) and name.endswith(f"{down}.weight") for name in tensors))
        if experts:
            into = f"model.layers.{layer}.{target}.experts."
            fused[into + "gate_up_proj"] = torch.stack(
                [torch.cat([tensors[f"{prefix}{e}.{part}.weight"] for part in (gate, up)]) for e in experts]
            )
            fused[into + "down_proj"] = torch.stack([tensors[f"{prefix}{e}.{down}.weight"] for e in experts])
    return fused


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_moe(tmp_path_factory.mktemp("separate"))


@pytest.fixture(scope="module")
def fused(separate: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = fuse_experts(load_file(separate / FILE), "mlp", "gate_proj", "up_proj", "down_proj", "mlp")
    return rewrite(separate, tmp_path_factory.mktemp("fused") / "model", tensors)


@pytest.mark.parametrize("slot", [0, 1])
def test_fused_and_separate_experts_load_alike(separate: Path, fused: Path, slot: int) -> None:
    assert_same_weights(load(fused, size=3, slot=slot), load(separate, size=3, slot=slot))


def test_mixtrals_names_and_those_of_transformers_5_load_alike(tmp_path: Path) -> None:
    old = save_family(tmp_path / "old", "mixtral")
    tensors = fuse_experts(load_file(old / FILE), "block_sparse_moe", "w1", "w3", "w2", "mlp")
    renamed = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in tensors.items()}
    assert_same_weights(load(rewrite(old, tmp_path / "new", renamed)), load(old))


def test_only_own_experts_of_a_fused_tensor_are_read(fused: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int]] = []
    whole: list[str] = []
    tensor, entry = Checkpoint.tensor, Checkpoint.entry

    def recording_tensor(self: Checkpoint, name: str) -> torch.Tensor:
        whole.append(name)
        return tensor(self, name)

    def recording_entry(self: Checkpoint, name: str, index: int) -> torch.Tensor:
        read.append((name, index))
        return entry(self, name, index)

    monkeypatch.setattr(Checkpoint, "tensor", recording_tensor)
    monkeypatch.setattr(Checkpoint, "entry", recording_entry)
    load(fused, size=4, slot=1)
    assert {index for _, index in read} == {2, 3}
    assert len(read) == len(set(read)) == 2 * 2 * 2
    assert not [name for name in whole if "experts" in name]


def test_a_fused_expert_moves_alone_and_from_a_peer(
    fused: Path, separate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_transfer, "GROUP_BYTES", 2 * 3 * 64 * 48 * 4)  # two experts
    here, wanted = load(fused, size=4, slot=0), load(separate, size=4, slot=3)
    source = CountingSource(here.checkpoint)
    there = load(tmp_path / "no", size=4, slot=3, source=source, config_path=fused)
    assert_same_weights(there, wanted)
    assert sum(source.asked) < (fused / FILE).stat().st_size * 0.6
    fills = [SeatFill(layer, seat, 6 + seat) for layer in range(2) for seat in range(2)]
    for checkpoint in (here.checkpoint, there.checkpoint):
        for runner in here.model.moe_runners():
            for parameter in runner.routed_experts.parameters():
                parameter.data.zero_()
        groups = list(fetch_experts(here.model, checkpoint, fills))
        assert [len(group) for group in groups] == [2, 2]
        for group in groups:
            for _ in fill_seats(here.model, group):
                pass
        for ours, theirs in zip(here.model.moe_runners(), wanted.model.moe_runners(), strict=True):
            for found, right in zip(ours.routed_experts.parameters(), theirs.routed_experts.parameters(), strict=True):
                assert torch.equal(found, right)
    there.checkpoint.close()


def test_a_wrong_shape_of_a_fused_tensor_is_named(fused: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    tensors = load_file(fused / FILE)
    tensors[name] = tensors[name][:7]
    with pytest.raises(CheckpointError, match=rf"{name} \[7, 64, 48\], must be \[8, 64, 48\]"):
        load(rewrite(fused, tmp_path / "cut", tensors))


def test_places_that_share_a_tensor_lie_in_it_one_after_the_other() -> None:
    """A fused projection, stored transposed and with the first place's rows reversed."""
    target = torch.zeros(7, 3)
    places = [
        Place("q_proj", target[:4], 5, lambda rows: rows.flip(0)),
        Place("k_proj", target[4:6], 5),
        Place("v_proj", target[6:], 5),
    ]
    transposed = Form(lambda shape: (shape[1], shape[0]), lambda weight: weight.t())
    fused = Stored(("old.{layer}.qkv", "new.{layer}.qkv"), transposed)
    names = WeightNames(places=dict.fromkeys(("q_proj", "k_proj", "v_proj"), fused))
    (found,) = place_targets(places, names, {"new.5.qkv"})
    assert (found.source.names, found.source.shapes) == (("new.5.qkv",), ((3, 7),))
    assert found.stores is not None
    weight = torch.arange(21.0).view(3, 7)
    for part, store in zip(found.source.split(weight), found.stores, strict=True):
        store(part)
    assert torch.equal(target, weight.t()[[3, 2, 1, 0, 4, 5, 6]])
    (missing,) = place_targets(places, names, set())
    assert missing.source.names == ("old.5.qkv",)


# MXFP4


def test_mxfp4_decodes_like_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(90, 150, (3, 10, 4), dtype=torch.uint8, generator=generator)
    theirs = convert_moe_packed_tensors(blocks, scales)
    for expert in range(3):
        assert torch.equal(decode_mxfp4(blocks[expert], scales[expert]), theirs[expert].t())


def test_an_mxfp4_checkpoint_loads_like_its_dequantised_twin(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = save_family(tmp_path / "plain", "gpt_oss")
    generator = torch.Generator().manual_seed(0)
    decoded = load_file(plain / FILE)
    packed = dict(decoded)
    for name in [name for name in decoded if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, inputs, outputs = packed.pop(name).shape
        shape = (num_experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 126, shape, dtype=torch.uint8, generator=generator)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        decoded[name] = convert_moe_packed_tensors(blocks, scales).float()
    ours = rewrite(plain, tmp_path / "packed", packed, quantization_config={"quant_method": "mxfp4"})
    theirs = rewrite(plain, tmp_path / "decoded", decoded)
    assert_same_weights(load(ours, size=2, slot=1), load(theirs, size=2, slot=1))
    words = r"'awq', which is not implemented \(supported: 'fp8', 'compressed-tensors', 'mxfp4'\)"
    with pytest.raises(CheckpointError, match=words):
        read_model_config(rewrite(plain, tmp_path / "awq", packed, quantization_config={"quant_method": "awq"}))


# Configs


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_old_and_new_config_layouts_read_the_same(name: str, tmp_path: Path) -> None:
    path = save_family(tmp_path, name)
    new = read_model_config(path)
    raw = json.loads((path / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        raw["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    raw["torch_dtype"] = raw.pop("dtype")
    if name not in ("gpt_oss", "llama4"):
        raw.pop("layer_types", None)
    if "num_local_experts" in raw:
        raw["num_experts"] = raw.pop("num_local_experts")
    (path / "config.json").write_text(json.dumps(raw))
    assert read_model_config(path) == new


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("mixtral", {"sliding_window": 0}, "sliding_window is 0"),
        ("glm4_moe", {"n_group": "4"}, "n_group is '4'"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3"),
        ("gpt_oss", {"swiglu_limit": 10.0}, "swiglu_limit is 10.0"),
        ("gpt_oss", {"layer_types": ["linear_attention"] * 3}, "layer_types is"),
        ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok is 2"),
        ("olmoe", {"attention_bias": "yes"}, "attention_bias is 'yes'"),
    ],
)
def test_what_a_family_does_not_implement_is_refused_by_name(
    name: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save_family(tmp_path, name)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, **fields}))
    with pytest.raises(CheckpointError, match=message):
        read_model_config(path)


def test_longrope_ends_where_its_factors_would_depend_on_the_sequence(tmp_path: Path) -> None:
    path = save_family(tmp_path, "phimoe")
    assert read_model_config(path).max_position_embeddings == 192
    with pytest.raises(ValueError, match="max_model_len is 193, the checkpoint's limit is 192"):
        load(path, max_model_len=193)


def test_layers_for_predicting_more_tokens_are_not_used(tmp_path: Path) -> None:
    path = save_family(tmp_path / "model", "glm4_moe")
    tensors = load_file(path / FILE)
    extra = {name.replace("layers.2.", "layers.3."): t.clone() for name, t in tensors.items() if "layers.2." in name}
    with_extra = rewrite(path, tmp_path / "extra", {**tensors, **extra, "model.layers.3.eh_proj.weight": torch.ones(2)})
    assert_same_weights(load(with_extra), load(path))
