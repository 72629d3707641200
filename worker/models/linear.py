"""Dense projections whose rows do not depend on what else is in the batch.

A BLAS picks its inner loop by the number of rows, so the same row can come out with other bits in another batch. For
fp32 on CPU there is a kernel of our own (`worker/kernels`), which sums each row in the same order however many there
are, and reads the weights of few rows about twice as fast. Where it was not compiled, the number of rows is padded: a
multiple of 4 always takes the same loop, in oneDNN as in MKL (docs/exactness.md has the measurements); the contents of
the added rows do not matter. `exact` pads always; without it one to three rows go as they are, because a single row is
a cheaper matrix-vector product.

oneDNN compiles code for every new number of rows (about a millisecond), so larger batches are padded to few sizes that
`warm_up` meets before anything is served.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from moeray.worker.kernels.library import RowKernel, row_kernel

ROW_MULTIPLE = 4
# (up to this many rows, padded to a multiple of this)
QUANTA = ((16, 4), (64, 8), (1 << 62, 32))


def padded_rows(num_rows: int, *, exact: bool) -> int:
    """How many rows a product of `num_rows` rows is computed with."""
    if not exact and num_rows < ROW_MULTIPLE:
        return num_rows
    quantum = next(quantum for limit, quantum in QUANTA if num_rows <= limit)
    return -(-num_rows // quantum) * quantum


def padded_rows_of(counts: "npt.NDArray[np.int64]", *, exact: bool) -> "npt.NDArray[np.int64]":
    """`padded_rows` of each count."""
    return np.array([padded_rows(count, exact=exact) for count in counts.tolist()], dtype=np.int64)


def _onednn(x_MI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_MI, weight_OI, bias_O, "none", [], "")
    return out


def _kernel_for(weight_OI: torch.Tensor) -> Callable[..., torch.Tensor]:
    """oneDNN for fp32 on CPU, where it beats the BLAS that `F.linear` takes by up to 1.6; `F.linear` elsewhere."""
    is_cpu_fp32 = weight_OI.device.type == "cpu" and weight_OI.dtype == torch.float32
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return _onednn if is_cpu_fp32 and has_onednn else F.linear


@dataclass(frozen=True, slots=True)
class RowLinear:
    """y = x @ w.T + b, with bit-stable rows if `exact`. Without `kernel` rows are padded.

    Legend: M rows, H heads, I in, O out.
    """

    exact: bool
    kernel: RowKernel | None = field(default_factory=row_kernel)

    def __call__(self, x_MI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
        if self.kernel is not None and self.kernel.takes(x_MI, weight_OI):
            return self.kernel(x_MI, weight_OI, bias_O)
        num_rows = x_MI.shape[0]
        num_padded = padded_rows(num_rows, exact=self.exact)
        kernel = _kernel_for(weight_OI)
        if num_padded == num_rows:
            return kernel(x_MI, weight_OI, bias_O)
        padded_MI = x_MI.new_zeros((num_padded, x_MI.shape[1]))
        padded_MI[:num_rows] = x_MI
        return kernel(padded_MI, weight_OI, bias_O)[:num_rows]

    def per_head(self, x_MHI: torch.Tensor, weight_HIO: torch.Tensor) -> torch.Tensor:
        """x @ w for each head with a weight of its own, [M, H, O], as one batched product."""
        num_rows = x_MHI.shape[0]
        num_padded = padded_rows(num_rows, exact=self.exact)
        if num_padded != num_rows:
            padded_MHI = x_MHI.new_zeros((num_padded, *x_MHI.shape[1:]))
            padded_MHI[:num_rows] = x_MHI
            x_MHI = padded_MHI
        return torch.bmm(x_MHI.transpose(0, 1), weight_HIO).transpose(0, 1)[:num_rows]

    def pads(self, x_MI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
        """Whether these rows are computed with others that pad them."""
        return self.kernel is None or not self.kernel.takes(x_MI, weight_OI)

    def warm_up(self, weights: Iterable[torch.Tensor], max_rows: int, dtype: torch.dtype) -> None:
        """Meet every number of rows up to `max_rows` once for each distinct shape among `weights`.

        Rows have this type, or that of weights that are wider.
        """
        by_shape = {tuple(weight.shape): weight for weight in weights}
        sizes = sorted({padded_rows(rows, exact=self.exact) for rows in range(1, max_rows + 1)})
        for weight_OI in by_shape.values():
            rows_dtype = torch.promote_types(dtype, weight_OI.dtype)
            most_MI = weight_OI.new_zeros((max(sizes, default=0), weight_OI.shape[1]), dtype=rows_dtype)
            if self.pads(most_MI, weight_OI):
                for rows in sizes:
                    self(most_MI[:rows], weight_OI)
