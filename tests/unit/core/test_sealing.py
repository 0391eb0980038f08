"""Sealing: the core and the book saw the same engine, or what differs is said."""

from __future__ import annotations

import pytest
from tests.unit.core.desk import Desk, record

from rankbook import v1
from rankbook.errors import Conflict, Fenced, Incomplete, Reason, Refused, SealMismatch


def test_a_seal_answers_with_its_number_digest_and_lease() -> None:
    desk = Desk()
    desk.fill()

    reply = desk.seal(core="core")

    assert reply.seal.number == 1
    assert reply.seal.boot_id == "core"
    assert len(reply.seal.digest) == 32
    assert reply.epoch == 1
    assert reply.revision == desk.engine().revision
    assert reply.lease.ttl.seconds == 10
    assert desk.engine().core.process.boot_id == "core"


def test_a_cores_address_is_kept_in_one_form_and_repeats_as_it_was_sent() -> None:
    desk = Desk()
    desk.fill()
    for _ in range(2):
        desk.seal(address="[2001:DB8:0::1]")

        assert [a.host for a in desk.engine().core.addresses] == ["2001:db8::1"]
        assert desk.engine().seal.number == 1


def test_a_seal_before_every_rank_is_here_names_the_missing() -> None:
    desk = Desk()
    desk.register(record(0, 0))

    with pytest.raises(Incomplete) as caught:
        desk.seal()

    assert caught.value.metadata["missing"] == "pp0 tp1, pp1 tp0, pp1 tp1"
    assert (caught.value.metadata["present"], caught.value.metadata["declared"]) == ("1", "4")


def test_an_engine_whose_layers_contradict_is_not_sealed() -> None:
    desk = Desk()
    desk.register(record(0, 0, tp_size=1))
    desk.register(record(1, 0, tp_size=1, layers=(30, 61)))

    with pytest.raises(Refused) as caught:
        desk.seal()

    assert caught.value.reason == Reason.ENGINE_INVALID
    assert "30" in caught.value.message


def another_holder(request: v1.SealEngineRequest) -> None:
    request.slots[0].boot_id = "stranger"


def another_record(request: v1.SealEngineRequest) -> None:
    request.slots[3].record_digest = bytes(32)


def one_less(request: v1.SealEngineRequest) -> None:
    del request.slots[1]


@pytest.mark.parametrize(
    ("twist", "words"),
    [
        (another_holder, ["pp0 tp0", "stranger", "e_dp0.g1.0.0"]),
        (another_record, ["pp1 tp1", "another record"]),
        (one_less, ["pp0 tp1", "not seen by the core"]),
    ],
)
def test_a_difference_from_the_book_is_listed(twist: object, words: list[str]) -> None:
    desk = Desk()
    desk.fill()
    request = desk.seal_request()
    assert callable(twist)
    twist(request)

    with pytest.raises(SealMismatch) as caught:
        desk.call("seal", request)

    assert all(word in caught.value.message for word in words)
    assert caught.value.metadata["count"] == "1"
    assert desk.state() == "COMPLETE"


def test_a_repeated_seal_gets_the_first_reply_even_after_a_rank_is_lost() -> None:
    desk = Desk()
    desk.fill()
    request = desk.seal_request()
    first = desk.call("seal", request)
    lease = desk.book.workers("e_dp0")[0].status.lease_id
    desk.call("revoke_lease", v1.RevokeLeaseRequest(lease_id=lease))

    assert desk.call("seal", request) == first
    assert desk.state() == "DEGRADED"


def test_an_equal_seal_under_a_higher_number_is_no_event() -> None:
    desk = Desk()
    desk.ready()
    before = desk.engine().revision

    reply = desk.seal(core="core-of-e_dp0", sequence=2)

    assert reply.seal.number == 1
    assert desk.engine().revision == before


