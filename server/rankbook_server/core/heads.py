"""Heads to write: an engine's stored head, changed or begun anew."""

from __future__ import annotations

from rankbook import v1
from rankbook.convert import timestamp
from rankbook_server.core.decision import Instant, Note
from rankbook_server.core.engine import EngineState
from rankbook_server.core.fold import BookFold
from rankbook_server.core.ops import Op

__all__ = ["add_start", "begun_head", "copy_head", "heir_ops"]

_MAX_STARTS = 32
_MAX_RETIRED = 4
_MAX_HEIRS = 16
_HEIRS_BYTES = 128 * 1024
# They go with a registration of up to 1 MiB, which must not be refused for them.


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


def begun_head(
    engine: EngineState | None,
    first: v1.WorkerRecord,
    epoch: int,
    now: Instant,
) -> tuple[v1.StoredEngine, tuple[Note, ...]]:
    """The head of a start with its first worker, which retires the one before."""
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


def heir_ops(book: BookFold, engine_id: str, head: v1.StoredEngine, now: Instant) -> list[Op]:
    """Tells the tombstones whose place a start takes: those of its group, role and
    DP rank that have no successor yet."""
    ops: list[Op] = []
    size = 0
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
            v1.Successor(engine_id=engine_id, epoch=head.epoch, generation=head.generation)
        )
        put = book.head_put(other_id, told)
        size += len(put.value)
        if len(ops) == _MAX_HEIRS or size > _HEIRS_BYTES:
            break
        ops.append(put)
    return ops
