"""How quantised weights lie in a checkpoint, and which method serves them. No torch here: the command line reads it.

Legend: O outputs, I inputs of a linear layer.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from moeray.comm.errors import CheckpointError
from moeray.worker.models.weights import Split, WeightSource

if TYPE_CHECKING:
    import torch

    from moeray.worker.models.weights import Shape
    from moeray.worker.moe.quant.base import FusedMoEMethodBase
    from moeray.worker.moe.quant.decoded import DecodeBuffer

FLOATS = ("float32", "bfloat16", "float16")
WEIGHT = ".weight"


@cache
def any_of(patterns: tuple[str, ...], ending: str = "") -> re.Pattern[str]:
    """One pattern for all of them, each with the same ending: lists of hundreds meet tens of thousands of modules.

    Raises `CheckpointError` if one is no regular expression.
    """
    try:
        return re.compile(f"(?:{'|'.join(f'(?:{pattern})' for pattern in patterns)}){ending}")
    except re.error as error:
        raise CheckpointError(f"quantization_config has a pattern that is no regular expression: {error}") from error


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One of the tensors that hold a quantised weight; `dtypes` are torch's names of the types that it may have."""

    name: str
    shape: "Shape"
    dtypes: tuple[str, ...]


class QuantizedCheckpoint(ABC):
    """What a checkpoint's quantization_config says.

    A weight counts as quantised if no list of the config leaves its module out and, outside of experts, if the tensors
    that only quantised weights have are there: embeddings, norms and routers are not, whether a list names them or not.
    """

    @abstractmethod
    def make_method(self, buffer: "DecodeBuffer") -> "FusedMoEMethodBase":
        """The method of one MoE layer; all layers of a worker share the buffer."""

    @abstractmethod
    def leaves_out(self, module: str) -> bool:
        """Whether a list of the config names this module as not quantised."""

    @abstractmethod
    def stored(self, module: str, shape: "Shape") -> tuple[StoredTensor, ...]:
        """The tensors that hold the module's quantised weight [O, I]: numbers first, then scales."""

    @abstractmethod
    def expert_parts(self, shape: "Shape", *tensors: "torch.Tensor") -> "Sequence[torch.Tensor]":
        """What the method's `load_expert` takes of a weight: numbers as it keeps them, and scales."""

    @abstractmethod
    def decode(self, shape: "Shape", *tensors: "torch.Tensor") -> "torch.Tensor":
        """The weight [O, I] in fp32."""

    def dense(self, source: WeightSource, present: Collection[str]) -> WeightSource:
        """The source of a weight that every worker has, decoded as it is read if the checkpoint holds it quantised."""
        name, shape = source.names[0], source.shapes[0]
        module = name.removesuffix(WEIGHT)
        if not name.endswith(WEIGHT) or len(shape) != 2 or self.leaves_out(module):
            return source
        stored = self.stored(module, shape)
        if not any(tensor.name in present for tensor in stored if tensor.name != name):
            return source

        def split(*tensors: "torch.Tensor") -> "Sequence[torch.Tensor]":
            return source.split(self.decode(shape, *tensors))

        return _source(stored, source.parts, split)

    def expert(self, source: WeightSource) -> WeightSource:
        """The source of an expert's quantised projection: the part itself, and another one for its scales."""
        part, shape = source.parts[0], source.shapes[0]
        stored = self.stored(source.names[0].removesuffix(WEIGHT), shape)
        return _source(stored, (part, f"{part}_scale"), partial(self.expert_parts, shape))


def _source(stored: tuple[StoredTensor, ...], parts: tuple[str, ...], split: Split) -> WeightSource:
    return WeightSource(
        names=tuple(tensor.name for tensor in stored),
        shapes=tuple(tensor.shape for tensor in stored),
        dtypes=tuple(tensor.dtypes for tensor in stored),
        parts=parts,
        split=split,
    )
