"""Members die, are silent or lose their group, alone and during everything else: the rest serves on, others come."""

import asyncio
import contextlib
import random
from typing import Any

import pytest

from moeray.comm.errors import OperationRefused
from moeray.elastic.view import FaultView, ScaleRequest
from tests.support.deployment import WAIT_S, Deployment, run
from tests.support.fake_cluster import die, hang

CALLS = ("halt", "connect", "transfer", "commit")
# Nobody is only silent in the storm: what is slow there is this machine.
PATIENT_S = 5.0


async def repaired(deployment: Deployment, epoch: int = 0) -> None:
    """Until an epoch after this one serves."""
    async with asyncio.timeout(WAIT_S):
        await deployment.until(lambda view: view.epoch > epoch and view.state == "serving")
        await deployment.settled()


async def faults(deployment: Deployment) -> tuple[FaultView, ...]:
    return await deployment.manager.faults()


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_the_others_take_the_experts_and_a_new_worker_the_place(slot: int) -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.alive[slot].died.set()
        view = await deployment.until(lambda view: any(m.state == "dead" for m in view.members))
        assert view.epoch == 0
        await repaired(deployment)
        kinds = [(o.kind, o.outcome, o.targets) for o in await deployment.manager.operations()]
        others = tuple({0, 1, 2} - {slot})
        assert kinds == [("repair", "done", others), ("replace", "done", (0, 1, 2))]
        (fault,) = await faults(deployment)
        assert (fault.slot, fault.incarnation, fault.kind, fault.cause) == (slot, 0, "died", "its process died")
        assert (fault.epoch, fault.to_epoch) == (0, 1)
        assert fault.recovered_s is not None
        assert deployment.serving() == [0, 1, 2]
        assert {m.slot: m.incarnation for m in deployment.view().members}[slot] == 1
        repair = (await deployment.manager.operations())[0]
        reached = [phase.name for phase in repair.phases]
        assert reached == [
            "planned", "provisioning", "halting", "connecting", "transferring", "ready", "switched", "retired"
        ]  # fmt: skip

    run(body, num_workers=3)


def test_only_lost_experts_are_read() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.alive[3].died.set()
        await repaired(deployment)
        repair = (await deployment.manager.operations())[0]
        assert repair.moved_experts == 2 * 2  # layers, experts that slot 3 had
        assert repair.moved_bytes == 10 * repair.moved_experts

    run(body, num_workers=4, replace=False)


def test_a_second_death_before_the_first_is_replaced_leaves_nobody_out() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(2, "load", hang)
        deployment.cluster.alive[2].died.set()
        await deployment.until(lambda view: view.epoch > 0)
        await deployment.called(2, "load")
        deployment.cluster.heal()
        deployment.cluster.alive[1].died.set()
        await deployment.until(lambda view: sum(m.state == "serving" for m in view.members) == 3)

    run(body, num_workers=3)


@pytest.mark.parametrize("restart", [False, True])
def test_lost_workers_are_replaced_up_to_the_size_that_was_asked_for_last(restart: bool) -> None:
    async def body(deployment: Deployment) -> None:
        assert (await deployment.scale(3)).outcome == "done"
        await deployment.settled()
        if restart:
            await deployment.restart()
            await deployment.manager.faults()
        deployment.cluster.alive[0].died.set()
        await deployment.until(lambda view: view.epoch > 1)
        await deployment.until(lambda view: sum(m.state == "serving" for m in view.members) == 3)
        await deployment.settled()

    run(body)


def test_without_replacement_the_rest_stays_alone() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.alive[0].died.set()
        await repaired(deployment)
        assert deployment.serving() == [1, 2]
        assert (await deployment.scale(3)).outcome == "done"
        await deployment.settled()

    run(body, num_workers=3, replace=False)


def test_a_spare_takes_the_place() -> None:
    async def body(deployment: Deployment) -> None:
        await deployment.settled()
        deployment.cluster.alive[1].died.set()
        await repaired(deployment, epoch=1)
        assert deployment.serving() == [0, 2]
        await deployment.settled()

    run(body, num_spares=1)


