"""Claims about what `rankbook.Registration` takes, before anything is started."""

from __future__ import annotations

import pytest

import rankbook
from rankbook import RegistrationState, Slot
from rankbook._change import change_of
from rankbook._notices import (
    error_from_json,
    error_to_json,
    registered_from_json,
    registered_to_json,
    sealed_from_json,
    sealed_to_json,
)
from rankbook._pipe import LineReader, encode_line
from rankbook.model import CoreRecord, Lease, Process, Registered, Seal, Sealed, SealedSlot


def registration(*args, **kwargs):
    return rankbook.Registration(*args, endpoints="127.0.0.1:1", **kwargs)


@pytest.mark.parametrize(("ttl_s", "timeout_s"), [(10, 5), (10, 6), (2, 1), (10, 0), (10, -1)])
def test_a_call_of_half_the_ttl_or_more_is_a_fault_of_configuration(ttl_s, timeout_s):
    with pytest.raises(rankbook.BadRequest, match="timeout_s"):
        registration(ttl_s=ttl_s, timeout_s=timeout_s)


def test_a_call_below_half_the_ttl_is_fine():
    registration(ttl_s=10, timeout_s=4.9)


@pytest.mark.parametrize("ttl_s", [0, -1, 1.9, 300.1, float("nan")])
def test_a_ttl_out_of_range_is_refused(ttl_s):
    with pytest.raises(rankbook.BadRequest, match="ttl_s"):
        registration(ttl_s=ttl_s)


def test_a_ttl_is_not_shortened_below_twice_the_timeout():
    one = registration(ttl_s=60)
    with pytest.raises(rankbook.BadRequest, match="timeout_s"):
        one.set_ttl(4)
    one.set_ttl(6)


def test_a_bad_record_is_refused_at_construction_and_at_update(made):
    with pytest.raises(rankbook.BadRecord, match="pp_rank"):
        registration([made.record(9, 0)])
    one = registration([made.record()])
    with pytest.raises(rankbook.BadRecord, match="engine_id"):
        one.update(made.record(engine_id="no/slash"))


def test_one_slot_twice_is_refused(made):
    with pytest.raises(rankbook.BadRequest, match="one slot twice"):
        registration([made.record(), made.record()])


def test_an_unknown_mode_is_refused():
    with pytest.raises(rankbook.BadRequest, match="mode"):
        registration(mode="fork")


def test_a_seal_needs_to_know_which_engine():
    one = registration()
    with pytest.raises(rankbook.BadRequest, match="engine_id"):
        one.seal([], CoreRecord(process=Process("core")))


def test_a_seal_takes_its_engine_from_the_records(made):
    one = registration([made.record()])
    one.seal(
        [SealedSlot(Slot(), "boot-0-0", b"d")],
        CoreRecord(process=Process("core")),
    )
    assert one._start_command()["seal"]["engine_id"] == "prefill-a-0"


def test_only_a_published_slot_can_be_withdrawn(made):
    one = registration([made.record()])
    one.withdraw(Slot())
    with pytest.raises(rankbook.BadRequest, match="slot"):
        one.withdraw(Slot(1, 0, 1))


def test_nothing_happens_before_it_is_started(made):
    one = registration([made.record()])
    assert one.state is RegistrationState.PENDING
    assert (one.heartbeat_pid, one.clock_offset) == (None, None)
    with pytest.raises(rankbook.DeadlineExceeded):
        one.wait_registered(0)
    one.stop()
    assert one.state is RegistrationState.STOPPED
    with pytest.raises(rankbook.BadRequest):
        one.start()


def test_wishes_made_before_the_start_are_in_it(made):
    one = registration([made.record()], ttl_s=60, token="secret")
    one.update(made.record(payload=b"new"))
    one.withdraw(Slot())
    one.set_ttl(30)
    (start,) = LineReader().feed(encode_line(one._start_command()))
    assert start["ttl_s"] == 30
    assert start["withdrawn"] == [[0, 0, 0]]
    assert start["n"] == 3
    assert len(start["records"]) == 1


def test_notices_say_the_same_on_both_sides():
    registered = Registered(
        Lease("l", 10.0, 3.25), 3, 9, (b"\x00\xff", b"d"), "book", "boot", sequence=17
    )
    assert registered_from_json(registered_to_json(registered)) == registered
    sealed = Sealed(Seal(2, b"\x01\xff", None, "core"), 3, 10, Lease("l", 10.0, 3.25))
    assert sealed_from_json(sealed_to_json(sealed)) == sealed
    error = rankbook.SealMismatch("differs", metadata={"slots": "1"})
    back = error_from_json(error_to_json(error))
    assert type(back) is rankbook.SealMismatch
    assert (back.reason, back.message, back.metadata) == (
        error.reason,
        error.message,
        error.metadata,
    )
    change = change_of({"state": "SUSPENDED", "error": error_to_json(error)})
    assert change.state is RegistrationState.SUSPENDED
    assert change.error.reason is error.reason
