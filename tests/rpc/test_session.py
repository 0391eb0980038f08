"""A session: many calls at a time, matched by number, bounded."""

from __future__ import annotations

import pytest

from rankbook import v1
from rankbook_server.rpc.session import MAX_IN_FLIGHT, MAX_WATCHES

from .support import Raw, failure_of, grid, record, registration, span


def reason(reply: v1.SessionResponse) -> str:
    return failure_of(reply.status).reason


def test_many_calls_are_in_flight_and_each_gets_its_own_reply(raw: Raw) -> None:
    count = 200
    with raw.session() as session:
        ids = {
            session.send("register_workers", registration([record(f"e{n}")])): f"e{n}"
            for n in range(count)
        }
        revisions = {}
        for _ in range(count):
            reply = session.take()
            revisions[ids.pop(reply.request_id)] = reply.register_workers.revision
    assert not ids
    for name in ("e0", "e199"):
        assert raw.topology(name).engine.revision == revisions[name]


def test_a_failed_call_leaves_the_stream_open(raw: Raw) -> None:
    with raw.session() as session:
        session.send("get_topology", v1.GetTopologyRequest(engine_id="not-there"))
        assert reason(session.take()) == "ENGINE_NOT_FOUND"
        assert session.call("get_status", v1.GetStatusRequest()).store_available


def test_a_frame_that_is_no_message_is_answered_under_number_zero(raw: Raw) -> None:
    with raw.session() as session:
        session.send_bytes(b"\xff\xff")
        reply = session.take()
        assert (reply.request_id, reason(reply)) == (0, "MALFORMED_MESSAGE")
        assert session.call("get_status", v1.GetStatusRequest()).store_available


def test_a_frame_without_a_call_this_server_knows_is_an_unknown_call(raw: Raw) -> None:
    with raw.session() as session:
        session.send_bytes(v1.SessionRequest(request_id=5).SerializeToString())
        reply = session.take()
        assert (reply.request_id, reason(reply)) == (5, "UNKNOWN_CALL")


@pytest.mark.parametrize("request_id", [0, 9])
def test_a_number_that_is_zero_or_in_use_is_refused(raw: Raw, request_id: int) -> None:
    with raw.session() as session:
        session.send("get_topology", v1.GetTopologyRequest(engine_id="e", wait=span(60)), 9)
        frame = v1.SessionRequest(request_id=request_id, get_status=v1.GetStatusRequest())
        session.send_bytes(frame.SerializeToString())
        reply = session.take()
        assert (reply.request_id, reason(reply)) == (request_id, "INVALID_REQUEST")


def test_a_cancelled_wait_answers_cancelled_and_a_late_cancel_is_no_error(raw: Raw) -> None:
    with raw.session() as session:
        wait = session.send("get_topology", v1.GetTopologyRequest(engine_id="e", wait=span(60)))
        session.cancel(wait)
        reply = session.take()
        assert (reply.request_id, reason(reply)) == (wait, "CANCELLED")
        session.cancel(wait)
        session.cancel(12345)
        assert session.call("get_status", v1.GetStatusRequest()).store_available


def test_a_cancelled_watch_answers_cancelled_and_closes(raw: Raw) -> None:
    with raw.session() as session:
        watch = session.send("watch", v1.WatchRequest())
        first = session.take()
        assert first.more
        assert first.watch.synced
        session.cancel(watch)
        reply = session.take()
        assert (reply.request_id, reply.more, reason(reply)) == (watch, False, "CANCELLED")


def test_calls_over_the_bound_are_refused_and_the_others_go_on(raw: Raw) -> None:
    with raw.session() as session:
        waits = {
            session.send("get_topology", v1.GetTopologyRequest(engine_id="e", wait=span(60)))
            for _ in range(MAX_IN_FLIGHT)
        }
        over = session.send("get_status", v1.GetStatusRequest())
        reply = session.take()
        assert (reply.request_id, reason(reply)) == (over, "TOO_MANY_CALLS")
        raw.ready(grid("e"))
        for _ in range(MAX_IN_FLIGHT):
            reply = session.take()
            assert reply.get_topology.topologies[0].engine.state == v1.STATE_READY
            waits.remove(reply.request_id)
        assert not waits


def test_watches_over_the_bound_are_refused(raw: Raw) -> None:
    with raw.session() as session:
        for _ in range(MAX_WATCHES):
            session.send("watch", v1.WatchRequest())
        over = session.send("watch", v1.WatchRequest())
        replies = [session.take() for _ in range(MAX_WATCHES + 1)]
        refused = [reply for reply in replies if reply.HasField("status")]
        assert [(r.request_id, reason(r)) for r in refused] == [(over, "TOO_MANY_WATCHERS")]


def test_a_client_that_closes_its_side_still_gets_its_replies(raw: Raw) -> None:
    with raw.session() as session:
        session.send("watch", v1.WatchRequest())
        wanted = session.send("register_workers", registration(grid()))
        session.close()
        replies = list(session.replies())
    kinds = {(r.request_id, r.WhichOneof("reply")) for r in replies}
    assert (wanted, "register_workers") in kinds


def test_a_stream_that_breaks_ends_no_lease(raw: Raw) -> None:
    with raw.session() as session:
        session.call("register_workers", registration(grid()))
    assert raw.topology().engine.state == v1.STATE_COMPLETE
