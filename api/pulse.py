"""Whether the controller answers. One that hangs is noticed by nobody else: its process lives, and streams go on."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from moeray.api.control import ControlClient
from moeray.comm.errors import MoerayError

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
SLICE_S = 0.25
HUNG_S = 10.0
# A process that was ended needs some time to start again.
AGAIN_S = 60.0


class Pulse:
    """Asks the controller for a sign of life; `on_change` is called while there is none, and when there is one again.

    A controller that was silent for `hung_s` is ended, if `may_end` says yes; what cannot be reached is not hung.
    """

    def __init__(
        self,
        control: ControlClient,
        *,
        on_change: Callable[[], None],
        may_end: Callable[[], bool],
        hung_s: float = HUNG_S,
    ) -> None:
        self.silent_s = 0.0
        self._control = control
        self._on_change = on_change
        self._may_end = may_end
        self._hung_s = hung_s
        self._end_at_s = hung_s
        self._asked = asyncio.Event()

    def nudge(self) -> None:
        """Ask now: something else is wrong."""
        self._asked.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._ask()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), PERIOD_S)
            self._asked.clear()

    async def _ask(self) -> None:
        """Returns when it has answered."""
        while True:
            call = asyncio.create_task(self._control.ping())
            try:
                await self._wait(call)
                call.result()
            except MoerayError:
                await asyncio.sleep(SLICE_S)
                self._count(SLICE_S)
                continue
            finally:
                call.cancel()
            if self.silent_s > 0:
                self.silent_s, self._end_at_s = 0.0, self._hung_s
                self._on_change()
            return

    async def _wait(self, call: "asyncio.Task[None]") -> None:
        """Until the call is done. Time in which this process itself did not run does not count."""
        last = time.monotonic()
        while not (await asyncio.wait({call}, timeout=SLICE_S))[0]:
            now = time.monotonic()
            self._count(min(now - last, 2 * SLICE_S))
            last = now
            if self.silent_s >= self._end_at_s and self._may_end():
                self._end_at_s = self.silent_s + AGAIN_S
                await self._end()

    def _count(self, seconds: float) -> None:
        self.silent_s += seconds
        self._on_change()

    async def _end(self) -> None:
        try:
            ended = await self._control.end_hung()
        except MoerayError as error:
            logger.warning("the controller hangs and could not be ended: %s", error)
            return
        if ended is not None:
            logger.error("the controller has not answered for %.0f s: %s was ended", self.silent_s, ended)
