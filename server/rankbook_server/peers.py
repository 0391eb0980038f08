"""Which process is connected to which engine, as the processes report it.

Kept in memory only, and only for a while: a report is worth nothing once its
process is gone. Bounded by the number of reporters, and of connections in all reports.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rankbook import v1
from rankbook.errors import LimitExceeded, Overloaded, Reason
from rankbook.limits import MAX_PEERS, check_id
from rankbook_server.core.decision import Instant

__all__ = ["FORGET_S", "MAX_CONNECTIONS", "Peers", "drain_outcome"]

FORGET_S = 30.0
"""A report that is not repeated counts for so long, in seconds."""
MAX_CONNECTIONS = 500_000
"""Most connections in all reports together: some 350 MB at the longest names."""


@dataclass(frozen=True, slots=True)
class _Report:
    ends_s: float
    peers: dict[tuple[str, str], int]


class Peers:
    """The latest report of each process. For one event loop."""

    def __init__(self, max_reporters: int, max_connections: int = MAX_CONNECTIONS) -> None:
        """Begins without any.

        Args:
            max_reporters: Most processes whose reports are held.
            max_connections: Most connections in all reports together.
        """
        self._max = max_reporters
        self._max_connections = max_connections
        self._connections = 0
        # Oldest first: a repeat moves its process to the end.
        self._reports: OrderedDict[tuple[str, str], _Report] = OrderedDict()
        self._flying: dict[tuple[str, str, str], int] = {}

    def report(self, request: v1.ReportPeersRequest, namespace: str, now: Instant) -> set[str]:
        """Takes a report in; returns the engines whose transfers in flight changed.

        Raises:
            BadRequest: An id in it is no id.
            LimitExceeded: It names too many peers.
            Overloaded: As many processes, or connections, as the server may
                hold are reported already.
        """
        boot_id = check_id("boot_id", request.boot_id)
        if len(request.peers) > MAX_PEERS:
            raise LimitExceeded(
                f"peers is {len(request.peers)} connections, over the limit of {MAX_PEERS}",
                metadata={"limit": "peers", "value": len(request.peers), "bound": MAX_PEERS},
            )
        peers: dict[tuple[str, str], int] = {}
        for peer in request.peers:
            engine_id = check_id("peers.engine_id", peer.engine_id)
            generation = check_id("peers.generation", peer.generation)
            peers[engine_id, generation] = peer.transfers_in_flight
        changed = self.forget(now)
        key = (namespace, boot_id)
        if key not in self._reports and len(self._reports) >= self._max:
            raise Overloaded(
                f"{self._max} processes report their peers already, the most this server holds: "
                "try again later",
                reason=Reason.TOO_MANY_CALLS,
                metadata={"limit": "reporters", "bound": self._max},
            )
        before = self._reports.get(key)
        held = self._connections - (len(before.peers) if before is not None else 0)
        if peers and held + len(peers) > self._max_connections:
            raise Overloaded(
                f"{held} connections are reported already, and {len(peers)} more would be over "
                f"the {self._max_connections} this server holds: try again later",
                reason=Reason.TOO_MANY_CALLS,
                metadata={"limit": "reported connections", "bound": self._max_connections},
            )
        changed |= self._take_out(key)
        self._reports[key] = _Report(now.mono_s + FORGET_S, peers)
        self._connections += len(peers)
        for (engine_id, generation), count in peers.items():
            if count:
                self._add(namespace, engine_id, generation, count)
                changed.add(engine_id)
        return changed

    def forget(self, now: Instant) -> set[str]:
        """Forgets reports that ran out; returns the engines they had transfers with."""
        changed: set[str] = set()
        while self._reports:
            key, report = next(iter(self._reports.items()))
            if report.ends_s > now.mono_s:
                break
            changed |= self._take_out(key)
        return changed

    def grace(self, now: Instant) -> None:
        """Lets every report count for a full time from now: it could not be repeated
        until now."""
        for key, report in self._reports.items():
            self._reports[key] = _Report(now.mono_s + FORGET_S, report.peers)

    def in_flight(self, namespace: str, engine_id: str, generation: str) -> int:
        """Transfers reported in flight from one start of an engine."""
        return self._flying.get((namespace, engine_id, generation), 0)

    def __len__(self) -> int:
        """Processes whose report counts."""
        return len(self._reports)

    @property
    def connections(self) -> int:
        """Connections in all reports that count."""
        return self._connections

    def _take_out(self, key: tuple[str, str]) -> set[str]:
        report = self._reports.pop(key, None)
        if report is None:
            return set()
        self._connections -= len(report.peers)
        for (engine_id, generation), count in report.peers.items():
            if count:
                self._add(key[0], engine_id, generation, -count)
        return {engine_id for (engine_id, _), count in report.peers.items() if count}

    def _add(self, namespace: str, engine_id: str, generation: str, count: int) -> None:
        key = (namespace, engine_id, generation)
        total = self._flying.get(key, 0) + count
        if total > 0:
            self._flying[key] = total
        else:
            self._flying.pop(key, None)


def drain_outcome(
    engine: v1.Engine, in_flight: int, *, reports_complete: bool, unix_s: float
) -> v1.DrainOutcome.ValueType:
    """Whether an engine is drained, and why.

    Args:
        engine: The engine.
        in_flight: Transfers reported in flight from its current start.
        reports_complete: False while processes that were connected before this
            server started may not have reported yet.
        unix_s: Now, in seconds since 1970.
    """
    if not engine.HasField("drain"):
        return v1.DRAIN_OUTCOME_UNSPECIFIED
    drain = engine.drain
    if engine.state == v1.STATE_GONE or (not in_flight and reports_complete):
        return v1.DRAIN_OUTCOME_IDLE
    if drain.HasField("deadline"):
        deadline_s = drain.deadline.seconds + drain.deadline.nanos / 1e9
        if unix_s >= deadline_s:
            return v1.DRAIN_OUTCOME_DEADLINE
    return v1.DRAIN_OUTCOME_WAITING
