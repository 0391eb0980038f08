"""Claims about `rankbook._calls` and `rankbook._scripts`: what is sent, and what is made of it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rankbook
from rankbook import limits, v1
from rankbook._calls import METHODS, Answer, Call, attempt_until, shortened
from rankbook._rpc import advance
from rankbook._scripts import (
    batches,
    clock_offset,
    get_topology,
    join_topologies,
    list_engines,
    register_workers,
)
from rankbook.convert import duration, to_message


def play(script, *replies):
    """Answers a script; its requests and what it returns."""
    calls, answer = [], None
    waiting = list(replies)
    try:
        while True:
            calls.append(script.send(answer))
            answer = Answer((waiting.pop(0),), 0.0, 0.0)
    except StopIteration as done:
        return calls, done.value


def messages(count: int, size: int = 0):
    return [
        v1.WorkerRecord(
            engine_id="e",
            generation="g",
            slot=v1.Slot(tp_rank=n),
            handshake=v1.Handshake(payload=bytes(size)),
        )
        for n in range(count)
    ]


@given(st.lists(st.integers(0, 500_000), max_size=80))
def test_batches_keep_the_order_and_the_limits_and_are_no_more_than_needed(sizes):
    records = [messages(1, size)[0] for size in sizes]
    cut = list(batches(records))
    assert [record for batch in cut for record in batch] == records
    for batch in cut:
        assert len(batch) <= limits.MAX_BATCH_RECORDS
        assert sum(record.ByteSize() for record in batch) <= limits.MAX_BATCH_BYTES
    for batch, following in itertools.pairwise(cut):
        full = len(batch) == limits.MAX_BATCH_RECORDS
        total = sum(record.ByteSize() for record in [*batch, following[0]])
        assert full or total > limits.MAX_BATCH_BYTES


def test_a_batch_never_spans_two_starts():
    records = messages(3)
    records[1].generation = "g2"
    assert [len(batch) for batch in batches(records)] == [1, 1, 1]


def test_a_cut_registration_counts_up_and_stays_on_its_first_lease(made):
    records = [made.record(0, n, tp_size=70, boot_id="node") for n in range(70)]
    replies = [
        v1.RegisterWorkersResponse(
            lease=v1.Lease(lease_id="l1", ttl=duration(10), renew_interval=duration(3)),
            epoch=2,
            revision=revision,
            record_digests=[bytes([revision])] * count,
        )
        for revision, count in ((1, 64), (2, 6))
    ]
    calls, registered = play(
        register_workers(
            "default", records, sequence=5, lease_key="k", lease_id=None, ttl_s=10, epoch=2
        ),
        *replies,
    )
    assert [(c.request.sequence, len(c.request.records)) for c in calls] == [(5, 64), (6, 6)]
    assert [(c.request.lease.lease_key, c.request.lease.lease_id) for c in calls] == [
        ("k", ""),
        ("", "l1"),
    ]
    assert (registered.sequence, registered.revision) == (6, 2)
    assert len(registered.record_digests) == 70


def test_the_last_of_a_cut_registration_is_checked_before_the_first_is_sent(made):
    records = [made.record(0, n, tp_size=70) for n in range(70)]
    records[-1] = made.record(0, 70, tp_size=70)
    script = register_workers(
        "default", records, sequence=1, lease_key="k", lease_id=None, ttl_s=None, epoch=0
    )
    with pytest.raises(rankbook.BadRecord, match="tp_rank"):
        next(script)


def test_all_pages_of_a_list_are_walked(made):
    pages = [
        v1.ListEnginesResponse(
            engines=[made.engine("a"), made.engine("b")],
            next_page_token="t",
            book_revision=7,
            book_id="k",
        ),
        v1.ListEnginesResponse(engines=[made.engine("c")], book_revision=9, book_id="k"),
    ]
    calls, listed = play(list_engines("default", rankbook.EngineFilter(), min_revision=3), *pages)
    assert [c.request.page_token for c in calls] == ["", "t"]
    assert {c.request.min_revision for c in calls} == {3}
    assert [engine.engine_id for engine in listed.engines] == ["a", "b", "c"]
    # What is certain of all pages is the first one's.
    assert listed.book_revision == 7


def test_parts_of_an_answer_are_joined_engine_by_engine(made):
    def piece(name, ranks, *, headed=True):
        return v1.Topology(
            engine=made.engine(name) if headed else None,
            workers=[made.worker(name, rank, b"") for rank in ranks],
            statuses=made.statuses(ranks),
        )

    parts = [
        v1.GetTopologyResponse(topologies=[piece("a", [0, 1])], book_revision=4, book_id="k"),
        v1.GetTopologyResponse(topologies=[piece("a", [2], headed=False), piece("b", [0])]),
        v1.GetTopologyResponse(topologies=[piece("b", [1])]),
    ]
    joined = join_topologies(parts)
    assert [t.engine.engine_id for t in joined] == ["a", "b"]
    assert [[w.slot.tp_rank for w in t.workers] for t in joined] == [[0, 1, 2], [0, 1]]
    assert [s.revision for s in joined[0].statuses] == [0, 1, 2]
    assert {(t.book_id, t.book_revision) for t in joined} == {("k", 4)}


def test_not_modified_is_none():
    asked = {
        "require": rankbook.Requirement.READY,
        "generation": "",
        "min_revision": 0,
        "known_revision": 4,
        "known_book_id": "k",
        "without_payload": False,
        "slots": (),
    }
    reply = v1.GetTopologyResponse(not_modified=True)
    calls, answer = play(get_topology("default", "e", wait_s=2.5, **asked), reply)
    assert answer is None
    request = calls[0].request
    assert (request.known_revision, request.known_book_id) == (4, "k")
    assert (request.wait, calls[0].wait_s) == (duration(2.5), 2.5)


@given(st.floats(0, 1e9), st.floats(0, 1e4), st.floats(0, 10), st.floats(0, 1))
def test_the_true_offset_is_within_the_bound_whenever_in_the_trip_the_clock_was_read(
    offset, sent, trip, when
):
    read_at = sent + trip * when
    measured = clock_offset(read_at + offset, Answer((), sent, sent + trip))
    assert abs(measured.offset_s - offset) <= measured.error_s + 1e-5
    assert measured.error_s == pytest.approx(trip / 2, abs=1e-9)


def test_a_clock_pair_is_one_moment_on_both_clocks():
    measured = rankbook.ClockOffset(offset_s=1_000_000.0, error_s=0.001, measured_s=5.0)
    pair = measured.pair(7.5)
    assert (pair.local_s, pair.error_s) == (7.5, 0.001)
    assert pair.registry_time.timestamp() == pytest.approx(1_000_007.5)


def test_a_repeated_long_poll_waits_no_longer_than_is_left():
    call = Call("GetTopology", v1.GetTopologyRequest(engine_id="e", wait=duration(30)), 30)
    assert shortened(call, 31) is call
    again = shortened(call, 12.5)
    assert again.request.wait == duration(12.5)
    assert call.request.wait == duration(30)
    assert shortened(call, -1).request.wait == duration(0)
    plain = Call("GetStatus", v1.GetStatusRequest())
    assert shortened(plain, 0.1) is plain


def test_a_record_may_be_given_as_a_message_too(made):
    record = made.record()
    as_message = to_message(record, v1.WorkerRecord)
    scripts = [
        register_workers(
            "default", [r], sequence=1, lease_key="k", lease_id=None, ttl_s=None, epoch=0
        )
        for r in (record, as_message)
    ]
    assert next(scripts[0]).request == next(scripts[1]).request


@pytest.mark.parametrize("lease", [{}, {"lease_key": ""}, {"lease_key": "no/slash"}])
def test_a_registration_without_a_good_lease_is_refused(made, lease):
    asked = {"lease_key": None, "lease_id": None, **lease}
    with pytest.raises(rankbook.BadRequest, match="lease_key"):
        next(register_workers("default", [made.record()], sequence=1, ttl_s=None, epoch=0, **asked))


def test_an_answer_that_lacks_what_is_needed_is_a_typed_error(made):
    script = register_workers(
        "default", [made.record()], sequence=1, lease_key="k", lease_id=None, ttl_s=None, epoch=0
    )
    advance(script, None)
    bare = v1.RegisterWorkersResponse(lease=v1.Lease(lease_id="l"))
    with pytest.raises(rankbook.Internal):
        advance(script, Answer((bare,), 0.0, 0.0))


def test_a_callers_own_mistake_stays_its_own():
    script = register_workers(
        "default", 7, sequence=1, lease_key="k", lease_id=None, ttl_s=None, epoch=0
    )
    with pytest.raises(TypeError):
        advance(script, None)


@pytest.mark.parametrize(
    ("name", "endpoints", "wait_s", "until_s"),
    [
        ("RenewLeases", 1, 0.0, 20.0),
        ("RenewLeases", 2, 0.0, 15.0),
        ("RenewLeases", 3, 0.0, 15.0),
        ("GetTopology", 2, 4.0, 20.0),
        ("DrainEngine", 2, 0.0, 20.0),
    ],
)
def test_half_the_time_is_for_another_endpoint_where_a_call_may_go_there(
    name, endpoints, wait_s, until_s
):
    call = Call(name, METHODS[name].request(), wait_s)
    assert attempt_until(call, 10.0, 20.0, endpoints=endpoints) == until_s


@pytest.mark.parametrize(
    ("ask", "limit", "bound"),
    [
        (lambda client: client.get_topology("e", wait_s=300.5), "wait_s", "300.0"),
        (lambda client: client.drain_engine("e", wait_s=60.5), "wait_s", "60.0"),
        (
            lambda client: client.report_peers("b", [rankbook.PeerConnection("e", "g")] * 4097),
            "peers",
            "4096",
        ),
    ],
)
def test_what_the_registry_would_refuse_as_too_much_is_not_sent(ask, limit, bound):
    with rankbook.Client("127.0.0.1:1") as client, pytest.raises(rankbook.LimitExceeded) as caught:
        ask(client)
    assert (caught.value.metadata["limit"], caught.value.metadata["bound"]) == (limit, bound)
