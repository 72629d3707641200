"""A deployment that changes its size while clients stream: operations over HTTP, streams compared with a reference."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import psutil

from benchmarks.streams import Load, reference, requests, wrong
from tests.support.serving import poll

DEADLINE_S = 60.0
STOP_S = 120.0


class Streams:
    """Clients that stream the same requests over and over, beside a test, half greedy and half seeded."""

    def __init__(self, url: str, count: int, max_tokens: int) -> None:
        self.url = url
        self.bodies = requests(count, max_tokens)
        self.expected = asyncio.run(reference(url, self.bodies))

    @contextmanager
    def running(self) -> Iterator[Load]:
        """They run until the block ends, and then to the end of their streams; none fails or says anything else."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="streams")
        thread.start()
        load = Load(self.url, self.bodies)
        try:
            loop.call_soon_threadsafe(load.start)
            yield load
        finally:
            try:
                streams = asyncio.run_coroutine_threadsafe(load.stop(), loop).result(STOP_S)
            finally:
                loop.call_soon_threadsafe(loop.stop)
                thread.join()
                loop.close()
        assert len(streams) >= len(self.bodies)
        assert wrong(streams, self.expected) == (0, 0), {stream.error for stream in streams}


class Elastic:
    """A server seen by somebody who changes its size."""

    def __init__(self, url: str, http: httpx.Client) -> None:
        self.url = url
        self.http = http

    def topology(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get("/topology").json()
        return answer

    def members(self) -> dict[int, dict[str, Any]]:
        """Those with a rank, by slot."""
        return {member["slot"]: member for member in self.topology()["members"] if member["rank"] is not None}

    @property
    def slots(self) -> list[int]:
        return sorted(self.members())

    def pids(self) -> dict[int, int]:
        return {slot: member["pid"] for slot, member in self.members().items()}

    def operations(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self.http.get("/operations").json()["operations"]
        return answer

    def start(self, **fields: Any) -> dict[str, Any]:
        """Begin to change the size."""
        return self._start("/scale", fields)

    def start_rebalance(self, **fields: Any) -> dict[str, Any]:
        """Begin to exchange experts between the workers."""
        return self._start("/rebalance", fields)

    def _start(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(path, json=fields)
        assert answer.status_code in (200, 202), answer.text
        operation: dict[str, Any] = answer.json()
        return operation

    def ended(self, operation: dict[str, Any]) -> dict[str, Any]:
        """The operation once it is over, and the view that it leads to."""
        path = f"/operations/{operation['operation_id']}"
        poll(f"{path} is over", lambda: self.http.get(path).json()["outcome"], DEADLINE_S)
        ended: dict[str, Any] = self.http.get(path).json()
        return ended

    def scale(self, **fields: Any) -> dict[str, Any]:
        """Change the size; it must work."""
        operation = self.ended(self.start(**fields))
        assert operation["outcome"] == "done", operation
        poll("the view shows it", lambda: self.slots == operation["targets"], 5.0)
        return operation

    def rebalance(self) -> dict[str, Any]:
        """Exchange experts; it must work."""
        operation = self.ended(self.start_rebalance())
        assert operation["outcome"] == "done", operation
        return operation

    def unbalance(self) -> None:
        """One leaves and another comes: who gets which expert then is not decided by load."""
        size = len(self.slots)
        self.scale(workers=size - 1)
        self.scale(workers=size)

    def at_size(self, size: int) -> None:
        if len(self.slots) != size:
            self.scale(workers=size)

    def is_idle(self) -> bool:
        return not any(member["num_requests"] for member in self.members().values())


def phase_names(operation: dict[str, Any]) -> list[str]:
    return [phase["name"] for phase in operation["phases"]]


def listening_ports(pid: int) -> set[int]:
    """TCP ports that a process listens on."""
    found = psutil.Process(pid).net_connections(kind="tcp")
    return {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}


def holdings(pids: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Descriptors and threads of each process."""
    return {pid: (psutil.Process(pid).num_fds(), psutil.Process(pid).num_threads()) for pid in pids}


def assert_no_more_than(
    before: dict[int, tuple[int, int]], within_s: float, *, more_fds: int = 0, more_threads: int = 0
) -> None:
    """Each process has, after a while at most, no more descriptors and threads than it had, but for so many."""

    def grown() -> dict[int, tuple[tuple[int, int], tuple[int, int]]]:
        now = holdings(list(before))
        return {
            pid: (old, now[pid])
            for pid, old in before.items()
            if now[pid][0] > old[0] + more_fds or now[pid][1] > old[1] + more_threads
        }

    deadline = time.monotonic() + within_s
    while (left := grown()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"descriptors and threads before and now: {left}"
