"""TCP connections of this process that a library made for itself, and how to break them from outside."""

import os
import socket
import stat
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")


def sockets() -> dict[int, int]:
    """Descriptors of all sockets of this process, each with the inode that tells it from a later one of its number.

    Empty where the system does not tell.
    """
    found: dict[int, int] = {}
    if not DESCRIPTORS.is_dir():
        return found
    for name in os.listdir(DESCRIPTORS):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # closed meanwhile, the listing's own among them
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def shut_down(descriptor: int, inode: int) -> bool:
    """Break the connection if the descriptor is still the one that was meant, and a TCP connection; whether it was."""
    try:
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False
    with copy:
        is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
        if not is_tcp or os.fstat(copy.fileno()).st_ino != inode:
            return False
        try:
            copy.getpeername()
            copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True
