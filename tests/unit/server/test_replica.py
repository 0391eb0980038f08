"""The copy of the book: what is committed is folded in once, in order, and told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.unit.core.desk import registration
from tests.unit.server.shared import Line, SharedMemoryStore, WarpClock, WarpLoop, worker

from rankbook import v1
from rankbook.errors import Unavailable
from rankbook_server.books import Books
from rankbook_server.core.decision import Decision
from rankbook_server.core.fold import BookLimits
from rankbook_server.core.ops import Commit, Put, Txn
from rankbook_server.lease_keys import LeaseKeys
from rankbook_server.liveness import LivenessNews
from rankbook_server.moving.mark import mark_put
from rankbook_server.replica import Replica
from rankbook_server.store.base import Presence
from rankbook_server.wave import Command, Outcome

from .support import Heard


class Rig:
    """A replica, and a store that it does not follow by itself."""

    def __init__(self, loop: WarpLoop) -> None:
        self.clock = WarpClock(loop, "x")
        self.store = SharedMemoryStore(loop)
        self.line = Line(self.store)
        self.books = Books(self.clock, BookLimits(), 4)
        self.news = LivenessNews(self.clock)
        self.keys = LeaseKeys(self.books, self.news)
        self.replica = Replica(self.books, self.clock, self.news, self.keys)
        self.heard = Heard()
        self.replica.subscribe(self.heard)

    async def open(self) -> Rig:
        await self.line.open()
        await self.replica.load(self.line)
        self.heard.changes.clear()
        return self

    def decided(self, tp: int = 0, engine_id: str = "e_dp0", namespace: str = "default") -> Outcome:
        """A registration that was decided here."""
        record = worker(tp, engine_id)
        record.namespace = namespace
        book = self.books.get(namespace)
        decision: Decision[Any] = book.register(registration(record), self.clock.now())
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        return Outcome(Command("register_workers", namespace, future), book, decision)

    async def commit(self, *outcomes: Outcome) -> Commit:
        """Commits in one transaction; what the store's watch brings of it."""
        ops = tuple(op for outcome in outcomes for op in outcome.txn_to_keep.ops)
        (revision,) = await self.store.commit([Txn(ops)])
        assert revision is not None
        return Commit(revision, ops)


