"""The embedded cluster: a Ray head on loopback that lives and dies with this process."""

import atexit
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from moeray.comm.errors import StartupError
from moeray.deploy.environment import RAY_EMBEDDED, write_head_home
from moeray.deploy.processes import descendants, end_processes

OBJECT_STORE_BYTES = 100 << 20
ESSENTIAL = ("raylet", "gcs_server")


def _leave() -> None:
    """The end of this process, now: it has failed, and what Ray would do at its exit does not come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@contextlib.contextmanager
def _sighup_blocked() -> Iterator[None]:
    """What is started meanwhile is left alone when the terminal closes; this process hears of it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def variables(token: Path) -> Mapping[str, str]:
    """What must be in the environment before Ray is imported, in this process and in every one that connects."""
    return RAY_EMBEDDED | {"RAY_AUTH_TOKEN_PATH": str(token)}


class LocalRay:
    """A running embedded head, to which this process is connected.

    Its files (sockets, logs, the access token) live below `directory`, whose path must be short because Unix
    sockets need that. If this process is killed, the head ends by itself within seconds.
    """

    def __init__(self, *, address: str, logs: Path, token: Path, daemons: Sequence[psutil.Process]) -> None:
        self.address = address
        self.logs = logs
        self._token = token
        self._daemons = daemons
        self._essential = {process: name for process in daemons if (name := process.name()) in ESSENTIAL}

    @classmethod
    def start(cls, directory: Path, *, namespace: str, use_gpus: bool = False) -> "LocalRay":
        """Start the head and connect, from the main thread: the head is tied to the life of its parent thread.

        Raises `StartupError`. Nothing is left running if it does not return.
        """
        token = directory / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        home = write_head_home(directory / "home")
        os.environ.update(variables(token))

        import ray
        from ray import _raylet

        # Ray may have been imported before, with the token and settings of an earlier cluster.
        _raylet.Config.initialize("")  # type: ignore[attr-defined]
        _raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]
        before = set(psutil.Process().children())
        try:
            with _variable("HOME", str(home)), _sighup_blocked():
                context = ray.init(
                    num_cpus=0,
                    num_gpus=None if use_gpus else 0,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level="error",
                    namespace=namespace,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(directory / "ray"),
                )
        except BaseException as error:
            daemons = set(psutil.Process().children()) - before
            ray.shutdown()
            end_processes(descendants(daemons), timeout_s=0.5)
            if not isinstance(error, RuntimeError | OSError | ValueError | TimeoutError):
                raise
            lines = str(error).strip().splitlines()
            raise StartupError(f"Ray did not start: {lines[0] if lines else type(error).__name__}") from error
        return cls(
            address=context.address_info["gcs_address"],
            logs=Path(context.address_info["session_dir"]) / "logs",
            token=token,
            daemons=list(set(psutil.Process().children()) - before),
        )

    def dead(self) -> str | None:
        """The first of those without which nothing works that does not run any more, with its process id."""
        for process, name in self._essential.items():
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return f"{name} (pid {process.pid})"
        return None

    def processes(self) -> list[psutil.Process]:
        """Ray's own processes, and the actors' that live now."""
        return descendants(self._daemons)

    def stop(self, *, timeout_s: float = 10.0) -> list[str]:
        """End the head with all its actors and wait until each process is gone. Safe to call twice.

        Returns the names of processes that had to be killed because they did not end in time.
        """
        import ray

        started = self.processes()
        if self.dead() is None:
            ray.shutdown()
        else:
            # Without a raylet Ray's own end ends this process, whatever that has still to do or to say.
            atexit.register(_leave)
            timeout_s = 0.0
        self._token.unlink(missing_ok=True)
        return end_processes(started, timeout_s=timeout_s)