def test_all_but_one_at_once() -> None:
    async def body(deployment: Deployment) -> None:
        for slot in (0, 1, 3):
            deployment.cluster.alive[slot].died.set()
        await deployment.until(lambda view: view.epoch > 0)
        await repaired(deployment, epoch=1)
        assert deployment.serving() == [0, 1, 2, 3]
        assert len(await faults(deployment)) == 3

    run(body, num_workers=4)


@pytest.mark.parametrize("num_spares", [0, 1])
def test_when_none_is_left_new_ones_start(num_spares: int) -> None:
    async def body(deployment: Deployment) -> None:
        await deployment.settled()
        for slot in (0, 1):
            deployment.cluster.alive[slot].died.set()
        view = await deployment.until(lambda view: view.state == "recovering")
        assert view.cause is not None
        assert view.cause.endswith("no worker is left: waiting for 1 to start")
        await repaired(deployment, epoch=1)
        assert len(deployment.serving()) == 2
        assert (await deployment.scale(3)).outcome == "done"

    run(body, num_spares=num_spares)


def test_a_replacement_that_fails_is_told_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(0, "load", die)
        deployment.cluster.alive[0].died.set()
        async with asyncio.timeout(WAIT_S):
            while not any("the next attempt comes in" in line for line in caplog.messages):
                await asyncio.sleep(0.001)
        deployment.cluster.heal()
        await repaired(deployment)
        assert deployment.serving() == [0, 1, 2]
        line = next(line for line in caplog.messages if "not replaced yet" in line)
        assert "worker 0: its process died" in line

    run(body, num_workers=3)


def test_too_few_seats_wait_for_a_new_worker() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.alive[1].died.set()
        view = await deployment.until(lambda view: view.state == "recovering")
        assert view.cause == ("worker 1: its process died; workers [0] cannot hold all experts: waiting for 1 to start")
        await repaired(deployment)
        assert len(deployment.serving()) == 2
        assert 0 in deployment.serving()

    run(body, num_workers=2, min_workers=2)


def test_a_start_that_fails_is_tried_again() -> None:
    async def body(deployment: Deployment) -> None:
        for slot in range(5):
            deployment.cluster.fail(slot, "load", die)
        deployment.cluster.alive[0].died.set()
        deployment.cluster.alive[1].died.set()
        await deployment.until(lambda view: view.state == "recovering")
        await deployment.called(0, "load") if (2, "load") not in deployment.cluster.calls else None
        view = await deployment.until(lambda view: "; the next comes in 0.2 s" in (view.cause or ""))
        assert view.state == "recovering"
        assert view.cause is not None
        assert "no worker is left: waiting for 1 to start; the last attempt failed: worker " in view.cause
        assert "its process died; the next comes in 0.2 s" in view.cause
        deployment.cluster.heal()
        await repaired(deployment)
        assert len(deployment.serving()) == 2

    run(body)


@pytest.mark.parametrize("how", [die, hang])
@pytest.mark.parametrize("call", CALLS)
def test_another_one_is_lost_during_the_repair(call: str, how: Any) -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(1, call, how)
        deployment.cluster.alive[0].died.set()
        async with asyncio.timeout(WAIT_S):
            while 1 in deployment.cluster.alive and deployment.cluster.alive[1].incarnation == 0:
                await asyncio.sleep(0.001)
        deployment.cluster.heal()
        await repaired(deployment, epoch=1)
        assert deployment.serving() == [0, 1, 2, 3]
        assert {fault.slot for fault in await faults(deployment)} == {0, 1}

    run(body, num_workers=4)


@pytest.mark.parametrize("call", ["status", "halt", "connect", "transfer"])
def test_all_that_give_no_sign_of_life_are_given_up_at_once(call: str) -> None:
    async def body(deployment: Deployment) -> None:
        for slot in (1, 2):
            deployment.cluster.fail(slot, call, hang)
            deployment.cluster.fail(slot, "tick", hang)
        deployment.cluster.alive[0].died.set()
        async with asyncio.timeout(2.0):  # far from the time that a phase may take
            while {1, 2} & {slot for slot, p in deployment.cluster.alive.items() if p.incarnation == 0}:
                await asyncio.sleep(0.001)
        deployment.cluster.heal()
        await repaired(deployment)
        found = {(fault.slot, fault.kind, fault.cause) for fault in await faults(deployment)}
        silent = "it has not answered for 0.5 s"
        assert found == {(0, "died", "its process died"), (1, "was silent", silent), (2, "was silent", silent)}

    run(body, num_workers=4, deadline_s=PATIENT_S, stall_timeout_s=0.5)


