"""Decisions on workers' records and on leases."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from rankbook import v1
from rankbook.convert import duration, seconds, timestamp
from rankbook.errors import (
    BadRequest,
    Conflict,
    LimitExceeded,
    NotFound,
    Overloaded,
    Reason,
    Refused,
)
from rankbook.limits import (
    MAX_ENGINE_BYTES,
    MAX_RENEWALS,
    check_batch,
    check_id,
    check_record,
    check_slot,
)
from rankbook_server.core.admission import (
    admit,
    check_sequence,
    current_engine,
    grant,
    granted_ttl_s,
    lease_message,
    refuse_stale,
    slot_held,
)
from rankbook_server.core.decision import Decision, Instant, Note
from rankbook_server.core.engine import EngineState, SlotState, slot_text
from rankbook_server.core.fold import CORE, BookFold
from rankbook_server.core.keys import SlotKey, lease_key
from rankbook_server.core.ops import MAX_TXN_OPS, Delete, Op, Txn

__all__ = [
    "copy_head",
    "deregister",
    "record_digest",
    "register",
    "removal_ops",
    "renew",
    "revoke",
    "update",
]

_MAX_HOLDERS = 8
_MAX_STARTS = 32
_MAX_RETIRED = 4
_MAX_HEIRS = 16
_REMOVED_AT_ONCE = MAX_TXN_OPS - 28
"""Slots taken out by one transaction; leaves room for heads and the lease."""


def record_digest(record: v1.WorkerRecord) -> bytes:
    """SHA-256 of a record, as `WorkerStatus.record_digest` says."""
    return hashlib.sha256(record.SerializeToString(deterministic=True)).digest()


def slot_key(slot: v1.Slot) -> SlotKey:
    """A slot message as a key."""
    return (slot.pp_rank, slot.pcp_rank, slot.tp_rank)


def copy_head(engine: EngineState | None, *, visible_at: Instant | None) -> v1.StoredEngine:
    """A head to change and write.

    Args:
        engine: The engine, or None for a new one.
        visible_at: Time of a change that readers see; None for one they do not.
    """
    head = v1.StoredEngine(version=1)
    if engine is None:
        return head
    head.CopyFrom(engine.head)
    head.version = 1
    # Zero meant "of that write"; this is another write.
    head.start_revision = head.start_revision or (engine.head_revision if head.epoch else 0)
    if head.HasField("core") and not head.core.write_revision:
        head.core.write_revision = engine.head_revision
    if visible_at is None:
        head.change_revision = head.change_revision or engine.head_revision
    else:
        head.change_revision = 0
        head.change_time.CopyFrom(timestamp(visible_at.unix_s))
    # The fold may know more than the last head that was written.
    head.was_complete = head.was_complete or engine.was_complete
    return head


def add_start(head: v1.StoredEngine, generation: str, epoch: int) -> None:
    """Remembers a start; forgets the oldest past the bound, never the current one."""
    head.starts.append(v1.StoredStart(generation=generation, epoch=epoch))
    head.last_epoch = max(head.last_epoch, epoch)
    while len(head.starts) > _MAX_STARTS:
        oldest = next(i for i, s in enumerate(head.starts) if s.epoch != head.epoch)
        del head.starts[oldest]


# -------------------------------------------------------------------- register


def register(
    book: BookFold, request: v1.RegisterWorkersRequest, now: Instant
) -> Decision[v1.RegisterWorkersResponse]:
    """Signs workers in (rules 1, 2, 3, 5 and 6)."""
    check_batch(request.records, book.namespace)
    check_sequence(request.sequence)
    records = [_normal(book, record) for record in request.records]
    first = records[0]
    engine_id = first.engine_id
    engine = book.engines.get(engine_id)
    epoch = admit(book, engine, engine_id, first.generation, request.epoch)
    begins = engine is None or epoch != engine.head.epoch
    head: v1.StoredEngine | None = None
    notes: tuple[Note, ...] = ()
    if begins:
        head, notes = _begun(book, engine, first, epoch, now)
    assert engine is not None or head is not None
    declared = (
        head if head is not None else engine.head if engine is not None else v1.StoredEngine()
    )
    for record in records:
        _check_declared(record, declared)

    wanted: list[tuple[v1.WorkerRecord, bytes, SlotState | None]] = []
    repeats: list[SlotState] = []
    for record in records:
        state = None
        if engine is not None and not begins:
            state = _slot_of(engine, slot_key(record.slot))
        digest = record_digest(record)
        if _is_repeat(book, engine, state, record, digest, request.sequence, now):
            assert state is not None
            repeats.append(state)
        wanted.append((record, digest, state))
    digests = [digest for _, digest, _ in wanted]
    if len(repeats) == len(wanted):
        return _first_reply(book, repeats, digests, epoch)

    lease = grant(book, request.lease, engine_id, epoch, now)
    stamp = timestamp(now.unix_s)
    ops: list[Op] = []
    if lease.write:
        ops.append(book.lease_put(lease.lease_id, lease.stored))
    added = 0
    worker_ops: list[Op] = []
    for record, digest, state in wanted:
        if state is not None and any(state is r for r in repeats):
            continue
        stored = _stored(record, digest, state, epoch, lease.lease_id, request.sequence, stamp)
        added += record.ByteSize() - (state.size if state is not None else 0)
        worker_ops.append(book.worker_put(engine_id, slot_key(record.slot), stored))
    held = engine.bytes if engine is not None and not begins else 0
    if added > 0 and held + added > MAX_ENGINE_BYTES:
        raise LimitExceeded(
            f"engine {engine_id} would hold {held + added} bytes, over the limit of "
            f"{MAX_ENGINE_BYTES} bytes",
            metadata={"limit": "engine", "value": held + added, "bound": MAX_ENGINE_BYTES},
        )
    if head is None and engine is not None and engine.head.HasField("gone_time"):
        head = copy_head(engine, visible_at=now)
        head.ClearField("gone_time")
        head.ClearField("successor")
    if head is not None:
        ops.append(book.head_put(engine_id, head))
    ops += worker_ops
    if begins:
        ops += _heirs(book, engine_id, declared, epoch, now)

    def reply(revision: int) -> v1.RegisterWorkersResponse:
        return v1.RegisterWorkersResponse(
            lease=lease_message(book, lease.lease_id, lease.stored),
            epoch=epoch,
            revision=revision,
            record_digests=digests,
        )

    return Decision(Txn(tuple(ops)), reply, notes)


def _head_of(engine: EngineState | None, head: v1.StoredEngine | None) -> v1.StoredEngine:
    """The head a write will stand under: the new one, else the engine's."""
    if head is not None:
        return head
    assert engine is not None, "a start without a head is a new start"
    return engine.head


