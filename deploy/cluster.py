"""Ray on nodes of the user's own: start and stop it with the settings that moeray wants, and connect to it.

All nodes of a cluster share a token. The head makes it; it reaches the other nodes by the user's own secure way
(scp), never by ours.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from moeray.comm.errors import StartupError
from moeray.deploy.environment import RAY_QUIET, write_head_home
from moeray.deploy.processes import descendants, end_processes

DEFAULT_PORT = 6379
OBJECT_STORE_BYTES = 100 << 20
START_TIMEOUT_S = 120.0
# What Ray says of an attempt without the cluster's token.
REFUSED = "InvalidAuthToken"
# Ray itself tries for minutes, and cannot be interrupted meanwhile.
CONNECT_TIMEOUT_S = 3.0


def default_token_path() -> Path:
    """Where Ray itself looks for the token."""
    return Path.home() / ".ray" / "auth_token"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """A node to start: a head if `join` is None, else a member of the cluster whose head is at `join` (host:port).

    `num_gpus` and `num_cpus` None let Ray count. `name` tells clusters on one host apart.
    """

    join: str | None = None
    port: int = DEFAULT_PORT
    node_ip: str | None = None
    num_cpus: int | None = None
    num_gpus: int | None = None
    token_path: Path | None = None
    name: str = "moeray"

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}, must be from 1 to 65535")
        if self.join is not None and not self.join.rpartition(":")[0]:
            raise ValueError(f"join is {self.join!r}, must be host:port of the head")
        if not self.name.isidentifier():
            raise ValueError(f"name is {self.name!r}, must be letters, digits and '_'")

    @property
    def directory(self) -> Path:
        """Ray's sessions; short, because Unix sockets lie below. Also how `stop_node` knows our processes."""
        return Path(tempfile.gettempdir()) / f"{self.name}-ray-{os.getuid()}"

    def command(self) -> list[str]:
        """The `ray start` that this node needs."""
        command = [str(Path(sys.executable).with_name("ray")), "start", "--disable-usage-stats"]
        if self.join is None:
            command += ["--head", f"--port={self.port}", "--include-dashboard=false"]
            command += [f"--temp-dir={self.directory}"]
        else:
            command += [f"--address={self.join}"]
        command.append(f"--object-store-memory={OBJECT_STORE_BYTES}")
        for option, value in (
            ("node-ip-address", self.node_ip),
            ("num-cpus", self.num_cpus),
            ("num-gpus", self.num_gpus),
        ):
            if value is not None:
                command.append(f"--{option}={value}")
        return command


def start_node(config: NodeConfig) -> Path:
    """Start Ray on this node and return the path of the cluster's token. Raises `StartupError`."""
    token = config.token_path or default_token_path()
    if not token.is_file():
        if config.join is not None:
            raise StartupError(f"{token} is missing: copy it from the head, or name it with --token-file")
        token.parent.mkdir(parents=True, exist_ok=True)
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
    config.directory.mkdir(mode=0o700, exist_ok=True)
    environment = os.environ | RAY_QUIET | {"RAY_AUTH_TOKEN_PATH": str(token)}
    if config.join is None:
        environment["HOME"] = str(write_head_home(config.directory / "home"))
    try:
        done = subprocess.run(
            config.command(),
            env=environment,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StartupError(f"ray start did not return within {START_TIMEOUT_S:g} s") from None
    if done.returncode:
        words = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        reason = next((line for line in reversed(words) if "Error" in line or "error" in line), words[-1:] or "?")
        raise StartupError(f"ray start failed: {reason}")
    return token


def stop_node(name: str = "moeray", *, timeout_s: float = 3.0) -> int:
    """End the Ray processes that `start_node` started here under this name, and return how many there were.

    Head and raylet wait for each other when asked to end, so those that stay after `timeout_s` are killed.
    """
    directory = NodeConfig(name=name).directory
    mark = f"{directory}/"
    ours = [process for process in psutil.process_iter() if _is_of(process, mark)]
    family = descendants(ours)
    for process in ours:
        try:
            process.terminate()
        except psutil.NoSuchProcess:
            continue
    end_processes(family, timeout_s=timeout_s)
    shutil.rmtree(directory, ignore_errors=True)
    return len(ours)


def _is_of(process: psutil.Process, mark: str) -> bool:
    try:
        return process.uids().real == os.getuid() and any(mark in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def check_answers(address: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Raises `StartupError` if nothing listens at host:port, or does not answer in time."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except TimeoutError:
        raise StartupError(f"no way to Ray at {address}: no answer within {timeout_s:g} s") from None
    except (OSError, UnicodeError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise StartupError(f"no way to Ray at {address}: {reason}") from error


def token_path(environ: Mapping[str, str]) -> Path:
    """Where the token of the cluster that is connected to lies, as Ray looks for it."""
    named = environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(named) if named else default_token_path()


def connection_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What Ray needs beside `environ` to connect: a token that is there is shown, unless somebody chose otherwise."""
    has_token = "RAY_AUTH_TOKEN" in environ or token_path(environ).is_file()
    return {
        name: value
        for name, value in RAY_QUIET.items()
        if name not in environ and (name != "RAY_AUTH_MODE" or has_token)
    }


def connect(address: str, *, namespace: str) -> str:
    """Connect this process to a running cluster, of which this host is a node. Raises `StartupError`."""
    if address != "auto":
        check_answers(address)
    os.environ.update(connection_variables(os.environ))

    import ray
    from ray.exceptions import AuthenticationError

    said = ""
    try:
        with tempfile.TemporaryFile() as messages:
            try:
                with _stderr_to(messages.fileno()):
                    context = ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="error")
            finally:
                messages.seek(0)
                said = messages.read().decode(errors="replace")
    except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError, AuthenticationError) as error:
        if isinstance(error, AuthenticationError) or REFUSED in said:
            raise StartupError(
                f"no way to Ray at {address}: the cluster's access token, {token_path(os.environ)} here, is missing or "
                "wrong: copy it from the head, where `moeray cluster start --head` has said where it is, or name it in "
                "RAY_AUTH_TOKEN_PATH"
            ) from error
        lines = str(error).strip().splitlines()
        raise StartupError(
            f"no way to Ray at {address}: {lines[0] if lines else type(error).__name__} "
            "(is this host a node of the cluster? `moeray cluster start --join` makes it one)"
        ) from error
    return str(context.address_info["gcs_address"])


@contextlib.contextmanager
def _stderr_to(file: int) -> Iterator[None]:
    """What Ray's own code says of an attempt goes there: the user gets one line from us."""
    terminal = os.dup(2)
    os.dup2(file, 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def disconnect() -> None:
    """Leave the cluster; it goes on."""
    import ray

    ray.shutdown()