def test_one_whose_first_answers_were_lost_is_not_mute() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(1, "halt", hang)
        deployment.cluster.fail(1, "tick", hang)
        deployment.cluster.alive[0].died.set()
        await deployment.called(1, "halt")
        await asyncio.sleep(0.3)
        deployment.cluster.faults.pop((1, "tick"))
        await asyncio.sleep(1.5)
        assert deployment.cluster.alive[1].incarnation == 0
        await deployment.restart()
        deployment.cluster.heal()
        await deployment.manager.faults()
        await repaired(deployment)

    run(body, num_workers=3, halt_s=PATIENT_S, stall_timeout_s=1.0)


def test_a_survivor_that_answers_may_take_its_time_to_leave_the_group() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(1, "halt", hang)
        deployment.cluster.alive[0].died.set()
        await deployment.called(1, "halt")
        await asyncio.sleep(1.0)
        assert deployment.cluster.alive[1].incarnation == 0
        async with asyncio.timeout(WAIT_S):
            while 1 in deployment.cluster.alive and deployment.cluster.alive[1].incarnation == 0:
                await asyncio.sleep(0.001)
        deployment.cluster.heal()
        await repaired(deployment)

    run(body, num_workers=3, halt_s=1.5, stall_timeout_s=0.5)


def test_a_broken_group_is_made_again_of_the_same_members() -> None:
    async def body(deployment: Deployment) -> None:
        for slot in (0, 2):
            deployment.cluster.alive[slot].lose_group()
        await repaired(deployment)
        assert deployment.serving() == [0, 1, 2]
        (fault,) = await faults(deployment)
        assert (fault.kind, fault.cause) == ("lost its group", "connection reset")
        assert [m.incarnation for m in deployment.view().members] == [0, 0, 0]

    run(body, num_workers=3)


def test_what_survivors_say_is_evidence_only() -> None:
    async def body(deployment: Deployment) -> None:
        for slot in (0, 2):
            deployment.cluster.alive[slot].lose_group("worker 1 closed the connection")
        await asyncio.sleep(0.02)
        deployment.cluster.alive[1].died.set()
        await repaired(deployment)
        assert [(fault.slot, fault.kind) for fault in await faults(deployment)] == [(1, "died")]

    run(body, num_workers=3)


UP, DOWN = ScaleRequest(workers=4, operation_id="it"), ScaleRequest(retire=(1,), operation_id="it")
PHASES = ("provisioning", "connecting", "transferring", "ready", "switched")


@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("request_", [pytest.param(UP, id="up"), pytest.param(DOWN, id="down")])
def test_a_death_during_an_operation(request_: ScaleRequest, phase: str, slot: int) -> None:
    async def body(deployment: Deployment) -> None:
        deployment.store.hold_at(phase, before=False)
        begun = asyncio.create_task(deployment.manager.scale(request_))
        async with asyncio.timeout(WAIT_S):
            await deployment.store.held.wait()
        deployment.cluster.alive[slot].died.set()
        await asyncio.sleep(0.01)
        deployment.store.release()
        await begun
        view = await deployment.ended("it")
        assert view.outcome in ("done", "rolled_back", "failed")
        if phase == "switched":
            assert view.outcome == "done"
        async with asyncio.timeout(WAIT_S):
            await deployment.settled()
            while not all(fault.recovered_s is not None for fault in await faults(deployment)):
                await deployment.settled()
        size = 3 if view.outcome != "done" else len(view.targets)
        async with asyncio.timeout(WAIT_S):
            while len(deployment.serving()) != size:
                await deployment.settled()
        assert (await deployment.scale(2)).outcome == "done"
        await deployment.settled()

    run(body, num_workers=3)


