"""The calls of the API: what each sends, and how it reads the answers. Pure.

A call is a *script*: a generator that yields the requests to send and is sent
their answers, so that splitting a large registration or walking the pages of a
list is decided here, once, for both faces. What is wrong with the caller's
words is raised before anything is yielded, so before anything is sent.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator, Sequence
from typing import Any

from rankbook import limits, model, v1
from rankbook._calls import Answer, Call, Record, Script
from rankbook._replies import (
    ClockOffset,
    Drained,
    EngineList,
    Evicted,
    PlanReply,
    RenewReply,
    StalePeer,
    Updated,
)
from rankbook.convert import duration, seconds, to_message, to_model
from rankbook.errors import BadRequest, LimitExceeded

__all__ = [
    "batches",
    "begin_generation",
    "clock_offset",
    "compare_peers",
    "core_message",
    "deregister",
    "drain_engine",
    "evict_engine",
    "filter_message",
    "get_group",
    "get_topology",
    "join_topologies",
    "lease_request",
    "list_engines",
    "plan_transfer",
    "record_message",
    "register_workers",
    "renew_leases",
    "report_peers",
    "revoke_lease",
    "seal_engine",
    "sealed_slot",
    "status",
    "update_worker",
    "watch_request",
]


# ---------------------------------------------------------------------- pieces


def _not_negative(name: str, value: float | None) -> float:
    if value is not None and not value >= 0:
        raise BadRequest(
            f"{name} is {value}: seconds or a count, not negative",
            metadata={"field": name, "value": value, "rule": "not negative"},
        )
    return value or 0


def _positive_sequence(value: int) -> int:
    if not 1 <= value < 2**64:
        raise BadRequest(
            f"sequence is {value}: a write carries a rising number, 1 or above",
            metadata={"field": "sequence", "value": value, "rule": "1 or above"},
        )
    return value


def _checked_wait(name: str, value: float, bound_s: float) -> float:
    _not_negative(name, value)
    if value > bound_s:
        raise LimitExceeded(
            f"{name} is {value:g} s, over the limit of {bound_s:g} s: wait again after it",
            metadata={"limit": name, "value": value, "bound": bound_s, "unit": "seconds"},
        )
    return value


def lease_request(
    lease_key: str | None, lease_id: str | None, ttl_s: float | None
) -> v1.LeaseRequest:
    """The lease a write wants; one of key and id is needed."""
    if not lease_key and not lease_id:
        raise BadRequest(
            "neither lease_key nor lease_id is given: records hang on a lease",
            metadata={"field": "lease_key", "value": "", "rule": "one of lease_key, lease_id"},
        )
    lease = v1.LeaseRequest()
    if lease_id:
        lease.lease_id = limits.check_id("lease_id", lease_id)
    elif lease_key:
        lease.lease_key = limits.check_id("lease_key", lease_key)
    if _not_negative("ttl_s", ttl_s):
        lease.ttl.CopyFrom(duration(ttl_s or 0))
    return lease


def record_message(record: Record) -> v1.WorkerRecord:
    """The record as a message."""
    if isinstance(record, v1.WorkerRecord):
        return record
    try:
        return to_message(record, v1.WorkerRecord)
    except (TypeError, ValueError, KeyError) as problem:
        raise BadRequest(
            f"a record cannot be encoded: {problem}",
            metadata={"field": "record", "value": type(record).__name__, "rule": str(problem)},
        ) from problem


def sealed_slot(slot: model.SealedSlot | v1.SealedSlot) -> v1.SealedSlot:
    """The slot as a message."""
    return slot if isinstance(slot, v1.SealedSlot) else to_message(slot, v1.SealedSlot)


def core_message(core: model.CoreRecord | v1.CoreRecord) -> v1.CoreRecord:
    """The core's record as a message."""
    return core if isinstance(core, v1.CoreRecord) else to_message(core, v1.CoreRecord)


def filter_message(wanted: model.EngineFilter) -> v1.EngineFilter:
    """The filter as a message; an empty one matches every engine."""
    return to_message(wanted, v1.EngineFilter)


