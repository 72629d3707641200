"""Reconfigurations against workers made of coroutines: good ends, every failure before the switch, and after it."""

import asyncio
import re
from typing import Any

import pytest

from moeray.comm.errors import GroupError, GroupTimeout, OperationRefused, StartupError
from moeray.elastic.view import PHASES, OperationView, ScaleRequest
from tests.support.deployment import SHORT_S, Deployment, run
from tests.support.fake_cluster import FakeProcess, Fault, die, error, hang

GOOD_END = ["planned", "provisioning", "connecting", "transferring", "ready", "switched", "retired"]


def phases(view: OperationView) -> list[str]:
    return [phase.name for phase in view.phases]


def test_a_scale_up_admits_joiners_last() -> None:
    async def body(deployment: Deployment) -> None:
        view = await deployment.scale(4)
        assert (view.outcome, view.reason, view.phase) == ("done", None, "retired")
        assert phases(view) == GOOD_END
        assert (view.from_epoch, view.to_epoch, view.joiners, view.leavers) == (0, 1, (2, 3), ())
        assert (view.moved_experts, view.moved_bytes) == (8, 0)  # the fake's joiners read nothing
        assert all(phase.seconds is not None and phase.seconds >= 0 for phase in view.phases)
        await deployment.settled()
        assert deployment.serving() == [0, 1, 2, 3]
        names = [name for slot, name in deployment.cluster.calls if slot == 2]
        assert names == ["created", "load", "connect", "transfer", "commit"]

    run(body)


def test_a_scale_down_hands_over_before_the_switch_and_ends_the_leaver() -> None:
    async def body(deployment: Deployment) -> None:
        view = await deployment.scale(1)
        assert (view.outcome, view.leavers, view.kv_blocks) == ("done", (1,), 7)
        assert view.moved_bytes == 10 * view.moved_experts == 80
        await deployment.settled()
        names = [name for slot, name in deployment.cluster.calls if slot == 1]
        assert names[-4:] == ["hand_over", "commit", "stop", "kill"]
        assert "connect" not in names

    run(body)


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_any_slot_may_retire_and_its_number_is_used_again_with_a_new_incarnation(slot: int) -> None:
    async def body(deployment: Deployment) -> None:
        assert (await deployment.scale(retire=(slot,))).outcome == "done"
        await deployment.settled()
        assert deployment.serving() == [other for other in range(3) if other != slot]
        view = await deployment.scale(3)
        assert view.joiners == (slot,)
        await deployment.settled()
        assert {m.slot: m.incarnation for m in deployment.view().members} == {
            other: int(other == slot) for other in range(3)
        }

    run(body, num_workers=3)


def test_one_may_leave_while_another_joins() -> None:
    async def body(deployment: Deployment) -> None:
        view = await deployment.scale(2, retire=(0,))
        assert (view.outcome, view.joiners, view.leavers, view.targets) == ("done", (2,), (0,), (1, 2))
        await deployment.settled()

    run(body)


@pytest.mark.parametrize(("num_experts", "steps"), [(8, (3, 5, 7, 1, 7, 2)), (60, (7, 1, 4, 7))])
def test_any_number_of_experts_on_any_number_of_workers(num_experts: int, steps: tuple[int, ...]) -> None:
    async def body(deployment: Deployment) -> None:
        for step in steps:
            assert (await deployment.scale(step)).outcome == "done"
            await deployment.settled()
            for layer in deployment.view().placement:
                counts = [sum(expert >= 0 for expert in seats) for seats in layer]
                assert max(counts) - min(counts) <= 1
                assert sorted(e for seats in layer for e in seats if e >= 0) == list(range(num_experts))

    run(body, num_experts=num_experts, max_workers=7)


