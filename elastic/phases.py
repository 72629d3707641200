"""How long each phase of an operation may take, and the record of when it did."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from moeray.elastic.view import OperationView, PhaseView


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationDeadlines:
    """Seconds for each phase.

    `provision_s` covers processes and weights of joiners, `connect_s` the group, `transfer_s` experts and the KV of
    leavers, `switch_s` the way from the first commit to the last worker's switch, `retire_s` the end of leavers,
    `halt_s` the end of the step that runs when the group is given up, `rollback_s` each step of a rollback, `status_s`
    a worker's answer to a question: where it stands, or its load. `overall_s` counts until the first commit, unless the
    caller says otherwise; nothing is rolled back later.
    """

    provision_s: float = 600.0
    connect_s: float = 45.0
    transfer_s: float = 300.0
    switch_s: float = 30.0
    retire_s: float = 15.0
    halt_s: float = 10.0
    rollback_s: float = 30.0
    status_s: float = 10.0
    overall_s: float = 900.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} is {value}, must be more than 0")

    def of(self, phase: str) -> float:
        """The seconds that a phase before the switch may take."""
        return {
            "planned": self.overall_s,
            "provisioning": self.provision_s,
            "halting": self.halt_s,
            "connecting": self.connect_s,
            "transferring": self.transfer_s,
        }[phase]


def entered(view: OperationView, phase: str) -> OperationView:
    """The operation has reached this phase now; the one before is over."""
    now = time.time()
    phases = (*_closed(view.phases, now), PhaseView(name=phase, started_at=now, seconds=None))
    return msgspec.structs.replace(view, phase=phase, phases=phases)


def ended(view: OperationView, outcome: str, reason: str | None) -> OperationView:
    """The operation is over."""
    phases = _closed(view.phases, time.time())
    return msgspec.structs.replace(view, outcome=outcome, reason=reason, phases=phases)


def _closed(phases: tuple[PhaseView, ...], now: float) -> tuple[PhaseView, ...]:
    if not phases or phases[-1].seconds is not None:
        return phases
    last = phases[-1]
    return (*phases[:-1], msgspec.structs.replace(last, seconds=max(0.0, now - last.started_at)))


class PhaseClock:
    """Until when the calls of the current phase may take: its own deadline or the operation's, whichever is first."""

    def __init__(self, deadlines: OperationDeadlines, overall_s: float) -> None:
        self._deadlines = deadlines
        self._overall_s = overall_s
        self._ends: Mapping[str, float] = {}

    def enter(self, phase: str) -> None:
        """A phase before the switch begins."""
        now = asyncio.get_running_loop().time()
        overall = self._ends.get("overall", now + self._overall_s)
        self._ends = {"overall": overall, "phase": now + self._deadlines.of(phase)}
        self._phase = phase

    @property
    def end(self) -> float:
        """On the event loop's clock."""
        return min(self._ends.values())

    @property
    def limit(self) -> str:
        """Which deadline that is, in words."""
        if self._ends["overall"] <= self._ends["phase"]:
            return f"the operation's deadline of {self._overall_s:g} s"
        return f"the {self._deadlines.of(self._phase):g} s of phase {self._phase}"