def batches(records: Sequence[v1.WorkerRecord]) -> Iterator[list[v1.WorkerRecord]]:
    """Cuts records into registrations that are within the limits, order kept.

    A registration holds records of one generation of one engine, at most
    `limits.MAX_BATCH_RECORDS` and `limits.MAX_BATCH_BYTES` of them.
    """
    batch: list[v1.WorkerRecord] = []
    size = 0
    for record in records:
        length = record.ByteSize()
        if batch and (
            len(batch) == limits.MAX_BATCH_RECORDS
            or size + length > limits.MAX_BATCH_BYTES
            or record.engine_id != batch[0].engine_id
            or record.generation != batch[0].generation
        ):
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += length
    if batch:
        yield batch


def _slots(slots: Sequence[model.Slot]) -> list[v1.Slot]:
    return [to_message(slot, v1.Slot) for slot in slots]


# --------------------------------------------------------------------- scripts


def begin_generation(namespace: str, engine_id: str, generation: str) -> Script[int]:
    request = v1.BeginGenerationRequest(
        namespace=namespace,
        engine_id=limits.check_id("engine_id", engine_id),
        generation=limits.check_id("generation", generation),
    )
    answer = yield Call("BeginGeneration", request)
    return int(answer.reply.epoch)


def register_workers(
    namespace: str,
    records: Sequence[Record],
    *,
    sequence: int,
    lease_key: str | None,
    lease_id: str | None,
    ttl_s: float | None,
    epoch: int,
) -> Script[model.Registered]:
    messages = [record_message(record) for record in records]
    _positive_sequence(sequence)
    lease = lease_request(lease_key, lease_id, ttl_s)
    parts = list(batches(messages)) or [[]]
    for part in parts:
        limits.check_batch(part, namespace)
    digests: list[bytes] = []
    last: model.Registered | None = None
    for offset, part in enumerate(parts):
        request = v1.RegisterWorkersRequest(
            namespace=namespace,
            records=part,
            lease=lease,
            sequence=sequence + offset,
            epoch=epoch,
        )
        answer = yield Call("RegisterWorkers", request)
        last = to_model(answer.reply, model.Registered)
        digests += last.record_digests
        lease = v1.LeaseRequest(lease_id=last.lease.lease_id)
    assert last is not None
    return dataclasses.replace(
        last, record_digests=tuple(digests), sequence=sequence + len(parts) - 1
    )


def clock_offset(server_unix_s: float, answer: Answer) -> ClockOffset:
    """The registry's clock against ours: it was read halfway, give or take half the trip."""
    half = (answer.received_s - answer.sent_s) / 2
    return ClockOffset(
        offset_s=server_unix_s - (answer.sent_s + half),
        error_s=half,
        measured_s=answer.received_s,
    )


def renew_leases(
    namespace: str, lease_ids: Sequence[str], *, ttl_s: float | None
) -> Script[RenewReply]:
    _not_negative("ttl_s", ttl_s)
    if not lease_ids:
        raise BadRequest(
            "lease_ids is empty: name the leases to renew",
            metadata={"field": "lease_ids", "value": 0, "rule": "1 or more"},
        )
    renewals = []
    for lease_id in lease_ids:
        renewal = v1.LeaseRenewal(lease_id=limits.check_id("lease_id", lease_id))
        if ttl_s:
            renewal.ttl.CopyFrom(duration(ttl_s))
        renewals.append(renewal)
    statuses: list[model.LeaseStatus] = []
    for start in range(0, len(renewals), limits.MAX_RENEWALS):
        part = renewals[start : start + limits.MAX_RENEWALS]
        answer = yield Call("RenewLeases", v1.RenewLeasesRequest(namespace=namespace, leases=part))
        reply: v1.RenewLeasesResponse = answer.reply
        statuses += [to_model(status, model.LeaseStatus) for status in reply.leases]
    clock = time = None
    if reply.HasField("server_time"):
        stamp = reply.server_time
        clock = clock_offset(stamp.seconds + stamp.nanos / 1e9, answer)
        time = dt.datetime.fromtimestamp(stamp.seconds + stamp.nanos / 1e9, dt.UTC)
    return RenewReply(
        statuses=tuple(statuses),
        boot_id=reply.boot_id,
        book_id=reply.book_id,
        book_revision=reply.book_revision,
        server_time=time,
        clock=clock,
    )