def test_a_death_that_is_heard_of_after_its_peers_error_is_the_reason() -> None:
    async def body(deployment: Deployment) -> None:
        victim = deployment.cluster.processes[0]

        async def miss_the_victim(_: FakeProcess) -> None:
            asyncio.get_running_loop().call_later(0.1, victim.died.set)
            raise GroupError("the group could not be built: connection closed")

        deployment.cluster.fail(0, "connect", hang)
        deployment.cluster.fail(1, "connect", miss_the_victim)
        view = await deployment.scale(4)
        assert view.outcome == "rolled_back"
        assert view.reason == "worker 0: its process died"

    run(body, num_workers=3)


def test_an_error_without_a_death_is_the_reason() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(1, "connect", error(GroupError("the group could not be built")))
        view = await deployment.scale(4)
        assert (view.outcome, view.reason) == ("rolled_back", "worker 1: the group could not be built")

    run(body, num_workers=3)


def test_the_same_size_is_done_at_once() -> None:
    async def body(deployment: Deployment) -> None:
        calls = len(deployment.cluster.calls)
        view = await deployment.manager.scale(ScaleRequest(workers=2))
        assert (view.outcome, view.from_epoch, view.to_epoch) == ("done", 0, 0)
        assert len(deployment.cluster.calls) == calls

    run(body)


def test_one_at_a_time_and_a_repeated_id_gets_the_first() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(2, "load", hang)
        first = await deployment.manager.scale(ScaleRequest(workers=3, operation_id="first"))
        assert (first.outcome, first.operation_id) == (None, "first")
        with pytest.raises(OperationRefused, match="operation first is") as refused:
            await deployment.manager.scale(ScaleRequest(workers=1))
        assert refused.value.operation_id == "first"
        again = await deployment.manager.scale(ScaleRequest(workers=3, operation_id="first"))
        assert again.operation_id == "first"
        assert (await deployment.ended("first")).outcome == "rolled_back"
        deployment.cluster.heal()
        assert (await deployment.scale(3, operation_id="first")).outcome == "rolled_back"
        assert (await deployment.scale(3, operation_id="second")).outcome == "done"
        assert [view.operation_id for view in await deployment.manager.operations()] == ["first", "second"]

    run(body)


def test_two_at_once_start_one() -> None:
    async def body(deployment: Deployment) -> None:
        results = await asyncio.gather(
            *(deployment.manager.scale(ScaleRequest(workers=n)) for n in (3, 4)), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, OperationRefused)]
        begun = [result for result in results if isinstance(result, OperationView)]
        assert (len(refused), len(begun)) == (1, 1)
        assert refused[0].operation_id == begun[0].operation_id
        await deployment.ended(begun[0].operation_id)

    run(body)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workers": 0}, "workers is 0, must be from 2 to 4 workers"),
        ({"workers": 1}, "workers is 1, must be from 2 to 4 workers"),
        ({"workers": 5}, "workers is 5, must be from 2 to 4 workers"),
        ({"workers": "3"}, "workers is '3', must be an integer"),
        ({"workers": True}, "workers is True, must be an integer"),
        ({"retire": (7,)}, r"retire names slot 7, must be of the serving slots \[0, 1, 2\]"),
        ({"retire": (0, 0)}, "must name each slot once"),
        ({"retire": (0, 1)}, "which leaves 1, must be from 2 to 4 workers"),
        ({"workers": 4, "retire": (0, 1)}, "3 would join the 3 that serve .* must be at most 4 at a time"),
        ({}, "workers or retire must be given"),
        ({"workers": 2, "deadline_s": 0.0}, "deadline_s is 0.0, must be more than 0"),
        ({"workers": 2, "operation_id": "x" * 200}, "must have from 1 to 128"),
        ({"workers": 4}, "4 workers do not fit: 1 more workers need 1 seats, the cluster has 0 seats free"),
    ],
)
def test_limits_are_in_the_error_and_nothing_changes(fields: dict[str, Any], message: str) -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.room = 0
        before, calls = deployment.view(), len(deployment.cluster.calls)
        with pytest.raises(ValueError, match=message):
            await deployment.manager.scale(ScaleRequest(**fields))
        assert deployment.view() == before
        assert len(deployment.cluster.calls) == calls
        assert await deployment.manager.operations() == ()

    run(body, num_workers=3, min_workers=2)


