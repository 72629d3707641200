"""Calls between processes: typed both ways, side by side, only for those who may, and errors in one line."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest
import zmq.asyncio

from moeray.comm.calls import Address, BlockingCaller, Caller, CallServer
from moeray.comm.errors import CapacityError, ControlTimeout, GroupError, GroupTimeout, StartupError
from moeray.comm.sockets import KeyPair, new_key_pair
from moeray.comm.timers import timer_slack

DEADLINE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Point:
    x: int
    y: tuple[int, ...]


class Commands:
    def __init__(self) -> None:
        self.is_open = asyncio.Event()

    async def mirror(self, point: Point, factor: int | None) -> Point:
        assert isinstance(point, Point)
        return Point(x=-point.x * (factor or 1), y=point.y)

    async def wait(self) -> None:
        await self.is_open.wait()

    async def open(self) -> None:
        self.is_open.set()

    async def fail(self, how: str) -> None:
        if how == "group":
            raise GroupTimeout("slot 3 did not answer\nand more", slots=(3,))
        if how == "capacity":
            raise CapacityError("4 blocks are not enough")
        raise KeyError("surprise")

    async def data(self, size: int) -> bytes:
        return bytes(size)

    def not_a_call(self) -> None:
        raise AssertionError

    async def _private(self) -> None:
        raise AssertionError


@pytest.fixture
def client() -> KeyPair:
    return new_key_pair()


@pytest.fixture
def address(client: KeyPair) -> Iterator[Address]:
    server = CallServer(host="127.0.0.1", keys=new_key_pair(), client_keys=(client.public,))
    thread = threading.Thread(target=server.run, args=(Commands(),))
    thread.start()
    yield server.address
    server.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def with_caller(address: Address, client: KeyPair, body: Callable[[Caller], Awaitable[None]]) -> None:
    async def run() -> None:
        with zmq.asyncio.Context() as context:
            caller = Caller(address, client, context)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await body(caller)
            finally:
                caller.close()

    asyncio.run(run())


def test_values_keep_their_types_and_calls_do_not_wait_for_each_other(client: KeyPair, address: Address) -> None:
    async def body(caller: Caller) -> None:
        blocked = asyncio.create_task(caller.call("wait", returns=type(None)))
        point = Point(x=2, y=(1, 2))
        assert await caller.call("mirror", point, 3, returns=Point) == Point(x=-6, y=(1, 2))
        assert await caller.call("mirror", point, None, returns=Point) == Point(x=-2, y=(1, 2))
        assert not blocked.done()
        await caller.call("open", returns=type(None))
        await blocked

    with_caller(address, client, body)


def test_errors_are_one_line_and_keep_who_is_to_blame(client: KeyPair, address: Address) -> None:
    async def body(caller: Caller) -> None:
        with pytest.raises(GroupError, match=r"^slot 3 did not answer$") as caught:
            await caller.call("fail", "group", returns=type(None))
        assert caught.value.slots == (3,)
        with pytest.raises(StartupError, match=r"^4 blocks are not enough$"):
            await caller.call("fail", "capacity", returns=type(None))
        with pytest.raises(StartupError, match=r"^KeyError: 'surprise'$"):
            await caller.call("fail", "bug", returns=type(None))
        for name in ("not_a_call", "_private", "__init__", "missing"):
            with pytest.raises(StartupError, match=f"Commands has no call '{name}'"):
                await caller.call(name, returns=type(None))
        with pytest.raises(StartupError, match="Expected `int`"):
            await caller.call("data", "many", returns=bytes)
        with pytest.raises(StartupError, match="not what was expected"):
            await caller.call("data", 1, returns=int)
        assert await caller.call("data", 2, returns=bytes) == b"\0\0"

    with_caller(address, client, body)


def test_a_stranger_is_not_answered(address: Address) -> None:
    async def body(caller: Caller) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await caller.call("data", 1, returns=bytes)

    with_caller(address, new_key_pair(), body)


def test_a_thread_calls_and_gives_up_in_time(client: KeyPair, address: Address) -> None:
    caller = BlockingCaller(address, client)
    with pytest.raises(ControlTimeout, match=r"call wait was not answered within 0\.3 s"):
        caller.call("wait", returns=type(None), timeout_s=0.3)
    assert len(caller.call("data", 3 << 20, returns=bytes, timeout_s=DEADLINE_S)) == 3 << 20
    # The answer to the call that was given up comes late, and is not taken for another's.
    caller.call("open", returns=type(None), timeout_s=DEADLINE_S)
    assert caller.call("data", 1, returns=bytes, timeout_s=DEADLINE_S) == b"\0"
    caller.close()


def test_slack_is_for_the_threads_that_are_started_inside() -> None:
    slack: dict[str, int] = {}

    def note(name: str) -> None:
        with open(f"/proc/{threading.get_native_id()}/timerslack_ns") as file:
            slack[name] = int(file.read())

    def start(name: str) -> None:
        thread = threading.Thread(target=note, args=(name,))
        thread.start()
        thread.join()

    if not os.path.exists("/proc/self/timerslack_ns"):
        pytest.skip("only Linux has timer slack")
    with timer_slack(0.04):
        start("inside")
    start("after")
    assert slack["inside"] == 40_000_000
    assert slack["after"] < 1_000_000
