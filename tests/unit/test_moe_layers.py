"""MoE layers: routing, activations, and what a `MoERunner` does around the dispatched experts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moeray.comm.buffers import BufferCapacity, MoELayerSpec, prepare_communication_buffer_for_model
from moeray.comm.exchange import ExpertExchange
from moeray.comm.group import CommGroup
from moeray.comm.placement import ExpertPlacement
from moeray.comm.topology import Member, Topology
from moeray.worker.models.linear import RowLinear, padded_rows
from moeray.worker.moe.activation import ACTIVATIONS, gated_activation
from moeray.worker.moe.expert_load import ExpertLoad
from moeray.worker.moe.factory import FusedMoEFactory, MoEEnvironment
from moeray.worker.moe.quant.base import FusedMoEQuantConfig
from moeray.worker.moe.quant.grouped import group_by_seat
from moeray.worker.moe.quant.unquantized import UnquantizedExperts, UnquantizedMoEMethod
from moeray.worker.moe.router import CustomRouter, TopKRouter
from moeray.worker.moe.runner import MoERunner
from moeray.worker.moe.runner_interface import MoERunnerInterface
from moeray.worker.moe.shared_experts import SharedExperts

CPU = torch.device("cpu")
EXPERTS, TOP_K, HIDDEN, INNER = 6, 2, 32, 24


class OneLayer:
    """A model of one MoE layer, for the buffers."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def moe_layer_specs(self) -> list[MoELayerSpec]:
        return [MoELayerSpec(layer=0, hidden_size=HIDDEN, top_k=TOP_K, num_experts=EXPERTS, dtype=self.dtype)]


def environment(dtype: torch.dtype = torch.float32, combine: str = "exact") -> MoEEnvironment:
    exchange = ExpertExchange(combine=combine, dispatcher="auto", device=CPU)
    capacity = BufferCapacity(max_workers=1, max_tokens=64)
    exchange.attach_buffers(prepare_communication_buffer_for_model(OneLayer(dtype), capacity, CPU))
    placement = ExpertPlacement.contiguous(num_layers=1, num_experts=EXPERTS, slots=(0,), num_seats=EXPERTS)
    member = Member(slot=0, incarnation=0, node="here", endpoint="", public_key="")
    topology = Topology(epoch=0, members=(member,), placement=placement)
    group = CommGroup.build(epoch=0, rank=0, slots=(0,), store=None, device=CPU, timeout_s=5.0, warm_timeout_s=5.0)
    exchange.install(topology, group, 0)
    return MoEEnvironment(
        exchange=exchange,
        expert_load=ExpertLoad(num_layers=1, num_experts=EXPERTS),
        num_seats=EXPERTS,
        dtype=dtype,
        device=CPU,
        row_exact=combine == "exact",
    )


