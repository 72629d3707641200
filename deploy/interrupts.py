"""SIGINT, SIGTERM and SIGHUP of the supervisor: the first asks for an orderly end, the second for one at once."""

import asyncio
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any, Self

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The user asked to end while blocking work ran."""


class Interrupts:
    """What a signal does depends on the phase.

    Blocking work is interrupted by `Interrupted`. In an event loop (`attach`) the first signal sets `first` and the
    next `hurry`. While the last processes end (`end_at_once`), a signal kills them. SIGHUP says that the terminal is
    closed: what is said from then on goes nowhere. Where it is ignored, as under nohup, it stays so.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.hurry = asyncio.Event()
        self._before: dict[signal.Signals, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> Self:
        self._terminals = [stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream and stream.isatty()]
        for number in SIGNALS:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on and as long as the loop runs, signals set the events."""
        for number in self._before:
            loop.add_signal_handler(number, self._count, number)

    def end_at_once(self) -> None:
        """From now on a signal kills all that is below this process."""
        for number in self._before:
            signal.signal(number, self._kill_children)

    def _note_hangup(self, number: int) -> None:
        if number == signal.SIGHUP and self._terminals:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for terminal in self._terminals:
                os.dup2(nowhere, terminal)
            os.close(nowhere)

    def _count(self, number: int) -> None:
        self._note_hangup(number)
        (self.hurry if self.first.is_set() else self.first).set()

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        self._note_hangup(number)
        raise Interrupted

    def _kill_children(self, number: int, _frame: FrameType | None) -> None:
        self._note_hangup(number)
        for process in psutil.Process().children(recursive=True):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
