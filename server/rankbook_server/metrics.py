"""What the server counts, for Prometheus. Labels are bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rankbook import v1
from rankbook_server.registry import Registry

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MAX_NAMESPACES = 32
_OTHER = "(others)"
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0)


class Metrics:
    """The server's own metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._calls = Counter(
            "rankbook_calls",
            "Calls answered, by method and reason (OK for those that succeeded).",
            ("method", "reason"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "rankbook_call_seconds",
            "Time from a call's arrival to its answer; waits and watches are left out.",
            ("method",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._call_of: dict[tuple[str, str], Counter] = {}
        self._seconds_of: dict[str, Histogram] = {}

    def answered(self, method: str, reason: str, seconds: float | None = None) -> None:
        """Counts an answered call.

        Args:
            method: Name of a call of the contract.
            reason: "OK" or a `Reason`.
            seconds: How long it took; None for one that waited by request.
        """
        key = (method, reason)
        counter = self._call_of.get(key)
        if counter is None:
            counter = self._call_of[key] = self._calls.labels(method, reason)
        counter.inc()
        if seconds is not None:
            histogram = self._seconds_of.get(method)
            if histogram is None:
                histogram = self._seconds_of[method] = self._seconds.labels(method)
            histogram.observe(seconds)

    def observe(
        self, registry: Registry, watchers: Callable[[], int], sessions: Callable[[], int]
    ) -> None:
        """Has the gauges read from the running server."""
        self._registry.register(_Gauges(registry, watchers, sessions))

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    def __init__(
        self, registry: Registry, watchers: Callable[[], int], sessions: Callable[[], int]
    ) -> None:
        self._registry = registry
        self._watchers = watchers
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        """Reads every gauge."""
        registry = self._registry
        engines = GaugeMetricFamily(
            "rankbook_engines", "Engines by namespace and state.", labels=("namespace", "state")
        )
        workers = GaugeMetricFamily(
            "rankbook_workers", "Workers in the book, by namespace.", labels=("namespace",)
        )
        counts: dict[tuple[str, str], int] = {}
        present: dict[str, int] = {}
        for index, namespace in enumerate(registry.namespaces()):
            # Anyone may write to a new namespace; a label must not grow with that.
            label = namespace if index < _MAX_NAMESPACES else _OTHER
            book = registry.book(namespace)
            present[label] = present.get(label, 0) + book.worker_count
            for engine_id in book.engine_ids():
                state = v1.State.Name(book.state(engine_id)).removeprefix("STATE_")
                counts[label, state] = counts.get((label, state), 0) + 1
        for (label, state), count in sorted(counts.items()):
            engines.add_metric((label, state), count)
        for label, count in sorted(present.items()):
            workers.add_metric((label,), count)
        yield engines
        yield workers
        for name, words, value in (
            ("rankbook_leases", "Leases alive.", registry.leases_alive),
            ("rankbook_watchers", "Watches open.", self._watchers()),
            ("rankbook_sessions", "Sessions open.", self._sessions()),
            ("rankbook_revision", "Revision of the book.", registry.revision),
            ("rankbook_store_available", "1 while writes can be taken.", int(registry.available)),
        ):
            yield GaugeMetricFamily(name, words, value=value)
