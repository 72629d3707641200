"""Calls to another process over its inbox: how a controller commands a worker, and a joiner asks a peer.

They do not go through Ray because a process that waits for Ray's calls wakes a hundred times a second, and an idle
worker should sleep. Arguments and results are typed by the annotations of the method that is called.
"""

import asyncio
import inspect
import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from itertools import count
from typing import Any, TypeVar, get_type_hints

import msgspec
import zmq
import zmq.asyncio

from moeray.comm.curve import KeyPair, configure_client
from moeray.comm.errors import ControlTimeout, GroupError, MoerayError, StartupError
from moeray.comm.sockets import AsyncLink, Inbox

logger = logging.getLogger(__name__)
T = TypeVar("T")

RECEIVE_TIMEOUT_S = 3600.0


class Address(msgspec.Struct, frozen=True):
    """Where a process takes calls: a ZeroMQ endpoint and the CURVE key (Z85) that it proves."""

    endpoint: str
    public_key: str


class Call(msgspec.Struct, frozen=True, tag="call"):
    """`number` is the caller's own; `arguments` is a msgpack array in the order of the method's parameters."""

    number: int
    name: str
    arguments: msgspec.Raw


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """`error` is one line for a person; `slots` come with it if peers are to blame."""

    number: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str | None = None
    slots: tuple[int, ...] | None = None

    def result(self, returns: type[T]) -> T:
        """The value; raises `GroupError` with the slots, or `StartupError`."""
        if self.error is None:
            try:
                return msgspec.msgpack.decode(self.value, type=returns)
            except msgspec.ValidationError as error:
                raise StartupError(f"a call's result is not what was expected: {error}") from error
        if self.slots is not None:
            raise GroupError(self.error, slots=self.slots)
        raise StartupError(self.error)


def _parameters(owner: type, name: str) -> Any:
    """The tuple type of a public coroutine method's parameters. `StartupError` if it has no such method."""
    method = getattr(owner, name, None)
    if name.startswith("_") or not inspect.iscoroutinefunction(method):
        raise StartupError(f"{owner.__name__} has no call {name!r}")
    hints = get_type_hints(method)
    names = list(inspect.signature(method).parameters)[1:]
    return tuple[*(hints[each] for each in names)] if names else tuple[()]  # type: ignore[misc]


class CallServer:
    """Answers calls with the coroutine methods of an object, each in a task of its own, so that none holds another up.

    Callers prove one of `client_keys`.
    """

    def __init__(self, *, host: str, keys: KeyPair, client_keys: Iterable[str]) -> None:
        """Listen on a free port of `host`; calls queue until `run`. Raises `StartupError`."""
        decoder = msgspec.msgpack.Decoder(Call)
        self._inbox = Inbox(host=host, keys=keys, client_keys=client_keys, decoder=decoder)
        self.address = Address(self._inbox.endpoint, keys.public)
        self._parameters: dict[str, Any] = {}

    def run(self, commands: object) -> None:
        """Answer until `close`; belongs to one thread. The methods run on an event loop of its own."""
        closed, loops = asyncio.Event(), Future[asyncio.AbstractEventLoop]()

        async def until_closed() -> None:
            loops.set_result(asyncio.get_running_loop())
            await closed.wait()

        threading.Thread(target=asyncio.run, args=(until_closed(),), name="calls", daemon=True).start()
        loop = loops.result()
        try:
            while True:
                for sender, message in self._inbox.receive(RECEIVE_TIMEOUT_S):
                    if sender is not None:
                        asyncio.run_coroutine_threadsafe(self._answer(commands, sender, message), loop)
                    elif message is None:
                        return
                    elif not self._inbox.send(*message):
                        logger.warning("nobody takes the answer to a call any more")
        finally:
            loop.call_soon_threadsafe(closed.set)
            self._inbox.close()

    def close(self) -> None:
        """`run` returns; what is not answered stays so. Called from any thread."""
        self._inbox.post(None)

    async def _answer(self, commands: object, sender: bytes, call: Call) -> None:
        try:
            if call.name not in self._parameters:
                self._parameters[call.name] = _parameters(type(commands), call.name)
            arguments = msgspec.msgpack.decode(call.arguments, type=self._parameters[call.name])
            value = await getattr(commands, call.name)(*arguments)
            answer = Answer(call.number, msgspec.Raw(msgspec.msgpack.encode(value)))
        except (MoerayError, ValueError) as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            answer = Answer(call.number, error=line, slots=error.slots if isinstance(error, GroupError) else None)
        except Exception as error:
            logger.exception("call %s failed", call.name)
            lines = str(error).strip().splitlines()
            answer = Answer(call.number, error=": ".join([type(error).__name__, *lines[:1]]))
        self._inbox.post((sender, answer))


def _encode(number: int, name: str, arguments: tuple[object, ...]) -> Call:
    return Call(number, name, msgspec.Raw(msgspec.msgpack.encode(arguments)))


def _identity() -> str:
    return f"caller-{os.getpid()}-{os.urandom(6).hex()}"


class Caller:
    """Calls one `CallServer` from an event loop; any number of calls at a time.

    A call waits as long as it takes: the one who calls knows how long that may be, and whether the process lives.
    """

    def __init__(self, address: Address, client: KeyPair, context: zmq.asyncio.Context) -> None:
        """The context stays its owner's to close."""
        self._link: AsyncLink[Answer] = AsyncLink(decoder=msgspec.msgpack.Decoder(Answer), context=context)
        self._link.connect(address.endpoint, address.public_key, client, _identity())
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def call(self, name: str, *arguments: object, returns: type[T]) -> T:
        """The method's result. Raises what `Answer.result` does."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        number = next(self._numbers)
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            self._link.send(_encode(number, name, arguments))
            return (await waiting).result(returns)
        finally:
            del self._waiting[number]

    async def _read(self) -> None:
        while True:
            answer = await self._link.receive()
            waiting = self._waiting.get(answer.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    def close(self) -> None:
        """Calls that wait are not answered any more. Harmless when repeated."""
        if self._reader is not None:
            self._reader.cancel()
        self._link.close()


class BlockingCaller:
    """Calls one `CallServer` from a thread without an event loop, one call at a time."""

    def __init__(self, address: Address, client: KeyPair) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure_client(self._socket, address.public_key, client, _identity())
        self._socket.connect(address.endpoint)
        self._numbers = count()

    def call(self, name: str, *arguments: object, returns: type[T], timeout_s: float) -> T:
        """The method's result. Raises `ControlTimeout`, or what `Answer.result` does."""
        deadline = time.monotonic() + timeout_s
        number = next(self._numbers)
        self._socket.send(msgspec.msgpack.encode(_encode(number, name, arguments)))
        while (left_s := deadline - time.monotonic()) > 0 and self._socket.poll(int(left_s * 1000) + 1):
            answer = msgspec.msgpack.decode(self._socket.recv_multipart()[-1], type=Answer)
            if answer.number == number:
                value: T = answer.result(returns)
                return value
        raise ControlTimeout(f"call {name} was not answered within {timeout_s:g} s")

    def close(self) -> None:
        """Harmless when repeated."""
        self._context.destroy(linger=0)
