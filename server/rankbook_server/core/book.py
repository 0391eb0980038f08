"""The book of one namespace, with every decision.

The decisions themselves are in `writes` (records in), `leaving` (records out),
`leases`, `sealing`, `lifecycle` (starts, drains, evictions) and `sweeping`. Each
raises a `RankbookError` and then changes nothing that is kept, or returns a
`Decision`.
"""

from __future__ import annotations

from rankbook import v1
from rankbook_server.core import leases, leaving, lifecycle, sealing, sweeping, writes
from rankbook_server.core.decision import Decision, Instant, Note
from rankbook_server.core.fold import BookFold, BookLimits, LeaseEntry

__all__ = ["Book", "BookLimits", "Decision", "Instant", "LeaseEntry", "Note"]


class Book(BookFold):
    """One namespace of a book. Not thread-safe: one writer owns it.

    A decision notes the time it is given, so that a lease it grants gets its
    deadline when the grant is folded in, and moves the deadline of a living lease
    that a write comes under; it changes nothing else.
    """

    def begin_generation(
        self, request: v1.BeginGenerationRequest, now: Instant
    ) -> Decision[v1.BeginGenerationResponse]:
        """Reserves the epoch of a start."""
        self.clock_s = now.mono_s
        return lifecycle.begin(self, request, now)

    def register(
        self, request: v1.RegisterWorkersRequest, now: Instant
    ) -> Decision[v1.RegisterWorkersResponse]:
        """Signs workers in."""
        self.clock_s = now.mono_s
        return writes.register(self, request, now)

    def update(
        self, request: v1.UpdateWorkerRequest, now: Instant
    ) -> Decision[v1.UpdateWorkerResponse]:
        """Changes a record or withdraws its payload."""
        self.clock_s = now.mono_s
        return writes.update(self, request, now)

    def deregister(
        self, request: v1.DeregisterRequest, now: Instant
    ) -> Decision[v1.DeregisterResponse]:
        """Takes a holder's records out."""
        self.clock_s = now.mono_s
        return leaving.deregister(self, request, now)

    def revoke_lease(
        self, request: v1.RevokeLeaseRequest, now: Instant
    ) -> Decision[v1.RevokeLeaseResponse]:
        """Ends a lease with the records under it (the first 100 of them; the
        rest goes by `expire`)."""
        self.clock_s = now.mono_s
        return leaving.revoke(self, request, now)

    def seal(self, request: v1.SealEngineRequest, now: Instant) -> Decision[v1.SealEngineResponse]:
        """Seals an engine."""
        self.clock_s = now.mono_s
        return sealing.seal(self, request, now)

    def drain(
        self, request: v1.DrainEngineRequest, now: Instant
    ) -> Decision[v1.DrainEngineResponse]:
        """Sets or clears the drain flag."""
        self.clock_s = now.mono_s
        return lifecycle.drain(self, request, now)

    def evict(
        self, request: v1.EvictEngineRequest, now: Instant
    ) -> Decision[v1.EvictEngineResponse]:
        """Takes an engine out and fences its generation."""
        self.clock_s = now.mono_s
        return lifecycle.evict(self, request, now)

    def renew(self, request: v1.RenewLeasesRequest, now: Instant) -> tuple[v1.LeaseStatus, ...]:
        """Moves deadlines; memory only."""
        self.clock_s = now.mono_s
        return leases.renew(self, request, now)

    def expire(self, now: Instant) -> Decision[None] | None:
        """The next piece of what ran out; None when nothing is left."""
        self.clock_s = now.mono_s
        return leaving.expire(self, now)

    def sweep(self, now: Instant) -> Decision[None] | None:
        """The next piece of what may be forgotten; None when nothing is left."""
        self.clock_s = now.mono_s
        return sweeping.sweep(self, now)
