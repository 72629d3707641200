"""What a dry run sees of attention, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from moeray.worker.models.config import KeyWindow
from moeray.worker.models.transformers_probe import NUM_TOKENS, AskedMask, Probe, Refusal, asked_mask


def test_windows_are_read_from_the_mask() -> None:
    assert asked_mask(mask_function=causal_mask_function) == AskedMask()
    sliding = asked_mask(mask_function=sliding_window_causal_mask_function(7), local_size=7)
    assert sliding == AskedMask(KeyWindow(7))


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"mask_function": bidirectional_mask_function}, "not causal"),
        ({"mask_function": causal_mask_function, "use_vmap": True}, "of its own making"),
        (
            {"mask_function": chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)), "local_size": 8},
            "does not slide",
        ),
    ],
)
def test_other_masks_are_refused_where_they_are_used(options: dict[str, Any], refusal: str) -> None:
    mask = asked_mask(**options)
    with pytest.raises(Refusal, match=refusal):
        attend(mask)


def attend(mask: object, num_keys: int = NUM_TOKENS, **options: Any) -> Probe:
    probe = Probe()
    module = nn.Module()
    vars(module)["layer_idx"] = 3
    query, key, value = (
        torch.zeros(1, heads, tokens, dim) for heads, tokens, dim in ((4, 4, 16), (2, num_keys, 16), (2, num_keys, 8))
    )
    assert probe.attend(module, query, key, value, mask, **options).shape == (1, NUM_TOKENS, 4, 8)
    return probe


def test_a_layer_is_taken_down_as_it_is_used() -> None:
    (layer,) = attend(AskedMask(KeyWindow(5)), dropout=0.0, sliding_window=5, is_causal=True).layers
    assert (layer.layer_idx, layer.num_heads, layer.num_kv_heads, layer.key_dim, layer.value_dim) == (3, 4, 2, 16, 8)
    shape = layer.cache_shape()
    assert (shape.num_kv_heads, shape.key_dim, shape.value_dim, shape.window) == (2, 16, 16, KeyWindow(5))


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"mask": None}, "NoneType for a mask"),
        ({"mask": torch.zeros(1, 1, 4, 4)}, "Tensor for a mask"),
        ({"mask": AskedMask(), "softcap": 50.0}, "asks attention for softcap"),
        ({"mask": AskedMask(), "dropout": 0.1}, "asks attention for dropout"),
        ({"mask": AskedMask(), "position_bias": torch.zeros(1)}, "asks attention for position_bias"),
        ({"mask": AskedMask(), "num_keys": 6}, "not those of its tokens"),
    ],
)
def test_what_a_paged_cache_cannot_do_is_refused(arguments: dict[str, Any], refusal: str) -> None:
    with pytest.raises(Refusal, match=refusal):
        attend(**arguments)
