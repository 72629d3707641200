"""What a wish comes to: the operation as it would begin, and the placement it leads to. Nothing is changed here."""

import asyncio
import logging
from dataclasses import dataclass

from moeray.comm.errors import ControlTimeout, MoerayError
from moeray.comm.messages import ExpertCounts
from moeray.comm.placement import ExpertPlacement
from moeray.comm.topology import Topology
from moeray.elastic.balancer import balancedness, plan_rebalance
from moeray.elastic.board import Board
from moeray.elastic.controller_config import ControllerConfig
from moeray.elastic.fleet import Fleet
from moeray.elastic.member import WorkerSource
from moeray.elastic.phases import entered
from moeray.elastic.planner import num_moved, plan_placement
from moeray.elastic.scaling import ScalePlan, plan_scale
from moeray.elastic.spares import Spares
from moeray.elastic.startup import on_all
from moeray.elastic.view import OperationView, RebalanceRequest, ScaleRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """An operation that could begin. `view` is planned and has no epoch of its own yet.

    `spares` are the joiners that are spares. `nothing` says why there is nothing to do; None if there is.
    """

    view: OperationView
    placement: ExpertPlacement
    spares: tuple[int, ...] = ()
    nothing: str | None = None


class Proposals:
    """All calls come from one event loop, while an epoch serves."""

    def __init__(
        self, config: ControllerConfig, *, source: WorkerSource, fleet: Fleet, spares: Spares, board: Board
    ) -> None:
        self._config = config
        self._source = source
        self._fleet = fleet
        self._spares = spares
        self._board = board

    async def scale(self, request: ScaleRequest, operation_id: str, kind: str) -> Proposal:
        """To another size. Raises `ValueError` with the limits."""
        topology = self._topology
        plan = plan_scale(request, topology.slots, self._config.limits)
        num_cold = max(0, plan.num_joiners - len(self._spares.slots))
        lack = await asyncio.to_thread(self._source.lacks_room_for, num_cold)
        if lack is not None:
            raise ValueError(f"{len(plan.stayers) + plan.num_joiners} workers do not fit: {lack}")
        joiners, spares = self._choose_joiners(plan)
        placement = plan_placement(topology.placement, sorted((*plan.stayers, *joiners)))
        view = self._planned(request, operation_id, kind, placement, joiners=joiners, leavers=plan.leavers)
        nothing = "nothing to do: that is its size" if plan.changes_nothing else None
        return Proposal(view=view, placement=placement, spares=spares, nothing=nothing)

    async def rebalance(self, request: RebalanceRequest, operation_id: str, load_LE: ExpertCounts) -> Proposal:
        """To a placement that spreads this load better over the same slots."""
        current = self._topology.placement
        placement = await asyncio.to_thread(plan_rebalance, current, load_LE)
        view = self._planned(request, operation_id, "rebalance", placement)
        before, after = balancedness(current, load_LE), balancedness(placement, load_LE)
        logger.info(
            "operation %s: balancedness is %.3f in the mean and %.3f at least, planned are %.3f and %.3f",
            operation_id,
            sum(before) / len(before),
            min(before),
            sum(after) / len(after),
            min(after),
        )
        nothing = "nothing to do: no layer would gain enough" if placement == current else None
        return Proposal(view=view, placement=placement, nothing=nothing)

    async def measured_load(self) -> ExpertCounts:
        """What all members counted, added up. Raises `MoerayError` that names one which does not tell."""
        limit_s = self._config.operation_deadlines.status_s

        async def ask(slot: int) -> ExpertCounts:
            try:
                async with asyncio.timeout(limit_s):
                    return await self._fleet.member(slot).expert_load()
            except TimeoutError:
                raise ControlTimeout(f"worker {slot}: did not tell its load within {limit_s:g} s") from None
            except MoerayError as error:
                raise MoerayError(f"worker {slot}: {error}") from error

        counts = await on_all(self._topology.slots, ask)
        return tuple(tuple(map(sum, zip(*layers, strict=True))) for layers in zip(*counts, strict=True))

    @property
    def _topology(self) -> Topology:
        topology = self._board.current.topology
        assert topology is not None
        return topology

    def _planned(
        self,
        request: ScaleRequest | RebalanceRequest,
        operation_id: str,
        kind: str,
        placement: ExpertPlacement,
        *,
        joiners: tuple[int, ...] = (),
        leavers: tuple[int, ...] = (),
    ) -> OperationView:
        topology = self._topology
        view = OperationView(
            operation_id=operation_id,
            kind=kind,
            requested=_requested(request) if isinstance(request, ScaleRequest) else {},
            phase="",
            outcome=None,
            reason=None,
            from_epoch=topology.epoch,
            to_epoch=topology.epoch,
            phases=(),
            deadline_s=request.deadline_s or self._config.operation_deadlines.overall_s,
            targets=placement.slots,
            joiners=joiners,
            leavers=leavers,
            moved_experts=num_moved(topology.placement, placement),
        )
        return entered(view, "planned")

    def _choose_joiners(self, plan: ScalePlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Slots that join, and which of them are spares: those first, then the lowest free ones."""
        spares = self._spares.slots[: plan.num_joiners]
        cold = self._spares.free_slots()[: plan.num_joiners - len(spares)]
        joiners = tuple(sorted((*spares, *cold)))
        if len(joiners) < plan.num_joiners:
            raise ValueError(
                f"{plan.num_joiners} workers would join, must be at most {len(joiners)}, the free slots of "
                f"{self._config.max_workers} (max_workers): a slot is free once its worker has ended"
            )
        return joiners, tuple(sorted(spares))


def _requested(request: ScaleRequest) -> dict[str, int | tuple[int, ...]]:
    requested: dict[str, int | tuple[int, ...]] = {}
    if request.workers is not None:
        requested["workers"] = request.workers
    if request.retire:
        requested["retire"] = request.retire
    return requested
