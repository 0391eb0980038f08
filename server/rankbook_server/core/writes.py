"""Decisions that put records in: registration and change."""

from __future__ import annotations

from dataclasses import dataclass

from rankbook import v1
from rankbook.convert import timestamp
from rankbook.errors import BadRecord, NotFound, Reason
from rankbook.limits import check_batch, check_id, check_record, check_slot
from rankbook_server.core.admission import (
    admit,
    check_room,
    check_sequence,
    current_engine,
    last_sequence,
    refuse_reused,
    refuse_stale,
    slot_held,
)
from rankbook_server.core.decision import Decision, Instant, Note
from rankbook_server.core.engine import EngineState
from rankbook_server.core.fold import BookFold
from rankbook_server.core.heads import begun_head, copy_head, heir_ops
from rankbook_server.core.keys import slot_key, slot_text
from rankbook_server.core.leases import grant, kept_lease, ran_out, taken_for_dead
from rankbook_server.core.ops import Op, Txn
from rankbook_server.core.records import (
    check_declared,
    check_size,
    current_slot,
    normal,
    record_digest,
    slot_holder,
    stored_worker,
)
from rankbook_server.core.slots import SlotState

__all__ = ["register", "update"]


@dataclass(frozen=True, slots=True)
class _Sent:
    """One record of a registration, beside what the book has in its slot."""

    record: v1.WorkerRecord
    digest: bytes
    state: SlotState | None
    repeats: bool


def register(
    book: BookFold, request: v1.RegisterWorkersRequest, now: Instant
) -> Decision[v1.RegisterWorkersResponse]:
    """Signs workers in; the first of a newer start retires the start before."""
    check_batch(request.records, book.namespace)
    check_sequence(request.sequence)
    records = [normal(book, record) for record in request.records]
    first = records[0]
    engine_id = first.engine_id
    engine = book.engines.get(engine_id)
    epoch = admit(book, engine, engine_id, first.generation, request.epoch)
    if engine is None or epoch != engine.head.epoch:
        return _begin(book, engine, records, epoch, request, now)
    for record in records:
        check_declared(record, engine.head)
    sent = [_compare(book, engine, record, request.sequence, now) for record in records]
    repeated = [item.state for item in sent if item.state is not None and item.repeats]
    if len(repeated) == len(sent):
        return _first_reply(book, repeated, [item.digest for item in sent], epoch, now)
    fresh = [item for item in sent if not item.repeats]
    added = sum(i.record.ByteSize() - (i.state.size if i.state else 0) for i in fresh)
    check_size(engine_id, engine.bytes, added)
    ops: list[Op] = []
    lapse = not engine.head.lapsed and any(_succeeds_lapsed(book, item) for item in fresh)
    if lapse or engine.head.HasField("gone_time"):
        head = copy_head(engine, visible_at=now)
        head.lapsed = head.lapsed or lapse
        head.ClearField("gone_time")
        head.ClearField("successor")
        ops.append(book.head_put(engine_id, head))
    elif engine.unsaved:
        ops.append(book.head_put(engine_id, copy_head(engine, visible_at=None)))
    return _signed_in(book, sent, epoch, request, now, ops, [], ())


def _begin(
    book: BookFold,
    engine: EngineState | None,
    records: list[v1.WorkerRecord],
    epoch: int,
    request: v1.RegisterWorkersRequest,
    now: Instant,
) -> Decision[v1.RegisterWorkersResponse]:
    """The first workers of a start."""
    check_room(book, engine)
    head, notes = begun_head(engine, records[0], epoch, now)
    for record in records:
        check_declared(record, head)
    engine_id = records[0].engine_id
    check_size(engine_id, 0, sum(record.ByteSize() for record in records))
    sent = [_Sent(record, record_digest(record), None, False) for record in records]
    before: list[Op] = [book.head_put(engine_id, head)]
    return _signed_in(
        book, sent, epoch, request, now, before, heir_ops(book, engine_id, head, now), notes
    )


def _signed_in(
    book: BookFold,
    sent: list[_Sent],
    epoch: int,
    request: v1.RegisterWorkersRequest,
    now: Instant,
    before: list[Op],
    after: list[Op],
    notes: tuple[Note, ...],
) -> Decision[v1.RegisterWorkersResponse]:
    engine_id = sent[0].record.engine_id
    lease = grant(book, request.lease, engine_id, epoch, now)
    stamp = timestamp(now.unix_s)
    workers = [
        book.worker_put(
            engine_id,
            slot_key(item.record.slot),
            stored_worker(
                item.record,
                item.digest,
                item.state,
                epoch,
                lease.lease_id,
                request.sequence,
                stamp,
            ),
        )
        for item in sent
        if not item.repeats
    ]
    digests = [item.digest for item in sent]

    def reply(revision: int) -> v1.RegisterWorkersResponse:
        return v1.RegisterWorkersResponse(
            lease=lease.message, epoch=epoch, revision=revision, record_digests=digests
        )

    ops = (*lease.ops, *before, *workers, *after)
    expired = {*lease.expired}
    for item in sent:
        if _succeeds(item):
            assert item.state is not None
            expired |= {*taken_for_dead(book, item.state.stored.lease_id)}
    return Decision(
        Txn(ops), reply, notes, leases=(lease.lease_id,), expired=tuple(sorted(expired))
    )