def _normal(book: BookFold, record: v1.WorkerRecord) -> v1.WorkerRecord:
    """The record as it is kept: every default in its place."""
    kept = v1.WorkerRecord()
    kept.CopyFrom(record)
    kept.namespace = book.namespace
    if not kept.replica:
        base, dash, rank = kept.engine_id.rpartition("_dp")
        kept.replica = base if dash and base and rank.isdigit() else kept.engine_id
    kept.layout.pcp_size = kept.layout.pcp_size or 1
    kept.layout.dcp_size = kept.layout.dcp_size or 1
    if kept.HasField("kv") and not kept.kv.physical_blocks_per_logical:
        kept.kv.physical_blocks_per_logical = 1
    for address in kept.addresses:
        if address.host.startswith("[") and address.host.endswith("]"):
            address.host = address.host[1:-1]
    return kept


def _begun(
    book: BookFold,
    engine: EngineState | None,
    first: v1.WorkerRecord,
    epoch: int,
    now: Instant,
) -> tuple[v1.StoredEngine, tuple[Note, ...]]:
    """The head of a start with its first worker, which retires the one before."""
    if engine is None and len(book.engines) >= book.limits.max_engines:
        raise Overloaded(
            f"namespace {book.namespace} holds {len(book.engines)} engines, its bound: evict some "
            "or raise the bound",
            reason=Reason.TOO_MANY_ENGINES,
            metadata={"limit": "engines", "bound": book.limits.max_engines},
        )
    old = engine.head if engine is not None else v1.StoredEngine()
    head = v1.StoredEngine(
        version=1,
        generation=first.generation,
        epoch=epoch,
        last_epoch=max(old.last_epoch, epoch),
        layout=first.layout,
        group=first.group,
        replica=first.replica,
        dp_rank=first.dp_rank,
        role=first.role,
        start_time=timestamp(now.unix_s),
        change_time=timestamp(now.unix_s),
        starts=old.starts,
        retired_alive=old.retired_alive,
    )
    if all(start.generation != first.generation for start in head.starts):
        add_start(head, first.generation, epoch)
    if engine is None or not engine.live:
        return head, ()
    head.retired_alive.append(timestamp(now.unix_s))
    del head.retired_alive[:-_MAX_RETIRED]
    note = Note(
        "generation_retired_alive",
        {
            "engine_id": engine.engine_id,
            "old_generation": old.generation,
            "old_epoch": old.epoch,
            "new_generation": first.generation,
            "new_epoch": epoch,
            "retired_workers": len(engine.live),
        },
    )
    return head, (note,)