FAILURES = {
    "hang": (hang, "did not .* within"),
    "die": (die, "its process died"),
    "error": (error(StartupError("no luck")), "no luck"),
}


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("call", ["created", "load", "connect", "transfer"])
def test_a_failing_joiner_leaves_no_trace(call: str, how: str) -> None:
    fault, message = FAILURES[how]

    async def body(deployment: Deployment) -> None:
        before = deployment.view()
        deployment.cluster.fail(3, call, fault)
        view = await deployment.scale(4)
        assert view.outcome == view.phase == "rolled_back"
        assert view.reason is not None
        assert view.reason.startswith("worker 3: ")
        assert re.search(message, view.reason)
        assert phases(view)[:2] == ["planned", "provisioning"]
        await deployment.settled()
        after = deployment.view()
        assert (after.epoch, after.placement, after.members) == (before.epoch, before.placement, before.members)
        deployment.cluster.heal()
        view = await deployment.scale(4)
        assert (view.outcome, view.to_epoch) == ("done", 2)
        await deployment.settled()

    run(body)


def test_a_joiner_that_dies_while_others_are_waited_for_is_noticed() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(2, "load", hang)
        operation = await deployment.manager.scale(ScaleRequest(workers=4))
        await deployment.called(2, "load")
        await deployment.until(lambda v: any(m.slot == 3 and m.state == "joining" for m in v.members))
        deployment.cluster.alive[3].died.set()
        view = await deployment.ended(operation.operation_id)
        assert (view.outcome, view.reason) == ("rolled_back", "worker 3: its process died")
        await deployment.settled()

    run(body)


@pytest.mark.parametrize("fault", [hang, error(GroupTimeout("slot 2 did not answer", slots=(2,)))])
@pytest.mark.parametrize(("slot", "call"), [(0, "host_store"), (0, "connect"), (1, "connect")])
def test_a_failing_survivor_goes_on_serving(slot: int, call: str, fault: Fault) -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(slot, call, fault)
        view = await deployment.scale(3)
        assert view.outcome == "rolled_back"
        assert view.reason is not None
        assert f"worker {slot}: " in view.reason
        await deployment.settled()
        deployment.cluster.heal()
        assert (await deployment.scale(4)).outcome == "done"
        await deployment.settled()

    run(body)


def test_a_survivor_without_a_seat_to_fill_is_not_asked_to() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(1, "transfer", hang)
        assert (await deployment.scale(3)).outcome == "done"

    run(body)


@pytest.mark.parametrize(("slot", "call"), [(0, "transfer"), (1, "hand_over")])
@pytest.mark.parametrize("fault", [hang, error(StartupError("no luck"))])
def test_a_scale_down_that_fails_clears_the_leaving_flag(slot: int, call: str, fault: Fault) -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(slot, call, fault)
        operation = await deployment.manager.scale(ScaleRequest(workers=1))
        await deployment.until(lambda view: view.members[1].state == "leaving")
        view = await deployment.ended(operation.operation_id)
        assert view.outcome == "rolled_back"
        await deployment.settled()
        assert deployment.serving() == [0, 1]
        deployment.cluster.heal()
        assert (await deployment.scale(1)).outcome == "done"

    run(body)


def test_members_that_prepared_different_things_do_not_switch() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.digests[2] = "other"
        view = await deployment.scale(3)
        assert view.outcome == "rolled_back"
        assert view.reason is not None
        assert view.reason.startswith("worker 2: it prepared 'other', worker 0 '")
        await deployment.settled()

    run(body)


def test_the_callers_deadline_is_named() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(2, "load", hang)
        view = await deployment.scale(3, deadline_s=0.05)
        assert view.reason == "worker 2: did not start within the operation's deadline of 0.05 s"
        assert view.deadline_s == 0.05
        await deployment.settled()

    run(body)


