"""Prometheus metrics of one front end, in a registry of its own."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moeray.api.fault_metrics import FaultMetrics
from moeray.api.ledger import RequestEntry, SequenceEntry
from moeray.api.operation_metrics import EpochMetrics, OperationMetrics
from moeray.api.worker_counters import COUNTERS, GAUGES
from moeray.elastic.view import ClusterView
from moeray.worker.messages import TokenOutput

if TYPE_CHECKING:
    from moeray.api.front_end import FrontEnd

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
ADDED_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """What is counted as it happens; gauges are read from the front end when asked for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.operations = OperationMetrics(self.registry)
        self.faults = FaultMetrics(self.registry)
        self._epoch = EpochMetrics(self.registry)
        self._resubmitted = Counter(
            "moeray_resubmitted_sequences",
            "Sequences that went on at another worker, by why",
            ["reason"],
            registry=self.registry,
        )
        self._requests = Counter("moeray_requests", "Requests by how they ended", ["outcome"], registry=self.registry)
        self._prompt_tokens = Counter("moeray_prompt_tokens", "Prompt tokens", registry=self.registry)
        self._output_tokens = Counter("moeray_output_tokens", "Output tokens", registry=self.registry)
        self._ttft = Histogram(
            "moeray_time_to_first_token_seconds",
            "From a request's arrival to its first token, at the front end",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self._worker_ttft = Histogram(
            "moeray_worker_time_to_first_token_seconds",
            "From a sequence's arrival at its worker to its first token, at the worker",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self._itl = Histogram(
            "moeray_inter_token_seconds",
            "Between two tokens of a sequence, at the front end",
            buckets=ITL_BUCKETS_S,
            registry=self.registry,
        )
        self._added = Histogram(
            "moeray_front_end_added_seconds",
            "What the front end adds to a worker's time to first token, queueing included",
            buckets=ADDED_BUCKETS_S,
            registry=self.registry,
        )

    def on_token(self, sequence: SequenceEntry, output: TokenOutput, now: float) -> None:
        """A token was accepted at `now` (monotonic clock)."""
        self._output_tokens.inc()
        self._epoch.num_tokens += 1
        if sequence.last_token_s is not None:
            self._itl.observe(now - sequence.last_token_s)
            self.operations.gap.observe(sequence.last_token_s, now)
        else:
            self._ttft.observe(now - sequence.request.arrived_s)
            if output.worker_ttft_s is not None:
                self._worker_ttft.observe(output.worker_ttft_s)
            if sequence.request.worker_ttft_s is None:
                sequence.request.worker_ttft_s = output.worker_ttft_s
        sequence.last_token_s = now

    def on_first_write(self, request: RequestEntry, now: float) -> None:
        """The first token of a stream was handed to the client's socket."""
        if request.worker_ttft_s is not None:
            self._added.observe(max(0.0, now - request.arrived_s - request.worker_ttft_s))

    def on_finished(self, request: RequestEntry) -> None:
        """A request has ended, whichever way."""
        self._prompt_tokens.inc(request.usage().prompt_tokens)
        self._requests.labels(_outcome(request)).inc()

    def on_resubmitted(self, count: int, reason: str) -> None:
        """Sequences go on elsewhere: "handed_over", worker "lost", "lost_tokens", or "no_room" where they were sent."""
        self._resubmitted.labels(reason).inc(count)

    def on_view(self, view: ClusterView) -> None:
        """The controller has told of a change."""
        self._epoch.on_view(view)

    def on_refused(self, status: int) -> None:
        """A request was answered with an error before it was taken."""
        self._requests.labels(f"refused_{status}").inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


def _outcome(request: RequestEntry) -> str:
    if request.is_cancelled:
        return "disconnected"
    if request.error is not None:
        return request.error.code or "error"
    reasons = {sequence.finish_reason for sequence in request.sequences}
    return "length" if "length" in reasons else "stop"


class FrontEndCollector(Collector):
    """Gauges of the front end and, by slot, what each worker said last."""

    def __init__(self, front_end: "FrontEnd") -> None:
        self._front_end = front_end

    def collect(self) -> Iterable[Metric]:
        front_end = self._front_end
        ledger = front_end.ledger
        yield GaugeMetricFamily("moeray_requests_open", "Requests being answered", len(ledger.requests))
        yield GaugeMetricFamily("moeray_queue_sequences", "Sequences without a worker", len(ledger.queue))
        yield CounterMetricFamily(
            "moeray_dropped_tokens",
            "Tokens that were not the expected next one",
            ledger.num_dropped_tokens,
        )
        yield from self._by_slot()

    def _by_slot(self) -> Iterable[Metric]:
        router, counters = self._front_end.router, self._front_end.counters
        sequences = GaugeMetricFamily("moeray_slot_sequences", "Sequences given to a worker", labels=["slot"])
        tokens = GaugeMetricFamily(
            "moeray_slot_outstanding_tokens", "Tokens that a worker still has to do, at most", labels=["slot"]
        )
        for member in router.members:
            load = router.load(member)
            sequences.add_metric([str(member[0])], load.num_sequences)
            tokens.add_metric([str(member[0])], load.outstanding_tokens)
        yield sequences
        yield tokens
        yield from _families(GaugeMetricFamily, GAUGES, counters.gauges())
        yield from _families(CounterMetricFamily, COUNTERS, counters.totals())


def _families(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    names: Iterable[str],
    by_slot: Iterable[tuple[int, Mapping[str, float]]],
) -> Iterable[Metric]:
    """One metric per name with one value per slot."""
    rows = list(by_slot)
    for name in names:
        metric = family(f"moeray_worker_{name}", f"The worker's own {name}", labels=["slot"])
        for slot, values in rows:
            metric.add_metric([str(slot)], values[name])
        yield metric
