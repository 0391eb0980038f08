"""Decisions that take records out: deregistration, and the end of a lease."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankbook import v1
from rankbook.convert import timestamp
from rankbook.errors import LimitExceeded, NotFound, Reason
from rankbook.limits import DEFAULT_TTL_S, MAX_GRID_SLOTS, check_count, check_id, check_slot
from rankbook_server.core.admission import (
    check_sequence,
    current_engine,
    holders_with,
    last_sequence,
    refuse_stale,
)
from rankbook_server.core.decision import Decision, Instant, Note, maintenance
from rankbook_server.core.engine import EngineState
from rankbook_server.core.fold import CORE, BookFold, LeaseEntry
from rankbook_server.core.heads import copy_head
from rankbook_server.core.keys import SlotKey, lease_key, slot_key, slot_text
from rankbook_server.core.leases import ttl_ops
from rankbook_server.core.ops import MAX_TXN_OPS, UPKEEP_BYTES, Delete, Op, Txn
from rankbook_server.core.records import slot_holder

__all__ = ["deregister", "expire", "removal_ops", "revoke"]

_REMOVED_AT_ONCE = MAX_TXN_OPS - 28
"""Slots taken out by one transaction; leaves room for heads and the lease."""
_ENGINES_AT_ONCE = 16
_HOLDERS_BYTES = 2_560
# Most that is left of a slot: eight holders with the longest names.


def removal_ops(
    book: BookFold,
    engine: EngineState,
    slots: Iterable[SlotKey],
    now: Instant,
    *,
    sequence: int = 0,
    lapsed: bool = False,
) -> list[Op]:
    """Takes live slots out and closes their holders' sequences.

    Args:
        book: The book.
        engine: The engine.
        slots: Live slots, or `CORE` for the core's own record.
        now: When.
        sequence: Closes at this number where it is above the holder's last.
        lapsed: Their lease ran out: nobody knows whether the holders have ended.
    """
    gone = set(slots)
    core = CORE in gone
    gone.discard(CORE)
    stamp = timestamp(now.unix_s)
    ops: list[Op] = []
    for slot in sorted(gone):
        state = engine.live[slot]
        closed = v1.StoredWorker(
            version=1,
            epoch=state.epoch,
            holders=_closed(state.stored.holders, sequence),
            change_time=stamp,
        )
        ops.append(book.worker_put(engine.engine_id, slot, closed))
    last = bool(gone) and len(gone) == len(engine.live)
    lapse = bool(gone) and lapsed and not engine.head.lapsed
    if core or last or lapse or engine.unsaved:
        head = copy_head(engine, visible_at=now)
        head.lapsed = head.lapsed or lapse
        if core:
            head.core.live = False
            closed_core = _closed(head.core.holders, sequence)
            del head.core.holders[:]
            head.core.holders.extend(closed_core)
        if last:
            head.gone_time.CopyFrom(stamp)
            heir = _heir(book, engine)
            if heir is not None:
                head.successor.CopyFrom(heir)
        ops.insert(0, book.head_put(engine.engine_id, head))
    return ops


def _closed(holders: Sequence[v1.StoredHolder], sequence: int) -> list[v1.StoredHolder]:
    """The holders with the last one's numbers used up. Somebody else's record may
    have come without any."""
    if not holders:
        return []
    last = holders[-1]
    return holders_with(holders, last.boot_id, max(last.sequence, sequence))


def _heir(book: BookFold, engine: EngineState) -> v1.Successor | None:
    """Another live engine that already claims the dying one's place."""
    for other_id in book.neighbours.rivals(engine.engine_id):
        other = book.engines[other_id].head
        return v1.Successor(engine_id=other_id, epoch=other.epoch, generation=other.generation)
    return None