def update_worker(
    namespace: str, record: Record, *, sequence: int, epoch: int, withdraw_payload: bool
) -> Script[Updated]:
    message = record_message(record)
    _positive_sequence(sequence)
    if not withdraw_payload:
        limits.check_record(message, namespace)
    request = v1.UpdateWorkerRequest(
        namespace=namespace,
        record=message,
        sequence=sequence,
        epoch=epoch,
        withdraw_payload=withdraw_payload,
    )
    answer = yield Call("UpdateWorker", request)
    reply: v1.UpdateWorkerResponse = answer.reply
    return Updated(reply.epoch, reply.revision, reply.record_digest)


def deregister(
    namespace: str,
    engine_id: str,
    generation: str,
    boot_id: str,
    *,
    sequence: int,
    slots: Sequence[model.Slot],
    epoch: int,
) -> Script[int]:
    request = v1.DeregisterRequest(
        namespace=namespace,
        engine_id=limits.check_id("engine_id", engine_id),
        generation=limits.check_id("generation", generation),
        boot_id=limits.check_id("boot_id", boot_id),
        slots=_slots(slots),
        sequence=_positive_sequence(sequence),
        epoch=epoch,
    )
    answer = yield Call("Deregister", request)
    return int(answer.reply.removed)


def revoke_lease(namespace: str, lease_id: str) -> Script[int]:
    request = v1.RevokeLeaseRequest(
        namespace=namespace, lease_id=limits.check_id("lease_id", lease_id)
    )
    answer = yield Call("RevokeLease", request)
    return int(answer.reply.removed)


def seal_engine(
    namespace: str,
    engine_id: str,
    generation: str,
    slots: Sequence[model.SealedSlot | v1.SealedSlot],
    core: model.CoreRecord | v1.CoreRecord,
    *,
    sequence: int,
    epoch: int,
    lease_key: str | None,
    lease_id: str | None,
    ttl_s: float | None,
) -> Script[model.Sealed]:
    message = core_message(core)
    limits.check_core(message)
    request = v1.SealEngineRequest(
        namespace=namespace,
        engine_id=limits.check_id("engine_id", engine_id),
        generation=limits.check_id("generation", generation),
        epoch=epoch,
        slots=[sealed_slot(slot) for slot in slots],
        core=message,
        sequence=_positive_sequence(sequence),
    )
    if lease_key or lease_id:
        request.lease.CopyFrom(lease_request(lease_key, lease_id, ttl_s))
    answer = yield Call("SealEngine", request)
    return to_model(answer.reply, model.Sealed)


def report_peers(
    namespace: str, boot_id: str, peers: Sequence[model.PeerConnection]
) -> Script[tuple[StalePeer, ...]]:
    if len(peers) > limits.MAX_PEERS:
        raise LimitExceeded(
            f"peers is {len(peers)} connections, over the limit of {limits.MAX_PEERS}",
            metadata={"limit": "peers", "value": len(peers), "bound": limits.MAX_PEERS},
        )
    request = v1.ReportPeersRequest(
        namespace=namespace,
        boot_id=limits.check_id("boot_id", boot_id),
        peers=[to_message(peer, v1.PeerConnection) for peer in peers],
    )
    answer = yield Call("ReportPeers", request)
    return tuple(to_model(stale, StalePeer) for stale in answer.reply.stale)


