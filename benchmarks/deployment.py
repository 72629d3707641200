"""A `moeray serve` of a benchmark's own: started on a free port, followed, ended."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import psutil

START_DEADLINE_S = 180.0
END_DEADLINE_S = 60.0


class Deployment:
    """One server process. Use as a context manager, or call `close`.

    `module` is run as `python -m module serve MODEL --port PORT --deployment NAME ARGUMENTS`.
    """

    def __init__(
        self,
        model: str,
        arguments: Sequence[str],
        log: Path,
        *,
        module: str = "moeray.deploy.cli",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.name = f"benchmark-{port}"
        self.log = log
        command = [sys.executable, "-m", module, "serve", model, "--port", str(port), "--deployment", self.name]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, *arguments], stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **variables}
            )

    def wait_ready(self) -> Self:
        """Raises `RuntimeError` with the server's output if it does not come up in time."""
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("/ready")
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
            else:
                return self
        raise RuntimeError(f"moeray did not get ready:\n{self.log.read_text()}")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10.0) as answer:
            body = answer.read()
        return json.loads(body) if body[:1] in b"{[" and body else body.decode()

    def post(self, path: str, fields: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(fields).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            return json.loads(answer.read())

    def scale(self, *, deadline_s: float = 60.0, **fields: Any) -> dict[str, Any]:
        """Change the size and wait for the end; returns the operation. `RuntimeError` if it is not done in time."""
        return self._operate("/scale", fields, deadline_s)

    def rebalance(self, *, deadline_s: float = 60.0) -> dict[str, Any]:
        """As `scale`, for an exchange of experts."""
        return self._operate("/rebalance", {}, deadline_s)

    def _operate(self, path: str, fields: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        operation: dict[str, Any] = self.post(path, fields)
        deadline = time.monotonic() + deadline_s
        while operation["outcome"] is None and time.monotonic() < deadline:
            time.sleep(0.02)
            operation = self.get(f"/operations/{operation['operation_id']}")
        if operation["outcome"] != "done":
            raise RuntimeError(f"the operation is not done: {operation}")
        return operation

    def slots(self) -> list[int]:
        """The members' slots, in rank order."""
        return [member["slot"] for member in self.get("/topology")["members"] if member["rank"] is not None]

    def processes(self) -> list[psutil.Process]:
        """The supervisor and all that descends from it."""
        supervisor = psutil.Process(self.process.pid)
        return [supervisor, *supervisor.children(recursive=True)]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def __enter__(self) -> Self:
        return self.wait_ready()

    def __exit__(self, *_: object) -> None:
        self.close()


# How the command lines of moeray's own processes differ from those of Ray's daemons.
OWN = {
    "supervisor": r" serve .*--deployment",
    "front end": r"moeray\.deploy\.frontend",
    "caretaker": r"moeray\.deploy\.caretaker",
    "controller": r"ray::ControllerActor",
    "worker": r"ray::WorkerActor",
}


def own_processes(deployment: Deployment) -> dict[str, psutil.Process]:
    """Supervisor, front end, caretaker, controller and workers, by name; workers are numbered."""
    found: dict[str, psutil.Process] = {}
    for process in deployment.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            for name, pattern in OWN.items():
                if re.search(pattern, line):
                    number = sum(known.startswith(name) for known in found)
                    found[f"{name} {number}" if name == "worker" else name] = process
                    break
    return found