def deregister(
    book: BookFold, request: v1.DeregisterRequest, now: Instant
) -> Decision[v1.DeregisterResponse]:
    """Takes a holder's records out; a second call finds nothing to do."""
    check_sequence(request.sequence)
    boot_id = check_id("boot_id", request.boot_id)
    check_count("slots", len(request.slots), MAX_GRID_SLOTS, "slots")
    engine = current_engine(book, request.engine_id, request.generation, request.epoch)
    for named in request.slots:
        check_slot(named, engine.head.layout, "slots")
    core = engine.head.core
    if request.slots:
        wanted = sorted({slot_key(named) for named in request.slots})
    else:
        wanted = [s for s in engine.order() if _holds(engine, s, boot_id)]
        if core.live and core.record.process.boot_id == boot_id:
            wanted.append(CORE)
        if not wanted and not _ever_held(engine, boot_id):
            raise _never_held(engine, boot_id, "anything")
    found: list[SlotKey] = []
    for slot in wanted:
        last = last_sequence(_holders(engine, slot), boot_id)
        if slot != CORE and not _holds(engine, slot, boot_id):
            if last:
                continue
            raise _never_held(engine, boot_id, slot_text(slot))
        if request.sequence <= last:
            where = slot if slot != CORE else None
            raise refuse_stale(boot_id, request.sequence, last, where, closed=False)
        found.append(slot)
    if len(found) > _REMOVED_AT_ONCE:
        raise LimitExceeded(
            f"{len(found)} slots are more than the {_REMOVED_AT_ONCE} one call takes out: name "
            "them in parts, or revoke the lease",
            metadata={"limit": "slots", "value": len(found), "bound": _REMOVED_AT_ONCE},
        )
    if not found:
        return Decision(None, lambda revision: v1.DeregisterResponse(revision=revision))
    removed = sum(slot != CORE for slot in found)
    ops = removal_ops(book, engine, found, now, sequence=request.sequence)
    return Decision(
        Txn(tuple(ops)),
        lambda revision: v1.DeregisterResponse(removed=removed, revision=revision),
    )


def _holds(engine: EngineState, slot: SlotKey, boot_id: str) -> bool:
    state = engine.live.get(slot)
    return state is not None and slot_holder(state) == boot_id


def _holders(engine: EngineState, slot: SlotKey) -> Iterable[v1.StoredHolder]:
    if slot == CORE:
        return engine.head.core.holders
    state = engine.slots.get(slot)
    return state.stored.holders if state and state.epoch == engine.head.epoch else ()


def _ever_held(engine: EngineState, boot_id: str) -> bool:
    return any(last_sequence(_holders(engine, slot), boot_id) for slot in (CORE, *engine.slots))


def _never_held(engine: EngineState, boot_id: str, what: str) -> NotFound:
    return NotFound(
        f"{boot_id} never held {what} of {engine.engine_id}",
        reason=Reason.WORKER_NOT_FOUND,
        metadata={"engine_id": engine.engine_id, "boot_id": boot_id, "slot": what},
    )


def revoke(
    book: BookFold, request: v1.RevokeLeaseRequest, now: Instant
) -> Decision[v1.RevokeLeaseResponse]:
    """Ends a lease with what it keeps; a second call finds nothing to do."""
    lease_id = check_id("lease_id", request.lease_id)
    if lease_id not in book.leases:
        if lease_id in book.ended:
            return Decision(None, lambda revision: v1.RevokeLeaseResponse(revision=revision))
        raise NotFound(
            f"lease {lease_id} was never granted in namespace {book.namespace}",
            reason=Reason.LEASE_NOT_FOUND,
            metadata={"lease_id": lease_id, "namespace": book.namespace},
        )
    end = _end(book, [book.leases[lease_id]], now, revoked=True)
    return Decision(
        Txn(tuple(end.ops)),
        lambda revision: v1.RevokeLeaseResponse(removed=sum(end.removed), revision=revision),
    )


@dataclass(frozen=True, slots=True)
class _End:
    """The next piece of the end of some leases."""

    ops: list[Op]
    leases: list[LeaseEntry]
    """Those that it is about: the first ones of those given."""
    removed: list[int]
    """Workers that it takes out, lease by lease."""