def drain_engine(
    namespace: str,
    engine_id: str,
    *,
    undo: bool,
    reason: str,
    requested_by: str,
    deadline_s: float,
    wait_s: float,
) -> Script[Drained]:
    request = v1.DrainEngineRequest(
        namespace=namespace,
        engine_id=limits.check_id("engine_id", engine_id),
        undo=undo,
        reason=limits.check_text("reason", reason),
        requested_by=limits.check_text("requested_by", requested_by, limits.MAX_ID_CHARS),
    )
    if _not_negative("deadline_s", deadline_s):
        request.deadline.CopyFrom(duration(deadline_s))
    if _checked_wait("wait_s", wait_s, limits.MAX_DRAIN_WAIT_S):
        request.wait.CopyFrom(duration(wait_s))
    answer = yield Call("DrainEngine", request, wait_s)
    return to_model(answer.reply, Drained)


def evict_engine(
    namespace: str, engine_id: str, *, epoch: int, reason: str, requested_by: str
) -> Script[Evicted]:
    request = v1.EvictEngineRequest(
        namespace=namespace,
        engine_id=limits.check_id("engine_id", engine_id),
        epoch=int(_not_negative("epoch", epoch)),
        reason=limits.check_text("reason", reason),
        requested_by=limits.check_text("requested_by", requested_by, limits.MAX_ID_CHARS),
    )
    answer = yield Call("EvictEngine", request)
    return to_model(answer.reply, Evicted)


_REQUIREMENTS = {
    model.Requirement.READY: v1.REQUIREMENT_READY,
    model.Requirement.COMPLETE: v1.REQUIREMENT_COMPLETE,
    model.Requirement.ANY: v1.REQUIREMENT_ANY,
}


def _topology_request(
    namespace: str,
    require: model.Requirement,
    generation: str,
    wait_s: float,
    min_revision: int,
    known_revision: int,
    known_book_id: str,
    without_payload: bool,
    slots: Sequence[model.Slot],
) -> v1.GetTopologyRequest:
    request = v1.GetTopologyRequest(
        namespace=namespace,
        require=_REQUIREMENTS[model.Requirement(require)],
        generation=limits.check_id("generation", generation) if generation else "",
        min_revision=int(_not_negative("min_revision", min_revision)),
        known_revision=int(_not_negative("known_revision", known_revision)),
        known_book_id=known_book_id,
        without_payload=without_payload,
        slots=_slots(slots),
    )
    if _checked_wait("wait_s", wait_s, limits.MAX_WAIT_S):
        request.wait.CopyFrom(duration(wait_s))
    return request


def get_topology(
    namespace: str, engine_id: str, *, wait_s: float, **asked: Any
) -> Script[model.Topology | None]:
    request = _topology_request(namespace, wait_s=wait_s, **asked)
    request.engine_id = limits.check_id("engine_id", engine_id)
    answer = yield Call("GetTopology", request, wait_s)
    if answer.parts[0].not_modified:
        return None
    return join_topologies(answer.parts)[0]


def get_group(
    namespace: str, group: str, *, wait_s: float, **asked: Any
) -> Script[tuple[model.Topology, ...] | None]:
    request = _topology_request(namespace, wait_s=wait_s, **asked)
    request.group = limits.check_id("group", group)
    answer = yield Call("GetTopology", request, wait_s)
    if answer.parts[0].not_modified:
        return None
    return join_topologies(answer.parts)


def join_topologies(parts: Sequence[v1.GetTopologyResponse]) -> tuple[model.Topology, ...]:
    """Puts the parts of one answer together: an engine comes once, its workers bit by bit."""
    heads: dict[str, v1.Engine] = {}
    pieces: dict[str, list[v1.Topology]] = {}
    current = ""
    for part in parts:
        for piece in part.topologies:
            if piece.HasField("engine"):
                current = piece.engine.engine_id
                heads.setdefault(current, piece.engine)
            pieces.setdefault(current, []).append(piece)
    return tuple(
        model.Topology(
            engine=to_model(head, model.Engine),
            workers=tuple(
                to_model(worker, model.WorkerRecord)
                for piece in pieces[name]
                for worker in piece.workers
            ),
            statuses=tuple(
                to_model(status, model.WorkerStatus)
                for piece in pieces[name]
                for status in piece.statuses
            ),
            book_id=parts[0].book_id,
            book_revision=parts[0].book_revision,
            stale_s=seconds(parts[0].stale_for),
        )
        for name, head in heads.items()
    )