def test_a_core_whose_record_changed_is_an_event_with_the_same_seal() -> None:
    desk = Desk()
    desk.ready()
    before = desk.engine().revision

    desk.seal(core="core-of-e_dp0", sequence=2, address="10.0.0.9")

    assert desk.engine().revision > before
    assert desk.engine().seal.number == 1
    assert desk.engine().core.addresses[0].host == "10.0.0.9"


def test_another_core_cannot_seal_while_the_first_lives() -> None:
    desk = Desk()
    desk.ready()

    with pytest.raises(Conflict) as caught:
        desk.seal(core="another")

    assert caught.value.metadata["holder"] == "core-of-e_dp0"
    assert caught.value.metadata["claimant"] == "another"


def test_another_core_can_seal_once_the_first_is_dead_and_seals_are_numbered() -> None:
    desk = Desk()
    desk.ready()
    desk.mono_s += 9
    for view in desk.book.workers("e_dp0"):
        desk.renew(view.status.lease_id)
    desk.mono_s += 2

    assert desk.seal(core="another").seal.number == 2
    desk.expire()
    assert desk.state() == "READY"


@pytest.mark.parametrize("sequence", [1, 2])
def test_the_seal_of_a_core_that_was_followed_by_another_is_no_way_back(sequence: int) -> None:
    desk = Desk()
    desk.fill()
    old = desk.seal_request(core="first", sequence=2)
    desk.call("seal", old)
    for core in ("first", "second"):
        lease = desk.book.engines["e_dp0"].head.core.lease_id
        desk.call("revoke_lease", v1.RevokeLeaseRequest(lease_id=lease))
        if core == "first":
            desk.seal(core="second")

    old.sequence = sequence
    with pytest.raises(Refused) as caught:
        desk.call("seal", old)

    assert caught.value.reason == Reason.SEQUENCE_STALE
    assert not desk.engine().HasField("core")


def test_a_number_used_for_another_seal_is_refused() -> None:
    desk = Desk()
    desk.ready()
    desk.register(record(0, 0, payload=b"changed"), sequence=2)

    with pytest.raises(Refused) as caught:
        desk.seal(core="core-of-e_dp0", sequence=1)

    assert caught.value.reason == Reason.SEQUENCE_REUSED


def test_a_tool_seals_on_the_first_workers_lease_and_another_tool_may_follow() -> None:
    desk = Desk()
    replies = desk.fill()
    desk.seal(core="tool-1", own_lease=False)
    assert desk.state() == "READY"

    desk.seal(core="tool-2", own_lease=False)
    assert desk.state() == "READY"
    lease = replies["e_dp0.g1.0.0"].lease.lease_id
    desk.call("revoke_lease", v1.RevokeLeaseRequest(lease_id=lease))
    assert not desk.engine().HasField("core")


def test_a_core_of_a_retired_start_is_fenced() -> None:
    desk = Desk()
    desk.fill()
    request = desk.seal_request()
    desk.register(record(0, 0, generation="g2"))

    with pytest.raises(Fenced) as caught:
        desk.call("seal", request)

    assert caught.value.metadata["current_generation"] == "g2"


def test_a_core_and_its_worker_may_be_one_process_under_one_lease() -> None:
    desk = Desk()
    desk.register(record(0, 0, pp_size=1, tp_size=1, boot_id="p"), key="p")
    request = desk.seal_request(core="p", sequence=2)
    request.lease.lease_key = "p"
    desk.call("seal", request)
    assert desk.state() == "READY"
    desk.mono_s += 11
    desk.expire()

    assert desk.state() == "GONE"
    assert desk.book.leases_alive == 0


def test_a_stage_can_be_sealed_again_and_again() -> None:
    desk = Desk()
    desk.fill()
    numbers = []
    for turn in range(1, 4):
        desk.register(record(0, 0, payload=b"%d" % turn), sequence=turn + 1)
        numbers.append(desk.seal(core="core", sequence=turn).seal.number)

    assert numbers == [1, 2, 3]
    desk.register(record(0, 0, generation="g2", pp_size=1, tp_size=1))
    assert desk.seal(core="new-core").seal.number == 1
