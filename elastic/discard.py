"""Back from a prepared epoch that nobody was told to switch to."""

import asyncio
import logging
from collections.abc import Sequence

from moeray.comm.errors import MoerayError, WorkerDied
from moeray.elastic.fleet import Fleet
from moeray.elastic.startup import on_all

logger = logging.getLogger(__name__)

RETRY_S = 0.05


async def discard(fleet: Fleet, slots: Sequence[int], epoch: int, timeout_s: float) -> set[int]:
    """Tell all slots to forget the epoch, again and again until `timeout_s`. Returns those that could not.

    The next operation asks them once more, before it prepares anything.
    """

    async def ask(slot: int) -> int | None:
        try:
            async with asyncio.timeout(timeout_s):
                await _until_done(fleet, slot, epoch)
        except (TimeoutError, WorkerDied) as error:
            logger.warning("[epoch %d] worker %d did not discard it: %s", epoch, slot, error or "no answer")
            return slot
        return None

    return {slot for slot in await on_all(slots, ask) if slot is not None}


async def _until_done(fleet: Fleet, slot: int, epoch: int) -> None:
    while True:
        try:
            await fleet.member(slot).discard(epoch)
            return
        except WorkerDied:
            raise
        except MoerayError as error:
            logger.warning("[epoch %d] worker %d did not discard it yet: %s", epoch, slot, error)
        await asyncio.sleep(RETRY_S)
