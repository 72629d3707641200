"""Hears of every operation and fault, whoever caused it, so that metrics count each one. Idle, it asks nothing."""

import asyncio
import logging

from moeray.api.control import ControlClient
from moeray.api.fault_metrics import FaultMetrics
from moeray.api.kept import Kept
from moeray.api.operation_metrics import OperationMetrics
from moeray.comm.errors import MoerayError
from moeray.elastic.view import OperationView

logger = logging.getLogger(__name__)

RETRY_S = 1.0


class OperationWatch:
    """`nudge` it when something may have begun: the view changed.

    `told_operations` and `told_faults` are what it heard last.
    """

    def __init__(
        self, control: ControlClient, operations: OperationMetrics, faults: FaultMetrics, *, poll_s: float
    ) -> None:
        self._control = control
        self._operations = operations
        self._faults = faults
        self._poll_s = poll_s
        self.told_operations = Kept(control.operations)
        self.told_faults = Kept(control.faults)
        self._changed = asyncio.Event()
        self._asks_again = False

    def nudge(self) -> None:
        """Look at operations and faults soon."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled. Each call to the controller ends within its own deadline."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._catch_up()
            except (MoerayError, ValueError) as error:
                logger.warning("the controller did not tell of its operations, asking again: %s", error)
                self._asks_again = True
            if self._asks_again:
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    async def _catch_up(self) -> None:
        """Returns when no operation runs."""
        while (running := await self._look()) is not None:
            view = await self._control.wait_operation(running.operation_id, self._poll_s)
            self._operations.on_operation(view)

    async def _look(self) -> OperationView | None:
        """Count what is new; returns the operation that runs."""
        self._asks_again = self._faults.on_faults(await self.told_faults.fresh())
        views = await self.told_operations.fresh()
        self._operations.on_operations(views)
        return next((view for view in views if view.outcome is None), None)
