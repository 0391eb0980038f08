"""What bad input gets: a typed error with value and rule, and nothing half-written."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from rankbook import v1
from rankbook.convert import duration
from rankbook.limits import (
    MAX_CALL_BYTES,
    MAX_GRID_SLOTS,
    MAX_LABELS,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_PEERS,
    MAX_RENEWALS,
    MAX_SMALL_CALL_BYTES,
    MAX_TEXT_CHARS,
)
from rankbook_server.wire import delimited, scalar

from .support import Failure, Raw, failure_of, grid, record, registration, span

LONG = "x" * 300


def changed(change: Callable[[v1.RegisterWorkersRequest], Any]) -> v1.RegisterWorkersRequest:
    request = registration([record()])
    change(request)
    return request


def put(**fields: Any) -> v1.RegisterWorkersRequest:
    return registration([record(**fields)])


def _no_layout(request: v1.RegisterWorkersRequest) -> None:
    request.records[0].ClearField("layout")


def _twice(request: v1.RegisterWorkersRequest) -> None:
    request.records.append(request.records[0])


BAD_REGISTRATIONS = {
    "rank outside the grid": (put(tp=2), "INVALID_RECORD", "2"),
    "empty engine_id": (
        changed(lambda r: r.records[0].ClearField("engine_id")),
        "INVALID_RECORD",
        "''",
    ),
    "empty generation": (put(generation=""), "INVALID_RECORD", "''"),
    "empty group": (put(group=""), "INVALID_RECORD", "''"),
    "end before start": (
        put(layers=v1.Layers(start_layer=3, end_layer=1)),
        "INVALID_RECORD",
        "1",
    ),
    "end beyond the model": (put(layers=v1.Layers(end_layer=5)), "INVALID_RECORD", "5"),
    "id with a slash": (put(engine_id="a/b"), "INVALID_RECORD", "'a/b'"),
    "id with a space": (put(engine_id="a b"), "INVALID_RECORD", "'a b'"),
    "id with a newline": (put(engine_id="ab\n"), "INVALID_RECORD", "'ab\\n'"),
    "id of 300 characters": (put(engine_id=LONG), "INVALID_RECORD", "300"),
    "payload over the limit": (
        put(payload=b"x" * (MAX_PAYLOAD_BYTES + 1)),
        "LIMIT_EXCEEDED",
        str(MAX_PAYLOAD_BYTES + 1),
    ),
    "role not stated": (put(role=v1.ROLE_UNSPECIFIED), "INVALID_RECORD", "role"),
    "layout missing": (changed(_no_layout), "INVALID_RECORD", "layout"),
    "zero ranks": (
        put(layout=v1.Layout(pp_size=1, tp_size=0, num_layers=4)),
        "INVALID_RECORD",
        "0",
    ),
    "grid too large": (
        put(layout=v1.Layout(pp_size=1000, tp_size=1000, num_layers=4)),
        "LIMIT_EXCEEDED",
        "1000000",
    ),
    "one slot twice": (changed(_twice), "INVALID_RECORD", "slot"),
    "65 records": (
        registration([record(tp=tp, tp_size=65) for tp in range(65)]),
        "LIMIT_EXCEEDED",
        "65",
    ),
    "no record": (changed(lambda r: r.ClearField("records")), "INVALID_REQUEST", "records"),
    "record of another namespace": (put(namespace="other"), "NAMESPACE_MISMATCH", "other"),
    "namespace with a slash": (
        registration([record()], namespace="a/b"),
        "INVALID_REQUEST",
        "'a/b'",
    ),
    "negative TTL": (registration([record()], ttl_s=-1.0), "INVALID_REQUEST", "-1"),
    "lease that never was": (
        changed(lambda r: r.lease.CopyFrom(v1.LeaseRequest(lease_id="never-was"))),
        "LEASE_NOT_FOUND",
        "never-was",
    ),
    "no lease": (changed(lambda r: r.ClearField("lease")), "INVALID_REQUEST", "lease"),
    "no sequence": (changed(lambda r: r.ClearField("sequence")), "INVALID_REQUEST", "0"),
    "label of 3,000 characters": (put(labels={"a": "x" * 3000}), "LIMIT_EXCEEDED", "3000"),
    "65 labels": (put(labels={f"l{n}": "" for n in range(65)}), "LIMIT_EXCEEDED", "65"),
}


@pytest.mark.parametrize(
    ("request_", "reason", "value"), BAD_REGISTRATIONS.values(), ids=BAD_REGISTRATIONS.keys()
)
def test_a_bad_registration_is_refused_with_its_value_and_writes_nothing(
    raw: Raw, request_: v1.RegisterWorkersRequest, reason: str, value: str
) -> None:
    copy = v1.RegisterWorkersRequest()
    copy.CopyFrom(request_)
    with pytest.raises(Failure) as caught:
        raw.call("RegisterWorkers", copy)
    assert caught.value.reason == reason
    assert caught.value.domain == "rankbook"
    assert value in caught.value.message
    assert any(value in text for text in caught.value.metadata.values())
    status = raw.call("GetStatus", v1.GetStatusRequest())
    assert (dict(status.engines), status.workers) == ({}, 0)
    assert raw.register(grid()).epoch == 1


BAD_REQUESTS = {
    "nothing asked for": ("GetTopology", v1.GetTopologyRequest(), "INVALID_REQUEST"),
    "empty id": ("GetTopology", v1.GetTopologyRequest(engine_id=""), "INVALID_REQUEST"),
    "id with a slash": ("GetTopology", v1.GetTopologyRequest(engine_id="a/b"), "INVALID_REQUEST"),
    "no such engine": ("GetTopology", v1.GetTopologyRequest(engine_id="no"), "ENGINE_NOT_FOUND"),
    "no such group": ("GetTopology", v1.GetTopologyRequest(group="no"), "GROUP_NOT_FOUND"),
    "negative wait": (
        "GetTopology",
        v1.GetTopologyRequest(engine_id="e", wait=span(-1)),
        "INVALID_REQUEST",
    ),
    "endless wait": (
        "GetTopology",
        v1.GetTopologyRequest(engine_id="e", wait=span(301)),
        "LIMIT_EXCEEDED",
    ),
    "unknown requirement": (
        "GetTopology",
        v1.GetTopologyRequest(engine_id="e", require=99),  # type: ignore[arg-type]
        "INVALID_REQUEST",
    ),
    "generation of a group": (
        "GetTopology",
        v1.GetTopologyRequest(group="g", generation="g1"),
        "INVALID_REQUEST",
    ),
    "future revision": (
        "ListEngines",
        v1.ListEnginesRequest(min_revision=1 << 60),
        "REVISION_NOT_REACHED",
    ),
    "page of 1,001": ("ListEngines", v1.ListEnginesRequest(page_size=1001), "LIMIT_EXCEEDED"),
    "revoke of no lease": ("RevokeLease", v1.RevokeLeaseRequest(lease_id="no"), "LEASE_NOT_FOUND"),
    "renew nothing": ("RenewLeases", v1.RenewLeasesRequest(), "INVALID_REQUEST"),
    "renew 1,025": (
        "RenewLeases",
        v1.RenewLeasesRequest(leases=[v1.LeaseRenewal(lease_id=f"l{n}") for n in range(1025)]),
        "LIMIT_EXCEEDED",
    ),
    "update of no worker": (
        "UpdateWorker",
        v1.UpdateWorkerRequest(record=record(), sequence=1),
        "NOT_FOUND",
    ),
    "deregister from no engine": (
        "Deregister",
        v1.DeregisterRequest(engine_id="no", generation="g", boot_id="b", sequence=1),
        "NOT_FOUND",
    ),
    "drain of nothing": (
        "DrainEngine",
        v1.DrainEngineRequest(engine_id="no"),
        "ENGINE_NOT_FOUND",
    ),
    "endless drain": (
        "DrainEngine",
        v1.DrainEngineRequest(engine_id="no", wait=span(61)),
        "LIMIT_EXCEEDED",
    ),
    "evict of nothing": (
        "EvictEngine",
        v1.EvictEngineRequest(engine_id="no"),
        "ENGINE_NOT_FOUND",
    ),
    "reason of 1,025 characters": (
        "EvictEngine",
        v1.EvictEngineRequest(engine_id="no", reason="x" * 1025),
        "LIMIT_EXCEEDED",
    ),
    "4,097 peers": (
        "ReportPeers",
        v1.ReportPeersRequest(
            boot_id="b",
            peers=[v1.PeerConnection(engine_id=f"e{n}", generation="g") for n in range(4097)],
        ),
        "LIMIT_EXCEEDED",
    ),
    "report without a process": ("ReportPeers", v1.ReportPeersRequest(), "INVALID_REQUEST"),
    "begin without a token": (
        "BeginGeneration",
        v1.BeginGenerationRequest(engine_id="e"),
        "INVALID_REQUEST",
    ),
    "65,537 slots asked for": (
        "GetTopology",
        v1.GetTopologyRequest(engine_id="no", slots=[v1.Slot()] * 65_537),
        "LIMIT_EXCEEDED",
    ),
    "65,537 slots to leave": (
        "Deregister",
        v1.DeregisterRequest(
            engine_id="no", generation="g", boot_id="b", sequence=1, slots=[v1.Slot()] * 65_537
        ),
        "LIMIT_EXCEEDED",
    ),
    "filter of 65 labels": (
        "ListEngines",
        v1.ListEnginesRequest(filter=v1.EngineFilter(labels={f"k{n}": "v" for n in range(65)})),
        "LIMIT_EXCEEDED",
    ),
    "filter of 9 states": (
        "ListEngines",
        v1.ListEnginesRequest(filter=v1.EngineFilter(states=[v1.STATE_READY] * 9)),
        "LIMIT_EXCEEDED",
    ),
    "filter of a model of 1,025 characters": (
        "ListEngines",
        v1.ListEnginesRequest(filter=v1.EngineFilter(model="x" * 1025)),
        "LIMIT_EXCEEDED",
    ),
    "plan of an unknown mode": (
        "PlanTransfer",
        v1.PlanTransferRequest(producer_engine_id="no", consumer_engine_id="no", mode=99),
        "INVALID_REQUEST",
    ),
    "list of an unknown role": (
        "ListEngines",
        v1.ListEnginesRequest(filter=v1.EngineFilter(role=99)),
        "INVALID_REQUEST",
    ),
    "list of an unknown state": (
        "ListEngines",
        v1.ListEnginesRequest(filter=v1.EngineFilter(states=[v1.STATE_READY, 99])),
        "INVALID_REQUEST",
    ),
    "plan from no engine": (
        "PlanTransfer",
        v1.PlanTransferRequest(producer_engine_id="no", consumer_engine_id="no"),
        "ENGINE_NOT_FOUND",
    ),
}


@pytest.mark.parametrize(
    ("name", "request_", "reason"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys()
)
def test_a_bad_request_is_refused_with_a_reason(
    raw: Raw, name: str, request_: Any, reason: str
) -> None:
    copy = type(request_)()
    copy.CopyFrom(request_)
    with pytest.raises(Failure) as caught:
        raw.call(name, copy)
    assert caught.value.reason.endswith(reason)
    assert len(caught.value.message) > 20
    assert caught.value.metadata
    assert not raw.call("GetStatus", v1.GetStatusRequest()).engines


def test_bytes_that_are_no_message_are_a_typed_error(raw: Raw) -> None:
    with pytest.raises(Failure, match="MALFORMED_MESSAGE") as caught:
        raw.bytes("RegisterWorkers", b"\xff\xff\xff\xff")
    assert caught.value.metadata["message"] == "rankbook.v1.RegisterWorkersRequest"
    assert raw.register(grid()).epoch == 1


def test_a_message_over_the_limit_is_a_typed_error(raw: Raw) -> None:
    with pytest.raises(Failure, match="LIMIT_EXCEEDED"):
        raw.bytes("RegisterWorkers", b"\0" * (MAX_MESSAGE_BYTES + 1))
    with raw.session() as session:
        session.send_bytes(b"\x0a" * (MAX_MESSAGE_BYTES + 1))
        assert session.take().WhichOneof("reply") == "status"
        assert session.call("get_status", v1.GetStatusRequest()).store_available


@pytest.mark.parametrize("way", ["unary", "session", "session in two parts"])
def test_a_request_too_large_for_its_call_is_refused_before_it_is_read(raw: Raw, way: str) -> None:
    # Reading 300,000 labels takes the server's loop longer than a stall may last.
    bomb = v1.RegisterWorkersRequest(records=[record()])
    for number in range(150_000):
        bomb.records[0].labels[f"k{number}"] = ""
    data = bomb.SerializeToString()
    assert MAX_CALL_BYTES["register_workers"] < len(data) < MAX_MESSAGE_BYTES
    if way == "unary":
        with pytest.raises(Failure, match="LIMIT_EXCEEDED") as caught:
            raw.bytes("RegisterWorkers", data)
        metadata = caught.value.metadata
    else:
        parts = [data] if way == "session" else [data[: len(data) // 2], data[len(data) // 2 :]]
        frame = scalar(1, 7) + b"".join(delimited(3, part) for part in parts)
        with raw.session() as session:
            session.send_bytes(frame)
            answer = session.take()
            assert answer.request_id == 7
            metadata = failure_of(answer.status).metadata
            assert session.call("get_status", v1.GetStatusRequest()).store_available
    assert metadata["call"] == "RegisterWorkers"
    assert metadata["value"] == str(len(data))
    assert metadata["bound"] == str(MAX_CALL_BYTES["register_workers"])


def test_the_largest_legal_batch_and_report_fit_their_calls() -> None:
    name = "n" * 253
    peers = [
        v1.PeerConnection(engine_id=name, generation=name, transfers_in_flight=2**32 - 1)
    ] * MAX_PEERS
    report = v1.ReportPeersRequest(namespace=name, boot_id=name, peers=peers)
    assert report.ByteSize() <= MAX_CALL_BYTES["report_peers"]
    slot = v1.Slot(pp_rank=65_535, pcp_rank=65_535, tp_rank=65_535)
    asked = v1.GetTopologyRequest(namespace=name, engine_id=name, slots=[slot] * MAX_GRID_SLOTS)
    assert asked.ByteSize() <= MAX_CALL_BYTES["get_topology"]
    gone = v1.DeregisterRequest(engine_id=name, boot_id=name, slots=[slot] * MAX_GRID_SLOTS)
    assert gone.ByteSize() <= MAX_CALL_BYTES["deregister"]
    leases = [v1.LeaseRenewal(lease_id=name, ttl=duration(300))] * MAX_RENEWALS
    assert v1.RenewLeasesRequest(leases=leases).ByteSize() <= MAX_CALL_BYTES["renew_leases"]
    labels = {f"{number:03}" + "k" * 250: "v" * MAX_TEXT_CHARS for number in range(MAX_LABELS)}
    watch = v1.WatchRequest(filter=v1.EngineFilter(labels=labels))
    assert watch.ByteSize() <= MAX_SMALL_CALL_BYTES


def test_a_wire_field_from_a_newer_version_is_ignored(raw: Raw) -> None:
    newer = registration(grid(), namespace=raw.namespace).SerializeToString()
    newer += b"\xfa\x7f\x03new"
    assert v1.RegisterWorkersResponse.FromString(raw.bytes("RegisterWorkers", newer)).epoch == 1


def test_ten_thousand_random_frames_leave_a_session_and_the_server_alive(raw: Raw) -> None:
    rng = random.Random(20250907)
    valid = v1.SessionRequest(request_id=7, register_workers=registration(grid("fuzzed")))
    seed = valid.SerializeToString()
    count = 10_000
    with raw.session() as session:
        for number in range(count):
            if number % 4 == 0:
                frame = bytearray(seed)
                for _ in range(rng.randint(1, 8)):
                    frame[rng.randrange(len(frame))] = rng.randrange(256)
                # Never the valid call itself under another engine.
                session.send_bytes(b"\xff" + bytes(frame))
            else:
                session.send_bytes(rng.randbytes(rng.randint(1, 200)))
        request_id = session.send("get_status", v1.GetStatusRequest(), request_id=1 << 50)
        answered = 0
        for reply in session.replies():
            if reply.request_id == request_id:
                assert reply.get_status.store_available
                break
            answered += 1
            assert reply.WhichOneof("reply") == "status", reply
        # Most of them can only be answered with an error; a cancel has no answer.
        assert answered > count * 9 // 10
    assert raw.register(grid("after")).epoch == 1
    assert dict(raw.call("GetStatus", v1.GetStatusRequest()).engines) == {"COMPLETE": 1}
