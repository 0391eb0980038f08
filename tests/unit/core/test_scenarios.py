"""What went wrong elsewhere, as far as a book alone can show it."""

from __future__ import annotations

import pytest
from tests.unit.core.desk import Desk, grid, record, slots_of

from rankbook import v1
from rankbook.errors import Conflict, Fenced, Incomplete


def test_a_replaced_engine_is_one_atomic_change_and_never_a_mixture() -> None:
    """Same host and port, new rank ports: no reader sees ranks of both starts."""
    desk = Desk()
    for old in grid(pp_size=1, tp_size=2):
        desk.register(old)
    for count, new in enumerate(grid(pp_size=1, tp_size=2, generation="g2"), start=1):
        desk.register(new)
        found = desk.book.workers("e_dp0")
        assert {view.record.generation for view in found} == {"g2"}
        assert len(found) == count


def test_the_draining_old_process_is_fenced_while_the_new_one_is_seen() -> None:
    desk = Desk()
    old = desk.register(record(0, 0, boot_id="b1"), ttl_s=100).lease.lease_id
    new = desk.register(record(0, 0, boot_id="b2", generation="g2"), ttl_s=100).lease.lease_id
    for _ in range(5):
        desk.mono_s += 3
        statuses = desk.renew(old, new)
        assert [status.state for status in statuses] == [
            v1.LEASE_STATE_FENCED,
            v1.LEASE_STATE_ALIVE,
        ]

    (view,) = desk.book.workers("e_dp0")
    assert view.record.process.boot_id == "b2"


def test_an_expired_engine_that_returns_is_there_again_without_a_restart_of_anyone() -> None:
    desk = Desk()
    desk.ready()
    desk.mono_s += 11
    desk.expire()
    assert desk.state() == "GONE"
    for one in grid():
        desk.register(one, sequence=2)
    desk.seal(core="core-of-e_dp0", sequence=2)

    assert desk.state() == "READY"
    assert desk.engine().epoch == 1


def test_the_old_blob_is_never_given_after_a_change_of_generation() -> None:
    desk = Desk()
    desk.ready(payload=b"old-blob")
    desk.register(record(0, 0, generation="g2", payload=b"new-blob"))

    payloads = [view.record.handshake.payload for view in desk.book.workers("e_dp0")]
    assert payloads == [b"new-blob"]


def test_a_dead_engine_names_what_took_its_place_under_another_id() -> None:
    desk = Desk()
    desk.ready("11aa_dp0")
    desk.mono_s += 11
    desk.expire()
    desk.ready("22bb_dp0")

    assert desk.state("11aa_dp0") == "GONE"
    assert desk.engine("11aa_dp0").successor.engine_id == "22bb_dp0"
    alive = [n for n in desk.book.group("prefill") if desk.state(n) != "GONE"]
    assert alive == ["22bb_dp0"]


def test_a_rank_that_restarted_elsewhere_is_taken_once_its_old_lease_is_over() -> None:
    desk = Desk()
    desk.register(record(0, 0, boot_id="b1", host="10.0.0.1", port=1))
    with pytest.raises(Conflict) as caught:
        desk.register(record(0, 0, boot_id="b2", host="10.0.0.2", port=1))
    assert caught.value.metadata["holder"] == "b1"
    assert float(caught.value.metadata["remaining_s"]) == 10
    desk.mono_s += 10

    desk.register(record(0, 0, boot_id="b2", host="10.0.0.2", port=1))


def test_identity_is_the_rank_and_the_address_is_a_value() -> None:
    """A pod that gets another IP is the same worker."""
    desk = Desk()
    desk.ready(host="10.0.0.1")
    desk.register(record(0, 0, host="10.0.0.99"), sequence=2)

    assert desk.engine().present == 4
    assert desk.book.workers("e_dp0")[0].record.addresses[0].host == "10.0.0.99"


def test_one_rank_sent_four_times_is_one_rank() -> None:
    desk = Desk()
    kind = {"pp_size": 1, "tp_size": 4}
    for sequence in (1, 1, 2, 3):
        desk.register(record(0, 0, **kind), sequence=sequence)

    head = desk.engine()
    assert (head.present, head.declared, desk.state()) == (1, 4, "FORMING")
    assert [slot.tp_rank for slot in head.missing] == [1, 2, 3]
    with pytest.raises(Incomplete):
        desk.seal()


