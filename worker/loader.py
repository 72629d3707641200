"""Checkpoint to parameters, by memory map: a worker reads what every worker has, and only its own experts.

Every tensor of the checkpoint must be one that the family knows, and every tensor that the family needs must be there
with the right shape, also those of experts that other workers hold; only headers are read for those.
"""

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moeray.comm.errors import CheckpointError
from moeray.comm.placement import ExpertPlacement
from moeray.worker.finite import is_finite
from moeray.worker.load_memory import LoadMemory
from moeray.worker.models.model import ServedModel
from moeray.worker.models.weights import WeightSource, WeightTarget

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# safetensors' names of types.
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# What weights may be that are not quantised.
WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")
# How many tensors a message names before it counts the rest.
NAMES_IN_MESSAGE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What was found out while loading. `peak_bytes`: of private memory, beyond what the process had before.

    `not_finite` are the tensors with NaNs or infinities among those that were read.
    """

    peak_bytes: int
    not_finite: tuple[str, ...]


class Checkpoint:
    """The safetensors files of a directory, opened lazily and memory-mapped."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()
        self.file_of = self._read_index()

    def _read_index(self) -> dict[str, str]:
        index = self.directory / INDEX_NAME
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index} cannot be read: {error!r}") from error
            missing = sorted(name for name in set(weight_map.values()) if not (self.directory / name).is_file())
            if missing:
                raise CheckpointError(f"{index} names files that do not exist: {', '.join(missing)}")
            return dict(weight_map)
        if not (self.directory / SINGLE_NAME).is_file():
            raise CheckpointError(f"{self.directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}")
        return dict.fromkeys(self._open(SINGLE_NAME).keys(), SINGLE_NAME)

    def _open(self, file_name: str) -> Any:
        if file_name not in self._files:
            path = self.directory / file_name
            try:
                self._files[file_name] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read, truncated or no safetensors file: {error}") from error
        return self._files[file_name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As torch names it."""
        stored: str = self._slice(name).get_dtype()
        return TORCH_NAMES.get(stored, stored)

    def matrix_dtypes(self) -> set[str]:
        """The types of all tensors but vectors."""
        return {self.dtype(name) for name in self.file_of if len(self.shape(name)) > 1}

    def _slice(self, name: str) -> Any:
        file_name = self.file_of[name]
        try:
            return self._open(file_name).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.directory / file_name} lacks {name}, which its index names") from error

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the memory map."""
        tensor: torch.Tensor = self._open(self.file_of[name]).get_tensor(name)
        return tensor

    def entry(self, name: str, index: int) -> torch.Tensor:
        """One entry of the first dim: a view of the memory map, of which nothing else is read."""
        entry: torch.Tensor = self._slice(name)[index]
        return entry

    def tensors(self, source: WeightSource) -> list[torch.Tensor]:
        """What a source reads, before it is split. Raises `CheckpointError` for a type that it is not made for."""
        entry = source.entry
        tensors = [self.tensor(name) if entry is None else self.entry(name, entry) for name in source.names]
        for number, (name, tensor) in enumerate(zip(source.names, tensors, strict=True)):
            kind = str(tensor.dtype).removeprefix("torch.")
            dtypes = source.dtypes[number] if source.dtypes else () if source.is_packed else WEIGHT_DTYPES
            if dtypes and kind not in dtypes:
                raise CheckpointError(f"{self.directory}: {name} has type {kind}, must be {' or '.join(dtypes)}")
        return tensors

    def close(self) -> None:
        """Drops the memory maps that no tensor uses."""
        self._files.clear()
        self._stack.close()


def load_weights(
    model: ServedModel,
    checkpoint: Checkpoint,
    placement: ExpertPlacement | None,
    slot: int,
    on_progress: Callable[[float], None],
    memory: LoadMemory,
) -> LoadReport:
    """Fill the model's parameters and the slot's seats, then let every MoE layer build its kernel.

    Raises `CheckpointError` naming missing, extra and mis-shaped tensors before anything is read. `on_progress` gets
    the fraction of tensors that are done. NaNs and infinities are loaded, logged once and reported.
    """
    targets = list(model.weight_targets(placement, slot))
    _check_names(model, checkpoint, targets)
    wanted = [(target.source, target.stores) for target in targets if target.stores is not None]
    not_finite: list[str] = []
    for done, (source, stores) in enumerate(wanted):
        tensors = checkpoint.tensors(source)
        parts = source.split(*tensors)
        not_finite += [name for name, tensor in zip(source.names, tensors, strict=True) if not is_finite(tensor)]
        for part, store in zip(parts, stores, strict=True):
            store(part)
        memory.sample()
        on_progress((done + 1) / len(wanted))
    if not_finite:
        logger.warning("%s has NaNs or infinities in %s", checkpoint.directory, some_of(not_finite))
    for runner in model.moe_runners():
        runner.finish_loading()
    return LoadReport(peak_bytes=memory.peak_bytes, not_finite=tuple(dict.fromkeys(not_finite)))


def _check_names(model: ServedModel, checkpoint: Checkpoint, targets: Sequence[WeightTarget]) -> None:
    expected = {
        name: shape for target in targets for name, shape in zip(target.source.names, target.source.shapes, strict=True)
    }
    present = set(checkpoint.file_of)
    unused = sorted(name for name in present - expected.keys() if not model.ignores(name))
    shapes = {name: checkpoint.shape(name) for name in expected if name in present}
    problems = [
        (f"lacks {len(expected.keys() - present)} tensors", sorted(expected.keys() - present)),
        (f"has {len(unused)} tensors that the model does not use", unused),
        (
            "has tensors of the wrong shape",
            [f"{n} {list(s)}, must be {list(expected[n])}" for n, s in shapes.items() if s != expected[n]],
        ),
    ]
    found = [f"{what}: {some_of(which)}" for what, which in problems if which]
    if found:
        raise CheckpointError(f"{checkpoint.directory} " + "; ".join(found))


def some_of(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    rest = len(names) - NAMES_IN_MESSAGE
    return ", ".join(names[:NAMES_IN_MESSAGE]) + (f" and {rest} more" if rest > 0 else "")
