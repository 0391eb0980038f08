"""Forgetting: slots of past starts, tombstones, reservations nobody took up."""

from __future__ import annotations

from rankbook import v1
from rankbook_server.core.decision import Decision, Instant, maintenance
from rankbook_server.core.engine import EngineState
from rankbook_server.core.fold import BookFold
from rankbook_server.core.keys import engine_key, worker_key
from rankbook_server.core.ops import MAX_TXN_OPS, Delete, Op

__all__ = ["sweep"]

_SWEPT_AT_ONCE = MAX_TXN_OPS - 8


def sweep(book: BookFold, now: Instant) -> Decision[None] | None:
    """The next piece of what may be forgotten: slots of past starts, then
    tombstones and unused reservations past their time, oldest first."""
    for engine_id in sorted(book.stale):
        ops = _stale_ops(book, book.engines[engine_id])
        if ops:
            return maintenance(ops)
        book.stale.discard(engine_id)
    return _drop(book, _dead(book, now))


def _stale_ops(book: BookFold, engine: EngineState) -> list[Op]:
    """Takes the records of past and evicted starts out of the store."""
    ops: list[Op] = []
    for slot, state in engine.slots.items():
        if state.epoch != engine.head.epoch:
            ops.append(Delete(worker_key(book.namespace, engine.engine_id, slot)))
        elif engine.head.evicted and state.live:
            # Stays as an empty slot, so that a watcher that was away hears of it.
            closed = v1.StoredWorker(
                version=1,
                change_revision=engine.revision,
                epoch=state.epoch,
                holders=state.stored.holders,
                change_time=engine.change_time,
            )
            ops.append(book.worker_put(engine.engine_id, slot, closed))
        if len(ops) == _SWEPT_AT_ONCE:
            break
    return ops


def _dead(book: BookFold, now: Instant) -> list[EngineState]:
    """Tombstones, and starts that never got a worker, past their time, oldest first."""
    cut = now.unix_s - book.limits.tombstone_ttl_s
    over = len(book.tombstones) - book.limits.max_tombstones
    ages = sorted((_dead_since(book.engines[name]), name) for name in book.tombstones | book.unused)
    found = []
    for since, name in ages:
        dead = name in book.tombstones
        if since <= cut or (dead and over > 0):
            found.append(book.engines[name])
        over -= dead
    return found


def _dead_since(engine: EngineState) -> float:
    head = engine.head
    time = head.gone_time if head.HasField("gone_time") else head.change_time
    return time.seconds + time.nanos / 1e9


def _drop(book: BookFold, dead: list[EngineState]) -> Decision[None] | None:
    """Drops as many as fit a transaction; a large one goes in several."""
    ops: list[Op] = []
    facts = v1.StoredNamespace()
    facts.CopyFrom(book.facts)
    for engine in dead:
        slots = sorted(engine.slots)
        if len(ops) + len(slots) >= _SWEPT_AT_ONCE:
            if not ops:
                return maintenance(
                    Delete(worker_key(book.namespace, engine.engine_id, slot))
                    for slot in slots[:_SWEPT_AT_ONCE]
                )
            break
        facts.epoch_floor = max(facts.epoch_floor, engine.head.last_epoch)
        if engine.visible:
            facts.horizon_revision = max(facts.horizon_revision, engine.revision)
        ops += [Delete(worker_key(book.namespace, engine.engine_id, slot)) for slot in slots]
        ops.append(Delete(engine_key(book.namespace, engine.engine_id)))
    if not ops:
        return None
    return maintenance([*ops, book.facts_put(facts)])
