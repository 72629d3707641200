"""Topology: members and placement agree, and ranks are found by slot."""

import dataclasses

import pytest

from moeray.comm.placement import ExpertPlacement
from moeray.comm.topology import Member, Topology


def member(slot: int, incarnation: int = 0) -> Member:
    return Member(slot=slot, incarnation=incarnation, node="n", endpoint="tcp://n:1", public_key="key")


def topology(*slots: int, epoch: int = 1, incarnation: int = 0) -> Topology:
    placement = ExpertPlacement.contiguous(num_layers=2, num_experts=8, slots=slots, num_seats=8)
    return Topology(epoch=epoch, members=tuple(member(slot, incarnation) for slot in slots), placement=placement)


def test_ranks_are_positions_and_slots_are_stable() -> None:
    wide = topology(4, 0, 7)
    assert (wide.size, wide.slots) == (3, (4, 0, 7))
    assert [wide.rank_of(slot) for slot in (4, 0, 7)] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"slot 1 .*epoch 1.*\(4, 0, 7\)"):
        wide.rank_of(1)


def test_members_must_be_those_of_the_placement() -> None:
    with pytest.raises(ValueError, match=r"\(1, 0\).*\(0, 1\)"):
        Topology(epoch=1, members=(member(1), member(0)), placement=topology(0, 1).placement)
    with pytest.raises(ValueError, match="epoch is -1"):
        topology(0, epoch=-1)


def test_the_identity_tells_incarnations_apart() -> None:
    assert member(3, incarnation=2).identity == "3.2"


def test_equal_topologies_share_a_digest_and_others_do_not() -> None:
    digests = [
        topology(0, 1).digest(),
        topology(1, 0).digest(),
        topology(0, 1, 2).digest(),
        topology(0, 1, epoch=2).digest(),
        topology(0, 1, incarnation=1).digest(),
    ]
    assert digests[0] == topology(0, 1).digest()
    assert len(set(digests)) == len(digests)


def test_a_topology_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        topology(0).epoch = 2  # type: ignore[misc]
