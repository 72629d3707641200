"""Takes wishes for another size or a better balance, one at a time, and tells what became of them."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from moeray.comm.errors import MoerayError, OperationRefused
from moeray.elastic.board import Board
from moeray.elastic.controller_config import ControllerConfig
from moeray.elastic.fleet import Fleet
from moeray.elastic.history import History
from moeray.elastic.member import WorkerSource
from moeray.elastic.operations import Reconfiguration, Tools
from moeray.elastic.phases import ended
from moeray.elastic.proposals import Proposal, Proposals
from moeray.elastic.repair import Repair
from moeray.elastic.scaling import check_operation, check_types
from moeray.elastic.spares import Spares
from moeray.elastic.state import InFlight, SavedState
from moeray.elastic.view import OperationView, RebalanceRequest, ScaleRequest

logger = logging.getLogger(__name__)


class Scaler:
    """All calls come from one event loop.

    `save` writes the controller's state; `on_failed` hears of an operation that was committed and did not come to its
    end, `on_scaled` of the size that somebody asked for and got. `next_epoch` is a number that no operation has had.
    """

    def __init__(
        self,
        config: ControllerConfig,
        *,
        source: WorkerSource,
        fleet: Fleet,
        spares: Spares,
        board: Board,
        save: Callable[[], Awaitable[None]],
        on_failed: Callable[[str], None],
        on_scaled: Callable[[int], None],
    ) -> None:
        self.history = History(config.history_limit)
        self.next_epoch = 0
        self._config = config
        self._proposals = Proposals(config, source=source, fleet=fleet, spares=spares, board=board)
        self._fleet = fleet
        self._spares = spares
        self._board = board
        self._save = save
        self._on_failed = on_failed
        self._on_scaled = on_scaled
        self._planning = asyncio.Lock()
        self._num_pauses = 0
        self._current: Reconfiguration | None = None
        self._restored: InFlight | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        is_over = self._task is None or self._task.done()
        return is_over and self.in_flight is None and not self._planning.locked()

    @property
    def in_flight(self) -> InFlight | None:
        """The operation that runs, as a restarted controller needs it."""
        return self._current.in_flight if self._current is not None else self._restored

    def take_epoch(self) -> int:
        """A number for an epoch, that no other operation gets."""
        self.next_epoch += 1
        return self.next_epoch - 1

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Entered once no operation runs; none is begun until it is left."""
        self._num_pauses += 1
        try:
            async with self._planning:
                if self._task is not None:
                    await asyncio.wait({self._task})
                yield
        finally:
            self._num_pauses -= 1

    async def scale(self, request: ScaleRequest, *, kind: str = "scale") -> OperationView:
        """Begin the operation and return it; one that has nothing to do, or a known id, returns what is known.

        Raises `ValueError` with the limits, and `OperationRefused` while another runs or the group does not serve.
        """
        check_types(request)
        return await self._start(request.operation_id, lambda new_id: self._proposals.scale(request, new_id, kind))

    async def rebalance(self, request: RebalanceRequest) -> OperationView:
        """Let the members exchange experts, so that the load that they counted is spread better; else as `scale`.

        Raises `MoerayError` that names a member which does not tell its load; nothing is begun then.
        """
        check_operation(request)
        self._check_not_paused()
        known = self._known(request.operation_id)
        if known is not None:
            return known
        # Nothing is held while they are asked: the load is by logical expert, and holds for whatever serves then.
        load_LE = await self._proposals.measured_load()
        return await self._start(
            request.operation_id, lambda new_id: self._proposals.rebalance(request, new_id, load_LE)
        )

    async def wait(self, operation_id: str, timeout_s: float) -> OperationView:
        """See `History.wait`."""
        return await self.history.wait(operation_id, timeout_s)

    def lost(self, slot: int, reason: str) -> bool:
        """A worker died or failed. Returns whether that concerns only the operation that runs."""
        operation = self._current
        if operation is None:
            return False
        in_group = slot in self._board.current.survivors
        if slot in operation.view.leavers and not in_group:
            return True  # it was about to end anyway
        if slot not in operation.everyone:
            return False
        return operation.interrupt(slot, reason) and not in_group

    def restore(self, saved: SavedState) -> None:
        """What an earlier life of the controller knew; an operation that ran then waits for `resume`."""
        self.next_epoch = saved.next_epoch
        for view in saved.history:
            self.history.put(view)
        if saved.in_flight is not None:
            self.history.put(saved.in_flight.view)
            self._restored = saved.in_flight

    def resume(self) -> None:
        """Bring the operation to its end that ran when the controller died, if any did."""
        if self._restored is not None:
            make = Repair if self._restored.view.kind == "repair" else Reconfiguration
            operation = make(self.tools(), self._restored, None)
            self._begin(operation, operation.resume)
            self._restored = None

    async def stop(self) -> None:
        """Let go of the operation that runs: the workers are going to be ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def tools(self) -> Tools:
        """What operations work with."""
        return Tools(
            fleet=self._fleet,
            board=self._board,
            deadlines=self._config.operation_deadlines,
            publish=self._publish,
        )

    def _check_not_paused(self) -> None:
        if self._num_pauses:
            self.history.check_idle()
            raise OperationRefused("the group is being repaired, it must serve before it can be changed")

    def _known(self, operation_id: str | None) -> OperationView | None:
        """The operation of this id; None if it is a new one that may begin. Raises `OperationRefused` if it may not."""
        known = self.history.get(operation_id) if operation_id is not None else None
        if known is None:
            self.history.check_idle()
            state = self._board.current.state
            if state != "serving":
                raise OperationRefused(f"the deployment is {state}, it must serve before it can be changed")
        return known

    async def _start(self, operation_id: str | None, propose: Callable[[str], Awaitable[Proposal]]) -> OperationView:
        """Begin what is proposed, if nothing else runs, and return it as it stands."""
        self._check_not_paused()
        async with self._planning:
            known = self._known(operation_id)
            if known is not None:
                return known
            proposal = await propose(operation_id or uuid.uuid4().hex)
            if proposal.nothing is not None:
                await self._publish(ended(proposal.view, "done", proposal.nothing))
            else:
                operation = self._accept(proposal)
                await self._save_first(operation)
                self._begin(operation, operation.run)
            view = self.history.get(proposal.view.operation_id)
            assert view is not None
            return view

    def _accept(self, proposal: Proposal) -> Reconfiguration:
        """The operation is in the history, with an epoch and spares that no other gets."""
        view = msgspec.structs.replace(proposal.view, to_epoch=self.take_epoch())
        stayers = tuple(slot for slot in view.targets if slot not in view.joiners)
        before = tuple(sorted((*stayers, *view.leavers)))
        logger.info("operation %s: slots %s become %s", view.operation_id, before, view.targets)
        for slot in proposal.spares:
            self._spares.take(slot)
        self.history.put(view)
        in_flight = InFlight(view=view, topology=None, spares=proposal.spares)
        return Reconfiguration(self.tools(), in_flight, proposal.placement)

    async def _save_first(self, operation: Reconfiguration) -> None:
        """Nothing is begun that a restarted controller would not know of. Raises `MoerayError`."""
        self._current = operation
        try:
            await self._save()
        except MoerayError as error:
            self._current = None
            self.history.put(ended(operation.view, "rolled_back", f"it could not be saved: {error}"))
            self._board.update(lambda now: now.marked(operation.in_flight.spares, "spare"))
            raise

    async def _publish(self, view: OperationView) -> None:
        if view.outcome is not None:
            self._current = None
        if view.outcome == "done" and view.kind == "scale":
            self._on_scaled(len(view.targets))
        self.history.put(view)
        await self._save()

    def _begin(self, operation: Reconfiguration, work: Callable[[], Awaitable[None]]) -> None:
        self._current = operation
        self._task = asyncio.get_running_loop().create_task(self._carry_out(operation, work))
        self._task.add_done_callback(lambda _: self._spares.refill())

    async def _carry_out(self, operation: Reconfiguration, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        finally:
            if operation.view.outcome is None:
                self.history.put(ended(operation.view, "failed", operation.interruption or "it was told to stop"))
            self._current = None
        if operation.view.outcome == "failed":
            self._on_failed(f"operation {operation.view.operation_id}: {operation.view.reason}")
