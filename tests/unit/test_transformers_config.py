"""config.json of models that go through transformers: experts and their layers by the keys in use, refusals by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from moeray.comm.errors import CheckpointError
from moeray.worker.models.registry import read_model_config
from moeray.worker.models.transformers_config import TransformersConfig

BASE: dict[str, Any] = {
    "architectures": ["Dots1ForCausalLM"],
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": [3, 4],
    "dtype": "bfloat16",
}


def read(directory: Path, without: tuple[str, ...] = (), model_impl: str = "auto", **fields: Any) -> TransformersConfig:
    raw = {name: value for name, value in {**BASE, **fields}.items() if name not in without}
    (directory / "config.json").write_text(json.dumps(raw))
    config = read_model_config(directory, model_impl)
    assert isinstance(config, TransformersConfig)
    return config


def test_what_the_system_needs(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_experts, config.moe.top_k, config.num_moe_layers) == (8, 2, 6)
    assert (config.eos_token_ids, config.checkpoint_dtype, config.directory) == ((3, 4), "bfloat16", tmp_path)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse", "sparse"]}, (1, 3, 4, 5)),
        ({"first_k_dense_replace": 2}, (2, 3, 4, 5)),
        ({"num_dense_layers": 1}, (1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, (1, 2, 4, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 2}, (1, 3, 5)),
        ({"moe_layer_start_index": 0, "moe_layer_end_index": 3, "moe_layer_interval": 1}, (0, 1, 2, 3)),
    ],
)
def test_layers_with_experts(tmp_path: Path, fields: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert read(tmp_path, **fields).moe.layers == layers


@pytest.mark.parametrize("name", ["n_routed_experts", "num_local_experts", "moe_num_experts"])
def test_experts_have_several_names(tmp_path: Path, name: str) -> None:
    fields: dict[str, Any] = {name: 12, "moe_topk": 3}
    config = read(tmp_path, without=("num_experts", "num_experts_per_tok"), **fields)
    assert (config.num_experts, config.moe.top_k) == (12, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"without": ("num_experts",)}, "Dots1ForCausalLM names no number of experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, must be from 1 to 8"),
        ({"num_experts": "many"}, "num_experts is 'many', must be a whole number"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types has linear_attention"),
        ({"mamba_d_state": 16}, "mamba_d_state says that layers keep a state"),
        ({"text_config": {}}, "is not supported: .* only text models of their own"),
        ({"architectures": ["SomeMoeForConditionalGeneration"]}, "is not supported: .* only text models of their own"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not implemented"),
        ({"architectures": ["OddForCausalLM"]}, "'OddForCausalLM' is not supported: .* does not know it"),
        ({"model_impl": "native"}, r"'Dots1ForCausalLM' is not native \(native: Qwen3MoeForCausalLM"),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, **fields)
