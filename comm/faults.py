"""Named points at which a process can be made to fail, for tests of what happens then. Off unless a variable is set.

`MOERAY_FAULT_FILE` names a file that is read again whenever it changes, with a fault in each line:

    SLOT POINT HOW [step=N] [seconds=S] [incarnation=I]

HOW is `delay` (for `seconds`), `raise` (a `GroupError`, as if the network had failed), `exit` (as by kill -9) or
`stop` (as by SIGSTOP). It comes at the first time that the slot's process passes the point, from step N of an epoch on,
and once in a process. While the variable is not set, a point costs one look at `armed`.
"""

import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeray.comm.errors import GroupError

logger = logging.getLogger(__name__)

VARIABLE = "MOERAY_FAULT_FILE"
POINTS = (
    "before_header",
    "ready_header",
    "before_dispatch",
    "mid_combine",
    "before_commit",
    "after_commit",
    "at_switch",
    "during_load",
    "during_group_build",
    "during_transfer",
    "during_hand_over",
)
WAYS = ("delay", "raise", "exit", "stop")

armed = VARIABLE in os.environ


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One line of the file."""

    slot: int
    point: str
    how: str
    step: int = 0
    seconds: float = 0.0
    incarnation: int | None = None


def parse(text: str) -> tuple[Fault, ...]:
    """All faults of a file. `ValueError` names the line and what it must be."""
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                faults.append(_parse_line(line))
            except ValueError as error:
                raise ValueError(f"line {number}, {error}") from None
    return tuple(faults)


def read(path: Path) -> tuple[Fault, ...]:
    """All faults of the file at `path`; none if it is not there yet. `ValueError` names the file as well."""
    try:
        return parse(path.read_text())
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise ValueError(f"{VARIABLE} names {path}, which is no list of faults: {error}") from error


def _number(line: str, name: str, text: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{line!r}: {name} is {text!r}, must be a number") from None


def _parse_line(line: str) -> Fault:
    words = line.split()
    if len(words) < 3:
        raise ValueError(f"{line!r}: must be SLOT POINT HOW [step=N] [seconds=S] [incarnation=I]")
    slot, point, how, *options = words
    if point not in POINTS:
        raise ValueError(f"{line!r}: the point is {point!r}, must be one of {', '.join(POINTS)}")
    if how not in WAYS:
        raise ValueError(f"{line!r}: it fails by {how!r}, must be one of {', '.join(WAYS)}")
    given = {name: value for name, _, value in (option.partition("=") for option in options)}
    if unknown := set(given) - {"step", "seconds", "incarnation"}:
        raise ValueError(f"{line!r}: option {min(unknown)!r} is unknown, must be step, seconds or incarnation")
    return Fault(
        slot=_number(line, "the slot", slot, int),
        point=point,
        how=how,
        step=_number(line, "step", given.get("step", "0"), int),
        seconds=_number(line, "seconds", given.get("seconds", "0"), float),
        incarnation=_number(line, "incarnation", given["incarnation"], int) if "incarnation" in given else None,
    )


class FaultPoints:
    """The faults of this process. `here` says who it is; `step` is set by whoever counts steps."""

    def __init__(self) -> None:
        self.slot = -1
        self.incarnation = -1
        self.step = 0
        self._faults: tuple[Fault, ...] = ()
        self._read_at: tuple[int, int] | None = None
        self._fired: set[Fault] = set()

    def here(self, slot: int, incarnation: int) -> None:
        """Which worker this process is."""
        self.slot, self.incarnation = slot, incarnation

    def reach(self, point: str) -> None:
        """Fail now, if a fault says so."""
        for fault in self._known():
            if fault.point != point or fault.slot != self.slot or fault in self._fired or self.step < fault.step:
                continue
            if fault.incarnation in (None, self.incarnation):
                self._fired.add(fault)
                self._fail(fault)

    def _known(self) -> tuple[Fault, ...]:
        """What the file says now, or said before it became something else: nobody dies of a typing mistake."""
        path = Path(os.environ[VARIABLE])
        try:
            found = path.stat()
        except OSError:
            return ()
        if (read_at := (found.st_mtime_ns, found.st_size)) != self._read_at:
            self._read_at = read_at
            try:
                self._faults = read(path)
            except ValueError as error:
                logger.error("%s; what it said before stays", error)
        return self._faults

    def _fail(self, fault: Fault) -> None:
        logger.warning(
            "[%d.%d step %d] fault: %s by %s", self.slot, self.incarnation, self.step, fault.point, fault.how
        )
        if fault.how == "delay":
            time.sleep(fault.seconds)
        elif fault.how == "raise":
            raise GroupError(f"a fault was asked for at {fault.point}")
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.how == "exit" else signal.SIGSTOP)


points = FaultPoints()


def reach(point: str) -> None:
    """Pass a point; does nothing unless faults are armed."""
    if armed:
        points.reach(point)
