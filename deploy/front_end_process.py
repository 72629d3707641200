"""The front end as the supervisor sees it: a child with a life of its own, settings on its standard input."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeray.comm.errors import StartupError

MODULE = "moeray.deploy.frontend"
READY = "ready"
SUPERSEDED = 3  # its exit code when another front end has taken the lease


class FrontEndProcess:
    """It starts to import while Ray starts, and waits for `configure`.

    Its standard input stays open for as long as the supervisor lives: at its end the front end leaves. Secrets go
    through it too, because everybody can read a command line. It answers with lines on its standard output; its own
    log lines go to the end of `log`.
    """

    def __init__(self, listener: socket.socket, log: Path) -> None:
        self._log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                bufsize=0,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # the terminal's Ctrl-C is for the supervisor, which lets it drain
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Send the settings. `StartupError` if the process is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise StartupError(self.last_words()) from None

    async def ready(self) -> None:
        """Returns when it takes requests. `StartupError` with its last words if it ends before."""
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        if line.decode().strip() != READY:
            await asyncio.to_thread(self._process.wait)
            raise StartupError(self.last_words())

    async def ended(self) -> int:
        """Returns when the process has ended, with its exit code."""
        return await asyncio.to_thread(self._process.wait)

    @property
    def was_superseded(self) -> bool:
        """Whether it has ended because another front end serves the deployment."""
        return self._process.poll() == SUPERSEDED

    def last_words(self) -> str:
        """In one line how it ended, for a person."""
        code = self._process.poll()
        how = "still runs" if code is None else f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            return f"the front end {how}"  # what it said last has nothing to do with that
        own = self._log.read_bytes()[self._log_start :]
        lines = [line for line in own.decode(errors="replace").splitlines() if line.strip()]
        return f"the front end {how}" + (f": {lines[-1].strip()}" if lines else "")

    def terminate(self) -> None:
        """Ask it to drain and leave."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it now, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
