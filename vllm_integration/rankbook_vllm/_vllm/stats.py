"""What rankbook counts, in vLLM's statistics of a connector and so in vLLM's /metrics.

At every step vLLM asks the connectors of all workers and of the engine core for
statistics, adds them up, and sends the sum to an API server as plain data. There
the connector's class says how it is logged and shown. Ours are one more entry in
that data, `ENTRY`, a list of [what, how often].

All of an engine's connectors must give one class, as vLLM adds like to like only:
so what decides here is the class of the connector and never a setting. A parent
of vLLM's own that knows nothing of the entry rebuilds a child's statistics by
vLLM's class; that adds lists up by name and shows the names it knows.

Read against vLLM 0.28 to 0.33.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import prometheus_client

import vllm
from rankbook_vllm._vllm.base import children, logger
from rankbook_vllm._vllm.seams import NIXL, V1, missing_stats_seams

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as _Connector
else:
    _Connector = object

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
except ImportError:  # `stats_mixins` says so
    KVConnectorPromMetrics = KVConnectorStats = object

__all__ = ["ENTRY", "CountedProm", "CountedStats", "StatsMixin", "Tally", "stats_mixins"]

ENTRY = "rankbook"
"""Name of our entry in a connector's statistics."""

_COUNTED = (f"{NIXL}.", f"{V1}.mooncake.mooncake_connector", f"{V1}.multi_connector")
"""Where the connectors are that have something to count, or children that do."""

_HELP: Mapping[str, str] = {
    "rankbook_requests": "Requests that need a peer's KV, by what the book said of them.",
    "rankbook_handshakes": "Handshakes by the book, each worker's own, by what became of them.",
    "rankbook_late_registrations": "Requests for KV that came after its blocks were freed.",
}
"""Counters; Prometheus adds `_total`."""

_SAMPLES: Mapping[str, tuple[str, str]] = {
    **{
        f"requests {outcome}": ("rankbook_requests", outcome)
        for outcome in ("resolved", "waited", "refused", "corrected", "foreign")
    },
    **{
        f"handshakes {outcome}": ("rankbook_handshakes", outcome)
        for outcome in ("shaken", "dropped", "refused")
    },
    "late registrations": ("rankbook_late_registrations", ""),
}
"""What is counted, with its counter and the label that it has there."""


# ------------------------------------------------ in the workers and the engine core


class Tally:
    """What the halves of one connector counted since they were last asked. For one thread."""

    def __init__(self, connector: Any) -> None:
        """Finds the halves; the connector must have been extended."""
        self._requests: list[Any] = []
        self._pairs: list[Any] = []
        self._told: Counter[str] = Counter()
        for part in children(connector):
            for name in ("connector_scheduler", "connector_worker"):
                half: Any = getattr(getattr(part, name, None), "rankbook", None)
                if hasattr(half, "requests"):
                    self._requests.append(half.requests)
                elif hasattr(half, "pairs"):  # a Mooncake worker counts nothing
                    self._pairs.append(half.pairs)

    def take(self) -> Counter[str]:
        """What is new; the next call leaves it out."""
        now: Counter[str] = Counter()
        for requests in self._requests:
            for outcome, count in requests.counts.items():
                now[f"requests {outcome}"] += count
        for pairs in self._pairs:
            for outcome, count in pairs.counted().items():
                late = outcome == "late"
                now["late registrations" if late else f"handshakes {outcome}"] += count
        new, self._told = now - self._told, now
        return new


class CountedStats(KVConnectorStats):  # type: ignore[misc]
    """A connector's statistics with our counts beside them. Pickled."""

    def __init__(self, inner: Any, counts: Mapping[str, int]) -> None:
        """Takes both over.

        Args:
            inner: What vLLM's connector says; None where it says nothing.
            counts: Ours, by name.
        """
        super().__init__({})
        self._inner = inner
        self._counts = Counter(counts)
        self._join()

    def _join(self) -> None:
        # Whoever sends it takes `data`, or in newer releases what `to_dict` makes of it.
        inner = self._inner
        if inner is None:
            theirs: Mapping[str, Any] = {}
        else:
            theirs = inner.to_dict() if hasattr(inner, "to_dict") else inner.data
        self.data = {**theirs, ENTRY: [[what, count] for what, count in self._counts.items()]}

    def aggregate(self, other: Any) -> CountedStats:
        """Adds another's to these, and returns these."""
        if isinstance(other, CountedStats):
            self._counts.update(other._counts)
            other = other._inner
        if self._inner is None:
            self._inner = other
        elif other is not None:
            self._inner = self._inner.aggregate(other)
        self._join()
        return self

    def is_empty(self) -> bool:
        """Whether neither has anything to say."""
        return not self._counts and (self._inner is None or self._inner.is_empty())

    def reduce(self) -> dict[str, Any]:
        """vLLM's line of the log, and ours where something was counted."""
        inner = self._inner
        theirs = {} if inner is None or inner.is_empty() else inner.reduce()
        return {**theirs, **{f"rankbook {what}": count for what, count in self._counts.items()}}

    def reset(self) -> None:
        """Forgets both."""
        if self._inner is not None:
            self._inner.reset()
        self._counts.clear()
        self._join()


# ------------------------------------------------------------------ in the API server


