"""A worker's record on its way into the book."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp

from rankbook import v1
from rankbook.errors import Conflict, LimitExceeded, Reason
from rankbook.limits import MAX_ENGINE_BYTES, check_host
from rankbook_server.core.admission import holders_with
from rankbook_server.core.engine import EngineState
from rankbook_server.core.fold import BookFold
from rankbook_server.core.keys import slot_key, slot_text
from rankbook_server.core.slots import SlotState

__all__ = [
    "check_declared",
    "check_size",
    "current_slot",
    "normal",
    "normal_core",
    "record_digest",
    "slot_holder",
    "stored_worker",
]


def record_digest(record: v1.WorkerRecord) -> bytes:
    """SHA-256 of a record, as `WorkerStatus.record_digest` says."""
    return hashlib.sha256(record.SerializeToString(deterministic=True)).digest()


def normal(book: BookFold, record: v1.WorkerRecord) -> v1.WorkerRecord:
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
    _one_form(kept.addresses)
    return kept


def normal_core(core: v1.CoreRecord) -> v1.CoreRecord:
    """An engine core's record as it is kept."""
    kept = v1.CoreRecord()
    kept.CopyFrom(core)
    _one_form(kept.addresses)
    return kept


def _one_form(addresses: Iterable[v1.Address]) -> None:
    for address in addresses:
        address.host = check_host("addresses.host", address.host)


def check_declared(record: v1.WorkerRecord, head: v1.StoredEngine) -> None:
    """Sizes and identity are those of the generation's first worker (rule 3).

    Raises:
        Conflict: They differ; both are named.
    """
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


def current_slot(engine: EngineState | None, record: v1.WorkerRecord) -> SlotState | None:
    """What the current epoch has in a record's slot, its past holders included."""
    state = engine.slots.get(slot_key(record.slot)) if engine is not None else None
    if engine is None or state is None or state.epoch != engine.head.epoch:
        return None
    return state


def slot_holder(state: SlotState) -> str:
    """boot_id of a slot's holder; of the last one where it is empty."""
    holders = state.stored.holders
    return holders[-1].boot_id if holders else ""


def check_size(engine_id: str, held: int, added: int) -> None:
    """Refuses what would make an engine too large.

    Args:
        engine_id: The engine.
        held: Bytes of its records now.
        added: Bytes that come in addition; a write that takes away always passes.

    Raises:
        LimitExceeded: It would hold too many bytes.
    """
    if added > 0 and held + added > MAX_ENGINE_BYTES:
        raise LimitExceeded(
            f"engine {engine_id} would hold {held + added} bytes, over the limit of "
            f"{MAX_ENGINE_BYTES} bytes",
            metadata={"limit": "engine", "value": held + added, "bound": MAX_ENGINE_BYTES},
        )


def stored_worker(
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
    """A slot with a record in it. The holder's own record once more, under another
    lease or number, is no change that readers see."""
    boot_id = record.process.boot_id
    same = (
        state is not None
        and state.live
        and state.stored.record_digest == digest
        and state.stored.asleep == asleep
        and slot_holder(state) == boot_id
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
        holders=holders_with(state.stored.holders if state else (), boot_id, sequence),
        change_time=state.stored.change_time if same and state is not None else stamp,
    )
