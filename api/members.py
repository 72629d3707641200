"""Which members take requests: what the view says, corrected by what they have said themselves since."""

from moeray.api.router import MemberKey, Router
from moeray.elastic.view import ClusterView


class Members:
    """Keeps the router to it. Members that have left their group, or failed, stay so whatever an older view says."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._states: dict[MemberKey, str] = {}
        self._emptied: set[MemberKey] = set()
        self._failed: set[MemberKey] = set()
        self.has_served = False

    def update(self, view: ClusterView) -> None:
        """A new view; the router hears of it member by member, by `route` and `lose`."""
        self._states = {(member.slot, member.incarnation): member.state for member in view.members}
        self._emptied &= self._states.keys()
        self._failed &= self._states.keys()

    @property
    def keys(self) -> tuple[MemberKey, ...]:
        """All members of the view, whatever their state."""
        return tuple(self._states)

    def state_of(self, member: MemberKey) -> str:
        """In one word, for people."""
        return self._states.get(member, "gone")

    def route(self, member: MemberKey) -> None:
        """An attached member gets requests if it serves; one that leaves ends those that it has."""
        state = self._states.get(member)
        if state in ("serving", "leaving") and member not in self._failed:
            self.has_served = True
            self._router.add(member)
            self._router.set_leaving(member, state == "leaving" or member in self._emptied)

    def leave(self, member: MemberKey) -> None:
        """It has left its group, and takes nothing any more."""
        self._emptied.add(member)
        self._router.set_leaving(member, True)

    def fail(self, member: MemberKey) -> None:
        """It will say nothing any more."""
        self._failed.add(member)
        self._router.remove(member)
