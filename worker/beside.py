"""Work beside the step loop, in the engine's own thread: slices of bulk native calls between two steps.

A busy Python thread next to the engine would take the interpreter from it again and again; slices cost what they take.
"""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

# What a slice may take while requests run.
SLICE_S = 0.002


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """`steps` does about a millisecond of work each time it is advanced; its end or error goes to `done`."""

    steps: Iterator[object]
    done: "Future[None]"


class JobQueue:
    """Jobs in the order of their arrival. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, job: Job) -> None:
        self._jobs.append(job)

    def run_slice(self, seconds: float = SLICE_S) -> None:
        """Advance the first job for this long; a job's failure is its own."""
        end = time.monotonic() + seconds
        while self._jobs and time.monotonic() < end:
            job = self._jobs[0]
            try:
                next(job.steps)
            except StopIteration:
                job.done.set_result(None)
                self._jobs.popleft()
            except Exception as error:  # noqa: BLE001 - reported to whoever waits for the job
                job.done.set_exception(error)
                self._jobs.popleft()

    def fail_all(self, error: Exception) -> None:
        """The loop has ended: nobody will advance these."""
        while self._jobs:
            self._jobs.popleft().done.set_exception(error)