def list_engines(
    namespace: str, wanted: model.EngineFilter, *, min_revision: int
) -> Script[EngineList]:
    request = v1.ListEnginesRequest(
        namespace=namespace,
        filter=filter_message(wanted),
        page_size=limits.MAX_PAGE_ENGINES,
        min_revision=int(_not_negative("min_revision", min_revision)),
    )
    answer = yield Call("ListEngines", request)
    first: v1.ListEnginesResponse = answer.reply
    engines = list(first.engines)
    page = first
    while page.next_page_token:
        following = v1.ListEnginesRequest()
        following.CopyFrom(request)
        following.page_token = page.next_page_token
        answer = yield Call("ListEngines", following)
        page = answer.reply
        engines += page.engines
    return EngineList(
        engines=tuple(to_model(engine, model.Engine) for engine in engines),
        book_revision=first.book_revision,
        book_id=first.book_id,
        stale_s=seconds(first.stale_for),
    )


def watch_request(
    namespace: str, wanted: model.EngineFilter, *, without_payload: bool
) -> v1.WatchRequest:
    """The request of a watch that starts from nothing."""
    return v1.WatchRequest(
        namespace=namespace, filter=filter_message(wanted), without_payload=without_payload
    )


_MODES = {
    "": v1.TRANSFER_MODE_UNSPECIFIED,
    "PULL": v1.TRANSFER_MODE_PULL,
    "PUSH": v1.TRANSFER_MODE_PUSH,
}
_MODE_NAMES = {number: name for name, number in _MODES.items()}


def plan_transfer(
    namespace: str,
    producer_engine_id: str,
    *,
    consumer_engine_id: str | None,
    consumer_layout: v1.ConsumerLayout | None,
    mode: str | None,
) -> Script[PlanReply]:
    if (consumer_engine_id is None) == (consumer_layout is None):
        raise BadRequest(
            "give one of consumer_engine_id and consumer_layout: a plan is between two engines",
            metadata={"field": "consumer", "value": "", "rule": "exactly one"},
        )
    if (mode or "").upper() not in _MODES:
        raise BadRequest(
            f"mode is {mode!r}: pull or push",
            metadata={"field": "mode", "value": str(mode), "rule": "pull or push"},
        )
    request = v1.PlanTransferRequest(
        namespace=namespace,
        producer_engine_id=limits.check_id("producer_engine_id", producer_engine_id),
        mode=_MODES[(mode or "").upper()],
    )
    if consumer_layout is not None:
        request.consumer_layout.CopyFrom(consumer_layout)
    elif consumer_engine_id is not None:
        request.consumer_engine_id = limits.check_id("consumer_engine_id", consumer_engine_id)
    answer = yield Call("PlanTransfer", request)
    reply: v1.PlanTransferResponse = answer.reply
    return PlanReply(
        plan=reply.plan,
        mode=_MODE_NAMES.get(reply.mode, ""),
        producer_revision=reply.producer_revision,
        consumer_revision=reply.consumer_revision,
    )


def compare_peers(
    namespace: str, producer_engine_id: str, consumer_engine_id: str
) -> Script[v1.Comparison]:
    request = v1.ComparePeersRequest(
        namespace=namespace,
        producer_engine_id=limits.check_id("producer_engine_id", producer_engine_id),
        consumer_engine_id=limits.check_id("consumer_engine_id", consumer_engine_id),
    )
    answer = yield Call("ComparePeers", request)
    comparison: v1.Comparison = answer.reply.comparison
    return comparison


def status(namespace: str) -> Script[model.Status]:
    answer = yield Call("GetStatus", v1.GetStatusRequest(namespace=namespace))
    return to_model(answer.reply, model.Status)
