"""How ranks find each other in a store, and what torch says when they do not, in words that name slots."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from moeray.comm.errors import GroupError, GroupTimeout


class Meeting:
    """How ranks find each other in the store, and who has not come when the deadline is over."""

    def __init__(self, epoch: int, rank: int, slots: Sequence[int], store: Store, deadline: float) -> None:
        self.store = PrefixStore(f"epoch-{epoch}", store)
        self._who = f"epoch {epoch}, rank {rank} (slot {slots[rank]}) of slots {list(slots)}"
        self._rank = rank
        self._slots = slots
        self._deadline = deadline

    def remaining(self) -> timedelta:
        """Time to the deadline, never zero, which torch takes as no limit."""
        return timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))

    def wait_for_all(self, stage: str) -> None:
        """Tell that this rank reached the stage, and wait until all have."""
        keys = [f"{stage}/{rank}" for rank in range(len(self._slots))]
        with self.translated(stage):
            self.store.set(keys[self._rank], "1")
            self.store.wait(keys, self.remaining())

    @contextmanager
    def translated(self, stage: str = "warm") -> Iterator[None]:
        """Translate torch's errors; blame the ranks that have not reached the stage."""
        try:
            yield
        except GroupError as error:
            raise type(error)(str(error), slots=self._missing(stage) or error.slots) from error
        except RuntimeError as error:
            missing = self._missing(stage)
            text = f"{self._who}: the group could not be built, slots {list(missing)} are not {stage}"
            raise translate(error, text, missing) from error

    def _missing(self, stage: str) -> tuple[int, ...]:
        try:
            return tuple(
                slot
                for rank, slot in enumerate(self._slots)
                if rank != self._rank and not self.store.check([f"{stage}/{rank}"])
            )
        except RuntimeError:
            # The store itself is gone: nobody can be named.
            return ()


def translate(error: RuntimeError, text: str, slots: Sequence[int]) -> GroupError:
    message = str(error)
    timed_out = any(mark in message.lower() for mark in ("timed out", "timeout", "time out"))
    kind = GroupTimeout if timed_out else GroupError
    return kind(f"{text}: {message.splitlines()[0] if message else type(error).__name__}", slots=slots)
