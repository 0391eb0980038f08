"""The fold: what a book says follows from what is stored, whatever came first."""

from __future__ import annotations

import pytest
from tests.unit.core.desk import Desk, record

from rankbook import v1
from rankbook_server.core.book import Book
from rankbook_server.core.keys import (
    engine_key,
    lease_key,
    namespace_key,
    parse_key,
    worker_key,
)
from rankbook_server.core.ops import Delete, Put


@pytest.mark.parametrize(
    ("key", "parsed"),
    [
        (namespace_key("n"), ("n", "n", "", None)),
        (engine_key("n", "e.1_dp0"), ("n", "e", "e.1_dp0", None)),
        (worker_key("n", "e.1", (3, 0, 12)), ("n", "w", "e.1", (3, 0, 12))),
        (lease_key("n", "l-1"), ("n", "l", "l-1", None)),
    ],
)
def test_a_key_comes_apart_as_it_was_put_together(key: str, parsed: tuple[object, ...]) -> None:
    assert tuple(parse_key(key)) == parsed


@pytest.mark.parametrize(
    "key", ["n", "n/x/e", "n/e", "n/e/a/b", "n/w/e", "n/w/e/1.2", "n/w/e/a.b.c", "n/n/x", ""]
)
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError):
        parse_key(key)


def test_a_prefix_that_ends_in_a_slash_never_matches_a_longer_name() -> None:
    assert not engine_key("n", "ab").startswith(engine_key("n", "a") + "/")
    assert not worker_key("n", "ab", (0, 0, 0)).startswith("n/w/a/")


def test_an_operation_of_another_namespace_is_refused() -> None:
    book = Book("default", new_id=str)

    with pytest.raises(ValueError, match="default"):
        book.apply(Put("prod/e/a", b""), 1)


def test_deleting_what_is_not_there_is_no_matter() -> None:
    book = Book("default", new_id=str)
    for key in ("default/e/a", "default/w/a/0.0.0", "default/l/x", "default/n"):
        book.apply(Delete(key), 1)

    assert book.engines == {}
    assert book.leases == {}


def test_a_record_whose_engine_has_no_head_is_not_shown() -> None:
    book = Book("default", new_id=str)
    stored = v1.StoredWorker(epoch=1, live=True, record=record(0, 0))
    book.apply(Put("default/w/e_dp0/0.0.0", stored.SerializeToString()), 1)

    assert book.engine("e_dp0") is None
    assert list(book.engine_ids()) == []
    assert book.worker_count == 0


def test_apply_names_the_engine_it_changed() -> None:
    desk = Desk()
    desk.register(record(0, 0))
    fresh = desk.new_book()

    named = {key: fresh.apply(Put(key, value), rev) for key, (value, rev) in desk.store.items()}

    assert named == {
        "default/l/lease-1": None,
        "default/e/e_dp0": "e_dp0",
        "default/w/e_dp0/0.0.0": "e_dp0",
    }


def test_the_head_is_kept_until_the_next_change() -> None:
    desk = Desk()
    desk.register(record(0, 0))
    first = desk.engine()
    assert desk.engine() is first
    desk.register(record(0, 1))

    assert desk.engine() is not first
    assert first.present == 1


def test_an_engine_says_what_its_workers_agree_on() -> None:
    desk = Desk()
    for tp, (zone, compat) in enumerate([("a", "h1"), ("b", "h2")]):
        one = record(0, tp)
        one.labels.update({"zone": zone, "pool": "x"})
        one.compat.hash = compat
        one.model.name = f"model-{tp}"
        desk.register(one)
    head = desk.engine()
    assert dict(head.labels) == {"pool": "x"}
    assert list(head.compat_hashes) == ["h1", "h2"]
    assert head.model.name == "model-0"
    changed = record(0, 1)
    changed.labels.update({"zone": "a"})
    desk.register(changed, sequence=2)

    assert dict(desk.engine().labels) == {"zone": "a"}
    assert list(desk.engine().compat_hashes) == ["h1"]


def test_missing_slots_are_listed_in_slot_order_up_to_a_bound() -> None:
    desk = Desk()
    desk.register(record(0, 1, pp_size=1, tp_size=4096))

    head = desk.engine()

    assert head.declared == 4096
    assert [s.tp_rank for s in head.missing] == [0, *range(2, 1025)]


def test_a_group_holds_its_engines_until_they_are_forgotten_or_move() -> None:
    desk = Desk()
    desk.register(record(0, 0, engine_id="a"))
    desk.register(record(0, 0, engine_id="b"))
    assert desk.book.group("prefill") == ["a", "b"]
    desk.register(record(0, 0, engine_id="b", generation="g2", group="other"))

    assert desk.book.group("prefill") == ["a"]
    assert desk.book.group("other") == ["b"]


def test_revisions_rise_only_with_what_readers_see() -> None:
    desk = Desk()
    desk.ready()
    before = desk.engine().revision
    desk.call("begin_generation", v1.BeginGenerationRequest(engine_id="e_dp0", generation="g2"))
    desk.register(record(0, 0), sequence=2, key="another-lease")
    desk.sweep()

    assert desk.engine().revision == before < desk.revision
    desk.restart(seed=9)
    assert desk.engine().revision == before
