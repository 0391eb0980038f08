"""A book's content, put right for another book: all as it was, but for revisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.core.desk import Desk, grid, record, registration

from rankbook import v1
from rankbook.errors import BadRequest, Fenced, Reason
from rankbook_server.core.keys import parse_key
from rankbook_server.core.ops import Entry, Put
from rankbook_server.moving.export_file import Export
from rankbook_server.moving.rebase import Content, check_content, epoch_floors, rebased

BEGAN = 1_000_003


def exported(desk: Desk) -> Export:
    entries = [Entry(key, *desk.store[key]) for key in sorted(desk.store)]
    return Export("book-1", desk.revision, "memory:", "2026-01-02T03:04:05Z", entries)


def content(desk: Desk) -> Content:
    return check_content(exported(desk), "f")


def taken_in(
    desk: Desk, floors: Mapping[str, int] | None = None, in_one: int = 126, seed: int | None = None
) -> Desk:
    """Another book with what a desk's has, `in_one` operations a transaction."""
    other = Desk(desk.limits)
    other.mono_s = desk.mono_s
    other.ids = desk.ids
    puts = rebased(content(desk), BEGAN, floors or {})
    other.revision = BEGAN
    for start in range(0, len(puts), in_one):
        other.revision += 7
        for put in puts[start : start + in_one]:
            other.store[put.key] = (put.value, other.revision)
    other.restart(seed)
    return other


def lived_in() -> Desk:
    """A book with engines in every state, and with a past."""
    desk = Desk()
    desk.ready("ready")
    desk.mono_s += 1
    desk.ready("restarted", pp_size=1)
    desk.mono_s += 1
    desk.ready("restarted", pp_size=1, generation="g2")
    desk.call("begin_generation", v1.BeginGenerationRequest(engine_id="restarted", generation="g3"))
    desk.mono_s += 1
    desk.ready("changed", pp_size=1)
    desk.mono_s += 1
    again = record(0, 1, engine_id="changed", pp_size=1, payload=b"other")
    desk.register(again, sequence=5)
    # The same once more, under another lease: written, and no change.
    desk.mono_s += 1
    desk.register(again, sequence=6, key="second")
    desk.mono_s += 1
    desk.register(record(0, 0, engine_id="changed", pp_size=1), sequence=7, key="third")
    desk.fill("forming", pp_size=1, tp_size=1)
    desk.register(record(0, 0, engine_id="half"))
    desk.ready("draining", pp_size=1)
    desk.mono_s += 1
    desk.call("drain", v1.DrainEngineRequest(engine_id="draining", reason="why"))
    desk.ready("evicted", pp_size=1)
    desk.call("evict", v1.EvictEngineRequest(engine_id="evicted", reason="bad node"))
    desk.ready("degraded", pp_size=1)
    desk.mono_s += 1
    desk.call(
        "deregister",
        v1.DeregisterRequest(
            engine_id="degraded", generation="g1", boot_id="degraded.g1.0.1", sequence=9
        ),
    )
    desk.fill("gone", pp_size=1, tp_size=1)
    desk.call("revoke_lease", v1.RevokeLeaseRequest(lease_id=desk.book.lease_of_key["gone.g1.0.0"]))
    desk.call("begin_generation", v1.BeginGenerationRequest(engine_id="reserved", generation="g1"))
    return desk


def shown(desk: Desk) -> dict[str, Any]:
    """What readers get of every engine, without revisions."""
    found = {}
    for engine_id in desk.book.engine_ids():
        engine = v1.Engine()
        engine.CopyFrom(desk.engine(engine_id))
        engine.revision = engine.start_revision = 0
        workers = [(v.slot, v.record, v.status.lease_id) for v in desk.book.workers(engine_id)]
        empty = sorted(slot for slot, _ in desk.book.emptied(engine_id))
        found[engine_id] = (engine, workers, empty)
    return found


@pytest.mark.parametrize("in_one", [1, 2, 5, 126])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_readers_are_shown_the_same_engines(in_one: int, seed: int | None) -> None:
    desk = lived_in()
    before = shown(desk)
    states = {engine.state for engine, _, _ in before.values()}
    assert len(states) >= 6

    assert shown(taken_in(desk, in_one=in_one, seed=seed)) == before


