"""The one place where the current `Membership` hangs, and where readers wait for the next one."""

import asyncio
from collections.abc import Callable

from moeray.elastic.membership import Membership


class Board:
    """Holds one value, swapped whole. All calls come from one event loop."""

    def __init__(self, membership: Membership) -> None:
        self._current = membership
        self._changed = asyncio.Event()

    @property
    def current(self) -> Membership:
        return self._current

    def update(self, change: Callable[[Membership], Membership]) -> Membership:
        """Replace the value by `change(value)` and wake all readers, unless nothing changed."""
        changed = change(self._current)
        if changed.version != self._current.version:
            self._current = changed
            self._changed.set()
            self._changed = asyncio.Event()
        return changed

    async def newer_than(self, version: int, timeout_s: float) -> Membership:
        """The value once its version is above `version`; after `timeout_s` the current one."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._current.version <= version:
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self._current
