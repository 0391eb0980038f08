"""What a reader was shown of an engine, in a form that can be compared and kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from rankbook import v1
from rankbook.convert import to_message
from rankbook.model import Topology

__all__ = ["Content", "content_of", "content_of_topology", "digest_of"]

Content = dict[str, Any]
Pair = tuple[v1.WorkerRecord, v1.WorkerStatus]


def content_of(engine: v1.Engine, workers: Iterable[Pair], *, bare: bool = False) -> Content:
    """Everything of an engine that every server must show alike at one revision.

    Each worker is [stage, TP rank, boot_id, generation, sequence its payload
    names (-1: none), asleep, whether the payload is its own]. Leases are left
    out: a record that only moves to another lease is no change.

    Args:
        engine: Its head.
        workers: Its workers with their statuses.
        bare: Payloads were left out.
    """
    rows: list[list[Any]] = []
    sealed = hashlib.sha256()
    for record, status in sorted(workers, key=lambda pair: _slot(pair[0])):
        pp_rank, tp_rank = _slot(record)
        sequence, is_own = _read(record, engine.engine_id, bare=bare)
        boot_id = record.process.boot_id
        rows.append([pp_rank, tp_rank, boot_id, record.generation, sequence, status.asleep, is_own])
        sealed.update(f"{pp_rank}.0.{tp_rank}|{boot_id}|".encode() + status.record_digest)
    return {
        "engine": engine.engine_id,
        "rev": engine.revision,
        "state": v1.State.Name(engine.state).removeprefix("STATE_"),
        "gen": engine.generation,
        "epoch": engine.epoch,
        "declared": engine.declared,
        "present": engine.present,
        "seal": engine.seal.number,
        "seal_is_of_this": engine.seal.digest == sealed.digest(),
        "core": engine.core.process.boot_id,
        "drain": engine.HasField("drain"),
        "lapsed": engine.lapsed,
        "bare": bare,
        "workers": rows,
    }


def content_of_topology(topology: Topology, *, bare: bool = False) -> Content:
    """The same of a topology as the client gives it."""
    pairs = [
        (to_message(record, v1.WorkerRecord), to_message(status, v1.WorkerStatus))
        for record, status in zip(topology.workers, topology.statuses, strict=True)
    ]
    return content_of(to_message(topology.engine, v1.Engine), pairs, bare=bare)


def digest_of(content: Content) -> str:
    """Names a content."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _slot(record: v1.WorkerRecord) -> tuple[int, int]:
    return record.slot.pp_rank, record.slot.tp_rank


def _read(record: v1.WorkerRecord, engine_id: str, *, bare: bool) -> tuple[int, bool]:
    payload = record.handshake.payload
    if not payload:
        return -1, True
    if bare:
        return -1, False
    boot_id, sequence, engine, generation = payload.decode().split("|")
    own = (boot_id, engine, generation)
    return int(sequence), own == (record.process.boot_id, engine_id, record.generation)
