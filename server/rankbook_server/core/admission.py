"""Which start a write belongs to, and whose turn it is: the checks that every
write passes first (fencing, one holder a slot, order per holder)."""

from __future__ import annotations

from collections.abc import Iterable

from rankbook import v1
from rankbook.errors import (
    BadRequest,
    Conflict,
    Fenced,
    NotFound,
    Overloaded,
    Reason,
    Refused,
)
from rankbook.limits import check_id
from rankbook_server.core.decision import Instant
from rankbook_server.core.engine import EngineState
from rankbook_server.core.fold import BookFold
from rankbook_server.core.keys import SlotKey, slot_text

__all__ = [
    "admit",
    "check_room",
    "check_sequence",
    "current_engine",
    "holders_with",
    "known_engine",
    "last_sequence",
    "next_epoch",
    "refuse_reused",
    "refuse_stale",
    "slot_held",
]

_MAX_HOLDERS = 8


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


def known_engine(book: BookFold, engine_id: str) -> EngineState:
    """An engine that readers may see.

    Raises:
        BadRequest: The id is malformed.
        NotFound: The engine is unknown.
    """
    engine = book.engines.get(check_id("engine_id", engine_id))
    if engine is None or not engine.visible:
        raise NotFound(
            f"engine {engine_id} is not in namespace {book.namespace}",
            metadata={"engine_id": engine_id, "namespace": book.namespace},
        )
    return engine


def check_room(book: BookFold, engine: EngineState | None) -> None:
    """Refuses an engine over the namespace's bound.

    Raises:
        Overloaded: It is new, and the namespace is full.
    """
    if engine is None and len(book.engines) >= book.limits.max_engines:
        raise Overloaded(
            f"namespace {book.namespace} holds {len(book.engines)} engines, its bound: raise "
            "--max-engines, or wait until tombstones are dropped",
            reason=Reason.TOO_MANY_ENGINES,
            metadata={"limit": "engines", "bound": book.limits.max_engines},
        )


def current_engine(book: BookFold, engine_id: str, generation: str, told: int) -> EngineState:
    """The engine of a write that needs a start with workers.

    Raises:
        BadRequest: An id is malformed.
        NotFound: The engine is unknown, or this start has no worker yet.
        Fenced: The generation is not the current one.
    """
    check_id("generation", generation)
    engine = known_engine(book, engine_id)
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
    """The error for a write that comes too late.

    Args:
        boot_id: The holder.
        sequence: Its number.
        last: The number it is not above.
        slot: The slot; None for the core's record.
        closed: The holder's record was taken out since.
    """
    where = f" for {slot_text(slot)}" if slot is not None else ""
    why = "the records were taken out after it" if closed else "a later write was taken"
    return Refused(
        f"sequence {sequence} of {boot_id}{where} is not above {last}: {why}; a returning holder "
        "writes under a higher sequence",
        metadata={"boot_id": boot_id, "sequence": sequence, "last_sequence": last},
    )


def refuse_reused(boot_id: str, sequence: int, what: str) -> Refused:
    """The error for a number that another write has used."""
    return Refused(
        f"sequence {sequence} of {boot_id} for {what} was used for another write: a changed record "
        "needs a higher sequence",
        reason=Reason.SEQUENCE_REUSED,
        metadata={"boot_id": boot_id, "sequence": sequence, "slot": what},
    )


def last_sequence(holders: Iterable[v1.StoredHolder], boot_id: str) -> int:
    """A holder's last accepted sequence; zero for one that is not known."""
    return next((h.sequence for h in holders if h.boot_id == boot_id), 0)


def holders_with(
    holders: Iterable[v1.StoredHolder], boot_id: str, sequence: int
) -> list[v1.StoredHolder]:
    """The holders with this one last; the oldest beyond the bound are forgotten."""
    others = [h for h in holders if h.boot_id != boot_id]
    return [*others[1 - _MAX_HOLDERS :], v1.StoredHolder(boot_id=boot_id, sequence=sequence)]


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
    if entry is None or not entry.lives(now.mono_s):
        return None
    left = entry.left_s(now.mono_s)
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
