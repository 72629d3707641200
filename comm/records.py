"""How a row looks while it travels: hidden values, then weights (fast mode only), then the seats it goes to.

One record carries all that a destination needs, so one exchange each way is enough. In exact mode weights stay at
home, where the sum is formed; in fast mode they travel in the width of the rows, because the sum that comes back has
no more precision than that. Seats are the destination's own numbers, -1 for experts that sit elsewhere.

Legend: N records, D hidden, K experts per token, B bytes of a record.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from moeray.comm.errors import CapacityError

ALIGNMENT = 16


class RecordViews(NamedTuple):
    """Typed views of the same records. `weights_NK` has no columns where weights do not travel."""

    bytes_NB: torch.Tensor
    hidden_ND: torch.Tensor
    weights_NK: torch.Tensor
    seats_NK: torch.Tensor

    def part(self, first: int, last: int) -> "RecordViews":
        """Records first..last-1."""
        return RecordViews(*(view[first:last] for view in self))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFormat:
    """The layout of one layer's records. `num_bytes` is rounded up so that rows stay aligned."""

    hidden_size: int
    top_k: int
    dtype: torch.dtype
    seat_dtype: torch.dtype
    carries_weights: bool

    @classmethod
    def widest(cls, hidden_size: int, top_k: int, dtype: torch.dtype) -> "RecordFormat":
        """The largest format that any epoch can ask for."""
        return cls(hidden_size=hidden_size, top_k=top_k, dtype=dtype, seat_dtype=torch.int32, carries_weights=True)

    @property
    def weight_dtype(self) -> torch.dtype:
        """fp32 beside fp32 rows, fp16 beside narrower ones."""
        return torch.float32 if self.dtype.itemsize >= 4 else torch.float16

    @property
    def row_bytes(self) -> int:
        return self.hidden_size * self.dtype.itemsize

    @property
    def index_bytes(self) -> int:
        """Seats and weights of one record."""
        return self._num_weights * self.weight_dtype.itemsize + self.top_k * self.seat_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return _round_up(self._seats_at + self.top_k * self.seat_dtype.itemsize, ALIGNMENT)

    @property
    def _weights_at(self) -> int:
        return _round_up(self.row_bytes, self.weight_dtype.itemsize)

    @property
    def _seats_at(self) -> int:
        end = self._weights_at + self._num_weights * self.weight_dtype.itemsize
        return _round_up(end, self.seat_dtype.itemsize)

    @property
    def _num_weights(self) -> int:
        return self.top_k if self.carries_weights else 0

    def views(self, buffer: torch.Tensor, num_records: int) -> RecordViews:
        """The front of a uint8 buffer as records. Raises `CapacityError` if it is too small."""
        if num_records * self.num_bytes > buffer.nbytes:
            raise CapacityError(
                f"{num_records} records of {self.num_bytes} bytes do not fit into a buffer of {buffer.nbytes} bytes"
            )
        flat = buffer[: num_records * self.num_bytes]
        bytes_NB = flat.view(num_records, self.num_bytes)
        return RecordViews(
            bytes_NB,
            self._field(flat, num_records, 0, self.hidden_size, self.dtype),
            self._field(flat, num_records, self._weights_at, self._num_weights, self.weight_dtype),
            self._field(flat, num_records, self._seats_at, self.top_k, self.seat_dtype),
        )

    def _field(self, flat: torch.Tensor, num_records: int, start: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Columns of all records in place: a strided view, without a copy."""
        size = dtype.itemsize
        return flat.view(dtype).as_strided((num_records, width), (self.num_bytes // size, 1), start // size)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