def _heirs(
    book: BookFold, engine_id: str, head: v1.StoredEngine, epoch: int, now: Instant
) -> list[Op]:
    """Tells the tombstones whose place this start takes."""
    ops: list[Op] = []
    for other_id in sorted(book.groups.get(head.group, set()) & book.tombstones):
        other = book.engines[other_id]
        if (
            other_id == engine_id
            or other.head.dp_rank != head.dp_rank
            or other.head.role != head.role
            or other.head.HasField("successor")
        ):
            continue
        told = copy_head(other, visible_at=now)
        told.successor.CopyFrom(
            v1.Successor(engine_id=engine_id, epoch=epoch, generation=head.generation)
        )
        ops.append(book.head_put(other_id, told))
        if len(ops) == _MAX_HEIRS:
            break
    return ops


def _check_declared(record: v1.WorkerRecord, head: v1.StoredEngine) -> None:
    """Sizes and identity are those of the generation's first worker (rule 3)."""
    if record.layout != head.layout:
        mine, theirs = _sizes(record.layout), _sizes(head.layout)
        raise Conflict(
            f"{slot_text(slot_key(record.slot))} of {record.engine_id} declares {mine}, and "
            f"generation {head.generation} declared {theirs}: all workers of a start declare the "
            "same sizes",
            reason=Reason.LAYOUT_CONFLICT,
            metadata={"engine_id": record.engine_id, "declared": theirs, "sent": mine},
        )
    for name in ("group", "replica", "dp_rank", "role"):
        mine, theirs = getattr(record, name), getattr(head, name)
        if mine != theirs:
            raise Conflict(
                f"{slot_text(slot_key(record.slot))} of {record.engine_id} says {name} {mine}, and "
                f"generation {head.generation} said {theirs}: all workers of a start agree",
                reason=Reason.IDENTITY_CONFLICT,
                metadata={"field": name, "declared": theirs, "sent": mine},
            )


def _sizes(layout: v1.Layout) -> str:
    return (
        f"pp_size {layout.pp_size}, tp_size {layout.tp_size}, pcp_size {layout.pcp_size or 1}, "
        f"dcp_size {layout.dcp_size or 1}, num_layers {layout.num_layers}"
    )


def _slot_of(engine: EngineState, slot: SlotKey) -> SlotState | None:
    state = engine.slots.get(slot)
    return state if state is not None and state.epoch == engine.head.epoch else None


def _last_sequence(state: SlotState | None, boot_id: str) -> int:
    if state is None:
        return 0
    return next((h.sequence for h in state.stored.holders if h.boot_id == boot_id), 0)


