"""Asking members how far they are, again and again, whether or not they answer."""

import asyncio
import time
from collections.abc import Iterable, Mapping

from moeray.comm.messages import Tick
from moeray.elastic.member import Member

# An answer may be lost together with its connection, so the question is put again; an earlier one still counts.
REPEAT_S = 0.5


class Ticks:
    """Questions that are on their way."""

    def __init__(self) -> None:
        self._asked: dict[Member, list[asyncio.Task[Tick]]] = {}
        self._asked_at: dict[Member, float] = {}

    def ask(self, members: Iterable[Member]) -> None:
        """Put the question to those that have answered the last one, and to those that have not for long."""
        now = time.monotonic()
        for member in members:
            if member not in self._asked or now - self._asked_at[member] >= REPEAT_S:
                self._asked.setdefault(member, []).append(asyncio.create_task(member.tick()))
                self._asked_at[member] = now

    def take(self) -> Mapping[Member, Tick | BaseException | None]:
        """What each that was asked has answered since: the newest tick, or why it cannot tell; None for nothing yet."""
        taken: dict[Member, Tick | BaseException | None] = {}
        for member, calls in list(self._asked.items()):
            done = [call for call in calls if call.done()]
            taken[member] = (done[-1].exception() or done[-1].result()) if done else None
            if done:
                for call in self._asked.pop(member):
                    call.add_done_callback(_note_error)
                    call.cancel()
        return taken

    async def close(self) -> None:
        """Nobody is asked any more."""
        calls = [call for asked in self._asked.values() for call in asked]
        self._asked.clear()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def _note_error(call: "asyncio.Task[Tick]") -> None:
    """Another answer came first, and nobody waits for this one's error."""
    if not call.cancelled():
        call.exception()
