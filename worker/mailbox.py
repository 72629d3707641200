"""A worker's end of its sockets: which front end it belongs to, and what goes to it.

One front end holds the lease at a time; a newer lease takes over and older ones' messages are dropped and counted.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from moeray.comm.messages import KVBlock, Wake
from moeray.comm.sockets import Inbox
from moeray.worker.messages import (
    Abort,
    Attach,
    Attached,
    EngineFailed,
    HandedOver,
    Heartbeat,
    Rejected,
    StepOutput,
    Submit,
)

logger = logging.getLogger(__name__)

# A front end that is gone would fill the log, step by step.
TELL_AGAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class AttachAgain:
    """The lease's holder asks whether it has it: the answer got lost."""


class Mailbox:
    """Filters what arrives by lease and sends to the lease's holder. Belongs to the engine's thread."""

    def __init__(self, inbox: Inbox, *, orphan_timeout_s: float, clock: Callable[[], float]) -> None:
        self.inbox = inbox
        self.orphan_timeout_s = orphan_timeout_s
        self.clock = clock
        self.lease = -1
        self.holder: bytes | None = None
        self.former: bytes | None = None
        self._seen_at = clock()
        self._num_dropped = 0
        self._told_lease = -1
        self._told_at = clock()

    @property
    def num_dropped(self) -> int:
        """Messages of older leases, undecodable ones, and those that the front end did not take."""
        return self._num_dropped + self.inbox.num_dropped

    @property
    def silent_s(self) -> float:
        """Seconds since the lease's holder last said anything."""
        return self.clock() - self._seen_at

    @property
    def is_orphaned(self) -> bool:
        return self.silent_s > self.orphan_timeout_s

    def start_waiting(self) -> None:
        """The orphan time-out runs from here."""
        self._seen_at = self.clock()

    def receive(self, timeout_s: float) -> Iterator[Any]:
        """What the engine has to act on; waits at most `timeout_s` for the first message.

        An `Attach` is passed on only if it brings a newer lease: what the older one asked for is void. Messages of
        peers and commands of the worker's own threads pass as they are.
        """
        for sender, message in self.inbox.receive(timeout_s):
            if sender is None:
                yield message
                continue
            match message:
                case Submit() | Abort() | Heartbeat():
                    if self._holds_lease(sender, message.lease) and not isinstance(message, Heartbeat):
                        yield message
                case Attach():
                    if self._take_lease(sender, message.lease):
                        yield message
                    elif message.lease == self.lease:
                        yield AttachAgain()
                case Wake() | KVBlock():
                    yield message

    def _holds_lease(self, sender: bytes, lease: int) -> bool:
        if lease != self.lease or sender != self.holder:
            self._num_dropped += 1
            return False
        self._seen_at = self.clock()
        return True

    def _take_lease(self, sender: bytes, lease: int) -> bool:
        if lease < self.lease:
            self._num_dropped += 1
            return False
        newer = lease > self.lease
        if newer:
            self.former = self.holder
        self.lease, self.holder = lease, sender
        self._seen_at = self.clock()
        return newer

    def send_to_former(self, message: Attached) -> None:
        """Tell whoever held the lease before that it is over, if that one still listens."""
        if self.former is not None:
            self.inbox.send(self.former, message)
            self.former = None

    def send(self, message: Attached | StepOutput | Rejected | EngineFailed | HandedOver) -> None:
        """To the lease's holder, without waiting; dropped and counted if it does not take it."""
        if self.holder is None:
            return
        if not self.inbox.send(self.holder, message):
            self._num_dropped += 1
            if self.lease != self._told_lease or self.clock() - self._told_at >= TELL_AGAIN_S:
                self._told_lease, self._told_at = self.lease, self.clock()
                logger.warning("lease %d does not take messages, dropped a %s", self.lease, type(message).__name__)