def _end(book: BookFold, leases: Iterable[LeaseEntry], now: Instant, *, revoked: bool) -> _End:
    """Records go first, then the lease itself, for as many leases as fit. What
    one transaction cannot hold of the first goes with the next expiry, which
    must know whether the lease was `revoked`."""
    by_engine: dict[str, list[SlotKey]] = {}
    end = _End([], [], [])
    room, size = MAX_TXN_OPS, UPKEEP_BYTES
    for entry in leases:
        holds = sorted(entry.holds)
        fresh = {engine_id for engine_id, _ in holds} - by_engine.keys()
        written = sum(book.engines[engine_id].head.ByteSize() for engine_id in fresh)
        written += len(holds) * _HOLDERS_BYTES
        if not end.leases:
            holds = _first_piece(holds)
        elif len(holds) + len(fresh) + 1 > room or written > size:
            break
        size -= written
        for engine_id, slot in holds:
            by_engine.setdefault(engine_id, []).append(slot)
        room -= len(holds) + len(fresh) + 1
        end.leases.append(entry)
        end.removed.append(sum(slot != CORE for _, slot in holds))
        if len(holds) == len(entry.holds):
            end.ops.append(Delete(lease_key(book.namespace, entry.lease_id)))
        elif not entry.stored.ended or revoked != entry.stored.revoked:
            ended = v1.StoredLease()
            ended.CopyFrom(entry.stored)
            ended.ended, ended.revoked = True, revoked
            end.ops.append(book.lease_put(entry.lease_id, ended))
    for engine_id, slots in by_engine.items():
        end.ops[:0] = removal_ops(book, book.engines[engine_id], slots, now, lapsed=not revoked)
    return end


def _first_piece(holds: list[tuple[str, SlotKey]]) -> list[tuple[str, SlotKey]]:
    """As much of what a lease holds as one transaction takes out."""
    piece: list[tuple[str, SlotKey]] = []
    engines: set[str] = set()
    for engine_id, slot in holds[:_REMOVED_AT_ONCE]:
        engines.add(engine_id)
        if len(engines) > _ENGINES_AT_ONCE:
            break
        piece.append((engine_id, slot))
    return piece


def _lost_records(book: BookFold, now: Instant) -> Decision[None] | None:
    """Takes out live records whose lease is not in the book: nobody keeps them."""
    for lease_id, orphans in book.orphans.items():
        if orphans.since_s + DEFAULT_TTL_S > now.mono_s:
            continue
        by_engine: dict[str, list[SlotKey]] = {}
        for engine_id, slot in _first_piece(sorted(orphans.holds)):
            by_engine.setdefault(engine_id, []).append(slot)
        ops: list[Op] = []
        for engine_id, slots in by_engine.items():
            ops += removal_ops(book, book.engines[engine_id], slots, now, lapsed=True)
        fields = {"lease_id": lease_id, "engines": sorted(by_engine)}
        return maintenance(ops, [Note("records_without_lease", fields)])
    return None


def expire(book: BookFold, now: Instant) -> Decision[None] | None:
    """The next piece of what is due: times to live to write down, then records
    without a lease, then leases that ran out, as many as one transaction takes."""
    if book.unsaved:
        return maintenance(ttl_ops(book))
    lost = _lost_records(book, now)
    if lost is not None:
        return lost
    due = book.due_leases(now.mono_s, MAX_TXN_OPS)
    if not due:
        return None
    revoked = due[0].stored.revoked
    end = _end(book, (e for e in due if e.stored.revoked == revoked), now, revoked=revoked)
    notes = [
        Note(
            "lease_expired",
            {
                "lease_id": entry.lease_id,
                "removed": removed,
                "engines": sorted({engine_id for engine_id, _ in entry.holds})[:8],
            },
        )
        for entry, removed in zip(end.leases, end.removed, strict=True)
        if removed
    ]
    # One that has ended already does so whatever the store holds of it.
    expired = [e.lease_id for e in end.leases if not e.stored.ended]
    return maintenance(end.ops, notes, expired)
