"""What engines have to do with each other: told to both, and taken back."""

from __future__ import annotations

import pytest
from tests.unit.core.desk import Desk, record

from rankbook import v1


def revoke(desk: Desk, lease: v1.Lease) -> None:
    desk.call("revoke_lease", v1.RevokeLeaseRequest(lease_id=lease.lease_id))


def test_two_engines_in_one_place_both_say_so_until_one_leaves() -> None:
    desk = Desk()
    desk.fill("a", replica="r0", pp_size=1, tp_size=1)
    assert desk.problems("a") == []
    (reply,) = desk.fill("b", replica="r0", pp_size=1, tp_size=1).values()
    assert desk.problems("a") == desk.problems("b") == ["PLACE_TAKEN_TWICE"]
    revoke(desk, reply.lease)

    assert desk.problems("a") == []


def test_replicas_and_dp_ranks_of_one_group_are_no_rivals() -> None:
    desk = Desk()
    desk.fill("a_dp0", replica="a")
    desk.fill("a_dp1", replica="a", dp_rank=1)
    desk.fill("b_dp0", replica="b")

    assert [desk.problems(name) for name in ("a_dp0", "a_dp1", "b_dp0")] == [[], [], []]


def test_sixteen_engines_that_all_say_dp_rank_zero_are_told() -> None:
    desk = Desk()
    for number in range(16):
        one = record(0, 0, engine_id=f"p_dp{number}", replica="p", pp_size=1, tp_size=1)
        desk.register(one)

    assert all(desk.problems(f"p_dp{number}") == ["PLACE_TAKEN_TWICE"] for number in range(16))


def test_one_engine_under_two_names_is_diagnosed_on_both() -> None:
    desk = Desk()
    desk.register(record(0, 0, engine_id="node-a"), record(0, 1, engine_id="node-a"))
    desk.register(record(1, 0, engine_id="node-b"), record(1, 1, engine_id="node-b"))

    for name, other in (("node-a", "node-b"), ("node-b", "node-a")):
        assert desk.state(name) == "FORMING"
        (problem,) = desk.engine(name).problems
        assert problem.reason == "SPLIT_ENGINE"
        assert problem.message.startswith("two engine ids claim one group")
        assert problem.metadata["engines"] == other
    desk.register(record(1, 0, engine_id="node-a"), record(1, 1, engine_id="node-a"))
    assert desk.problems("node-a") == desk.problems("node-b") == []


@pytest.mark.parametrize(
    "other",
    [
        {"pp": 0, "tp": 0},
        {"pp": 1, "tp": 0, "group": "decode"},
        {"pp": 1, "tp": 0, "dp_rank": 1},
        {"pp": 1, "tp": 0, "tp_size": 4},
    ],
    ids=["the same part", "another group", "another dp rank", "another layout"],
)
def test_two_engines_that_form_apart_are_no_split(other: dict[str, object]) -> None:
    desk = Desk()
    desk.register(record(0, 0, engine_id="a"))
    desk.register(record(engine_id="b", **other))  # type: ignore[arg-type]

    assert desk.problems("a") == desk.problems("b") == []


def test_many_engines_that_start_at_once_are_no_split() -> None:
    desk = Desk()
    leases = [desk.register(record(n % 2, n % 3 % 2, engine_id=f"e{n}")).lease for n in range(40)]
    assert all(desk.problems(f"e{n}") == [] for n in range(40))
    for lease in leases[16:]:
        revoke(desk, lease)
    assert desk.problems("e0") == ["SPLIT_ENGINE"]
    for lease in leases[2:16]:
        revoke(desk, lease)

    assert desk.problems("e0") == desk.problems("e1") == ["SPLIT_ENGINE"]


