"""Rotary embeddings: every kind against transformers, layouts against each other, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moeray.comm.errors import CheckpointError
from moeray.worker.models.config_reader import ConfigReader
from moeray.worker.models.rope import inverse_frequencies, pairs_to_halves, rotary_tables, rotate
from moeray.worker.models.rope_config import RopeConfig

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-from-lengths": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
    "yarn-untruncated": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 100,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 40.0,
        "attention_factor": 1.3,
        "original_max_position_embeddings": 128,
    },
    "longrope": {
        "short_factor": [1.0 + k / 8 for k in range(16)],
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 128,
    },
}


def reader_of(raw: dict[str, Any]) -> ConfigReader:
    return ConfigReader({"max_position_embeddings": 512, **raw}, Path("config.json"))


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("name", [name for name in KINDS if name != "longrope"] + ["longrope"])
def test_frequencies_and_attention_factor_are_those_of_transformers(name: str, partial: float) -> None:
    from transformers import MixtralConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": name, "rope_theta": 5000.0, "partial_rotary_factor": partial, **KINDS[name]}
    if name == "longrope":
        for which in ("short_factor", "long_factor"):
            parameters[which] = parameters[which][: int(16 * partial)]
    config = MixtralConfig(head_dim=32, max_position_embeddings=512, rope_parameters=dict(parameters))
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    ours = reader_of({"rope_parameters": parameters}).rope(32, may_be_partial=True)
    assert torch.equal(inverse_frequencies(ours), frequencies)
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)


def test_both_layouts_of_the_config_and_the_familys_theta() -> None:
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}}
    old = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7.0}
    assert reader_of(new).rope(8) == reader_of(old).rope(8)
    assert reader_of({}).rope(8, default_theta=9.0) == RopeConfig(type="default", theta=9.0, dim=8)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'.*supported: default"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_parameters\.factor is None"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "sharpness": 1}}, "'sharpness'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        reader_of(raw).rope(8)


def test_only_the_first_dims_are_rotated() -> None:
    heads = torch.randn(3, 2, 8)
    cos, sin = (
        table[5:8].unsqueeze(1)
        for table in rotary_tables(RopeConfig(type="default", theta=10.0, dim=4), 8, heads.device)
    )
    rotated = rotate(heads, cos, sin)
    assert torch.equal(rotated[..., 4:], heads[..., 4:])
    assert torch.equal(rotated[..., :4], rotate(heads[..., :4].contiguous(), cos, sin))


@pytest.mark.parametrize("dim", [8, 4])
def test_reordered_rows_score_like_interleaved_pairs(dim: int) -> None:
    """An interleaved pair (2k, 2k + 1) turns by the same angle as the pair (k, k + dim / 2) of the halves layout."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 2 * 8, 12, generator=generator, dtype=torch.float64)
    inputs = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    angles = torch.tensor([3.0, 11.0]).unsqueeze(1) / 10.0 ** torch.arange(dim // 2)

    def interleaved(rows: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(rows[:, :dim].reshape(2, -1, 2).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle).to(pairs.dtype)).flatten(1)
        return torch.cat((turned, rows[:, dim:]), -1)

    want = [interleaved((w @ x).view(2, 8), a) for w, x, a in zip(weights, inputs, angles, strict=True)]
    found = []
    for weight, x, angle in zip(weights, inputs, angles, strict=True):
        heads = (pairs_to_halves(weight, 8, dim) @ x).view(1, 2, 8)
        twice = torch.cat((angle, angle)).double()
        found.append(rotate(heads, twice.cos().view(1, 1, -1), twice.sin().view(1, 1, -1))[0])
    assert torch.allclose((want[0] * want[1]).sum(-1), (found[0] * found[1]).sum(-1), atol=1e-6)
