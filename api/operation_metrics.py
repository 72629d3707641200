"""Metrics of what changes while requests stream: operations, epochs, and what clients felt of them."""

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moeray.elastic.view import ClusterView, OperationView

PHASE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class GapWindow:
    """The longest pause between two tokens of one stream that overlaps an operation. Times are a monotonic clock's."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._began = float("inf")
        self._ended = float("inf")

    def begin(self, now: float) -> None:
        """An operation starts to count; the one before is forgotten."""
        self.longest_s, self._began, self._ended = 0.0, now, float("inf")

    def end(self, now: float) -> None:
        """It is over; pauses that have begun before still count."""
        self._ended = min(self._ended, now)

    def observe(self, before: float, now: float) -> None:
        """A stream got tokens at these two times, and none between."""
        if now >= self._began and before <= self._ended:
            self.longest_s = max(self.longest_s, now - before)


class OperationMetrics(Collector):
    """Counts each operation once, when it is over, whoever asked for it."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self.gap = GapWindow()
        self._clock = clock
        self._running: str | None = None
        self._last: OperationView | None = None
        self._known: set[str] = set()
        self._has_history = False
        self._operations = Counter(
            "moeray_operations", "Operations by how they ended", ["kind", "outcome"], registry=registry
        )
        self._phases = Histogram(
            "moeray_operation_phase_seconds",
            "How long a phase of an operation took",
            ["kind", "phase"],
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        )
        self._experts = Counter("moeray_moved_experts", "Seats that operations have filled", registry=registry)
        self._bytes = Counter("moeray_moved_bytes", "Bytes read to fill seats", registry=registry)
        self._blocks = Counter(
            "moeray_moved_kv_blocks", "KV blocks copied for requests of leaving workers", registry=registry
        )
        registry.register(self)

    def on_operations(self, views: Iterable[OperationView]) -> None:
        """The whole history. What was over before this front end first asked is not counted here."""
        views = tuple(views)
        if not self._has_history:
            self._has_history = True
            self._known |= {view.operation_id for view in views if view.outcome is not None}
        self._known &= {view.operation_id for view in views}
        for view in views:
            self.on_operation(view)

    def on_operation(self, view: OperationView) -> None:
        """News of one operation."""
        if view.operation_id in self._known:
            return
        if self._running != view.operation_id:
            self._running = view.operation_id
            self.gap.begin(self._clock())
        if view.outcome is not None:
            self._known.add(view.operation_id)
            self._running = None
            self._last = view
            self.gap.end(self._clock())
            self._count(view, view.outcome)

    def _count(self, view: OperationView, outcome: str) -> None:
        self._operations.labels(view.kind, outcome).inc()
        for phase in view.phases:
            if phase.seconds is not None:
                self._phases.labels(view.kind, phase.name).observe(phase.seconds)
        if outcome == "done":
            self._experts.inc(view.moved_experts)
        self._bytes.inc(view.moved_bytes)
        self._blocks.inc(view.kv_blocks)

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("moeray_operation_running", "1 while an operation runs", int(self._running is not None))
        yield GaugeMetricFamily(
            "moeray_operation_client_gap_seconds",
            "Longest pause of any stream that overlaps the operation that runs, or the last one",
            self.gap.longest_s,
        )
        phases = GaugeMetricFamily(
            "moeray_last_operation_phase_seconds", "Phases of the last operation that is over", labels=["phase"]
        )
        for phase in self._last.phases if self._last is not None else ():
            if phase.seconds is not None:
                phases.add_metric([phase.name], phase.seconds)
        yield phases


class EpochMetrics(Collector):
    """What the current epoch has done so far, and how many there were."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_tokens = 0
        self._clock = clock
        self._epoch = -1
        self._num_changes = 0
        self._num_workers = 0
        self._began = clock()
        registry.register(self)

    def on_view(self, view: ClusterView) -> None:
        """A new view; an epoch begins with the first one that shows it while the cluster serves."""
        self._num_workers = sum(member.rank is not None for member in view.members)
        if view.state == "serving" and view.epoch != self._epoch:
            self._num_changes += self._epoch >= 0
            self._epoch, self.num_tokens, self._began = view.epoch, 0, self._clock()

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("moeray_epoch", "Current epoch", self._epoch)
        yield GaugeMetricFamily("moeray_epoch_workers", "Workers in the current epoch's group", self._num_workers)
        yield GaugeMetricFamily("moeray_epoch_seconds", "Age of the current epoch", self._clock() - self._began)
        yield GaugeMetricFamily("moeray_epoch_output_tokens", "Output tokens in the current epoch", self.num_tokens)
        yield CounterMetricFamily("moeray_epoch_changes", "Switches of the epoch that were seen", self._num_changes)
