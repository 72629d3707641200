"""What a worker says in its log of a front end that takes nothing."""

from typing import Any

import pytest

from moeray.worker.mailbox import TELL_AGAIN_S, Mailbox
from moeray.worker.messages import Attach, Rejected


class Deaf:
    """An inbox whose client has just attached with a lease, and takes nothing."""

    num_dropped = 0
    lease = 1

    def receive(self, _: float) -> list[tuple[bytes, Any]]:
        return [(b"client", Attach(self.lease))]

    def send(self, _client: bytes, _message: object) -> bool:
        return False


def test_a_front_end_that_takes_nothing_is_told_of_once_a_lease_and_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    inbox = Deaf()
    mailbox = Mailbox(inbox, orphan_timeout_s=60.0, clock=lambda: now[0])  # type: ignore[arg-type]

    def send(count: int) -> int:
        list(mailbox.receive(0.0))
        caplog.clear()
        for _ in range(count):
            mailbox.send(Rejected("a", 0, "queue_full", "no room"))
        return len(caplog.messages)

    assert send(50) == 1
    assert send(50) == 0
    now[0] += TELL_AGAIN_S
    assert send(50) == 1
    inbox.lease = 2
    assert send(50) == 1
    assert mailbox.num_dropped == 200
