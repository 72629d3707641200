"""A `moeray serve` of a benchmark's own: started on a free port, followed, ended."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil

START_DEADLINE_S = 180.0
END_DEADLINE_S = 60.0


class Deployment:
    """One server process. Use as a context manager, or call `close`."""

    def __init__(self, model: str, arguments: Sequence[str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.name = f"benchmark-{port}"
        self.log = log
        command = [sys.executable, "-m", "moeray.deploy.cli", "serve", model, "--port", str(port)]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, "--deployment", self.name, *arguments], stdout=output, stderr=subprocess.STDOUT
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
        """Start an operation and wait for its end; returns it. Raises `RuntimeError` if it is not done in time."""
        operation: dict[str, Any] = self.post("/scale", fields)
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
