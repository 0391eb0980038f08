"""Leases by their keys: kept, away, in doubt, very many at once."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import structlog.testing

from rankbook import v1
from rankbook_server.books import Books
from rankbook_server.core.book import Book
from rankbook_server.core.fold import BookLimits, LeaseEntry
from rankbook_server.core.keys import lease_key
from rankbook_server.core.ops import Delete, Put
from rankbook_server.lease_keys import CONFIRM_S, OTHERS_S, LeaseKeys
from rankbook_server.liveness import LivenessNews
from rankbook_server.store.base import Presence

from .support import FakeClock

TTL_S = 10.0


class Rig:
    """A book's leases, with their keys in the test's hand."""

    def __init__(self, *lease_ids: str, ttl_s: float = TTL_S) -> None:
        self.clock = FakeClock()
        self.books = Books(self.clock, BookLimits(), 4)
        self.news = LivenessNews(self.clock)
        self.keys = LeaseKeys(self.books, self.news)
        self.ttl_s = ttl_s
        for lease_id in lease_ids:
            self.grant(lease_id)

    def grant(self, lease_id: str, namespace: str = "n", *, ended: bool = False) -> LeaseEntry:
        """Folds in what another server granted or changed."""
        book = self.books.get(namespace)
        self.books.keep(book)
        book.clock_s = self.clock.mono()
        stored = v1.StoredLease(
            version=1, lease_key=f"key-{lease_id}", ttl_millis=int(self.ttl_s * 1000), ended=ended
        )
        op = Put(lease_key(namespace, lease_id), stored.SerializeToString())
        book.apply(op, 1)
        self.keys.folded(book, op)
        return book.leases[lease_id]

    @property
    def book(self) -> Book:
        return self.books.get("n")

    def hear(
        self, live: Iterable[str] = (), away: Iterable[str] = (), *, anew: bool = False
    ) -> None:
        news = Presence(frozenset(live), frozenset(away), anew)
        self.keys.hear(news, self.clock.now())

    def renew(self, *lease_ids: str) -> None:
        """What a renewal at this server does."""
        leases = [v1.LeaseRenewal(lease_id=lease_id) for lease_id in lease_ids]
        self.book.renew(v1.RenewLeasesRequest(leases=leases), self.clock.now())

    def pass_time(self, seconds: float) -> None:
        self.clock.seconds += seconds

    def lives(self, lease_id: str, namespace: str = "n") -> bool:
        return self.books.get(namespace).leases[lease_id].lives(self.clock.mono())

    def due(self) -> list[str]:
        """What an expiry takes now."""
        return sorted(e.lease_id for e in self.book.due_leases(self.clock.mono(), 1000))

    def left_s(self, lease_id: str) -> float:
        return self.book.leases[lease_id].deadline - self.clock.mono()

    def told(self) -> dict[str, float]:
        """How long the store is to be told that leases live."""
        return {lease_id: ttl_s for lease_id, (ttl_s, _) in self.news._alive.items()}


# -------------------------------------------------------------------------- kept


def test_a_lease_whose_key_is_there_lives_whatever_its_deadline_says() -> None:
    rig = Rig("a", "b")
    rig.hear(["a"], anew=True)
    rig.pass_time(TTL_S + 1)
    assert rig.lives("a")
    assert not rig.lives("b")
    assert rig.due() == ["b"]
    rig.pass_time(1000)
    assert rig.due() == ["b"]


def test_a_key_that_comes_later_keeps_its_lease_from_then_on() -> None:
    rig = Rig("a")
    rig.hear(anew=True)
    rig.pass_time(5.0)
    rig.hear(["a"])
    rig.pass_time(TTL_S)
    assert rig.lives("a")
    assert len(rig.keys) == 1


def test_a_key_that_was_there_before_its_lease_was_keeps_it() -> None:
    """The watch of keys may be ahead of the watch of commits."""
    rig = Rig()
    rig.hear(["a"], anew=True)
    rig.grant("a")
    rig.pass_time(TTL_S + 1)
    assert rig.lives("a")


def test_a_lease_that_has_ended_is_kept_by_no_key() -> None:
    rig = Rig("a")
    rig.hear(["a"], anew=True)
    rig.grant("a", ended=True)
    assert not rig.lives("a")
    assert rig.due() == ["a"]
    for anew in (False, True):
        rig.hear(["a"], anew=anew)
        assert not rig.lives("a")
    # Nor is it given any time when the key goes.
    rig.hear(away=["a"])
    assert rig.due() == ["a"]
    rig.keys.alive(["a"], rig.clock.now())
    assert rig.due() == ["a"]
    assert rig.told() == {}


def test_leases_are_kept_in_every_namespace() -> None:
    rig = Rig("a")
    rig.grant("b", "m")
    rig.hear(["a", "b"], anew=True)
    rig.pass_time(TTL_S + 1)
    assert rig.lives("a")
    assert rig.lives("b", "m")
    rig.hear(away=["b"])
    rig.pass_time(OTHERS_S)
    assert not rig.lives("b", "m")
    assert rig.lives("a")


def test_books_that_are_read_anew_have_their_leases_kept_by_the_keys_that_are_there() -> None:
    rig = Rig("a", "b")
    rig.hear(["a"], anew=True)
    for entry in rig.book.leases.values():
        entry.kept = False
    rig.keys.loaded()
    rig.pass_time(TTL_S + 1)
    assert rig.lives("a")
    assert not rig.lives("b")


def test_what_is_no_lease_of_the_book_is_passed_over() -> None:
    rig = Rig("a")
    rig.hear(["a", "stranger"], anew=True)
    rig.hear(away=["stranger", "another"])
    rig.keys.alive(["stranger"], rig.clock.now())
    rig.keys.folded(rig.book, Delete(lease_key("n", "stranger")))
    rig.keys.folded(rig.book, Put("n/e/engine", b""))
    assert rig.lives("a")


# -------------------------------------------------------------------------- away


def test_a_lease_whose_key_went_ends_after_a_short_while_for_others_to_bring_it_back() -> None:
    rig = Rig("a")
    rig.hear(["a"], anew=True)
    rig.pass_time(30.0)
    rig.hear(away=["a"])
    assert rig.lives("a")
    assert rig.left_s("a") == pytest.approx(OTHERS_S)
    rig.pass_time(OTHERS_S - 0.01)
    assert rig.due() == []
    rig.pass_time(0.02)
    assert rig.due() == ["a"]
    assert rig.told() == {}


def test_a_long_deadline_of_before_does_not_outlast_the_key() -> None:
    rig = Rig("a")
    rig.hear(["a"], anew=True)
    rig.book.leases["a"].deadline = rig.clock.mono() + 300
    rig.hear(away=["a"])
    rig.pass_time(OTHERS_S + 0.01)
    assert rig.due() == ["a"]


def test_a_key_that_comes_back_in_that_while_keeps_its_lease() -> None:
    rig = Rig("a")
    rig.hear(["a"], anew=True)
    rig.pass_time(30.0)
    rig.hear(away=["a"])
    rig.pass_time(OTHERS_S / 2)
    rig.hear(["a"])
    rig.pass_time(30.0)
    assert rig.due() == []
    assert rig.lives("a")


def test_a_server_that_heard_of_it_within_its_time_brings_the_key_back() -> None:
    rig = Rig("a")
    rig.hear(["a"], anew=True)
    rig.renew("a")
    rig.pass_time(TTL_S - 1)
    rig.hear(away=["a"])
    assert rig.told() == {"a": TTL_S}
    assert rig.left_s("a") == pytest.approx(1.0)
    rig.pass_time(0.9)
    assert rig.due() == []
    rig.pass_time(0.2)
    assert rig.due() == ["a"]


def test_a_server_that_heard_of_it_longer_ago_does_not() -> None:
    rig = Rig("a")
    rig.hear(["a"], anew=True)
    rig.renew("a")
    rig.pass_time(TTL_S)
    rig.hear(away=["a"])
    assert rig.told() == {}
    # It was the last to hear: nobody has much to object.
    assert rig.left_s("a") == pytest.approx(CONFIRM_S)


def test_a_key_that_lived_on_was_kept_by_another_server_which_has_longer_to_object() -> None:
    rig = Rig("a")
    rig.hear(["a"], anew=True)
    rig.renew("a")
    rig.pass_time(TTL_S + 2.0)
    rig.hear(away=["a"])
    assert rig.left_s("a") == pytest.approx(OTHERS_S)


def test_keys_that_went_while_the_watch_was_broken_count_as_gone() -> None:
    rig = Rig("a", "b", "c")
    rig.hear(["a", "b"], anew=True)
    rig.pass_time(30.0)
    rig.hear(["b"], anew=True)
    assert rig.left_s("a") == pytest.approx(OTHERS_S)
    assert rig.lives("b")
    # One that never had a key is not touched by that.
    assert not rig.lives("c")
    # And what went does not count as there for what comes after.
    assert len(rig.keys) == 1
    rig.grant("a")
    assert not rig.book.leases["a"].kept
    rig.pass_time(OTHERS_S + 0.01)
    assert rig.due() == ["a", "c"]


def test_a_key_that_went_is_not_there_for_what_comes_after() -> None:
    rig = Rig("a")
    rig.hear(["a"], anew=True)
    rig.hear(away=["a"])
    assert len(rig.keys) == 0
    rig.grant("a")
    rig.pass_time(30.0)
    assert not rig.lives("a")


# ------------------------------------------------------------------------- doubt


def test_after_a_time_in_which_nobody_could_hear_every_lease_has_its_full_time() -> None:
    rig = Rig("a", "b")
    rig.hear(["a"], anew=True)
    rig.pass_time(60.0)
    rig.keys.doubt(rig.clock.now())
    rig.pass_time(2.0)
    rig.hear(away=["a"])
    assert rig.left_s("a") == pytest.approx(TTL_S - 2.0)
    assert rig.left_s("b") == pytest.approx(TTL_S - 2.0)
    rig.pass_time(TTL_S - 2.1)
    assert rig.due() == []
    rig.pass_time(0.2)
    assert rig.due() == ["a", "b"]


def test_doubt_ends() -> None:
    rig = Rig("a")
    rig.hear(["a"], anew=True)
    rig.keys.doubt(rig.clock.now())
    rig.pass_time(TTL_S + 5)
    rig.hear(away=["a"])
    assert rig.left_s("a") == pytest.approx(OTHERS_S)


# ----------------------------------------------------------- the store knows better


def test_a_lease_that_the_store_says_lives_is_no_longer_taken_for_dead() -> None:
    rig = Rig("a", "b")
    rig.pass_time(TTL_S + 1)
    assert rig.due() == ["a", "b"]
    rig.keys.alive(["a"], rig.clock.now())
    assert rig.due() == ["b"]
    assert rig.left_s("a") == pytest.approx(TTL_S)
    rig.pass_time(TTL_S + 0.01)
    assert rig.due() == ["a", "b"]


def test_one_that_is_alive_anyway_gets_no_more_time_by_that() -> None:
    rig = Rig("a")
    rig.pass_time(4.0)
    rig.keys.alive(["a"], rig.clock.now())
    assert rig.left_s("a") == pytest.approx(TTL_S - 4.0)


# ------------------------------------------------------------------ many at once


def many(count: int, live: int = 0) -> tuple[Rig, list[str]]:
    names = [f"lease-{number}" for number in range(count)]
    rig = Rig(*names, *(f"other-{number}" for number in range(live)))
    rig.hear([*names, *(f"other-{number}" for number in range(live))], anew=True)
    rig.pass_time(30.0)
    return rig, names


def test_where_very_many_go_at_once_none_ends_before_a_full_time() -> None:
    rig, names = many(40)
    rig.hear(away=names)
    rig.pass_time(TTL_S - 0.1)
    assert rig.due() == []
    rig.pass_time(0.2)
    assert rig.due() == sorted(names)


def test_nor_where_they_go_one_by_one_within_moments() -> None:
    rig, names = many(40)
    for name in names:
        rig.hear(away=[name])
        rig.pass_time(0.01)
    rig.pass_time(1.0)
    assert rig.due() == []


def test_what_goes_in_the_moments_after_a_mass_belongs_to_it() -> None:
    rig, names = many(20, live=20)
    with structlog.testing.capture_logs() as logs:
        rig.hear(away=names)
        assert len(rig.due()) == 0
        first = rig.left_s(names[0])
        # Others come back meanwhile: by its share alone it would be none any more.
        rig.hear([f"new-{number}" for number in range(30)])
        for number in range(5):
            rig.pass_time(0.3)
            rig.hear(away=[f"other-{number}"])
    assert [log["leases"] for log in logs] == [20]
    rig.pass_time(OTHERS_S + 0.01)
    assert rig.due() == []
    # And gives those before it no more time than they got.
    assert rig.left_s(names[0]) == pytest.approx(first - 5 * 0.3 - OTHERS_S - 0.01)


def test_nor_where_they_were_missed() -> None:
    rig, _ = many(40)
    rig.hear(anew=True)
    rig.pass_time(1.0)
    assert rig.due() == []


def test_twice_such_a_node_and_nobody_else_is() -> None:
    rig, names = many(16)
    rig.hear(away=names)
    rig.pass_time(OTHERS_S + 0.01)
    assert rig.due() == []


def test_a_lost_node_of_eight_workers_is_not_very_many() -> None:
    rig, names = many(15)
    rig.hear(away=names)
    rig.pass_time(OTHERS_S + 0.01)
    assert rig.due() == sorted(names)


def test_a_small_share_is_not_very_many() -> None:
    rig, names = many(40, live=41)
    rig.hear(away=names)
    rig.pass_time(OTHERS_S + 0.01)
    assert rig.due() == sorted(names)
    rig, names = many(40, live=40)
    rig.hear(away=names)
    rig.pass_time(OTHERS_S + 0.01)
    assert rig.due() == []


def test_many_over_a_long_time_are_not_very_many_at_once() -> None:
    rig, names = many(40)
    for name in names:
        rig.hear(away=[name])
        rig.pass_time(0.25)
        assert rig.due()[-1:] == [] or rig.left_s(name) <= OTHERS_S
    rig.pass_time(OTHERS_S)
    assert rig.due() == sorted(names)


def test_long_after_a_mass_one_that_goes_ends_as_usual() -> None:
    rig, names = many(40)
    rig.hear(away=names)
    rig.pass_time(3.0)
    rig.hear(names)
    rig.hear(away=names[:1])
    rig.pass_time(OTHERS_S + 0.01)
    assert rig.due() == names[:1]


def test_keys_that_come_back_after_a_mass_keep_their_leases() -> None:
    rig, names = many(40)
    rig.hear(away=names)
    rig.pass_time(1.0)
    rig.hear(names[:20])
    rig.pass_time(TTL_S)
    assert rig.due() == sorted(names[20:])


def test_those_that_this_server_heard_of_are_no_mass() -> None:
    rig, names = many(40)
    rig.renew(*names)
    rig.pass_time(TTL_S - 1)
    rig.hear(away=names)
    assert rig.told().keys() == set(names)
    rig.pass_time(1.1)
    assert rig.due() == sorted(names)
