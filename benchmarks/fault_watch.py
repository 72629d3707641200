"""Waiting for what follows a fault, beside the streams, and how times of many faults are shown."""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.deployment import Deployment
from benchmarks.streams import percentile

SOON_S = 60.0


def serving(server: Deployment) -> dict[int, dict[str, Any]]:
    """The members by slot."""
    members = server.get("/topology")["members"]
    return {member["slot"]: member for member in members if member["state"] == "serving"}


async def until(condition: Callable[[], object], what: str) -> None:
    """Ask again and again, beside the streams. Raises `RuntimeError` if it takes too long."""
    end = time.monotonic() + SOON_S
    while not await asyncio.to_thread(condition):
        if time.monotonic() > end:
            raise RuntimeError(f"not within {SOON_S:g} s: {what}")
        await asyncio.sleep(0.02)


def three(seconds: Sequence[float]) -> str:
    """Median, 95th percentile (nearest rank) and maximum, in milliseconds."""
    values = (statistics.median(seconds), percentile(seconds, 0.95), max(seconds))
    return " / ".join(f"{value * 1e3:.0f}" for value in values)
