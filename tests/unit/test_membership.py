"""The pure state of members: from slots to a served epoch, and what readers see."""

import dataclasses
from typing import Any

import pytest

from moeray.comm.errors import StartupError
from moeray.comm.topology import Topology
from moeray.elastic.membership import Membership
from moeray.elastic.planner import plan_placement
from moeray.worker.config import WorkerReady


def start(num_workers: int = 3, num_experts: int = 8) -> Membership:
    return Membership.starting(num_workers=num_workers, num_layers=2, num_experts=num_experts, num_seats=num_experts)


def ready(slot: int, **changes: Any) -> WorkerReady:
    values: dict[str, Any] = {
        "slot": slot,
        "incarnation": 0,
        "pid": 100 + slot,
        "node": "127.0.0.1",
        "endpoint": f"tcp://127.0.0.1:{9000 + slot}",
        "public_key": "k" * 40,
        "dtype": "fp32",
        "weights": "fp32",
        "combine": "exact",
        "num_moe_layers": 2,
        "num_experts": 8,
        "max_model_len": 128,
        "vocab_size": 50,
        "eos_token_ids": (1,),
        "num_blocks": 20 - slot,
        "weights_bytes": 1000 + slot,
        "kv_cache_bytes": 10,
        "buffer_bytes": 5,
        "seat_bytes": 7,
        "load_s": 0.1 * (1 + slot),
        "load_peak_bytes": 2000 + slot,
        "not_finite": ("norm", f"expert.{slot}"),
    }
    return WorkerReady(**(values | changes))


def loaded(num_workers: int = 3) -> Membership:
    membership = start(num_workers)
    for slot in reversed(range(num_workers)):
        membership = membership.loading(slot).loaded(ready(slot))
    return membership


def test_a_start_ends_in_a_served_epoch_in_slot_order() -> None:
    membership = loaded().formed()
    assert membership.topology is not None
    assert [member.identity for member in membership.topology.members] == ["0.0", "1.0", "2.0"]
    assert membership.state == "starting"
    view = membership.serving("all_to_all").view()
    assert (view.state, view.epoch, view.cause) == ("serving", 0, None)
    assert [(m.slot, m.rank, m.state, m.num_experts) for m in view.members] == [
        (0, 0, "serving", 6),
        (1, 1, "serving", 6),
        (2, 2, "serving", 4),
    ]
    assert view.model is not None
    assert (view.model.kv_blocks_per_worker, view.model.weights_bytes_per_worker) == (18, 1002)
    assert view.model.load_s == pytest.approx(0.3)
    assert view.model.load_peak_bytes_per_worker == 2002
    assert view.model.not_finite == ("norm", "expert.0", "expert.1", "expert.2")
    assert view.model.dispatcher == "all_to_all"


def test_ranks_and_model_are_unknown_before_an_epoch_is_formed() -> None:
    view = loaded().view()
    assert [member.rank for member in view.members] == [None] * 3
    assert view.model is None
    assert [member.state for member in view.members] == ["joining"] * 3


def test_every_change_has_a_newer_version_and_no_change_has_none() -> None:
    membership = start()
    half = membership.loading(1, 0.5)
    assert half.version == membership.version + 1
    assert half.loading(1, 0.25) is half
    assert half.loading(1, 7.0).member(1).loaded_fraction == 1.0
    assert membership.member(1).state == "starting"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "bf16"),
        ("combine", "fast"),
        ("max_model_len", 64),
        ("eos_token_ids", (1, 2)),
        ("vocab_size", 51),
    ],
)
def test_workers_that_disagree_are_named(field: str, value: object) -> None:
    membership = loaded(2)
    other = dataclasses.replace(membership.member(1), ready=ready(1, **{field: value}))
    membership = dataclasses.replace(membership, members=(membership.member(0), other))
    with pytest.raises(StartupError, match=rf"worker 1: {field} is .*, worker 0 has"):
        membership.formed()


def test_another_checkpoint_is_refused() -> None:
    with pytest.raises(StartupError, match="worker 2: its checkpoint has num_experts 16, expected 8"):
        start().loaded(ready(2, num_experts=16))


def test_a_stale_incarnation_is_refused() -> None:
    with pytest.raises(StartupError, match="worker 0: incarnation 4 answered"):
        start().loaded(ready(0, incarnation=4))


def test_the_first_cause_stays() -> None:
    membership = start().failed("worker 1: died", dead=1).failed("worker 0: also")
    assert membership.cause == "worker 1: died"
    assert membership.member(1).state == "dead"
    assert membership.stopping().view().cause == "worker 1: died"


@pytest.mark.parametrize(("workers", "experts"), [(1, 8), (3, 8), (4, 10), (8, 8), (4, 3)])
def test_every_expert_has_a_home(workers: int, experts: int) -> None:
    view = start(workers, experts).view()
    for layer in view.placement:
        assert sorted(expert for seats in layer for expert in seats if expert >= 0) == list(range(experts))


def test_limits_are_named() -> None:
    with pytest.raises(ValueError, match="num_workers is 0"):
        start(0)
    with pytest.raises(ValueError, match="slot 9 is unknown"):
        start().loading(9)
    with pytest.raises(ValueError, match="must be loaded before"):
        start().formed()
    with pytest.raises(ValueError, match="must be formed before"):
        loaded().serving("x")


def serving(num_workers: int = 2) -> Membership:
    return loaded(num_workers).formed().serving("x")


def following(membership: Membership, slots: tuple[int, ...]) -> Topology:
    assert membership.topology is not None
    return Topology(
        epoch=membership.topology.epoch + 1,
        members=tuple(membership.joining_as(slot) for slot in slots),
        placement=plan_placement(membership.placement, slots),
    )


def test_a_joiner_has_no_rank_until_the_switch_and_then_all_changes_at_once() -> None:
    membership = serving().added(2, 5)
    before = membership.view()
    assert [(m.slot, m.rank, m.state, m.num_experts) for m in before.members][2] == (2, None, "starting", 0)
    membership = membership.loading(2).loaded(ready(2, incarnation=5))
    assert membership.view().placement == before.placement
    topology = following(membership, (0, 2))
    view = membership.marked((1,), "leaving").switched(topology).view()
    assert view.epoch == 1
    assert view.placement == topology.placement.assignments
    assert [(m.slot, m.rank, m.state, m.num_experts) for m in view.members] == [
        (0, 0, "serving", 8),
        (1, None, "leaving", 0),
        (2, 1, "serving", 8),
    ]


def test_only_who_is_out_of_the_group_can_be_removed() -> None:
    membership = serving()
    with pytest.raises(ValueError, match="slot 1 is a member of epoch 0"):
        membership.removed(1)
    switched = membership.switched(following(membership, (0,)))
    assert switched.removed(1).slots == (0,)
    assert membership.removed(7) is membership


def test_a_slot_is_taken_once() -> None:
    with pytest.raises(ValueError, match="slot 1 is taken"):
        serving().added(1, 1)


def test_a_joiner_must_agree_with_those_that_serve() -> None:
    membership = serving().added(2, 0)
    with pytest.raises(StartupError, match="worker 2: dtype is 'bf16', worker 0 has 'fp32'"):
        membership.loaded(ready(2, dtype="bf16"))


def test_marking_what_is_so_already_is_no_news() -> None:
    membership = serving()
    assert membership.marked((0, 1), "serving") is membership
    assert membership.marked((0,), "leaving").slots_in("leaving") == (0,)
