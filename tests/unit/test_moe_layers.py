"""MoE layers: routing, activations, and what a `MoERunner` does around the dispatched experts."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moeray.comm.buffers import BufferCapacity, MoELayerSpec, prepare_communication_buffer_for_model
from moeray.comm.exchange import ExpertExchange
from moeray.comm.group import CommGroup
from moeray.comm.placement import ExpertPlacement
from moeray.comm.topology import Member, Topology
from moeray.worker.models.linear import RowLinear
from moeray.worker.moe.activation import ACTIVATIONS, gated_activation
from moeray.worker.moe.expert_load import ROWS_PER_HALVING, ExpertLoad
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
        weights_dtype=dtype,
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
    b13, b2 = torch.zeros(len(w13), w13.shape[1]), torch.zeros(len(w2), w2.shape[1])
    if runner.routed_experts.has_bias:
        b13, b2 = (runner.routed_experts.get_parameter(name) for name in ("bias_13_S2F", "bias_2_SD"))
    out = torch.zeros(hidden.shape)
    for token, row in enumerate(hidden.float()):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            inner = activation((w13[expert] @ row + b13[expert]).unsqueeze(0))[0]
            out[token] += weight * (w2[expert] @ inner + b2[expert])
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


# Routing by a function


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


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_keep_a_rows_bits_in_any_batch(name: str) -> None:
    rows = torch.randn(13, 2 * 19)
    whole = gated_activation(name)(rows)
    for first, last in ((0, 1), (3, 6), (12, 13)):
        assert torch.equal(gated_activation(name)(rows[first:last]), whole[first:last])


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


def test_fp16_with_shared_experts_does_not_overflow_where_scaling_would() -> None:
    runner = make_runner(
        environment(torch.float16, "fast"), routed_scaling_factor=5000.0, shared_experts=shared(torch.float16)
    )
    fill(runner)
    hidden = torch.randn(5, HIDDEN).half() * 8
    assert runner.gate_ED is not None
    weights, ids = runner.router.select(hidden, F.linear(hidden, runner.gate_ED))
    assert (expected(runner, hidden, weights, ids) * 5000.0).abs().max() > torch.finfo(torch.float16).max
    assert run(runner, hidden).isfinite().all()


def test_weights_are_renormalised_before_they_are_scaled() -> None:
    runner = make_runner(
        router=TopKRouter(num_experts=EXPERTS, top_k=TOP_K, renormalize=True, scoring="sigmoid"),
        routed_scaling_factor=2.5,
    )
    fill(runner)
    hidden = torch.randn(5, HIDDEN)
    assert runner.gate_ED is not None
    scores = torch.sigmoid(F.linear(hidden, runner.gate_ED))
    best, ids = scores.topk(TOP_K)
    want = expected(runner, hidden, best / best.sum(-1, keepdim=True) * 2.5, ids)
    assert torch.allclose(run(runner, hidden), want, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("combine", ["exact", "fast"])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_no_shared_experts_on_every_path(dtype: torch.dtype, combine: str, factor: float) -> None:
    runner = make_runner(environment(dtype, combine), routed_scaling_factor=factor, output_transform=lambda x: x + 1)
    fill(runner)
    hidden = torch.randn(5, HIDDEN).to(dtype)
    assert runner.gate_ED is not None
    weights, ids = runner.router.select(hidden, F.linear(hidden, runner.gate_ED))
    want = expected(runner, hidden, weights, ids) * factor + 1
    assert torch.allclose(run(runner, hidden).float(), want, atol=1e-4 if dtype == torch.float32 else 3e-2)


def test_weights_on_the_input_of_a_tokens_one_expert() -> None:
    router = TopKRouter(num_experts=EXPERTS, top_k=1, renormalize=False, scoring="sigmoid")
    runner = make_runner(router=router, weights_on_input=True, shared_experts=shared())
    fill(runner)
    hidden = torch.randn(6, HIDDEN)
    assert runner.gate_ED is not None
    assert runner.shared_experts is not None
    weights, ids = router.select(hidden, F.linear(hidden, runner.gate_ED))
    want = expected(runner, hidden * weights, torch.ones_like(weights), ids) + runner.shared_experts(hidden)
    assert torch.allclose(run(runner, hidden), want, atol=1e-4)
    with pytest.raises(ValueError, match="weights_on_input needs one expert per token, top_k is 2"):
        make_runner(weights_on_input=True)


def test_biases_of_router_and_experts_count() -> None:
    runner = make_runner(router_bias=True, expert_bias=True, activation="swiglu_oai")
    fill(runner)
    hidden = torch.randn(5, HIDDEN)
    assert runner.gate_ED is not None
    assert runner.gate_bias_E is not None
    weights, ids = runner.router.select(hidden, F.linear(hidden, runner.gate_ED, runner.gate_bias_E))
    assert torch.allclose(run(runner, hidden), expected(runner, hidden, weights, ids), atol=1e-4)
    seats = runner.routed_experts
    assert seats.seat_nbytes == 4 * (3 * HIDDEN * INNER + 2 * INNER + HIDDEN)


def test_most_experts_without_tokens() -> None:
    def to_one(hidden: torch.Tensor, logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG001
        return torch.ones(len(hidden), 1), torch.full((len(hidden), 1), 3)

    runner = make_runner(router=CustomRouter(top_k=1, function=to_one))
    fill(runner)
    hidden = torch.randn(9, HIDDEN)
    want = expected(runner, hidden, torch.ones(9, 1), torch.full((9, 1), 3))
    assert torch.allclose(run(runner, hidden), want, atol=1e-4)


def test_a_router_in_fp32_decides_in_fp32() -> None:
    runner = make_runner(environment(torch.bfloat16, "fast"), router_dtype=torch.float32)
    fill(runner)
    assert runner.gate_ED is not None
    assert runner.gate_ED.dtype == torch.float32
    hidden = torch.randn(64, HIDDEN).bfloat16()
    run(runner, hidden)
    _, ids = runner.router.select(hidden, F.linear(hidden.float(), runner.gate_ED))
    runner.expert_load.commit()
    assert runner.expert_load.counts_LE[0].tolist() == torch.bincount(ids.reshape(-1), minlength=EXPERTS).tolist()


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


@pytest.mark.parametrize(("exact", "pads"), [(True, True), (False, True), (True, False)])
def test_grouping_puts_every_pair_in_its_seats_run(exact: bool, pads: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    seats = torch.randint(-1, 5, (30, 3), generator=generator)
    groups = group_by_seat(seats, exact=exact, pads=pads)
    pairs = [(row, seat) for row in range(30) for seat in seats[row].tolist() if seat >= 0]
    assert len(groups.place_of_pair_P) == len(pairs)
    for place, (row, seat) in zip(groups.place_of_pair_P.tolist(), pairs, strict=True):
        assert groups.source_rows_Q[place] == row
        assert any(run_seat == seat and start <= place < end for run_seat, start, end in groups.runs)
    if pads:
        assert all((end - start) % 4 == 0 for _, start, end in groups.runs)
    else:
        assert len(groups.source_rows_Q) == len(pairs)


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


def test_load_fades_so_that_what_was_popular_long_ago_matters_little() -> None:
    load = ExpertLoad(num_layers=2, num_experts=4)
    rows = ROWS_PER_HALVING // 4

    def commit(expert: int, num_rows: int) -> None:
        for layer in (0, 1):
            load.record(layer, torch.full((num_rows, 2), expert))
        load.commit()

    for _ in range(3):
        commit(0, rows)
    assert load.counts() == ((6 * rows, 0, 0, 0),) * 2
    commit(1, rows - 1)
    assert load.counts() == ((6 * rows, 2 * (rows - 1), 0, 0),) * 2
    commit(2, 2)  # one row beyond the limit: it counts towards the next
    faded = ((3 * rows, rows - 1, 2, 0),) * 2
    assert load.counts() == faded
    commit(3, ROWS_PER_HALVING - 2)
    assert load.counts() == ((3 * rows, rows - 1, 2, 2 * (ROWS_PER_HALVING - 2)),) * 2
    commit(3, 1)
    assert load.counts()[0][0] == 3 * rows // 2


def test_a_load_that_was_read_stays_as_it_was() -> None:
    """Another thread may hold it while the next step is committed."""
    load = ExpertLoad(num_layers=1, num_experts=2)
    load.record(0, torch.tensor([[0]]))
    load.commit()
    seen = load.counts_LE
    load.record(0, torch.tensor([[1]]))
    load.commit()
    assert seen.tolist() == [[1, 0]]
    assert load.counts() == ((1, 1),)