def _is_repeat(
    book: BookFold,
    engine: EngineState | None,
    state: SlotState | None,
    record: v1.WorkerRecord,
    digest: bytes,
    sequence: int,
    now: Instant,
) -> bool:
    """Whether a write repeats the slot's last one (rule 6).

    Raises:
        Conflict: Another live holder has the slot.
        Refused: The sequence is behind, or was used for another record.
    """
    if state is None or engine is None:
        return False
    boot_id, slot = record.process.boot_id, slot_key(record.slot)
    last = _last_sequence(state, boot_id)
    if not state.live:
        if last and sequence <= last:
            raise refuse_stale(boot_id, sequence, last, slot, closed=True)
        return False
    holder = state.stored.holders[-1].boot_id
    if holder != boot_id:
        held = slot_held(book, engine, slot_text(slot), holder, state.stored.lease_id, boot_id, now)
        if held is not None:
            raise held
        if last and sequence <= last:
            raise refuse_stale(boot_id, sequence, last, slot, closed=True)
        return False
    if sequence < last:
        raise refuse_stale(boot_id, sequence, last, slot, closed=False)
    if sequence > last:
        return False
    if digest != state.stored.record_digest or state.stored.asleep:
        raise Refused(
            f"sequence {sequence} of {boot_id} for {slot_text(slot)} was used for another write: a "
            "changed record needs a higher sequence",
            reason=Reason.SEQUENCE_REUSED,
            metadata={"boot_id": boot_id, "sequence": sequence, "slot": slot_text(slot)},
        )
    return True


def _first_reply(
    book: BookFold, repeats: Sequence[SlotState], digests: list[bytes], epoch: int
) -> Decision[v1.RegisterWorkersResponse]:
    last = max(repeats, key=lambda state: state.write_revision)

    def reply(_: int) -> v1.RegisterWorkersResponse:
        return v1.RegisterWorkersResponse(
            lease=lease_message(book, last.stored.lease_id),
            epoch=epoch,
            revision=last.write_revision,
            record_digests=digests,
        )

    return Decision(None, reply)


def _holders(state: SlotState | None, boot_id: str, sequence: int) -> list[v1.StoredHolder]:
    """The slot's holders with this one last."""
    others = [h for h in state.stored.holders if h.boot_id != boot_id] if state is not None else []
    return [*others[1 - _MAX_HOLDERS :], v1.StoredHolder(boot_id=boot_id, sequence=sequence)]


def _stored(
    record: v1.WorkerRecord,
    digest: bytes,
    state: SlotState | None,
    epoch: int,
    lease_id: str,
    sequence: int,
    stamp: Timestamp,
    *,
    asleep: bool = False,
) -> v1.StoredWorker:
    boot_id = record.process.boot_id
    same = (
        state is not None
        and state.live
        and state.stored.record_digest == digest
        and state.stored.asleep == asleep
        and state.stored.holders[-1].boot_id == boot_id
    )
    return v1.StoredWorker(
        version=1,
        change_revision=state.revision if same and state is not None else 0,
        epoch=epoch,
        live=True,
        record=record,
        lease_id=lease_id,
        record_digest=digest,
        asleep=asleep,
        holders=_holders(state, boot_id, sequence),
        change_time=state.stored.change_time if same and state is not None else stamp,
    )


# ---------------------------------------------------------------------- update


