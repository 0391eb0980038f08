"""GetTopology: requirements, waits, what is known already, parts."""

from __future__ import annotations

import random

import pytest

from rankbook import v1
from rankbook.limits import MAX_REPLY_BYTES

from .support import Failure, Raw, grid, record, span

Q = v1.GetTopologyRequest


def failure(raw: Raw, request: v1.GetTopologyRequest) -> Failure:
    with pytest.raises(Failure) as caught:
        raw.call("GetTopology", request)
    return caught.value


def test_a_partial_engine_is_incomplete_with_its_missing_ranks_and_sizes(raw: Raw) -> None:
    raw.register([record(tp=1, tp_size=4)])
    for _ in range(3):
        raw.register([record(tp=1, tp_size=4)])
    error = failure(raw, Q(engine_id="prefill-a-0"))
    assert error.reason == "ENGINE_INCOMPLETE"
    assert (error.metadata["present"], error.metadata["declared"]) == ("1", "4")
    assert error.metadata["missing"] == "pp0 tp0, pp0 tp2, pp0 tp3"
    assert error.metadata["state"] == "FORMING"


def test_ready_is_the_default_and_complete_has_to_be_asked_for(raw: Raw) -> None:
    raw.register(grid())
    assert failure(raw, Q(engine_id="prefill-a-0")).metadata["required"] == "READY"
    complete = Q(engine_id="prefill-a-0", require=v1.REQUIREMENT_COMPLETE)
    assert raw.call("GetTopology", complete).topologies[0].engine.state == v1.STATE_COMPLETE


def test_a_draining_engine_is_complete_and_not_ready(raw: Raw) -> None:
    raw.ready(grid())
    raw.call("DrainEngine", v1.DrainEngineRequest(engine_id="prefill-a-0"))
    assert failure(raw, Q(engine_id="prefill-a-0")).metadata["state"] == "DRAINING"
    complete = Q(engine_id="prefill-a-0", require=v1.REQUIREMENT_COMPLETE)
    assert raw.call("GetTopology", complete).topologies[0].engine.state == v1.STATE_DRAINING


def test_an_invalid_engine_ends_a_wait_at_once(raw: Raw) -> None:
    half = v1.Layers(start_layer=0, end_layer=2)
    raw.register(grid(layers=half))
    error = failure(raw, Q(engine_id="prefill-a-0", wait=span(60)))
    assert error.reason == "ENGINE_INVALID"
    assert "[2, 4)" in error.message


def test_a_dead_engine_is_gone_with_its_successor(raw: Raw) -> None:
    raw.ready(grid("old", replica="r"))
    lease = raw.register(grid("old", replica="r"), sequence=2).lease
    raw.call("RevokeLease", v1.RevokeLeaseRequest(lease_id=lease.lease_id))
    alone = failure(raw, Q(engine_id="old", wait=span(60)))
    assert alone.reason == "ENGINE_GONE"
    raw.register(grid("new", replica="r"))
    error = failure(raw, Q(engine_id="old", wait=span(60)))
    assert error.reason == "ENGINE_GONE"
    assert error.metadata["successor_engine_id"] == "new"


def test_a_generation_that_was_replaced_is_gone_and_names_the_current_one(raw: Raw) -> None:
    raw.ready(grid(generation="g1", payload=b"old"))
    raw.ready(grid(generation="g2", payload=b"new"))
    error = failure(raw, Q(engine_id="prefill-a-0", generation="g1"))
    assert error.reason == "ENGINE_GONE"
    assert error.metadata["successor_generation"] == "g2"
    assert error.metadata["successor_epoch"] == "2"
    reply = raw.call("GetTopology", Q(engine_id="prefill-a-0", generation="g2"))
    assert {w.handshake.payload for w in reply.topologies[0].workers} == {b"new"}


def test_a_generation_that_has_begun_is_waited_for_and_not_gone(raw: Raw) -> None:
    raw.ready(grid(generation="g1"))
    begin = v1.BeginGenerationRequest(engine_id="prefill-a-0", generation="g2")
    raw.call("BeginGeneration", begin)
    wanted = Q(engine_id="prefill-a-0", generation="g2")
    assert failure(raw, wanted).reason == "ENGINE_INCOMPLETE"
    with raw.session() as session:
        wanted.wait.CopyFrom(span(20))
        session.send("get_topology", wanted)
        raw.ready(grid(generation="g2"))
        assert session.take().get_topology.topologies[0].engine.generation == "g2"


def test_a_wait_for_an_unknown_engine_ends_when_it_is_ready(raw: Raw) -> None:
    with raw.session() as session:
        session.send("get_topology", Q(engine_id="prefill-a-0", wait=span(20)))
        raw.ready(grid())
        reply = session.take().get_topology
    assert reply.topologies[0].engine.state == v1.STATE_READY
    assert len(reply.topologies[0].workers) == 2
    assert reply.book_revision >= reply.topologies[0].engine.revision


def test_a_wait_whose_time_is_up_says_what_was_lacking(raw: Raw) -> None:
    raw.register([record()])
    error = failure(raw, Q(engine_id="prefill-a-0", wait=span(0.2)))
    assert error.reason == "ENGINE_INCOMPLETE"
    assert failure(raw, Q(engine_id="not-there", wait=span(0.2))).reason == "ENGINE_NOT_FOUND"


