"""What the client's calls return beside the types of `rankbook.model`.

All are immutable and safe to share between threads.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankbook.model import ClockPair, DrainOutcome, Engine, LeaseStatus, State, Successor

if TYPE_CHECKING:
    from rankbook import v1

__all__ = [
    "ClockOffset",
    "Drained",
    "EngineList",
    "Evicted",
    "PlanReply",
    "RenewReply",
    "StalePeer",
    "Updated",
]


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far the registry's clock is from this process's performance counter."""

    offset_s: float
    """Registry's seconds since 1970 minus `time.perf_counter()`, in seconds."""
    error_s: float
    """Largest error of the offset: half the round trip it was measured with."""
    measured_s: float
    """Reading of `time.perf_counter()` at which it was measured."""

    def registry_unix_s(self, perf_s: float) -> float:
        """The registry's seconds since 1970 at a reading of `time.perf_counter()`."""
        return perf_s + self.offset_s

    def pair(self, perf_s: float) -> ClockPair:
        """The clock pair that an engine core publishes, for one reading of its counter."""
        instant = dt.datetime.fromtimestamp(self.registry_unix_s(perf_s), dt.UTC)
        return ClockPair(local_s=perf_s, registry_time=instant, error_s=self.error_s)


@dataclass(frozen=True, slots=True)
class RenewReply:
    """What became of the leases, and what the registry said of itself."""

    statuses: tuple[LeaseStatus, ...]
    """In the order of the request."""
    boot_id: str
    """One life of the server. Another one: it restarted, records are kept."""
    book_id: str
    """The book. Another one: nothing published is in it, register again."""
    book_revision: int
    """The book's revision."""
    server_time: dt.datetime | None
    """The registry's clock when it answered."""
    clock: ClockOffset | None
    """The registry's clock against this process's, by this very call."""


@dataclass(frozen=True, slots=True)
class Updated:
    """What a change of a record got."""

    epoch: int
    """Epoch of the generation."""
    revision: int
    """Revision of the change, or of the first one for a repeat."""
    record_digest: bytes
    """SHA-256 of the record now in the book."""


@dataclass(frozen=True, slots=True)
class Drained:
    """How far a drain is."""

    state: State
    """State of the engine."""
    revision: int
    """Revision of the engine."""
    outcome: DrainOutcome
    """Whether the engine is drained, and why."""
    transfers_in_flight: int
    """Transfers that consumers report in flight from this engine."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """What an eviction took out."""

    removed: int
    """Records taken out; zero for a repeat."""
    revision: int
    """Revision of the engine."""


@dataclass(frozen=True, slots=True)
class StalePeer:
    """A reported connection whose generation is no longer current."""

    engine_id: str
    """The engine as reported."""
    generation: str
    """The generation as reported."""
    successor: Successor | None = None
    """What replaced it, if known."""


@dataclass(frozen=True, slots=True)
class EngineList:
    """Engines without their workers, by engine_id."""

    engines: tuple[Engine, ...]
    """The engines."""
    book_revision: int
    """Revision of the book at the first page."""
    book_id: str
    """The book."""
    stale_s: float = 0.0
    """How long the server had been cut off from its store, in seconds."""


@dataclass(frozen=True, slots=True)
class PlanReply:
    """A plan and what it was made from."""

    plan: v1.Plan
    """The plan; `rankbook.convert.to_json` gives its stable JSON form."""
    mode: str
    """"PULL" or "PUSH"."""
    producer_revision: int
    """Revision of the producer it was made from."""
    consumer_revision: int
    """Revision of the consumer; zero for sizes only."""
