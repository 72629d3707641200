"""Keys of processes, and what all their sockets have in common. No torch."""

from dataclasses import dataclass
from typing import Any

import zmq

HEARTBEAT_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 5_000
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1_000
HIGH_WATER_MARK = 10_000
MAX_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A CURVE key pair in Z85. The secret half is not shown when printed."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def new_key_pair() -> KeyPair:
    """A fresh random pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public.decode(), secret=secret.decode())


def configure_socket(socket: "zmq.Socket[Any]") -> None:
    """Limits and heartbeats; nothing unsent holds a process up when it closes."""
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
    socket.reconnect_ivl = RECONNECT_MS
    socket.reconnect_ivl_max = RECONNECT_MAX_MS
    socket.ipv6 = True


def configure_client(socket: "zmq.Socket[Any]", server_key: str, client: KeyPair, identity: str) -> None:
    """As above, with what a client proves and whom it expects."""
    configure_socket(socket)
    socket.curve_serverkey = server_key.encode()
    socket.curve_publickey = client.public.encode()
    socket.curve_secretkey = client.secret.encode()
    socket.routing_id = identity.encode()
