"""A whole deployment in one event loop: the manager, workers made of coroutines, a memory, and ways to break them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from moeray.elastic.controller_config import ControllerConfig
from moeray.elastic.manager import Manager
from moeray.elastic.phases import OperationDeadlines
from moeray.elastic.startup import StartDeadlines
from moeray.elastic.view import ClusterView, OperationView, RebalanceRequest, ScaleRequest
from tests.support.fake_cluster import NUM_LAYERS, FakeCluster
from tests.support.fake_store import FakeStore

SHORT_S = 0.4
WAIT_S = 5.0


class Deployment:
    """One manager at a time; `restart` kills it and starts another with the same memory and the same workers."""

    def __init__(
        self,
        *,
        num_workers: int = 2,
        max_workers: int = 4,
        num_experts: int = 8,
        min_workers: int = 1,
        num_spares: int = 0,
        overall_s: float = 10.0,
        history_limit: int = 100,
        replace: bool = True,
        deadline_s: float = SHORT_S,
        halt_s: float | None = None,
        stall_timeout_s: float = 1.5,
    ) -> None:
        self.cluster = FakeCluster(num_experts)
        self.config = ControllerConfig(
            deployment="test",
            num_workers=num_workers,
            num_layers=NUM_LAYERS,
            num_experts=num_experts,
            num_seats=-(-num_experts // min_workers),
            max_workers=max_workers,
            min_workers=min_workers,
            num_spares=num_spares,
            deadlines=StartDeadlines(create_s=deadline_s, load_s=deadline_s, join_s=deadline_s),
            operation_deadlines=OperationDeadlines(
                provision_s=2 * deadline_s,
                connect_s=deadline_s,
                transfer_s=deadline_s,
                switch_s=deadline_s,
                retire_s=deadline_s,
                halt_s=halt_s or deadline_s,
                rollback_s=deadline_s,
                status_s=deadline_s,
                overall_s=overall_s,
            ),
            history_limit=history_limit,
            spare_retry_s=0.01,
            stop_timeout_s=deadline_s,
            replace=replace,
            stall_timeout_s=stall_timeout_s,
        )
        self.values: dict[str, bytes] = {}
        self.views: list[ClusterView] = []
        self._before: set[asyncio.Task[object]] = set()
        self._new_manager()

    def _new_manager(self) -> None:
        self.store = FakeStore(self.values)
        self.manager = Manager(self.config, self.cluster, self.store)

    async def serve(self) -> "Deployment":
        """Start it and wait until it serves."""
        self._before = set(asyncio.all_tasks())
        await self.manager.start()
        await self.until(lambda view: view.state != "starting")
        assert self.view().state == "serving", self.view().cause
        return self

    def view(self) -> ClusterView:
        return self.manager._board.current.view()

    async def until(self, condition: Callable[[ClusterView], bool]) -> ClusterView:
        """Follow the view, as a front end does; each one must be consistent."""
        version = -1
        async with asyncio.timeout(WAIT_S):
            while True:
                view = await self.manager.view(version, 0.05)
                self._check_view(view)
                if condition(view):
                    return view
                version = view.version

    def _check_view(self, view: ClusterView) -> None:
        ranks = sorted(member.rank for member in view.members if member.rank is not None)
        if view.model is None or view.state == "recovering":  # slots of dead members have others already
            return
        assert ranks == list(range(len(view.placement[0])))
        by_rank = {member.rank: member for member in view.members}
        for rank in ranks:
            held = sum(expert >= 0 for layer in view.placement for expert in layer[rank])
            assert held == by_rank[rank].num_experts

    async def scale(self, workers: int | None = None, **fields: object) -> OperationView:
        """Begin it, and follow it to its end."""
        request = ScaleRequest(workers=workers, **fields)  # type: ignore[arg-type]
        view = await self.manager.scale(request)
        return await self.ended(view.operation_id)

    async def rebalance(self, **fields: object) -> OperationView:
        """As `scale`, for an exchange of experts."""
        view = await self.manager.rebalance(RebalanceRequest(**fields))  # type: ignore[arg-type]
        return await self.ended(view.operation_id)

    async def ended(self, operation_id: str) -> OperationView:
        follower = asyncio.create_task(self.until(lambda _: False))
        try:
            async with asyncio.timeout(WAIT_S):
                return await self.manager.wait_operation(operation_id, WAIT_S)
        finally:
            if follower.done():
                follower.result()
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    async def phase(self, operation_id: str, phase: str) -> None:
        """Until the operation has reached the phase."""
        async with asyncio.timeout(WAIT_S):
            while True:
                view = await self.manager.operation(operation_id)
                if view is not None and view.phase == phase:
                    return
                await asyncio.sleep(0.001)

    async def called(self, slot: int, name: str) -> None:
        """Until the worker got this call."""
        async with asyncio.timeout(WAIT_S):
            while (slot, name) not in self.cluster.calls:
                await asyncio.sleep(0.001)

    async def committed(self, slot: int, epoch: int) -> None:
        """Until the worker was told to switch to the epoch, and knows it."""
        async with asyncio.timeout(WAIT_S):
            while slot not in self.cluster.alive or self.cluster.alive[slot].committed != epoch:
                await asyncio.sleep(0.001)

    def serving(self) -> list[int]:
        return [member.slot for member in self.view().members if member.state == "serving"]

    async def restart(self) -> None:
        """kill -9 of the controller, and what Ray does then."""
        self.store.cut()
        here = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task not in self._before and task is not here]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._new_manager()

    async def settled(self) -> None:
        """Until nothing goes on; then everything that a good or a bad end promises must hold."""
        async with asyncio.timeout(WAIT_S):
            await self.manager._adopted.wait()
            while not self.manager._is_idle or self.manager._spares._loading is not None or self._is_replacing():
                await asyncio.sleep(0.001)
        view = self.view()
        assert view.state == "serving", view.cause
        self.cluster.check()
        states = {member.slot: member.state for member in view.members}
        assert set(states.values()) <= {"serving", "spare"}
        assert set(self.cluster.alive) == set(states), "a process without a place, or a place without a process"
        serving = {p.slot for p in self.cluster.alive.values() if p.is_serving}
        assert serving == {slot for slot, state in states.items() if state == "serving"}
        topology = next(p.topology for p in self.cluster.alive.values() if p.is_serving)
        assert topology is not None
        assert (view.epoch, view.placement) == (topology.epoch, topology.placement.assignments)

    def _is_replacing(self) -> bool:
        replacing = self.manager._repairs._replacing
        return replacing is not None and not replacing.done()

    async def stop(self) -> None:
        await self.manager.stop(True)
        assert not self.cluster.alive
        assert not self.values
        tasks = [t for t in asyncio.all_tasks() if t not in self._before and t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run(body: Callable[[Deployment], Awaitable[None]], **options: Any) -> None:
    """Start a deployment, do that, and stop it; nothing may be left."""

    async def all_of_it() -> None:
        deployment = await Deployment(**options).serve()
        await body(deployment)
        await deployment.stop()

    asyncio.run(all_of_it())