def update(
    book: BookFold, request: v1.UpdateWorkerRequest, now: Instant
) -> Decision[v1.UpdateWorkerResponse]:
    """Changes a record, or withdraws its payload."""
    check_sequence(request.sequence)
    sent = request.record
    engine = current_engine(book, sent.engine_id, sent.generation, request.epoch)
    check_slot(sent.slot, engine.head.layout)
    slot = slot_key(sent.slot)
    boot_id = check_id("record.process.boot_id", sent.process.boot_id)
    state = _slot_of(engine, slot)
    holder = state.stored.holders[-1].boot_id if state is not None and state.live else ""
    if state is None or holder != boot_id:
        raise NotFound(
            f"{boot_id} does not hold {slot_text(slot)} of {engine.engine_id}"
            + (f", {holder} does" if holder else ": register first"),
            reason=Reason.WORKER_NOT_FOUND,
            metadata={"engine_id": engine.engine_id, "boot_id": boot_id, "holder": holder},
        )
    if request.withdraw_payload:
        record = v1.WorkerRecord()
        record.CopyFrom(state.stored.record)
        record.handshake.payload = b""
    else:
        check_record(sent, book.namespace)
        record = _normal(book, sent)
        _check_declared(record, engine.head)
    digest = record_digest(record)
    last = _last_sequence(state, boot_id)
    epoch = engine.head.epoch
    if request.sequence < last:
        raise refuse_stale(boot_id, request.sequence, last, slot, closed=False)
    if request.sequence == last:
        if digest != state.stored.record_digest or state.stored.asleep != request.withdraw_payload:
            raise Refused(
                f"sequence {last} of {boot_id} for {slot_text(slot)} was used for another write: "
                "a changed record needs a higher sequence",
                reason=Reason.SEQUENCE_REUSED,
                metadata={"boot_id": boot_id, "sequence": last, "slot": slot_text(slot)},
            )
        first = v1.UpdateWorkerResponse(
            epoch=epoch, revision=state.write_revision, record_digest=digest
        )
        return Decision(None, lambda _: first)
    grown = engine.bytes + record.ByteSize() - state.size
    if record.ByteSize() > state.size and grown > MAX_ENGINE_BYTES:
        raise LimitExceeded(
            f"engine {engine.engine_id} would hold {grown} bytes, over the limit of "
            f"{MAX_ENGINE_BYTES} bytes",
            metadata={"limit": "engine", "value": grown, "bound": MAX_ENGINE_BYTES},
        )
    stored = _stored(
        record,
        digest,
        state,
        epoch,
        state.stored.lease_id,
        request.sequence,
        timestamp(now.unix_s),
        asleep=request.withdraw_payload,
    )
    ops: list[Op] = []
    if engine.was_complete and not engine.head.was_complete:
        ops.append(book.head_put(engine.engine_id, copy_head(engine, visible_at=None)))
    ops.append(book.worker_put(engine.engine_id, slot, stored))

    def reply(revision: int) -> v1.UpdateWorkerResponse:
        return v1.UpdateWorkerResponse(epoch=epoch, revision=revision, record_digest=digest)

    return Decision(Txn(tuple(ops)), reply)


# -------------------------------------------------------------------- removing


def removal_ops(
    book: BookFold,
    engine: EngineState,
    slots: Iterable[SlotKey],
    now: Instant,
    *,
    sequence: int = 0,
) -> list[Op]:
    """Takes live slots out and closes their holders' sequences.

    Args:
        book: The book.
        engine: The engine.
        slots: Live slots, or `CORE` for the core's own record.
        now: When.
        sequence: Closes at this number where it is above the holder's last.
    """
    gone = set(slots)
    core = CORE in gone
    gone.discard(CORE)
    stamp = timestamp(now.unix_s)
    ops: list[Op] = []
    for slot in sorted(gone):
        state = engine.live[slot]
        holder = state.stored.holders[-1]
        closed = v1.StoredWorker(
            version=1,
            epoch=state.epoch,
            holders=_holders(state, holder.boot_id, max(holder.sequence, sequence)),
            change_time=stamp,
        )
        ops.append(book.worker_put(engine.engine_id, slot, closed))
    last = bool(gone) and len(gone) == len(engine.live)
    unsaved = bool(gone) and engine.was_complete and not engine.head.was_complete
    if core or last or unsaved:
        head = copy_head(engine, visible_at=now)
        if core:
            head.core.live = False
        if last:
            head.gone_time.CopyFrom(stamp)
            heir = _heir(book, engine)
            if heir is not None:
                head.successor.CopyFrom(heir)
        ops.insert(0, book.head_put(engine.engine_id, head))
    return ops


def _heir(book: BookFold, engine: EngineState) -> v1.Successor | None:
    """Another live engine that already claims the dying one's place."""
    for other_id in book.rivals(engine.engine_id):
        other = book.engines[other_id].head
        return v1.Successor(engine_id=other_id, epoch=other.epoch, generation=other.generation)
    return None


