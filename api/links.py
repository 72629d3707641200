"""The front end's connections to the workers: one authenticated socket each, opened and closed as the view changes."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from moeray.api.router import MemberKey
from moeray.comm.sockets import AsyncLink, KeyPair
from moeray.elastic.view import Attachment, ClusterView, MemberView
from moeray.worker.messages import Attach, Attached, EngineFailed, FromWorker, Heartbeat, ToWorker

logger = logging.getLogger(__name__)


class WorkerLink(Protocol):
    """A connection to one worker's inbox. `num_dropped` counts messages that were lost on this side."""

    num_dropped: int

    def send(self, message: ToWorker) -> None:
        """Hand over without waiting, order is kept; dropped and counted if the queue is full."""

    async def receive(self) -> FromWorker:
        """The worker's next message."""

    async def broke(self) -> None:
        """Returns each time the connection is lost: what was on its way is gone."""

    def close(self) -> None:
        """Give the socket back; a pending `receive` is cancelled by its owner first."""


class LinkFactory(Protocol):
    """Opens connections, and gives back what they share."""

    def open(self, member: MemberView, attachment: Attachment) -> WorkerLink:
        """A connection to a member that has an endpoint and a key."""

    def close(self) -> None:
        """No connection is open any more."""


class SocketLinks:
    """Connections over ZeroMQ, all on one context; the lease is part of this client's identity."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._decoder = msgspec.msgpack.Decoder(FromWorker)

    def open(self, member: MemberView, attachment: Attachment) -> WorkerLink:
        assert member.endpoint is not None
        assert member.public_key is not None
        keys = KeyPair(public=attachment.public_key, secret=attachment.secret_key)
        link = AsyncLink[FromWorker](decoder=self._decoder, context=self._context)
        link.connect(member.endpoint, member.public_key, keys, f"front-end-{attachment.lease}")
        return link

    def close(self) -> None:
        self._context.destroy(linger=0)


# A joiner is connected to before its epoch serves, so that it has requests from its first step on.
LINKED_STATES = ("joining", "serving", "leaving")

OnMessage = Callable[[MemberKey, FromWorker], None]
OnLink = Callable[[MemberKey], None]

# A connection that breaks because the worker died is the controller's matter, which is heard of sooner than this.
BROKEN_WAIT_S = 0.5


@dataclass(slots=True)
class _Peer:
    link: WorkerLink
    receiver: asyncio.Task[None]
    watch: asyncio.Task[None]
    is_attached: bool = field(default=False)
    is_lost: bool = field(default=False)


class Links:
    """All connections of one lease. `update` follows the view.

    Messages arrive at `on_message` on the event loop. `on_lost` hears at once of a member whose connection broke: it
    is not attached until it answers again. `on_broken` hears of it a moment later: messages of both sides may be
    missing.
    """

    def __init__(
        self,
        attachment: Attachment,
        factory: LinkFactory,
        *,
        on_message: OnMessage,
        on_lost: OnLink,
        on_broken: OnLink,
    ) -> None:
        self._attachment = attachment
        self._factory = factory
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_broken = on_broken
        self._peers: dict[MemberKey, _Peer] = {}

    @property
    def lease(self) -> int:
        return self._attachment.lease

    @property
    def is_connecting(self) -> bool:
        """Whether a member has not answered the attach yet."""
        return any(not peer.is_attached for peer in self._peers.values())

    @property
    def lost(self) -> tuple[MemberKey, ...]:
        """Members whose connection broke, and that have not answered since."""
        return tuple(key for key, peer in self._peers.items() if peer.is_lost)

    def is_attached(self, key: MemberKey) -> bool:
        return (peer := self._peers.get(key)) is not None and peer.is_attached

    def update(self, view: ClusterView) -> list[MemberKey]:
        """Connect to members that serve or will, disconnect from those that are gone; returns those that were lost."""
        wanted = {
            (member.slot, member.incarnation): member
            for member in view.members
            if member.state in LINKED_STATES and member.endpoint is not None and member.public_key is not None
        }
        lost = [key for key in self._peers if key not in wanted]
        for key in lost:
            self.drop(key)
        for key, member in wanted.items():
            if key not in self._peers:
                self._connect(key, member)
        return lost

    def send(self, key: MemberKey, message: ToWorker) -> bool:
        """Send to a member; False if it is gone or takes nothing more."""
        if (peer := self._peers.get(key)) is None:
            return False
        num_dropped = peer.link.num_dropped
        peer.link.send(message)
        return peer.link.num_dropped == num_dropped

    def beat(self) -> None:
        """Hold the lease at every member; ask those again that have not answered the attach."""
        for peer in self._peers.values():
            peer.link.send(Heartbeat(self.lease) if peer.is_attached else Attach(self.lease))

    def drop(self, key: MemberKey) -> None:
        """Close the connection to a member."""
        if (peer := self._peers.pop(key, None)) is not None:
            peer.receiver.cancel()
            peer.watch.cancel()
            peer.link.close()

    async def close(self) -> None:
        tasks = [task for peer in self._peers.values() for task in (peer.receiver, peer.watch)]
        for key in list(self._peers):
            self.drop(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _connect(self, key: MemberKey, member: MemberView) -> None:
        link = self._factory.open(member, self._attachment)
        receiver = asyncio.create_task(self._receive(key, link), name=f"link to slot {key[0]}")
        watch = asyncio.create_task(self._watch(key, link), name=f"watch on slot {key[0]}")
        self._peers[key] = _Peer(link, receiver, watch)
        link.send(Attach(self.lease))

    async def _watch(self, key: MemberKey, link: WorkerLink) -> None:
        while True:
            await link.broke()
            peer = self._peers[key]
            peer.is_attached, peer.is_lost = False, True
            self._on_lost(key)
            link.send(Attach(self.lease))  # it waits until the connection is made again
            await asyncio.sleep(BROKEN_WAIT_S)
            logger.warning("[slot %d] the connection was lost%s", key[0], "" if peer.is_lost else " and made again")
            self._on_broken(key)

    async def _receive(self, key: MemberKey, link: WorkerLink) -> None:
        while True:
            try:
                message = await link.receive()
            except zmq.ZMQError as error:
                self._on_message(key, EngineFailed(*key, f"the connection broke: {error}"))
                return
            if isinstance(message, Attached) and message.lease == self.lease:
                peer = self._peers[key]
                peer.is_attached, peer.is_lost = True, False
            try:
                self._on_message(key, message)
            except Exception:
                # One bad message must not silence the worker for all other requests.
                logger.exception("[slot %d] a %s could not be handled", key[0], type(message).__name__)
