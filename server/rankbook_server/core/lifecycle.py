"""Decisions on whole engines: starts, drains, evictions, expiry, sweeping."""

from __future__ import annotations

from rankbook import v1
from rankbook.convert import seconds, timestamp
from rankbook.errors import BadRequest, Fenced, Gone, NotFound, Overloaded, Reason
from rankbook.limits import MAX_ID_CHARS, check_id, check_text
from rankbook_server.core.admission import admit
from rankbook_server.core.decision import Decision, Instant, Note, maintenance
from rankbook_server.core.engine import EngineState
from rankbook_server.core.fold import BookFold
from rankbook_server.core.keys import engine_key, worker_key
from rankbook_server.core.ops import MAX_TXN_OPS, Delete, Op, Txn
from rankbook_server.core.writes import add_start, copy_head, lease_end_ops

__all__ = ["begin", "drain", "evict", "expire", "sweep"]

_SWEPT_AT_ONCE = MAX_TXN_OPS - 8


def begin(
    book: BookFold, request: v1.BeginGenerationRequest, now: Instant
) -> Decision[v1.BeginGenerationResponse]:
    """Reserves the next epoch for a start; its first worker makes it current."""
    engine_id = check_id("engine_id", request.engine_id)
    generation = check_id("generation", request.generation)
    engine = book.engines.get(engine_id)
    epoch = admit(book, engine, engine_id, generation, 0)
    if engine is not None:
        if any(start.generation == generation for start in engine.head.starts):
            return Decision(
                None, lambda revision: v1.BeginGenerationResponse(epoch=epoch, revision=revision)
            )
    elif len(book.engines) >= book.limits.max_engines:
        raise Overloaded(
            f"namespace {book.namespace} holds {len(book.engines)} engines, its bound",
            reason=Reason.TOO_MANY_ENGINES,
            metadata={"limit": "engines", "bound": book.limits.max_engines},
        )
    head = copy_head(engine, visible_at=None)
    if engine is None:
        head.change_time.CopyFrom(timestamp(now.unix_s))
    add_start(head, generation, epoch)
    return Decision(
        Txn((book.head_put(engine_id, head),)),
        lambda revision: v1.BeginGenerationResponse(epoch=epoch, revision=revision),
    )


def _known(book: BookFold, engine_id: str) -> EngineState:
    engine = book.engines.get(check_id("engine_id", engine_id))
    if engine is None or not engine.visible:
        raise NotFound(
            f"engine {engine_id} is not in namespace {book.namespace}",
            metadata={"engine_id": engine_id, "namespace": book.namespace},
        )
    return engine


def drain(
    book: BookFold, request: v1.DrainEngineRequest, now: Instant
) -> Decision[v1.DrainEngineResponse]:
    """Sets or clears the drain flag. The reply's outcome is the registry's, which
    knows the reported transfers."""
    check_text("reason", request.reason)
    check_text("requested_by", request.requested_by, MAX_ID_CHARS)
    deadline_s = seconds(request.deadline)
    if deadline_s < 0:
        raise BadRequest(
            f"deadline is {deadline_s:g} s: how long transfers are waited for, zero for no end",
            metadata={"field": "deadline", "value": deadline_s, "rule": "zero or above"},
        )
    engine = _known(book, request.engine_id)
    if not engine.live and not request.undo:
        raise Gone(
            f"engine {engine.engine_id} is gone: there is nothing to drain",
            metadata={"engine_id": engine.engine_id},
        )
    draining = engine.head.HasField("drain")
    wanted = v1.Drain(reason=request.reason, requested_by=request.requested_by)
    if request.undo == (not draining) and (
        request.undo
        or (
            wanted.reason == engine.head.drain.reason
            and wanted.requested_by == engine.head.drain.requested_by
            and not deadline_s
        )
    ):
        state, revision = engine.state(), engine.revision
        return Decision(None, lambda _: v1.DrainEngineResponse(state=state, revision=revision))
    head = copy_head(engine, visible_at=now)
    if request.undo:
        head.ClearField("drain")
    else:
        started = engine.head.drain.start_time if draining else timestamp(now.unix_s)
        wanted.start_time.CopyFrom(started)
        if deadline_s:
            wanted.deadline.CopyFrom(timestamp(now.unix_s + deadline_s))
        head.drain.CopyFrom(wanted)
    note = Note(
        "drain_cleared" if request.undo else "drain_set",
        {
            "engine_id": engine.engine_id,
            "epoch": head.epoch,
            "by": request.requested_by,
            "why": request.reason,
        },
    )

    def reply(revision: int) -> v1.DrainEngineResponse:
        return v1.DrainEngineResponse(state=engine.state(), revision=revision)

    return Decision(Txn((book.head_put(engine.engine_id, head),)), reply, (note,))


