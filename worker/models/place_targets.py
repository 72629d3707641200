"""From a model's places to the tensors of its checkpoint."""

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from moeray.worker.models.weight_names import Form, WeightNames
from moeray.worker.models.weights import Place, WeightSource, WeightTarget


def place_targets(places: Iterable[Place], names: WeightNames, present: Collection[str]) -> Iterator[WeightTarget]:
    """A target for each tensor; places that share one lie in it one after the other, along its first dim."""
    by_tensor: dict[str, tuple[Form, list[Place]]] = {}
    for place in places:
        tensor, form = names.stored(place.name, place.layer, present)
        by_tensor.setdefault(tensor, (form, []))[1].append(place)
    for tensor, (form, sharing) in by_tensor.items():
        yield _target(tensor, form, sharing)


def _target(tensor: str, form: Form, places: Sequence[Place]) -> WeightTarget:
    rows = [place.target.shape[0] for place in places]

    def split(weight: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.split(form.load(weight), rows)

    source = WeightSource(
        names=(tensor,),
        shapes=(form.shape((sum(rows), *places[0].target.shape[1:])),),
        parts=tuple(place.name for place in places),
        split=split,
    )
    return WeightTarget(source, tuple(place.store for place in places))
