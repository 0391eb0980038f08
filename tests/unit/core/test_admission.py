"""Fencing: epochs only rise, and whoever is behind is told so."""

from __future__ import annotations

import pytest
from tests.unit.core.desk import Desk, record

from rankbook import v1
from rankbook.errors import Fenced, Overloaded, Reason, Refused
from rankbook_server.core.book import BookLimits


def begin(desk: Desk, generation: str, engine_id: str = "e_dp0") -> int:
    reply = desk.call(
        "begin_generation",
        v1.BeginGenerationRequest(engine_id=engine_id, generation=generation),
    )
    return int(reply.epoch)


def forget(desk: Desk) -> None:
    """Everything dies, and its tombstone is dropped."""
    desk.mono_s += 11
    desk.expire()
    desk.mono_s += desk.limits.tombstone_ttl_s
    desk.sweep()
    assert list(desk.book.engines) == []


def test_the_first_start_in_a_fresh_book_is_epoch_one() -> None:
    assert begin(Desk(), "g1") == 1


def test_the_same_token_reserves_the_same_epoch() -> None:
    desk = Desk()

    assert [begin(desk, "g1"), begin(desk, "g2"), begin(desk, "g1")] == [1, 2, 1]
    assert desk.revision == 2


def test_a_reservation_is_no_engine_yet() -> None:
    desk = Desk()
    begin(desk, "g1")

    assert list(desk.book.engine_ids()) == []
    assert desk.book.engine("e_dp0") is None


def test_a_reservation_retires_nobody_before_its_first_worker() -> None:
    desk = Desk()
    desk.ready()
    revision = desk.engine().revision
    begin(desk, "g2")

    assert desk.state() == "READY"
    assert desk.engine().revision == revision


def test_of_two_racing_starts_the_later_reservation_wins() -> None:
    desk = Desk()
    begin(desk, "g1")
    begin(desk, "g2")
    desk.register(record(0, 0, generation="g2"))

    with pytest.raises(Fenced) as caught:
        desk.register(record(0, 0, generation="g1"), epoch=1)

    assert caught.value.reason == Reason.GENERATION_FENCED
    assert desk.engine().epoch == 2


def test_the_earlier_reservation_may_come_first_and_is_then_retired() -> None:
    desk = Desk()
    begin(desk, "g1")
    begin(desk, "g2")
    desk.register(record(0, 0, generation="g1"), epoch=1)
    desk.register(record(0, 0, generation="g2"), epoch=2)

    assert desk.engine().generation == "g2"


@pytest.mark.parametrize("told", [1, 3])
def test_another_epoch_than_the_tokens_is_fenced(told: int) -> None:
    desk = Desk()
    begin(desk, "g1")
    desk.register(record(0, 0, generation="g2"))
    assert desk.engine().epoch == 2

    with pytest.raises(Fenced) as caught:
        desk.register(record(0, 1, generation="g2"), epoch=told)

    assert caught.value.reason == Reason.EPOCH_FENCED


def test_an_epoch_the_book_has_forgotten_is_fenced() -> None:
    desk = Desk()
    desk.fill()
    forget(desk)

    with pytest.raises(Fenced) as caught:
        desk.register(record(0, 0), sequence=2, epoch=1)

    assert caught.value.reason == Reason.EPOCH_FENCED
    assert list(desk.book.engine_ids()) == []


def test_an_engine_that_was_dropped_starts_above_its_past_epochs() -> None:
    desk = Desk()
    for generation in ("g1", "g2", "g3"):
        desk.register(record(0, 0, generation=generation))
    forget(desk)
    desk.restart(seed=3)

    assert begin(desk, "g4") == 4


def test_a_reservation_nobody_took_up_counts_for_the_floor() -> None:
    desk = Desk()
    begin(desk, "g1")
    begin(desk, "g2")
    forget(desk)

    assert begin(desk, "g3") == 3


def test_thirty_two_starts_are_remembered_and_the_current_one_always() -> None:
    desk = Desk()
    desk.register(record(0, 0, generation="now"))
    for number in range(40):
        begin(desk, f"later-{number}")

    assert len(desk.book.engines["e_dp0"].head.starts) == 32
    desk.register(record(0, 1, generation="now"), epoch=1)
    assert begin(desk, "later-39") == 41


def test_a_lower_number_of_a_process_that_left_is_no_way_back() -> None:
    """A registration that was under way while its sender took everything out."""
    desk = Desk()
    desk.register(record(0, 0, boot_id="p"), sequence=1)
    desk.call(
        "deregister",
        v1.DeregisterRequest(engine_id="e_dp0", generation="g1", boot_id="p", sequence=5),
    )

    with pytest.raises(Refused) as caught:
        desk.register(record(0, 0, boot_id="p", payload=b"delayed"), sequence=4)

    assert caught.value.reason == Reason.SEQUENCE_STALE


def test_past_holders_of_a_slot_stay_behind_too() -> None:
    desk = Desk()
    desk.register(record(0, 0, boot_id="a"), sequence=7)
    desk.mono_s += 11
    desk.register(record(0, 0, boot_id="b"), sequence=1)
    desk.mono_s += 11
    desk.expire()

    with pytest.raises(Refused) as caught:
        desk.register(record(0, 0, boot_id="a"), sequence=7)

    assert caught.value.reason == Reason.SEQUENCE_STALE
    assert desk.state() == "GONE"


def test_one_engine_more_than_the_bound_is_refused() -> None:
    desk = Desk(BookLimits(max_engines=1))
    desk.register(record(0, 0))

    with pytest.raises(Overloaded) as caught:
        desk.register(record(0, 0, engine_id="f"))

    assert caught.value.reason == Reason.TOO_MANY_ENGINES
    with pytest.raises(Overloaded):
        begin(desk, "g1", "f")
    desk.register(record(0, 0, generation="g2"))


def test_two_starts_that_retire_each_other_within_a_ttl_are_reported() -> None:
    desk = Desk()
    desk.register(record(0, 0, generation="g1"))
    desk.register(record(0, 0, generation="g2"))
    assert "TWO_STARTS" not in desk.problems()
    desk.mono_s += 5
    desk.register(record(0, 0, generation="g3"))

    assert "TWO_STARTS" in desk.problems()


def test_two_restarts_an_hour_apart_are_not_reported() -> None:
    desk = Desk()
    for generation in ("g1", "g2", "g3"):
        lease = desk.register(record(0, 0, generation=generation), ttl_s=300).lease
        for _ in range(12):
            desk.mono_s += 299
            desk.renew(lease.lease_id)

    assert "TWO_STARTS" not in desk.problems()
