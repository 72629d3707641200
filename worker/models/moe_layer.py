"""The MoE layer of a native decoder, from its config; and its weights that are not experts."""

from collections.abc import Iterator

import torch

from moeray.worker.models.config import DecoderConfig
from moeray.worker.models.linear import RowLinear
from moeray.worker.models.parameters import empty_parameter
from moeray.worker.models.weights import Place
from moeray.worker.moe.factory import FusedMoEFactory, MoEEnvironment
from moeray.worker.moe.router import CustomRouter, Router, TopKRouter
from moeray.worker.moe.routing_functions import routing_function
from moeray.worker.moe.runner import MoERunner
from moeray.worker.moe.shared_experts import SharedExperts


def make_moe_layer(config: DecoderConfig, moe_layer: int, environment: MoEEnvironment) -> MoERunner:
    """The runner of MoE layer number `moe_layer`, with nothing loaded."""
    moe = config.moe
    shared_experts = None
    if moe.shared_intermediate_size:
        shared_experts = dense_mlp(
            config, moe.shared_intermediate_size, moe.activation, environment, gated=moe.shared_gated
        )
    return FusedMoEFactory(
        environment=environment,
        layer=moe_layer,
        router=_make_router(config, environment),
        num_experts=moe.num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=moe.intermediate_size,
        activation=moe.activation,
        router_bias=moe.router_bias,
        router_dtype=torch.float32 if moe.router_fp32 else None,
        expert_bias=moe.expert_bias,
        shared_experts=shared_experts,
        routed_scaling_factor=moe.routed_scaling_factor,
        weights_on_input=moe.weights_on_input,
    )


def residual_scale(config: DecoderConfig, dtype: torch.dtype) -> float:
    """What the residual stream must be multiplied by, so that the MoE layers' outputs fit in.

    In fp16 a layer with shared experts leaves its scaling factor out (see `MoERunner`): all else is then made as much
    smaller, and the norms take it out (DeepSeek-V2's handling of overflow).
    """
    moe = config.moe
    leaves_out = dtype == torch.float16 and moe.shared_intermediate_size > 0
    return 1.0 / moe.routed_scaling_factor if leaves_out else 1.0


def _make_router(config: DecoderConfig, environment: MoEEnvironment) -> Router:
    moe = config.moe
    if moe.routing is not None:
        return CustomRouter(top_k=moe.top_k, function=routing_function(moe.routing, moe.router_jitter))
    bias_E = None
    if moe.selection_bias:
        bias_E = empty_parameter(moe.num_experts, dtype=torch.float32, device=environment.device)
    return TopKRouter(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        renormalize=moe.renormalize,
        scoring=moe.scoring,
        num_expert_groups=moe.num_expert_groups,
        topk_groups=moe.topk_groups,
        bias_E=bias_E,
    )


def dense_mlp(
    config: DecoderConfig, intermediate_size: int, activation: str, environment: MoEEnvironment, *, gated: bool = False
) -> SharedExperts:
    """A gated MLP that every token goes through."""
    return SharedExperts(
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size,
        activation=activation,
        linear=RowLinear(environment.row_exact),
        dtype=environment.weights_dtype,
        device=environment.device,
        gated=gated,
    )


def mlp_places(mlp: MoERunner | SharedExperts, layer: int) -> Iterator[Place]:
    """The weights of a layer's MLP; experts are filled by seats, see `Decoder.weight_targets`."""
    if isinstance(mlp, SharedExperts):
        yield from _dense_places(mlp, layer, "dense")
        return
    for name, parameter in (
        ("router", mlp.gate_ED),
        ("router_bias", mlp.gate_bias_E),
        ("selection_bias", mlp.selection_bias_E),
    ):
        if parameter is not None:
            yield Place(name, parameter.data, layer)
    if mlp.shared_experts is not None:
        yield from _dense_places(mlp.shared_experts, layer, "shared")


def _dense_places(mlp: SharedExperts, layer: int, kind: str) -> Iterator[Place]:
    gate, up = mlp.gate_up_proj.data.chunk(2)
    yield Place(f"{kind}_gate", gate, layer)
    yield Place(f"{kind}_up", up, layer)
    yield Place(f"{kind}_down", mlp.down_proj.data, layer)
    if mlp.gate is not None:
        yield Place(f"{kind}_weight", mlp.gate.data, layer)
