"""DeepSeek's configs: what they come to, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest

from moeray.comm.errors import CheckpointError
from moeray.worker.models.config import DecoderConfig, LatentAttentionConfig
from moeray.worker.models.config_reader import ConfigReader
from moeray.worker.models.deepseek import read_v2_config, read_v3_config

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}


def read(version: int, **fields: Any) -> DecoderConfig:
    raw = {**COMMON, "architectures": [f"DeepseekV{version}ForCausalLM"], **fields}
    reader = ConfigReader(raw, Path("config.json"))
    config = (read_v2_config if version == 2 else read_v3_config)(reader)
    reader.finish()
    return config


@pytest.mark.parametrize(
    ("version", "fields", "message"),
    [
        (2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        (2, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        (2, {"mlp_bias": True}, "mlp_bias is True"),
        (2, {"norm_topk_prob": True, "routed_scaling_factor": 16.0}, "routed_scaling_factor is 16.0"),
        (2, {"e_score": 1}, "e_score=1"),
        (3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (3, {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        (3, {"attention_bias": True}, "attention_bias is True"),
        (3, {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        (3, {"n_group": 3}, "n_group is 3, must divide"),
        (3, {"n_group": 4, "topk_group": 5}, "topk_group is 5"),
        (3, {"n_group": 4, "topk_group": 1}, r"topk_group is 1.*num_experts_per_tok \(3\)"),
        (3, {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale_all_dim"),
        (3, {"mlp_layer_types": ["sparse"]}, r"mlp_layer_types is \['sparse'\]"),
        (3, {"q_lora_rank": 0}, "q_lora_rank is 0"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(version: int, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(version, **fields)


def test_which_layers_have_experts() -> None:
    assert read(3).moe.layers == (1, 2, 3, 4, 5)
    assert read(2, moe_layer_freq=2).moe.layers == (2, 4)
    kinds = ["dense", "sparse", "dense", "sparse", "sparse", "dense"]
    assert read(3, mlp_layer_types=kinds).moe.layers == (1, 3, 4)


def test_groups_count_for_limited_selection_only() -> None:
    groups = {"n_group": 4, "topk_group": 2}
    for config, expected in (
        (read(2, topk_method="greedy", **groups), (1, 1)),
        (read(2, topk_method="group_limited_greedy", **groups), (4, 2)),
        (read(3, **groups), (4, 2)),
    ):
        assert (config.moe.num_expert_groups, config.moe.topk_groups) == expected


def test_v2_renormalises_on_request_only() -> None:
    assert not read(2).moe.renormalize
    assert read(2, norm_topk_prob=True).moe.renormalize
    assert read(2).moe.shared_intermediate_size == 0
    assert read(2, n_shared_experts=2).moe.shared_intermediate_size == 96


@pytest.mark.parametrize(("weight", "expected"), [(None, 1.0), (0, 1.0), (0.7, (0.07 * math.log(40) + 1) ** 2)])
def test_the_softmax_scale_takes_mscale_squared(weight: float | None, expected: float) -> None:
    yarn = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16, "mscale": 1.0}
    attention = read(3, rope_scaling={**yarn, "mscale_all_dim": weight}, qk_nope_head_dim=56).attention
    assert isinstance(attention, LatentAttentionConfig)
    assert attention.scale == pytest.approx(expected / 8.0)
