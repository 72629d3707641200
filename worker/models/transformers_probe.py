"""A dry run of a transformers model on the meta device, to see what its layers do before any memory is taken."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from moeray.comm.errors import CheckpointError
from moeray.worker.models.config import KeyWindow
from moeray.worker.models.transformers_attention import AttentionLayer, attention_function

# An attention function that comes with masks, so that one sees which are asked for.
PROBE = "moeray_probe"
NUM_TOKENS = 4
# Options of attention that say nothing about its result, or that are seen otherwise: the window comes from the mask.
NEUTRAL = frozenset(
    [
        "scaling",
        "sliding_window",
        "s_aux",
        "position_ids",
        "position_embeddings",
        "is_causal",
        "use_cache",
        "past_key_values",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "layer_idx",
    ]
)


class Refusal(Exception):
    """Why a model is not served, in words that go on from its name."""


@dataclass(frozen=True, slots=True)
class AskedMask:
    """Stands where a mask would be: which keys a query sees, or why no layer may use it."""

    window: KeyWindow | None = None
    refusal: str | None = None


def asked_mask(
    *, mask_function: Callable[..., Any], use_vmap: bool = False, local_size: int | None = None, **_: Any
) -> AskedMask:
    """What `AttentionMaskInterface` asks for. Models make masks also for kinds of layers that they do not have."""

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(0, 0, torch.tensor(query), torch.tensor(key)))

    if use_vmap:
        return AskedMask(refusal="has an attention mask of its own making")
    if sees(0, 1) or not sees(1, 1):
        return AskedMask(refusal="has attention that is not causal")
    if local_size is None:
        return AskedMask()
    if sees(local_size, 0) or not sees(local_size, 1):
        return AskedMask(refusal="has an attention window that does not slide")
    return AskedMask(KeyWindow(local_size))


class Probe:
    """Takes down each attention layer that the dry run comes through."""

    def __init__(self) -> None:
        self.layers: list[AttentionLayer] = []

    def attend(
        self,
        module: nn.Module,
        query_1QUd: torch.Tensor,
        keys_1HUd: torch.Tensor,
        values_1HUe: torch.Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> torch.Tensor:
        if not isinstance(attention_mask, AskedMask):
            raise Refusal(f"gives attention {type(attention_mask).__name__} for a mask")
        if attention_mask.refusal is not None:
            raise Refusal(attention_mask.refusal)
        others = {name: value for name, value in options.items() if name not in NEUTRAL}
        odd = [name for name, value in others.items() if isinstance(value, torch.Tensor) or value]
        if odd:
            raise Refusal(f"asks attention for {', '.join(odd)}")
        if keys_1HUd.shape[2] != NUM_TOKENS or query_1QUd.shape[2] != NUM_TOKENS:
            raise Refusal("attends over keys that are not those of its tokens")
        self.layers.append(
            AttentionLayer(
                layer_idx=int(module.layer_idx),  # type: ignore[arg-type]
                num_heads=query_1QUd.shape[1],
                num_kv_heads=keys_1HUd.shape[1],
                key_dim=keys_1HUd.shape[3],
                value_dim=values_1HUe.shape[3],
                window=attention_mask.window,
            )
        )
        return query_1QUd.new_empty((1, NUM_TOKENS, query_1QUd.shape[1], values_1HUe.shape[3]))


class RecordingExperts(nn.Module):
    """Stands where a layer's experts would be: how many are chosen for a token, and how often it was called."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.replaced = replaced
        self.top_ks: list[int] = []

    def forward(self, hidden: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        if ids_TK.shape != weights_TK.shape or ids_TK.shape[0] != NUM_TOKENS:
            raise Refusal(f"calls its experts with choices {list(ids_TK.shape)} and weights {list(weights_TK.shape)}")
        self.top_ks.append(ids_TK.shape[1])
        return torch.empty_like(hidden)


def probe(model: PreTrainedModel, experts: Mapping[str, nn.Module]) -> tuple[list[AttentionLayer], list[int]]:
    """The attention layers in order of their use, and the experts per token of each module of `experts`.

    Raises `CheckpointError` saying why the model cannot be served. The model is left as it was.
    """
    recorder = Probe()
    recording = {name: RecordingExperts(module) for name, module in experts.items()}
    for name, recorder_of_layer in recording.items():
        model.set_submodule(name, recorder_of_layer)
    try:
        _run(model, recorder)
        _check(model, recorder, recording)
    except Refusal as refusal:
        raise CheckpointError(f"{type(model).__name__} {refusal}, which is not implemented") from refusal
    finally:
        for name, module in experts.items():
            model.set_submodule(name, module)
    return recorder.layers, [module.top_ks[0] for module in recording.values()]


def _run(model: PreTrainedModel, recorder: Probe) -> None:
    taken = inspect.signature(model.forward).parameters
    lacking = [name for name in ("position_ids", "logits_to_keep") if name not in taken]
    if lacking:
        raise Refusal(f"takes no {', '.join(lacking)}")
    tokens = torch.zeros((1, NUM_TOKENS), dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode():
            out = model(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                position_ids=tokens,
                use_cache=False,
                logits_to_keep=tokens[0, :1],
                moeray=recorder,
            )
    except Refusal:
        raise
    except Exception as error:
        raise CheckpointError(f"{type(model).__name__}: a dry run without weights fails: {error!r}") from error
    wanted = (1, 1, model.config.vocab_size)
    if out.logits.shape != wanted:
        raise Refusal(f"gives logits {list(out.logits.shape)} where {list(wanted)} are wanted")


def _check(model: PreTrainedModel, recorder: Probe, recording: Mapping[str, RecordingExperts]) -> None:
    stateful = [name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)]
    if stateful:
        raise Refusal(f"keeps a state of past tokens ({stateful[0]})")
    num_layers = model.config.get_text_config().num_hidden_layers
    numbers = sorted(layer.layer_idx for layer in recorder.layers)
    if numbers != list(range(num_layers)):
        raise Refusal(f"attends in layers {numbers} through transformers' interface and has {num_layers}")
    if any(len(module.top_ks) != 1 for module in recording.values()):
        raise Refusal("does not call the experts of each layer once")


AttentionInterface.register(PROBE, attention_function)
AttentionMaskInterface.register(PROBE, asked_mask)
