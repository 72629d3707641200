"""Quantisation: what configs are read and refused, what stays in memory, and methods from outside."""

import importlib.metadata
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeray.comm.errors import CheckpointError
from moeray.comm.placement import ExpertPlacement
from moeray.worker.config import WorkerConfig
from moeray.worker.loaded_model import LoadedModel, load_model
from moeray.worker.models.registry import read_model_config
from moeray.worker.models.weights import WeightSource
from moeray.worker.moe.quant import registry
from moeray.worker.moe.quant.base import FusedMoEMethodBase
from moeray.worker.moe.quant.checkpoint import QuantizedCheckpoint, StoredTensor
from moeray.worker.moe.quant.decoded import DecodeBuffer, DecodedMoEMethod
from moeray.worker.moe.quant.fp8 import Fp8MoEMethod, decode_fp8
from moeray.worker.moe.quant.int8 import Int8MoEMethod
from moeray.worker.moe.quant.options import QuantOptions
from moeray.worker.moe.quant.unquantized import UnquantizedMoEMethod
from moeray.worker.peer_checkpoint import LocalSource
from tests.support.checkpoints import save_qwen3_moe
from tests.support.quantized import (
    CHANNELS,
    TOKENS,
    fp8_config,
    int8_config,
    is_linear,
    save_quantized,
    to_fp8,
    to_int8,
)
from tests.unit.test_moe_layers import fill, make_runner, run

Edit = Callable[[dict[str, torch.Tensor]], None]
EXPERT = "model.layers.1.mlp.experts.3.up_proj."


def load(path: Path, slots: int = 1) -> LoadedModel:
    config = read_model_config(path)
    placement = ExpertPlacement.contiguous(
        num_layers=config.num_moe_layers, num_experts=config.num_experts, slots=range(slots), num_seats=8
    )
    worker = WorkerConfig(model_path=str(path), num_seats=8, max_workers=4, kv_cache_bytes=32 << 20)
    return load_model(worker, placement, 0, lambda _: None)


def edit_weights(path: Path, edit: Edit) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def set_quantization(path: Path, quantization: Any) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))


# What stays in memory


@pytest.mark.parametrize(
    ("quantize", "config", "method", "dtype"),
    [
        (to_fp8(), fp8_config(), Fp8MoEMethod, torch.float8_e4m3fn),
        (to_int8(), int8_config(), Int8MoEMethod, torch.int8),
        (to_int8(packed=True), int8_config("pack-quantized"), Int8MoEMethod, torch.int8),
    ],
)
def test_an_experts_weight_takes_one_byte(
    tmp_path: Path, quantize: Any, config: dict[str, Any], method: type, dtype: torch.dtype
) -> None:
    path, decoded = save_quantized(tmp_path, quantize, config)
    loaded = load(path)
    plain = load_file(decoded / "model.safetensors")
    for runner in loaded.model.moe_runners():
        experts = runner.routed_experts
        assert type(runner.quant_method) is method
        w13, w2 = experts.get_parameter("w13_S2FD"), experts.get_parameter("w2_SDF")
        assert (w13.dtype, w2.dtype) == (dtype, dtype)
        scales = sum(p.nbytes for name, p in experts.named_parameters() if name.startswith("scales"))
        num_weights = 3 * experts.hidden_size * experts.intermediate_size
        assert experts.seat_nbytes == num_weights + scales // experts.num_seats
        assert scales / experts.num_seats < 0.1 * num_weights
    saved = sum(t.nbytes for t in plain.values()) - loaded.weights_bytes
    assert saved > 0.7 * sum(t.nbytes for name, t in plain.items() if "experts" in name)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_quantised_checkpoint_comes_from_a_peer_as_it_is(tmp_path: Path, name: str) -> None:
    quantize, config = {"fp8": (to_fp8(), fp8_config()), "int8": (to_int8(packed=True), int8_config("pack-quantized"))}[
        name
    ]
    here = load(save_quantized(tmp_path, quantize, config)[0])
    worker = WorkerConfig(model_path=str(tmp_path / "no"), num_seats=8, max_workers=4, kv_cache_bytes=32 << 20)
    placement = ExpertPlacement.contiguous(num_layers=2, num_experts=8, slots=range(1), num_seats=8)
    there = load_model(worker, placement, 0, lambda _: None, LocalSource(here.checkpoint))
    for ours, theirs in zip(there.model.parameters(), here.model.parameters(), strict=True):
        assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8))
    there.checkpoint.close()


