"""Whole engines: draining, eviction, tombstones and what is forgotten."""

from __future__ import annotations

import pytest
from tests.unit.core.desk import EPOCH_S, Desk, record

from rankbook import v1
from rankbook.convert import duration
from rankbook.errors import Fenced, Gone, Reason
from rankbook_server.core.book import BookLimits


def evict(desk: Desk, **fields: int) -> int:
    request = v1.EvictEngineRequest(engine_id="e_dp0", requested_by="ops", reason="bad", **fields)
    return int(desk.call("evict", request).removed)


def die(desk: Desk) -> None:
    desk.mono_s += 11
    desk.expire()


def test_a_drain_says_who_asked_why_since_when_and_until_when() -> None:
    desk = Desk()
    desk.ready()
    request = v1.DrainEngineRequest(
        engine_id="e_dp0", reason="upgrade", requested_by="ops", deadline=duration(30)
    )

    reply = desk.call("drain", request)

    assert reply.state == v1.STATE_DRAINING
    drain = desk.engine().drain
    assert (drain.reason, drain.requested_by) == ("upgrade", "ops")
    assert drain.start_time.seconds == EPOCH_S + desk.mono_s
    assert drain.deadline.seconds == drain.start_time.seconds + 30
    assert desk.notes[-1].event == "drain_set"
    assert desk.notes[-1].fields["by"] == "ops"


def test_an_equal_drain_and_an_equal_undo_change_nothing() -> None:
    desk = Desk()
    desk.ready()
    for undo in (True, False, False, True, True):
        desk.call("drain", v1.DrainEngineRequest(engine_id="e_dp0", undo=undo))

    assert desk.engine().revision == desk.revision == 7
    assert desk.state() == "READY"


def test_a_gone_engine_has_nothing_to_drain() -> None:
    desk = Desk()
    desk.fill()
    die(desk)

    with pytest.raises(Gone):
        desk.call("drain", v1.DrainEngineRequest(engine_id="e_dp0"))


def test_a_new_start_does_not_inherit_the_drain() -> None:
    desk = Desk()
    desk.ready()
    desk.call("drain", v1.DrainEngineRequest(engine_id="e_dp0"))
    desk.fill(generation="g2")

    assert desk.state() == "COMPLETE"


def test_an_evicted_start_is_out_at_once_and_cannot_come_back() -> None:
    desk = Desk()
    desk.ready()

    assert [evict(desk), evict(desk)] == [4, 0]

    assert desk.state() == "GONE"
    assert desk.engine().present == 0
    assert not desk.engine().HasField("core")
    assert desk.book.workers("e_dp0") == []
    with pytest.raises(Fenced) as caught:
        desk.register(record(0, 0), sequence=9)
    assert caught.value.reason == Reason.EVICTED
    note = next(n for n in desk.notes if n.event == "engine_evicted")
    assert (note.fields["by"], note.fields["removed"]) == ("ops", 4)


def test_an_evicted_engine_says_who_took_it_out_and_why_also_after_a_restart() -> None:
    desk = Desk()
    desk.ready()
    evict(desk)
    desk.restart(seed=3)

    (told,) = desk.engine().problems
    assert (told.reason, told.severity) == ("EVICTED", v1.SEVERITY_INFO)
    assert dict(told.metadata) == {"requested_by": "ops", "why": "bad"}
    assert "by ops: bad" in told.message
    desk.fill(generation="g2")
    assert desk.problems() == []


def test_the_eviction_of_a_start_that_is_gone_is_nothing_readers_see() -> None:
    desk = Desk()
    lease = desk.register(record(0, 0)).lease.lease_id
    desk.call("revoke_lease", v1.RevokeLeaseRequest(lease_id=lease))
    before = v1.Engine.FromString(desk.engine().SerializeToString())
    evict(desk)

    assert desk.engine() == before


def test_a_new_start_of_an_evicted_engine_is_welcome() -> None:
    desk = Desk()
    desk.ready()
    evict(desk)
    desk.ready(generation="g2")

    assert desk.engine().epoch == 2


def test_only_the_epoch_that_is_named_is_evicted() -> None:
    desk = Desk()
    desk.fill()
    desk.fill(generation="g2")

    with pytest.raises(Fenced) as caught:
        evict(desk, epoch=1)

    assert caught.value.metadata["current_epoch"] == "2"
    assert evict(desk, epoch=2) == 4


def test_who_was_away_hears_of_every_slot_of_an_evicted_engine_also_later() -> None:
    desk = Desk()
    desk.ready()
    evict(desk)
    revision = desk.engine().revision
    expected = [((pp, 0, tp), revision) for pp in range(2) for tp in range(2)]
    assert sorted(desk.book.emptied("e_dp0")) == expected
    desk.sweep()
    desk.restart(seed=5)

    assert sorted(desk.book.emptied("e_dp0")) == expected
    assert not any(b"payload" in value for value, _ in desk.store.values())


