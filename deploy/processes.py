"""Ending processes that we started, and knowing that they are gone.

`psutil.Process` knows a process by its id and start time, so a reused id is never hit.
"""

import logging
from collections.abc import Iterable, Sequence

import psutil

logger = logging.getLogger(__name__)


def descendants(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """These processes and everything below them that lives now."""
    found: list[psutil.Process] = []
    for process in processes:
        try:
            found += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def marks(processes: Iterable[psutil.Process]) -> list[tuple[int, float]]:
    """Ids and start times, with which another process can know the same processes again."""
    return [(process.pid, process.create_time()) for process in processes if process.is_running()]


def known_processes(marked: Iterable[Sequence[float]]) -> list[psutil.Process]:
    """Those of the marked processes that still live."""
    found: list[psutil.Process] = []
    for pid, created in marked:
        try:
            process = psutil.Process(int(pid))
            if abs(process.create_time() - created) < 0.01:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def end_processes(processes: Iterable[psutil.Process], *, timeout_s: float) -> list[str]:
    """Wait for processes that are about to end; those that have not within `timeout_s` are killed and named."""
    killed: list[str] = []
    _, alive = psutil.wait_procs(list(processes), timeout=timeout_s)
    for process in alive:
        try:
            name = f"{process.name()} (pid {process.pid})"
            process.kill()
        except psutil.NoSuchProcess:
            continue
        logger.info("%s did not end within %g s and was killed", name, timeout_s)
        killed.append(name)
    psutil.wait_procs(alive, timeout=timeout_s)
    return killed
