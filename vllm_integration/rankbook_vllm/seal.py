"""What the engine core checks before it says that its engine is whole.

Every worker sends a `Note` of what it published along with its handshake
metadata. The engine core checks the notes among themselves (`check_grid`), then
against the book (`differences`), and seals what the book holds only where both
agree. Pure, and free of vLLM and torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rankbook import v1
from rankbook.convert import to_json, to_message, to_model
from rankbook.errors import BadRecord, Conflict, Incomplete, Reason, Refused
from rankbook.model import Layout, SealedSlot, Slot, Topology, WorkerRecord
from rankbook_vllm.record import Start

__all__ = [
    "Note",
    "Whole",
    "check_grid",
    "differences",
    "listed",
    "note_of",
    "sealed_slots",
    "slot_name",
    "slots_of",
]

_SHOWN = 16
"""Slots or differences named in one message; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Note:
    """What one worker tells its engine core. Survives pickling."""

    slot: Slot
    worker_rank: int
    """The worker's rank in the engine, as the executor counts."""
    start: Start
    record: bytes = b""
    """The published record without its payload, serialised; empty with `problem`."""
    record_digest: bytes = b""
    """SHA-256 of the whole record, as the book computes it."""
    payload_digest: bytes = b""
    """SHA-256 of the payload that was published."""
    problem: str = ""
    """Why the worker could not publish."""

    def published(self) -> WorkerRecord:
        """The record, without its payload."""
        return to_model(v1.WorkerRecord.FromString(self.record), WorkerRecord)


def note_of(record: WorkerRecord, worker_rank: int, start: Start) -> Note:
    """The note of a worker that publishes `record`."""
    message = to_message(record, v1.WorkerRecord)
    record_digest = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
    payload = message.handshake.payload
    message.handshake.ClearField("payload")
    return Note(
        slot=record.slot,
        worker_rank=worker_rank,
        start=start,
        record=message.SerializeToString(deterministic=True),
        record_digest=record_digest,
        payload_digest=hashlib.sha256(payload).digest(),
    )


@dataclass(frozen=True, slots=True)
class Whole:
    """An engine whose workers all answered, each for its own slot."""

    start: Start
    notes: tuple[Note, ...]
    """In slot order."""

    problems: tuple[str, ...] = ()
    """Why it cannot be sealed though everybody answered: a worker could not
    publish, or its connector serves something else than it published."""


def slot_name(slot: Slot) -> str:
    """A slot in words: "pp1 tp0", with the PCP rank where it is not 0."""
    pcp = f" pcp{slot.pcp_rank}" if slot.pcp_rank else ""
    return f"pp{slot.pp_rank}{pcp} tp{slot.tp_rank}"


def listed(items: Sequence[str]) -> str:
    """The first 16 of some names, and how many more there are."""
    more = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _grid(layout: Layout) -> Iterator[Slot]:
    for pp in range(layout.pp_size):
        for pcp in range(layout.pcp_size):
            for tp in range(layout.tp_size):
                yield Slot(pp, pcp, tp)


def _rank_of(slot: Slot, layout: Layout) -> int:
    return (slot.pp_rank * layout.pcp_size + slot.pcp_rank) * layout.tp_size + slot.tp_rank


def check_grid(
    notes: Mapping[tuple[int, int], Sequence[Note]],
    layout: Layout,
    served: Mapping[tuple[int, int], bytes],
) -> Whole:
    """Checks that every worker of the engine answered once, for its own slot.

    vLLM merges the workers' answers into one dictionary, in which a second
    answer under a key replaces the first. So a duplicate shows as a slot that
    is missing, together with an answer by a worker of another rank than its
    slot has.

    Args:
        notes: The notes that came under each (pp_rank, tp_rank) key.
        layout: The engine's sizes by the engine core's own configuration.
        served: What the connector itself serves its peers, by key; none where
            it has nothing to serve.

    Raises:
        BadRecord: A slot is outside the grid, came under another slot's key, or
            its worker declares other sizes.
        Conflict: Two workers claim one slot, or are of two starts.
        Incomplete: A slot's worker did not answer; `missing` lists them.
        Refused: The stages' layers overlap or leave a hole (ENGINE_INVALID).
    """
    slots: dict[Slot, Note] = {}
    grid = set(_grid(layout))
    for key, group in notes.items():
        for note in group:
            if note.slot not in grid:
                raise BadRecord(
                    f"a worker answered as {slot_name(note.slot)}, outside the grid of "
                    f"{layout.pp_size} x {layout.pcp_size} x {layout.tp_size} (pp x pcp x tp)",
                    metadata={"field": "slot", "value": slot_name(note.slot)},
                )
            # With PCP and DCP, vLLM counts the PCP ranks into the key's second part.
            if (note.slot.pp_rank, note.slot.tp_rank) != (key[0], key[1] % layout.tp_size):
                raise BadRecord(
                    f"the metadata under key {key} is of {slot_name(note.slot)}: "
                    "a worker's parallel groups and its answer disagree",
                    metadata={"field": "slot", "value": slot_name(note.slot), "key": str(key)},
                )
            known = slots.setdefault(note.slot, note)
            if known != note:
                raise _claimed_twice(note.slot, known.worker_rank, note.worker_rank)
    missing = sorted(grid - set(slots))
    if missing:
        for slot in sorted(slots):
            owner = _rank_of(slot, layout)
            if slots[slot].worker_rank != owner:
                raise _claimed_twice(slot, owner, slots[slot].worker_rank)
        raise Incomplete(
            f"{len(missing)} of {len(grid)} workers gave no handshake metadata: "
            f"{listed([slot_name(slot) for slot in missing])}; look for their errors in the log",
            metadata={"missing": listed([slot_name(slot) for slot in missing])},
        )
    ordered = tuple(slots[slot] for slot in sorted(slots))
    starts = {note.start.generation for note in ordered}
    if len(starts) > 1:
        raise Conflict(
            f"the workers are of {len(starts)} starts ({listed(sorted(starts))}): "
            "the broadcast of the generation token did not reach all of them",
            reason=Reason.IDENTITY_CONFLICT,
            metadata={"generations": listed(sorted(starts))},
        )
    _check_layers([note.published() for note in ordered if not note.problem], layout)
    problems = [f"{slot_name(note.slot)}: {note.problem}" for note in ordered if note.problem]
    problems += [
        f"key {key}: the connector serves other metadata than its worker published"
        for key, payload in served.items()
        if not _was_published(payload, notes.get(key, ()))
    ]
    return Whole(ordered[0].start, ordered, tuple(problems))


