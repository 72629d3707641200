"""Checkpoint to parameters, by memory map: a worker reads what every worker has, and only its own experts.

Every tensor of the checkpoint must be one that the family knows, and every tensor that the family needs must be there
with the right shape, also those of experts that other workers hold; only headers are read for those.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moeray.comm.errors import CheckpointError
from moeray.comm.placement import EMPTY_SEAT, ExpertPlacement
from moeray.worker.models.config import DecoderConfig
from moeray.worker.models.decoder import Decoder, DecoderLayer
from moeray.worker.models.registry import weight_names
from moeray.worker.models.weight_names import WeightNames
from moeray.worker.moe.runner import MoERunner

Store = Callable[[torch.Tensor], object]
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Tensors that old checkpoints carry and that are computed instead.
COMPUTED_SUFFIXES = ("rotary_emb.inv_freq",)
# How many tensors a message names before it counts the rest.
NAMES_IN_MESSAGE = 5


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """A tensor that the checkpoint must hold. `store` writes it; None where another worker needs it."""

    name: str
    shape: tuple[int, ...]
    store: Store | None


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

    def _slice(self, name: str) -> Any:
        file_name = self.file_of[name]
        try:
            return self._open(file_name).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.directory / file_name} lacks {name}, which its index names") from error

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the memory map. Raises `CheckpointError` for integers: this model's weights are real numbers."""
        tensor: torch.Tensor = self._open(self.file_of[name]).get_tensor(name)
        if not tensor.is_floating_point():
            raise CheckpointError(f"{self.directory}: {name} has type {tensor.dtype}, must be floating point")
        return tensor

    def close(self) -> None:
        """Drops the memory maps that no tensor uses."""
        self._files.clear()
        self._stack.close()


def weight_targets(model: Decoder, placement: ExpertPlacement | None, slot: int) -> Iterator[WeightTarget]:
    """Every tensor of the family's checkpoint, with a place for those that this slot needs.

    Without a placement no seat is filled.
    """
    config, names = model.config, weight_names(model.config)
    hidden, vocab = config.hidden_size, config.vocab_size
    yield WeightTarget(names.embed, (vocab, hidden), model.embed.data.copy_)
    yield WeightTarget(names.norm, (hidden,), model.norm.data.copy_)
    if not config.tie_word_embeddings:
        yield WeightTarget(names.lm_head, (vocab, hidden), model.lm_head.data.copy_)
    for index, layer in enumerate(model.decoder_layers()):
        prefix = names.layer.format(layer=index)
        for target in _layer_targets(layer, names, config):
            yield WeightTarget(prefix + target.name, target.shape, target.store)
        if isinstance(layer.mlp, MoERunner):
            seats = placement.seats_of(layer.mlp.routed_experts.layer, slot) if placement else ()
            for target in _expert_targets(layer.mlp, names, config, seats):
                yield WeightTarget(prefix + target.name, target.shape, target.store)


def _layer_targets(layer: DecoderLayer, names: WeightNames, config: DecoderConfig) -> Iterator[WeightTarget]:
    hidden = config.hidden_size
    attention = layer.attention
    yield WeightTarget(names.input_norm, (hidden,), layer.input_norm.data.copy_)
    yield WeightTarget(names.post_norm, (hidden,), layer.post_norm.data.copy_)
    rows = 0
    for name, size in (
        (names.q, attention.q_size),
        (names.k, attention.kv_size),
        (names.v, attention.kv_size),
    ):
        part = slice(rows, rows + size)
        yield WeightTarget(name + "weight", (size, hidden), attention.qkv_proj.data[part].copy_)
        if attention.qkv_bias is not None:
            yield WeightTarget(name + "bias", (size,), attention.qkv_bias.data[part].copy_)
        rows += size
    yield WeightTarget(names.o + "weight", (hidden, attention.q_size), attention.o_proj.data.copy_)
    if attention.o_bias is not None:
        yield WeightTarget(names.o + "bias", (hidden,), attention.o_bias.data.copy_)
    if attention.q_norm is not None and attention.k_norm is not None:
        yield WeightTarget(names.q_norm, (config.head_dim,), attention.q_norm.data.copy_)
        yield WeightTarget(names.k_norm, (config.head_dim,), attention.k_norm.data.copy_)
    if not isinstance(layer.mlp, MoERunner):
        inner = config.dense_intermediate_size
        gate_up = layer.mlp.gate_up_proj.data
        yield WeightTarget(names.dense_gate, (inner, hidden), gate_up[:inner].copy_)
        yield WeightTarget(names.dense_up, (inner, hidden), gate_up[inner:].copy_)
        yield WeightTarget(names.dense_down, (hidden, inner), layer.mlp.down_proj.data.copy_)


def _expert_targets(
    runner: MoERunner, names: WeightNames, config: DecoderConfig, seats: Sequence[int]
) -> Iterator[WeightTarget]:
    hidden, inner = config.hidden_size, config.moe.intermediate_size
    if runner.gate_ED is not None:
        yield WeightTarget(names.router, (config.num_experts, hidden), runner.gate_ED.data.copy_)
    seat_of = {expert: seat for seat, expert in enumerate(seats) if expert != EMPTY_SEAT}
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for expert in range(config.num_experts):
        for part, name in names.expert_parts():
            shape = shapes[part]
            store = _seat_store(runner, seat_of[expert], part) if expert in seat_of else None
            yield WeightTarget(name.format(expert=expert), shape, store)


def _seat_store(runner: MoERunner, seat: int, part: str) -> Store:
    return lambda tensor: runner.quant_method.load_expert(runner.routed_experts, seat, part, tensor)


def load_weights(
    model: Decoder,
    checkpoint: Checkpoint,
    placement: ExpertPlacement | None,
    slot: int,
    on_progress: Callable[[float], None],
) -> None:
    """Fill the model's parameters and the slot's seats, then let every MoE layer build its kernel.

    Raises `CheckpointError` naming missing, extra and mis-shaped tensors before anything is read. `on_progress` gets
    the fraction of tensors that are done.
    """
    targets = list(weight_targets(model, placement, slot))
    _check_names(checkpoint, targets, model.config.tie_word_embeddings, weight_names(model.config).lm_head)
    wanted = [target for target in targets if target.store is not None]
    for done, target in enumerate(wanted):
        assert target.store is not None
        target.store(checkpoint.tensor(target.name))
        on_progress((done + 1) / len(wanted))
    for runner in model.moe_runners():
        runner.finish_loading()


def _check_names(checkpoint: Checkpoint, targets: Sequence[WeightTarget], tied: bool, lm_head: str) -> None:
    expected = {target.name for target in targets}
    present = {name for name in checkpoint.file_of if not name.endswith(COMPUTED_SUFFIXES)}
    if tied:
        present.discard(lm_head)
    shapes = [(target, checkpoint.shape(target.name)) for target in targets if target.name in present]
    problems = [
        (f"lacks {len(expected - present)} tensors", sorted(expected - present)),
        (f"has {len(present - expected)} tensors that the model does not use", sorted(present - expected)),
        (
            "has tensors of the wrong shape",
            [f"{t.name} {list(shape)}, must be {list(t.shape)}" for t, shape in shapes if shape != t.shape],
        ),
    ]
    found = [f"{what}: {_some(which)}" for what, which in problems if which]
    if found:
        raise CheckpointError(f"{checkpoint.directory} " + "; ".join(found))


def _some(names: Sequence[str]) -> str:
    rest = len(names) - NAMES_IN_MESSAGE
    return ", ".join(names[:NAMES_IN_MESSAGE]) + (f" and {rest} more" if rest > 0 else "")
