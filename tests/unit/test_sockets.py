"""Sockets: typed messages come through, unknown keys do not, nothing waits past its deadline, nothing leaks."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import psutil
import pytest
import uvloop
import zmq
import zmq.asyncio

from moeray.comm.errors import StartupError
from moeray.comm.messages import StopEngine, Wake
from moeray.comm.sockets import AsyncLink, Inbox, KeyPair, PeerLinks, new_key_pair
from moeray.comm.topology import Member

HOST = "127.0.0.1"
DEADLINE_S = 10.0


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    number: int


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    number: int


Received = list[tuple[bytes | None, Any]]


def make_inbox(*client_keys: str, keys: KeyPair | None = None) -> Inbox:
    return Inbox(
        host=HOST,
        keys=keys or new_key_pair(),
        client_keys=client_keys,
        decoder=msgspec.msgpack.Decoder(Hello | Wake),
    )


def member(slot: int, inbox: Inbox, incarnation: int = 0) -> Member:
    return Member(slot=slot, incarnation=incarnation, node="n", endpoint=inbox.endpoint, public_key=inbox.public_key)


def receive_many(inbox: Inbox, num_messages: int, timeout_s: float = DEADLINE_S) -> Received:
    """Messages until there are enough; fails at the deadline."""
    deadline = time.monotonic() + timeout_s
    messages: Received = []
    while len(messages) < num_messages:
        left = deadline - time.monotonic()
        assert left > 0, f"got {messages}, wanted {num_messages}"
        messages += inbox.receive(min(left, 0.1))
    return messages


class Client:
    """A raw DEALER, to send what no link would."""

    def __init__(self, inbox: Inbox, keys: KeyPair | None, identity: bytes = b"raw") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.routing_id = identity
        if keys is not None:
            self.socket.curve_serverkey = inbox.public_key.encode()
            self.socket.curve_publickey = keys.public.encode()
            self.socket.curve_secretkey = keys.secret.encode()
        self.socket.connect(inbox.endpoint)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def client_keys() -> KeyPair:
    return new_key_pair()


@pytest.fixture
def inbox(client_keys: KeyPair) -> Iterator[Inbox]:
    box = make_inbox(client_keys.public)
    yield box
    box.close()


def test_key_pairs_differ_and_hide_the_secret() -> None:
    first, second = new_key_pair(), new_key_pair()
    assert first.public != second.public
    assert first.secret != second.secret
    assert first.secret not in repr(first)


def test_posted_objects_arrive_as_they_are_and_wake_the_receiver(inbox: Inbox) -> None:
    message = StopEngine()
    waited: list[Received] = []
    thread = threading.Thread(target=lambda: waited.append(inbox.receive(DEADLINE_S)))
    thread.start()
    inbox.post(message)
    thread.join(DEADLINE_S)
    assert waited[0] == [(None, message)]
    assert waited[0][0][1] is message


def test_posts_from_many_threads_all_arrive_in_each_thread_s_order(inbox: Inbox) -> None:
    def post(thread_index: int) -> None:
        for number in range(200):
            inbox.post((thread_index, number))

    threads = [threading.Thread(target=post, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    messages = [message for _, message in receive_many(inbox, 800)]
    for thread in threads:
        thread.join(DEADLINE_S)
    for index in range(4):
        assert [number for source, number in messages if source == index] == list(range(200))
    assert inbox.receive(0) == []


def test_receive_returns_at_its_deadline(inbox: Inbox) -> None:
    started = time.monotonic()
    assert inbox.receive(0) == []
    assert time.monotonic() - started < 0.05
    assert inbox.receive(0.1) == []
    assert 0.1 <= time.monotonic() - started < 2.0


def test_a_known_client_is_heard_and_answered(inbox: Inbox, client_keys: KeyPair) -> None:
    with Client(inbox, client_keys, b"front") as client:
        client.socket.send(msgspec.msgpack.encode(Hello(7)))
        assert receive_many(inbox, 1) == [(b"front", Hello(7))]
        assert inbox.send(b"front", Goodbye(8))
        assert client.socket.poll(int(DEADLINE_S * 1000))
        assert msgspec.msgpack.decode(client.socket.recv(), type=Goodbye) == Goodbye(8)


@pytest.mark.parametrize("kind", ["other key", "no curve"])
def test_an_unknown_client_gets_no_byte_through(inbox: Inbox, client_keys: KeyPair, kind: str) -> None:
    keys = new_key_pair() if kind == "other key" else None
    with Client(inbox, keys, b"stranger") as stranger, Client(inbox, client_keys, b"friend") as friend:
        for number in range(10):
            stranger.socket.send(msgspec.msgpack.encode(Hello(number)))
        friend.socket.send(msgspec.msgpack.encode(Hello(99)))
        assert receive_many(inbox, 1) == [(b"friend", Hello(99))]
        assert inbox.receive(0.3) == []
        assert inbox.num_dropped == 0
        assert not inbox.send(b"stranger", Goodbye(0))
        assert not stranger.socket.poll(0)


def test_a_client_with_the_wrong_server_key_sends_nothing(inbox: Inbox, client_keys: KeyPair) -> None:
    other = make_inbox(client_keys.public)
    other.close()
    other.endpoint = inbox.endpoint
    with Client(other, client_keys) as client:
        client.socket.send(msgspec.msgpack.encode(Hello(1)))
        assert inbox.receive(0.3) == []


def test_a_key_can_be_let_in_later(inbox: Inbox) -> None:
    late = new_key_pair()
    inbox.allow([late.public])
    with Client(inbox, late) as client:
        client.socket.send(msgspec.msgpack.encode(Hello(1)))
        assert receive_many(inbox, 1) == [(b"raw", Hello(1))]


def test_what_cannot_be_decoded_is_dropped_and_counted(inbox: Inbox, client_keys: KeyPair) -> None:
    bad: list[list[bytes]] = [
        [b""],
        [b"\xc1garbage"],
        [msgspec.msgpack.encode({"type": "unknown"})],
        [msgspec.msgpack.encode({"type": "hello", "number": "seven"})],
        [msgspec.msgpack.encode(Goodbye(1))],
        [msgspec.msgpack.encode(Hello(1)), b"one frame too many"],
    ]
    with Client(inbox, client_keys) as client:
        for frames in bad:
            client.socket.send_multipart(frames)
        client.socket.send(msgspec.msgpack.encode(Wake(epoch=1, step=2, slot=3)))
        assert receive_many(inbox, 1) == [(b"raw", Wake(epoch=1, step=2, slot=3))]
    assert inbox.num_dropped == len(bad)


def test_sending_to_nobody_is_false(inbox: Inbox) -> None:
    assert not inbox.send(b"nobody", Hello(1))


def test_a_client_that_comes_back_takes_its_identity_over(inbox: Inbox, client_keys: KeyPair) -> None:
    with Client(inbox, client_keys, b"front") as old:
        old.socket.send(msgspec.msgpack.encode(Hello(1)))
        receive_many(inbox, 1)
        with Client(inbox, client_keys, b"front") as new:
            new.socket.send(msgspec.msgpack.encode(Hello(2)))
            assert receive_many(inbox, 1) == [(b"front", Hello(2))]
            assert inbox.send(b"front", Goodbye(3))
            assert new.socket.poll(int(DEADLINE_S * 1000))


def test_a_taken_address_is_an_error_that_names_it(client_keys: KeyPair) -> None:
    with pytest.raises(StartupError, match=r"192\.0\.2\.1"):
        Inbox(host="192.0.2.1", keys=client_keys, client_keys=(), decoder=msgspec.msgpack.Decoder(Hello))


def test_closing_twice_and_posting_afterwards_is_harmless(client_keys: KeyPair) -> None:
    box = make_inbox(client_keys.public)
    box.close()
    box.post(StopEngine())
    box.close()


def test_peer_links_follow_the_members(client_keys: KeyPair) -> None:
    inboxes = [make_inbox(client_keys.public) for _ in range(3)]
    links = PeerLinks(client_keys=client_keys)
    members = [member(slot, box) for slot, box in enumerate(inboxes)]
    try:
        links.update(members[:2], own_slot=0)
        assert list(links.identities) == ["1.0"]
        assert links.send_all(Wake(epoch=1, step=0, slot=0)) == 1
        assert receive_many(inboxes[1], 1) == [(b"0.0", Wake(epoch=1, step=0, slot=0))]

        links.update(members, own_slot=0)
        assert set(links.identities) == {"1.0", "2.0"}
        assert links.send_all(Wake(epoch=2, step=5, slot=0)) == 2
        for box in inboxes[1:]:
            assert receive_many(box, 1) == [(b"0.0", Wake(epoch=2, step=5, slot=0))]

        replaced = member(2, inboxes[0], incarnation=1)
        links.update([members[0], replaced], own_slot=0)
        assert list(links.identities) == ["2.1"]
        links.update(members[:1], own_slot=0)
        assert list(links.identities) == []
        assert links.send_all(Wake(epoch=3, step=0, slot=0)) == 0
        with pytest.raises(ValueError, match="slot 9"):
            links.update(members, own_slot=9)
    finally:
        links.close()
        for box in inboxes:
            box.close()


def serve_in_thread(inbox: Inbox, num_messages: int) -> threading.Thread:
    """Echo `num_messages` as `Goodbye`, as an engine's thread would."""

    def serve() -> None:
        num_left = num_messages
        while num_left:
            for identity, message in receive_many(inbox, 1):
                assert identity is not None
                assert inbox.send(identity, Goodbye(message.number))
                num_left -= 1

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("loop_factory", LOOPS, ids=["asyncio", "uvloop"])
def test_async_link_talks_on_both_event_loops(
    inbox: Inbox, client_keys: KeyPair, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def talk() -> list[int]:
        link = AsyncLink(decoder=msgspec.msgpack.Decoder(Goodbye))
        with pytest.raises(ValueError, match="not connected"):
            link.send(Hello(0))
        link.connect(inbox.endpoint, inbox.public_key, client_keys, "front")
        with pytest.raises(ValueError, match="connected already"):
            link.connect(inbox.endpoint, inbox.public_key, client_keys, "front")
        try:
            for number in range(50):
                link.send(Hello(number))
            async with asyncio.timeout(DEADLINE_S):
                return [(await link.receive()).number for _ in range(50)]
        finally:
            link.close()
            link.close()

    thread = serve_in_thread(inbox, 50)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(talk()) == list(range(50))
    thread.join(DEADLINE_S)


def test_async_link_drops_what_it_cannot_decode(inbox: Inbox, client_keys: KeyPair) -> None:
    async def talk() -> int:
        link = AsyncLink(decoder=msgspec.msgpack.Decoder(Goodbye))
        link.connect(inbox.endpoint, inbox.public_key, client_keys, "front")
        link.send(Hello(1))
        async with asyncio.timeout(DEADLINE_S):
            answer = await link.receive()
        assert answer == Goodbye(2)
        dropped = link.num_dropped
        link.close()
        return dropped

    def serve() -> None:
        receive_many(inbox, 1)
        inbox.send(b"front", Hello(3))
        inbox.send(b"front", Goodbye(2))

    thread = threading.Thread(target=serve)
    thread.start()
    assert asyncio.run(talk()) == 1
    thread.join(DEADLINE_S)


def use_everything_once(keys: KeyPair) -> None:
    first, second = make_inbox(keys.public), make_inbox(keys.public)
    links = PeerLinks(client_keys=keys)
    links.update([member(0, first), member(1, second)], own_slot=0)
    links.send_all(Wake(epoch=0, step=0, slot=0))
    receive_many(second, 1)

    async def talk() -> None:
        context = zmq.asyncio.Context()
        for number in range(2):
            link = AsyncLink(decoder=msgspec.msgpack.Decoder(Goodbye), context=context)
            link.connect(first.endpoint, first.public_key, keys, f"front-{number}")
            link.send(Hello(number))
            async with asyncio.timeout(DEADLINE_S):
                await link.receive()
            link.close()
        context.destroy(linger=0)

    thread = serve_in_thread(first, 2)
    asyncio.run(talk())
    thread.join(DEADLINE_S)
    links.close()
    first.close()
    second.close()


def test_nothing_leaks(client_keys: KeyPair) -> None:
    use_everything_once(client_keys)  # what stays open for good after a first use is not a leak
    process = psutil.Process()
    before = process.num_fds(), process.num_threads()
    for _ in range(3):
        use_everything_once(client_keys)
    deadline = time.monotonic() + DEADLINE_S
    while (process.num_fds(), process.num_threads()) > before and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    assert process.num_fds() <= before[0]
    assert process.num_threads() <= before[1]


def test_a_link_tells_when_its_connection_breaks() -> None:
    async def talk() -> None:
        client = new_key_pair()
        inbox = make_inbox(client.public)
        link = AsyncLink(decoder=msgspec.msgpack.Decoder(Goodbye))
        link.connect(inbox.endpoint, inbox.public_key, client, "front")
        link.send(Hello(1))
        await asyncio.to_thread(receive_many, inbox, 1)
        broke = asyncio.create_task(link.broke())
        await asyncio.sleep(0.05)
        assert not broke.done()
        inbox.close()
        async with asyncio.timeout(DEADLINE_S):
            await broke
        link.close()

    asyncio.run(talk())
