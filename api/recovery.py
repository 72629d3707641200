"""How long clients wait while nothing serves."""

import asyncio
import time
from collections.abc import Callable


class Recovery:
    """A clock that runs while nothing serves; `on_timeout` is called once if that takes longer than `timeout_s`."""

    def __init__(self, timeout_s: float, on_timeout: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._since: float | None = None
        self.is_over = False

    @property
    def unserved_s(self) -> float:
        """For how long nothing has served."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def update(self, is_served: bool) -> None:
        """Tell how it stands; the clock goes on from where serving stopped, and is set back where it begins again."""
        if is_served:
            self.close()
        elif self._timer is None:
            self._since = time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._end)

    def _end(self) -> None:
        self.is_over = True
        self._on_timeout()

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._since, self.is_over = None, None, False