def _split(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """What came from the engine core: vLLM's, and ours as far as it is known here."""
    theirs = {name: value for name, value in data.items() if name != ENTRY}
    ours: Counter[str] = Counter()
    with contextlib.suppress(TypeError, ValueError):  # it ends an API server
        for what, count in data.get(ENTRY) or ():
            if what in _SAMPLES and isinstance(count, int) and count > 0:
                ours[what] += count
    return theirs, dict(ours)


@dataclass(frozen=True)
class _Registered:
    """The counters of one logger: a connector and its children have them in common."""

    owner: Any
    """The logger's label values by engine, which all its connectors are given."""
    collectors: Sequence[Any]
    samples: Mapping[str, Mapping[int, Any]]


_registered: _Registered | None = None


def _samples(
    make: Callable[..., Any], labelnames: Sequence[str], by_engine: Mapping[int, Sequence[object]]
) -> Mapping[str, Mapping[int, Any]]:
    """Our counters, every one of them at 0 for each engine.

    A new logger takes the place of the last one, as among vLLM's own.
    """
    global _registered
    last = _registered
    if last is not None:
        if last.owner is by_engine:
            return last.samples
        for collector in last.collectors:
            with contextlib.suppress(KeyError):  # it is in another registry
                prometheus_client.REGISTRY.unregister(collector)
    labelled = {counter for counter, outcome in _SAMPLES.values() if outcome}
    counters = {
        name: make(
            name=name,
            documentation=text,
            labelnames=[*labelnames, *(["outcome"] if name in labelled else [])],
        )
        for name, text in _HELP.items()
    }
    samples = {
        what: {
            engine: counters[name].labels(*values, *([outcome] if outcome else []))
            for engine, values in by_engine.items()
        }
        for what, (name, outcome) in _SAMPLES.items()
    }
    _registered = _Registered(by_engine, tuple(counters.values()), samples)
    return samples


class CountedProm(KVConnectorPromMetrics):  # type: ignore[misc]
    """A connector's metrics with ours beside them."""

    def __init__(
        self,
        inner: Any,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Registers ours; where that fails, vLLM's are still shown.

        Args:
            inner: vLLM's; None where its connector has none.
            vllm_config: As vLLM gives it, with what follows.
            metric_types: The classes to make metrics of.
            labelnames: What tells engines apart.
            per_engine_labelvalues: Its values for each.
        """
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._inner = inner
        self._samples: Mapping[str, Mapping[int, Any]] = {}
        try:
            make = metric_types[prometheus_client.Counter]
            self._samples = _samples(make, labelnames, per_engine_labelvalues)
        except Exception:  # noqa: BLE001 - an engine is not to be lost for this
            logger.exception("rankbook fallback: counts stay in the log: vLLM takes no counters")

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Shows what was counted meanwhile."""
        theirs, ours = _split(transfer_stats_data)
        if self._inner is not None and theirs:
            self._inner.observe(theirs, engine_idx)
        for what, count in ours.items():
            sample = self._samples.get(what, {}).get(engine_idx)
            if sample is not None:
                sample.inc(count)


# --------------------------------------------------------------------------- the hook


class StatsMixin(_Connector):  # type: ignore[misc]
    """Goes before a connector that is counted: vLLM's hook for statistics, on all its sides.

    Neither a step of an engine nor an API server ends by what is wrong here.
    """

    _rankbook_tally: Tally | None = None
    """None where nothing is counted: another connector signs in, or handshakes are vLLM's."""

    def get_kv_connector_stats(self) -> Any:
        """vLLM's statistics with our counts, or None without either. Never raises for ours."""
        stats = super().get_kv_connector_stats()
        counts: Mapping[str, int] = {}
        try:
            if self._rankbook_tally is not None:
                counts = self._rankbook_tally.take()
            if counts and stats is None:
                # Empty and not absent: whoever rebuilds it looks for every name of vLLM's.
                stats = super().build_kv_connector_stats()
        except Exception:  # noqa: BLE001 - a step loop that raises ends the worker
            self._rankbook_tally, counts = None, {}
            logger.exception("rankbook fallback: counts stay in the log: they cannot be taken")
        return CountedStats(stats, counts) if counts or stats is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """What was sent, as it was; without data, what there is at first."""
        if data is None:
            return super().build_kv_connector_stats()
        theirs, ours = _split(data)
        return CountedStats(super().build_kv_connector_stats(theirs) if theirs else None, ours)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """vLLM's metrics with ours."""
        arguments = (vllm_config, metric_types, labelnames, per_engine_labelvalues)
        return CountedProm(super().build_prom_metrics(*arguments), *arguments)


def stats_mixins(base: type[Any]) -> tuple[type[Any], ...]:
    """What goes before a connector class so that its counts are shown; nothing where it has
    none, or where this vLLM has other statistics."""
    counted = any(cls.__module__.startswith(_COUNTED) for cls in base.__mro__)
    return (StatsMixin,) if counted and _is_possible() else ()


@functools.cache
def _is_possible() -> bool:
    missing = missing_stats_seams()
    if missing:
        logger.info(
            "rankbook fallback: counts stay in the log, /metrics has none: vLLM %s %s",
            vllm.__version__,
            "; ".join(missing),
        )
    return not missing
