"""Leases: granting, renewing, and the words that replies say of them."""

from __future__ import annotations

from dataclasses import dataclass

from rankbook import v1
from rankbook.convert import duration, seconds
from rankbook.errors import BadRequest, LimitExceeded, NotFound, Overloaded, Reason, Refused
from rankbook.limits import DEFAULT_TTL_S, MAX_RENEWALS, MAX_TTL_S, MIN_TTL_S, check_id
from rankbook_server.core.decision import Instant
from rankbook_server.core.fold import BookFold, LeaseEntry
from rankbook_server.core.ops import MAX_TXN_OPS, UPKEEP_BYTES, Op

__all__ = [
    "Granted",
    "extend",
    "grant",
    "granted_ttl_s",
    "kept_lease",
    "lease_message",
    "live_lease",
    "ran_out",
    "renew",
    "taken_for_dead",
    "ttl_ops",
]

_MAX_USES = 256
"""Most starts that one lease keeps records of."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease a write is under, what must be written for it, and how replies
    show it."""

    lease_id: str
    ops: tuple[Op, ...]
    message: v1.Lease
    expired: tuple[str, ...] = ()
    """Leases that the write takes for dead."""


def granted_ttl_s(wish_s: float) -> float:
    """What a wish for a time to live is granted: zero is the default, anything
    else the nearest bound.

    Raises:
        BadRequest: It is negative.
    """
    if wish_s < 0:
        raise BadRequest(
            f"ttl is {wish_s:g} s: a time to live is {MIN_TTL_S:g} s to {MAX_TTL_S:g} s, and zero "
            f"means {DEFAULT_TTL_S:g} s",
            metadata={"field": "ttl", "value": wish_s, "rule": f"{MIN_TTL_S:g} to {MAX_TTL_S:g}"},
        )
    if wish_s == 0:
        return DEFAULT_TTL_S
    return round(min(max(wish_s, MIN_TTL_S), MAX_TTL_S), 3)


def live_lease(book: BookFold, lease_id: str, now: Instant) -> LeaseEntry:
    """A lease that has not ended.

    Raises:
        NotFound: The book never granted it, or forgot it.
        Refused: It has ended.
    """
    entry = book.leases.get(lease_id)
    if entry is not None and entry.lives(now.mono_s):
        return entry
    if entry is not None or lease_id in book.ended:
        raise Refused(
            f"lease {lease_id} has ended: register again under a higher sequence",
            reason=Reason.LEASE_ENDED,
            metadata={"lease_id": lease_id},
        )
    raise NotFound(
        f"lease {lease_id} was never granted in namespace {book.namespace}",
        reason=Reason.LEASE_NOT_FOUND,
        metadata={"lease_id": lease_id, "namespace": book.namespace},
    )


def grant(
    book: BookFold, wish: v1.LeaseRequest, engine_id: str, epoch: int, now: Instant
) -> Granted:
    """The lease of a write, granted or found. A found one is renewed: whoever
    writes under it lives, and is told its full time.

    Raises:
        BadRequest: Neither key nor id, or a malformed one, or a negative ttl.
        NotFound: No such lease.
        Refused: The lease has ended.
        LimitExceeded: The lease keeps records of too many starts.
        Overloaded: Too many leases.
    """
    ttl_s = granted_ttl_s(seconds(wish.ttl))
    use = v1.StoredUse(engine_id=engine_id, epoch=epoch)
    ops: list[Op] = []
    expired: tuple[str, ...] = ()
    if wish.lease_id:
        entry: LeaseEntry | None = live_lease(book, check_id("lease_id", wish.lease_id), now)
    else:
        check_id("lease.lease_key", wish.lease_key)
        entry = book.leases.get(book.lease_of_key.get(wish.lease_key, ""))
        if entry is not None and not entry.lives(now.mono_s):
            # Its end is due; from now on the key means the new lease.
            ops.append(book.lease_put(entry.lease_id, _changed(entry, ended=True)))
            expired = (entry.lease_id,)
            entry = None
    if entry is not None:
        extend(book, entry, now)
        if use not in entry.stored.uses:
            stored = _changed(entry)
            # An older start of the same engine says nothing more about this lease.
            kept = [u for u in stored.uses if u.engine_id != engine_id]
            if len(kept) >= _MAX_USES:
                kept = [u for u in kept if _replaced(book, u) is None]
            if len(kept) >= _MAX_USES:
                raise LimitExceeded(
                    f"lease {entry.lease_id} keeps records of {len(kept)} engines, over the limit "
                    f"of {_MAX_USES} engines: take another lease",
                    metadata={"limit": "lease", "value": len(kept) + 1, "bound": _MAX_USES},
                )
            del stored.uses[:]
            stored.uses.extend([*kept, use])
            ops.append(book.lease_put(entry.lease_id, stored))
        return Granted(entry.lease_id, tuple(ops), lease_message(entry.lease_id, entry.ttl_s))
    if len(book.leases) >= book.limits.max_leases:
        raise Overloaded(
            f"namespace {book.namespace} holds {len(book.leases)} leases, its bound: try later",
            reason=Reason.TOO_MANY_LEASES,
            metadata={"limit": "leases", "bound": book.limits.max_leases},
        )
    stored = v1.StoredLease(
        version=1, lease_key=wish.lease_key, ttl_millis=round(ttl_s * 1000), uses=[use]
    )
    lease_id = book.new_id()
    ops.append(book.lease_put(lease_id, stored))
    return Granted(lease_id, tuple(ops), lease_message(lease_id, ttl_s), expired)


