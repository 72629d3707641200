"""SIGINT and SIGTERM of the supervisor: the first asks for an orderly end, the second for one at once."""

import asyncio
import signal
from types import FrameType, TracebackType
from typing import Any, Self

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """The user asked to end while blocking work ran."""


class Interrupts:
    """What a signal does depends on the phase.

    Blocking work is interrupted by `Interrupted`. In an event loop (`attach`) the first signal sets `first` and the
    next `hurry`. While the last processes end (`end_at_once`), a signal kills them.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.hurry = asyncio.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on and as long as the loop runs, signals set the events."""
        for number in SIGNALS:
            loop.add_signal_handler(number, self._count)

    def end_at_once(self) -> None:
        """From now on a signal kills all that is below this process."""
        for number in SIGNALS:
            signal.signal(number, self._kill_children)

    def _count(self) -> None:
        (self.hurry if self.first.is_set() else self.first).set()

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    def _kill_children(self, _number: int, _frame: FrameType | None) -> None:
        for process in psutil.Process().children(recursive=True):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
