"""Every call does what the contract says, and the same again when repeated."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rankbook import v1

from .support import Failure, Raw, grid, record, registration, seal_request, span


def test_a_start_is_reserved_once_and_its_workers_get_its_epoch(raw: Raw) -> None:
    begin = v1.BeginGenerationRequest(engine_id="prefill-a-0", generation="g1")
    first = raw.call("BeginGeneration", begin)
    again = raw.call("BeginGeneration", begin)
    assert (first.epoch, again.epoch) == (1, 1)
    assert first.book_id
    assert raw.register(grid()).epoch == 1
    second = v1.BeginGenerationRequest(engine_id="prefill-a-0", generation="g2")
    assert raw.call("BeginGeneration", second).epoch == 2


def test_a_repeated_registration_gets_the_first_reply_and_changes_nothing(raw: Raw) -> None:
    request = registration(grid())
    first = raw.call("RegisterWorkers", request)
    revision = raw.topology().engine.revision
    again = raw.call("RegisterWorkers", request)
    assert again == first
    assert raw.topology().engine.revision == revision


def test_a_registration_grants_a_lease_and_says_when_to_renew(raw: Raw) -> None:
    reply = raw.register(grid(), ttl_s=12.0)
    assert reply.lease.ttl.seconds == 12
    assert reply.lease.renew_interval.seconds == 4
    assert reply.boot_id
    renewal = v1.RenewLeasesRequest(leases=[v1.LeaseRenewal(lease_id=reply.lease.lease_id)])
    renewed = raw.call("RenewLeases", renewal)
    assert [status.state for status in renewed.leases] == [v1.LEASE_STATE_ALIVE]
    assert renewed.boot_id == reply.boot_id
    assert renewed.book_id == reply.book_id
    assert renewed.server_time.seconds > 1_600_000_000


def test_sealing_makes_an_engine_ready_and_a_second_seal_is_the_first(raw: Raw) -> None:
    digests = raw.register(grid()).record_digests
    assert raw.topology().engine.state == v1.STATE_COMPLETE
    request = seal_request(grid(), digests)
    first = raw.call("SealEngine", request)
    assert raw.topology().engine.state == v1.STATE_READY
    again = raw.call("SealEngine", request)
    assert (again.seal, again.revision) == (first.seal, first.revision)


def test_a_seal_of_something_else_is_refused_with_the_difference(raw: Raw) -> None:
    digests = list(raw.register(grid()).record_digests)
    with pytest.raises(Failure, match="SEAL_MISMATCH") as caught:
        raw.call("SealEngine", seal_request(grid(), [digests[0], b"x" * 32]))
    assert "tp1" in str(caught.value.metadata) + caught.value.message
    assert raw.topology().engine.state == v1.STATE_COMPLETE


def test_an_update_is_seen_and_a_withdrawn_payload_degrades(raw: Raw) -> None:
    records = grid()
    raw.ready(records)
    sleepy = v1.UpdateWorkerRequest(record=records[0], sequence=2, withdraw_payload=True)
    asleep = raw.call("UpdateWorker", sleepy)
    topology = raw.topology()
    assert topology.engine.state == v1.STATE_DEGRADED
    assert topology.engine.revision == asleep.revision
    assert "ASLEEP" in [problem.reason for problem in topology.engine.problems]
    assert topology.workers[0].handshake.payload == b""
    records[0].handshake.payload = b"awake again"
    raw.call("UpdateWorker", v1.UpdateWorkerRequest(record=records[0], sequence=3))
    assert raw.topology().workers[0].handshake.payload == b"awake again"


def test_deregistering_twice_is_ok_and_leaves_a_tombstone(raw: Raw) -> None:
    first = record()
    raw.register([first])
    request = v1.DeregisterRequest(
        engine_id=first.engine_id,
        generation=first.generation,
        boot_id=first.process.boot_id,
        sequence=2,
    )
    assert raw.call("Deregister", request).removed == 1
    assert raw.call("Deregister", request).removed == 0
    assert raw.topology().engine.state == v1.STATE_GONE


def test_revoking_a_lease_takes_its_records_out_and_a_second_time_is_ok(raw: Raw) -> None:
    lease_id = raw.register(grid()).lease.lease_id
    request = v1.RevokeLeaseRequest(lease_id=lease_id)
    assert raw.call("RevokeLease", request).removed == 2
    assert raw.call("RevokeLease", request).removed == 0
    assert raw.topology().engine.state == v1.STATE_GONE
    renewal = v1.RenewLeasesRequest(leases=[v1.LeaseRenewal(lease_id=lease_id)])
    assert raw.call("RenewLeases", renewal).leases[0].state == v1.LEASE_STATE_ENDED


def test_a_drain_waits_for_reported_transfers_and_can_be_undone(raw: Raw) -> None:
    raw.ready(grid())
    peer = v1.PeerConnection(engine_id="prefill-a-0", generation="g1", transfers_in_flight=3)
    report = v1.ReportPeersRequest(boot_id="decode-1", peers=[peer])
    assert not raw.call("ReportPeers", report).stale
    drain = v1.DrainEngineRequest(engine_id="prefill-a-0", reason="upgrade", requested_by="test")
    drained = raw.call("DrainEngine", drain)
    assert drained.state == v1.STATE_DRAINING
    assert drained.outcome == v1.DRAIN_OUTCOME_WAITING
    assert drained.transfers_in_flight == 3
    assert raw.call("DrainEngine", drain).revision == drained.revision
    with raw.session() as session:
        waiting = v1.DrainEngineRequest()
        waiting.CopyFrom(drain)
        waiting.wait.CopyFrom(span(20))
        session.send("drain_engine", waiting)
        report.peers[0].transfers_in_flight = 0
        raw.call("ReportPeers", report)
        reply = session.take().drain_engine
        assert reply.outcome == v1.DRAIN_OUTCOME_IDLE
        assert reply.transfers_in_flight == 0
    undone = raw.call("DrainEngine", v1.DrainEngineRequest(engine_id="prefill-a-0", undo=True))
    assert undone.state == v1.STATE_READY
    assert undone.outcome == v1.DRAIN_OUTCOME_UNSPECIFIED


def test_a_drain_in_a_session_that_waits_for_nothing_says_at_once_whether_it_is_over(
    raw: Raw,
) -> None:
    raw.ready(grid())
    drain = v1.DrainEngineRequest(engine_id="prefill-a-0")
    with raw.session() as session:
        session.send("drain_engine", drain)
        assert session.take().drain_engine.outcome == v1.DRAIN_OUTCOME_IDLE
        peer = v1.PeerConnection(engine_id="prefill-a-0", generation="g1", transfers_in_flight=2)
        session.send("report_peers", v1.ReportPeersRequest(boot_id="decode-1", peers=[peer]))
        assert session.take().HasField("report_peers")
        session.send("drain_engine", drain)
        drained = session.take().drain_engine
        assert (drained.outcome, drained.transfers_in_flight) == (v1.DRAIN_OUTCOME_WAITING, 2)


def test_a_drain_with_a_deadline_says_that_it_passed(raw: Raw) -> None:
    raw.ready(grid())
    peer = v1.PeerConnection(engine_id="prefill-a-0", generation="g1", transfers_in_flight=1)
    raw.call("ReportPeers", v1.ReportPeersRequest(boot_id="decode-1", peers=[peer]))
    drain = v1.DrainEngineRequest(engine_id="prefill-a-0", deadline=span(0.2), wait=span(15))
    reply = raw.call("DrainEngine", drain)
    assert reply.outcome == v1.DRAIN_OUTCOME_DEADLINE
    assert reply.transfers_in_flight == 1


def test_a_peer_of_a_generation_that_is_over_is_reported_stale_with_its_successor(
    raw: Raw,
) -> None:
    raw.register(grid(generation="g1"))
    raw.register(grid(generation="g2"))
    peers = [
        v1.PeerConnection(engine_id="prefill-a-0", generation="g1"),
        v1.PeerConnection(engine_id="prefill-a-0", generation="g2"),
        v1.PeerConnection(engine_id="never-was", generation="g1"),
    ]
    reply = raw.call("ReportPeers", v1.ReportPeersRequest(boot_id="decode-1", peers=peers))
    assert [(s.engine_id, s.successor.generation) for s in reply.stale] == [
        ("prefill-a-0", "g2"),
        ("never-was", ""),
    ]


def test_an_evicted_engine_cannot_come_back_and_a_new_start_can(raw: Raw) -> None:
    records = grid()
    raw.ready(records)
    evict = v1.EvictEngineRequest(engine_id="prefill-a-0", reason="sick", requested_by="test")
    assert raw.call("EvictEngine", evict).removed == 2
    assert raw.call("EvictEngine", evict).removed == 0
    with pytest.raises(Failure, match="EVICTED"):
        raw.register(records, sequence=2)
    assert raw.register(grid(generation="g2")).epoch == 2


def test_engines_are_listed_by_name_in_pages_and_by_filter(raw: Raw) -> None:
    for number in range(5):
        group = "even" if number % 2 == 0 else "odd"
        raw.register(grid(f"engine-{number}", group=group, labels={"zone": "a"}))
    names: list[str] = []
    token = ""
    while True:
        page = raw.call("ListEngines", v1.ListEnginesRequest(page_size=2, page_token=token))
        assert len(page.engines) <= 2
        names += [engine.engine_id for engine in page.engines]
        token = page.next_page_token
        if not token:
            break
    assert names == [f"engine-{number}" for number in range(5)]

    def listed(**wanted: object) -> list[str]:
        filters = v1.EngineFilter(**wanted)  # type: ignore[arg-type]
        reply = raw.call("ListEngines", v1.ListEnginesRequest(filter=filters))
        return [engine.engine_id for engine in reply.engines]

    assert listed(group="odd") == ["engine-1", "engine-3"]
    assert listed(role=v1.ROLE_CONSUMER) == []
    assert listed(labels={"zone": "b"}) == []
    assert listed(states=[v1.STATE_COMPLETE], labels={"zone": "a"}, group="odd") == [
        "engine-1",
        "engine-3",
    ]
    assert listed(engine_id="engine-4") == ["engine-4"]


def test_an_engine_that_does_both_is_listed_for_either_role(raw: Raw) -> None:
    raw.register(grid("both", role=v1.ROLE_BOTH))
    for role in (v1.ROLE_PRODUCER, v1.ROLE_CONSUMER, v1.ROLE_BOTH):
        request = v1.ListEnginesRequest(filter=v1.EngineFilter(role=role))
        assert len(raw.call("ListEngines", request).engines) == 1


def test_a_plan_names_producers_of_each_consumer_rank(raw: Raw) -> None:
    model = v1.Model(name="m", total_num_kv_heads=4, head_size=64)
    raw.register(grid("p", pp_size=2, tp_size=2, num_layers=4, model=model))
    request = v1.PlanTransferRequest(
        producer_engine_id="p", consumer_layout=v1.ConsumerLayout(tp_size=2)
    )
    reply = raw.call("PlanTransfer", request)
    assert reply.mode == v1.TRANSFER_MODE_PULL
    first = reply.plan.consumers[0]
    assert [(r.pp_rank, r.tp_rank) for r in first.contact] == [(0, 0), (1, 0)]
    assert [(r.start_layer, r.end_layer, r.start_head, r.end_head) for r in first.read] == [
        (0, 2, 0, 2),
        (2, 4, 0, 2),
    ]
    with pytest.raises(Failure, match="INVALID_REQUEST"):
        raw.call("PlanTransfer", v1.PlanTransferRequest(producer_engine_id="p"))


def test_a_comparison_names_every_broken_rule(raw: Raw) -> None:
    def model(name: str) -> v1.Model:
        return v1.Model(name=name, total_num_kv_heads=4, head_size=64)

    raw.register(grid("p", model=model("one")))
    raw.register(grid("c", model=model("two"), role=v1.ROLE_CONSUMER, group="decode"))
    request = v1.ComparePeersRequest(producer_engine_id="p", consumer_engine_id="c")
    verdict = raw.call("ComparePeers", request).comparison
    assert not verdict.compatible
    assert ("one", "two") in [(r.producer, r.consumer) for r in verdict.reasons]


def test_the_status_counts_what_is_there(raw: Raw) -> None:
    before = raw.call("GetStatus", v1.GetStatusRequest())
    assert dict(before.engines) == {}
    raw.ready(grid("one"))
    raw.register([record("two")])
    status = raw.call("GetStatus", v1.GetStatusRequest())
    assert dict(status.engines) == {"READY": 1, "FORMING": 1}
    assert status.workers == 3
    assert status.store.partition(":")[0] in ("memory", "etcd")
    assert status.store_available
    assert status.book_revision > before.book_revision
    assert status.start_time.seconds <= status.server_time.seconds


CALLS: list[tuple[str, str, Message]] = [
    ("RegisterWorkers", "register_workers", registration(grid())),
    ("GetTopology", "get_topology", v1.GetTopologyRequest(engine_id="e")),
    ("ListEngines", "list_engines", v1.ListEnginesRequest()),
    ("GetStatus", "get_status", v1.GetStatusRequest()),
    ("RevokeLease", "revoke_lease", v1.RevokeLeaseRequest(lease_id="never")),
    ("EvictEngine", "evict_engine", v1.EvictEngineRequest(engine_id="never")),
]


@pytest.mark.parametrize(("name", "field", "request_"), CALLS, ids=[c[0] for c in CALLS])
def test_a_call_answers_the_same_unary_and_over_a_session(
    raw: Raw, name: str, field: str, request_: Message
) -> None:
    def outcome(call: object) -> object:
        try:
            reply = call()  # type: ignore[operator]
        except Failure as failure:
            return failure.reason, failure.message, failure.metadata
        reply.ClearField("server_time") if name == "GetStatus" else None
        reply.ClearField("sessions") if name == "GetStatus" else None
        return reply

    first = type(request_)()
    first.CopyFrom(request_)
    second = type(request_)()
    second.CopyFrom(request_)
    unary = outcome(lambda: raw.call(name, first))
    with raw.session() as session:
        assert outcome(lambda: session.call(field, second)) == unary


def test_health_tells_readiness_and_liveness_apart(raw: Raw) -> None:
    health = health_pb2_grpc.HealthStub(raw.channel)
    for service in ("", "rankbook.v1", "live"):
        reply = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError):
        health.Check(health_pb2.HealthCheckRequest(service="no such"))


def test_reflection_shows_the_service(raw: Raw) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(raw.channel)
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="rankbook.v1.Registry")
    (reply,) = list(stub.ServerReflectionInfo(iter([request])))
    assert reply.file_descriptor_response.file_descriptor_proto
