"""Every dispatcher against the reference, bit by bit in exact mode; traffic within bounds; buffers that stay."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeray.comm.buffers import MoELayerSpec
from moeray.comm.dispatcher import TrafficCounter
from moeray.comm.errors import BackendUnavailable, CapacityError
from moeray.comm.exchange import ExpertExchange
from moeray.comm.group import CommGroup
from moeray.comm.placement import EMPTY_SEAT, ExpertPlacement
from moeray.comm.topology import Topology
from tests.support.expert_ranks import (
    CPU,
    Batch,
    build_groups,
    expected_outputs,
    make_batch,
    make_exchange,
    make_topology,
    run_layer,
    run_ranks,
    run_step,
)
from tests.support.spawned_ranks import run_processes

MOVING = ("all_gather", "all_to_all")
MODES = ("exact", "fast")
SIZES = (2, 3, 4)
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (5e-2, 5e-2), torch.float16: (5e-3, 5e-3)}

GroupsBySize = dict[int, list[CommGroup]]


@pytest.fixture(scope="module")
def groups() -> Iterator[GroupsBySize]:
    """Groups of every size, built once; each serves one example after the other."""
    built = {size: build_groups(range(size), epoch=size) for size in SIZES}
    built[1] = [CommGroup.build(epoch=1, rank=0, slots=[0], store=None, device=CPU, timeout_s=1.0, warm_timeout_s=1.0)]
    yield built
    for group in [group for ranks in built.values() for group in ranks]:
        group.close()


def spec(hidden: int, top_k: int, num_experts: int, dtype: torch.dtype = torch.float32) -> MoELayerSpec:
    return MoELayerSpec(layer=0, hidden_size=hidden, top_k=top_k, num_experts=num_experts, dtype=dtype)


def installed(
    ranks: Sequence[CommGroup],
    topology: Topology,
    layer_spec: MoELayerSpec,
    combine: str,
    dispatcher: str,
    piece_tokens: int = 64,
) -> list[ExpertExchange]:
    exchanges = []
    for group in ranks:
        exchange = make_exchange([layer_spec], combine=combine, dispatcher=dispatcher, piece_tokens=piece_tokens)
        exchange.install(topology, group, topology.slots[group.rank])
        exchanges.append(exchange)
    return exchanges


def check(outputs: Sequence[torch.Tensor], batches: Sequence[Batch], combine: str) -> None:
    for out_TD, expected_TD in zip(outputs, expected_outputs(batches), strict=True):
        assert out_TD.dtype == expected_TD.dtype
        if combine == "exact":
            assert torch.equal(out_TD, expected_TD)
        else:
            rtol, atol = TOLERANCE[out_TD.dtype]
            torch.testing.assert_close(out_TD, expected_TD, rtol=rtol, atol=atol)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Batch], MoELayerSpec, int]:
    """Batches of 1 to 4 ranks (some empty, some skewed), their sizes, and tokens a piece."""
    size = draw(st.integers(1, 4))
    num_experts = draw(st.integers(4, 11))
    top_k = draw(st.integers(1, 4))
    hidden = draw(st.sampled_from([1, 7, 16, 33]))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    batches = [
        make_batch(
            draw(st.one_of(st.just(0), st.integers(0, 20))),
            hidden=hidden,
            top_k=top_k,
            num_experts=num_experts,
            seed=draw(st.integers(0, 1 << 20)),
            skewed=draw(st.booleans()),
            dtype=dtype,
        )
        for _ in range(size)
    ]
    return batches, spec(hidden, top_k, num_experts, dtype), draw(st.sampled_from([3, 8, 64]))


@pytest.mark.parametrize("combine", MODES)
@pytest.mark.parametrize("dispatcher", MOVING)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_every_dispatcher_equals_the_reference(
    groups: GroupsBySize, dispatcher: str, combine: str, case: tuple[list[Batch], MoELayerSpec, int]
) -> None:
    batches, layer_spec, piece_tokens = case
    size = len(batches)
    topology = make_topology(range(size), layer_spec.num_experts, epoch=groups[size][0].epoch)
    name = dispatcher if size > 1 else "loopback"
    exchanges = installed(groups[size], topology, layer_spec, combine, name, piece_tokens)
    check(run_step(exchanges, topology, batches), batches, combine)
    assert exchanges[0].name == name


@pytest.mark.parametrize("skewed", [False, True])
def test_exact_bits_are_the_same_for_every_number_of_workers(groups: GroupsBySize, skewed: bool) -> None:
    """8 experts on 1, 2, 3 and 4 workers, the same tokens spread differently."""
    whole = make_batch(50, hidden=24, top_k=4, num_experts=8, seed=5, skewed=skewed, dtype=torch.float32)
    seen = []
    for size in (1, *SIZES):
        topology = make_topology(range(size), 8, epoch=groups[size][0].epoch)
        for dispatcher in MOVING if size > 1 else ("loopback",):
            cuts = [0, *(7 * rank for rank in range(1, size)), 50]
            batches = [
                Batch(whole.hidden_TD[a:b], whole.topk_ids_TK[a:b], whole.topk_weights_TK[a:b])
                for a, b in itertools.pairwise(cuts)
            ]
            exchanges = installed(groups[size], topology, spec(24, 4, 8), "exact", dispatcher, 16)
            seen.append(torch.cat(run_step(exchanges, topology, batches)))
    assert len(seen) == 7
    assert all(torch.equal(seen[0], other) for other in seen[1:])


@pytest.mark.parametrize("combine", MODES)
@pytest.mark.parametrize("dispatcher", MOVING)
def test_all_tokens_to_the_experts_of_one_rank(groups: GroupsBySize, dispatcher: str, combine: str) -> None:
    """Twelve experts on three workers; every token of every rank picks those of the last."""
    topology = make_topology(range(3), 12, epoch=3)
    batches = []
    for rank, num_tokens in enumerate((20, 0, 5)):
        batch = make_batch(num_tokens, hidden=8, top_k=4, num_experts=12, seed=rank, skewed=False, dtype=torch.float32)
        ids_TK = torch.tensor([8, 9, 10, 11]).expand(num_tokens, 4).contiguous()
        batches.append(Batch(batch.hidden_TD, ids_TK, batch.topk_weights_TK))
    exchanges = installed(groups[3], topology, spec(8, 4, 12), combine, dispatcher, 16)
    check(run_step(exchanges, topology, batches), batches, combine)


@pytest.mark.parametrize("slots", [(0, 1, 2), (5, 0, 3)])
@pytest.mark.parametrize("dispatcher", MOVING)
def test_slots_need_not_be_ranks(dispatcher: str, slots: tuple[int, ...]) -> None:
    ranks = build_groups(slots, epoch=9)
    topology = make_topology(slots, 10, epoch=9, num_seats=7)
    batches = [
        make_batch(4 + n, hidden=8, top_k=3, num_experts=10, seed=n, skewed=False, dtype=torch.float32)
        for n in range(3)
    ]
    exchanges = installed(ranks, topology, spec(8, 3, 10), "exact", dispatcher)
    check(run_step(exchanges, topology, batches), batches, "exact")
    for group in ranks:
        group.close()


@pytest.mark.parametrize("combine", MODES)
def test_counts_can_travel_first(groups: GroupsBySize, combine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What NCCL needs, on gloo."""
    monkeypatch.setattr(CommGroup, "accepts_short_messages", False)
    topology = make_topology(range(3), 8, epoch=3)
    exchanges = installed(groups[3], topology, spec(16, 4, 8), combine, "all_to_all", 8)
    for tokens in ((9, 0, 20), (0, 0, 1), (0, 0, 0)):
        batches = [
            make_batch(n, hidden=16, top_k=4, num_experts=8, seed=n, skewed=False, dtype=torch.float32) for n in tokens
        ]
        check(run_step(exchanges, topology, batches), batches, combine)