def test_a_rollback_ends_though_a_survivor_does_not_answer() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(2, "transfer", hang)
        deployment.cluster.fail(1, "discard", error(StartupError("busy")))
        view = await deployment.scale(3)
        assert view.outcome == "rolled_back"
        assert set(deployment.cluster.alive) == {0, 1}
        assert deployment.cluster.alive[1].prepared is not None
        view = await deployment.scale(3)
        assert view.reason == "worker 1: busy"
        deployment.cluster.heal()
        assert (await deployment.scale(3)).outcome == "done"
        await deployment.settled()

    run(body)


def test_a_discard_that_fails_once_is_said_again() -> None:
    async def body(deployment: Deployment) -> None:
        async def once(_: object) -> None:
            deployment.cluster.heal()
            raise StartupError("busy")

        deployment.cluster.fail(2, "transfer", hang)
        deployment.cluster.fail(1, "discard", once)
        assert (await deployment.scale(3)).outcome == "rolled_back"
        await deployment.settled()

    run(body)


def test_a_death_in_the_group_before_the_switch_rolls_back_and_is_repaired() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(2, "load", hang)
        operation = await deployment.manager.scale(ScaleRequest(workers=3))
        await deployment.called(2, "load")
        deployment.cluster.alive[1].died.set()
        view = await deployment.ended(operation.operation_id)
        assert (view.outcome, view.reason) == ("rolled_back", "worker 1: its process died")
        await deployment.until(lambda v: v.epoch > 1 and len(v.members) == 2 and v.members[1].state == "serving")
        await deployment.settled()

    run(body)


def test_after_the_first_commit_there_is_no_way_back_but_another_group() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(2, "commit", hang)
        view = await deployment.scale(3)
        assert view.outcome == "failed"
        assert view.reason is not None
        assert f"workers 0, 1, 2 did not switch within {SHORT_S:g} s" in view.reason
        assert not any(name == "discard" for _, name in deployment.cluster.calls)
        deployment.cluster.heal()
        await deployment.until(lambda v: v.epoch > 1)
        await deployment.settled()
        assert deployment.serving() == [0, 1]

    run(body)


def test_a_commit_that_got_lost_is_said_again() -> None:
    async def body(deployment: Deployment) -> None:
        async def once(_: object) -> None:
            deployment.cluster.heal()
            raise StartupError("the answer got lost")

        deployment.cluster.fail(1, "commit", once)
        view = await deployment.scale(3)
        assert view.outcome == "done"
        await deployment.settled()

    run(body)


def test_a_leaver_that_hangs_after_the_switch_is_killed() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(1, "stop", hang)
        view = await deployment.scale(1)
        assert view.outcome == "done"
        await deployment.settled()

    run(body)


def test_no_reader_ever_sees_two_epochs_at_once() -> None:
    """`Deployment.until` checks each view it sees; here all views of several operations are seen."""

    async def body(deployment: Deployment) -> None:
        for step in (4, 1, 3, 2, 4):
            assert (await deployment.scale(step)).outcome == "done"
        assert deployment.view().epoch == 5

    run(body)


def test_the_history_is_bounded() -> None:
    async def body(deployment: Deployment) -> None:
        for index in range(5):
            await deployment.scale(1 + index % 2, operation_id=str(index))
        assert [view.operation_id for view in await deployment.manager.operations()] == ["2", "3", "4"]
        assert await deployment.manager.operation("0") is None
        with pytest.raises(ValueError, match="operation '0' is unknown"):
            await deployment.manager.wait_operation("0", 1.0)

    run(body, history_limit=3)


def test_nothing_is_scaled_before_it_serves() -> None:
    async def body() -> None:
        deployment = Deployment()
        with pytest.raises(OperationRefused, match="the deployment is starting"):
            await deployment.manager.scale(ScaleRequest(workers=2))

    asyncio.run(body())


def test_phases_are_those_that_are_documented() -> None:
    assert tuple(GOOD_END) == tuple(phase for phase in PHASES[:-1] if phase != "halting")