def play(script: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        await script(await Rig(loop).open())

    loop = WarpLoop()
    loop.play(run())


# ------------------------------------------------------------------------- folding


def test_what_was_committed_here_is_folded_once_and_told_once() -> None:
    async def script(rig: Rig) -> None:
        outcome = rig.decided()
        commit = await rig.commit(outcome)
        rig.replica.fold([outcome], [commit.revision], own=True)
        assert rig.replica.revision == outcome.revision == commit.revision
        assert rig.heard.changes == [("default", frozenset({"e_dp0"}), commit.revision)]
        # The watch brings it once more.
        assert rig.replica.fold_commit(commit)
        assert rig.replica.revision == commit.revision
        assert len(rig.heard.changes) == 1
        assert not rig.replica.is_torn
        # And nothing is remembered for ever.
        assert rig.replica._own == set()

    play(script)


def test_a_watch_that_is_faster_than_the_answer_folds_it_and_the_answer_does_not() -> None:
    async def script(rig: Rig) -> None:
        outcome = rig.decided()
        commit = await rig.commit(outcome)
        assert rig.replica.fold_commit(commit)
        # Something else may have come since.
        later = await rig.commit(rig.decided(0, "f_dp0"))
        assert rig.replica.fold_commit(later)
        heard = list(rig.heard.changes)
        rig.replica.fold([outcome], [commit.revision], own=True)
        assert outcome.revision == commit.revision
        assert rig.replica.revision == later.revision
        assert rig.heard.changes == heard
        # And its lease is one that this server heard of.
        assert list(rig.news._alive) == [rig.books.get("default").lease_of_key["e_dp0.g1.0.0"]]

    play(script)


def test_leases_that_others_granted_are_none_that_this_server_heard_of() -> None:
    async def script(rig: Rig) -> None:
        rig.keys.hear(Presence(frozenset({"x-1"}), anew=True), rig.clock.now())
        assert rig.replica.fold_commit(await rig.commit(rig.decided()))
        assert rig.news._alive == {}
        (entry,) = rig.books.get("default").leases.values()
        assert entry.lease_id == "x-1"
        assert entry.kept

    play(script)


def test_a_wave_that_is_one_transaction_is_folded_whole_before_anybody_is_told() -> None:
    async def script(rig: Rig) -> None:
        seen: list[tuple[str, int, list[str]]] = []

        class Reader:
            def changed(self, namespace: str, engine_ids: Any, since: int) -> None:
                names = [n for b in rig.books.all() for n in b.engine_ids()]
                seen.append((namespace, rig.replica.revision, names))

        rig.replica.subscribe(Reader())
        first, second = rig.decided(), rig.decided(0, "f_dp0", "other")
        commit = await rig.commit(first, second)
        rig.replica.fold([first, second], [commit.revision] * 2, own=True)
        everything = ["e_dp0", "f_dp0"]
        assert [(revision, names) for _, revision, names in seen] == [
            (commit.revision, everything)
        ] * 2
        assert {namespace for namespace, *_ in seen} == {"default", "other"}

    play(script)


def test_a_commit_of_several_namespaces_goes_into_each() -> None:
    async def script(rig: Rig) -> None:
        commit = await rig.commit(rig.decided(), rig.decided(0, "f_dp0", "other"))
        assert rig.replica.fold_commit(commit)
        assert rig.heard.changes == [
            ("default", frozenset({"e_dp0"}), commit.revision),
            ("other", frozenset({"f_dp0"}), commit.revision),
        ]
        assert {book.namespace for book in rig.books.all()} == {"default", "other"}

    play(script)


def test_a_commit_that_writes_nothing_moves_the_revision() -> None:
    async def script(rig: Rig) -> None:
        (revision,) = await rig.store.commit([Txn(())])
        assert revision is not None
        assert rig.replica.fold_commit(Commit(revision, ()))
        assert rig.replica.revision == revision
        # Somebody may wait for the revision itself.
        assert rig.heard.changes == [("", frozenset(), revision)]

    play(script)


def test_a_lease_has_its_time_from_when_its_grant_is_heard_of_here() -> None:
    async def script(rig: Rig) -> None:
        for engine_id in ("e_dp0", "f_dp0"):
            commit = await rig.commit(rig.decided(0, engine_id))
            await asyncio.sleep(5.0)
            assert rig.replica.fold_commit(commit)
            entry = list(rig.books.get("default").leases.values())[-1]
            assert entry.deadline == rig.clock.mono() + 10.0
        outcome = rig.decided(0, "g_dp0")
        commit = await rig.commit(outcome)
        await asyncio.sleep(5.0)
        rig.replica.fold([outcome], [commit.revision], own=True)
        entry = list(rig.books.get("default").leases.values())[-1]
        assert entry.deadline == rig.clock.mono() + 10.0

    play(script)


def test_a_commit_that_comes_too_late_asks_for_the_book_anew() -> None:
    async def script(rig: Rig) -> None:
        late = await rig.commit(rig.decided(0, "f_dp0"))
        outcome = rig.decided()
        commit = await rig.commit(outcome)
        rig.replica.fold([outcome], [commit.revision], own=True)
        assert not rig.replica.fold_commit(late)
        assert rig.replica.is_torn
        assert list(rig.books.get("default").engine_ids()) == ["e_dp0"]
        await rig.replica.load(rig.line)
        assert not rig.replica.is_torn
        assert list(rig.books.get("default").engine_ids()) == ["e_dp0", "f_dp0"]
        # Both come once more with a watch from before.
        assert rig.replica.fold_commit(late)
        assert rig.replica.fold_commit(commit)

    play(script)


def test_what_was_in_the_snapshot_is_not_folded_again() -> None:
    async def script(rig: Rig) -> None:
        commit = await rig.commit(rig.decided())
        await rig.replica.load(rig.line)
        rig.heard.changes.clear()
        assert rig.replica.fold_commit(commit)
        assert rig.heard.changes == []
        assert not rig.replica.is_torn

    play(script)


def test_of_an_import_nothing_is_folded_before_it_is_whole() -> None:
    async def script(rig: Rig) -> None:
        before = rig.replica.revision
        ops = (mark_put("elsewhere", 0.0), Put("default/e/e", b""))
        (revision,) = await rig.store.commit([Txn(ops)])
        assert revision is not None
        assert not rig.replica.fold_commit(Commit(revision, ops))
        assert rig.replica.revision == before
        assert not rig.books.get("default").engines
        with pytest.raises(Unavailable, match="is not whole"):
            await rig.replica.load(rig.line)
        assert rig.replica.revision == before

    play(script)


# ------------------------------------------------------------------------- reading


def test_a_book_that_is_read_has_every_engine_told_from_the_next_revision_on() -> None:
    async def script(rig: Rig) -> None:
        assert rig.replica.fold_commit(await rig.commit(rig.decided()))
        await rig.replica.load(rig.line)
        first = before = rig.replica.revision
        assert rig.replica.loaded_revision == first
        await rig.commit(rig.decided(0, "f_dp0"))
        rig.heard.changes.clear()
        await rig.replica.load(rig.line)
        assert rig.heard.changes == [("default", frozenset({"e_dp0", "f_dp0"}), before + 1)]
        # That stays what it was when this process read the book first.
        assert rig.replica.loaded_revision == first

    play(script)


def test_a_snapshot_that_is_older_than_the_copy_is_not_taken() -> None:
    async def script(rig: Rig) -> None:
        rig.line.snapshot_delay_s = 1.0
        loading = asyncio.ensure_future(rig.replica.load(rig.line))
        await asyncio.sleep(0.5)
        outcome = rig.decided()
        commit = await rig.commit(outcome)
        rig.replica.fold([outcome], [commit.revision], own=True)
        await loading
        assert rig.line.snapshots == 3
        assert rig.replica.revision == commit.revision
        assert list(rig.books.get("default").engine_ids()) == ["e_dp0"]

    play(script)


def test_a_book_that_was_set_back_is_not_taken() -> None:
    async def script(rig: Rig) -> None:
        rig.replica.fold_commit(Commit(rig.store.revision + 5, ()))
        with pytest.raises(Unavailable, match="it was set back"):
            await rig.replica.load(rig.line)

    play(script)


def test_every_lease_of_a_book_that_is_read_has_its_full_time() -> None:
    async def script(rig: Rig) -> None:
        assert rig.replica.fold_commit(await rig.commit(rig.decided()))
        (lease_id,) = rig.books.get("default").leases
        rig.keys.hear(Presence(frozenset({lease_id}), anew=True), rig.clock.now())
        await asyncio.sleep(30.0)
        await rig.replica.load(rig.line)
        entry = rig.books.get("default").leases[lease_id]
        assert entry.kept
        # Whose key goes now was never in a time in which nobody could hear of it.
        await asyncio.sleep(2.0)
        rig.keys.hear(Presence(frozenset(), frozenset({lease_id})), rig.clock.now())
        assert entry.deadline == rig.clock.mono() + 8.0

    play(script)


def test_a_book_that_is_forgotten_counts_as_not_read() -> None:
    async def script(rig: Rig) -> None:
        outcome = rig.decided()
        commit = await rig.commit(outcome)
        rig.replica.fold([outcome], [commit.revision], own=True)
        rig.replica.forget()
        assert (rig.replica.revision, rig.replica.loaded_revision) == (0, 0)
        assert not rig.replica.is_loaded
        rig.store.replace()
        rig.heard.changes.clear()
        await rig.line.open()
        await rig.replica.load(rig.line)
        # Readers hear of what is gone.
        assert rig.heard.changes == [("default", frozenset({"e_dp0"}), 1)]
        assert rig.replica.loaded_revision == rig.replica.revision == rig.store.revision

    play(script)


# ------------------------------------------------------------------------ reaching


def test_reaching_a_revision_waits_for_it() -> None:
    async def script(rig: Rig) -> None:
        now = rig.replica.revision
        assert await rig.replica.reach(now)
        waiting = [asyncio.ensure_future(rig.replica.reach(now + n)) for n in (1, 2, 3)]
        waiting[0].get_loop().call_later(0.5, lambda: None)
        await asyncio.sleep(0.5)
        assert not any(one.done() for one in waiting)
        rig.replica.fold_commit(Commit(now + 2, ()))
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)
        assert [one.done() for one in waiting] == [True, True, False]
        assert await asyncio.gather(*waiting) == [True, True, False]
        assert rig.replica._reaching == set()

    play(script)


