"""The controller's last answer to a question, for when it does not answer now."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from moeray.comm.errors import ControlTimeout, MoerayError

T = TypeVar("T")

PATIENCE_S = 0.8


async def soon(call: Awaitable[T]) -> T:
    """The call's result; `ControlTimeout` if it takes longer than a client should wait for news."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await call
    except TimeoutError:
        raise ControlTimeout(f"no answer within {PATIENCE_S:g} s") from None


@dataclass(frozen=True, slots=True)
class Told(Generic[T]):
    """A value, and if it is an earlier answer: how old, and why there is no newer one."""

    value: T
    age_s: float | None = None
    reason: str | None = None

    def fields(self) -> dict[str, object]:
        """What a client is told beside the value."""
        return {} if self.age_s is None else {"age_s": round(self.age_s, 1), "reason": self.reason}


class Kept(Generic[T]):
    """Asks by `ask`, and keeps what comes."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._last: tuple[float, T] | None = None

    async def fresh(self) -> T:
        """The answer of now. Raises `MoerayError` in the caller's own time."""
        value = await self._ask()
        self._last = time.monotonic(), value
        return value

    async def soon(self) -> Told[T]:
        """The answer of now if it comes soon, else the last one. `MoerayError` if there is none."""
        try:
            return Told(await soon(self.fresh()))
        except MoerayError as error:
            return self.last(error)

    def last(self, error: MoerayError) -> Told[T]:
        """The last answer, because another one failed to come by `error`, which is raised if there is none."""
        if self._last is None:
            raise error
        at, value = self._last
        return Told(value, time.monotonic() - at, f"the controller does not answer: {error}")
