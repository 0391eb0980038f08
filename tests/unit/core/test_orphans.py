"""Records that somebody else wrote: without their lease, before it, or without a holder."""

from __future__ import annotations

import pytest
from tests.unit.core.desk import Desk, record, registration

from rankbook import v1
from rankbook_server.core.keys import lease_key, worker_key
from rankbook_server.core.ops import Delete, Put

SLOT = (0, 0, 0)


def desk_with_worker() -> tuple[Desk, str]:
    """A desk with one engine of one worker, and its lease."""
    desk = Desk()
    one = record(0, 0, engine_id="e", pp_size=1, tp_size=1)
    reply = desk.quick("register", registration(one, key="k"))
    return desk, reply.lease.lease_id


def by_hand(desk: Desk, *ops: Put | Delete) -> None:
    """Writes as another client of the store would."""
    desk.revision += 1
    for op in ops:
        desk.book.apply(op, desk.revision)
        if isinstance(op, Put):
            desk.store[op.key] = (op.value, desk.revision)
        else:
            desk.store.pop(op.key, None)


def stored(desk: Desk, lease_id: str, **fields: object) -> Put:
    """The worker's slot, under another lease."""
    worker = v1.StoredWorker()
    worker.CopyFrom(desk.book.engines["e"].slots[SLOT].stored)
    worker.lease_id = lease_id
    if "holders" in fields:
        del worker.holders[:]
    return Put(worker_key("default", "e", SLOT), worker.SerializeToString())


def test_a_lease_that_comes_after_its_records_keeps_them_and_takes_them_along() -> None:
    desk, _ = desk_with_worker()
    lease = v1.StoredLease(version=1, ttl_millis=5000)
    key = lease_key("default", "later")
    by_hand(desk, stored(desk, "later"), Put(key, lease.SerializeToString()))
    assert desk.book.leases["later"].holds == {("e", SLOT)}
    assert not desk.book.orphans
    desk.mono_s += 4.9
    desk.renew("later")
    desk.mono_s += 4.9
    desk.expire()
    assert desk.book.state("e") == v1.STATE_COMPLETE
    desk.mono_s += 0.2
    desk.expire()
    assert desk.book.state("e") == v1.STATE_GONE


@pytest.mark.parametrize("restarted", [False, True])
def test_a_record_without_a_lease_goes_after_a_default_time_to_live(restarted: bool) -> None:
    desk, _ = desk_with_worker()
    by_hand(desk, stored(desk, "never"))
    if restarted:
        desk.mono_s += 8
        desk.restart()
    desk.mono_s += 9.9
    desk.expire()
    assert desk.book.state("e") == v1.STATE_COMPLETE
    deadline = desk.book.next_deadline()
    assert deadline is not None
    assert deadline <= desk.mono_s + 0.2
    desk.mono_s += 0.2
    desk.expire()
    assert desk.book.state("e") == v1.STATE_GONE
    assert not desk.book.orphans
    assert [n for n in desk.notes if n.event == "records_without_lease"]


def test_a_lease_that_was_deleted_from_under_its_records_leaves_nothing_for_ever() -> None:
    desk, lease_id = desk_with_worker()
    by_hand(desk, Delete(lease_key("default", lease_id)))
    assert desk.book.state("e") == v1.STATE_COMPLETE
    desk.mono_s += 10.1
    desk.expire()
    assert desk.book.state("e") == v1.STATE_GONE


def test_a_record_without_a_holder_ends_with_its_lease_and_holds_up_no_other() -> None:
    desk, lease_id = desk_with_worker()
    other = record(0, 0, engine_id="other", pp_size=1, tp_size=1)
    desk.quick("register", registration(other, key="other"))
    by_hand(desk, stored(desk, lease_id, holders=()))
    desk.mono_s += 10.1
    desk.expire()
    assert desk.book.state("e") == desk.book.state("other") == v1.STATE_GONE
    assert not desk.book.leases