def _compare(
    book: BookFold, engine: EngineState, record: v1.WorkerRecord, sequence: int, now: Instant
) -> _Sent:
    """Whether a write may have its slot, and whether it repeats the last one.

    Raises:
        Conflict: Another live holder has the slot.
        Refused: The sequence is behind, or was used for another record.
    """
    digest = record_digest(record)
    state = current_slot(engine, record)
    if state is None:
        return _Sent(record, digest, None, False)
    boot_id, slot = record.process.boot_id, slot_key(record.slot)
    last = last_sequence(state.stored.holders, boot_id)
    holder = slot_holder(state)
    if state.live and holder != boot_id:
        held = slot_held(book, engine, slot_text(slot), holder, state.stored.lease_id, boot_id, now)
        if held is not None:
            raise held
    if not (state.live and holder == boot_id):
        if last and sequence <= last:
            raise refuse_stale(boot_id, sequence, last, slot, closed=True)
        return _Sent(record, digest, state, False)
    if sequence < last:
        raise refuse_stale(boot_id, sequence, last, slot, closed=False)
    if sequence == last and (digest != state.stored.record_digest or state.stored.asleep):
        raise refuse_reused(boot_id, sequence, slot_text(slot))
    return _Sent(record, digest, state, sequence == last)


def _succeeds_lapsed(book: BookFold, item: _Sent) -> bool:
    """Whether a record takes its slot from another process whose lease ran out
    and has not been swept yet."""
    return _succeeds(item) and item.state is not None and ran_out(book, item.state.stored.lease_id)


def _succeeds(item: _Sent) -> bool:
    """Whether a record takes its slot from another process that is dead and has not
    been swept yet."""
    state = item.state
    return state is not None and state.live and slot_holder(state) != item.record.process.boot_id


def _first_reply(
    book: BookFold, repeated: list[SlotState], digests: list[bytes], epoch: int, now: Instant
) -> Decision[v1.RegisterWorkersResponse]:
    last = max(repeated, key=lambda state: state.write_revision)
    leases = {state.stored.lease_id: None for state in repeated}
    kept = {lease_id: kept_lease(book, lease_id, now) for lease_id in leases}
    first = v1.RegisterWorkersResponse(
        lease=kept[last.stored.lease_id],
        epoch=epoch,
        revision=last.write_revision,
        record_digests=digests,
    )
    return Decision(None, lambda _: first, leases=tuple(leases))


def update(
    book: BookFold, request: v1.UpdateWorkerRequest, now: Instant
) -> Decision[v1.UpdateWorkerResponse]:
    """Changes a record, or withdraws its payload."""
    check_sequence(request.sequence)
    sent = request.record
    engine = current_engine(book, sent.engine_id, sent.generation, request.epoch)
    if not sent.HasField("slot"):
        raise BadRecord(
            "record.slot is absent: a change names the slot it is for",
            metadata={"field": "record.slot", "value": None, "rule": "slot is required"},
        )
    check_slot(sent.slot, engine.head.layout)
    slot, where = slot_key(sent.slot), slot_text(slot_key(sent.slot))
    boot_id = check_id("record.process.boot_id", sent.process.boot_id)
    state = current_slot(engine, sent)
    holder = slot_holder(state) if state is not None and state.live else ""
    if state is None or holder != boot_id:
        last = last_sequence(state.stored.holders, boot_id) if state is not None else 0
        if last and request.sequence <= last:
            raise refuse_stale(boot_id, request.sequence, last, slot, closed=True)
        raise NotFound(
            f"{boot_id} does not hold {where} of {engine.engine_id}"
            + (f", {holder} does" if holder else ": register first"),
            reason=Reason.WORKER_NOT_FOUND,
            metadata={
                "engine_id": engine.engine_id,
                "slot": where,
                "boot_id": boot_id,
                "holder": holder,
            },
        )
    record = _changed_record(book, request, engine, state)
    digest = record_digest(record)
    last = last_sequence(state.stored.holders, boot_id)
    epoch = engine.head.epoch
    if request.sequence < last:
        raise refuse_stale(boot_id, request.sequence, last, slot, closed=False)
    if request.sequence == last:
        if digest != state.stored.record_digest or state.stored.asleep != request.withdraw_payload:
            raise refuse_reused(boot_id, last, where)
        first = v1.UpdateWorkerResponse(
            epoch=epoch, revision=state.write_revision, record_digest=digest
        )
        return Decision(None, lambda _: first)
    check_size(engine.engine_id, engine.bytes, record.ByteSize() - state.size)
    stored = stored_worker(
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
    if engine.unsaved:
        ops.append(book.head_put(engine.engine_id, copy_head(engine, visible_at=None)))
    ops.append(book.worker_put(engine.engine_id, slot, stored))

    def reply(revision: int) -> v1.UpdateWorkerResponse:
        return v1.UpdateWorkerResponse(epoch=epoch, revision=revision, record_digest=digest)

    return Decision(Txn(tuple(ops)), reply)


def _changed_record(
    book: BookFold, request: v1.UpdateWorkerRequest, engine: EngineState, state: SlotState
) -> v1.WorkerRecord:
    if request.withdraw_payload:
        record = v1.WorkerRecord()
        record.CopyFrom(state.stored.record)
        record.handshake.payload = b""
        return record
    check_record(request.record, book.namespace)
    record = normal(book, request.record)
    check_declared(record, engine.head)
    return record
