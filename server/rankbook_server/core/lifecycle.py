"""Decisions on whole engines: starts, drains, evictions."""

from __future__ import annotations

from rankbook import v1
from rankbook.convert import seconds, timestamp
from rankbook.errors import BadRequest, Fenced, Gone, Reason
from rankbook.limits import MAX_ID_CHARS, check_id, check_text
from rankbook_server.core.admission import admit, check_room, known_engine
from rankbook_server.core.decision import Decision, Instant, Note
from rankbook_server.core.fold import BookFold
from rankbook_server.core.heads import add_start, copy_head
from rankbook_server.core.ops import Txn

__all__ = ["begin", "drain", "evict"]

_MAX_DRAIN_S = 365 * 86_400.0


def begin(
    book: BookFold, request: v1.BeginGenerationRequest, now: Instant
) -> Decision[v1.BeginGenerationResponse]:
    """Reserves the next epoch for a start; its first worker makes it current."""
    engine_id = check_id("engine_id", request.engine_id)
    generation = check_id("generation", request.generation)
    engine = book.engines.get(engine_id)
    epoch = admit(book, engine, engine_id, generation, 0)
    if engine is not None and any(s.generation == generation for s in engine.head.starts):
        return Decision(
            None, lambda revision: v1.BeginGenerationResponse(epoch=epoch, revision=revision)
        )
    check_room(book, engine)
    head = copy_head(engine, visible_at=None)
    if engine is None:
        head.change_time.CopyFrom(timestamp(now.unix_s))
    add_start(head, generation, epoch)
    return Decision(
        Txn((book.head_put(engine_id, head),)),
        lambda revision: v1.BeginGenerationResponse(epoch=epoch, revision=revision),
    )


def drain(
    book: BookFold, request: v1.DrainEngineRequest, now: Instant
) -> Decision[v1.DrainEngineResponse]:
    """Sets or clears the drain flag. The reply's outcome is the registry's, which
    knows the reported transfers."""
    check_text("reason", request.reason)
    check_text("requested_by", request.requested_by, MAX_ID_CHARS)
    deadline_s = seconds(request.deadline)
    if not 0 <= deadline_s <= _MAX_DRAIN_S:
        rule = f"0 to {_MAX_DRAIN_S:.0f} s, zero for no end"
        raise BadRequest(
            f"deadline is {deadline_s:g} s: how long transfers are waited for, {rule}",
            metadata={"field": "deadline", "value": deadline_s, "rule": rule},
        )
    engine = known_engine(book, request.engine_id)
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
    engine = known_engine(book, request.engine_id)
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
    # The fence on a start that is gone already is nothing readers see.
    seen = removed > 0 or engine.head.core.live
    was = engine.revision
    head = copy_head(engine, visible_at=now if seen else None)
    head.evicted = True
    if seen:
        head.eviction.reason = request.reason
        head.eviction.requested_by = request.requested_by
    # An operator cannot know either that a process has ended.
    head.lapsed = head.lapsed or removed > 0
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
        lambda revision: v1.EvictEngineResponse(
            removed=removed, revision=revision if seen else was
        ),
        (note,),
    )