def test_reaching_a_revision_that_does_not_come_ends_in_time() -> None:
    async def script(rig: Rig) -> None:
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        assert not await rig.replica.reach(rig.replica.revision + 1, 0.7)
        assert loop.time() - before_s == pytest.approx(0.7)

    play(script)


def test_who_waits_for_a_revision_can_be_cancelled_in_the_turn_in_which_it_comes() -> None:
    async def script(rig: Rig) -> None:
        waiting = asyncio.ensure_future(rig.replica.reach(rig.replica.revision + 1))
        await asyncio.sleep(0.1)
        rig.replica.fold_commit(Commit(rig.replica.revision + 1, ()))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert rig.replica._reaching == set()

    play(script)


def test_leases_that_a_wave_ended_are_told_to_be_dropped() -> None:
    async def script(rig: Rig) -> None:
        outcome = rig.decided()
        rig.replica.fold([outcome], [(await rig.commit(outcome)).revision], own=True)
        book = rig.books.get("default")
        (lease_id,) = book.leases
        revoking: Decision[Any] = book.revoke_lease(
            v1.RevokeLeaseRequest(lease_id=lease_id), rig.clock.now()
        )
        end = Outcome(outcome.command, book, revoking)
        rig.replica.fold([end], [(await rig.commit(end)).revision], own=True)
        assert rig.news._alive == {}
        assert rig.news._ended == {lease_id}

    play(script)
