"""Leases: granted by key, renewed from memory, never charged for our own stall."""

from __future__ import annotations

import pytest
from tests.unit.core.desk import Desk, record, registration

from rankbook import v1
from rankbook.errors import LimitExceeded, Overloaded, Reason, Refused
from rankbook_server.core.book import BookLimits, Decision
from rankbook_server.core.keys import lease_key
from rankbook_server.core.ops import Put


def state_of(desk: Desk, lease_id: str) -> str:
    (status,) = desk.renew(lease_id)
    return v1.LeaseState.Name(status.state).removeprefix("LEASE_STATE_")


@pytest.mark.parametrize(
    ("wish", "granted"), [(0, 10), (0.5, 2), (2, 2), (7.5, 7.5), (300, 300), (5000, 300)]
)
def test_a_wish_is_granted_as_the_nearest_bound(wish: float, granted: float) -> None:
    lease = Desk().register(record(0, 0), ttl_s=wish).lease

    assert lease.ttl.seconds + lease.ttl.nanos / 1e9 == granted


def test_the_same_key_is_the_same_lease_while_it_lives() -> None:
    desk = Desk()
    first = desk.register(record(0, 0), key="process").lease
    second = desk.register(record(0, 1), key="process").lease

    assert first == second
    assert desk.book.leases_alive == 1


def test_the_key_of_a_dead_lease_means_a_new_one_also_after_a_restart() -> None:
    desk = Desk()
    old = desk.register(record(0, 0), key="process").lease.lease_id
    desk.mono_s += 10
    new = desk.register(record(0, 1), key="process").lease.lease_id
    assert new != old

    for seed in range(4):
        desk.restart(seed)
        assert desk.book.lease_of_key == {"process": new}
    desk.expire()
    assert list(desk.book.leases) == [new]
    assert desk.engine().present == 1


def test_a_write_under_a_living_lease_renews_it() -> None:
    """The reply names the full time to live, so it must be so."""
    desk = Desk()
    lease = desk.register(record(0, 0), key="process").lease.lease_id
    desk.mono_s += 9
    desk.register(record(0, 1), key="process")
    desk.mono_s += 9
    desk.expire()

    assert desk.engine().present == 2
    assert state_of(desk, lease) == "ALIVE"


def test_a_lease_that_is_not_renewed_ends_with_its_records() -> None:
    desk = Desk()
    lease = desk.register(record(0, 0)).lease.lease_id
    desk.mono_s += 9.9
    assert desk.expire() == 0
    desk.mono_s += 0.1
    assert state_of(desk, lease) == "ENDED"
    desk.expire()

    assert desk.state() == "GONE"
    assert state_of(desk, lease) == "ENDED"
    (note,) = desk.notes
    assert (note.event, note.fields["removed"]) == ("lease_expired", 1)


def test_a_renewed_lease_lives_on() -> None:
    desk = Desk()
    lease = desk.register(record(0, 0)).lease.lease_id
    for _ in range(10):
        desk.mono_s += 8
        assert state_of(desk, lease) == "ALIVE"
        assert desk.expire() == 0

    assert desk.revision == 1


def test_a_lease_never_granted_is_unknown() -> None:
    assert state_of(Desk(), "never") == "UNKNOWN"


def test_a_lease_whose_start_was_replaced_is_fenced_and_names_the_successor() -> None:
    desk = Desk()
    lease = desk.register(record(0, 0)).lease.lease_id
    desk.register(record(0, 0, generation="g2"))

    (status,) = desk.renew(lease)

    assert status.state == v1.LEASE_STATE_FENCED
    assert status.replaced_by == v1.Successor(engine_id="e_dp0", epoch=2, generation="g2")
    desk.mono_s += 11
    desk.expire()
    assert lease not in desk.book.leases


def test_a_lease_that_keeps_one_current_start_is_not_fenced() -> None:
    desk = Desk()
    lease = desk.register(record(0, 0), key="node").lease.lease_id
    desk.register(record(0, 0, engine_id="f"), key="node")
    desk.register(record(0, 0, generation="g2"))

    assert state_of(desk, lease) == "ALIVE"


def test_an_evicted_start_fences_its_leases() -> None:
    desk = Desk()
    lease = desk.register(record(0, 0)).lease.lease_id
    desk.call("evict", v1.EvictEngineRequest(engine_id="e_dp0"))

    assert state_of(desk, lease) == "FENCED"


def test_a_changed_time_to_live_is_kept_over_a_restart() -> None:
    """A worker asks for longer while it loads, and shortens it later; a restart in
    between must not bring the other one back."""
    desk = Desk()
    lease = desk.register(record(0, 0), ttl_s=300).lease.lease_id
    desk.renew(lease, ttl_s=10)
    due = desk.book.next_deadline()
    assert due is not None
    assert due <= desk.mono_s
    assert desk.expire() == 1
    desk.restart(seed=0)
    desk.mono_s += 10
    desk.expire()

    assert desk.state() == "GONE"


def test_a_longer_time_to_live_holds_at_once() -> None:
    desk = Desk()
    lease = desk.register(record(0, 0), ttl_s=2).lease.lease_id
    desk.renew(lease, ttl_s=100)
    desk.mono_s += 90
    desk.expire()

    assert desk.state() == "FORMING"


def test_a_shorter_time_to_live_holds_at_once() -> None:
    desk = Desk()
    lease = desk.register(record(0, 0), ttl_s=300).lease.lease_id
    desk.renew(lease, ttl_s=2)
    desk.mono_s += 2
    desk.expire()

    assert desk.state() == "GONE"


