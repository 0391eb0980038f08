"""Which start a write belongs to, and under which lease: the checks that every
write passes first (rules 2, 3, 5 and 6 of DESIGN section 3)."""

from __future__ import annotations

from dataclasses import dataclass

from rankbook import v1
from rankbook.convert import seconds
from rankbook.errors import (
    BadRequest,
    Conflict,
    Fenced,
    NotFound,
    Overloaded,
    Reason,
    Refused,
)
from rankbook.limits import DEFAULT_TTL_S, MAX_TTL_S, MIN_TTL_S, check_id
from rankbook_server.core.decision import Instant
from rankbook_server.core.engine import EngineState, slot_text
from rankbook_server.core.fold import BookFold, LeaseEntry
from rankbook_server.core.keys import SlotKey

__all__ = [
    "Granted",
    "admit",
    "check_sequence",
    "current_engine",
    "grant",
    "granted_ttl_s",
    "lease_message",
    "next_epoch",
    "refuse_stale",
    "slot_held",
]


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease a write is under, and what must be written for it."""

    lease_id: str
    stored: v1.StoredLease
    write: bool


def check_sequence(sequence: int) -> None:
    """Refuses a write without a number.

    Raises:
        BadRequest: `sequence` is zero.
    """
    if sequence < 1:
        raise BadRequest(
            f"sequence is {sequence}: every write carries its holder's rising number, 1 or above",
            metadata={"field": "sequence", "value": sequence, "rule": "1 or above"},
        )


def next_epoch(book: BookFold, engine: EngineState | None) -> int:
    """The epoch the next start of an engine gets."""
    last = engine.head.last_epoch if engine is not None else 0
    return max(last, book.facts.epoch_floor) + 1


def _fenced(engine: EngineState, generation: str, epoch: int, reason: Reason) -> Fenced:
    head = engine.head
    told = f" (epoch {epoch})" if epoch else ""
    if reason is Reason.EVICTED:
        message = (
            f"generation {generation}{told} of {engine.engine_id} was evicted: "
            "stop, and start the engine anew under another generation"
        )
    else:
        message = (
            f"generation {generation}{told} of {engine.engine_id} was replaced by "
            f"{head.generation or 'a newer start'} (epoch {head.epoch}): stop publishing"
        )
    return Fenced(
        message,
        reason=reason,
        metadata={
            "engine_id": engine.engine_id,
            "generation": generation,
            "epoch": epoch,
            "current_generation": head.generation,
            "current_epoch": head.epoch,
        },
    )


def admit(
    book: BookFold, engine: EngineState | None, engine_id: str, generation: str, told: int
) -> int:
    """The epoch of a write that may begin a start.

    Returns:
        The epoch; above `engine.head.epoch` when this write is the first of a
        newer start.

    Raises:
        Fenced: The generation is below the current epoch or was evicted, or
            `told` is not the generation's epoch.
    """
    known = 0
    if engine is not None:
        known = next((s.epoch for s in engine.head.starts if s.generation == generation), 0)
    if engine is None or not known:
        if told:
            # The token was forgotten, so this start is long over: its epoch says so.
            current = engine.head.epoch if engine is not None else book.facts.epoch_floor
            raise Fenced(
                f"generation {generation} of {engine_id} was told epoch {told} and the book no "
                f"longer knows it (current epoch {current}): stop, or register anew without an "
                "epoch if this is another book",
                reason=Reason.EPOCH_FENCED,
                metadata={
                    "engine_id": engine_id,
                    "generation": generation,
                    "epoch": told,
                    "current_generation": engine.head.generation if engine else "",
                    "current_epoch": current,
                },
            )
        return next_epoch(book, engine)
    if known < engine.head.epoch:
        raise _fenced(engine, generation, known, Reason.GENERATION_FENCED)
    if told and told != known:
        raise _fenced(engine, generation, told, Reason.EPOCH_FENCED)
    if known == engine.head.epoch and engine.head.evicted:
        raise _fenced(engine, generation, known, Reason.EVICTED)
    return known


def current_engine(book: BookFold, engine_id: str, generation: str, told: int) -> EngineState:
    """The engine of a write that needs a start with workers.

    Raises:
        BadRequest: An id is malformed.
        NotFound: The engine is unknown, or this start has no worker yet.
        Fenced: The generation is not the current one.
    """
    check_id("engine_id", engine_id)
    check_id("generation", generation)
    engine = book.engines.get(engine_id)
    if engine is None or not engine.visible:
        raise NotFound(
            f"engine {engine_id} is not in namespace {book.namespace}",
            metadata={"engine_id": engine_id, "namespace": book.namespace},
        )
    epoch = admit(book, engine, engine_id, generation, told)
    if epoch != engine.head.epoch:
        raise NotFound(
            f"generation {generation} of {engine_id} has no worker in the book yet "
            f"(current is {engine.head.generation}, epoch {engine.head.epoch})",
            reason=Reason.WORKER_NOT_FOUND,
            metadata={"engine_id": engine_id, "generation": generation},
        )
    return engine


def refuse_stale(
    boot_id: str, sequence: int, last: int, slot: SlotKey | None, *, closed: bool
) -> Refused:
    """The error for a write that comes too late."""
    where = f" for {slot_text(slot)}" if slot is not None else ""
    why = "the records were taken out after it" if closed else "a later write was taken"
    return Refused(
        f"sequence {sequence} of {boot_id}{where} is not above {last}: {why}; a returning holder "
        "writes under a higher sequence",
        metadata={"boot_id": boot_id, "sequence": sequence, "last_sequence": last},
    )


def slot_held(
    book: BookFold,
    engine: EngineState,
    what: str,
    holder: str,
    lease_id: str,
    boot_id: str,
    now: Instant,
) -> Conflict | None:
    """The error for a slot whose other holder lives; None when it is dead."""
    entry = book.leases.get(lease_id)
    if entry is None or entry.deadline <= now.mono_s:
        return None
    left = entry.deadline - now.mono_s
    return Conflict(
        f"{what} of {engine.engine_id} is held by {holder} and claimed by {boot_id}: one holder a "
        f"slot; the holder's lease runs {left:.1f} s more unless renewed",
        metadata={
            "engine_id": engine.engine_id,
            "slot": what,
            "holder": holder,
            "claimant": boot_id,
            "lease_id": lease_id,
            "remaining_s": f"{left:.3f}",
        },
    )


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
    return min(max(wish_s, MIN_TTL_S), MAX_TTL_S)


def live_lease(book: BookFold, lease_id: str, now: Instant) -> LeaseEntry:
    """A lease that has not ended.

    Raises:
        NotFound: The book never granted it, or forgot it.
        Refused: It has ended.
    """
    entry = book.leases.get(lease_id)
    if entry is not None and entry.deadline > now.mono_s:
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
    """The lease of a write, granted or found.

    Raises:
        BadRequest: Neither key nor id, or a malformed one, or a negative ttl.
        NotFound: No such lease.
        Refused: The lease has ended.
        Overloaded: Too many leases.
    """
    ttl_s = granted_ttl_s(seconds(wish.ttl))
    use = v1.StoredUse(engine_id=engine_id, epoch=epoch)
    if wish.lease_id:
        entry: LeaseEntry | None = live_lease(book, check_id("lease_id", wish.lease_id), now)
    else:
        check_id("lease.lease_key", wish.lease_key)
        entry = book.leases.get(book.lease_of_key.get(wish.lease_key, ""))
        if entry is not None and entry.deadline <= now.mono_s:
            entry = None
    if entry is not None:
        if use in entry.stored.uses:
            return Granted(entry.lease_id, entry.stored, False)
        stored = v1.StoredLease()
        stored.CopyFrom(entry.stored)
        # An older start of the same engine says nothing more about this lease.
        kept = [u for u in stored.uses if u.engine_id != engine_id]
        del stored.uses[:]
        stored.uses.extend([*kept[-63:], use])
        return Granted(entry.lease_id, stored, True)
    if len(book.leases) >= book.limits.max_leases:
        raise Overloaded(
            f"namespace {book.namespace} holds {len(book.leases)} leases, its bound: try later",
            reason=Reason.TOO_MANY_LEASES,
            metadata={"limit": "leases", "bound": book.limits.max_leases},
        )
    stored = v1.StoredLease(
        version=1, lease_key=wish.lease_key, ttl_millis=round(ttl_s * 1000), uses=[use]
    )
    return Granted(book.new_id(), stored, True)


def lease_message(book: BookFold, lease_id: str, stored: v1.StoredLease | None = None) -> v1.Lease:
    """A lease as replies show it."""
    entry = book.leases.get(lease_id)
    ttl_s = entry.ttl_s if entry is not None else (stored.ttl_millis / 1000 if stored else 0.0)
    lease = v1.Lease(lease_id=lease_id)
    nanos = round(ttl_s * 1e9)
    lease.ttl.seconds, lease.ttl.nanos = divmod(nanos, 10**9)
    lease.renew_interval.seconds, lease.renew_interval.nanos = divmod(nanos // 3, 10**9)
    return lease