def test_one_port_of_one_host_advertised_twice_is_told_to_both() -> None:
    desk = Desk()
    desk.register(record(0, 0, engine_id="a", host="10.0.0.1", port=5600))
    assert desk.problems("a") == []
    lease = desk.register(record(0, 0, engine_id="b", group="x", host="10.0.0.1", port=5600)).lease

    (problem,) = desk.engine("a").problems
    assert problem.reason == "DUPLICATE_ADDRESS"
    assert problem.severity == v1.SEVERITY_WARNING
    assert "10.0.0.1:5600" in problem.message
    assert problem.metadata["other_engine"] == "b"
    assert desk.problems("b") == ["DUPLICATE_ADDRESS"]
    revoke(desk, lease)
    assert desk.problems("a") == []


def test_two_stages_of_one_engine_on_one_port_are_told() -> None:
    desk = Desk()
    desk.register(record(0, 0, host="10.0.0.1", port=5600))
    desk.register(record(1, 0, host="10.0.0.1", port=5600))

    (problem,) = desk.engine().problems
    assert problem.metadata["slot"] == "pp0 tp0"
    assert problem.metadata["other_slot"] == "pp1 tp0"


def test_an_address_that_moves_away_is_no_longer_shared() -> None:
    desk = Desk()
    desk.register(record(0, 0, host="10.0.0.1", port=5600))
    desk.register(record(1, 0, host="10.0.0.1", port=5600))
    desk.register(record(1, 0, host="10.0.0.1", port=5601), sequence=2)

    assert desk.problems() == []


def test_one_address_in_two_spellings_is_one_and_shown_in_brackets() -> None:
    desk = Desk()
    desk.register(record(0, 0, host="2001:db8::1", port=5600))
    desk.register(record(1, 0, host="[2001:DB8:0:0::1]", port=5600))

    (problem,) = desk.engine().problems
    assert problem.message.startswith("[2001:db8::1]:5600 is advertised by pp0 tp0")
    assert (problem.metadata["host"], problem.metadata["port"]) == ("2001:db8::1", "5600")


def test_an_address_without_a_port_is_shared_by_nobody() -> None:
    desk = Desk()
    desk.register(record(0, 0, host="10.0.0.1"))
    desk.register(record(1, 0, host="10.0.0.1"))

    assert desk.problems() == []


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "127.0.0.1",
        "0.0.0.0",
        "::",
        "::1",
        "[::1]",
        "LOCALHOST",
        "127.8.9.1",
        "::ffff:127.0.0.1",
    ],
)
def test_an_address_other_hosts_cannot_reach_is_flagged(host: str) -> None:
    desk = Desk()
    desk.register(record(0, 1, host=host, port=5600))

    (problem,) = desk.engine().problems
    assert problem.reason == "LOOPBACK_ADDRESS"
    assert problem.severity == v1.SEVERITY_WARNING
    assert problem.metadata["slots"] == "pp0 tp1"


@pytest.mark.parametrize("host", ["10.0.0.5", "2001:db8::1", "node-7", "localhost.example.org"])
def test_an_address_other_hosts_can_reach_is_not(host: str) -> None:
    desk = Desk()
    desk.register(record(0, 0, host=host, port=5600))

    assert desk.problems() == []


def test_several_labelled_addresses_are_kept_in_order() -> None:
    desk = Desk()
    one = record(0, 0)
    for label in ("rdma", "tcp", "rdma"):
        one.addresses.add(host=f"10.0.0.{len(one.addresses)}", port=1, label=label)
    desk.register(one)

    (view,) = desk.book.workers("e_dp0")
    assert [a.label for a in view.record.addresses] == ["rdma", "tcp", "rdma"]


def test_who_got_a_problem_from_a_neighbour_is_among_the_touched() -> None:
    desk = Desk()
    desk.fill("a", replica="r", pp_size=1, tp_size=1)
    desk.book.take_touched()
    desk.fill("b", replica="r", pp_size=1, tp_size=1)

    assert desk.book.take_touched() == {"a", "b"}
    assert desk.book.take_touched() == set()
