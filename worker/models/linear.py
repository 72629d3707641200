"""Dense projections whose rows do not depend on what else is in the batch.

BLAS picks its inner loop by the number of rows, so the same row can come out with other bits in another batch. In fp32
on CPU a number of rows that is a multiple of 4 always takes the same loop (docs/exactness.md has the measurements);
the contents of the added rows do not matter. `exact` pads to that; otherwise rows go in as they are.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

ROW_MULTIPLE = 4


def padded_rows(num_rows: int) -> int:
    """`num_rows` rounded up to `ROW_MULTIPLE`."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


@dataclass(frozen=True, slots=True)
class RowLinear:
    """y = x @ w.T + b, with bit-stable rows if `exact`.

    Legend: M rows, I in, O out.
    """

    exact: bool

    def __call__(self, x_MI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        num_rows = x_MI.shape[0]
        if not self.exact or num_rows % ROW_MULTIPLE == 0:
            return F.linear(x_MI, weight_OI, bias_O)
        padded = x_MI.new_zeros((padded_rows(num_rows), x_MI.shape[1]))
        padded[:num_rows] = x_MI
        return F.linear(padded, weight_OI, bias_O)[:num_rows]
