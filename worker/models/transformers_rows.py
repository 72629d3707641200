"""How many rows transformers' code computes for a step, and which of them count."""

import torch

from moeray.worker.models.linear import padded_rows

# Elementwise functions of torch treat what is left over behind whole groups of four vectors in another way than the
# rest: so many numbers of fp32 are a group.
GROUP_OF_CAPABILITY = {"AVX512": 64}
GROUP = 32


class StepRows:
    """The rows of the current step: `num_real` tokens, `num_computed` rows of a product, `num_padded` rows in all.

    With `exact` products have a number of rows that keeps bits (`linear.py`), and there are so many rows that every
    elementwise function, also over one number a row, works on whole groups of vectors. There is always a row.
    """

    def __init__(self, *, exact: bool) -> None:
        self.exact = exact
        self._multiple = GROUP_OF_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), GROUP) if exact else 1
        self.begin(0)

    def begin(self, num_tokens: int) -> None:
        """A step of so many tokens."""
        self.num_real = num_tokens
        self.num_computed = padded_rows(max(num_tokens, 1), exact=self.exact)
        self.num_padded = -(-self.num_computed // self._multiple) * self._multiple
