"""Scales by the controller's actor on a real Ray, and what its death leaves: workers that have no model."""

import asyncio
from collections.abc import Callable

import pytest

from moeray.comm.errors import OperationRefused
from moeray.deploy.control import RayControl
from moeray.elastic.phases import OperationDeadlines
from moeray.elastic.ray_workers import RayWorkers
from moeray.elastic.view import OperationView, RebalanceRequest, ScaleRequest
from tests.support.ray_deployments import DEADLINE_S, Started, fake_factory, is_gone
from tests.support.serving import poll

pytestmark = pytest.mark.cluster

SHORT = OperationDeadlines(connect_s=2.0, transfer_s=2.0, switch_s=5.0, retire_s=3.0, rollback_s=2.0)


def scale(
    deployment: Started, workers: int | None, *, operation_id: str, retire: tuple[int, ...] = ()
) -> OperationView:
    request = ScaleRequest(workers=workers, retire=retire, operation_id=operation_id)
    view: OperationView = deployment.call("scale", request)
    assert view.operation_id == operation_id
    return ended(deployment, operation_id)


def ended(deployment: Started, operation_id: str) -> OperationView:
    view: OperationView = deployment.call("wait_operation", operation_id, DEADLINE_S / 2)
    assert view.outcome is not None, view
    return view


def states(deployment: Started) -> dict[str, str]:
    view = deployment.call("view", -1, 0.0)
    return {f"{member.slot}.{member.incarnation}": member.state for member in view.members}


def test_a_rebalance_up_down_and_any_slot(start: Callable[..., Started]) -> None:
    deployment = start()
    view = deployment.until("serving")
    pids = {member.slot: member.pid for member in view.members}
    deployment.call("rebalance", RebalanceRequest(operation_id="better"))
    better = ended(deployment, "better")
    assert (better.kind, better.outcome, better.to_epoch) == ("rebalance", "done", 1)
    assert better.moved_experts > 0
    up = scale(deployment, 4, operation_id="up")
    assert (up.outcome, up.to_epoch, up.joiners) == ("done", 2, (2, 3))
    down = scale(deployment, None, operation_id="down", retire=(0, 2))
    assert (down.outcome, down.to_epoch, down.kv_blocks) == ("done", 3, 6)
    assert states(deployment) == {"1.0": "serving", "3.0": "serving"}
    assert pids[0] is not None
    assert is_gone(pids[0])
    again = scale(deployment, 3, operation_id="again")
    assert again.outcome == "done"
    assert states(deployment) == {"0.1": "serving", "1.0": "serving", "3.0": "serving"}
    assert [view.operation_id for view in deployment.call("operations")] == ["better", "up", "down", "again"]


@pytest.mark.parametrize("call", ["create", "load", "connect", "transfer"])
def test_a_joiner_that_dies_is_rolled_back_and_the_next_scale_works(start: Callable[..., Started], call: str) -> None:
    deployment = start(f"2.0:{call}:die", operation_deadlines=SHORT)
    before = deployment.until("serving")
    view = scale(deployment, 3, operation_id="first")
    assert view.outcome == "rolled_back"
    assert view.reason is not None
    assert view.reason.startswith("worker 2: its process died")
    after = deployment.call("view", -1, 0.0)
    assert (after.epoch, after.members, after.placement) == (before.epoch, before.members, before.placement)
    assert scale(deployment, 3, operation_id="second").outcome == "done"
    assert states(deployment) == {"0.0": "serving", "1.0": "serving", "2.1": "serving"}


def test_a_survivor_that_fails_to_build_the_group_goes_on(start: Callable[..., Started]) -> None:
    deployment = start("1.0:connect:error", operation_deadlines=SHORT)
    deployment.until("serving")
    view = scale(deployment, 3, operation_id="it")
    assert (view.outcome, view.reason) == ("rolled_back", "worker 1: slot 0 did not answer")
    assert states(deployment) == {"0.0": "serving", "1.0": "serving"}


def test_a_restarted_controller_goes_on_with_the_workers_that_it_finds(start: Callable[..., Started]) -> None:
    deployment = start(num_spares=1)
    before = deployment.until_true(lambda view: any(m.state == "spare" for m in view.members))
    assert scale(deployment, 3, operation_id="first").outcome == "done"
    lease = deployment.call("attach")
    before = deployment.until_true(lambda view: any(m.state == "spare" and m.slot == 3 for m in view.members))
    deployment.restart()
    after = deployment.call("view", before.version, DEADLINE_S / 2)
    assert after.version > before.version
    assert (after.epoch, after.members, after.model) == (before.epoch, before.members, before.model)
    again = deployment.call("attach")
    assert again.lease > lease.lease
    assert (again.public_key, again.secret_key) == (lease.public_key, lease.secret_key)
    assert ended(deployment, "first").outcome == "done"
    view = scale(deployment, 4, operation_id="second")
    assert (view.outcome, view.joiners) == ("done", (3,))
    assert set(states(deployment).values()) == {"serving"}


def test_an_operation_that_nobody_was_told_to_switch_to_is_rolled_back(start: Callable[..., Started]) -> None:
    deployment = start("2.0:connect:hang", operation_deadlines=SHORT)
    deployment.until("serving")
    deployment.call("scale", ScaleRequest(workers=3, operation_id="it"))
    deployment.until_true(lambda view: any(m.state == "joining" for m in view.members))
    deployment.restart()
    view = ended(deployment, "it")
    assert view.outcome == "rolled_back"
    assert states(deployment) == {"0.0": "serving", "1.0": "serving"}
    assert scale(deployment, 3, operation_id="next").outcome == "done"


def test_an_operation_that_somebody_switched_to_is_finished(start: Callable[..., Started]) -> None:
    deployment = start("1.0:commit:hang_once", num_workers=3)
    deployment.until("serving")
    deployment.call("scale", ScaleRequest(retire=(0,), operation_id="it"))

    def is_ready() -> bool:
        operation: OperationView = deployment.call("operation", "it")
        return operation.phase == "ready"

    poll("the operation is ready", is_ready, DEADLINE_S)
    deployment.restart()
    view = ended(deployment, "it")
    assert (view.outcome, view.phase) == ("done", "retired")
    assert states(deployment) == {"1.0": "serving", "2.0": "serving"}


def test_refusals_reach_the_caller_as_they_are(start: Callable[..., Started]) -> None:
    deployment = start("2:load:hang", operation_deadlines=SHORT)
    deployment.until("serving")

    async def body() -> None:
        control = RayControl(deployment.actor)
        with pytest.raises(ValueError, match="workers is 9, must be from 1 to 4 workers"):
            await control.scale(ScaleRequest(workers=9))
        first = await control.scale(ScaleRequest(workers=3, deadline_s=1.0))
        with pytest.raises(OperationRefused, match="only one may run at a time") as refused:
            await control.scale(ScaleRequest(workers=1))
        assert refused.value.operation_id == first.operation_id
        view = await control.wait_operation(first.operation_id, DEADLINE_S / 2)
        assert view.reason == "worker 2: did not start within the operation's deadline of 1 s"
        assert await control.operation(first.operation_id) == view
        assert await control.operations() == (view,)

    asyncio.run(body())


def test_a_lack_of_resources_is_told_with_both_sides(start: Callable[..., Started]) -> None:
    assert start is not None  # the cluster runs
    workers = RayWorkers(fake_factory("", num_cpus=1.5))
    assert workers.lacks_room_for(0) is None
    assert workers.lacks_room_for(2) == (
        "2 more workers of 1.5 CPU each need 3 CPU, the cluster has 0 of 0 CPUs free and 0 of 0 GPUs free"
    )
