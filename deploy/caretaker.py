"""Cleans up where the supervisor was killed: `python -m moeray.deploy.caretaker`, started by it and by nobody else.

A process of its own, because Ray ends whatever is connected to it as soon as its head is gone. A line of JSON on
standard input says what there is to clean up; when the input ends, the supervisor is gone.
"""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from moeray.deploy.processes import end_processes, known_processes, marks

MODULE = "moeray.deploy.caretaker"
REMOVE_S = 10.0
REMOVE_POLL_S = 0.1


class Caretaker:
    """Watches over a supervisor's folder for as long as it is entered; after an orderly end nothing is left to do."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # neither Ctrl-C nor the terminal's end is for it
        )
        self.watch(())

    def watch(self, processes: Iterable[psutil.Process]) -> None:
        """These, and what is below them, end with the supervisor; the folder is removed after them."""
        assert self._process.stdin is not None
        line = json.dumps({"directory": str(self._directory), "processes": marks(processes)})
        with contextlib.suppress(BrokenPipeError):  # somebody ended it, which is no reason not to serve
            self._process.stdin.write(line.encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def clean_up(directory: Path, marked: Sequence[Sequence[float]]) -> None:
    """The access token goes first, then the processes, then all files."""
    (directory / "token").unlink(missing_ok=True)
    end_processes(known_processes(marked), timeout_s=0.0)
    deadline = time.monotonic() + REMOVE_S
    while directory.exists() and time.monotonic() < deadline:  # who is about to end may still write
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(REMOVE_POLL_S)


def main() -> None:
    """Wait for the end of standard input, then clean up what its last line names."""
    for line in sys.stdin:
        told = json.loads(line)
    clean_up(Path(told["directory"]), told["processes"])


if __name__ == "__main__":
    main()
