"""The HTTP port is taken before anything else is started, so that a taken port costs a second and not a minute."""

import socket

from moeray.comm.errors import StartupError

BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0 takes any. `StartupError` says what is wrong."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartupError(f"host {host}: {error.strerror or error}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(f"port {port} on {host} cannot be used: {(error.strerror or str(error)).lower()}") from error
    return listener


def url(host: str, listener: socket.socket) -> str:
    """How a client on this host reaches the listener."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"
