"""Metrics of what went wrong with workers, and of how long it took until all served again."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from moeray.elastic.view import FaultView

RECOVERY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class FaultMetrics:
    """Counts each fault once, and its recovery when it is over."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counted: set[int] = set()
        self._recovered: set[int] = set()
        self._has_history = False
        self._faults = Counter(
            "moeray_faults", "Members of the group that were lost, by how", ["kind"], registry=registry
        )
        self._recovery = Histogram(
            "moeray_recovery_seconds",
            "From a fault until the group served again",
            buckets=RECOVERY_BUCKETS_S,
            registry=registry,
        )

    def on_faults(self, views: Sequence[FaultView]) -> bool:
        """The whole history; returns whether a fault is not over. What was over before is not counted."""
        ids = {view.fault_id for view in views}
        over = {view.fault_id for view in views if view.recovered_s is not None}
        if not self._has_history:
            self._has_history = True
            self._counted, self._recovered = set(over), set(over)
        self._counted &= ids
        self._recovered &= ids
        for view in views:
            if view.fault_id not in self._counted:
                self._counted.add(view.fault_id)
                self._faults.labels(view.kind).inc()
            if view.recovered_s is not None and view.fault_id not in self._recovered:
                self._recovered.add(view.fault_id)
                self._recovery.observe(view.recovered_s)
        return over != ids
