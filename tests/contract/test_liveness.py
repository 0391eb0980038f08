"""The table of live leases does not grow with leases that ended."""

from __future__ import annotations

from rankbook_server.store.liveness import LivenessTable

from .store_contract import FakeClock


def test_a_lease_ends_exactly_at_its_time() -> None:
    clock = FakeClock()
    table = LivenessTable(clock)
    table.touch({"a": 10.0})
    clock.now_s += 9.5
    assert table.live() == {"a": 0.5}
    clock.now_s += 0.5
    assert table.live() == {}


def test_leases_that_ended_are_let_go_though_nobody_asks() -> None:
    clock = FakeClock()
    table = LivenessTable(clock)
    table.touch({f"long-{number}": 1e6 for number in range(500)})
    for number in range(100_000):
        table.touch({f"short-{number}": 2.0})
        clock.now_s += 1.0
    assert len(table) < 5_000
    assert len(table.live()) == 501


def test_cleared_means_nobody_lives() -> None:
    table = LivenessTable(FakeClock())
    table.touch({"a": 10.0})
    table.clear()
    assert table.live() == {}
