"""The operations of a deployment: the one that runs, and those that are over, the newest last."""

import asyncio
from collections.abc import Iterable

from moeray.comm.errors import OperationRefused
from moeray.elastic.view import OperationView


class History:
    """Bounded; all calls come from one event loop."""

    def __init__(self, limit: int, past: Iterable[OperationView] = ()) -> None:
        if limit < 1:
            raise ValueError(f"limit is {limit}, must be at least 1")
        self._limit = limit
        self._views = {view.operation_id: view for view in past}
        self._ended = asyncio.Event()

    @property
    def running(self) -> OperationView | None:
        """The operation that is not over."""
        return next((view for view in self._views.values() if view.outcome is None), None)

    def views(self) -> tuple[OperationView, ...]:
        """All that are remembered, the oldest first."""
        return tuple(self._views.values())

    def get(self, operation_id: str) -> OperationView | None:
        """The operation as it stands, None if it is unknown or forgotten."""
        return self._views.get(operation_id)

    def check_idle(self) -> None:
        """Raises `OperationRefused`, naming the operation that runs."""
        if (running := self.running) is not None:
            raise OperationRefused(
                f"operation {running.operation_id} is {running.phase}, only one may run at a time",
                operation_id=running.operation_id,
            )

    def put(self, view: OperationView) -> None:
        """A new operation, or news of a known one; the oldest beyond the limit is forgotten."""
        self._views[view.operation_id] = view
        while len(self._views) > self._limit:
            oldest = next(known for known, old in self._views.items() if old.outcome is not None)
            del self._views[oldest]
        if view.outcome is not None:
            self._ended.set()
            self._ended = asyncio.Event()

    async def wait(self, operation_id: str, timeout_s: float) -> OperationView:
        """The operation once it is over; after `timeout_s` as it stands. `ValueError` if it is unknown."""
        if operation_id not in self._views:
            raise ValueError(f"operation {operation_id!r} is unknown, it was never started or is forgotten")
        view = self._views[operation_id]
        try:
            async with asyncio.timeout(timeout_s):
                while view.outcome is None:
                    await self._ended.wait()
                    view = self._views.get(operation_id, view)
        except TimeoutError:
            pass
        return view
