"""A transformers model without weights: made on the meta device, given real and empty parameters later."""

import threading
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from moeray.comm.errors import CheckpointError
from moeray.worker.models.linear import RowLinear
from moeray.worker.models.parameters import empty_parameter
from moeray.worker.models.transformers_rows import StepRows

# transformers exchanges torch's initialisation functions for others while it makes a model: one thread at a time.
_MAKING = threading.Lock()
# These rotary embeddings depend on the longest sequence of the batch.
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


class ExactLinear(nn.Module):
    """`nn.Linear` on our kernels, whose rows do not depend on the batch; parameters under the same names.

    Of all rows of a step, [1, U, I], only those that count are computed, the rest is zero.
    """

    def __init__(self, replaced: nn.Linear, linear: RowLinear, rows: StepRows) -> None:
        super().__init__()
        self.weight = replaced.weight
        self.bias = replaced.bias
        self.linear = linear
        self.rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        num_computed = self.rows.num_computed
        if x.shape[:-1] != (1, self.rows.num_padded) or num_computed == self.rows.num_padded:
            return self.linear(flat, self.weight, self.bias).view(*x.shape[:-1], self.weight.shape[0])
        out = x.new_zeros((*x.shape[:-1], self.weight.shape[0]))
        out[0, :num_computed] = self.linear(flat[:num_computed], self.weight, self.bias)
        return out


def make_skeleton(directory: Path, architecture: str, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The architecture's model on the meta device, in evaluation mode, with this attention function.

    Raises `CheckpointError` if the installed transformers does not know it, or cannot make it of this config.json.
    """
    made: Any = getattr(transformers, architecture, None)
    if not (isinstance(made, type) and issubclass(made, PreTrainedModel)):
        raise CheckpointError(f"{directory}: transformers {transformers.__version__} has no {architecture}")
    try:
        with _MAKING, torch.device("meta"):
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
            _check_rope(config, directory)
            model = cast(Any, made)._from_config(config, dtype=dtype, attn_implementation=attention)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{directory}: transformers cannot make {architecture}: {error!r}") from error
    return cast(PreTrainedModel, model.eval())


def _check_rope(config: PretrainedConfig, directory: Path) -> None:
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for kind in kinds:
        if kind.get("rope_type") in BATCH_DEPENDENT_ROPE:
            raise CheckpointError(
                f"{directory}: rope_type is {kind['rope_type']!r}, which depends on the other sequences of a batch "
                "in transformers' code and is not implemented through it"
            )


def use_exact_linear(model: nn.Module, linear: RowLinear, rows: StepRows) -> None:
    """Put `ExactLinear` in the place of each `nn.Linear`."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, ExactLinear(module, linear, rows))


def give_memory(model: PreTrainedModel, device: torch.device) -> None:
    """Real parameters, empty, in the place of those on the meta device; what was shared stays shared.

    Buffers that a checkpoint does not hold are computed by transformers' own initialisation. Raises `CheckpointError`
    naming a tensor that it leaves out.
    """
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in parameters:
                    real = empty_parameter(*parameter.shape, dtype=parameter.dtype, device=device)
                    real._is_hf_initialized = True  # type: ignore[attr-defined]
                    parameters[id(parameter)] = real
                module._parameters[name] = parameters[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.full_like(
                    buffer, float("nan") if buffer.is_floating_point() else 0, device=device
                )
    _compute_buffers(model)


def _compute_buffers(model: PreTrainedModel) -> None:
    with _MAKING, torch.inference_mode():
        for module in model.modules():
            module._is_hf_initialized = False
        model.initialize_weights()
    kept = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name not in kept and buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise CheckpointError(f"{type(model).__name__}: transformers does not compute {name} again")
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise CheckpointError(f"{type(model).__name__}: {name}.{attribute} is a tensor that nobody loads")
