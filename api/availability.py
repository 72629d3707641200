"""Whether requests get on, as far as the front end itself knows, and if not, why and since when."""

import asyncio
import contextlib
from collections.abc import Callable

from moeray.api.links import Links
from moeray.api.members import Members
from moeray.api.pulse import Pulse
from moeray.api.recovery import Recovery
from moeray.api.router import Router
from moeray.elastic.view import ClusterView

# A pause that is shorter is none: the switch to another epoch, a connection that is made again.
GRACE_S = 0.7
SILENT_S = 0.5
SETTLE_POLL_S = 0.01


class Availability:
    """Puts together what the controller told last, whom this process can reach, and whether the controller answers.

    `failure` is set once and for all. `update` is called after every change of any of them.
    """

    def __init__(
        self,
        router: Router,
        members: Members,
        pulse: Pulse,
        *,
        recovery_timeout_s: float,
        on_timeout: Callable[[], None],
    ) -> None:
        self.view: ClusterView | None = None
        self.links: Links | None = None
        self.failure: str | None = None
        self._router = router
        self._members = members
        self._pulse = pulse
        self._recovery = Recovery(recovery_timeout_s, on_timeout)

    @property
    def is_given_up(self) -> bool:
        """Whether requests are refused: nothing has served for too long, or never will."""
        return self.failure is not None or self._recovery.is_over

    @property
    def num_serving(self) -> int:
        """Workers that serve requests; none where `cause` says that nothing is served."""
        return 0 if self.cause() is not None else len(self._router.members)

    def update(self) -> None:
        """Start the clock of the recovery, or set it back."""
        self._recovery.update(self._is_served())

    def close(self) -> None:
        """Nobody waits any more."""
        self._recovery.close()

    def cause(self) -> str | None:
        """Why nothing can be generated now, in one line; None if it can, or will within a moment."""
        view = self.view
        if self.failure is not None:
            return self.failure
        if view is None:
            return "the controller has not answered yet"
        if view.state != "serving":
            return self._with_silence(view.cause or f"the cluster is {view.state}")
        is_brief = self._recovery.unserved_s < GRACE_S and not self._is_abandoned()
        if not self._recovery.is_over and is_brief and (self._router.members or self._is_between_workers()):
            return None
        return self._with_silence(self._reason(view))

    def _is_served(self) -> bool:
        """Whether requests get on: a group without dead members serves, and one of it is known to take requests."""
        view = self.view
        if view is None or view.state != "serving" or not self._router.members or self._is_abandoned():
            return False
        return not any(member.rank is not None and member.state == "dead" for member in view.members)

    def _is_abandoned(self) -> bool:
        """A member of the group cannot be reached, and nobody tells whether the others get on without it.

        They do not if it is dead: the controller has to make them a group.
        """
        return bool(self._lost_slots()) and self._pulse.silent_s >= SILENT_S

    def _is_between_workers(self) -> bool:
        """The last worker of an epoch has left, and those of the next one are about to answer."""
        return self._members.has_served and self.links is not None and self.links.is_connecting

    def _lost_slots(self) -> list[int]:
        if self.links is None or self.view is None:
            return []
        group = {(member.slot, member.incarnation) for member in self.view.members if member.rank is not None}
        return sorted(slot for slot, incarnation in self.links.lost if (slot, incarnation) in group)

    def _reason(self, view: ClusterView) -> str:
        if dead := [member.slot for member in view.members if member.state == "dead"]:
            return f"workers {dead} are dead: waiting for a new group"
        if lost := self._lost_slots():
            return "; ".join(f"worker {slot}: its connection was lost" for slot in lost)
        return "no worker serves"

    def _with_silence(self, cause: str) -> str:
        silent_s = self._pulse.silent_s
        return cause if silent_s < SILENT_S else f"{cause}; the controller has not answered for {silent_s:.1f} s"

    async def settle(self, timeout_s: float) -> None:
        """Wait until it is known whether requests can be taken, if that comes soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.view is None or (self.view.state == "serving" and not self._router.members):
                    await asyncio.sleep(SETTLE_POLL_S)
