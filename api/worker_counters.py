"""What the workers say of themselves, added up over their lives.

A slot's next incarnation starts to count from 0, and so may a worker in a new epoch; what is shown never goes back.
"""

from collections.abc import Iterable, Iterator

from moeray.api.router import MemberKey
from moeray.worker.messages import WorkerStats

GAUGES = tuple(name for name in WorkerStats.__struct_fields__ if name.startswith("num_"))
COUNTERS = tuple(name for name in WorkerStats.__struct_fields__ if name not in GAUGES)


class WorkerCounters:
    """The last stats of each member, and by slot the sums of counters that were set back."""

    def __init__(self) -> None:
        self._last: dict[MemberKey, WorkerStats] = {}
        self._ended: dict[int, dict[str, float]] = {}

    def update(self, member: MemberKey, stats: WorkerStats) -> None:
        """A member's newest stats."""
        last = self._last.get(member)
        self._last[member] = stats
        if last is not None:
            self._keep(member[0], last, [name for name in COUNTERS if getattr(stats, name) < getattr(last, name)])

    def forget(self, member: MemberKey) -> None:
        """The member is gone; its counters stay in its slot's sums."""
        if (last := self._last.pop(member, None)) is not None:
            self._keep(member[0], last, COUNTERS)

    def _keep(self, slot: int, last: WorkerStats, names: Iterable[str]) -> None:
        for name in names:
            ended = self._ended.setdefault(slot, dict.fromkeys(COUNTERS, 0))
            ended[name] += getattr(last, name)

    def gauges(self) -> Iterator[tuple[int, dict[str, float]]]:
        """By slot, of the members that are there."""
        for member, stats in sorted(self._last.items(), key=lambda item: item[0]):
            yield member[0], {name: getattr(stats, name) for name in GAUGES}

    def totals(self) -> Iterator[tuple[int, dict[str, float]]]:
        """By slot, since this front end has started, of all members that ever were."""
        totals = {slot: dict(ended) for slot, ended in self._ended.items()}
        for (slot, _), stats in self._last.items():
            sums = totals.setdefault(slot, dict.fromkeys(COUNTERS, 0))
            for name in COUNTERS:
                sums[name] += getattr(stats, name)
        yield from sorted(totals.items())
