"""`moeray serve` as a user runs it: a process of its own, HTTP from outside, and a look at what it leaves behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
MARK = "MOERAY_TEST_MARK"
START_S = 120.0
END_S = 40.0


def poll(what: str, found: Callable[[], Any], within_s: float) -> Any:
    """The first true value of `found`, asked again and again; fails with `what` after `within_s`."""
    deadline = time.monotonic() + within_s
    while not (value := found()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.01)
    return value


class Serve:
    """One `moeray serve` process. All processes below it carry a mark in their environment."""

    def __init__(
        self,
        directory: Path,
        model: str | Path,
        *options: str,
        variables: Mapping[str, str] | None = None,
        module: str = "moeray.deploy.cli",
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.output_path = directory / f"serve-{self.mark[:6]}.txt"
        # The work directory of moeray is made below TMPDIR, where the tests can see what is left of it.
        self.temporary = Path("/tmp") / f"mt-{self.mark[:6]}"
        self.temporary.mkdir()
        environment = os.environ | {
            "PYTHONPATH": str(ROOT / "src"),
            MARK: self.mark,
            "TMPDIR": str(self.temporary),
            "COLUMNS": "200",
            "HF_HUB_OFFLINE": "1",
        }
        for name in [name for name in environment if name.startswith("RAY_")]:
            del environment[name]
        environment.update(variables or {})
        command = [sys.executable, "-m", module, "serve", str(model), "--port", "0", *options]
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes():
            process.kill()
        self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All living processes that carry the mark, the supervisor included."""
        return [process for process in psutil.process_iter() if self._is_marked(process)]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def url(self) -> str:
        """Where it serves; waits for it to say so."""
        poll(f"the server is up: {self.output}", self._is_up_or_over, START_S)
        found = re.search(r"served at (http://\S+)", self.output)
        assert found is not None, self.output
        return found[1]

    def _is_up_or_over(self) -> bool:
        return "curl -N" in self.output or self.process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, within_s: float = END_S) -> int:
        """The exit code; waits for the end."""
        return self.process.wait(within_s)

    def assert_nothing_left(self, within_s: float = 0.0) -> None:
        """No process and no file, at once or after a while."""
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, [(process.pid, process.cmdline()) for process in left]
        assert not list(self.temporary.glob("moeray-*/token")), "the token must not outlive the cluster"

    def own_processes(self) -> list[psutil.Process]:
        """moeray's own: supervisor, front end, controller, workers; Ray's helpers are not."""
        return self.processes_called(r"moeray\.deploy|ControllerActor|WorkerActor")

    def processes_called(self, pattern: str) -> list[psutil.Process]:
        """Those whose command line has the pattern; one that is about to end may be missing."""
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if re.search(pattern, " ".join(process.cmdline())):
                    found.append(process)
        return found


@contextmanager
def client(url: str, **options: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=120.0, trust_env=False, **options) as http:
        yield http


def gauges(http: httpx.Client, name: str) -> dict[str, float]:
    """A metric's values by slot."""
    found = re.findall(rf'^moeray_{name}{{slot="(\d+)"}} (\S+)$', http.get("/metrics").text, re.MULTILINE)
    return {slot: float(value) for slot, value in found}
