"""Two hosts of one's own, as network namespaces, with a wire between them that can be slow or cut.

    h1 [wire 10.77.0.1] --- a ~~~ wire ~~~ b --- [10.77.0.2 wire] h2
    h1 [door 10.78.x.y] --- c, in the test's own network

There is no netem everywhere, so the wire is a process (`python -m tests.support.hosts`) that carries Ethernet frames
from a to b and back. It makes all of this when it starts and removes it, with whatever still runs in the namespaces,
when its standard input ends: nothing is left even if the tests are killed.
"""

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.support.serving import ROOT, Serve

LINK = "wire"
MODULE = "tests.support.hosts"
HOST_VARIABLE = "MOERAY_TEST_HOST"
LINK_ADDRESSES = ("10.77.0.1", "10.77.0.2")
START_S = 20.0
END_S = 5.0

ETH_P_ALL = 0x0003
SOL_PACKET = 263
PACKET_IGNORE_OUTGOING = 23
SIOCETHTOOL = 0x8946
# ETHTOOL_SRXCSUM, STXCSUM, SSG, STSO, SGSO, SGRO
OFFLOADS = (0x15, 0x17, 0x19, 0x1F, 0x24, 0x2C)
MAX_FRAME_BYTES = 65_536
MAX_FRAMES = 256
RECEIVE_BUFFER_BYTES = 16 << 20


class NoHostsError(Exception):
    """This user or kernel cannot make them; the message says why."""


