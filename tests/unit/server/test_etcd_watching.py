"""The events of an etcd watch come together as whole revisions, however they are sent."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankbook_server.etcd import etcd_pb2 as pb
from rankbook_server.etcd.failures import What, explain, explain_cancel
from rankbook_server.etcd.watching import Revisions


def response(*revisions: int, more: bool = False) -> pb.WatchResponse:
    """A response with an event for each revision, which have keys in order."""
    events = [
        pb.Event(kv=pb.KeyValue(key=b"%d" % at, mod_revision=revision))
        for at, revision in enumerate(revisions)
    ]
    return pb.WatchResponse(events=events, fragment=more)


def told(revisions: Revisions, *responses: pb.WatchResponse) -> list[list[tuple[int, int]]]:
    """After each response, the revisions told of with their number of events."""
    return [[(c.revision, len(c.events)) for c in revisions.add(each)] for each in responses]


def test_a_response_without_more_ends_its_last_revision() -> None:
    assert told(Revisions(1), response(2, 2, 3), response(4)) == [[(2, 2), (3, 1)], [(4, 1)]]


def test_a_revision_that_is_cut_is_told_once_it_is_whole() -> None:
    assert told(
        Revisions(1), response(2, 3, 3, more=True), response(3, more=True), response(3, 4)
    ) == [[(2, 1)], [], [(3, 4), (4, 1)]]


def test_a_cut_between_two_revisions_delays_the_first_until_the_next_is_there() -> None:
    assert told(Revisions(1), response(2, more=True), response(3)) == [[], [(2, 1), (3, 1)]]


def test_an_empty_last_piece_ends_the_revision_too() -> None:
    assert told(Revisions(1), response(2, more=True), response()) == [[], [(2, 1)]]


def test_what_was_seen_is_left_out() -> None:
    assert told(Revisions(5), response(4, 5, 5, 6), response(3, 4, 6, 6, 7)) == [
        [(6, 1)],
        [(7, 1)],
    ]


def test_a_word_without_events_tells_nothing() -> None:
    assert told(Revisions(1), response(), pb.WatchResponse(created=True)) == [[], []]


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    cuts=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_however_it_is_cut_the_same_comes_out(sizes: Sequence[int], cuts: Sequence[bool]) -> None:
    events = [revision for revision, size in enumerate(sizes, start=2) for _ in range(size)]
    pieces: list[list[int]] = [[]]
    for cut, event in zip(cuts, events, strict=False):
        pieces[-1].append(event)
        if cut:
            pieces.append([])
    responses = [response(*piece, more=True) for piece in pieces[:-1]]
    parts = told(Revisions(1), *responses, response(*pieces[-1]))
    assert [part for told_at in parts for part in told_at] == list(enumerate(sizes, start=2))


@pytest.mark.parametrize(
    ("code", "said", "what", "unknown", "elsewhere"),
    [
        ("UNAVAILABLE", "etcdserver: no leader", What.NO_LEADER, False, True),
        ("UNAVAILABLE", "etcdserver: leader changed", What.NO_ANSWER, True, True),
        ("UNAVAILABLE", "etcdserver: request timed out", What.NO_ANSWER, True, True),
        ("UNAVAILABLE", "Socket closed", What.UNREACHABLE, True, True),
        ("UNAVAILABLE", "Connection reset by peer", What.UNREACHABLE, True, True),
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.5:2379: "
            "Failed to connect to remote host: Connection refused",
            What.UNREACHABLE,
            False,
            True,
        ),
        ("UNAVAILABLE", "DNS resolution failed for etcd:2379", What.UNREACHABLE, False, True),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", What.NO_ANSWER, True, True),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", What.TOKEN, False, False),
        ("PERMISSION_DENIED", "etcdserver: permission denied", What.DENIED, False, False),
        ("NOT_FOUND", "etcdserver: requested lease not found", What.LEASE_MISSING, False, False),
        ("UNKNOWN", "raft proposal dropped", What.NO_ANSWER, True, True),
        ("UNKNOWN", "something new", What.OTHER, True, False),
    ],
)
def test_only_what_was_refused_for_certain_counts_as_not_done(
    code: str, said: str, what: What, unknown: bool, elsewhere: bool
) -> None:
    error = explain(grpc.StatusCode[code], said, "10.0.0.5:2379", timeout_s=2.0)
    assert (error.what, error.unknown, error.elsewhere) == (what, unknown, elsewhere)
    assert "10.0.0.5:2379" in error.message
    assert error.metadata["outcome"] == ("unknown" if unknown else "nothing was written")


def test_a_watch_that_etcd_ended_says_why() -> None:
    compacted = explain_cancel("etcdserver: mvcc: required revision has been compacted", 7, "h:1")
    assert (compacted.what, compacted.compact_revision) == (What.COMPACTED, 7)
    assert explain_cancel("etcdserver: permission denied", 0, "h:1").what is What.DENIED
    assert explain_cancel("", 0, "h:1").what is What.OTHER