def test_decoding_fp8_is_exact_for_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 256)
    decoded = decode_fp8(codes, torch.tensor([[1.0, 0.37]]), (128, 128), torch.empty(1, 256))
    expected = codes.float() * torch.tensor([1.0, 0.37]).repeat_interleave(128)
    is_number = ~expected.isnan()
    assert is_number.sum() == 254
    assert torch.equal(decoded[is_number], expected[is_number])


@pytest.mark.parametrize(
    "method", [lambda: Fp8MoEMethod((16, 16), DecodeBuffer()), lambda: Int8MoEMethod(DecodeBuffer())]
)
def test_a_seat_is_filled_with_its_scales_before_and_after_the_kernel_is_built(
    method: Callable[[], DecodedMoEMethod],
) -> None:
    quantize = to_fp8(16) if isinstance(method(), Fp8MoEMethod) else to_int8()
    runner, plain = make_runner(), make_runner()
    fill(plain)
    runner.quant_method = method()
    experts, plain_experts = runner.routed_experts, plain.routed_experts

    def load_seat(seat: int) -> None:
        gate_up, down = (
            plain_experts.get_parameter("w13_S2FD").data[seat],
            plain_experts.get_parameter("w2_SDF").data[seat],
        )
        for part, weight in zip(("gate", "up", "down"), (*gate_up.chunk(2), down), strict=True):
            tensors, decoded = quantize(weight.clone())
            weight.copy_(decoded)
            for name, tensor in zip((part, f"{part}_scale"), tensors.values(), strict=True):
                for row in range(0, tensor.shape[0], 5):  # in pieces, as a transfer does it
                    runner.quant_method.load_expert(experts, seat, name, tensor[row : row + 5], row)

    load_seat(0)
    assert runner.gate_ED is not None
    assert plain.gate_ED is not None
    runner.gate_ED.data.copy_(plain.gate_ED)
    runner.finish_loading()
    kernel = runner.quant_method.moe_kernel
    for seat in range(1, experts.num_seats):
        load_seat(seat)
    assert runner.quant_method.moe_kernel is kernel
    hidden = torch.randn(9, experts.hidden_size)
    assert torch.equal(run(runner, hidden), run(plain, hidden))


def test_replacing_the_method_refreshes_all_that_is_derived_from_it() -> None:
    runner = make_runner()
    plain_seat = runner.routed_experts.seat_nbytes
    source = QUARTERS.expert(GATE)
    runner.quant_method = method = Int8MoEMethod(DecodeBuffer())
    assert {name for name, _ in runner.routed_experts.named_parameters()} == {
        *("w13_S2FD", "w2_SDF", "scales_13_S2fd", "scales_2_Sdf")
    }
    assert runner.routed_experts.seat_nbytes < 0.4 * plain_seat
    stores = runner.seat_target(source, 2).stores
    assert stores is not None
    assert stores[0].func.__self__ is method  # type: ignore[attr-defined]
    assert runner.is_internal_router
    assert runner.topk_indices_dtype is None
    with pytest.raises(RuntimeError, match="Int8MoEMethod has no kernel yet"):
        _ = runner.quant_method.moe_kernel
    for parameter in runner.parameters():
        parameter.data.zero_()
    runner.finish_loading()
    assert runner.quant_method.moe_kernel.experts.quant_config.weight_format == "int8-channel"
    assert torch.equal(run(runner, torch.randn(3, 32)), torch.zeros(3, 32))


def test_biases_are_refused_by_name() -> None:
    biased = make_runner(expert_bias=True)
    with pytest.raises(ValueError, match="Int8MoEMethod does not support experts with biases"):
        biased.quant_method = Int8MoEMethod(DecodeBuffer())
    assert isinstance(biased.quant_method, UnquantizedMoEMethod)
    assert biased.routed_experts.get_parameter("w13_S2FD").dtype == torch.float32


# Which weights are quantised


def test_modules_that_are_left_out_stay_in_floating_point(tmp_path: Path) -> None:
    config = fp8_config(modules_to_not_convert=["model.layers.0", "self_attn.o_proj"])
    path, decoded = save_quantized(
        tmp_path,
        to_fp8(),
        config,
        chosen=lambda name: is_linear(name) and ".0." not in name[:15] and "o_proj" not in name,
    )
    ours, theirs = load(path).model, load(decoded).model
    kinds = [type(runner.quant_method) for runner in ours.moe_runners()]
    assert kinds == [UnquantizedMoEMethod, Fp8MoEMethod]
    for name, parameter in theirs.state_dict().items():
        if "layers.1.mlp.routed_experts" not in name:
            assert torch.equal(ours.state_dict()[name], parameter), name


