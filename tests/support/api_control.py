"""A controller by hand, for tests of the front end: the test says which view and which operation there is."""

import asyncio
import time
from collections.abc import Mapping, Sequence

import msgspec

from moeray.comm.errors import ControlTimeout, OperationRefused
from moeray.comm.sockets import KeyPair
from moeray.elastic.scaling import ScaleLimits, check_operation, check_types, plan_scale
from moeray.elastic.view import (
    Attachment,
    ClusterView,
    FaultView,
    MemberView,
    ModelView,
    OperationView,
    PhaseView,
    RebalanceRequest,
    ScaleRequest,
)
from tests.support.api_worker import FakeWorker

VOCAB_SIZE = 512
MAX_MODEL_LEN = 256


def make_view(
    workers: Sequence[FakeWorker],
    state: str = "serving",
    *,
    states: Mapping[int, str] | None = None,
    version: int = 1,
    epoch: int = 1,
) -> ClusterView:
    """A view of these workers; `states` are those of members that do not just serve."""
    states = states or {}
    in_group = [worker for worker in workers if states.get(worker.slot, "serving") in ("serving", "leaving", "dead")]
    members = tuple(
        MemberView(
            slot=worker.slot,
            incarnation=worker.incarnation,
            rank=in_group.index(worker) if worker in in_group else None,
            pid=1000 + worker.slot,
            node="127.0.0.1",
            state=states.get(worker.slot, "serving"),
            num_experts=4,
            endpoint=worker.inbox.endpoint,
            public_key=worker.inbox.public_key,
        )
        for worker in workers
    )
    model = ModelView(
        dtype="fp32",
        weights="fp32",
        combine="exact",
        dispatcher="all_to_all",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(0,),
        num_moe_layers=1,
        num_experts=8,
        num_seats=8,
        kv_blocks_per_worker=100,
        weights_bytes_per_worker=1,
        buffer_bytes_per_worker=1,
        seat_bytes=1,
        load_s=0.1,
        load_peak_bytes_per_worker=1,
        not_finite=(),
    )
    placement = (tuple(tuple(range(2)) for _ in in_group),)
    return ClusterView(
        version=version, state=state, cause=None, epoch=epoch, members=members, placement=placement, model=model
    )


class FakeControl:
    """The controller's side: `publish` makes a new view, `go_on` moves the operation that runs.

    While it `is_balanced`, a rebalance is done at once.
    """

    limits = ScaleLimits(min_workers=1, max_workers=4)

    def __init__(self, view: ClusterView, keys: KeyPair) -> None:
        self.current = view
        self.is_silent = False
        self.is_hung = False
        self.num_ended = 0
        self.keys = keys
        self.is_balanced = False
        self.requests: list[ScaleRequest | RebalanceRequest] = []
        self.history: dict[str, OperationView] = {}
        self.faulty: list[FaultView] = []
        self.num_questions = 0

    async def ping(self) -> None:
        await self._check_answers()

    async def end_hung(self) -> str | None:
        self.num_ended += 1
        self.is_hung = False
        return "its process 1"

    async def attach(self) -> Attachment:
        return Attachment(lease=7, public_key=self.keys.public, secret_key=self.keys.secret)

    async def _check_answers(self) -> None:
        while self.is_hung:
            await asyncio.sleep(0.005)
        if self.is_silent:
            raise ControlTimeout("the controller does not answer")

    async def view(self, after_version: int, timeout_s: float) -> ClusterView:
        await self._check_answers()
        deadline = time.monotonic() + timeout_s
        while self.current.version <= after_version and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
            await self._check_answers()
        return self.current

    def publish(self, view: ClusterView) -> None:
        self.current = view

    async def scale(self, request: ScaleRequest) -> OperationView:
        await self._check_answers()
        check_types(request)
        known = self._known(request.operation_id)
        if known is not None:
            return known
        serving = tuple(member.slot for member in self.current.members)
        plan = plan_scale(request, serving, self.limits)
        self.requests.append(request)
        joiners = tuple(slot for slot in range(8) if slot not in serving)[: plan.num_joiners]
        return self._begin(
            request,
            kind="scale",
            requested={} if request.workers is None else {"workers": request.workers},
            is_over=plan.changes_nothing,
            targets=tuple(sorted((*plan.stayers, *joiners))),
            joiners=joiners,
            leavers=plan.leavers,
        )

    async def rebalance(self, request: RebalanceRequest) -> OperationView:
        await self._check_answers()
        check_operation(request)
        known = self._known(request.operation_id)
        if known is not None:
            return known
        self.requests.append(request)
        targets = tuple(member.slot for member in self.current.members)
        return self._begin(request, kind="rebalance", is_over=self.is_balanced, targets=targets)

    def _known(self, operation_id: str | None) -> OperationView | None:
        known = self.history.get(operation_id or "")
        if known is None and (running := self.running) is not None:
            raise OperationRefused(f"operation {running.operation_id} runs", operation_id=running.operation_id)
        return known

    def _begin(
        self,
        request: ScaleRequest | RebalanceRequest,
        *,
        kind: str,
        is_over: bool,
        targets: tuple[int, ...],
        requested: dict[str, int | tuple[int, ...]] | None = None,
        joiners: tuple[int, ...] = (),
        leavers: tuple[int, ...] = (),
    ) -> OperationView:
        view = OperationView(
            operation_id=request.operation_id or f"operation-{len(self.history)}",
            kind=kind,
            requested=requested or {},
            phase="planned",
            outcome="done" if is_over else None,
            reason=None,
            from_epoch=1,
            to_epoch=1 if is_over else 2,
            phases=(PhaseView(name="planned", started_at=time.time(), seconds=None),),
            deadline_s=60.0 if request.deadline_s is None else request.deadline_s,
            targets=targets,
            joiners=joiners,
            leavers=leavers,
            moved_experts=4,
        )
        self.history[view.operation_id] = view
        return view

    @property
    def running(self) -> OperationView | None:
        return next((view for view in self.history.values() if view.outcome is None), None)

    def go_on(self, *phases: str, outcome: str | None = None, reason: str | None = None, seconds: float = 0.5) -> None:
        """The operation that runs reaches these phases, the one before each took `seconds`, and may be over."""
        view = self.running
        assert view is not None
        for phase in phases:
            last = msgspec.structs.replace(view.phases[-1], seconds=seconds)
            new = PhaseView(name=phase, started_at=last.started_at + seconds, seconds=None)
            view = msgspec.structs.replace(view, phase=phase, phases=(*view.phases[:-1], last, new))
        if outcome is not None:
            view = msgspec.structs.replace(view, outcome=outcome, reason=reason, moved_bytes=1000, kv_blocks=3)
        self.history[view.operation_id] = view

    async def operations(self) -> tuple[OperationView, ...]:
        await self._check_answers()
        self.num_questions += 1
        return tuple(self.history.values())

    async def faults(self) -> tuple[FaultView, ...]:
        await self._check_answers()
        return tuple(self.faulty)

    async def operation(self, operation_id: str) -> OperationView | None:
        await self._check_answers()
        return self.history.get(operation_id)

    async def wait_operation(self, operation_id: str, timeout_s: float) -> OperationView:
        deadline = time.monotonic() + timeout_s
        while self.history[operation_id].outcome is None and time.monotonic() < deadline:
            await self._check_answers()
            await asyncio.sleep(0.005)
        return self.history[operation_id]
