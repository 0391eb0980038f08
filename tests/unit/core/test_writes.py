"""Putting records in: sizes, holders, order, moves between leases."""

from __future__ import annotations

import hashlib

import pytest
from tests.unit.core.desk import Desk, record, registration

from rankbook import v1
from rankbook.errors import Conflict, Fenced, Reason, Refused
from rankbook_server.core.slots import seal_digest, seal_piece


def test_a_registration_answers_with_all_that_a_worker_needs() -> None:
    desk = Desk()

    reply = desk.register(record(0, 0), ttl_s=12)

    assert (reply.epoch, reply.revision) == (1, 1)
    assert reply.lease.ttl.seconds == 12
    assert reply.lease.renew_interval.seconds == 4
    (digest,) = reply.record_digests
    assert digest == hashlib.sha256(record(0, 0).SerializeToString(deterministic=True)).digest()


def test_defaults_are_filled_in_before_a_record_is_kept_and_digested() -> None:
    desk = Desk()
    sent = record(0, 0)
    sent.namespace = sent.replica = ""
    sent.layout.pcp_size = sent.layout.dcp_size = 0
    sent.kv.block_size = 16
    sent.addresses.add(host="[2001:db8::1]", port=9)

    reply = desk.register(sent)

    (view,) = desk.book.workers("e_dp0")
    assert view.record.namespace == "default"
    assert view.record.replica == "e"
    assert (view.record.layout.pcp_size, view.record.layout.dcp_size) == (1, 1)
    assert view.record.kv.physical_blocks_per_logical == 1
    assert view.record.addresses[0].host == "2001:db8::1"
    assert reply.record_digests[0] == view.status.record_digest


@pytest.mark.parametrize(
    ("engine_id", "replica"),
    [("p0_dp0", "p0"), ("p0_dp13", "p0"), ("p0", "p0"), ("_dp3", "_dp3"), ("a_dpx", "a_dpx")],
)
def test_a_replica_defaults_to_the_engine_without_its_dp_ending(
    engine_id: str, replica: str
) -> None:
    desk = Desk()
    sent = record(0, 0, engine_id=engine_id)
    sent.replica = ""

    desk.register(sent)

    assert desk.engine(engine_id).replica == replica


@pytest.mark.parametrize(
    ("name", "value"),
    [("pp_size", 4), ("tp_size", 8), ("pcp_size", 2), ("dcp_size", 2), ("num_layers", 62)],
)
def test_other_sizes_than_the_generation_declared_are_refused_with_both(
    name: str, value: int
) -> None:
    desk = Desk()
    desk.register(record(0, 0))
    other = record(0, 1)
    setattr(other.layout, name, value)

    with pytest.raises(Conflict) as caught:
        desk.register(other)

    assert caught.value.reason == Reason.LAYOUT_CONFLICT
    assert f"{name} {value}" in caught.value.metadata["sent"]
    assert "num_layers 61" in caught.value.metadata["declared"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("group", "x"), ("replica", "x"), ("dp_rank", 5), ("role", v1.ROLE_CONSUMER)],
)
def test_another_identity_than_the_generation_has_is_refused(name: str, value: object) -> None:
    desk = Desk()
    desk.register(record(0, 0))
    other = record(0, 1)
    setattr(other, name, value)

    with pytest.raises(Conflict) as caught:
        desk.register(other)

    assert caught.value.reason == Reason.IDENTITY_CONFLICT
    assert caught.value.metadata["field"] == name


def test_a_slot_of_a_live_holder_is_refused_with_both_names_and_the_time_left() -> None:
    desk = Desk()
    desk.register(record(0, 0, boot_id="a"), ttl_s=10)
    desk.mono_s += 4

    with pytest.raises(Conflict) as caught:
        desk.register(record(0, 0, boot_id="b"))

    assert caught.value.reason == Reason.SLOT_HELD
    metadata = caught.value.metadata
    assert (metadata["holder"], metadata["claimant"]) == ("a", "b")
    assert metadata["remaining_s"] == "6.000"


def test_a_slot_of_a_dead_holder_is_taken_even_before_its_lease_is_swept() -> None:
    desk = Desk()
    desk.register(record(0, 0, boot_id="a"))
    desk.mono_s += 10

    desk.register(record(0, 0, boot_id="b"))

    (view,) = desk.book.workers("e_dp0")
    assert view.record.process.boot_id == "b"
    desk.expire()
    assert desk.state() == "FORMING"


def test_an_equal_repeat_gets_the_first_reply_and_changes_nothing() -> None:
    desk = Desk()
    request = registration(record(0, 0))
    first = desk.call("register", request)
    desk.register(record(0, 1))

    again = desk.call("register", request)

    assert again == first
    assert desk.revision == 2


def test_a_number_used_for_another_record_is_refused() -> None:
    desk = Desk()
    desk.register(record(0, 0), sequence=3)

    with pytest.raises(Refused) as caught:
        desk.register(record(0, 0, payload=b"another"), sequence=3)

    assert caught.value.reason == Reason.SEQUENCE_REUSED


def test_a_lower_number_is_refused() -> None:
    desk = Desk()
    desk.register(record(0, 0), sequence=3)

    with pytest.raises(Refused) as caught:
        desk.register(record(0, 0, payload=b"old"), sequence=2)

    assert caught.value.reason == Reason.SEQUENCE_STALE
    assert desk.book.workers("e_dp0")[0].record.handshake.payload == b"payload"