def evict(
    book: BookFold, request: v1.EvictEngineRequest, now: Instant
) -> Decision[v1.EvictEngineResponse]:
    """Takes an engine out and fences its generation."""
    check_text("reason", request.reason)
    check_text("requested_by", request.requested_by, MAX_ID_CHARS)
    engine = _known(book, request.engine_id)
    if request.epoch and request.epoch != engine.head.epoch:
        raise Fenced(
            f"engine {engine.engine_id} is at epoch {engine.head.epoch} and epoch {request.epoch} "
            "was to be evicted: it has started anew since",
            reason=Reason.EPOCH_FENCED,
            metadata={
                "engine_id": engine.engine_id,
                "epoch": request.epoch,
                "current_epoch": engine.head.epoch,
                "current_generation": engine.head.generation,
            },
        )
    if engine.head.evicted:
        revision = engine.revision
        return Decision(None, lambda _: v1.EvictEngineResponse(revision=revision))
    removed = len(engine.live)
    head = copy_head(engine, visible_at=now)
    head.evicted = True
    head.ClearField("core")
    if not head.HasField("gone_time"):
        head.gone_time.CopyFrom(timestamp(now.unix_s))
    note = Note(
        "engine_evicted",
        {
            "engine_id": engine.engine_id,
            "epoch": head.epoch,
            "by": request.requested_by,
            "why": request.reason,
            "removed": removed,
        },
    )
    return Decision(
        Txn((book.head_put(engine.engine_id, head),)),
        lambda revision: v1.EvictEngineResponse(removed=removed, revision=revision),
        (note,),
    )


def expire(book: BookFold, now: Instant) -> Decision[None] | None:
    """The next piece of what ran out: at most one lease a call."""
    if book.earliest > now.mono_s:
        return None
    earliest, due = float("inf"), None
    for entry in book.leases.values():
        if entry.deadline < earliest:
            earliest, due = entry.deadline, entry
    book.earliest = earliest
    if due is None or due.deadline > now.mono_s:
        return None
    ops, removed = lease_end_ops(book, due.lease_id, now)
    note = Note(
        "lease_expired",
        {
            "lease_id": due.lease_id,
            "removed": removed,
            "engines": sorted({engine_id for engine_id, _ in due.holds})[:8],
        },
    )
    return maintenance(ops, (note,) if removed else ())


def sweep(book: BookFold, now: Instant) -> Decision[None] | None:
    """The next piece of what may be forgotten: slots of past starts, then
    tombstones and unused reservations past their time."""
    for engine_id in sorted(book.stale):
        engine = book.engines[engine_id]
        old = [
            slot
            for slot, state in engine.slots.items()
            if state.epoch != engine.head.epoch or engine.head.evicted
        ]
        if old:
            return maintenance(
                Delete(worker_key(book.namespace, engine_id, slot))
                for slot in sorted(old)[:_SWEPT_AT_ONCE]
            )
        book.stale.discard(engine_id)
    dead = _oldest_dead(book, now)
    if dead is None:
        return None
    slots = sorted(dead.slots)
    ops: list[Op] = [
        Delete(worker_key(book.namespace, dead.engine_id, slot)) for slot in slots[:_SWEPT_AT_ONCE]
    ]
    if len(slots) > _SWEPT_AT_ONCE:
        return maintenance(ops)
    facts = v1.StoredNamespace()
    facts.CopyFrom(book.facts)
    facts.epoch_floor = max(facts.epoch_floor, dead.head.last_epoch)
    facts.horizon_revision = max(facts.horizon_revision, dead.revision)
    ops += [Delete(engine_key(book.namespace, dead.engine_id)), book.facts_put(facts)]
    return maintenance(ops)


def _oldest_dead(book: BookFold, now: Instant) -> EngineState | None:
    """A tombstone, or a start that never got a worker, past its time."""
    cut = now.unix_s - book.limits.tombstone_ttl_s
    over = len(book.tombstones) - book.limits.max_tombstones
    oldest: tuple[float, str] | None = None
    for engine_id in book.tombstones | book.unused:
        head = book.engines[engine_id].head
        time = head.gone_time if head.HasField("gone_time") else head.change_time
        at = time.seconds + time.nanos / 1e9
        if oldest is None or (at, engine_id) < oldest:
            oldest = (at, engine_id)
    if oldest is None or (oldest[0] > cut and over <= 0):
        return None
    return book.engines[oldest[1]]