def test_a_size_is_what_was_declared_while_ranks_are_missing() -> None:
    desk = Desk()
    desk.register(record(0, 0, pp_size=1, tp_size=4))

    assert desk.engine().layout.tp_size == 4


def test_the_ranks_of_a_misconfigured_node_are_the_missing_ones() -> None:
    desk = Desk()
    for tp in range(8):
        desk.register(record(0, tp, pp_size=1, tp_size=16))

    assert [slot.tp_rank for slot in desk.engine().missing] == list(range(8, 16))


def test_a_leader_alone_is_not_the_engine() -> None:
    desk = Desk()
    desk.register(record(0, 0), record(0, 1))

    assert desk.state() == "FORMING"


def test_readiness_is_the_seal_and_nothing_less() -> None:
    desk = Desk()
    desk.fill()
    assert desk.state() == "COMPLETE"
    desk.seal()

    assert desk.state() == "READY"


def test_a_pipeline_of_two_by_two_shows_both_layer_ranges() -> None:
    desk = Desk()
    desk.fill()

    assert slots_of(desk.book.workers("e_dp0")) == [
        (0, 0, 0),
        (0, 0, 1),
        (1, 0, 0),
        (1, 0, 1),
    ]
    assert [(s.start_layer, s.end_layer) for s in desk.engine().stages] == [(0, 31), (31, 61)]


def test_a_published_partition_with_a_draft_layer_is_taken_as_it_is() -> None:
    desk = Desk()
    desk.register(record(0, 0, tp_size=1, layers=(0, 33)))
    last = record(1, 0, tp_size=1, layers=(33, 61))
    last.layers.extra.add(index=61, kind=v1.LAYER_KIND_MTP)
    desk.register(last)

    assert desk.state() == "COMPLETE"
    extra = desk.book.workers("e_dp0")[1].record.layers.extra
    assert [(layer.index, layer.kind) for layer in extra] == [(61, v1.LAYER_KIND_MTP)]


def test_both_sides_may_have_their_own_number_of_dp_ranks() -> None:
    desk = Desk()
    for side, count in (("p", 4), ("d", 2)):
        for dp in range(count):
            desk.ready(f"{side}_dp{dp}", group=side, replica=side, dp_rank=dp)

    assert {desk.state(name) for name in desk.book.engine_ids()} == {"READY"}
    assert all(desk.problems(name) == [] for name in desk.book.engine_ids())


def test_the_loss_of_a_producer_leaves_its_consumer_as_it_was() -> None:
    desk = Desk()
    desk.ready("p", group="prefill")
    desk.ready("d", group="decode")
    before = desk.engine("d")
    desk.call("evict", v1.EvictEngineRequest(engine_id="p"))

    assert desk.state("p") == "GONE"
    assert desk.engine("d") == before


def test_a_crash_of_the_registry_loses_no_engine_and_no_order() -> None:
    desk = Desk()
    for number in range(20):
        desk.ready(f"e{number}_dp0")
    before = {name: desk.engine(name) for name in desk.book.engine_ids()}
    desk.mono_s += 500
    desk.restart(seed=7)
    assert desk.expire() == 0

    assert {name: desk.engine(name) for name in desk.book.engine_ids()} == before
    (status,) = desk.renew(desk.book.workers("e0_dp0")[0].status.lease_id)
    assert status.state == v1.LEASE_STATE_ALIVE


def test_two_stages_that_read_at_one_revision_read_the_same_bytes() -> None:
    desk = Desk()
    desk.ready()
    first = [
        view.record.SerializeToString(deterministic=True) for view in desk.book.workers("e_dp0")
    ]
    again = [
        view.record.SerializeToString(deterministic=True)
        for view in desk.rebuilt(3).workers("e_dp0")
    ]

    assert first == again
    assert desk.engine() == desk.rebuilt(4).engine("e_dp0")


def test_a_restart_with_byte_equal_metadata_is_a_new_generation() -> None:
    desk = Desk()
    desk.ready(payload=b"same")
    desk.register(record(0, 0, generation="g2", payload=b"same"))
    with pytest.raises(Fenced):
        desk.register(record(0, 1, payload=b"same"), sequence=2)

    assert desk.engine().epoch == 2
