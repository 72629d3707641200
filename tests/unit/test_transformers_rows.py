"""How many rows are computed for a step, and that no bit depends on it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from moeray.worker.models.linear import RowLinear
from moeray.worker.models.transformers_rows import StepRows
from moeray.worker.models.transformers_skeleton import ExactLinear


def rows_of(num_tokens: int, *, exact: bool = True) -> StepRows:
    rows = StepRows(exact=exact)
    rows.begin(num_tokens)
    return rows


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 33, 100])
@pytest.mark.parametrize("function", [torch.sigmoid, nn.functional.silu, nn.functional.softplus])
def test_elementwise_functions_over_one_number_a_row_keep_bits(
    num_tokens: int, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    torch.manual_seed(0)
    values = torch.randn(4096, 1) * 3
    num_rows = rows_of(num_tokens).num_padded
    assert num_rows >= num_tokens
    expected = function(values)
    for start in range(0, 3840, 32):
        some = slice(start, start + num_rows)
        assert torch.equal(function(values[some].clone()), expected[some])


def test_a_step_without_tokens_has_rows() -> None:
    assert (rows_of(0, exact=False).num_real, rows_of(0, exact=False).num_padded) == (0, 1)
    assert rows_of(0).num_padded > 0
    assert rows_of(7, exact=False).num_padded == 8


@pytest.mark.parametrize("num_tokens", [0, 3, 30])
def test_a_linear_layer_computes_the_rows_that_count(num_tokens: int) -> None:
    rows = rows_of(num_tokens)
    replaced = nn.Linear(48, 24)
    linear = ExactLinear(replaced, RowLinear(exact=True), rows)
    hidden_1UI = torch.randn(1, rows.num_padded, 48)
    with torch.inference_mode():
        out_1UO, expected_1UO = linear(hidden_1UI), replaced(hidden_1UI)
        assert linear(hidden_1UI[:, :0]).shape == (1, 0, 24)
        whole_UO = linear(hidden_1UI[0])  # not in the shape of a step: every row counts
    assert torch.allclose(out_1UO[0, :num_tokens], expected_1UO[0, :num_tokens], atol=1e-5)
    assert out_1UO[0, rows.num_computed :].count_nonzero() == 0
    assert torch.allclose(whole_UO, expected_1UO[0], atol=1e-5)
