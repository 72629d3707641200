"""One front end after another on one listening socket: where one dies, the next takes its place and a newer lease."""

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from moeray.comm.errors import StartupError
from moeray.deploy.front_end_process import FrontEndProcess

FIRST_PAUSE_S = 0.2
MOST_DEATHS = 5
DEATHS_WITHIN_S = 60.0


class Restarts:
    """Decides how soon a front end that died is followed by another, if at all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: deque[float] = deque()

    def pause_s(self) -> float | None:
        """One died just now: the pause before the next, doubled with each; None if too many died lately."""
        now = self._clock()
        self._deaths.append(now)
        while self._deaths[0] <= now - DEATHS_WITHIN_S:
            self._deaths.popleft()
        if len(self._deaths) >= MOST_DEATHS:
            return None
        return FIRST_PAUSE_S * 2.0 ** (len(self._deaths) - 1)


class FrontEndKeeper:
    """Starts the first front end at once, and holds the socket for those after it: clients wait in its backlog."""

    def __init__(self, listener: socket.socket, log: Path, console: Console) -> None:
        self._listener = listener
        self._log = log
        self._console = console
        self._settings: Mapping[str, Any] = {}
        self._restarts = Restarts()
        self._ready = asyncio.Event()
        self._ending = asyncio.Event()
        self._current = FrontEndProcess(listener, log)

    @property
    def pid(self) -> int:
        return self._current.pid

    @property
    def is_superseded(self) -> bool:
        """Whether another front end serves now, so that none follows here."""
        return self._current.was_superseded

    async def keep(self, settings: Mapping[str, Any]) -> None:
        """Returns when the last one has ended, which `terminate` or `kill` asked for, or another deployment's front
        end that took its lease (`is_superseded`).

        Raises `StartupError` with its last words if the first one ends before it is ready, or too many die.
        """
        while True:
            await self._follow(settings)
            words = self._current.last_words()
            self._current.kill()
            if self._ending.is_set() or self.is_superseded:
                return
            pause_s = self._restarts.pause_s()
            if not self._ready.is_set():
                raise StartupError(words)
            if pause_s is None:
                raise StartupError(f"{words} ({MOST_DEATHS} of them within {DEATHS_WITHIN_S:g} s)")
            self._tell(f"{words}. Another one starts in {pause_s:g} s.")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause_s)
            if self._ending.is_set():
                return
            self._current = FrontEndProcess(self._listener, self._log)

    async def _follow(self, settings: Mapping[str, Any]) -> None:
        """The life of one of them, up to its end."""
        with contextlib.suppress(StartupError):  # it ended first: whoever comes back from here sees that
            self._current.configure(settings)
            await self._current.ready()
            if self._ready.is_set():
                self._tell(f"The front end serves again, pid {self._current.pid}.")
            self._ready.set()
        await self._current.ended()

    def _tell(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    async def ready(self) -> None:
        """Returns when the first one takes requests."""
        await self._ready.wait()

    def terminate(self) -> None:
        """Ask the one that runs to drain and leave; none follows it, and the port ends with it."""
        self._ending.set()
        self._listener.close()
        self._current.terminate()

    def kill(self) -> None:
        """End the one that runs now, and wait until it is gone."""
        self._ending.set()
        self._listener.close()
        self._current.kill()