def kept_lease(book: BookFold, lease_id: str, now: Instant) -> v1.Lease:
    """The lease of a record that stands, as replies show it; renewed.

    Raises:
        Refused: It has ended, and the record goes with it.
    """
    entry = live_lease(book, lease_id, now)
    extend(book, entry, now)
    return lease_message(lease_id, entry.ttl_s)


def taken_for_dead(book: BookFold, lease_id: str) -> tuple[str, ...]:
    """The lease of a dead holder, for a decision that takes its place; none where
    it has ended already."""
    entry = book.leases.get(lease_id)
    return (lease_id,) if entry is not None and not entry.stored.ended else ()


def extend(book: BookFold, entry: LeaseEntry, now: Instant) -> None:
    """Moves a living lease's deadline; memory only."""
    entry.deadline = now.mono_s + entry.ttl_s
    entry.heard_s = now.mono_s
    book.schedule(entry)


def ttl_ops(book: BookFold) -> list[Op]:
    """Writes down times to live that renewals have changed, as many as fit."""
    ops: list[Op] = []
    size = 0
    for lease_id in sorted(book.unsaved)[:MAX_TXN_OPS]:
        put = book.lease_put(lease_id, _changed(book.leases[lease_id]))
        size += len(put.value)
        if ops and size > UPKEEP_BYTES:
            break
        ops.append(put)
    return ops


def _changed(entry: LeaseEntry, *, ended: bool = False) -> v1.StoredLease:
    """The lease as it is to be written: with the time to live it has now."""
    stored = v1.StoredLease()
    stored.CopyFrom(entry.stored)
    stored.ttl_millis = round(entry.ttl_s * 1000)
    stored.ended = stored.ended or ended
    return stored


def ran_out(book: BookFold, lease_id: str) -> bool:
    """Whether a lease that has ended did so without its holder's word."""
    entry = book.leases.get(lease_id)
    return entry is None or not entry.stored.revoked


def lease_message(lease_id: str, ttl_s: float) -> v1.Lease:
    """A lease as replies show it."""
    return v1.Lease(lease_id=lease_id, ttl=duration(ttl_s), renew_interval=duration(ttl_s / 3))


def renew(
    book: BookFold, request: v1.RenewLeasesRequest, now: Instant
) -> tuple[v1.LeaseStatus, ...]:
    """Moves deadlines; a dead or fenced lease says so."""
    if not request.leases:
        raise BadRequest(
            "leases is empty: a renewal names 1 to 1024 leases",
            metadata={"field": "leases", "value": 0, "rule": "1 to 1024"},
        )
    if len(request.leases) > MAX_RENEWALS:
        raise LimitExceeded(
            f"leases is {len(request.leases)} leases, over the limit of {MAX_RENEWALS} leases",
            metadata={"limit": "leases", "value": len(request.leases), "bound": MAX_RENEWALS},
        )
    for renewal in request.leases:
        check_id("lease_id", renewal.lease_id)
        granted_ttl_s(seconds(renewal.ttl))
    return tuple(_renewed(book, renewal, now) for renewal in request.leases)


def _renewed(book: BookFold, renewal: v1.LeaseRenewal, now: Instant) -> v1.LeaseStatus:
    lease_id = renewal.lease_id
    entry = book.leases.get(lease_id)
    if entry is None:
        known = lease_id in book.ended
        state = v1.LEASE_STATE_ENDED if known else v1.LEASE_STATE_UNKNOWN
        return v1.LeaseStatus(lease_id=lease_id, state=state)
    if not entry.lives(now.mono_s):
        return v1.LeaseStatus(lease_id=lease_id, state=v1.LEASE_STATE_ENDED)
    replaced = _fenced_by(book, entry.stored)
    if replaced is not None:
        return v1.LeaseStatus(lease_id=lease_id, state=v1.LEASE_STATE_FENCED, replaced_by=replaced)
    wish_s = seconds(renewal.ttl)
    if wish_s and granted_ttl_s(wish_s) != entry.ttl_s:
        # Kept with the next maintenance, or a restart would bring the old one back.
        entry.ttl_s = granted_ttl_s(wish_s)
        book.unsaved.add(lease_id)
    extend(book, entry, now)
    return v1.LeaseStatus(lease_id=lease_id, state=v1.LEASE_STATE_ALIVE, ttl=duration(entry.ttl_s))


def _fenced_by(book: BookFold, stored: v1.StoredLease) -> v1.Successor | None:
    """What replaced the last start this lease keeps, when all are replaced."""
    replaced = None
    for use in stored.uses:
        replaced = _replaced(book, use)
        if replaced is None:
            return None
    return replaced


def _replaced(book: BookFold, use: v1.StoredUse) -> v1.Successor | None:
    """What replaced a start; None while it is current."""
    engine = book.engines.get(use.engine_id)
    if engine is None:
        return v1.Successor(engine_id=use.engine_id, epoch=book.facts.epoch_floor)
    head = engine.head
    if head.epoch < use.epoch or (head.epoch == use.epoch and not head.evicted):
        return None
    return v1.Successor(
        engine_id=use.engine_id,
        epoch=head.epoch,
        generation="" if head.evicted else head.generation,
    )
