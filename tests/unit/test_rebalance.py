"""Experts are exchanged between workers made of coroutines: by what all have counted, or not at all."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from moeray.comm.errors import ControlTimeout, MoerayError, OperationRefused, StartupError
from moeray.comm.messages import ExpertCounts
from moeray.comm.placement import ExpertPlacement
from moeray.elastic.balancer import balancedness
from moeray.elastic.view import OperationView, RebalanceRequest, ScaleRequest
from tests.support.deployment import SHORT_S, WAIT_S, Deployment, run
from tests.support.fake_cluster import NUM_LAYERS, FakeProcess, die, error, hang

SKEWED: ExpertCounts = ((80, 70, 60, 50, 4, 3, 2, 1), (10,) * 8)
PHASES_BEFORE = ("provisioning", "connecting", "transferring", "ready")


def run_skewed(body: Callable[[Deployment], Awaitable[None]], **options: Any) -> None:
    """As `run`; slot 0 has counted a load of which its own experts had the most."""

    async def skewed(deployment: Deployment) -> None:
        deployment.cluster.loads = {0: SKEWED}
        await body(deployment)

    run(skewed, **options)


def placement(deployment: Deployment) -> ExpertPlacement:
    return deployment.manager._board.current.placement


async def rebalanced(deployment: Deployment) -> OperationView:
    """One more; it must work, and leave nothing to do."""
    view = await deployment.rebalance()
    assert view.outcome == "done", view
    await deployment.settled()
    assert min(balancedness(placement(deployment), SKEWED)) > 0.95
    assert (await deployment.rebalance()).reason == "nothing to do: no layer would gain enough"
    return view


def test_experts_move_to_where_there_is_less_to_do(caplog: pytest.LogCaptureFixture) -> None:
    async def body(deployment: Deployment) -> None:
        before = placement(deployment)
        with caplog.at_level(logging.INFO, "moeray.elastic.proposals"):
            view = await deployment.rebalance(deadline_s=7.0)
        assert (view.kind, view.outcome, view.requested, view.deadline_s) == ("rebalance", "done", {}, 7.0)
        assert [phase.name for phase in view.phases] == ["planned", *PHASES_BEFORE, "switched", "retired"]
        assert (view.from_epoch, view.to_epoch) == (0, 1)
        assert (view.targets, view.joiners, view.leavers) == ((0, 1), (), ())
        assert view.moved_bytes == 10 * view.moved_experts > 0
        await deployment.settled()
        after = placement(deployment)
        assert balancedness(after, SKEWED)[0] > 0.95 > balancedness(before, SKEWED)[0]
        assert after.assignments[1] == before.assignments[1], "equal loads move nothing"
        (line,) = [record.getMessage() for record in caplog.records]
        assert "balancedness is 0.760 in the mean and 0.519 at least, planned are" in line

    run_skewed(body)


def test_what_all_have_counted_is_added_up() -> None:
    async def body(deployment: Deployment) -> None:
        mirrored = tuple(tuple(reversed(row)) for row in SKEWED)
        deployment.cluster.loads = {0: SKEWED, 1: mirrored, 2: ((0,) * 8,) * NUM_LAYERS}
        calls = len(deployment.cluster.calls)
        view = await deployment.rebalance()
        assert (view.outcome, view.moved_experts) == ("done", 0)
        assert (view.from_epoch, view.to_epoch, view.phase) == (0, 0, "planned")
        asked = [call for call in deployment.cluster.calls[calls:] if call[1] != "tick"]
        assert sorted(asked) == [(0, "expert_load"), (1, "expert_load")]

    run_skewed(body)


def test_a_repeated_id_gets_the_first_and_asks_nobody() -> None:
    async def body(deployment: Deployment) -> None:
        first = await deployment.rebalance(operation_id="it")
        deployment.cluster.calls.clear()
        deployment.cluster.loads = {0: tuple(tuple(reversed(row)) for row in SKEWED)}
        assert await deployment.manager.rebalance(RebalanceRequest(operation_id="it")) == first
        assert await deployment.manager.scale(ScaleRequest(workers=1, operation_id="it")) == first
        assert "expert_load" not in [name for _, name in deployment.cluster.calls]

    run_skewed(body)


def test_one_operation_at_a_time() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(2, "load", hang)
        await deployment.manager.scale(ScaleRequest(workers=3, operation_id="scale"))
        calls = deployment.cluster.calls.count((0, "expert_load"))
        with pytest.raises(OperationRefused, match="operation scale is") as refused:
            await deployment.manager.rebalance(RebalanceRequest())
        assert refused.value.operation_id == "scale"
        assert deployment.cluster.calls.count((0, "expert_load")) == calls
        assert (await deployment.ended("scale")).outcome == "rolled_back"
        deployment.cluster.heal()
        deployment.cluster.fail(0, "connect", hang)
        running = await deployment.manager.rebalance(RebalanceRequest())
        with pytest.raises(OperationRefused, match=f"operation {running.operation_id} is"):
            await deployment.manager.scale(ScaleRequest(workers=3))
        assert (await deployment.ended(running.operation_id)).outcome == "rolled_back"

    run_skewed(body)


def test_two_at_once_start_one() -> None:
    async def body(deployment: Deployment) -> None:
        results = await asyncio.gather(
            *(deployment.manager.rebalance(RebalanceRequest()) for _ in range(2)), return_exceptions=True
        )
        assert sorted(type(result).__name__ for result in results) == ["OperationRefused", "OperationView"]
        begun = next(result for result in results if isinstance(result, OperationView))
        assert (await deployment.ended(begun.operation_id)).outcome == "done"

    run_skewed(body)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"deadline_s": -1.0}, "deadline_s is -1.0"), ({"operation_id": ""}, "operation_id has 0 characters")],
)
def test_values_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    async def body(deployment: Deployment) -> None:
        with pytest.raises(ValueError, match=message):
            await deployment.manager.rebalance(RebalanceRequest(**fields))
        assert await deployment.manager.operations() == ()

    run_skewed(body)


def test_nothing_begins_before_it_serves_or_while_it_is_repaired() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(1, "halt", hang)
        deployment.cluster.alive[0].died.set()
        await deployment.called(1, "halt")
        with pytest.raises(OperationRefused, match=r"^operation repair-.* is halting"):
            await deployment.manager.rebalance(RebalanceRequest())
        deployment.cluster.heal()
        await deployment.until(lambda view: view.epoch > 1 and len(view.members) == 3)
        await deployment.settled()

    run_skewed(body, num_workers=3)

    async def starting() -> None:
        with pytest.raises(OperationRefused, match="the deployment is starting, it must serve"):
            await Deployment().manager.rebalance(RebalanceRequest())

    asyncio.run(starting())


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (hang, ControlTimeout, f"worker 1: did not tell its load within {SHORT_S:g} s"),
        (error(StartupError("no luck")), MoerayError, "worker 1: no luck"),
    ],
)
def test_a_member_that_does_not_tell_is_named_and_nothing_is_begun(fault: Any, kind: type, message: str) -> None:
    async def body(deployment: Deployment) -> None:
        was = deployment.view()
        deployment.cluster.fail(1, "expert_load", fault)
        with pytest.raises(kind, match=message):
            await deployment.manager.rebalance(RebalanceRequest())
        assert (deployment.view(), await deployment.manager.operations()) == (was, ())
        deployment.cluster.heal()
        assert (await rebalanced(deployment)).to_epoch == 1

    run_skewed(body)


def test_a_silent_member_does_not_hold_a_repair_up() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(1, "expert_load", hang)
        asked = asyncio.create_task(deployment.manager.rebalance(RebalanceRequest()))
        await deployment.called(1, "expert_load")
        deployment.cluster.alive[2].died.set()
        await deployment.until(lambda view: view.epoch > 0)
        assert not asked.done()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        deployment.cluster.heal()
        await deployment.settled()

    run_skewed(body, num_workers=3, deadline_s=WAIT_S)


def test_a_member_that_dies_when_asked_is_repaired() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(1, "expert_load", die)
        with pytest.raises(MoerayError, match="worker 1: its process died"):
            await deployment.manager.rebalance(RebalanceRequest())
        deployment.cluster.heal()
        await deployment.until(lambda view: view.epoch > 1 and len(view.members) == 2)
        await deployment.settled()
        await rebalanced(deployment)

    run_skewed(body)


@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize("call", ["connect", "transfer"])
def test_a_death_before_the_switch_is_rolled_back_and_repaired(call: str, slot: int) -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.loads = {0: ((90, 10, 10, 90, 10, 10, 50, 1, 1), (9, 9, 1, 9, 9, 1, 50, 50, 50))}
        deployment.cluster.fail(slot, call, die)
        view = await deployment.rebalance()
        assert (view.outcome, view.reason) == ("rolled_back", f"worker {slot}: its process died")
        deployment.cluster.heal()
        await deployment.until(lambda view: view.epoch > 1 and len(view.members) == 3)
        await deployment.settled()
        kinds = [(o.kind, o.outcome) for o in await deployment.manager.operations()]
        assert kinds == [("rebalance", "rolled_back"), ("repair", "done"), ("replace", "done")]
        assert (await deployment.rebalance()).outcome == "done"
        await deployment.settled()

    run(body, num_workers=3, num_experts=9)


@pytest.mark.parametrize("reached", [0, 1])
def test_a_death_at_the_switch_is_repaired_from_either_epoch(reached: int) -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(1 - reached, "commit", hang)
        begun = await deployment.manager.rebalance(RebalanceRequest())
        await deployment.committed(reached, begun.to_epoch)
        deployment.cluster.alive[1 - reached].died.set()
        assert (await deployment.ended(begun.operation_id)).outcome == "failed"
        deployment.cluster.heal()
        await deployment.until(lambda view: view.epoch > 1 and len(view.members) == 2)
        await deployment.settled()
        await rebalanced(deployment)

    run_skewed(body)


@pytest.mark.parametrize("call", ["host_store", "connect", "transfer"])
@pytest.mark.parametrize("fault", [hang, error(StartupError("no luck"))])
def test_a_member_that_fails_costs_nothing(call: str, fault: Any) -> None:
    async def body(deployment: Deployment) -> None:
        was = deployment.view()
        deployment.cluster.fail(0, call, fault)
        view = await deployment.rebalance()
        assert view.outcome == "rolled_back"
        assert view.reason is not None
        assert view.reason.startswith("worker 0: ")
        await deployment.settled()
        now = deployment.view()
        assert (now.epoch, now.members, now.placement) == (was.epoch, was.members, was.placement)
        deployment.cluster.heal()
        assert (await rebalanced(deployment)).to_epoch == 2

    run_skewed(body)


async def killed_at(deployment: Deployment, phase: str, *, before: bool) -> None:
    """Kill the controller when it writes that the rebalance `it` has reached the phase."""
    deployment.store.hold_at(phase, before=before)
    begun = asyncio.create_task(deployment.manager.rebalance(RebalanceRequest(operation_id="it")))
    async with asyncio.timeout(WAIT_S):
        await deployment.store.held.wait()
    await deployment.restart()
    await asyncio.gather(begun, return_exceptions=True)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("phase", ["planned", *PHASES_BEFORE, "switched", "retired"])
def test_a_restarted_controller_finishes_it_or_takes_it_back(phase: str, before: bool) -> None:
    async def body(deployment: Deployment) -> None:
        was = deployment.view()
        await killed_at(deployment, phase, before=before)
        if phase == "planned" and before:
            assert await deployment.manager.operation("it") is None
        else:
            view = await deployment.ended("it")
            assert (view.kind, view.outcome) == (
                "rebalance",
                "done" if phase in ("switched", "retired") else "rolled_back",
            )
        await deployment.settled()
        if phase in ("switched", "retired"):
            assert deployment.view().epoch == 1
            assert (await deployment.rebalance()).from_epoch == 1
        else:
            assert (deployment.view().epoch, deployment.view().placement) == (was.epoch, was.placement)
            await rebalanced(deployment)

    run_skewed(body)


def test_the_wanted_size_stays_and_so_does_the_wish_to_replace() -> None:
    """A rebalance makes a new epoch while the lost worker's replacement has yet to come."""

    async def body(deployment: Deployment) -> None:
        async def fail(_: FakeProcess) -> None:
            raise StartupError("no luck")

        deployment.cluster.fail(2, "load", fail)
        deployment.cluster.alive[2].died.set()
        await deployment.until(lambda view: view.epoch > 0 and view.state == "serving")
        while True:
            try:
                view = await deployment.rebalance()
                break
            except OperationRefused:
                await asyncio.sleep(0.001)
        assert (view.outcome, view.targets) == ("done", (0, 1))
        assert deployment.manager._repairs.wanted_size == 3
        assert deployment.serving() == [0, 1]
        deployment.cluster.heal()
        await deployment.until(lambda view: sum(m.state == "serving" for m in view.members) == 3)
        await deployment.settled()

    run_skewed(body, num_workers=3)