def test_records_of_a_retired_start_are_swept_from_the_store() -> None:
    desk = Desk()
    desk.ready(payload=b"old-secret")
    desk.register(record(0, 0, generation="g2"))
    desk.sweep()

    assert not any(b"old-secret" in value for value, _ in desk.store.values())
    assert [key for key in desk.store if "/w/" in key] == ["default/w/e_dp0/0.0.0"]
    assert desk.engine().present == 1


def test_a_tombstone_stays_its_time_and_is_then_dropped() -> None:
    desk = Desk(BookLimits(tombstone_ttl_s=60))
    desk.fill()
    die(desk)
    revision = desk.engine().revision
    desk.mono_s += 59
    assert desk.sweep() == 0
    assert desk.state() == "GONE"
    desk.mono_s += 2
    desk.sweep()

    assert desk.book.engine("e_dp0") is None
    assert list(desk.store) == ["default/n"]
    assert desk.book.horizon_revision == revision
    assert desk.book.epoch_floor == 1
    assert not desk.book.groups


def test_over_the_bound_the_oldest_tombstones_go_first() -> None:
    desk = Desk(BookLimits(max_tombstones=2))
    for number in range(4):
        desk.register(record(0, 0, engine_id=f"e{number}"))
        die(desk)
        desk.mono_s += 1
    desk.register(record(0, 0, engine_id="alive"))
    desk.sweep()

    assert list(desk.book.engine_ids()) == ["alive", "e2", "e3"]


def test_a_tombstone_of_very_many_slots_is_dropped_in_transactions_that_fit() -> None:
    desk = Desk()
    for part in range(5):
        records = [
            record(0, tp, pp_size=1, tp_size=320, boot_id="n")
            for tp in range(64 * part, 64 * part + 64)
        ]
        desk.register(*records, sequence=part + 1)
    die(desk)
    revision = desk.engine().revision
    desk.mono_s += 4000
    decision = desk.book.sweep(desk.now)
    assert decision is not None
    desk.commit(decision)
    # Half dropped is still the tombstone it was, also for who reads it anew.
    assert desk.engine().revision == revision
    desk.restart(seed=1)
    assert desk.engine().revision == revision
    desk.sweep()

    assert list(desk.store) == ["default/n"]


def test_a_tombstone_that_comes_back_is_no_tombstone() -> None:
    desk = Desk()
    desk.ready()
    die(desk)
    for pp in range(2):
        for tp in range(2):
            desk.register(record(pp, tp), sequence=2)
    desk.mono_s += 5000
    for lease_id in list(desk.book.leases):
        desk.book.grant_grace(desk.now)
        desk.renew(lease_id)
    desk.sweep()

    assert desk.state() == "DEGRADED"
    desk.seal(core="core-of-e_dp0", sequence=2)
    assert desk.state() == "READY"


def test_the_engine_that_takes_a_dead_ones_place_in_the_group_is_its_successor() -> None:
    desk = Desk()
    desk.fill("old_dp0")
    die(desk)
    desk.register(record(0, 0, engine_id="other", group="decode"))
    desk.register(record(0, 0, engine_id="sibling", dp_rank=1))
    assert not desk.engine("old_dp0").HasField("successor")

    desk.register(record(0, 0, engine_id="new_dp0", generation="g9"))

    assert desk.engine("old_dp0").successor == v1.Successor(
        engine_id="new_dp0", epoch=1, generation="g9"
    )
    assert desk.engine("old_dp0").revision == desk.revision
    desk.register(record(0, 0, engine_id="newer_dp0", generation="g9"))
    assert desk.engine("old_dp0").successor.engine_id == "new_dp0"


def test_an_engine_that_dies_beside_its_replacement_names_it() -> None:
    desk = Desk()
    lease = desk.register(record(0, 0, engine_id="old", replica="r0")).lease.lease_id
    desk.register(record(0, 0, engine_id="new", replica="r0"))
    desk.call("revoke_lease", v1.RevokeLeaseRequest(lease_id=lease))

    assert desk.engine("old").successor.engine_id == "new"


def test_an_engine_that_returns_has_no_successor_any_more() -> None:
    desk = Desk()
    desk.register(record(0, 0, engine_id="old"))
    die(desk)
    desk.register(record(0, 0, engine_id="new"))
    desk.register(record(0, 0, engine_id="old"), sequence=2)

    assert not desk.engine("old").HasField("successor")


def test_a_thousand_crashes_leave_nothing_behind_but_a_bounded_rest() -> None:
    desk = Desk(BookLimits(tombstone_ttl_s=60))
    for number in range(1000):
        desk.register(record(0, 0, generation=f"g{number}", boot_id=f"b{number}"))
        if number % 10 == 9:
            die(desk)
            desk.sweep()
    assert desk.book.worker_count == 0
    assert desk.book.leases_alive == 0
    assert len(desk.store) <= 2
    assert sum(len(value) for value, _ in desk.store.values()) < 4096
    desk.mono_s += 61
    desk.sweep()

    assert list(desk.store) == ["default/n"]
    assert desk.book.epoch_floor == 1000