@dataclass(frozen=True, slots=True)
class Host:
    """One of the two: the name of its namespace, and its address on the wire."""

    namespace: str
    address: str

    def has(self, pid: int) -> bool:
        """Whether the process is on this host."""
        return Path(f"/proc/{pid}/ns/net").stat().st_ino == Path(f"/run/netns/{self.namespace}").stat().st_ino

    def runs(self, name: str) -> bool:
        """Whether a process with this in its command line is on this host."""
        found = (Path(f"/proc/{pid}/cmdline") for pid in _try_ip("netns", "pids", self.namespace).split())
        return any(name.encode() in path.read_bytes() for path in found if path.exists())

    def moeray(self, *words: str, within_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run the command line on this host, to its end."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment["PYTHONPATH"] = str(ROOT / "src")
        command = [*_inside(self.namespace), sys.executable, "-m", "moeray.deploy.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False, env=environment)


@dataclass(frozen=True, slots=True)
class Hosts:
    """`door` is the first one's address for clients, who are in the test's own network."""

    first: Host
    second: Host
    door: str
    _orders: IO[str] = field(repr=False)
    _answers: IO[str] = field(repr=False)

    def delay(self, seconds: float) -> None:
        """Frames take so long from now on, in each direction: an answer comes after twice the time."""
        self._order(f"delay {seconds}")

    def cut(self) -> None:
        """All frames are lost from now on, those on their way too."""
        self._order("cut")

    def heal(self) -> None:
        """Frames arrive again."""
        self._order("heal")

    def serve(self, directory: Path, *options: str, variables: dict[str, str]) -> Serve:
        """`moeray serve demo` on the first host, reached at its door."""
        inside = {HOST_VARIABLE: self.first.namespace, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        return Serve(directory, "demo", "--host", self.door, *options, variables=variables | inside, module=MODULE)

    def _order(self, words: str) -> None:
        self._orders.write(f"{words}\n")
        self._orders.flush()
        assert self._answers.readline().strip() == words, "the wire is gone"


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Raises `NoHostsError` if they cannot be made."""
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdout:
            kind, _, rest = process.stdout.readline().strip().partition(" ")
            if kind != "ready":
                raise NoHostsError(rest or "the wire did not start")
            first, second, door = rest.split()
            hosts = [Host(name, address) for name, address in zip((first, second), LINK_ADDRESSES, strict=True)]
            yield Hosts(hosts[0], hosts[1], door, process.stdin, process.stdout)
    finally:
        process.stdin.close()
        process.wait(START_S)


def _inside(namespace: str) -> list[str]:
    return ["ip", "netns", "exec", namespace]


@dataclass(frozen=True, slots=True)
class Networks:
    """The namespaces and links, by a number that nobody else has: a process id."""

    number: int

    @property
    def namespaces(self) -> tuple[str, str]:
        return (f"moeray{self.number}h1", f"moeray{self.number}h2")

    @property
    def ends(self) -> tuple[str, str]:
        """The links' ends in the root namespace, between which the wire is."""
        return (f"mt{self.number}a", f"mt{self.number}b")

    @property
    def doors(self) -> tuple[str, str]:
        """The addresses of the first host and of the test, on a network of the two."""
        base = f"10.78.{self.number // 64 % 256}"
        first = self.number % 64 * 4 + 1
        return (f"{base}.{first}", f"{base}.{first + 1}")

    def make(self) -> None:
        """Raises `NoHostsError`; what was made until then is there."""
        for namespace, end, address in zip(self.namespaces, self.ends, LINK_ADDRESSES, strict=True):
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
            self._link(namespace, end, LINK, f"{address}/24")
            _ip("link", "set", end, "addrgenmode", "none")
            _ip("link", "set", "dev", end, "up")
        door, client = self.doors
        end = f"mt{self.number}c"
        self._link(self.namespaces[0], end, "door", f"{door}/30")
        _ip("address", "add", f"{client}/30", "dev", end)
        _ip("link", "set", "dev", end, "up")

    def _link(self, namespace: str, end: str, name: str, address: str) -> None:
        peer = f"{end}p"
        _ip("link", "add", end, "type", "veth", "peer", "name", peer)
        for device in (end, peer):
            turn_offloads_off(device)
        _ip("link", "set", peer, "netns", namespace, "name", name)
        _ip("-n", namespace, "address", "add", address, "dev", name)
        _ip("-n", namespace, "link", "set", "dev", name, "up")

    def remove(self) -> None:
        """Ends what still runs on the hosts; whatever is not there is no error."""
        for end in (*self.ends, f"mt{self.number}c"):
            _try_ip("link", "delete", end)
        deadline = time.monotonic() + END_S
        for namespace in self.namespaces:
            while (left := _try_ip("netns", "pids", namespace).split()) and time.monotonic() < deadline:
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.05)
            _try_ip("netns", "delete", namespace)


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NoHostsError("there is no `ip` here (iproute2)") from None
    if done.returncode:
        raise NoHostsError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _try_ip(*words: str) -> str:
    """What it says; nothing if it fails."""
    with suppress(FileNotFoundError):
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        return "" if done.returncode else done.stdout
    return ""


def turn_offloads_off(device: str) -> None:
    """Frames leave the kernel as they would travel: with checksums, none longer than the MTU. As `ethtool -K` does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("=II", command, 0))
            request = struct.pack("16sP16x", device.encode(), ctypes.addressof(value))
            with suppress(OSError):  # not every kernel has each of them
                fcntl.ioctl(control, SIOCETHTOOL, request)


class Wire:
    """Carries frames between two devices, in their order."""

    def __init__(self, devices: Sequence[str]) -> None:
        first, second = (_open(device) for device in devices)
        self._other = {first: second, second: first}
        self._delay_s = 0.0
        self._is_cut = False
        self._on_the_way: deque[tuple[float, socket.socket, bytes]] = deque()

    def run(self, orders: IO[bytes], answers: IO[str]) -> None:
        """Until there are no more orders."""
        while True:
            wait_s = max(0.0, self._on_the_way[0][0] - time.monotonic()) if self._on_the_way else None
            sources: list[IO[bytes] | socket.socket] = [orders, *self._other]
            for ready in select.select(sources, [], [], wait_s)[0]:
                if isinstance(ready, socket.socket):
                    self._take(ready)
                    continue
                line = orders.readline().decode()
                if not line:
                    return
                self._obey(line.split())
                answers.write(line)
                answers.flush()
            self._deliver()

    def _obey(self, words: list[str]) -> None:
        if words[0] == "delay":
            self._delay_s = float(words[1])
        else:
            self._is_cut = words[0] == "cut"
            self._on_the_way.clear()

    def _take(self, end: socket.socket) -> None:
        due = time.monotonic() + self._delay_s
        for _ in range(MAX_FRAMES):
            try:
                frame = end.recv(MAX_FRAME_BYTES)
            except BlockingIOError:
                return
            if not self._is_cut:
                self._on_the_way.append((due, self._other[end], frame))

    def _deliver(self) -> None:
        while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
            _, end, frame = self._on_the_way.popleft()
            with suppress(OSError):  # a full queue loses frames, as a real one does
                end.send(frame)


def _open(device: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.bind((device, ETH_P_ALL))
    end.setblocking(False)
    return end


def wire() -> None:
    """Make the hosts, say their names, carry their frames, and remove them in the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test's own end is the sign
    networks = Networks(os.getpid())
    answers = os.fdopen(1, "w", closefd=False)
    try:
        if os.geteuid() != 0:
            raise NoHostsError("only root can make network namespaces")
        networks.make()
        carrier = Wire(networks.ends)
        answers.write(f"ready {' '.join(networks.namespaces)} {networks.doors[0]}\n")
        answers.flush()
        # Unbuffered, so that no order waits in a buffer where `select` does not see it.
        carrier.run(os.fdopen(0, "rb", buffering=0, closefd=False), answers)
    except (NoHostsError, OSError) as error:
        with suppress(BrokenPipeError):
            answers.write(f"no {error}\n")
            answers.flush()
    finally:
        networks.remove()


if __name__ == "__main__":
    if HOST_VARIABLE in os.environ:
        # `Serve` starts this module in the place of the command line.
        prefix = _inside(os.environ.pop(HOST_VARIABLE))
        os.environ["PYTHONPATH"] = str(ROOT / "src")
        os.execvp(prefix[0], [*prefix, sys.executable, "-m", "moeray.deploy.cli", *sys.argv[1:]])
    wire()