@pytest.mark.parametrize(
    ("ignore", "targets", "left_out"),
    [
        (["m.experts.0.up_proj"], ["Linear"], {"m.experts.0.up_proj"}),
        (["re:.*up_proj"], ["Linear"], {"m.experts.0.up_proj", "m.experts.1.up_proj"}),
        (["experts"], ["Linear"], set()),
        ([], ["re:.*experts.0.*"], {"m.experts.1.up_proj", "m.o_proj"}),
    ],
)
def test_compressed_tensors_lists(ignore: list[str], targets: list[str], left_out: set[str]) -> None:
    config = int8_config(ignore=ignore)
    config["config_groups"] = {"group_0": {"targets": targets, "weights": CHANNELS}}
    checkpoint = registry.read_quantization(config, "here")
    modules = ("m.experts.0.up_proj", "m.experts.1.up_proj", "m.o_proj")
    assert {module for module in modules if checkpoint.leaves_out(module)} == left_out


@pytest.mark.parametrize(
    ("pattern", "left_out"),
    [
        ("model.layers.1", {"model.layers.1.mlp"}),
        ("model.layers.1.ml", set()),
        ("model.layers.1*", {"model.layers.1.mlp", "model.layers.11.mlp"}),
        ("mlp", {"model.layers.1.mlp", "model.layers.11.mlp"}),
    ],
)
def test_modules_to_not_convert_are_read_as_transformers_does(pattern: str, left_out: set[str]) -> None:
    should_convert = pytest.importorskip("transformers.quantizers.quantizers_utils").should_convert_module
    checkpoint = registry.read_quantization(fp8_config(modules_to_not_convert=[pattern]), "here")
    for module in ("model.layers.1.mlp", "model.layers.11.mlp"):
        assert checkpoint.leaves_out(module) is (module in left_out)
        assert should_convert(module, [pattern]) is (module not in left_out)