def test_the_callers_deadline_shortens_a_wait_so_that_the_reason_arrives(raw: Raw) -> None:
    raw.register([record()])
    with pytest.raises(Failure, match="ENGINE_INCOMPLETE"):
        raw.call("GetTopology", Q(engine_id="prefill-a-0", wait=span(200)), timeout_s=1.0)


def test_what_the_caller_has_is_not_sent_again(raw: Raw) -> None:
    raw.ready(grid())
    first = raw.call("GetTopology", Q(engine_id="prefill-a-0"))
    known = Q(
        engine_id="prefill-a-0",
        known_revision=first.topologies[0].engine.revision,
        known_book_id=first.book_id,
    )
    same = raw.call("GetTopology", known)
    assert same.not_modified
    assert not same.topologies
    known.known_book_id = "another-book"
    assert not raw.call("GetTopology", known).not_modified


def test_payloads_may_be_left_out_and_slots_chosen(raw: Raw) -> None:
    raw.ready(grid(tp_size=4))
    bare = raw.topology(without_payload=True)
    assert [w.handshake.payload for w in bare.workers] == [b""] * 4
    assert [w.handshake.format for w in bare.workers] == ["test"] * 4
    chosen = raw.topology(slots=[v1.Slot(tp_rank=3), v1.Slot(tp_rank=1)])
    assert [w.slot.tp_rank for w in chosen.workers] == [1, 3]
    assert [w.handshake.payload for w in chosen.workers] == [b"opaque"] * 2
    assert len(chosen.statuses) == 2
    with pytest.raises(Failure, match="INVALID_RECORD"):
        raw.topology(slots=[v1.Slot(tp_rank=4)])


def test_a_group_is_its_engines_that_are_as_required(raw: Raw) -> None:
    raw.ready(grid("a", replica="a"))
    raw.register(grid("b", replica="b"))
    lease = raw.register(grid("c", replica="c")).lease
    raw.call("RevokeLease", v1.RevokeLeaseRequest(lease_id=lease.lease_id))

    def names(require: v1.Requirement.ValueType) -> list[str]:
        reply = raw.call("GetTopology", Q(group="prefill-a", require=require))
        return [topology.engine.engine_id for topology in reply.topologies]

    assert names(v1.REQUIREMENT_READY) == ["a"]
    assert names(v1.REQUIREMENT_COMPLETE) == ["a", "b"]
    assert names(v1.REQUIREMENT_ANY) == ["a", "b"]


def test_a_wait_for_a_group_ends_with_its_first_ready_engine(raw: Raw) -> None:
    raw.register(grid("b", replica="b"))
    assert failure(raw, Q(group="prefill-a")).metadata["states"] == "b is COMPLETE"
    with raw.session() as session:
        session.send("get_topology", Q(group="prefill-a", wait=span(20)))
        raw.ready(grid("a", replica="a"))
        reply = session.take().get_topology
    assert [topology.engine.engine_id for topology in reply.topologies] == ["a"]


def test_the_end_of_an_engine_is_a_change_of_its_group(raw: Raw) -> None:
    lease = raw.register(grid("a", replica="a")).lease
    raw.register(grid("b", replica="b"))
    anything = Q(group="prefill-a", require=v1.REQUIREMENT_ANY)
    first = raw.call("GetTopology", anything)
    anything.known_revision = max(t.engine.revision for t in first.topologies)
    anything.known_book_id = first.book_id
    assert raw.call("GetTopology", anything).not_modified
    raw.call("RevokeLease", v1.RevokeLeaseRequest(lease_id=lease.lease_id))
    after = raw.call("GetTopology", anything)
    assert [t.engine.engine_id for t in after.topologies] == ["b"]


def test_a_large_answer_is_too_large_for_one_message_and_comes_in_parts(raw: Raw) -> None:
    rng = random.Random(7)
    records = [record(tp=tp, tp_size=12, payload=rng.randbytes(400_000)) for tp in range(12)]
    for one in records:
        raw.register([one])
    wanted = Q(engine_id="prefill-a-0", require=v1.REQUIREMENT_COMPLETE)
    assert failure(raw, wanted).reason == "REPLY_TOO_LARGE"
    parts = list(raw.stream("StreamTopology", wanted))
    with raw.session() as session:
        session.send("get_topology", wanted)
        over_session = []
        while True:
            reply = session.take()
            over_session.append(reply.get_topology)
            if not reply.more:
                break
    assert over_session == parts
    assert len(parts) == 2
    assert all(part.ByteSize() <= MAX_REPLY_BYTES for part in parts)
    assert {part.book_revision for part in parts} == {parts[0].book_revision}
    payloads = [w.handshake.payload for p in parts for t in p.topologies for w in t.workers]
    assert payloads == [one.handshake.payload for one in records]
    assert raw.topology(without_payload=True).engine.present == 12


def test_two_reads_at_one_revision_are_byte_identical(raw: Raw) -> None:
    raw.ready(grid(pp_size=2))
    request = Q(namespace=raw.namespace, engine_id="prefill-a-0").SerializeToString()
    first = raw.bytes("GetTopology", request)
    second = raw.bytes("GetTopology", request)
    assert v1.GetTopologyResponse.FromString(first).topologies == (
        v1.GetTopologyResponse.FromString(second).topologies
    )


def test_a_read_that_asks_for_a_written_revision_gets_it(raw: Raw) -> None:
    revision = raw.register(grid()).revision
    wanted = Q(engine_id="prefill-a-0", require=v1.REQUIREMENT_ANY, min_revision=revision)
    assert raw.call("GetTopology", wanted).book_revision >= revision
