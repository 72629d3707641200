"""Where the weights of a model lie in its checkpoint, and where they go.

A model declares *places*: tensors, or parts of tensors, that one weight fills. A family says under which name, and in
which form, a checkpoint holds each of them (`weight_names.py`). The two meet in *targets*, which the loader reads.
Seats of experts are filled in the same way, at start and while serving. No torch is imported here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
Split = Callable[..., "Sequence[torch.Tensor]"]
Store = Callable[["torch.Tensor"], object]


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter or a part of one. `bring` makes what `target` takes of a weight that has the target's shape.

    `layer` is None for what belongs to the whole model; `name` is what `WeightNames` maps.
    """

    name: str
    target: "torch.Tensor"
    layer: int | None = None
    bring: "Callable[[torch.Tensor], torch.Tensor] | None" = None

    def store(self, weight: "torch.Tensor") -> None:
        self.target.copy_(weight if self.bring is None else self.bring(weight))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """What is read at once: tensors of these names and whole shapes, and the `parts` that `split` makes of them.

    With `entry` only that entry of each tensor's first dim is read. Packed tensors may have any type, others are 16-bit
    floating point or wider, unless `dtypes` names the types that each of them may have.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    parts: tuple[str, ...]
    split: Split
    entry: int | None = None
    is_packed: bool = False
    dtypes: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """A source that the checkpoint must hold, and a store for each of its parts; None where another worker needs it."""

    source: WeightSource
    stores: tuple[Store, ...] | None