def test_some_experts_of_a_layer_cannot_be_left_out(tmp_path: Path) -> None:
    path, _ = save_quantized(tmp_path, to_fp8(), fp8_config(modules_to_not_convert=[EXPERT[:-1]]))
    with pytest.raises(CheckpointError, match=rf"leaves out {EXPERT[:-1]} and 0 more of the experts of layer 1"):
        load(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(EXPERT + "weight_scale_inv"), rf"lacks 1 tensors: {EXPERT}weight_scale_inv"),
        (
            lambda t: t.update({EXPERT + "weight_scale_inv": torch.ones(2, 3)}),
            r"weight_scale_inv \[2, 3\], must be \[2, 2\]",
        ),
        (lambda t: t.update({EXPERT + "weight": torch.ones(48, 64)}), "weight has type float32, must be float8_e4m3fn"),
        (
            lambda t: t.pop("model.layers.0.self_attn.q_proj.weight_scale_inv"),
            r"q_proj\.weight has type float8_e4m3fn, must be float32",
        ),
        (
            lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1, 1)}),
            "does not use: model.norm.weight_scale_inv",
        ),
    ],
)
def test_what_is_wrong_with_a_quantised_weight_is_named(tmp_path: Path, edit: Edit, message: str) -> None:
    path, _ = save_quantized(tmp_path, to_fp8(), fp8_config())
    edit_weights(path, edit)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_fused_quantised_experts_are_refused(tmp_path: Path) -> None:
    path, _ = save_quantized(tmp_path, to_fp8(), fp8_config())

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
        for layer in range(2):
            tensors[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.zeros(8, 96, 64)
            tensors[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.zeros(8, 64, 48)

    edit_weights(path, fuse)
    with pytest.raises(CheckpointError, match="experts of layer 0 are quantised and fused in one tensor"):
        load(path)


# What is refused


def group(weights: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": weights} | fields}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "quantization_config is 'fp8', must be an object"),
        ({}, r"quant_method is None, which is not implemented \(supported: 'fp8', 'compressed-tensors'\)"),
        ({"quant_method": "gptq", "bits": 4}, r"quant_method is 'gptq', .* 'fp8', 'compressed-tensors'\)"),
        (fp8_config(weight_block_size=None), "weight_block_size is None"),
        (fp8_config(weight_block_size=[128]), r"weight_block_size is \[128\]"),
        (fp8_config(activation_scheme="static"), r"activation_scheme is 'static', .*supported: 'dynamic'"),
        (fp8_config(fmt="e5m2"), "fmt is 'e5m2'"),
        (fp8_config(surprise=1), "options that are not implemented: surprise=1"),
        (fp8_config(modules_to_not_convert="all"), "modules_to_not_convert is 'all'"),
        (fp8_config(modules_to_not_convert=["*.gate"]), "no regular expression: nothing to repeat"),
        (int8_config(ignore=["re:*gate"]), "no regular expression: nothing to repeat"),
        (int8_config("float-quantized"), "format is 'float-quantized', .*'pack-quantized'"),
        (int8_config(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is"),
        (int8_config(sparsity_config={"format": "sparse-24"}), "sparsity_config="),
        (int8_config(config_groups={}), r"config_groups is \{\}, .*supported: one group"),
        (int8_config(**group(CHANNELS | {"num_bits": 4})), r"g\.weights\.num_bits is 4, .*supported: 8"),
        (int8_config(**group(CHANNELS | {"strategy": "group"})), "strategy is 'group', .*'channel'"),
        (int8_config(**group(CHANNELS | {"symmetric": False})), "symmetric is False"),
        (
            int8_config(**group(CHANNELS, input_activations=TOKENS | {"dynamic": False})),
            "input_activations.dynamic is False",
        ),
        (int8_config(**group(CHANNELS, output_activations=TOKENS)), "output_activations is"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name_and_value(tmp_path: Path, config: Any, message: str) -> None:
    path = save_qwen3_moe(tmp_path)
    set_quantization(path, config)
    with pytest.raises(CheckpointError, match=message):
        read_model_config(path)


# Methods from outside


class QuartersMethod(UnquantizedMoEMethod):
    """Numbers of the checkpoint are quarters."""

    def load_expert(self, layer: Any, seat: int, name: str, tensor: torch.Tensor, first_row: int = 0) -> None:
        if not name.endswith("_scale"):
            super().load_expert(layer, seat, name, tensor.float() / 4, first_row)


class Quarters(QuantizedCheckpoint):
    def make_method(self, buffer: DecodeBuffer) -> FusedMoEMethodBase:  # noqa: ARG002
        return QuartersMethod()

    def leaves_out(self, module: str) -> bool:
        return "self_attn" in module

    def stored(self, module: str, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
        return StoredTensor(f"{module}.quarters", shape, ("int8",)), StoredTensor(f"{module}.one", (1,), ("int8",))

    def expert_parts(self, shape: tuple[int, ...], *tensors: torch.Tensor) -> Sequence[torch.Tensor]:  # noqa: ARG002
        return tensors

    def decode(self, shape: tuple[int, ...], *tensors: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        raise AssertionError("nothing but experts is quantised here")


QUARTERS = Quarters()
GATE = WeightSource(names=("x.weight",), shapes=((24, 32),), parts=("gate",), split=lambda weight: (weight,))


def read_quarters(options: QuantOptions) -> Quarters:
    options.require("size", 4, optional=False)
    return QUARTERS


def to_quarters(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    numbers = (weight * 4).round().to(torch.int8)
    return {"quarters": numbers, "one": torch.ones(1, dtype=torch.int8)}, numbers / 4


def assert_serves_quarters(directory: Path) -> None:
    path, decoded = save_quantized(
        directory, to_quarters, {"quant_method": "quarters", "size": 4}, chosen=lambda name: ".experts." in name
    )
    ours, theirs = load(path, 2).model, load(decoded, 2).model
    assert all(isinstance(runner.quant_method, QuartersMethod) for runner in ours.moe_runners())
    seat = ours.moe_runners()[1].routed_experts.get_parameter("w2_SDF")[3]
    assert torch.equal(seat, theirs.moe_runners()[1].routed_experts.get_parameter("w2_SDF")[3])
    set_quantization(path, {"quant_method": "quarters", "size": 5})
    with pytest.raises(CheckpointError, match=r"size is 5, .*supported: 4"):
        load(path)


def test_a_registered_method_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_READERS", dict(registry._READERS))
    registry.register("quarters", read_quarters)
    with pytest.raises(ValueError, match="'quarters', which is registered already"):
        registry.register("quarters", read_quarters)
    assert_serves_quarters(tmp_path)


def test_a_packages_entry_point_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "quarters-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Name: quarters\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[moeray.quantization]\nquarters = {__name__}:read_quarters\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.metadata.version("quarters") == "1"
    assert_serves_quarters(tmp_path / "model")
