"""ZeroMQ between processes: front end to worker, worker to worker. CURVE keys, typed messages, no pickle, no torch.

A worker owns an `Inbox`, which proves its key and lets only known client keys in. Front ends talk to it through an
`AsyncLink`, its peers through `PeerLinks`. Keys are Z85 strings and are handed out by whoever starts the processes.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.utils import z85

from moeray.comm.curve import KeyPair, configure_client, configure_socket, new_key_pair
from moeray.comm.errors import StartupError
from moeray.comm.topology import Member

Message = TypeVar("Message")

__all__ = ["AsyncLink", "Inbox", "KeyPair", "PeerLinks", "new_key_pair"]

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"moeray"
POST_ENDPOINT = "inproc://post"
MAX_DRAIN = 4_096


class Inbox:
    """Where a worker's engine thread hears from everyone: clients over TCP, and its own process through `post`.

    `receive` and `send` belong to one thread at a time; `post` and `allow` may be called from any. New connections are
    let in, or turned away, inside `receive`.
    """

    def __init__(
        self, *, host: str, keys: KeyPair, client_keys: Iterable[str], decoder: "msgspec.msgpack.Decoder[Any]"
    ) -> None:
        """Listen on `host`, on a free port. `client_keys` are the public keys that may come in.

        Raises `StartupError` if the address cannot be bound.
        """
        self.public_key = keys.public
        self.num_dropped = 0
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._posted: deque[Any] = deque()
        self._post_lock = threading.Lock()
        self._allowed: frozenset[bytes] = frozenset()
        self.allow(client_keys)
        # Requests for admission come here; the socket must exist before the first client can connect.
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(ZAP_ENDPOINT)
        self._pull = self._context.socket(zmq.PULL)
        self._pull.bind(POST_ENDPOINT)
        self._push = self._context.socket(zmq.PUSH)
        self._push.linger = 0
        self._push.connect(POST_ENDPOINT)
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self.endpoint = self._bind(host, keys)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartupError(f"the inbox cannot listen on {host}: {error}") from error
        self._poller = zmq.Poller()
        for socket in (self._router, self._pull, self._zap):
            self._poller.register(socket, zmq.POLLIN)

    def _bind(self, host: str, keys: KeyPair) -> str:
        configure_socket(self._router)
        self._router.curve_server = True
        self._router.curve_publickey = keys.public.encode()
        self._router.curve_secretkey = keys.secret.encode()
        self._router.zap_domain = ZAP_DOMAIN
        # A peer that is gone is reported; one that comes back under its old identity takes it over.
        self._router.router_mandatory = True
        self._router.router_handover = True
        address = f"[{host}]" if ":" in host else host
        return f"tcp://{address}:{self._router.bind_to_random_port(f'tcp://{address}')}"

    def allow(self, public_keys: Iterable[str]) -> None:
        """Let in clients with these keys, and no others, from now on. Connections that stand stay."""
        self._allowed = frozenset(z85.decode(key.encode()) for key in public_keys)

    def post(self, message: object) -> None:
        """Hand the receiving thread an object of this process as it is, and wake it. Nothing happens after `close`."""
        with self._post_lock:
            if self._push.closed:
                return
            self._posted.append(message)
            try:
                self._push.send(b"", zmq.DONTWAIT)
            except zmq.Again:
                # Thousands of wake-ups are waiting: the thread will read the object with them.
                return

    def receive(self, timeout_s: float) -> list[tuple[bytes | None, Any]]:
        """All messages at hand; if there are none, wait up to `timeout_s` for the first. 0 does not wait.

        Each comes with its sender's identity, None if it was posted. What cannot be decoded is dropped and counted.
        """
        deadline = time.monotonic() + timeout_s
        wait_ms = math.ceil(timeout_s * 1_000)
        while True:
            ready = dict(self._poller.poll(wait_ms))
            messages: list[tuple[bytes | None, Any]] = []
            if self._zap in ready:
                self._admit()
            if self._pull in ready:
                self._take_posted(messages)
            if self._router in ready:
                self._take_received(messages)
            wait_ms = math.ceil((deadline - time.monotonic()) * 1_000)
            if messages or wait_ms <= 0:
                return messages

    def send(self, identity: bytes, message: object) -> bool:
        """Send to a client without waiting; False if it is gone or its queue is full."""
        try:
            self._router.send_multipart((identity, self._encoder.encode(message)), zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def close(self) -> None:
        """Close all sockets; what is unsent is dropped. Harmless when repeated."""
        with self._post_lock:
            self._context.destroy(linger=0)

    def _take_posted(self, messages: list[tuple[bytes | None, Any]]) -> None:
        for _ in range(MAX_DRAIN):
            try:
                self._pull.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
        while self._posted:
            messages.append((None, self._posted.popleft()))

    def _take_received(self, messages: list[tuple[bytes | None, Any]]) -> None:
        for _ in range(MAX_DRAIN):
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) != 2:
                self.num_dropped += 1
                continue
            identity, payload = frames
            try:
                messages.append((identity, self._decoder.decode(payload)))
            except msgspec.MsgspecError:
                self.num_dropped += 1

    def _admit(self) -> None:
        """Answer requests for admission (ZeroMQ RFC 27): only known keys come in."""
        while True:
            try:
                frames = self._zap.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            version, request_id, domain, _address, _identity, mechanism, *credentials = frames
            known = (
                domain == ZAP_DOMAIN and mechanism == b"CURVE" and credentials[:1] and credentials[0] in self._allowed
            )
            status = (b"200", b"OK") if known else (b"400", b"unknown key")
            self._zap.send_multipart((version, request_id, *status, b"", b""))


class PeerLinks:
    """One-way links from a worker to the inboxes of the other members. Used by one thread."""

    def __init__(self, *, client_keys: KeyPair) -> None:
        """`client_keys` are what this worker proves to its peers' inboxes."""
        self._client_keys = client_keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: dict[str, zmq.Socket[bytes]] = {}
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def identities(self) -> tuple[str, ...]:
        """The peers that are linked."""
        return tuple(self._links)

    def update(self, members: Sequence[Member], own_slot: int) -> None:
        """Link to all members but this worker's own slot; links to members that stay are kept.

        Raises `ValueError` if `own_slot` is no member: peers know a link by its identity.
        """
        identity = next((member.identity for member in members if member.slot == own_slot), None)
        if identity is None:
            raise ValueError(f"slot {own_slot} is not among the members {[member.slot for member in members]}")
        wanted = {member.identity: member for member in members if member.slot != own_slot}
        for gone in set(self._links) - set(wanted):
            self._links.pop(gone).close(linger=0)
        for name, member in wanted.items():
            if name not in self._links:
                socket = self._context.socket(zmq.DEALER)
                configure_client(socket, member.public_key, self._client_keys, identity)
                socket.connect(member.endpoint)
                self._links[name] = socket

    def send(self, slot: int, message: object) -> bool:
        """Send to the member of this slot without waiting; False if there is none or its queue is full."""
        for identity, socket in self._links.items():
            if int(identity.partition(".")[0]) == slot:
                try:
                    socket.send(self._encoder.encode(message), zmq.DONTWAIT)
                except zmq.Again:
                    return False
                return True
        return False

    def send_all(self, message: object) -> int:
        """Send to every peer without waiting; how many took it. A peer with a full queue is left out."""
        payload = self._encoder.encode(message)
        num_sent = 0
        for socket in self._links.values():
            try:
                socket.send(payload, zmq.DONTWAIT)
                num_sent += 1
            except zmq.Again:
                continue
        return num_sent

    def close(self) -> None:
        """Close all links; what is unsent is dropped. Harmless when repeated."""
        self._context.destroy(linger=0)
        self._links.clear()


