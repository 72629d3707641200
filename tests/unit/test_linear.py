"""Dense projections: paddings, and the fact about matrix products that exact mode stands on."""

import pytest
import torch
import torch.nn.functional as F

from moeray.worker.models.linear import RowLinear, padded_rows


@pytest.mark.parametrize(
    ("rows", "exact", "fast"), [(0, 0, 0), (1, 4, 1), (3, 4, 3), (5, 8, 8), (17, 24, 24), (65, 96, 96)]
)
def test_rows_are_padded_to_few_sizes(rows: int, exact: int, fast: int) -> None:
    assert padded_rows(rows, exact=True) == exact
    assert padded_rows(rows, exact=False) == fast


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 128), (64, 10), (200, 64), (256, 512), (384, 96), (1024, 256)])
@pytest.mark.parametrize("biased", [False, True])
def test_exact_rows_have_the_same_bits_whatever_their_number(inputs: int, outputs: int, biased: bool) -> None:
    torch.manual_seed(0)
    linear = RowLinear(True)
    weight, x = torch.randn(outputs, inputs), torch.randn(600, inputs)
    bias = torch.randn(outputs) if biased else None
    whole = linear(x, weight, bias)
    assert torch.allclose(whole, F.linear(x, weight, bias), atol=1e-3)
    for count in (1, 2, 3, 4, 5, 7, 13, 31, 64, 65, 100, 129, 300, 512):
        assert torch.equal(linear(x[600 - count :], weight, bias), whole[600 - count :]), count
