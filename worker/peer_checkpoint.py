"""A checkpoint that is not on this node, read through a worker that has it."""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from moeray.comm.errors import CheckpointError
from moeray.worker.config import Manifest
from moeray.worker.loader import Checkpoint
from moeray.worker.models.config_reader import read_raw_config

# What a worker reads beside tensors.
SMALL_FILES = ("config.json", "generation_config.json")
# Bytes of one answer: what the worker that serves meanwhile can copy without its step loop noticing.
CHUNK_BYTES = 1 << 20


class CheckpointSource(Protocol):
    """The worker that has the checkpoint, whoever carries the calls. Calls raise a `MoerayError` if it is gone."""

    def manifest(self) -> Manifest:
        """Its small files, and what its tensors are."""

    def rows(self, name: str, first: int, count: int) -> bytes:
        """Rows of a tensor as they are in memory; all its dims but the last count rows, a vector has rows of one."""


class LocalSource:
    """The side that has the files."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def manifest(self) -> Manifest:
        paths = [self._checkpoint.directory / name for name in SMALL_FILES]
        files = {path.name: path.read_bytes() for path in paths if path.is_file()}
        tensors = {}
        for name in self._checkpoint.file_of:
            tensor = self._checkpoint.tensor(name)
            tensors[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        return Manifest(files=files, tensors=tensors)

    def rows(self, name: str, first: int, count: int) -> bytes:
        tensor = self._checkpoint.tensor(name)
        piece = tensor.view(_num_rows(tensor.shape), -1)[first : first + count].contiguous()
        return piece.view(torch.uint8).numpy().tobytes()


def _num_rows(shape: Sequence[int]) -> int:
    return math.prod(shape[:-1]) if len(shape) > 1 else shape[0]


class PeerCheckpoint(Checkpoint):
    """Looks like a directory's checkpoint; small files are copied, tensors come over the wire when they are needed."""

    def __init__(self, source: CheckpointSource) -> None:
        self._source = source
        self._copied = tempfile.TemporaryDirectory(prefix="moeray-checkpoint-")
        manifest = source.manifest()
        self._tensors = manifest.tensors
        for name, content in manifest.files.items():
            (Path(self._copied.name) / name).write_bytes(content)
        super().__init__(self._copied.name)

    def _read_index(self) -> dict[str, str]:
        return dict.fromkeys(self._tensors, "peer")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name][1])

    def dtype(self, name: str) -> str:
        return self._tensors[name][0]

    def tensor(self, name: str) -> torch.Tensor:
        return self._read(name, self.shape(name), 0)

    def entry(self, name: str, index: int) -> torch.Tensor:
        shape = self.shape(name)[1:]
        return self._read(name, shape, index * _num_rows(shape))

    def _read(self, name: str, shape: tuple[int, ...], first_row: int) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self._tensors[name][0])
        tensor = torch.empty(shape, dtype=dtype)
        raw = tensor.view(torch.uint8).view(_num_rows(shape), -1)
        step = max(1, CHUNK_BYTES // raw.shape[1])
        for first in range(0, raw.shape[0], step):
            part = raw[first : first + step]
            payload = self._source.rows(name, first_row + first, part.shape[0])
            if len(payload) != part.numel():
                raise CheckpointError(f"{name}: a peer sent {len(payload)} bytes, must be {part.numel()}")
            part.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8).view_as(part))
        return tensor

    def close(self) -> None:
        super().close()
        self._copied.cleanup()


def open_checkpoint(model_path: str, source: CheckpointSource | None) -> Checkpoint:
    """The checkpoint of this node if it is here, else through the peer; `CheckpointError` if there is neither."""
    if source is not None and not (Path(model_path) / "config.json").is_file():
        return PeerCheckpoint(source)
    read_raw_config(model_path)
    return Checkpoint(model_path)