@pytest.mark.parametrize("reached", [0, 1, 2])
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_death_while_some_were_told_to_switch(slot: int, reached: int) -> None:
    async def body(deployment: Deployment) -> None:
        for other in {0, 1, 2} - {reached}:
            deployment.cluster.fail(other, "commit", hang)
        await deployment.manager.scale(ScaleRequest(workers=3, operation_id="it"))
        await deployment.committed(reached, 1)
        deployment.cluster.heal()
        deployment.cluster.alive[slot].died.set()
        await deployment.ended("it")
        async with asyncio.timeout(WAIT_S):
            await deployment.settled()
            while len(deployment.serving()) < 2:
                await deployment.settled()

    run(body)


def test_no_operation_begins_during_a_repair() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(1, "halt", hang)
        deployment.cluster.alive[0].died.set()
        await deployment.called(1, "halt")
        with pytest.raises(OperationRefused, match=r"^operation repair-.* is halting, only one may run") as caught:
            await deployment.manager.scale(ScaleRequest(workers=2))
        assert caught.value.operation_id.startswith("repair-")
        deployment.cluster.heal()
        await repaired(deployment, epoch=1)

    run(body, num_workers=3)


@pytest.mark.parametrize("call", CALLS)
def test_a_controller_that_dies_during_a_repair_begins_it_again(call: str) -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(2, call, hang)
        deployment.cluster.alive[0].died.set()
        await deployment.called(2, call)
        await deployment.restart()
        deployment.cluster.heal()
        await deployment.manager.faults()
        await repaired(deployment)
        async with asyncio.timeout(WAIT_S):
            while len(deployment.serving()) < 3:
                await deployment.settled()
        assert (await deployment.scale(2)).outcome == "done"

    run(body, num_workers=3)


def test_a_member_that_died_while_the_controller_was_gone_is_missed() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.alive[1].died.set()
        await deployment.restart()
        await deployment.manager.faults()
        await repaired(deployment)
        assert [fault.slot for fault in await faults(deployment)] == [1]

    run(body, num_workers=3)


def test_a_member_known_to_be_dead_is_not_forgotten_by_the_next_life_of_the_controller() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(2, "load", hang)
        begun = await deployment.manager.scale(ScaleRequest(workers=3))
        await deployment.called(2, "load")
        deployment.store.hold_at("rolled_back", before=False)
        deployment.cluster.alive[0].died.set()
        async with asyncio.timeout(WAIT_S):
            await deployment.store.held.wait()
        await deployment.restart()
        deployment.cluster.heal()
        assert (await deployment.ended(begun.operation_id)).outcome == "rolled_back"
        await repaired(deployment)
        assert (await deployment.scale(3)).outcome == "done"

    run(body)


async def storm(seed: int) -> None:
    random_ = random.Random(seed)
    deployment = Deployment(num_workers=3, max_workers=5, num_spares=seed % 2, num_experts=11, deadline_s=PATIENT_S)
    await deployment.serve()
    for _ in range(12):
        for _ in range(random_.randint(1, 2)):
            if not (alive := list(deployment.cluster.alive.values())):
                break
            process = random_.choice(alive)
            process.died.set() if random_.random() < 0.6 else process.lose_group() if process.is_serving else None
            for _ in range(random_.randrange(100)):
                await asyncio.sleep(0)
        if random_.random() < 0.5:
            with contextlib.suppress(OperationRefused, ValueError):
                await deployment.manager.scale(ScaleRequest(workers=random_.randint(1, 5)))
        if random_.random() < 0.3:
            await deployment.restart()
            await deployment.manager.faults()
        await asyncio.sleep(random_.random() * 0.02)
    async with asyncio.timeout(6 * WAIT_S):
        while True:
            await asyncio.sleep(0.5)
            try:
                await deployment.settled()
                break
            except (AssertionError, StopIteration):
                continue
    await deployment.settled()
    await deployment.stop()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_lost_it_serves_in_the_end(seed: int) -> None:
    asyncio.run(storm(seed))
