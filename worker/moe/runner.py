"""The one concrete MoE layer.

Legend: T tokens, D hidden, E experts, K experts per token.
"""

from collections.abc import Callable
from functools import partial

import torch

from moeray.worker.models.linear import RowLinear
from moeray.worker.models.weights import WeightSource, WeightTarget
from moeray.worker.moe.expert_load import ExpertLoad
from moeray.worker.moe.quant.base import FusedMoEMethodBase
from moeray.worker.moe.routed_experts import RoutedExperts
from moeray.worker.moe.router import Router, TopKRouter
from moeray.worker.moe.runner_interface import MoERunnerInterface
from moeray.worker.moe.shared_experts import SharedExperts

Transform = Callable[[torch.Tensor], torch.Tensor]


class MoERunner(MoERunnerInterface):
    """Input transform, gate, route, dispatch, experts, combine, scaling, output transform, shared experts.

    `gate_ED` is the router's weight if the router is internal, `gate_bias_E` its bias if it has one. With
    `weights_on_input` the one expert of a token gets the weighted row, and its output counts as it is.
    `routed_scaling_factor` multiplies the routed output, with and without shared experts; in fp16 with shared experts
    the shared output is divided by it instead, so that the sum does not overflow, and the factor is then missing from
    the layer's output as a whole: the model must make its residual stream as much smaller (`moe_layer.residual_scale`).
    """

    def __init__(
        self,
        *,
        router: Router,
        routed_experts: RoutedExperts,
        quant_method: FusedMoEMethodBase,
        linear: RowLinear,
        expert_load: ExpertLoad,
        gate_ED: torch.nn.Parameter | None = None,
        gate_bias_E: torch.nn.Parameter | None = None,
        shared_experts: SharedExperts | None = None,
        routed_scaling_factor: float = 1.0,
        weights_on_input: bool = False,
        input_transform: Transform | None = None,
        output_transform: Transform | None = None,
    ) -> None:
        super().__init__()
        if weights_on_input and router.top_k != 1:
            raise ValueError(f"weights_on_input needs one expert per token, top_k is {router.top_k}")
        self.router = router
        self.routed_experts = routed_experts
        self.linear = linear
        self.expert_load = expert_load
        self.gate_ED = gate_ED
        self.gate_bias_E = gate_bias_E
        self.selection_bias_E = router.bias_E if isinstance(router, TopKRouter) else None
        self._shared_experts = shared_experts
        self.routed_scaling_factor = routed_scaling_factor
        self.weights_on_input = weights_on_input
        self.input_transform = input_transform
        self.output_transform = output_transform
        self._quant_method = quant_method

    @property
    def is_internal_router(self) -> bool:
        return self.gate_ED is not None

    @property
    def shared_experts(self) -> SharedExperts | None:
        return self._shared_experts

    @property
    def quant_method(self) -> FusedMoEMethodBase:
        """Replaceable until loading ends; the new method creates its own weights and builds its own kernel."""
        return self._quant_method

    @quant_method.setter
    def quant_method(self, method: FusedMoEMethodBase) -> None:
        if self._quant_method.has_kernel:
            raise RuntimeError("quant_method cannot be replaced once the weights are processed")
        self.routed_experts.replace_weights(method)
        self._quant_method = method

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        return self._quant_method.topk_indices_dtype

    def finish_loading(self) -> None:
        """Ends loading: the quantisation method builds its kernel, once."""
        if self._quant_method.has_kernel:
            raise RuntimeError(f"MoE layer {self.routed_experts.layer} has finished loading before")
        self._quant_method.process_weights_after_loading(self.routed_experts)

    def seat_target(self, source: WeightSource, seat: int | None) -> WeightTarget:
        """Where parts of an expert go if this worker has a seat for it."""
        if seat is None:
            return WeightTarget(source, None)
        load = self.quant_method.load_expert
        return WeightTarget(source, tuple(partial(load, self.routed_experts, seat, part) for part in source.parts))

    def forward(self, hidden_TD: torch.Tensor, router_logits_TE: torch.Tensor | None = None) -> torch.Tensor:
        if (router_logits_TE is None) != self.is_internal_router:
            raise ValueError("router logits must be given if and only if the router is not internal")
        routed_in_TD = self.input_transform(hidden_TD) if self.input_transform else hidden_TD
        if router_logits_TE is None:
            assert self.gate_ED is not None
            router_logits_TE = self.linear(routed_in_TD.to(self.gate_ED.dtype), self.gate_ED, self.gate_bias_E)
        weights_TK, ids_TK = self.router.select(routed_in_TD, router_logits_TE)
        self.expert_load.record(self.routed_experts.layer, ids_TK)
        if self.topk_indices_dtype is not None:
            ids_TK = ids_TK.to(self.topk_indices_dtype)
        if self.weights_on_input:
            routed_in_TD = routed_in_TD * weights_TK.to(routed_in_TD.dtype)
            weights_TK = torch.ones_like(weights_TK)
        out_TD = self._quant_method.moe_kernel(routed_in_TD, ids_TK, weights_TK)
        return self._add_shared(hidden_TD, out_TD)

    def _add_shared(self, hidden_TD: torch.Tensor, routed_TD: torch.Tensor) -> torch.Tensor:
        shared = self._shared_experts
        divide_shared = shared is not None and routed_TD.dtype == torch.float16
        if self.routed_scaling_factor != 1.0 and not divide_shared:
            routed_TD = routed_TD * self.routed_scaling_factor
        if self.output_transform:
            routed_TD = self.output_transform(routed_TD)
        if shared is None:
            return routed_TD
        shared_TD: torch.Tensor = shared(hidden_TD)
        if self.routed_scaling_factor != 1.0 and divide_shared:
            shared_TD = shared_TD / self.routed_scaling_factor
        return routed_TD + shared_TD
