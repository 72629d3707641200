"""The memory that rows travel through: allocated once, shared by all MoE layers, at the same addresses for life.

A change of epoch only takes other views of these buffers. A step that does not fit is dispatched in pieces, so the
buffers grow with the piece and not with the step.

Legend: T tokens of a piece, K experts per token, W workers, D hidden.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moeray.comm.errors import CapacityError
from moeray.comm.records import RecordFormat

logger = logging.getLogger(__name__)

MAX_PIECE_TOKENS = 512
MIN_PIECE_TOKENS = 16
TARGET_BYTES = 128 << 20
COUNTS_PER_PEER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MoELayerSpec:
    """The sizes of one MoE layer that matter to communication. `dtype` is that of the rows that travel."""

    layer: int
    hidden_size: int
    top_k: int
    num_experts: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name, number, low in (
            ("layer", self.layer, 0),
            ("hidden_size", self.hidden_size, 1),
            ("top_k", self.top_k, 1),
            ("num_experts", self.num_experts, self.top_k),
        ):
            if number < low:
                raise ValueError(f"{name} is {number}, must be at least {low}")


class MoEModel(Protocol):
    """A model that can tell the sizes of its MoE layers."""

    def moe_layer_specs(self) -> Sequence[MoELayerSpec]:
        """One entry for each MoE layer, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferCapacity:
    """What the buffers must hold: the most workers of any epoch, and the most tokens of one rank in a step."""

    max_workers: int
    max_tokens: int

    def __post_init__(self) -> None:
        for name, number in (("max_workers", self.max_workers), ("max_tokens", self.max_tokens)):
            if number < 1:
                raise ValueError(f"{name} is {number}, must be at least 1")


class CommunicationBuffers:
    """One set of dispatch, combine and header buffers. Dispatchers take views; nobody replaces them.

    `records` holds a piece's own rows and then what arrives from peers, `outgoing` what is sent to them (rows on the
    way out, sums on the way back), `returned` the experts' rows that came home, `sums` fp32 products and sums.
    `counts_out` and `counts_in` (int64, on the CPU) are the header of an exchange where sizes travel first.
    """

    def __init__(
        self, specs: Sequence[MoELayerSpec], capacity: BufferCapacity, piece_tokens: int, device: torch.device
    ) -> None:
        sizes = buffer_sizes(specs, capacity.max_workers, piece_tokens)
        self.specs = tuple(specs)
        self.capacity = capacity
        self.piece_tokens = piece_tokens
        self.device = device
        # Made outside of inference mode, the buffers can be written in it and out of it.
        with torch.inference_mode(False):
            self.records, self.outgoing, self.returned, self.sums = (
                torch.empty(size, dtype=torch.uint8, device=device) for size in sizes
            )
            self.counts_out = torch.zeros(capacity.max_workers, COUNTS_PER_PEER, dtype=torch.int64)
            self.counts_in = torch.zeros(capacity.max_workers, COUNTS_PER_PEER, dtype=torch.int64)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every buffer by name."""
        return {
            "records": self.records,
            "outgoing": self.outgoing,
            "returned": self.returned,
            "sums": self.sums,
            "counts_out": self.counts_out,
            "counts_in": self.counts_in,
        }

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def describe(self) -> str:
        """One line for the log: total, parts and piece size."""
        parts = ", ".join(f"{name} {_mebibytes(tensor.nbytes)}" for name, tensor in self.tensors.items())
        return (
            f"communication buffers: {_mebibytes(self.nbytes)} on {self.device} for {len(self.specs)} MoE layers, "
            f"{self.capacity.max_workers} workers and pieces of {self.piece_tokens} tokens "
            f"(steps of up to {self.capacity.max_tokens} tokens, {self.num_pieces(self.capacity.max_tokens)} pieces): "
            f"{parts}"
        )

    def num_pieces(self, num_tokens: int) -> int:
        """In how many pieces a rank's tokens go; at least one."""
        return max(1, math.ceil(num_tokens / self.piece_tokens))

    def view(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The front of a buffer as a matrix. Raises `CapacityError` if it is too small."""
        buffer = self.tensors[name]
        needed = num_rows * width * dtype.itemsize
        if needed > buffer.nbytes:
            raise CapacityError(
                f"buffer {name} has {buffer.nbytes} bytes, {num_rows} rows of {width} {dtype} need {needed}"
            )
        return buffer[:needed].view(dtype).view(num_rows, width)


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"


def buffer_sizes(specs: Sequence[MoELayerSpec], max_workers: int, piece_tokens: int) -> tuple[int, int, int, int]:
    """Bytes of records, outgoing, returned and sums for the largest layer."""
    records = outgoing = returned = sums = 0
    for spec in specs:
        record_bytes = RecordFormat.widest(spec.hidden_size, spec.top_k, spec.dtype).num_bytes
        pairs = piece_tokens * spec.top_k
        records = max(records, max_workers * piece_tokens * record_bytes)
        outgoing = max(outgoing, max_workers * piece_tokens * record_bytes)
        # In fast mode one sum per (token, rank) comes home, and no token has more ranks than experts. Rows that are
        # not fp32 are put in the order of k behind that, before they are widened into the sums.
        copies = 1 if spec.dtype == torch.float32 else 2
        returned = max(returned, copies * pairs * spec.hidden_size * spec.dtype.itemsize)
        sums = max(sums, max(pairs, max_workers * piece_tokens) * spec.hidden_size * 4)
    return records, outgoing, returned, sums


def choose_piece_tokens(specs: Sequence[MoELayerSpec], capacity: BufferCapacity) -> int:
    """The most tokens a piece may have so that the buffers stay near `TARGET_BYTES`, at least `MIN_PIECE_TOKENS`."""
    piece = MAX_PIECE_TOKENS
    while piece > MIN_PIECE_TOKENS and sum(buffer_sizes(specs, capacity.max_workers, piece)) > TARGET_BYTES:
        piece //= 2
    return min(piece, capacity.max_tokens)


def prepare_communication_buffer_for_model(
    model: MoEModel, capacity: BufferCapacity, device: torch.device
) -> CommunicationBuffers:
    """Allocate the buffers of a worker, once, after its weights are loaded.

    Raises `CapacityError` if the model has no MoE layer or the memory cannot be had.
    """
    specs = model.moe_layer_specs()
    if not specs:
        raise CapacityError("the model has no MoE layer, there is nothing to make communication buffers for")
    piece_tokens = choose_piece_tokens(specs, capacity)
    try:
        buffers = CommunicationBuffers(specs, capacity, piece_tokens, device)
    except RuntimeError as error:
        size = sum(buffer_sizes(specs, capacity.max_workers, piece_tokens))
        raise CapacityError(f"communication buffers need {_mebibytes(size)} on {device}: {error}") from error
    logger.info("%s", buffers.describe())
    return buffers
