from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import pytest

from rankbook.cli.findings import (
    Finding,
    ranks_by_host,
    registry_findings,
    topology_findings,
    unreachable,
)
from rankbook.errors import Unavailable
from rankbook.model import (
    Address,
    CoreRecord,
    Problem,
    Process,
    Severity,
    Slot,
    State,
    Status,
    Topology,
)

Make = Callable[..., Topology]


def ids(found: list[Finding]) -> list[tuple[str, str]]:
    return [(one.id, one.subject) for one in found]


def status(now: dt.datetime, **changes: object) -> Status:
    values: dict[str, object] = {
        "version": "0.1.0",
        "boot_id": "b",
        "book_id": "k",
        "store": "memory:",
        "book_revision": 1,
        "engines": {},
        "workers": 0,
        "leases": 0,
        "watchers": 0,
        "sessions": 0,
        "start_time": now,
        "server_time": now,
        "store_available": True,
        **changes,
    }
    return Status(**values)  # type: ignore[arg-type]


def test_a_healthy_book_has_no_finding(make_topology: Make, now: dt.datetime) -> None:
    found = topology_findings([make_topology([31, 30], 2)], [], now=now)
    assert found == []
    found = registry_findings(status(now), endpoints=["a:1"], client_version="0.1.0", now=now)
    assert found == []


def test_missing_ranks_are_told_by_host(make_topology: Make, now: dt.datetime) -> None:
    gone = [Slot(0, 0, tp) for tp in range(8, 16)]
    topology = make_topology([32], 16, State.FORMING, gone=gone)
    (finding,) = topology_findings([topology], [], now=now)
    assert finding.id == "MISSING_RANKS"
    assert "8 of 16 missing: pp0 tp8-15" in finding.evidence
    assert "node-0 has pp0 tp0-7" in finding.evidence
    assert ranks_by_host(topology) == {"node-0": [Slot(0, 0, tp) for tp in range(8)]}


def test_what_two_engines_say_of_each_other_is_one_finding(
    make_topology: Make, now: dt.datetime
) -> None:
    def side(name: str, other: str) -> Topology:
        problem = Problem("PLACE_TAKEN_TWICE", Severity.WARNING, f"{other} too", {"engines": other})
        return make_topology([32], 1, engine_id=name, problems=[problem])

    found = topology_findings([side("e1", "e2"), side("e2", "e1")], [], now=now)
    assert ids(found) == [("PLACE_TAKEN_TWICE", "e1,e2")]
    assert found[0].why
    assert found[0].next_step


def test_errors_stand_before_warnings(make_topology: Make, now: dt.datetime) -> None:
    warning = Problem("LOOPBACK_ADDRESS", Severity.WARNING, "127.0.0.1")
    error = Problem("LAYERS_OVERLAP", Severity.ERROR, "stages 0 and 1")
    topology = make_topology([32], 1, State.INVALID, problems=[warning, error])
    assert [one.id for one in topology_findings([topology], [], now=now)] == [
        "LAYERS_OVERLAP",
        "LOOPBACK_ADDRESS",
    ]


@pytest.mark.parametrize(("age_s", "found"), [(59, []), (61, ["NOT_SEALED"])])
def test_an_unsealed_engine_is_a_finding_after_a_minute(
    make_topology: Make, now: dt.datetime, age_s: float, found: list[str]
) -> None:
    topology = make_topology([32], 1, State.COMPLETE)
    # The fixture's engine changed 12 s before `now`.
    later = now - dt.timedelta(seconds=12) + dt.timedelta(seconds=age_s)
    assert [one.id for one in topology_findings([topology], [], now=later)] == found


@pytest.mark.parametrize("host", ["169.254.1.1", "fe80::1", "224.0.0.1"])
def test_addresses_that_no_other_host_can_dial_are_a_finding(
    make_topology: Make, now: dt.datetime, host: str
) -> None:
    topology = make_topology([32], 1, addresses=[Address("zmq", host, 5600)])
    (finding,) = topology_findings([topology], [], now=now)
    assert finding.id == "UNROUTABLE_ADDRESS"
    assert host in finding.evidence


def test_a_core_on_loopback_is_a_finding(make_topology: Make, now: dt.datetime) -> None:
    core = CoreRecord(process=Process("c"), addresses=(Address("http", "localhost", 8000),))
    found = topology_findings([make_topology([32], 1, core=core)], [], now=now)
    assert ids(found) == [("LOOPBACK_ADDRESS", "prefill-a-0")]


def test_pairs_that_may_not_pair_are_findings_with_every_reason(now: dt.datetime) -> None:
    (finding,) = topology_findings([], [("p", "d", ["A: one", "B: two"])], now=now)
    assert (finding.id, finding.subject) == ("INCOMPATIBLE_PAIR", "p,d")
    assert finding.evidence == "A: one; B: two"


@pytest.mark.parametrize(
    ("changes", "client", "expected"),
    [
        ({"store_available": False}, "0.1.0", "STORE_AWAY"),
        ({"version": "0.3.0"}, "0.1.9", "VERSION_SKEW"),
        ({"version": "1.1.0"}, "0.1.9", "VERSION_SKEW"),
    ],
)
def test_the_registry_is_looked_at_too(
    now: dt.datetime, changes: dict[str, object], client: str, expected: str
) -> None:
    found = registry_findings(
        status(now, **changes), endpoints=["a:1"], client_version=client, now=now
    )
    assert [one.id for one in found] == [expected]


def test_clocks_apart_are_a_finding_with_the_distance(now: dt.datetime) -> None:
    late = now + dt.timedelta(seconds=3)
    (finding,) = registry_findings(status(now), endpoints=["a:1"], client_version="0.1.0", now=late)
    assert finding.id == "CLOCK_SKEW"
    assert "+3.0 s" in finding.evidence


def test_an_unreachable_registry_is_an_error_that_says_what_to_do() -> None:
    finding = unreachable(["a:1"], Unavailable("nobody answers at a:1"))
    assert finding.as_json() == {
        "id": "SERVER_UNREACHABLE",
        "severity": "ERROR",
        "subject": "a:1",
        "evidence": "nobody answers at a:1",
        "why": finding.why,
        "next_step": finding.next_step,
    }
