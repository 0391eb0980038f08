"""The decision to seal: the engine core and the book saw the same engine."""

from __future__ import annotations

from rankbook import v1
from rankbook.convert import timestamp
from rankbook.errors import BadRequest, Incomplete, Reason, Refused, SealMismatch
from rankbook.limits import check_core, check_slot
from rankbook_server.core.admission import (
    check_sequence,
    current_engine,
    holders_with,
    last_sequence,
    refuse_reused,
    refuse_stale,
    slot_held,
)
from rankbook_server.core.decision import Decision, Instant, Note
from rankbook_server.core.engine import EngineState
from rankbook_server.core.fold import BookFold
from rankbook_server.core.heads import copy_head
from rankbook_server.core.keys import SlotKey, slot_key, slot_text
from rankbook_server.core.leases import (
    Granted,
    extend,
    grant,
    kept_lease,
    lease_message,
    taken_for_dead,
)
from rankbook_server.core.ops import Txn
from rankbook_server.core.records import normal_core, slot_holder
from rankbook_server.core.slots import seal_digest, seal_piece

__all__ = ["seal"]

_SHOWN = 16


def seal(
    book: BookFold, request: v1.SealEngineRequest, now: Instant
) -> Decision[v1.SealEngineResponse]:
    """Turns COMPLETE into READY where the core's view equals the book's."""
    check_sequence(request.sequence)
    check_core(request.core)
    core = normal_core(request.core)
    engine = current_engine(book, request.engine_id, request.generation, request.epoch)
    head, boot_id = engine.head, core.process.boot_id
    seen = _seen(request, engine)
    digest = seal_digest([seal_piece(slot, *seen[slot]) for slot in sorted(seen)])
    stands = head.seal.number > 0 and head.seal.digest == digest and head.seal.boot_id == boot_id
    same_core = head.core.live and head.core.record == core
    if _has_turn(book, engine, boot_id, request.sequence, now):
        if not (stands and same_core):
            raise refuse_reused(boot_id, request.sequence, "the core's record")
        lease = kept_lease(book, head.core.lease_id, now)
        written = head.core.write_revision or engine.head_revision
        first = v1.SealEngineResponse(
            seal=head.seal, epoch=head.epoch, revision=written, lease=lease
        )
        return Decision(None, lambda _: first, leases=(head.core.lease_id,))
    _check_whole(engine)
    _check_same(engine, seen)

    if request.HasField("lease"):
        granted = grant(book, request.lease, engine.engine_id, head.epoch, now)
    else:
        # A tool seals an engine without a core: the first worker keeps its record.
        lease_id = engine.live[engine.order()[0]].stored.lease_id
        entry = book.leases[lease_id]
        if entry.lives(now.mono_s):
            extend(book, entry, now)
        granted = Granted(lease_id, (), lease_message(lease_id, entry.ttl_s))
    # The core that returns as it was, under another lease, is no news.
    news = not (stands and same_core)
    told = copy_head(engine, visible_at=now if news else None)
    if not stands:
        told.seal.CopyFrom(
            v1.Seal(
                number=head.seal.number + 1,
                digest=digest,
                time=timestamp(now.unix_s),
                boot_id=boot_id,
            )
        )
    told.core.CopyFrom(
        v1.StoredCore(
            record=core,
            lease_id=granted.lease_id,
            holders=holders_with(head.core.holders, boot_id, request.sequence),
            live=True,
            borrowed=not request.HasField("lease"),
        )
    )
    note = Note(
        "engine_sealed",
        {
            "engine_id": engine.engine_id,
            "epoch": head.epoch,
            "seal": told.seal.number,
            "by": boot_id,
            "workers": len(seen),
        },
    )

    def reply(revision: int) -> v1.SealEngineResponse:
        return v1.SealEngineResponse(
            seal=told.seal, epoch=head.epoch, revision=revision, lease=granted.message
        )

    ops = (*granted.ops, book.head_put(engine.engine_id, told))
    expired = granted.expired
    if head.core.live and not head.core.borrowed and head.core.record.process.boot_id != boot_id:
        expired += taken_for_dead(book, head.core.lease_id)
    notes = (note,) if news else ()
    return Decision(Txn(ops), reply, notes, leases=(granted.lease_id,), expired=expired)