class AsyncLink(Generic[Message]):
    """A front end's connection to one worker's inbox. Used on one event loop, asyncio's or uvloop's."""

    def __init__(
        self, *, decoder: "msgspec.msgpack.Decoder[Message]", context: zmq.asyncio.Context | None = None
    ) -> None:
        """Several links may share a context, which then stays their owner's to close."""
        self.num_dropped = 0
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._owns_context = context is None
        self._context = context or zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None

    def connect(self, endpoint: str, server_key: str, client: KeyPair, identity: str) -> None:
        """Start connecting; messages queue until the worker lets this client in. Raises `ValueError` if connected."""
        if self._socket is not None:
            raise ValueError(f"the link is connected already, it cannot connect to {endpoint}")
        socket = self._context.socket(zmq.DEALER)
        configure_client(socket, server_key, client, identity)
        socket.connect(endpoint)
        self._socket = socket

    def send(self, message: object) -> None:
        """Queue a message without waiting; dropped and counted if the queue is full."""
        # pyzmq tries to send at once, so the future is done; its annotation knows only that it can be awaited.
        future: Any = self._open_socket.send(self._encoder.encode(message), zmq.DONTWAIT)
        error = future.exception() if future.done() else None
        if isinstance(error, zmq.Again):
            self.num_dropped += 1
        elif error is not None:
            raise error

    async def receive(self) -> Message:
        """The next message; waits as long as it takes, cancel it to stop. What cannot be decoded is dropped."""
        socket = self._open_socket
        while True:
            frames = await socket.recv_multipart()
            try:
                return self._decoder.decode(frames[-1])
            except msgspec.MsgspecError:
                self.num_dropped += 1

    async def broke(self) -> None:
        """Returns each time the connection is lost, from the first call on.

        It is made again by itself, but what was on its way is gone.
        """
        if self._monitor is None:
            self._monitor = self._open_socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        await self._monitor.recv_multipart()

    def close(self) -> None:
        """Close the link; what is unsent is dropped. Harmless when repeated."""
        if self._monitor is not None:
            self._monitor.close(linger=0)
            self._monitor = None
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
            self._socket = None
        if self._owns_context:
            self._context.destroy(linger=0)

    @property
    def _open_socket(self) -> zmq.asyncio.Socket:
        if self._socket is None:
            raise ValueError("the link is not connected")
        return self._socket
