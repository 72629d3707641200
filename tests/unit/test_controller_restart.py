"""The controller dies at each point of an operation, and its next life brings the operation to one end or the other."""

import asyncio

import pytest

from moeray.elastic.view import ScaleRequest
from tests.support.deployment import Deployment, run
from tests.support.fake_cluster import hang

BEFORE_THE_SWITCH = ("provisioning", "connecting", "transferring", "ready")


async def killed_at(deployment: Deployment, phase: str, request: ScaleRequest, *, before: bool) -> None:
    """Kill the controller when it writes that the operation has reached the phase."""
    deployment.store.hold_at(phase, before=before)
    begun = asyncio.create_task(deployment.manager.scale(request))
    async with asyncio.timeout(5):
        await deployment.store.held.wait()
    await deployment.restart()
    await asyncio.gather(begun, return_exceptions=True)


UP, DOWN, BOTH = ScaleRequest(workers=4), ScaleRequest(retire=(0,)), ScaleRequest(workers=2, retire=(1,))
REQUESTS = [pytest.param(request, id=name) for request, name in ((UP, "up"), (DOWN, "down"), (BOTH, "both"))]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("phase", ["planned", *BEFORE_THE_SWITCH])
@pytest.mark.parametrize("request_", REQUESTS)
def test_what_no_member_was_told_to_switch_to_is_rolled_back(request_: ScaleRequest, phase: str, before: bool) -> None:
    async def body(deployment: Deployment) -> None:
        named = ScaleRequest(workers=request_.workers, retire=request_.retire, operation_id="it")
        was = deployment.view()
        await killed_at(deployment, phase, named, before=before)
        if phase == "planned" and before:
            assert await deployment.manager.operation("it") is None
        else:
            view = await deployment.ended("it")
            assert view.outcome == "rolled_back"
            assert view.reason is not None
            assert view.reason.startswith("the controller was restarted in phase ")
        await deployment.settled()
        assert (deployment.view().epoch, deployment.view().members) == (was.epoch, was.members)
        assert deployment.view().version > was.version
        view = await deployment.scale(request_.workers, retire=request_.retire)
        assert view.outcome == "done"
        assert view.to_epoch == (1 if phase == "planned" and before else 2)
        await deployment.settled()

    run(body)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("phase", ["switched", "retired"])
@pytest.mark.parametrize("request_", REQUESTS)
def test_what_was_switched_is_finished(request_: ScaleRequest, phase: str, before: bool) -> None:
    async def body(deployment: Deployment) -> None:
        named = ScaleRequest(workers=request_.workers, retire=request_.retire, operation_id="it")
        await killed_at(deployment, phase, named, before=before)
        view = await deployment.ended("it")
        assert (view.outcome, view.phase) == ("done", "retired")
        await deployment.settled()
        assert deployment.view().epoch == view.to_epoch == 1
        assert (await deployment.scale(3)).outcome == "done"
        await deployment.settled()

    run(body)


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_commit_that_reached_only_some_is_said_to_the_others(slot: int) -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(slot, "commit", hang)
        operation = await deployment.manager.scale(ScaleRequest(workers=3))
        for other in {0, 1, 2} - {slot}:
            await deployment.committed(other, operation.to_epoch)
        await deployment.restart()
        deployment.cluster.heal()
        assert (await deployment.ended(operation.operation_id)).outcome == "done"
        await deployment.settled()
        assert deployment.serving() == [0, 1, 2]

    run(body)


def test_a_commit_that_reached_nobody_is_taken_back() -> None:
    async def body(deployment: Deployment) -> None:
        for slot in (0, 1, 2):
            deployment.cluster.fail(slot, "commit", hang)
        operation = await deployment.manager.scale(ScaleRequest(workers=3))
        await deployment.called(2, "commit")
        await deployment.restart()
        deployment.cluster.heal()
        assert (await deployment.ended(operation.operation_id)).outcome == "rolled_back"
        await deployment.settled()

    run(body)


def test_a_second_operation_waits_for_the_one_that_was_found() -> None:
    async def body(deployment: Deployment) -> None:
        await killed_at(deployment, "ready", ScaleRequest(workers=3, operation_id="it"), before=False)
        again = await deployment.manager.scale(ScaleRequest(workers=3, operation_id="it"))
        assert again.operation_id == "it"
        assert (await deployment.ended("it")).outcome == "rolled_back"

    run(body)


def test_keys_lease_history_and_incarnations_survive() -> None:
    async def body(deployment: Deployment) -> None:
        first = await deployment.manager.attach()
        await deployment.scale(1, operation_id="one")
        await deployment.scale(2, operation_id="two")
        was = deployment.view()
        for _ in range(2):
            await deployment.restart()
            again = await deployment.manager.attach()
            assert again.lease > first.lease
            assert (again.public_key, again.secret_key) == (first.public_key, first.secret_key)
            first = again
            assert [view.operation_id for view in await deployment.manager.operations()] == ["one", "two"]
            view = await deployment.manager.view(was.version, 1.0)
            assert view.version > was.version
            assert (view.members, view.placement, view.model) == (was.members, was.placement, was.model)
            was = view
        assert (await deployment.scale(1)).to_epoch == 3
        await deployment.scale(2)
        assert deployment.view().members[1].incarnation == 2
        await deployment.settled()

    run(body)


def test_spares_are_found_again_and_half_loaded_ones_started_anew() -> None:
    async def body(deployment: Deployment) -> None:
        def states(state: str) -> list[tuple[int, int]]:
            return [(m.slot, m.incarnation) for m in deployment.view().members if m.state == state]

        await deployment.until(lambda _: states("spare") == [(2, 0)])
        deployment.cluster.fail(3, "load", hang)
        await deployment.scale(3)
        await deployment.called(3, "load")
        await deployment.restart()
        deployment.cluster.heal()
        await deployment.manager.start()
        await deployment.until(lambda _: states("spare") == [(3, 1)])
        await deployment.restart()
        await deployment.manager.start()
        await deployment.until(lambda _: states("spare") == [(3, 1)])
        assert deployment.serving() == [0, 1, 2]
        await deployment.settled()

    run(body, num_spares=1)


def test_a_member_that_died_meanwhile_is_replaced() -> None:
    async def body(deployment: Deployment) -> None:
        await deployment.restart()
        deployment.cluster.alive[1].died.set()
        await deployment.until(lambda view: view.epoch > 1 and [m.incarnation for m in view.members] == [0, 1])
        await deployment.settled()

    run(body)


def test_a_member_that_does_not_answer_stays_a_member() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(1, "status", hang)
        await deployment.restart()
        await deployment.manager.start()
        await deployment.settled()
        assert deployment.serving() == [0, 1]
        deployment.cluster.heal()
        assert (await deployment.scale(3)).outcome == "done"
        await deployment.settled()

    run(body)


def test_a_start_that_was_interrupted_begins_again() -> None:
    async def body() -> None:
        deployment = Deployment()
        deployment.cluster.fail(1, "load", hang)
        before = set(asyncio.all_tasks())
        deployment._before = before
        await deployment.manager.start()
        await deployment.called(1, "load")
        await deployment.restart()
        deployment.cluster.heal()
        view = await deployment.until(lambda view: view.state != "starting")
        assert view.state == "serving"
        assert [member.incarnation for member in view.members] == [1, 1]
        await deployment.settled()
        await deployment.stop()

    asyncio.run(body())