@pytest.mark.parametrize("dispatcher", MOVING)
def test_a_replica_at_home_is_preferred(groups: GroupsBySize, dispatcher: str) -> None:
    """Experts 0 and 1 sit on both workers, so only rows for 2 and 3 move; the sums stay the same."""
    placement = ExpertPlacement(
        num_experts=4,
        num_seats=4,
        slots=(0, 1),
        assignments=(((0, 1, 2, EMPTY_SEAT), (1, 3, EMPTY_SEAT, 0)),),
    )
    topology = dataclasses.replace(make_topology(range(2), 4, num_seats=4, epoch=2), placement=placement)
    batches = [
        make_batch(9, hidden=8, top_k=2, num_experts=4, seed=n, skewed=False, dtype=torch.float32) for n in range(2)
    ]
    exchanges = installed(groups[2], topology, spec(8, 2, 4), "exact", dispatcher)
    logical = torch.arange(4)
    assert exchanges[0].physical_ids(0, logical).tolist() == [0, 1, 2, 5]
    assert exchanges[1].physical_ids(0, logical).tolist() == [7, 4, 2, 5]
    check(run_step(exchanges, topology, batches), batches, "exact")


def remote_numbers(topology: Topology, batches: Sequence[Batch]) -> tuple[int, int]:
    """Distinct (token, remote rank) and remote (token, expert) pairs."""
    num_seats = topology.placement.num_seats
    homes = [home[0] // num_seats for home in topology.placement.logical_to_physical(0)]
    rows = pairs = 0
    for slot, batch in zip(topology.slots, batches, strict=True):
        for ids in batch.topk_ids_TK.tolist():
            remote = [homes[expert] for expert in ids if homes[expert] != slot]
            pairs += len(remote)
            rows += len(set(remote))
    return rows, pairs


def total(counters: Sequence[TrafficCounter], field: str) -> int:
    return sum(getattr(counter, field) for counter in counters)


@pytest.mark.parametrize(
    ("dtype", "top_k"), [(torch.float32, 4), (torch.float32, 8), (torch.bfloat16, 4), (torch.bfloat16, 8)]
)
@pytest.mark.parametrize("combine", MODES)
@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_sends_no_more_than_it_must(
    groups: GroupsBySize, size: int, combine: str, dtype: torch.dtype, top_k: int
) -> None:
    hidden, num_experts = 256, 16
    topology = make_topology(range(size), num_experts, epoch=size)
    batches = [
        make_batch(n, hidden=hidden, top_k=top_k, num_experts=num_experts, seed=n, skewed=False, dtype=dtype)
        for n in (40, 0, 1, 13)[:size]
    ]
    layer_spec = spec(hidden, top_k, num_experts, dtype)
    exchanges = installed(groups[size], topology, layer_spec, combine, "all_to_all")
    run_step(exchanges, topology, batches)
    counters = [exchange.traffic for exchange in exchanges]
    rows, pairs = remote_numbers(topology, batches)
    row_bytes = hidden * dtype.itemsize
    dispatched = total(counters, "dispatch_payload_bytes")
    combined = total(counters, "combine_payload_bytes")
    index = total(counters, "index_bytes")
    assert rows * row_bytes <= dispatched <= 1.02 * rows * row_bytes
    returned = rows if combine == "fast" else pairs
    assert returned * row_bytes <= combined <= 1.02 * returned * row_bytes
    assert 0 < index <= 0.05 * dispatched
    assert dispatched + combined + index <= total(counters, "wire_bytes") <= 1.1 * (dispatched + combined)


def test_rows_that_stay_are_not_sent(groups: GroupsBySize) -> None:
    topology = make_topology(range(2), 8, epoch=2)
    batches = []
    for rank in range(2):
        batch = make_batch(6, hidden=16, top_k=2, num_experts=8, seed=rank, skewed=False, dtype=torch.float32)
        ids_TK = batch.topk_ids_TK % 4 + 4 * rank
        batches.append(Batch(batch.hidden_TD, ids_TK, batch.topk_weights_TK))
    exchanges = installed(groups[2], topology, spec(16, 2, 8), "exact", "all_to_all")
    check(run_step(exchanges, topology, batches), batches, "exact")
    assert [exchange.traffic for exchange in exchanges] == [TrafficCounter(), TrafficCounter()]


def addresses(exchange: ExpertExchange) -> dict[str, int]:
    assert exchange.buffers is not None
    return {name: tensor.data_ptr() for name, tensor in exchange.buffers.tensors.items()}


@pytest.mark.parametrize("combine", MODES)
@pytest.mark.parametrize("dispatcher", MOVING)
def test_buffers_stay_over_a_thousand_steps_and_a_new_epoch(
    groups: GroupsBySize, dispatcher: str, combine: str
) -> None:
    layer_spec = spec(16, 2, 8)
    topology = make_topology(range(2), 8, epoch=2)
    exchanges = installed(groups[2], topology, layer_spec, combine, dispatcher, piece_tokens=4)
    before = [addresses(exchange) for exchange in exchanges]
    batches = [
        make_batch(n, hidden=16, top_k=2, num_experts=8, seed=n, skewed=False, dtype=torch.float32) for n in (3, 6)
    ]
    expected = expected_outputs(batches)

    def thousand_steps(rank: int) -> torch.Tensor:
        for _ in range(500):
            exchanges[rank].begin_step([3, 6])
            out_TD = run_layer(exchanges[rank], topology, rank, batches[rank])
            exchanges[rank].begin_step([3, 0])
            nothing = Batch(*(t[:0] for t in (batches[1].hidden_TD, batches[1].topk_ids_TK, expected[1][:, :2])))
            run_layer(exchanges[rank], topology, rank, batches[0] if rank == 0 else nothing)
        return out_TD

    for out_TD, expected_TD in zip(run_ranks(2, thousand_steps), expected, strict=True):
        torch.testing.assert_close(out_TD, expected_TD, rtol=1e-5, atol=1e-5)
    traffic = exchanges[0].traffic.wire_bytes
    assert traffic > 0

    # The next epoch: a third worker, which starts now; the two others keep their buffers.
    wider = make_topology(range(3), 8, epoch=3)
    exchanges.append(make_exchange([layer_spec], combine=combine, dispatcher=dispatcher, piece_tokens=4))
    for rank, exchange in enumerate(exchanges):
        exchange.install(wider, groups[3][rank], rank)
    batches.append(batches[0])
    check(run_step(exchanges, wider, batches), batches, combine)
    assert [addresses(exchange) for exchange in exchanges[:2]] == before
    assert exchanges[0].traffic.wire_bytes > traffic
    # And one worker alone.
    alone = make_topology(range(1), 8, epoch=1)
    single = make_exchange([layer_spec], combine=combine, dispatcher="auto")
    single.install(alone, groups[1][0], 0)
    check(run_step([single], alone, batches[:1]), batches[:1], combine)


def test_outputs_survive_the_next_piece(groups: GroupsBySize) -> None:
    """What combine returns is the caller's, not a view of a buffer that the next call overwrites."""
    topology = make_topology(range(1), 8, epoch=1)
    (exchange,) = installed(groups[1], topology, spec(16, 2, 8), "exact", "auto", piece_tokens=4)
    batches = [
        make_batch(9, hidden=16, top_k=2, num_experts=8, seed=n, skewed=False, dtype=torch.float32) for n in range(2)
    ]
    exchange.begin_step([9])
    first = run_layer(exchange, topology, 0, batches[0])
    kept = first.clone()
    run_layer(exchange, topology, 0, batches[1])
    assert torch.equal(first, kept)


def test_more_tokens_than_the_header_said_are_refused(groups: GroupsBySize) -> None:
    topology = make_topology(range(2), 8, epoch=2)
    exchange = installed(groups[2], topology, spec(16, 2, 8), "exact", "all_to_all")[0]
    batch = make_batch(5, hidden=16, top_k=2, num_experts=8, seed=0, skewed=False, dtype=torch.float32)
    exchange.begin_step([4, 4])
    with pytest.raises(ValueError, match=r"5 tokens.*allows 4"):
        exchange.dispatch(batch.hidden_TD, exchange.physical_ids(0, batch.topk_ids_TK), batch.topk_weights_TK)
    with pytest.raises(ValueError, match="from 0 to 64"):
        exchange.begin_step([65, 0])
    with pytest.raises(ValueError, match="3 entries, must be 2"):
        exchange.begin_step([1, 1, 1])


def test_what_cannot_work_is_refused_by_name(groups: GroupsBySize) -> None:
    topology = make_topology(range(2), 8, epoch=2)
    group = groups[2][0]
    layer_spec = spec(16, 2, 8)
    with pytest.raises(BackendUnavailable, match=r"loopback cannot work.*2 workers"):
        make_exchange([layer_spec], combine="exact", dispatcher="loopback").install(topology, group, 0)
    small = make_exchange([layer_spec], combine="exact", dispatcher="auto", max_workers=1)
    with pytest.raises(CapacityError, match="2 workers, the buffers hold at most 1"):
        small.install(topology, group, 0)
    exchange = make_exchange([layer_spec], combine="exact", dispatcher="auto")
    assert exchange.buffers is not None
    with pytest.raises(ValueError, match="attached already"):
        exchange.attach_buffers(exchange.buffers)
    with pytest.raises(ValueError, match="no epoch is installed"):
        exchange.begin_step([1])
    with pytest.raises(ValueError, match="group is of epoch 2"):
        exchange.install(make_topology(range(2), 8, epoch=7), group, 0)
    with pytest.raises(ValueError, match=r"1 layers of 9 experts, the model has \[8\]"):
        exchange.install(make_topology(range(2), 9, epoch=2), group, 0)
    with pytest.raises(ValueError, match="slot 1 has rank 1, its group says 0"):
        exchange.install(topology, group, 1)
    with pytest.raises(ValueError, match="attach_buffers comes before install"):
        ExpertExchange(combine="exact", dispatcher="auto", device=CPU).install(topology, group, 0)


def test_ranks_in_their_own_processes() -> None:
    """Three real processes, exact and fast, both dispatchers."""
    run_processes(3, "cpu")
