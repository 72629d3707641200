"""Buffers, records and the choice of a dispatcher: sizes, limits and words."""

import numpy as np
import pytest
import torch

from moeray.comm.buffers import (
    MAX_PIECE_TOKENS,
    MIN_PIECE_TOKENS,
    TARGET_BYTES,
    BufferCapacity,
    MoELayerSpec,
    prepare_communication_buffer_for_model,
)
from moeray.comm.combine import weighted_sum
from moeray.comm.errors import BackendUnavailable, CapacityError
from moeray.comm.pieces import StepPieces
from moeray.comm.records import RecordFormat
from moeray.comm.seats import SeatMap, count_segments
from moeray.comm.select import Choice, DispatchSizes, choose_dispatcher, expected_remote_rows

CPU = torch.device("cpu")


class Model:
    """Layers of these hidden sizes."""

    def __init__(self, *hidden_sizes: int, top_k: int = 4, dtype: torch.dtype = torch.float32) -> None:
        self.specs = [
            MoELayerSpec(layer=layer, hidden_size=hidden, top_k=top_k, num_experts=64, dtype=dtype)
            for layer, hidden in enumerate(hidden_sizes)
        ]

    def moe_layer_specs(self) -> list[MoELayerSpec]:
        return self.specs


def prepare(model: Model, max_workers: int = 4, max_tokens: int = 512) -> tuple[int, int, str]:
    capacity = BufferCapacity(max_workers=max_workers, max_tokens=max_tokens)
    buffers = prepare_communication_buffer_for_model(model, capacity, CPU)
    return buffers.nbytes, buffers.piece_tokens, buffers.describe()


def test_layers_share_one_set_sized_for_the_largest() -> None:
    one, _, _ = prepare(Model(256))
    assert prepare(Model(*[256] * 12))[0] == one
    assert prepare(Model(64, 256, 128))[0] == one
    assert prepare(Model(512))[0] > one


def test_the_description_says_what_was_allocated() -> None:
    nbytes, piece, text = prepare(Model(1024), max_tokens=2048)
    assert piece == MAX_PIECE_TOKENS
    for part in (f"{nbytes / (1 << 20):.1f} MiB", "4 workers", "pieces of 512 tokens", "4 pieces", "records"):
        assert part in text


def test_pieces_shrink_until_the_memory_is_reasonable() -> None:
    nbytes, piece, _ = prepare(Model(7168, top_k=8, dtype=torch.bfloat16), max_workers=32)
    assert MIN_PIECE_TOKENS <= piece < MAX_PIECE_TOKENS
    assert nbytes <= TARGET_BYTES * 1.01
    assert prepare(Model(64), max_tokens=10)[1] == 10


