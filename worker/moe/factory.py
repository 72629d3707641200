"""One call that builds a MoE layer: router, experts, shared experts and quantisation method, in a `MoERunner`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from moeray.comm.exchange import ExpertExchange
from moeray.worker.models.linear import RowLinear
from moeray.worker.models.parameters import empty_parameter
from moeray.worker.moe.activation import GatedActivation
from moeray.worker.moe.expert_load import ExpertLoad
from moeray.worker.moe.quant.base import FusedMoEMethodBase
from moeray.worker.moe.quant.unquantized import UnquantizedMoEMethod
from moeray.worker.moe.routed_experts import RoutedExperts
from moeray.worker.moe.router import Router
from moeray.worker.moe.runner import MoERunner, Transform
from moeray.worker.moe.shared_experts import SharedExperts


def unquantized(_layer: int) -> FusedMoEMethodBase:
    """The method of layers whose experts are in floating point."""
    return UnquantizedMoEMethod()


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEEnvironment:
    """What all MoE layers of a worker share.

    `row_exact`: a row's bits may not depend on its batch. `make_quant_method` is called with each MoE layer's number.
    Projections are stored in `weights_dtype`, everything is computed in `dtype`.
    """

    exchange: ExpertExchange
    expert_load: ExpertLoad
    num_seats: int
    dtype: torch.dtype
    weights_dtype: torch.dtype
    device: torch.device
    row_exact: bool
    make_quant_method: Callable[[int], FusedMoEMethodBase] = unquantized


def FusedMoEFactory(
    *,
    environment: MoEEnvironment,
    layer: int,
    router: Router,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    activation: str | GatedActivation = "silu",
    internal_router: bool = True,
    router_bias: bool = False,
    router_dtype: torch.dtype | None = None,
    expert_bias: bool = False,
    shared_experts: SharedExperts | None = None,
    routed_scaling_factor: float = 1.0,
    weights_on_input: bool = False,
    input_transform: Transform | None = None,
    output_transform: Transform | None = None,
) -> MoERunner:
    """Build the `MoERunner` of MoE layer number `layer`, with room for `num_seats` experts and nothing loaded.

    With `internal_router` the runner owns the gate's weight [E, D], and its bias if there is one, and computes the
    logits itself, in `router_dtype` if that is given. Raises `ValueError` for an unknown activation, for a layer that
    the quantisation method does not support, and for `weights_on_input` with more than one expert per token.
    """
    quant_method = environment.make_quant_method(layer)
    routed_experts = RoutedExperts(
        layer=layer,
        num_experts=num_experts,
        num_seats=environment.num_seats,
        top_k=router.top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        activation=activation,
        has_bias=expert_bias,
        dtype=environment.dtype,
        weights_dtype=environment.weights_dtype,
        device=environment.device,
        row_exact=environment.row_exact,
        exchange=environment.exchange,
        quant_method=quant_method,
    )
    gate_ED = gate_bias_E = None
    parameter = partial(empty_parameter, dtype=router_dtype or environment.dtype, device=environment.device)
    if internal_router:
        gate_ED = parameter(num_experts, hidden_size)
        gate_bias_E = parameter(num_experts) if router_bias else None
    return MoERunner(
        router=router,
        routed_experts=routed_experts,
        quant_method=quant_method,
        linear=RowLinear(environment.row_exact),
        expert_load=environment.expert_load,
        gate_ED=gate_ED,
        gate_bias_E=gate_bias_E,
        shared_experts=shared_experts,
        routed_scaling_factor=routed_scaling_factor,
        weights_on_input=weights_on_input,
        input_transform=input_transform,
        output_transform=output_transform,
    )