@pytest.mark.parametrize("in_one", [1, 2, 5, 126])
def test_every_revision_is_one_that_the_new_book_has_given_out(in_one: int) -> None:
    other = taken_in(lived_in(), in_one=in_one)

    given = {BEGAN, *(revision for _, revision in other.store.values())}
    for engine_id in other.book.engine_ids():
        engine = other.engine(engine_id)
        assert {engine.revision, engine.start_revision} <= given
        assert engine.start_revision == BEGAN < engine.revision <= other.revision
        for view in other.book.workers(engine_id):
            assert view.revision in given
            assert view.revision <= engine.revision
        assert {revision for _, revision in other.book.emptied(engine_id)} <= given
    for key, (value, revision) in other.store.items():
        if parse_key(key).kind == "e":
            head = v1.StoredEngine.FromString(value)
            named = {head.change_revision, head.start_revision, head.core.write_revision}
        elif parse_key(key).kind == "w":
            named = {v1.StoredWorker.FromString(value).change_revision}
        else:
            named = set()
        # Zero is that of the write.
        assert named <= {0, *(one for one in given if one <= revision)}, key


def test_engines_keep_the_order_in_which_they_changed() -> None:
    desk = lived_in()
    other = taken_in(desk, in_one=1)

    def order(one: Desk) -> list[str]:
        return sorted(one.book.engine_ids(), key=lambda name: one.engine(name).revision)

    assert order(other) == order(desk)


def test_the_next_change_is_a_later_revision_of_its_engine() -> None:
    other = taken_in(lived_in())
    was = other.engine("changed").revision

    reply = other.register(record(0, 1, engine_id="changed", pp_size=1), sequence=20, key="x")

    assert reply.revision == other.revision
    assert other.engine("changed").revision == other.revision > was


def test_a_fenced_start_stays_fenced_and_epochs_go_on() -> None:
    other = taken_in(lived_in())

    with pytest.raises(Fenced) as fenced:
        other.register(record(0, 0, engine_id="restarted", pp_size=1), sequence=30, key="z")
    assert fenced.value.reason is Reason.GENERATION_FENCED
    with pytest.raises(Fenced) as told:
        other.call(
            "register",
            registration(
                record(0, 0, engine_id="restarted", generation="lost", pp_size=1), epoch=2, key="z"
            ),
        )
    assert told.value.reason is Reason.EPOCH_FENCED
    with pytest.raises(Fenced) as evicted:
        other.register(record(0, 0, engine_id="evicted", pp_size=1), sequence=30, key="z")
    assert evicted.value.reason is Reason.EVICTED
    for generation, epoch in (("g3", 3), ("g4", 4)):
        request = v1.BeginGenerationRequest(engine_id="restarted", generation=generation)
        assert other.call("begin_generation", request).epoch == epoch


def test_leases_are_renewed_as_before_and_their_numbers_are_kept() -> None:
    desk = lived_in()
    lease_id = desk.book.lease_of_key["ready.g1.0.0"]
    other = taken_in(desk)

    (status,) = other.renew(lease_id)
    assert status.state == v1.LEASE_STATE_ALIVE
    # The number of before repeats its reply, a lower one is refused.
    (mine,) = [r for r in grid("ready") if r.process.boot_id == "ready.g1.0.0"]
    revision = other.revision
    other.register(mine, sequence=1)
    assert other.revision == revision


def test_what_runs_out_later_runs_out_there_too() -> None:
    desk = lived_in()
    other = taken_in(desk)
    for one in (desk, other):
        one.mono_s += 100
        one.expire()
        one.sweep()

    assert {name: engine.state for name, (engine, _, _) in shown(other).items()} == {
        name: engine.state for name, (engine, _, _) in shown(desk).items()
    }