def test_models_without_experts_and_bad_sizes_are_refused() -> None:
    with pytest.raises(CapacityError, match="no MoE layer"):
        prepare(Model())
    with pytest.raises(ValueError, match="max_workers is 0"):
        BufferCapacity(max_workers=0, max_tokens=1)
    with pytest.raises(ValueError, match="num_experts is 2, must be at least 4"):
        MoELayerSpec(layer=0, hidden_size=8, top_k=4, num_experts=2, dtype=torch.float32)
    capacity = BufferCapacity(max_workers=1, max_tokens=1)
    buffers = prepare_communication_buffer_for_model(Model(8), capacity, CPU)
    with pytest.raises(CapacityError, match="buffer sums has"):
        buffers.view("sums", 99, 8, torch.float32)
    with pytest.raises(CapacityError, match="do not fit"):
        RecordFormat.widest(8000, 4, torch.float32).views(buffers.records, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("seat_dtype", [torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("carries_weights", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_fields_of_a_record_do_not_overlap(
    dtype: torch.dtype, seat_dtype: torch.dtype, carries_weights: bool, top_k: int
) -> None:
    record = RecordFormat(
        hidden_size=13, top_k=top_k, dtype=dtype, seat_dtype=seat_dtype, carries_weights=carries_weights
    )
    buffer = torch.zeros(5 * record.num_bytes, dtype=torch.uint8)
    views = record.views(buffer, 5)
    hidden = torch.arange(65.0).view(5, 13).to(dtype)
    weights = torch.rand(5, top_k).to(record.weight_dtype)
    seats = torch.arange(5 * top_k, dtype=seat_dtype).view(5, top_k)
    views.hidden_ND.copy_(hidden)
    views.seats_NK.copy_(seats)
    if carries_weights:
        views.weights_NK.copy_(weights)
        assert torch.equal(views.weights_NK, weights)
    else:
        assert views.weights_NK.shape == (5, 0)
    assert torch.equal(views.hidden_ND.float(), hidden.float())
    assert torch.equal(views.seats_NK, seats)
    assert record.num_bytes % 16 == 0
    assert record.num_bytes <= RecordFormat.widest(13, top_k, dtype).num_bytes


def test_pieces_cover_the_tokens_and_agree_between_ranks() -> None:
    capacity = BufferCapacity(max_workers=3, max_tokens=100)
    buffers = prepare_communication_buffer_for_model(Model(8), capacity, CPU)
    buffers.piece_tokens = 16
    tokens = [40, 0, 17]
    ranks = [StepPieces(buffers, rank, 3) for rank in range(3)]
    for rank, steps in enumerate(ranks):
        steps.begin_step(tokens)
        slices = steps.slices(tokens[rank])
        assert [len(range(*piece.indices(tokens[rank]))) for piece in slices] == [
            [16, 16, 8],
            [0, 0, 0],
            [16, 1, 0],
        ][rank]
        taken = [steps.take(0) for _ in range(4)]
        assert taken == [[16, 0, 16], [16, 0, 1], [8, 0, 0], [16, 0, 16]]
    ranks[0].begin_step([0, 0, 0])
    assert ranks[0].slices(0) == [slice(0, 0)]


def test_pair_plans_put_every_row_where_it_comes_home() -> None:
    seats = SeatMap((5, 2, 9), 4, rank=1, device=CPU, own_first=True)
    ids = torch.tensor([[20, 8], [36, 11], [9, 39]])
    plan = seats.plan_pairs(ids)
    assert seats.peers == [1, 0, 2]
    assert plan.pairs_per_peer == [3, 1, 2]
    assert seats.by_rank(plan.pairs_per_peer) == [1, 3, 2]
    assert plan.positions_KT.tolist() == [[3, 4, 2], [0, 1, 5]]
    rows = seats.plan_rows(plan)
    assert rows.tokens_N.tolist() == [0, 1, 2]
    assert rows.rows_per_peer == [0, 1, 2]
    assert rows.seats_NK.tolist() == [[0, -1], [0, -1], [-1, 3]]
    assert rows.own_seats_TK.tolist() == [[-1, 0], [-1, 3], [1, -1]]
    with pytest.raises(ValueError, match="no members"):
        seats.plan_pairs(torch.tensor([[0, 8]]))


def test_flags_are_counted_by_segment() -> None:
    flags = np.array([True, False, True, True, False])
    assert count_segments(flags, [0, 2, 0, 3, 0]) == [0, 1, 0, 2, 0]
    assert count_segments(flags[:0], [0, 0]) == [0, 0]


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_weighted_sums_do_not_depend_on_where_rows_lie(top_k: int) -> None:
    generator = torch.Generator().manual_seed(top_k)
    rows = torch.randn(7 * top_k, 19, generator=generator)
    weights = torch.rand(7, top_k, generator=generator)
    order = torch.randperm(7 * top_k, generator=generator)
    scratch = torch.empty(7 * top_k, 19)
    plain = weighted_sum(rows, None, weights, scratch, scratch).clone()
    positions_KT = order.argsort().view(7, top_k).t().contiguous()
    moved = weighted_sum(rows[order], positions_KT, weights, scratch, scratch)
    assert torch.equal(plain, moved)
    expected = rows.view(7, top_k, 19)[:, 0] * weights[:, :1]
    for k in range(1, top_k):
        expected = expected + rows.view(7, top_k, 19)[:, k] * weights[:, k : k + 1]
    assert torch.equal(plain, expected)


def sizes(num_workers: int, top_k: int = 4, combine: str = "exact", backend: str = "gloo") -> DispatchSizes:
    return DispatchSizes(num_workers=num_workers, top_k=top_k, hidden_size=64, combine=combine, backend=backend)


def test_the_choice_goes_by_sizes_and_says_why() -> None:
    def chosen(given: DispatchSizes) -> str:
        choice = choose_dispatcher("auto", given)
        assert choice.reason
        return choice.name

    assert chosen(sizes(1)) == "loopback"
    assert chosen(sizes(2)) == "all_to_all"
    assert chosen(sizes(2, top_k=8, combine="fast", backend="nccl")) == "all_gather"
    assert chosen(sizes(16, top_k=8, combine="fast", backend="nccl")) == "all_to_all"
    assert chosen(sizes(2, top_k=8, combine="exact", backend="nccl")) == "all_to_all"


def test_an_explicit_choice_is_kept_or_refused() -> None:
    assert choose_dispatcher("all_gather", sizes(3)).name == "all_gather"
    for name, workers in (("loopback", 2), ("all_gather", 1), ("all_to_all", 1)):
        with pytest.raises(BackendUnavailable, match=name):
            choose_dispatcher(name, sizes(workers))
    with pytest.raises(ValueError, match="'warp', must be one of auto, loopback"):
        choose_dispatcher("warp", sizes(2))
    assert isinstance(choose_dispatcher("loopback", sizes(1)), Choice)


def test_expected_rows_match_what_was_measured() -> None:
    assert expected_remote_rows(4, 8) == pytest.approx(2.70, abs=0.05)
    assert expected_remote_rows(4, 1) == pytest.approx(0.75)