def test_after_a_stall_every_lease_has_its_full_time_and_not_more() -> None:
    desk = Desk()
    desk.register(record(0, 0), ttl_s=10)
    desk.mono_s += 1000
    desk.book.grant_grace(desk.now)
    desk.mono_s += 9.9
    assert desk.expire() == 0
    desk.mono_s += 0.1
    desk.expire()

    assert desk.state() == "GONE"


def test_a_lease_that_was_given_up_gets_no_grace() -> None:
    desk = Desk()
    lease = desk.register(*[record(0, tp, boot_id="n", tp_size=64) for tp in range(64)]).lease
    desk.register(
        *[record(1, tp, boot_id="n", tp_size=64) for tp in range(64)],
        sequence=2,
        lease_id=lease.lease_id,
    )
    desk.call("revoke_lease", v1.RevokeLeaseRequest(lease_id=lease.lease_id))
    assert 0 < desk.engine().present < 128
    desk.restart(seed=4)
    desk.expire()

    assert desk.state() == "GONE"
    assert not desk.book.leases


def test_an_ended_lease_takes_no_more_records() -> None:
    desk = Desk()
    lease = desk.register(record(0, 0)).lease.lease_id
    desk.call("revoke_lease", v1.RevokeLeaseRequest(lease_id=lease))

    with pytest.raises(Refused) as caught:
        desk.register(record(0, 1), lease_id=lease)

    assert caught.value.reason == Reason.LEASE_ENDED


def test_one_lease_more_than_the_bound_is_refused() -> None:
    desk = Desk(BookLimits(max_leases=1))
    desk.register(record(0, 0), key="a")

    with pytest.raises(Overloaded) as caught:
        desk.register(record(0, 1), key="b")

    assert caught.value.reason == Reason.TOO_MANY_LEASES
    assert caught.value.metadata["bound"] == "1"
    desk.register(record(0, 1), key="a")


def test_a_lease_of_very_many_engines_is_bounded_and_never_falsely_fenced() -> None:
    desk = Desk()
    for number in range(256):
        desk.register(record(0, 0, engine_id=f"e{number}", boot_id="n"), key="node")
    with pytest.raises(LimitExceeded) as caught:
        desk.register(record(0, 0, engine_id="one-more", boot_id="n"), key="node")
    assert caught.value.metadata["bound"] == "256"

    desk.register(record(0, 0, engine_id="e0", generation="g2"))
    desk.register(record(0, 0, engine_id="one-more", boot_id="n"), key="node")

    lease = desk.book.lease_of_key["node"]
    assert state_of(desk, lease) == "ALIVE"


def test_two_thousand_leases_that_end_at_once_go_with_few_transactions() -> None:
    desk = Desk()
    for number in range(2000):
        one = record(0, 0, engine_id=f"e{number}", pp_size=1, tp_size=1)
        desk.quick("register", registration(one, key=f"k{number}"))
    desk.mono_s += 11

    # A slot, a head and a lease each, of 127 operations.
    assert desk.expire() == 48
    assert desk.book.worker_count == 0
    assert not desk.book.leases


def test_a_time_to_live_that_was_told_is_not_lost_by_what_another_server_writes() -> None:
    desk = Desk()
    lease_id = desk.register(record(0, 0), key="a").lease.lease_id
    (status,) = desk.renew(lease_id, ttl_s=20.0)
    assert status.ttl.seconds == 20
    # Another server adds a use and does not know of it yet.
    stored = v1.StoredLease()
    stored.CopyFrom(desk.book.leases[lease_id].stored)
    stored.uses.add(engine_id="other", epoch=1)
    desk.revision += 1
    key = lease_key("default", lease_id)
    desk.book.apply(Put(key, stored.SerializeToString()), desk.revision)
    assert desk.book.leases[lease_id].ttl_s == 20.0
    desk.expire()
    assert desk.book.leases[lease_id].stored.ttl_millis == 20_000
    assert [use.engine_id for use in desk.book.leases[lease_id].stored.uses][-1] == "other"
    assert not desk.book.unsaved


def sizes(decision: Decision[None] | None) -> int:
    assert decision is not None
    assert decision.txn is not None
    return sum(len(op.key) + len(op.value) for op in decision.txn.ops if isinstance(op, Put))


def test_the_end_of_many_fat_engines_at_once_fits_transactions_of_any_store() -> None:
    """60 heads of 52 KB are more than etcd takes in a request."""
    desk = Desk()
    for number in range(60):
        one = record(0, 0, engine_id=f"e{number}", pp_size=1, tp_size=1)
        desk.quick("register", registration(one, key=f"k{number}"))
        engine = desk.book.engines[f"e{number}"]
        head = v1.StoredEngine()
        head.CopyFrom(engine.head)
        head.core.record.connector = "c" * 52_000
        desk.revision += 1
        desk.book.apply(desk.book.head_put(f"e{number}", head), desk.revision)
    desk.mono_s += 11
    count = 0
    while (end := desk.book.expire(desk.now)) is not None:
        assert sizes(end) < 1_000_000
        desk.commit(end)
        count += 1
    assert 1 < count < 10
    assert not desk.book.leases


def test_new_times_to_live_of_leases_with_many_uses_fit_transactions_of_any_store() -> None:
    desk = Desk()
    for number in range(40):
        desk.register(record(0, 0, engine_id=f"e{number}", boot_id=f"b{number}"), key=f"k{number}")
    for lease_id, entry in desk.book.leases.items():
        entry.stored.uses.extend(
            v1.StoredUse(engine_id=f"{'n' * 240}{use}", epoch=1) for use in range(255)
        )
        desk.renew(lease_id, ttl_s=20.0)
    while desk.book.unsaved:
        decision = desk.book.expire(desk.now)
        assert sizes(decision) < 1_000_000
        assert decision is not None
        desk.commit(decision)