def test_floors_and_horizons_of_dropped_tombstones_come_along() -> None:
    desk = lived_in()
    desk.mono_s += 4000
    desk.expire()
    desk.mono_s += 4000
    desk.sweep()
    floor = desk.book.epoch_floor
    assert floor >= 3
    assert desk.book.horizon_revision > 0
    other = taken_in(desk)

    assert other.book.epoch_floor == floor
    # Whoever watched that book before the import gets the full state.
    assert other.book.horizon_revision == BEGAN
    assert taken_in(desk, {"default": floor - 1}).book.epoch_floor == floor
    assert taken_in(desk, {"default": floor + 1}).book.epoch_floor == floor + 1


def test_epochs_that_the_overwritten_book_gave_out_are_not_given_again() -> None:
    old = Desk()
    for number in range(9):
        request = v1.BeginGenerationRequest(engine_id="ready", generation=f"old{number}")
        old.call("begin_generation", request)
    floors = epoch_floors(exported(old).entries)
    assert floors == {"default": 9}
    other = taken_in(lived_in(), floors)

    for engine_id in ("ready", "new"):
        request = v1.BeginGenerationRequest(engine_id=engine_id, generation="next")
        assert other.call("begin_generation", request).epoch == 10
    # What they have now is what they had.
    assert other.engine("ready").epoch == 1
    (facts,) = [
        v1.StoredNamespace.FromString(put.value)
        for put in rebased(content(lived_in()), BEGAN, {"elsewhere": 4})
        if put.key == "elsewhere/n"
    ]
    assert (facts.epoch_floor, facts.horizon_revision) == (4, BEGAN)


def test_floors_of_what_cannot_be_read_count_for_nothing() -> None:
    entries = [Entry("import", b"", 1), Entry("n/e/a", b"\xff", 1), Entry("n/x/y", b"", 1)]

    assert epoch_floors(entries) == {}


def test_fields_that_this_version_does_not_know_come_along() -> None:
    desk = lived_in()
    key = "default/e/ready"
    value, revision = desk.store[key]
    unknown = b"\xfa\x3e\x03new"
    desk.store[key] = (value + unknown, revision)

    (put,) = [put for put in rebased(content(desk), BEGAN, {}) if put.key == key]
    assert unknown in put.value


def _entry(key: str, value: bytes) -> Export:
    return Export("b", 5, "s", "t", [Entry(key, value, 5)])


LEASE = v1.StoredLease(version=1).SerializeToString()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("import", b"", "no kind"),
        ("default/x/a", LEASE, "no kind"),
        ("default/l", LEASE, "no kind"),
        ("default/w/e/0.0", LEASE, "no kind"),
        ("default/w/e/00.0.0", LEASE, "does not name its slot"),
        ("/l/a", LEASE, "names no namespace"),
        ("de fault/l/a", LEASE, "namespace is"),
        ("default/l/", LEASE, "key is"),
        ("default/l/a b", LEASE, "key is"),
        ("default/l/a", b"\xff", "no StoredLease"),
        ("default/e/a", b"\x0a\xff", "no StoredEngine"),
        ("default/l/a", b"", "version 0"),
        ("default/l/a", v1.StoredLease(version=2).SerializeToString(), "version 2"),
    ],
)
def test_what_is_no_entry_of_a_book_is_refused_by_its_line(
    key: str, value: bytes, words: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        check_content(_entry(key, value), "f.jsonl")
    assert caught.value.reason is Reason.INVALID_EXPORT
    assert (caught.value.metadata["line"], caught.value.metadata["key"]) == ("2", key)
    assert words in caught.value.message


def test_a_slot_without_a_head_is_taken_in_and_shown_to_nobody() -> None:
    stored = v1.StoredWorker(version=1, epoch=1, live=True, record=record(0, 0))
    found = check_content(_entry("default/w/e_dp0/0.0.0", stored.SerializeToString()), "f")

    (put,) = rebased(found, BEGAN, {})
    assert isinstance(put, Put)
    assert v1.StoredWorker.FromString(put.value).change_revision == BEGAN


def test_an_export_of_what_was_taken_in_is_the_same_but_for_revisions() -> None:
    desk = lived_in()
    once = taken_in(desk)
    twice = taken_in(once)

    def bare(one: Desk) -> dict[str, bytes]:
        return {put.key: put.value for put in rebased(content(one), 1, {})}

    assert bare(twice) == bare(once) == bare(desk)