def fill(runner: MoERunner, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in runner.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    runner.finish_loading()


def make_runner(env: MoEEnvironment | None = None, **fields: Any) -> MoERunner:
    env = env or environment()
    router = fields.pop("router", TopKRouter(num_experts=EXPERTS, top_k=TOP_K, renormalize=True))
    return FusedMoEFactory(
        environment=env,
        layer=0,
        router=router,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        **fields,
    )


def run(runner: MoERunner, hidden: torch.Tensor, logits: torch.Tensor | None = None) -> torch.Tensor:
    runner.routed_experts.exchange.begin_step([len(hidden)])
    with torch.inference_mode():
        out: torch.Tensor = runner(hidden, logits)
        return out


def expected(runner: MoERunner, hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert."""
    activation = runner.routed_experts.activation
    w13 = runner.routed_experts.get_parameter("w13_S2FD").float()
    w2 = runner.routed_experts.get_parameter("w2_SDF").float()
    out = torch.zeros(hidden.shape)
    for token, row in enumerate(hidden.float()):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            inner = activation((w13[expert] @ row).unsqueeze(0))[0]
            out[token] += weight * (w2[expert] @ inner)
    return out


def shared(dtype: torch.dtype = torch.float32, gated: bool = False) -> SharedExperts:
    return SharedExperts(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        activation="silu",
        linear=RowLinear(True),
        dtype=dtype,
        device=CPU,
        gated=gated,
    )


# Routing


def test_softmax_top_k_renormalised() -> None:
    logits = torch.randn(5, EXPERTS)
    router = TopKRouter(num_experts=EXPERTS, top_k=TOP_K, renormalize=True)
    weights, ids = router.select(torch.zeros(5, HIDDEN), logits)
    values, best = torch.softmax(logits, -1).topk(TOP_K)
    assert torch.equal(ids, best)
    assert torch.allclose(weights, values / values.sum(-1, keepdim=True))
    plain, _ = TopKRouter(num_experts=EXPERTS, top_k=TOP_K, renormalize=False).select(torch.zeros(5, 1), logits)
    assert torch.equal(plain, values)


@pytest.mark.parametrize(
    ("scoring", "function"),
    [
        ("sigmoid", torch.sigmoid),
        ("sqrtsoftplus", lambda x: F.softplus(x).sqrt()),
        ("softmax", lambda x: torch.softmax(x, -1)),
    ],
)
def test_scores_are_fp32(scoring: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    logits = torch.randn(4, EXPERTS).bfloat16()
    router = TopKRouter(num_experts=EXPERTS, top_k=TOP_K, renormalize=False, scoring=scoring)
    weights, _ = router.select(torch.zeros(4, 1), logits)
    assert weights.dtype == torch.float32
    assert torch.allclose(weights, function(logits.float()).topk(TOP_K).values)


def test_bias_steers_the_choice_and_weights_stay_unbiased() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0, -3.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 5.0])
    router = TopKRouter(num_experts=EXPERTS, top_k=2, renormalize=False, scoring="sigmoid", bias_E=bias)
    weights, ids = router.select(torch.zeros(1, 1), logits)
    assert ids.tolist() == [[5, 0]]
    assert torch.allclose(weights, torch.sigmoid(torch.tensor([[-3.0, 2.0]])))


def test_group_score_is_the_maximum_without_bias_and_the_best_two_with() -> None:
    # Group 0 has the best single expert, group 1 the best pair, of 3 experts each.
    logits = torch.tensor([[3.0, -9.0, -9.0, 2.0, 2.0, -9.0]])
    common: dict[str, Any] = {
        "num_experts": 6,
        "top_k": 2,
        "renormalize": False,
        "scoring": "sigmoid",
        "num_expert_groups": 2,
        "topk_groups": 1,
    }
    _, by_maximum = TopKRouter(**common).select(torch.zeros(1, 1), logits)
    assert by_maximum[0, 0].item() == 0
    assert set(by_maximum[0].tolist()) <= {0, 1, 2}
    _, by_pair = TopKRouter(**common, bias_E=torch.zeros(6)).select(torch.zeros(1, 1), logits)
    assert set(by_pair[0].tolist()) == {3, 4}


def test_a_single_group_is_plain_top_k() -> None:
    logits = torch.randn(20, 8)
    plain = TopKRouter(num_experts=8, top_k=3, renormalize=True)
    grouped = TopKRouter(num_experts=8, top_k=3, renormalize=True, num_expert_groups=4, topk_groups=4)
    for ours, theirs in zip(plain.select(logits, logits), grouped.select(logits, logits), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"top_k": 7}, "top_k"),
        ({"num_expert_groups": 4}, "num_expert_groups"),
        ({"num_expert_groups": 3, "topk_groups": 4}, "topk_groups"),
        ({"num_expert_groups": 6, "topk_groups": 1}, "top_k"),
    ],
)
def test_impossible_routers_are_refused_by_field(fields: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        TopKRouter(**{"num_experts": 6, "top_k": 2, "renormalize": True, **fields})  # type: ignore[arg-type]


def test_custom_routing_function() -> None:
    def everyone_to_the_last(
        hidden: torch.Tensor, logits: torch.Tensor, top_k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert logits.shape == (len(hidden), EXPERTS)
        ids = torch.tensor([[EXPERTS - 1, 0]]).expand(len(hidden), top_k)
        return torch.full(ids.shape, 0.25), ids

    runner = make_runner(router=CustomRouter(top_k=2, function=everyone_to_the_last))
    fill(runner)
    hidden = torch.randn(3, HIDDEN)
    ids = torch.tensor([[EXPERTS - 1, 0]] * 3)
    want = expected(runner, hidden, torch.full((3, 2), 0.25), ids)
    assert torch.allclose(run(runner, hidden), want, atol=1e-5)


# Activations


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations(name: str) -> None:
    gate, up = torch.randn(5, 8) * 6, torch.randn(5, 8) * 6
    want = {
        "silu": F.silu(gate) * up,
        "gelu": F.gelu(gate) * up,
        "gelu_pytorch_tanh": F.gelu(gate, approximate="tanh") * up,
        "swiglu_oai": gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1),
    }[name]
    assert torch.allclose(gated_activation(name)(torch.cat((gate, up), -1)), want, atol=1e-5)


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'mish'"):
        make_runner(activation="mish")


# Experts and the runner


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 17, 64])
@pytest.mark.parametrize("combine", ["exact", "fast"])
def test_runner_equals_token_by_token(num_tokens: int, combine: str) -> None:
    runner = make_runner(environment(combine=combine))
    fill(runner)
    hidden = torch.randn(num_tokens, HIDDEN)
    assert runner.gate_ED is not None
    weights, ids = runner.router.select(hidden, F.linear(hidden, runner.gate_ED))
    assert torch.allclose(run(runner, hidden), expected(runner, hidden, weights, ids), atol=1e-4)


def test_rows_keep_their_bits_in_any_batch() -> None:
    runner = make_runner()
    fill(runner)
    hidden = torch.randn(64, HIDDEN)
    whole = run(runner, hidden)
    for first, last in ((0, 1), (3, 5), (10, 41), (63, 64)):
        assert torch.equal(run(runner, hidden[first:last]), whole[first:last])


def test_external_router_logits_are_required_and_used() -> None:
    runner = make_runner(internal_router=False)
    fill(runner)
    assert not runner.is_internal_router
    hidden, logits = torch.randn(4, HIDDEN), torch.randn(4, EXPERTS)
    weights, ids = runner.router.select(hidden, logits)
    assert torch.allclose(run(runner, hidden, logits), expected(runner, hidden, weights, ids), atol=1e-4)
    with pytest.raises(ValueError, match="router logits"):
        run(runner, hidden)
    internal = make_runner()
    fill(internal)
    with pytest.raises(ValueError, match="router logits"):
        run(internal, hidden, logits)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_scaling_applies_with_and_without_shared_experts(factor: float, gated: bool) -> None:
    alone = make_runner(routed_scaling_factor=factor)
    both = make_runner(routed_scaling_factor=factor, shared_experts=shared(gated=gated))
    fill(alone)
    fill(both)
    assert alone.shared_experts is None
    assert both.shared_experts is not None
    hidden = torch.randn(5, HIDDEN)
    for runner in (alone, both):
        assert runner.gate_ED is not None
        weights, ids = runner.router.select(hidden, F.linear(hidden, runner.gate_ED))
        want = expected(runner, hidden, weights, ids) * factor
        if runner.shared_experts is not None:
            want = want + runner.shared_experts(hidden)
        assert torch.allclose(run(runner, hidden), want, atol=1e-4)


def test_fp16_with_shared_experts_divides_the_shared_output_instead() -> None:
    runner = make_runner(
        environment(torch.float16, "fast"), routed_scaling_factor=16.0, shared_experts=shared(torch.float16)
    )
    fill(runner)
    hidden = torch.randn(5, HIDDEN).half()
    assert runner.gate_ED is not None
    assert runner.shared_experts is not None
    weights, ids = runner.router.select(hidden, F.linear(hidden, runner.gate_ED))
    want = expected(runner, hidden, weights, ids) + runner.shared_experts(hidden).float() / 16.0
    assert torch.allclose(run(runner, hidden).float(), want, atol=2e-2)


def test_transforms_wrap_the_routed_part_only() -> None:
    runner = make_runner(shared_experts=shared(), input_transform=lambda x: x * 2.0, output_transform=lambda x: x + 1.0)
    fill(runner)
    assert runner.gate_ED is not None
    assert runner.shared_experts is not None
    hidden = torch.randn(3, HIDDEN)
    weights, ids = runner.router.select(2 * hidden, F.linear(2 * hidden, runner.gate_ED))
    want = expected(runner, 2 * hidden, weights, ids) + 1.0 + runner.shared_experts(hidden)
    assert torch.allclose(run(runner, hidden), want, atol=1e-4)


class Int32Method(UnquantizedMoEMethod):
    """Another method: its kernel wants int32 ids."""

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int32


def test_replacing_the_quant_method_refreshes_what_is_derived_until_loading_ends() -> None:
    runner = make_runner()
    before = runner.routed_experts.get_parameter("w13_S2FD")
    dtypes = [runner.topk_indices_dtype]
    runner.quant_method = Int32Method()
    dtypes.append(runner.topk_indices_dtype)
    assert dtypes == [None, torch.int32]
    assert runner.routed_experts.get_parameter("w13_S2FD") is not before
    fill(runner)
    hidden = torch.randn(2, HIDDEN)
    assert runner.gate_ED is not None
    weights, ids = runner.router.select(hidden, F.linear(hidden, runner.gate_ED))
    assert torch.allclose(run(runner, hidden), expected(runner, hidden, weights, ids), atol=1e-4)
    with pytest.raises(RuntimeError, match="cannot be replaced"):
        runner.quant_method = UnquantizedMoEMethod()
    with pytest.raises(RuntimeError, match="finished loading before"):
        runner.finish_loading()


def test_a_kernel_exists_only_after_loading() -> None:
    runner = make_runner()
    assert isinstance(runner, MoERunnerInterface)
    with pytest.raises(RuntimeError, match="not loaded"):
        _ = runner.quant_method.moe_kernel


def test_halves_that_disagree_on_the_format_are_refused() -> None:
    experts = UnquantizedExperts(
        torch.zeros(1, 2, 2),
        torch.zeros(1, 2, 1),
        gated_activation("silu"),
        FusedMoEQuantConfig(dispatch_dtype=torch.float32, weight_format="unquantized", row_exact=True),
    )
    other = FusedMoEQuantConfig(dispatch_dtype=torch.float16, weight_format="unquantized", row_exact=True)
    supported, reason = experts.supports(other)
    assert not supported
    assert "float16" in reason


@pytest.mark.parametrize("exact", [True, False])
def test_grouping_puts_every_pair_in_its_seats_run(exact: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    seats = torch.randint(-1, 5, (30, 3), generator=generator)
    groups = group_by_seat(seats, exact=exact)
    pairs = [(row, seat) for row in range(30) for seat in seats[row].tolist() if seat >= 0]
    assert len(groups.place_of_pair_P) == len(pairs)
    for place, (row, seat) in zip(groups.place_of_pair_P.tolist(), pairs, strict=True):
        assert groups.source_rows_Q[place] == row
        assert any(run_seat == seat and start <= place < end for run_seat, start, end in groups.runs)
    assert all((end - start) % 4 == 0 for _, start, end in groups.runs)


@pytest.mark.parametrize(
    ("rows", "exact", "fast"), [(0, 0, 0), (1, 4, 1), (3, 4, 3), (5, 8, 8), (17, 24, 24), (65, 96, 96)]
)
def test_rows_are_padded_to_few_sizes(rows: int, exact: int, fast: int) -> None:
    assert padded_rows(rows, exact=True) == exact
    assert padded_rows(rows, exact=False) == fast


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 128), (64, 10), (200, 64), (256, 512), (384, 96), (1024, 256)])
@pytest.mark.parametrize("biased", [False, True])
def test_exact_rows_have_the_same_bits_whatever_their_number(inputs: int, outputs: int, biased: bool) -> None:
    torch.manual_seed(0)
    linear = RowLinear(True)
    weight, x = torch.randn(outputs, inputs), torch.randn(600, inputs)
    bias = torch.randn(outputs) if biased else None
    whole = linear(x, weight, bias)
    assert torch.allclose(whole, F.linear(x, weight, bias), atol=1e-3)
    for count in (1, 2, 3, 4, 5, 7, 13, 31, 64, 65, 100, 129, 300, 512):
        assert torch.equal(linear(x[600 - count :], weight, bias), whole[600 - count :]), count


def test_load_counts_real_tokens_at_commit_only() -> None:
    load = ExpertLoad(num_layers=2, num_experts=4)
    load.record(0, torch.tensor([[0, 1]]))
    load.record(0, torch.tensor([[2, 3]]))  # the step ran again
    load.record(1, torch.tensor([[1, 1], [1, 3]]))
    assert not load.counts_LE.any()
    load.commit()
    assert load.counts_LE.tolist() == [[0, 0, 1, 1], [0, 3, 0, 1]]
    load.commit()
    assert load.counts_LE.sum() == 6
