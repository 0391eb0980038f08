"""Taking records out: at once, in pieces, and so that nothing brings them back."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.desk import Desk, record, registration

from rankbook import v1
from rankbook.errors import LimitExceeded, NotFound, Reason, Refused


def leave(desk: Desk, boot_id: str, sequence: int = 9, **fields: Any) -> int:
    request = v1.DeregisterRequest(
        engine_id="e_dp0", generation="g1", boot_id=boot_id, sequence=sequence, **fields
    )
    return int(desk.call("deregister", request).removed)


def test_a_second_deregistration_is_ok_and_finds_nothing() -> None:
    desk = Desk()
    desk.register(record(0, 0, boot_id="a"))

    assert [leave(desk, "a"), leave(desk, "a"), leave(desk, "a", slots=[v1.Slot()])] == [1, 0, 0]
    assert desk.revision == 2


def test_a_process_takes_out_only_what_it_holds() -> None:
    desk = Desk()
    desk.register(record(0, 0, boot_id="a"), record(0, 1, boot_id="a"))
    desk.register(record(1, 0, boot_id="b"))

    assert leave(desk, "a") == 2
    assert [view.slot for view in desk.book.workers("e_dp0")] == [(1, 0, 0)]


def test_one_slot_of_many_can_be_taken_out() -> None:
    desk = Desk()
    desk.register(record(0, 0, boot_id="a"), record(0, 1, boot_id="a"))

    assert leave(desk, "a", slots=[v1.Slot(tp_rank=1)]) == 1
    assert desk.engine().present == 1


def test_a_slot_that_was_never_held_is_not_found() -> None:
    desk = Desk()
    desk.register(record(0, 0, boot_id="a"))

    with pytest.raises(NotFound) as caught:
        leave(desk, "a", slots=[v1.Slot(pp_rank=1)])

    assert caught.value.reason == Reason.WORKER_NOT_FOUND
    assert desk.engine().present == 1


def test_a_deregistration_that_comes_late_does_not_take_out_what_came_after() -> None:
    desk = Desk()
    desk.register(record(0, 0, boot_id="a"), sequence=5)

    with pytest.raises(Refused) as caught:
        leave(desk, "a", sequence=4)

    assert caught.value.reason == Reason.SEQUENCE_STALE
    assert desk.engine().present == 1


@pytest.mark.parametrize("how", ["deregister", "revoke", "expire"])
def test_a_delayed_duplicate_never_brings_a_record_back(how: str) -> None:
    desk = Desk()
    request = registration(record(0, 0, boot_id="a"))
    lease_id = desk.call("register", request).lease.lease_id
    if how == "deregister":
        leave(desk, "a")
    elif how == "revoke":
        desk.call("revoke_lease", v1.RevokeLeaseRequest(lease_id=lease_id))
    else:
        desk.mono_s += 11
        desk.expire()

    for _ in range(2):
        with pytest.raises(Refused) as caught:
            desk.call("register", request)
        assert caught.value.reason == Reason.SEQUENCE_STALE
        desk.restart(seed=1)
    assert desk.state() == "GONE"
    desk.register(record(0, 0, boot_id="a"), sequence=10)
    assert desk.state() == "FORMING"


def test_the_core_leaves_with_the_process_it_lives_in() -> None:
    desk = Desk()
    desk.fill(pp_size=1, tp_size=1)
    desk.seal(core="e_dp0.g1.0.0", sequence=2)
    assert leave(desk, "e_dp0.g1.0.0") == 1

    assert not desk.engine().HasField("core")
    with pytest.raises(Refused):
        desk.register(record(0, 0, pp_size=1, tp_size=1), sequence=9)


def test_a_core_of_its_own_can_leave_and_its_old_seal_is_no_way_back() -> None:
    desk = Desk()
    desk.fill()
    request = desk.seal_request(core="core", sequence=3)
    desk.call("seal", request)
    leave(desk, "core", sequence=4)
    assert desk.state() == "DEGRADED"

    for sequence in (3, 4):
        request.sequence = sequence
        with pytest.raises(Refused) as caught:
            desk.call("seal", request)
        assert caught.value.reason == Reason.SEQUENCE_STALE
    assert desk.state() == "DEGRADED"


def test_a_lease_is_revoked_once_and_a_second_call_is_ok() -> None:
    desk = Desk()
    lease = desk.register(record(0, 0), record(0, 1)).lease.lease_id
    request = v1.RevokeLeaseRequest(lease_id=lease)

    assert [desk.call("revoke_lease", request).removed for _ in range(2)] == [2, 0]
    assert desk.revision == 2


def test_a_lease_of_very_many_records_ends_in_transactions_that_fit() -> None:
    """A node agent's lease: what one transaction cannot hold follows at once, and
    nothing can be added to it meanwhile."""
    desk = Desk()
    kind = {"pp_size": 1, "tp_size": 256, "boot_id": "n"}
    for part in range(4):
        records = [record(0, tp, **kind) for tp in range(64 * part, 64 * part + 64)]
        desk.register(*records, sequence=part + 1, key="node")
    lease = desk.book.lease_of_key["node"]
    revision = desk.revision

    removed = desk.call("revoke_lease", v1.RevokeLeaseRequest(lease_id=lease)).removed

    assert desk.engine().present == 256 - removed
    with pytest.raises(Refused):
        desk.register(record(0, 0, **kind), sequence=9, lease_id=lease)
    assert 2 <= desk.expire() <= 4
    assert desk.state() == "GONE"
    assert desk.engine().revision == desk.revision > revision
    assert len(desk.book.emptied("e_dp0")) == 256


def test_a_lease_over_many_engines_ends_in_transactions_that_fit() -> None:
    desk = Desk()
    for number in range(100):
        desk.register(record(0, 0, engine_id=f"e{number}", boot_id="n"), key="node")
    desk.mono_s += 11
    desk.expire()

    assert desk.book.worker_count == 0
    assert len(desk.book.tombstones) == 100


def test_more_slots_than_one_call_takes_out_is_a_limit_that_says_what_to_do() -> None:
    desk = Desk()
    kind = {"pp_size": 1, "tp_size": 128, "boot_id": "n"}
    for part in range(2):
        records = [record(0, tp, **kind) for tp in range(64 * part, 64 * part + 64)]
        desk.register(*records, sequence=part + 1)

    with pytest.raises(LimitExceeded) as caught:
        leave(desk, "n")

    assert "revoke" in caught.value.message
    assert desk.engine().present == 128


def test_slots_that_were_emptied_are_told_with_their_revision() -> None:
    desk = Desk()
    desk.ready()
    leave(desk, "e_dp0.g1.1.0")

    assert desk.book.emptied("e_dp0") == [((1, 0, 0), desk.revision)]
    desk.register(record(1, 0), sequence=10)
    assert desk.book.emptied("e_dp0") == []