def _check_whole(engine: EngineState) -> None:
    missing = engine.missing()
    if missing or engine.asleep:
        lacking = missing or sorted(engine.asleep)
        names = ", ".join(slot_text(slot) for slot in lacking[:_SHOWN])
        what = "asleep" if not missing else "missing"
        raise Incomplete(
            f"engine {engine.engine_id} has {len(engine.live)} of {engine.declared} ranks, {what}: "
            f"{names}; a seal needs every rank",
            metadata={
                "engine_id": engine.engine_id,
                "present": len(engine.live),
                "declared": engine.declared,
                what: names,
            },
        )
    problems = engine.errors()
    if problems:
        raise Refused(
            f"engine {engine.engine_id} is INVALID: {problems[0].message}",
            reason=Reason.ENGINE_INVALID,
            metadata={"engine_id": engine.engine_id, "problem": problems[0].reason},
        )


def _seen(request: v1.SealEngineRequest, engine: EngineState) -> dict[SlotKey, tuple[str, bytes]]:
    seen: dict[SlotKey, tuple[str, bytes]] = {}
    for item in request.slots:
        if not item.HasField("slot"):
            raise BadRequest(
                "slots.slot is absent: a seal names every slot",
                metadata={"field": "slots.slot", "value": None, "rule": "slot is required"},
            )
        check_slot(item.slot, engine.head.layout, "slots.slot")
        slot = slot_key(item.slot)
        if slot in seen:
            raise BadRequest(
                f"{slot_text(slot)} is in the seal twice: two workers answered for one rank",
                metadata={"field": "slots", "value": slot_text(slot), "rule": "every slot once"},
            )
        seen[slot] = (item.boot_id, item.record_digest)
    return seen


def _check_same(engine: EngineState, seen: dict[SlotKey, tuple[str, bytes]]) -> None:
    differences = []
    for slot, state in engine.live.items():
        boot_id = slot_holder(state)
        if slot not in seen:
            differences.append(f"{slot_text(slot)}: in the book, not seen by the core")
        elif seen[slot][0] != boot_id:
            differences.append(
                f"{slot_text(slot)}: held by {boot_id} in the book, by {seen[slot][0]} for the core"
            )
        elif seen[slot][1] != state.stored.record_digest:
            differences.append(f"{slot_text(slot)}: another record of {boot_id} in the book")
    if differences:
        shown = "; ".join(sorted(differences)[:_SHOWN])
        raise SealMismatch(
            f"the core of {engine.engine_id} saw another engine than the book in "
            f"{len(differences)} slots: {shown}",
            metadata={
                "engine_id": engine.engine_id,
                "count": len(differences),
                "differences": shown,
            },
        )


def _has_turn(
    book: BookFold, engine: EngineState, boot_id: str, sequence: int, now: Instant
) -> bool:
    """Whether a seal repeats the core's last one; the core's record has one
    holder, whose writes are ordered, as a slot has.

    Raises:
        Conflict: Another live core holds the record.
        Refused: The sequence is behind.
    """
    core = engine.head.core
    holder = core.record.process.boot_id
    last = last_sequence(core.holders, boot_id)
    if core.live and holder == boot_id:
        if sequence < last:
            raise refuse_stale(boot_id, sequence, last, None, closed=False)
        return sequence == last
    if core.live and not core.borrowed:
        held = slot_held(book, engine, "the core's record", holder, core.lease_id, boot_id, now)
        if held is not None:
            raise held
    if last and sequence <= last:
        raise refuse_stale(boot_id, sequence, last, None, closed=True)
    return False
