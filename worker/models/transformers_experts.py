"""The experts of a transformers model: what its modules hold, and our MoE layer in their place.

Legend: T rows of the step, U rows with padding, D hidden, K experts per token, M rows, F intermediate.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate

from moeray.comm.errors import CheckpointError
from moeray.worker.models.transformers_rows import StepRows
from moeray.worker.moe.activation import ACTIVATIONS, GatedActivation
from moeray.worker.moe.factory import FusedMoEFactory, MoEEnvironment
from moeray.worker.moe.router import PassthroughRouter
from moeray.worker.moe.runner import MoERunner

WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")


@dataclass(frozen=True, slots=True)
class ExpertsModule:
    """A module that uses transformers' experts interface: parameters [E, ...], in one of the layouts it knows."""

    name: str
    module: nn.Module

    @property
    def layer(self) -> int:
        """The model's layer that it belongs to: the first number in its name."""
        number = re.search(r"\.(\d+)\.", self.name)
        assert number is not None, self.name
        return int(number.group(1))

    @property
    def has_bias(self) -> bool:
        return bool(self.module.has_bias)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return WEIGHTS + (BIASES if self.has_bias else ())

    @property
    def num_experts(self) -> int:
        return self.module.get_parameter("down_proj").shape[0]

    @property
    def sizes(self) -> tuple[int, int]:
        """Hidden and intermediate size."""
        first, second = self.module.get_parameter("down_proj").shape[1:]
        return (second, first) if self.module.is_transposed else (first, second)

    def split(self, parameter: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The parts of one expert's entry of a parameter, as `load_expert` names them, in the shape it takes."""
        suffix = "_bias" if parameter in BIASES else ""
        if self.module.is_transposed and not suffix:
            tensor = tensor.T
        if parameter.startswith("down"):
            return [(f"down{suffix}", tensor)]
        gate, up = tensor.chunk(2) if self.module.is_concatenated else (tensor[::2], tensor[1::2])
        return [(f"gate{suffix}", gate), (f"up{suffix}", up)]

    def activation(self) -> str | GatedActivation:
        """Our function for it if there is one, else the module's own."""
        if getattr(type(self.module), "_apply_gate") is _default_apply_gate:  # noqa: B009
            for name in ACTIVATIONS:
                if name in ACT2FN and type(self.module.act_fn) is type(ACT2FN[name]):
                    return name
        apply_gate = self.module._apply_gate
        if self.module.is_concatenated:
            return apply_gate  # type: ignore[return-value]
        return lambda gate_up_M2F: apply_gate(_interleaved(gate_up_M2F))  # type: ignore[operator]


def _interleaved(gate_up_M2F: torch.Tensor) -> torch.Tensor:
    """Gate and up in turns, of halves."""
    return gate_up_M2F.view(gate_up_M2F.shape[0], 2, -1).transpose(1, 2).flatten(1)


def find_experts(model: PreTrainedModel) -> list[ExpertsModule]:
    """The modules with experts, in order. Raises `CheckpointError` for none, and for kinds that are not implemented."""
    found = [
        ExpertsModule(name, module) for name, module in model.named_modules() if hasattr(module, "is_concatenated")
    ]
    architecture = type(model).__name__
    if not found:
        raise CheckpointError(f"{architecture}: no module uses transformers' experts interface")
    for experts in found:
        module = experts.module
        for flag, wrong in (("has_gate", False), ("has_post_expert_norm", True)):
            if getattr(module, flag) is wrong:
                raise CheckpointError(
                    f"{architecture}: experts with {flag}={wrong} are not implemented ({experts.name})"
                )
        unknown = sorted(name for name, _ in module.named_parameters() if name not in experts.parameter_names)
        if unknown:
            raise CheckpointError(f"{architecture}: {experts.name} has {', '.join(unknown)}, which is not implemented")
    return found


class RunnerExperts(nn.Module):
    """Our MoE layer where the experts were: it takes the choice of the model's own router."""

    def __init__(self, runner: MoERunner, rows: StepRows) -> None:
        super().__init__()
        self.runner = runner
        self.rows = rows

    def forward(self, hidden_UD: torch.Tensor, ids_UK: torch.Tensor, weights_UK: torch.Tensor) -> torch.Tensor:
        num_real = self.rows.num_real
        flat_UD = hidden_UD.reshape(-1, hidden_UD.shape[-1])
        out_UD = flat_UD.new_zeros(flat_UD.shape)
        choice_T2K = PassthroughRouter.pack(weights_UK[:num_real], ids_UK[:num_real])
        out_UD[:num_real] = self.runner(flat_UD[:num_real], choice_T2K)
        return out_UD.view(hidden_UD.shape)


def make_runners(
    experts: Sequence[ExpertsModule], top_ks: Sequence[int], environment: MoEEnvironment
) -> list[MoERunner]:
    """A runner for each module, in order, with nothing loaded."""
    runners = []
    for moe_layer, (module, top_k) in enumerate(zip(experts, top_ks, strict=True)):
        hidden_size, intermediate_size = module.sizes
        runners.append(
            FusedMoEFactory(
                environment=environment,
                layer=moe_layer,
                router=PassthroughRouter(top_k=top_k),
                num_experts=module.num_experts,
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                activation=module.activation(),
                internal_router=False,
                expert_bias=module.has_bias,
            )
        )
    return runners
