"""The decision to seal: the engine core and the book saw the same engine."""

from __future__ import annotations

from collections.abc import Callable

from rankbook import v1
from rankbook.convert import timestamp
from rankbook.errors import BadRequest, Incomplete, Reason, Refused, SealMismatch
from rankbook.limits import check_core, check_slot
from rankbook_server.core.admission import (
    Granted,
    check_sequence,
    current_engine,
    grant,
    lease_message,
    refuse_stale,
    slot_held,
)
from rankbook_server.core.decision import Decision, Instant, Note
from rankbook_server.core.engine import EngineState, seal_digest, seal_piece, slot_text
from rankbook_server.core.fold import BookFold
from rankbook_server.core.keys import SlotKey
from rankbook_server.core.ops import Op, Txn
from rankbook_server.core.writes import copy_head, slot_key

__all__ = ["seal"]

_SHOWN = 16


def seal(
    book: BookFold, request: v1.SealEngineRequest, now: Instant
) -> Decision[v1.SealEngineResponse]:
    """Turns COMPLETE into READY where the core's view equals the book's."""
    check_sequence(request.sequence)
    check_core(request.core)
    engine = current_engine(book, request.engine_id, request.generation, request.epoch)
    boot_id = request.core.process.boot_id
    _check_whole(engine)
    seen = _seen(request, engine)
    _check_same(engine, seen)
    _check_core_slot(book, engine, boot_id, request.sequence, now)

    head = engine.head
    if request.HasField("lease"):
        lease = grant(book, request.lease, engine.engine_id, head.epoch, now)
    else:
        # A tool that seals an engine without a core: the engine's first worker
        # keeps the core's record.
        lease_id = engine.live[engine.order()[0]].stored.lease_id
        lease = Granted(lease_id, book.leases[lease_id].stored, False)
    digest = seal_digest([seal_piece(slot, *seen[slot]) for slot in sorted(seen)])
    stands = head.seal.number and head.seal.digest == digest and head.seal.boot_id == boot_id
    same_core = (
        head.core.live and head.core.record == request.core and head.core.lease_id == lease.lease_id
    )
    if stands and same_core and request.sequence == head.core.sequence:
        written = head.core.write_revision or engine.head_revision
        reply = _reply(book, head.seal, head.epoch, lease)
        return Decision(None, lambda _: reply(written))

    # The core that returns as it was, under another lease, is no news.
    news = not (stands and head.core.live and head.core.record == request.core)
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
            record=request.core, lease_id=lease.lease_id, sequence=request.sequence, live=True
        )
    )
    ops: list[Op] = []
    if lease.write:
        ops.append(book.lease_put(lease.lease_id, lease.stored))
    ops.append(book.head_put(engine.engine_id, told))
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
    return Decision(Txn(tuple(ops)), _reply(book, told.seal, head.epoch, lease), (note,))


def _reply(
    book: BookFold, seal_: v1.Seal, epoch: int, lease: Granted
) -> Callable[[int], v1.SealEngineResponse]:
    def reply(revision: int) -> v1.SealEngineResponse:
        return v1.SealEngineResponse(
            seal=seal_,
            epoch=epoch,
            revision=revision,
            lease=lease_message(book, lease.lease_id, lease.stored),
        )

    return reply


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
    problems = [p for p in engine.derive([]).problems if p.severity == v1.SEVERITY_ERROR]
    if problems:
        raise Refused(
            f"engine {engine.engine_id} is INVALID: {problems[0].message}",
            reason=Reason.ENGINE_INVALID,
            metadata={"engine_id": engine.engine_id, "problem": problems[0].reason},
        )


def _seen(request: v1.SealEngineRequest, engine: EngineState) -> dict[SlotKey, tuple[str, bytes]]:
    seen: dict[SlotKey, tuple[str, bytes]] = {}
    for item in request.slots:
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
        boot_id = state.stored.holders[-1].boot_id
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


def _check_core_slot(
    book: BookFold, engine: EngineState, boot_id: str, sequence: int, now: Instant
) -> None:
    """The core's record has one holder, whose writes are ordered (rules 5 and 6)."""
    core = engine.head.core
    holder = core.record.process.boot_id
    if holder == boot_id:
        if sequence < core.sequence:
            raise refuse_stale(boot_id, sequence, core.sequence, None, closed=False)
        return
    if core.live:
        held = slot_held(book, engine, "the core's record", holder, core.lease_id, boot_id, now)
        if held is not None:
            raise held