def _was_published(payload: bytes, notes: Sequence[Note]) -> bool:
    digest = hashlib.sha256(payload).digest()
    return any(note.problem or note.payload_digest == digest for note in notes)


def _claimed_twice(slot: Slot, first: int, second: int) -> Conflict:
    return Conflict(
        f"{slot_name(slot)} is claimed twice, by the workers of rank {first} and {second}: "
        "each worker must have its own slot in the parallel groups",
        metadata={"slot": slot_name(slot), "ranks": f"{first}, {second}"},
    )


def _check_layers(records: Sequence[WorkerRecord], layout: Layout) -> None:
    ranges: dict[int, tuple[int, int]] = {}
    for record in records:
        if record.layout != layout:
            raise BadRecord(
                f"{slot_name(record.slot)} declares {record.layout}, the engine core {layout}",
                metadata={"field": "layout", "value": str(record.layout), "core": str(layout)},
            )
        layers = (record.layers.start_layer, record.layers.end_layer)
        known = ranges.setdefault(record.slot.pp_rank, layers)
        if known != layers:
            raise _bad_layers(
                f"workers of stage {record.slot.pp_rank} hold [{known[0]}, {known[1]}) "
                f"and [{layers[0]}, {layers[1]})"
            )
    if len(ranges) < layout.pp_size:
        return  # a worker without a record; its own problem says why
    at = 0
    for start, end in sorted(value for value in ranges.values() if value[0] < value[1]):
        if start > at:
            raise _bad_layers(f"no stage holds the layers [{at}, {start})")
        if start < at:
            raise _bad_layers(f"two stages hold the layers [{start}, {min(at, end)})")
        at = end
    if at != layout.num_layers:
        raise _bad_layers(
            f"no stage holds the layers [{at}, {layout.num_layers})"
            if at < layout.num_layers
            else f"the stages hold {at} layers, the model has {layout.num_layers}"
        )


def _bad_layers(what: str) -> Refused:
    return Refused(
        f"{what}: a peer would get wrong KV",
        reason=Reason.ENGINE_INVALID,
        metadata={"layers": what},
    )


def differences(whole: Whole, topology: Topology) -> tuple[str, ...]:
    """What the book has other than the engine core saw; empty where they agree.

    Args:
        whole: What the core aggregated.
        topology: The book's answer, payloads included.
    """
    if topology.engine.generation != whole.start.generation:
        return (f"generation: core {whole.start.generation}, book {topology.engine.generation}",)
    held = {record.slot: record for record in topology.workers}
    found: list[str] = []
    for note in whole.notes:
        record = held.pop(note.slot, None)
        if record is None:
            found.append(f"{slot_name(note.slot)}: not in the book")
            continue
        seen = note_of(record, note.worker_rank, note.start)
        if seen.record != note.record:
            ours = to_json(v1.WorkerRecord.FromString(note.record))
            found.extend(
                f"{slot_name(note.slot)} {path}: core {core!r}, book {book!r}"
                for path, core, book in _unequal(ours, to_json(to_message(record, v1.WorkerRecord)))
                if path != "handshake.payload"
            )
        if seen.payload_digest != note.payload_digest:
            found.append(f"{slot_name(note.slot)} handshake.payload: other bytes")
    found.extend(f"{slot_name(slot)}: in the book only" for slot in sorted(held))
    return tuple(found)


def _unequal(ours: object, theirs: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            where = f"{path}.{key}" if path else str(key)
            yield from _unequal(ours.get(key), theirs.get(key), where)
    elif ours != theirs:
        yield path, ours, theirs


def slots_of(whole: Whole) -> tuple[SealedSlot, ...]:
    """The slots as the engine core saw them, for its seal."""
    return tuple(
        SealedSlot(note.slot, note.published().process.boot_id, note.record_digest)
        for note in whole.notes
    )


def sealed_slots(topology: Topology) -> tuple[SealedSlot, ...]:
    """The slots as the book has them, for a seal."""
    return tuple(
        SealedSlot(record.slot, record.process.boot_id, status.record_digest)
        for record, status in zip(topology.workers, topology.statuses, strict=True)
    )
