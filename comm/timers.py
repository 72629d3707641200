"""How exactly the timers of a thread fire: a loop that only looks around can do so when others wake anyhow."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# prctl(2)
PR_SET_TIMERSLACK = 29
PR_GET_TIMERSLACK = 30


@contextmanager
def timer_slack(slack_s: float) -> Iterator[None]:
    """Threads that are started inside sleep up to so much longer than they ask for, unless there is work.

    Only Linux knows this; nothing happens elsewhere. The calling thread has its own precision back afterwards.
    """
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    before = libc.prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)
    libc.prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(int(slack_s * 1e9)), 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(before), 0, 0, 0)
