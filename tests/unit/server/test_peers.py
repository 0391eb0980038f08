"""Who is connected to whom, for as long as it is worth something."""

from __future__ import annotations

import pytest

from rankbook import v1
from rankbook.errors import BadRequest, Overloaded
from rankbook_server.core.decision import Instant
from rankbook_server.peers import FORGET_S, Peers, drain_outcome


def at(seconds: float) -> Instant:
    return Instant(seconds, 1_700_000_000.0 + seconds)


def report(boot_id: str, *counts: int, engine_id: str = "e") -> v1.ReportPeersRequest:
    return v1.ReportPeersRequest(
        boot_id=boot_id,
        peers=[
            v1.PeerConnection(engine_id=engine_id, generation=f"g{n}", transfers_in_flight=count)
            for n, count in enumerate(counts)
        ],
    )


def test_a_report_replaces_what_its_process_told_before() -> None:
    peers = Peers(10)
    peers.report(report("a", 3, 1), "n", at(0))
    peers.report(report("b", 4), "n", at(0))
    assert peers.in_flight("n", "e", "g0") == 7
    assert peers.report(report("a", 0), "n", at(1)) == {"e"}
    assert peers.in_flight("n", "e", "g0") == 4
    assert peers.in_flight("n", "e", "g1") == 0
    assert peers.in_flight("other", "e", "g0") == 0


def test_a_report_that_is_not_repeated_is_forgotten() -> None:
    peers = Peers(10)
    peers.report(report("a", 1), "n", at(0))
    peers.report(report("b", 2), "n", at(10))
    assert peers.forget(at(FORGET_S - 0.1)) == set()
    assert peers.forget(at(FORGET_S)) == {"e"}
    assert peers.in_flight("n", "e", "g0") == 2
    assert len(peers) == 1


def test_reporters_are_bounded_and_a_known_one_may_go_on() -> None:
    peers = Peers(1)
    peers.report(report("a", 1), "n", at(0))
    with pytest.raises(Overloaded):
        peers.report(report("b", 1), "n", at(1))
    peers.report(report("a", 2), "n", at(2))
    assert peers.in_flight("n", "e", "g0") == 2


def test_a_bad_report_changes_nothing() -> None:
    peers = Peers(10)
    peers.report(report("a", 1), "n", at(0))
    with pytest.raises(BadRequest):
        peers.report(report("a", 5, engine_id="a/b"), "n", at(0))
    assert peers.in_flight("n", "e", "g0") == 1


@pytest.mark.parametrize(
    ("in_flight", "complete", "now_s", "outcome"),
    [
        (0, True, 0.0, v1.DRAIN_OUTCOME_IDLE),
        (2, True, 0.0, v1.DRAIN_OUTCOME_WAITING),
        (2, True, 11.0, v1.DRAIN_OUTCOME_DEADLINE),
        (0, False, 0.0, v1.DRAIN_OUTCOME_WAITING),
        (0, False, 11.0, v1.DRAIN_OUTCOME_DEADLINE),
    ],
)
def test_a_drain_ends_idle_or_by_its_deadline_and_says_which(
    in_flight: int, complete: bool, now_s: float, outcome: v1.DrainOutcome.ValueType
) -> None:
    engine = v1.Engine(state=v1.STATE_DRAINING, drain=v1.Drain())
    engine.drain.deadline.seconds = 10
    found = drain_outcome(engine, in_flight, reports_complete=complete, unix_s=now_s)
    assert found == outcome


def test_an_engine_that_is_gone_or_not_draining_waits_for_nobody() -> None:
    gone = v1.Engine(state=v1.STATE_GONE, drain=v1.Drain())
    assert drain_outcome(gone, 9, reports_complete=False, unix_s=0.0) == v1.DRAIN_OUTCOME_IDLE
    ready = v1.Engine(state=v1.STATE_READY)
    none = drain_outcome(ready, 9, reports_complete=True, unix_s=0.0)
    assert none == v1.DRAIN_OUTCOME_UNSPECIFIED


def test_the_connections_of_all_reports_together_are_bounded() -> None:
    peers = Peers(10, max_connections=5)
    peers.report(report("a", 1, 1, 1), "n", at(0))
    peers.report(report("b", 1, 1), "n", at(0))
    with pytest.raises(Overloaded) as over:
        peers.report(report("c", 1), "n", at(1))
    assert over.value.metadata["bound"] == "5"
    # What was refused changed nothing, and a process may always tell less.
    assert peers.in_flight("n", "e", "g0") == 2
    peers.report(report("a", 0), "n", at(1))
    peers.report(report("c", 1, 1), "n", at(1))
    # The room of a report that ran out is free again.
    peers.report(report("d", 1, 1, 1, 1, 1), "n", at(2 + FORGET_S))
    assert len(peers) == 1
