"""Workers that wait beside the group: taken first, kept if unharmed, replaced if not, and nobody's harm."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from moeray.comm.errors import StartupError
from moeray.elastic.view import ScaleRequest
from tests.support.deployment import Deployment
from tests.support.fake_cluster import die, error, hang


def spares(deployment: Deployment) -> list[int]:
    return [member.slot for member in deployment.view().members if member.state == "spare"]


def run(body: Callable[[Deployment], Awaitable[None]], *, num_spares: int = 1, **options: Any) -> None:
    async def all_of_it() -> None:
        deployment = await Deployment(num_spares=num_spares, **options).serve()
        await deployment.until(lambda _: len(spares(deployment)) == min(num_spares, deployment.config.max_workers - 2))
        await body(deployment)
        await deployment.stop()

    asyncio.run(all_of_it())


def test_a_spare_is_taken_first_and_replaced_afterwards() -> None:
    async def body(deployment: Deployment) -> None:
        assert spares(deployment) == [2]
        assert all(m.rank is None and m.num_experts == 0 for m in deployment.view().members if m.state == "spare")
        loads = deployment.cluster.calls.count((2, "load"))
        view = await deployment.scale(3)
        assert (view.outcome, view.joiners) == ("done", (2,))
        assert deployment.cluster.calls.count((2, "load")) == loads
        await deployment.until(lambda _: spares(deployment) == [3])
        await deployment.settled()

    run(body)


def test_there_are_only_as_many_as_free_slots() -> None:
    async def body(deployment: Deployment) -> None:
        assert spares(deployment) == [2, 3]
        assert (await deployment.scale(4)).outcome == "done"
        await deployment.settled()
        assert spares(deployment) == []
        assert (await deployment.scale(1, retire=(0, 1, 2))).outcome == "done"
        await deployment.until(lambda _: spares(deployment) == [0, 1, 2])

    run(body, num_spares=3)


def test_spares_need_no_room_and_others_do() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.room = 0
        assert (await deployment.scale(3)).outcome == "done"

    run(body)


def test_a_dead_spare_is_replaced_and_harms_nobody() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.alive[2].died.set()
        await deployment.until(lambda view: any(m.slot == 2 and m.incarnation == 1 for m in view.members))
        await deployment.until(lambda _: spares(deployment) == [2])
        assert deployment.serving() == [0, 1]
        assert (await deployment.scale(3)).outcome == "done"
        await deployment.settled()

    run(body)


def test_a_spare_that_does_not_load_is_tried_again() -> None:
    async def body(deployment: Deployment) -> None:
        for fault in (die, error(StartupError("no memory")), hang):
            tries = deployment.cluster.calls.count((3, "load"))
            deployment.cluster.fail(3, "load", fault)
            await deployment.scale(3)
            async with asyncio.timeout(5):
                while deployment.cluster.calls.count((3, "load")) < tries + 2:
                    await asyncio.sleep(0.001)
            deployment.cluster.heal()
            await deployment.until(lambda _: spares(deployment) == [3])
            await deployment.scale(2)
            deployment.cluster.alive[3].died.set()
            await deployment.until(lambda _: spares(deployment) == [2])

    run(body)


def test_an_unharmed_spare_is_kept_after_a_rollback_and_its_number_too() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(3, "load", error(StartupError("no luck")))
        view = await deployment.scale(4)
        assert (view.outcome, view.joiners) == ("rolled_back", (2, 3))
        await deployment.settled()
        assert spares(deployment) == [2]
        assert deployment.view().members[2].incarnation == 0

    run(body)


def test_a_harmed_spare_is_killed_after_a_rollback() -> None:
    async def body(deployment: Deployment) -> None:
        deployment.cluster.fail(2, "connect", hang)
        assert (await deployment.scale(3)).outcome == "rolled_back"
        deployment.cluster.heal()
        await deployment.until(lambda view: any(m.slot == 2 and m.incarnation == 1 for m in view.members))
        await deployment.until(lambda _: spares(deployment) == [2])
        await deployment.settled()

    run(body)


def test_a_spare_that_still_loads_is_waited_for() -> None:
    async def body() -> None:
        deployment = Deployment(num_spares=1)
        loaded = asyncio.Event()

        async def wait(_: object) -> None:
            await loaded.wait()

        deployment.cluster.fail(2, "load", wait)
        await deployment.serve()
        await deployment.called(2, "load")
        operation = await deployment.manager.scale(ScaleRequest(workers=3))
        assert operation.joiners == (2,)
        loaded.set()
        assert (await deployment.ended(operation.operation_id)).outcome == "done"
        assert deployment.cluster.calls.count((2, "load")) == 1
        await deployment.until(lambda _: spares(deployment) == [3])
        await deployment.settled()
        await deployment.stop()

    asyncio.run(body())


def test_without_room_there_is_no_spare_and_no_harm() -> None:
    async def body() -> None:
        deployment = Deployment(num_spares=1)
        deployment.cluster.room = 0
        await deployment.serve()
        assert (await deployment.scale(1)).outcome == "done"
        assert spares(deployment) == []
        deployment.cluster.room = None
        await deployment.until(lambda _: spares(deployment) == [1])
        await deployment.stop()

    asyncio.run(body())
