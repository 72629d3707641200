"""Which tensors of a checkpoint make which parameters of a transformers model, by transformers' own conversions.

transformers knows the names and layouts of a family's checkpoints as transforms (`conversion_mapping.py` there). Each
is tried here on the meta device, so that every tensor's name and shape is known before anything is read; the same
transform then runs on what is read, and for experts on one expert's tensors at a time.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from moeray.comm.errors import CheckpointError
from moeray.worker.models.transformers_experts import ExpertsModule
from moeray.worker.models.weights import WeightSource

Shape = tuple[int, ...]
# Tensors that older checkpoints carry, and that the model computes.
COMPUTED = r"rotary_emb\.inv_freq$"


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors that are read together, by the pattern that each matched, and what they become, first in `parameter`.

    `converter` None: one tensor as it is.
    """

    parameter: str
    converter: WeightConverter | None
    names: Mapping[str, tuple[str, ...]]

    @property
    def all_names(self) -> tuple[str, ...]:
        return tuple(name for names in self.names.values() for name in names)

    def run(self, model: PreTrainedModel, tensors: Mapping[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The parameters that these tensors make, by name."""
        if self.converter is None:
            return {self.parameter: next(iter(tensors.values()))[0]}
        converter = deepcopy(self.converter)
        for pattern, matching in tensors.items():
            for tensor in matching:
                converter.add_tensor(self.parameter, self.parameter, pattern, tensor)
        made = converter.convert(self.parameter, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class CheckpointNames:
    """The tensors that a checkpoint has, or should have, for a model on the meta device, experts still in place."""

    def __init__(self, model: PreTrainedModel, experts: Sequence[ExpertsModule], present: Collection[str]) -> None:
        self._model = model
        self._tied = set(getattr(model, "all_tied_weights_keys", {}))
        self._all = dict(model.state_dict())
        self._state = {name: tensor for name, tensor in self._all.items() if name not in self._tied}
        transforms = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        self._stored = revert_weight_conversion(model, dict(self._state))
        self._conversions = self._choose(present)
        self._of_parameter = {conversion.parameter: conversion for conversion in self._conversions}
        self._of_experts = {f"{module.name}.{name}" for module in experts for name in module.parameter_names}

    def _locate(self, name: str) -> tuple[str, str | None]:
        """The parameter that a tensor goes into, and the pattern of the converter that it matched."""
        prefix = self._model.base_model_prefix
        found: tuple[str, str | None] = rename_source_key(name, self._renamings, self._converters, prefix, self._all)
        if found[0] not in self._all and name in self._all:
            found = rename_source_key(name, [], [], prefix, self._all)
        return found

    def _conversions_of(self, names: Collection[str]) -> dict[str, Conversion]:
        matched: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        patterns: dict[str, str | None] = {}
        for name in sorted(names, key=dot_natural_key):
            parameter, pattern = self._locate(name)
            if parameter in self._state:
                matched[parameter][pattern or name].append(name)
                patterns[parameter] = pattern
        converter_of = {pattern: converter for converter in self._converters for pattern in converter.source_patterns}
        return {
            parameter: Conversion(
                parameter,
                None if patterns[parameter] is None else converter_of[patterns[parameter]],
                {pattern: tuple(which) for pattern, which in by_pattern.items()},
            )
            for parameter, by_pattern in matched.items()
        }

    def _choose(self, present: Collection[str]) -> list[Conversion]:
        """For each parameter what the checkpoint has, unless that is a part of what transformers itself writes."""
        here, written = self._conversions_of(present), self._conversions_of(self._stored)
        known = set(present)
        chosen: dict[str, Conversion] = {}
        for parameter in dict.fromkeys([*written, *here]):
            usual, found = written.get(parameter), here.get(parameter)
            is_usual = usual is not None and (found is None or bool(known & set(usual.all_names)))
            chosen[parameter] = usual if is_usual else found  # type: ignore[assignment]
        return list(chosen.values())

    def shape(self, conversion: Conversion, name: str) -> Shape:
        if conversion.converter is None:
            return tuple(self._state[conversion.parameter].shape)
        if name not in self._stored:
            raise CheckpointError(
                f"{type(self._model).__name__}: {name} is in a layout that transformers does not write, "
                "and whose shape cannot be checked"
            )
        return tuple(self._stored[name].shape)

    def dense_sources(self) -> list[WeightSource]:
        """What every worker reads; parts are names of parameters and of buffers that a checkpoint holds."""
        sources = []
        made: set[str] = set()
        for conversion in self._conversions:
            if conversion.parameter in self._of_experts:
                continue
            shapes = tuple(self.shape(conversion, name) for name in conversion.all_names)
            outputs = self._made_of(conversion, shapes)
            made |= set(outputs)
            sources.append(
                WeightSource(
                    names=conversion.all_names,
                    shapes=shapes,
                    parts=tuple(outputs),
                    split=partial(self._split, conversion, tuple(outputs)),
                    is_packed=any(not tensor.is_floating_point() for tensor in outputs.values()),
                )
            )
        lacking = sorted(self._state.keys() - made - self._of_experts)
        if lacking:
            raise CheckpointError(f"{type(self._model).__name__}: nothing in a checkpoint makes {', '.join(lacking)}")
        return sources

    def _made_of(self, conversion: Conversion, shapes: Sequence[Shape]) -> dict[str, torch.Tensor]:
        """Which parameters it makes; their shapes are checked on the meta device."""
        with torch.device("meta"):
            tensors = [torch.empty(shape) for shape in shapes]
        outputs = conversion.run(self._model, _by_pattern(conversion, tensors))
        for name, tensor in outputs.items():
            if name not in self._state or tensor.shape != self._state[name].shape:
                raise CheckpointError(
                    f"{type(self._model).__name__}: {', '.join(conversion.all_names)} make {name} "
                    f"{list(tensor.shape)}, which is not what the model has"
                )
        return {name: self._state[name] for name in outputs}

    def _split(self, conversion: Conversion, parts: Sequence[str], *tensors: torch.Tensor) -> list[torch.Tensor]:
        outputs = conversion.run(self._model, _by_pattern(conversion, tensors))
        return [outputs[part] for part in parts]

    def expert_sources(self, module: ExpertsModule, expert: int) -> list[WeightSource]:
        """What one expert is made of."""
        return [self._expert_source(module, name, expert) for name in module.parameter_names]

    def _expert_source(self, module: ExpertsModule, name: str, expert: int) -> WeightSource:
        conversion = self._of_parameter[f"{module.name}.{name}"]
        counts = {len(names) for names in conversion.names.values()}
        if counts not in ({1}, {module.num_experts}):
            raise CheckpointError(
                f"{type(self._model).__name__}: {conversion.parameter} is made of {sorted(counts)} tensors, must be "
                f"one or {module.num_experts}"
            )
        is_fused = counts == {1} and (conversion.converter is None or "*" not in "".join(conversion.names))
        names = tuple(names[0 if is_fused else expert] for names in conversion.names.values())
        tensor = module.module.get_parameter(name)[0]
        return WeightSource(
            names=names,
            shapes=tuple(self.shape(conversion, name) for name in names),
            parts=tuple(part for part, _ in module.split(name, tensor)),
            split=partial(self._split_expert, conversion, module, name, is_fused),
            entry=expert if is_fused else None,
        )

    def _split_expert(
        self, conversion: Conversion, module: ExpertsModule, name: str, is_fused: bool, *tensors: torch.Tensor
    ) -> list[torch.Tensor]:
        entries = [[tensor.unsqueeze(0) if is_fused else tensor] for tensor in tensors]
        made = conversion.run(self._model, dict(zip(conversion.names, entries, strict=True)))
        return [part for _, part in module.split(name, made[conversion.parameter][0])]

    def ignores(self, name: str) -> bool:
        """A tied tensor's second copy, and what transformers itself leaves out."""
        patterns = [COMPUTED, *(self._model._keys_to_ignore_on_load_unexpected or ())]
        return self._locate(name)[0] in self._tied or any(re.search(pattern, name) for pattern in patterns)


def _by_pattern(conversion: Conversion, tensors: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    rest = iter(tensors)
    return {pattern: [next(rest) for _ in names] for pattern, names in conversion.names.items()}