def test_a_higher_number_with_other_content_is_a_change_with_its_own_revision() -> None:
    desk = Desk()
    desk.register(record(0, 0))
    desk.register(record(0, 1))

    reply = desk.register(record(0, 0, payload=b"changed"), sequence=2)

    assert reply.revision == desk.engine().revision == 3
    assert [view.status.revision for view in desk.book.workers("e_dp0")] == [3, 2]


def test_the_same_content_under_a_new_lease_moves_without_an_event() -> None:
    desk = Desk()
    old = desk.register(record(0, 0), key="old")
    desk.register(record(0, 1))
    before = desk.engine().revision

    new = desk.register(record(0, 0), sequence=2, key="new")

    assert new.lease.lease_id != old.lease.lease_id
    assert desk.engine().revision == before < desk.revision
    assert desk.book.workers("e_dp0")[0].status.revision == 1
    desk.call("revoke_lease", v1.RevokeLeaseRequest(lease_id=old.lease.lease_id))
    assert desk.engine().present == 2


def test_a_part_of_a_batch_that_is_there_already_is_left_alone() -> None:
    desk = Desk()
    desk.register(record(0, 0, boot_id="n"), sequence=1)

    reply = desk.register(record(0, 0, boot_id="n"), record(0, 1, boot_id="n"), sequence=1)

    assert len(reply.record_digests) == 2
    assert [view.status.revision for view in desk.book.workers("e_dp0")] == [1, 2]


def test_a_refused_record_refuses_its_whole_batch() -> None:
    desk = Desk()
    desk.register(record(0, 0, boot_id="a"))

    with pytest.raises(Conflict):
        desk.register(record(0, 1, boot_id="b"), record(0, 0, boot_id="b"))

    assert desk.engine().present == 1


def test_the_first_worker_of_a_newer_start_retires_the_old_one_in_the_same_revision() -> None:
    desk = Desk()
    desk.ready()

    reply = desk.register(record(0, 0, generation="g2"))

    head = desk.engine()
    assert (head.epoch, head.generation, head.present) == (2, "g2", 1)
    assert head.revision == head.start_revision == reply.revision
    assert not head.HasField("seal")
    (note,) = [n for n in desk.notes if n.event == "generation_retired_alive"]
    assert note.fields["old_generation"] == "g1"
    assert note.fields["new_generation"] == "g2"


def test_a_retired_start_is_fenced_and_told_what_replaced_it() -> None:
    desk = Desk()
    desk.fill()
    desk.register(record(0, 0, generation="g2"))

    with pytest.raises(Fenced) as caught:
        desk.register(record(0, 1), sequence=9)

    assert caught.value.reason == Reason.GENERATION_FENCED
    assert caught.value.metadata["current_generation"] == "g2"
    assert caught.value.metadata["current_epoch"] == "2"


def test_byte_equal_metadata_under_another_token_is_still_another_start() -> None:
    """A restart at the same address with the same keys is no return."""
    desk = Desk()
    desk.ready()
    same = [view.record for view in desk.book.workers("e_dp0")]
    for old in same:
        new = v1.WorkerRecord()
        new.CopyFrom(old)
        new.generation, new.process.boot_id = "g2", "x" + old.process.boot_id
        desk.register(new)

    assert desk.engine().epoch == 2
    assert desk.state() == "COMPLETE"


def test_what_a_withdrawal_does_not_need_is_not_read() -> None:
    desk = Desk()
    desk.register(record(0, 0))
    bare = v1.WorkerRecord(
        engine_id="e_dp0",
        generation="g1",
        slot=v1.Slot(),
        process=v1.Process(boot_id="e_dp0.g1.0.0"),
    )

    reply = desk.call(
        "update", v1.UpdateWorkerRequest(record=bare, sequence=2, withdraw_payload=True)
    )

    (view,) = desk.book.workers("e_dp0")
    assert view.status.asleep
    assert view.record.group == "prefill"
    assert reply.record_digest == view.status.record_digest


def test_a_repeated_update_gets_the_first_reply() -> None:
    desk = Desk()
    desk.register(record(0, 0))
    request = v1.UpdateWorkerRequest(record=record(0, 0, payload=b"new"), sequence=2)
    first = desk.call("update", request)
    desk.register(record(0, 1))

    assert desk.call("update", request) == first


def test_the_digest_of_an_engine_is_the_one_the_contract_describes() -> None:
    desk = Desk()
    replies = desk.fill(tp_size=1)
    sealed = desk.seal()

    text = b"".join(
        b"%d.0.0|e_dp0.g1.%d.0|" % (pp, pp) + replies[f"e_dp0.g1.{pp}.0"].record_digests[0]
        for pp in range(2)
    )
    assert sealed.seal.digest == hashlib.sha256(text).digest()
    pieces = [
        seal_piece((pp, 0, 0), f"e_dp0.g1.{pp}.0", r.record_digests[0])
        for pp, r in enumerate(replies.values())
    ]
    assert seal_digest(pieces) == sealed.seal.digest


def test_the_digest_of_a_record_never_changes() -> None:
    """Written out by hand: what an engine sealed yesterday stays sealed."""
    one = v1.WorkerRecord(
        namespace="n",
        group="g",
        engine_id="e",
        generation="t",
        slot=v1.Slot(tp_rank=1),
        labels={"b": "2", "a": "1"},
    )
    by_hand = (
        b"\x0a\x01n\x12\x01g\x22\x01e\x2a\x01t"
        b"\x4a\x02\x18\x01"
        b"\x8a\x01\x06\x0a\x01a\x12\x011\x8a\x01\x06\x0a\x01b\x12\x012"
    )

    assert one.SerializeToString(deterministic=True) == by_hand
