"""How a family names its tensors on disk, and in which form they lie there. No torch here."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moeray.worker.models.weights import Shape, Split, WeightSource

if TYPE_CHECKING:
    import torch

# Shapes on disk of one expert's tensors, from hidden and intermediate size.
ExpertShapes = Callable[[int, int], tuple[Shape, ...]]


@dataclass(frozen=True, slots=True)
class Form:
    """How a weight lies on disk: its shape there, from the place's own, and the way back."""

    shape: Callable[[Shape], Shape]
    load: "Callable[[torch.Tensor], torch.Tensor]"


AS_IS = Form(lambda shape: shape, lambda weight: weight)
# With a first dim of one entry.
ONE_ENTRY = Form(lambda shape: (1, *shape), lambda weight: weight[0])


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight's tensor: the first of `names` that the checkpoint has, else the first of all."""

    names: tuple[str, ...]
    form: Form = AS_IS


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensor:
    """Checkpoint tensors that are read together, and the parts of an expert that they hold.

    Names take `layer`, and `expert` if each expert has tensors of its own; else the first dim counts experts.
    """

    names: tuple[str, ...]
    parts: tuple[str, ...]
    shapes: ExpertShapes
    split: Split = lambda weight: (weight,)
    is_packed: bool = False

    @property
    def is_fused(self) -> bool:
        """All experts of a layer lie in one tensor."""
        return "{expert}" not in self.names[0]

    def source(self, *, layer: int, expert: int, num_experts: int, hidden: int, inner: int) -> WeightSource:
        shapes = self.shapes(hidden, inner)
        return WeightSource(
            names=tuple(name.format(layer=layer, expert=expert) for name in self.names),
            shapes=tuple((num_experts, *shape) for shape in shapes) if self.is_fused else shapes,
            parts=self.parts,
            split=self.split,
            entry=expert if self.is_fused else None,
            is_packed=self.is_packed,
        )


ExpertLayout = tuple[ExpertTensor, ...]


def separate_experts(
    prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> ExpertLayout:
    """One tensor for each projection of each expert; `prefix` ends with the expert's number and a dot."""
    return tuple(
        ExpertTensor(names=(f"{prefix}{name}.weight",), parts=(part,), shapes=shapes)
        for part, name, shapes in (
            ("gate", gate, lambda hidden, inner: ((inner, hidden),)),
            ("up", up, lambda hidden, inner: ((inner, hidden),)),
            ("down", down, lambda hidden, inner: ((hidden, inner),)),
        )
    )


def fused_experts(prefix: str) -> ExpertLayout:
    """gate_up_proj [E, 2I, D] (gate first) and down_proj [E, D, I], as transformers 5 holds them in memory."""
    return (
        ExpertTensor(
            names=(f"{prefix}gate_up_proj",),
            parts=("gate", "up"),
            shapes=lambda hidden, inner: ((2 * inner, hidden),),
            split=lambda gate_up: gate_up.chunk(2),
        ),
        ExpertTensor(names=(f"{prefix}down_proj",), parts=("down",), shapes=lambda hidden, inner: ((hidden, inner),)),
    )


LAYER = "model.layers.{layer}."
# What most families share. Places that get the same tensor lie in it one after the other, along its first dim.
COMMON_NAMES: Mapping[str, str | Stored] = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "norm_bias": "model.norm.bias",
    "lm_head": "lm_head.weight",
    "lm_head_bias": "lm_head.bias",
    "input_norm": LAYER + "input_layernorm.weight",
    "input_norm_bias": LAYER + "input_layernorm.bias",
    "post_norm": LAYER + "post_attention_layernorm.weight",
    "post_norm_bias": LAYER + "post_attention_layernorm.bias",
    "q_proj": LAYER + "self_attn.q_proj.weight",
    "k_proj": LAYER + "self_attn.k_proj.weight",
    "v_proj": LAYER + "self_attn.v_proj.weight",
    "o_proj": LAYER + "self_attn.o_proj.weight",
    "q_bias": LAYER + "self_attn.q_proj.bias",
    "k_bias": LAYER + "self_attn.k_proj.bias",
    "v_bias": LAYER + "self_attn.v_proj.bias",
    "o_bias": LAYER + "self_attn.o_proj.bias",
    "q_norm": LAYER + "self_attn.q_norm.weight",
    "k_norm": LAYER + "self_attn.k_norm.weight",
    "sinks": LAYER + "self_attn.sinks",
    "dense_gate": LAYER + "mlp.gate_proj.weight",
    "dense_up": LAYER + "mlp.up_proj.weight",
    "dense_down": LAYER + "mlp.down_proj.weight",
    "router": LAYER + "mlp.gate.weight",
    "selection_bias": LAYER + "mlp.gate.e_score_correction_bias",
    "shared_gate": LAYER + "mlp.shared_experts.gate_proj.weight",
    "shared_up": LAYER + "mlp.shared_experts.up_proj.weight",
    "shared_down": LAYER + "mlp.shared_experts.down_proj.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """`places` maps places to tensors; `experts` are the layouts in use, of which the first that is there counts.

    `ignored` are patterns of names that a checkpoint may carry unused, by default of tensors that are computed instead.
    `has_extra_layers`: layers behind the last one are for predicting several tokens at once, and are not used.
    """

    places: Mapping[str, str | Stored] = field(default_factory=lambda: COMMON_NAMES)
    experts: tuple[ExpertLayout, ...] = (
        separate_experts(LAYER + "mlp.experts.{expert}."),
        fused_experts(LAYER + "mlp.experts."),
    )
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    has_extra_layers: bool = False

    def ignores(self, name: str, num_layers: int) -> bool:
        """Whether the model computes without this tensor."""
        if any(re.search(pattern, name) for pattern in self.ignored):
            return True
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return self.has_extra_layers and layer is not None and int(layer.group(1)) >= num_layers

    def stored(self, place: str, layer: int | None, present: Collection[str]) -> tuple[str, Form]:
        """The tensor that holds a place's weight, and its form."""
        entry = self.places[place]
        names, form = ((entry,), AS_IS) if isinstance(entry, str) else (entry.names, entry.form)
        names = tuple(name.format(layer=layer) for name in names)
        return next((name for name in names if name in present), names[0]), form

    def layout(self, layer: int, present: Collection[str]) -> ExpertLayout:
        """The way in which this checkpoint holds a layer's experts."""
        for layout in self.experts:
            if all(name.format(layer=layer, expert=0) in present for tensor in layout for name in tensor.names):
                return layout
        return self.experts[0]
