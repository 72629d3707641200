"""A controller's memory in a dictionary, with a place to hold the controller at."""

import asyncio

import msgspec

from moeray.elastic.state import SavedState, StateStore


class FakeStore(StateStore):
    """One controller's way to the shared `values`. After `cut` it reaches nothing: that controller is dead.

    `hold_at(phase, before)` makes the write of an operation that has reached this phase hang, before or after the
    value is there, until `release`; `held` is set then.
    """

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values
        self.held = asyncio.Event()
        self._released = asyncio.Event()
        self._is_cut = False
        self._phase: str | None = None
        self._before = False

    def hold_at(self, phase: str, *, before: bool) -> None:
        self._phase, self._before = phase, before

    def release(self) -> None:
        """What hangs goes on, and nothing hangs any more."""
        self._phase = None
        self._released.set()

    def cut(self) -> None:
        self._is_cut = True

    async def read(self) -> bytes | None:
        return self.values.get("state")

    async def write(self, value: bytes) -> None:
        if self._is_cut:
            return
        in_flight = msgspec.json.decode(value, type=SavedState).in_flight
        hold = in_flight is not None and in_flight.view.phase == self._phase
        if not (hold and self._before):
            self.values["state"] = value
        if hold:
            self.held.set()
            await self._released.wait()

    async def clear(self) -> None:
        if not self._is_cut:
            self.values.clear()