def deregister(
    book: BookFold, request: v1.DeregisterRequest, now: Instant
) -> Decision[v1.DeregisterResponse]:
    """Takes a holder's records out; a second call finds nothing to do."""
    check_sequence(request.sequence)
    boot_id = check_id("boot_id", request.boot_id)
    engine = current_engine(book, request.engine_id, request.generation, request.epoch)
    if request.slots:
        for named in request.slots:
            check_slot(named, engine.head.layout)
        wanted = sorted({slot_key(named) for named in request.slots})
    else:
        wanted = [s for s in engine.live if engine.live[s].stored.holders[-1].boot_id == boot_id]
    found: list[SlotKey] = []
    for slot in wanted:
        state = _slot_of(engine, slot)
        last = _last_sequence(state, boot_id)
        mine = state is not None and state.live and state.stored.holders[-1].boot_id == boot_id
        if not mine:
            if last:
                continue
            raise NotFound(
                f"{boot_id} never held {slot_text(slot)} of {engine.engine_id}",
                reason=Reason.WORKER_NOT_FOUND,
                metadata={"engine_id": engine.engine_id, "boot_id": boot_id},
            )
        if request.sequence <= last:
            raise refuse_stale(boot_id, request.sequence, last, slot, closed=False)
        found.append(slot)
    if len(found) > _REMOVED_AT_ONCE:
        raise LimitExceeded(
            f"{len(found)} slots are more than the {_REMOVED_AT_ONCE} one call takes out: name "
            "them in parts, or revoke the lease",
            metadata={"limit": "slots", "value": len(found), "bound": _REMOVED_AT_ONCE},
        )
    removed = len(found)
    if not found:
        return Decision(None, lambda revision: v1.DeregisterResponse(revision=revision))
    ops = removal_ops(book, engine, found, now, sequence=request.sequence)
    return Decision(
        Txn(tuple(ops)),
        lambda revision: v1.DeregisterResponse(removed=removed, revision=revision),
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
    ops, removed = lease_end_ops(book, lease_id, now)
    return Decision(
        Txn(tuple(ops)),
        lambda revision: v1.RevokeLeaseResponse(removed=removed, revision=revision),
    )


def lease_end_ops(book: BookFold, lease_id: str, now: Instant) -> tuple[list[Op], int]:
    """The next piece of a lease's end: records, then the lease itself. What one
    transaction cannot hold goes with the next expiry."""
    entry = book.leases[lease_id]
    by_engine: dict[str, list[SlotKey]] = {}
    for engine_id, slot in sorted(entry.holds)[:_REMOVED_AT_ONCE]:
        by_engine.setdefault(engine_id, []).append(slot)
        if len(by_engine) == 16:
            break
    ops: list[Op] = []
    for engine_id, slots in by_engine.items():
        ops += removal_ops(book, book.engines[engine_id], slots, now)
    taken = sum(len(slots) for slots in by_engine.values())
    if taken == len(entry.holds):
        ops.append(Delete(lease_key(book.namespace, lease_id)))
    elif not entry.stored.ended:
        ended = v1.StoredLease()
        ended.CopyFrom(entry.stored)
        ended.ended = True
        ops.append(book.lease_put(lease_id, ended))
    removed = sum(1 for slots in by_engine.values() for slot in slots if slot != CORE)
    return ops, removed


# ------------------------------------------------------------------- renewing


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
    if entry.deadline <= now.mono_s:
        return v1.LeaseStatus(lease_id=lease_id, state=v1.LEASE_STATE_ENDED)
    replaced = _fenced_by(book, entry.stored)
    if replaced is not None:
        return v1.LeaseStatus(lease_id=lease_id, state=v1.LEASE_STATE_FENCED, replaced_by=replaced)
    if renewal.HasField("ttl") and seconds(renewal.ttl):
        # Not written: after a restart the first granted time holds until the
        # next renewal says it again.
        entry.ttl_s = granted_ttl_s(seconds(renewal.ttl))
    entry.deadline = now.mono_s + entry.ttl_s
    book.earliest = min(book.earliest, entry.deadline)
    return v1.LeaseStatus(lease_id=lease_id, state=v1.LEASE_STATE_ALIVE, ttl=duration(entry.ttl_s))


def _fenced_by(book: BookFold, stored: v1.StoredLease) -> v1.Successor | None:
    """What replaced the last start this lease keeps, when all are replaced."""
    replaced = None
    for use in stored.uses:
        engine = book.engines.get(use.engine_id)
        if engine is None:
            replaced = v1.Successor(engine_id=use.engine_id, epoch=book.facts.epoch_floor)
        elif engine.head.epoch > use.epoch or (
            engine.head.epoch == use.epoch and engine.head.evicted
        ):
            replaced = v1.Successor(
                engine_id=use.engine_id,
                epoch=engine.head.epoch,
                generation="" if engine.head.evicted else engine.head.generation,
            )
        else:
            return None
    return replaced
