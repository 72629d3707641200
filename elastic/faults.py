"""What went wrong with members of the group, and what came of it: one record each, the newest last."""

import logging
import time
from collections import deque
from collections.abc import Iterable

import msgspec

from moeray.elastic.view import FaultView

logger = logging.getLogger(__name__)


class FaultLog:
    """Bounded. Each fault has one line in the log, with its root cause."""

    def __init__(self, limit: int) -> None:
        self._faults: deque[FaultView] = deque(maxlen=limit)
        self._next_id = 0

    def restore(self, faults: Iterable[FaultView]) -> None:
        """What an earlier life of the controller knew."""
        self._faults.extend(faults)
        self._next_id = max((fault.fault_id for fault in self._faults), default=-1) + 1

    def views(self) -> tuple[FaultView, ...]:
        """All that are remembered, the oldest first."""
        return tuple(self._faults)

    def add(self, *, slot: int, incarnation: int, kind: str, cause: str, epoch: int) -> None:
        """A member is lost, or its group is."""
        logger.error("[epoch %d] fault: worker %d.%d %s: %s", epoch, slot, incarnation, kind, cause)
        fault = FaultView(
            fault_id=self._next_id,
            slot=slot,
            incarnation=incarnation,
            kind=kind,
            cause=cause,
            epoch=epoch,
            at=time.time(),
            recovered_s=None,
            to_epoch=None,
        )
        self._next_id += 1
        self._faults.append(fault)

    def recovered(self, epoch: int) -> None:
        """The group serves again: all faults that were open are over."""
        now = time.time()
        for index, fault in enumerate(self._faults):
            if fault.recovered_s is None:
                seconds = max(0.0, now - fault.at)
                self._faults[index] = msgspec.structs.replace(fault, recovered_s=seconds, to_epoch=epoch)
