"""The conformance suite of stores.

A store's test module derives a class from `StoreContract` and gives it a
`harness`, which knows how to open, reopen and break that store. Nothing here
knows more of a store than its protocol: revisions only rise, they need not be
neighbours.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

import pytest

from rankbook.errors import LimitExceeded, Reason, Unavailable
from rankbook_server.core.ops import Commit, Compare, Delete, Entry, Op, Put, Txn
from rankbook_server.store.base import Compacted, Store

TEST_TIMEOUT_S = 20.0


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class IdSequence:
    """Ids that never repeat."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self) -> str:
        self._count += 1
        return f"book-{self._count}"


class StoreHarness(abc.ABC):
    """How the suite gets at one kind of store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abc.abstractmethod
    def new(self) -> Store:
        """Builds, without opening it, a store on an empty book of its own."""

    @abc.abstractmethod
    async def restart(self, store: Store) -> Store:
        """Closes a store and opens its book again, as a restarted server would."""

    @abc.abstractmethod
    def broken(self, store: Store) -> contextlib.AbstractContextManager[None]:
        """Breaks what the store writes to, for the length of a with block."""

    @abc.abstractmethod
    async def forget_history(self, store: Store) -> None:
        """Makes the history up to now too old to be watched; may commit."""

    @abc.abstractmethod
    async def pass_time(self, seconds: float) -> None:
        """Lets time pass for leases."""

    def run(self, claim: Callable[[Store], Awaitable[None]]) -> None:
        """Runs a claim on a new, open store, and closes it."""

        async def body() -> None:
            store = self.new()
            await store.open()
            try:
                async with asyncio.timeout(TEST_TIMEOUT_S):
                    await claim(store)
            finally:
                await store.close()

        asyncio.run(body())


def put(key: str, value: bytes = b"v") -> Txn:
    return Txn((Put(key, value),))


async def commit_one(store: Store, txn: Txn) -> int:
    (revision,) = await store.commit([txn])
    assert revision is not None
    return revision


async def content(store: Store) -> dict[str, bytes]:
    return {entry.key: entry.value for entry in (await store.snapshot()).entries}


async def loop_turn() -> None:
    """Lets everything that is ready on the loop run once."""
    turned = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turned.set_result, None)
    await turned


async def take(watch: AsyncIterator[Commit], count: int) -> list[Commit]:
    return [await anext(watch) for _ in range(count)]


def replay(commits: Iterable[Commit]) -> dict[str, bytes]:
    state: dict[str, bytes] = {}
    for commit in commits:
        for op in commit.ops:
            if isinstance(op, Put):
                state[op.key] = op.value
            else:
                state.pop(op.key, None)
    return state


class StoreContract:
    """What holds for every store."""

    @pytest.fixture
    def harness(self, tmp_path: Path) -> StoreHarness:
        raise NotImplementedError

    # Books.

    def test_a_new_book_is_empty_and_has_an_id_of_its_own(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            other = harness.new()
            await other.open()
            assert (await store.snapshot()).entries == ()
            assert store.book_id
            assert other.book_id
            assert store.book_id != other.book_id
            await commit_one(store, put("a"))
            assert await content(other) == {}
            await other.close()

        harness.run(claim)

    def test_a_restart_keeps_book_entries_and_revision(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            await store.commit([put("a", b"1"), put("b", b"2"), put("a", b"3")])
            await store.commit([Txn((Delete("b"),))])
            book_id, before = store.book_id, await store.snapshot()
            again = await harness.restart(store)
            assert again.book_id == book_id
            assert await again.snapshot() == before
            await again.close()

        harness.run(claim)

    def test_revisions_rise_over_a_restart_also_when_all_keys_were_deleted(
        self, harness: StoreHarness
    ) -> None:
        async def claim(store: Store) -> None:
            await commit_one(store, put("a"))
            last = await commit_one(store, Txn((Delete("a"),)))
            again = await harness.restart(store)
            snapshot = await again.snapshot()
            assert snapshot.entries == ()
            assert snapshot.revision >= last
            assert await commit_one(again, put("b")) > last
            await again.close()

        harness.run(claim)

    def test_compares_hold_over_a_restart(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            revision = await commit_one(store, put("a", b"1"))
            again = await harness.restart(store)
            stale = Txn((Put("a", b"stale"),), (Compare("a", 0),))
            right = Txn((Put("a", b"2"),), (Compare("a", revision),))
            assert (await again.commit([stale]))[0] is None
            assert (await again.commit([right]))[0] is not None
            assert await content(again) == {"a": b"2"}
            await again.close()

        harness.run(claim)

    # Commits.

    def test_a_snapshot_has_every_key_in_order_with_the_revision_that_wrote_it(
        self, harness: StoreHarness
    ) -> None:
        async def claim(store: Store) -> None:
            second, first, other = await store.commit(
                [put("b", b"2"), put("a", b"1"), Txn((Put("c", b"3"), Put("B", b"4")))]
            )
            assert second is not None
            assert first is not None
            assert other is not None
            snapshot = await store.snapshot()
            assert snapshot.entries == (
                Entry("B", b"4", other),
                Entry("a", b"1", first),
                Entry("b", b"2", second),
                Entry("c", b"3", other),
            )
            assert snapshot.revision >= other

        harness.run(claim)

    def test_a_snapshot_does_not_change_afterwards(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            await commit_one(store, put("a", b"1"))
            before = await store.snapshot()
            later = await commit_one(store, put("a", b"2"))
            assert [entry.value for entry in before.entries] == [b"1"]
            assert before.revision < later

        harness.run(claim)

    def test_a_snapshot_taken_between_commits_is_of_one_revision(
        self, harness: StoreHarness
    ) -> None:
        async def claim(store: Store) -> None:
            async def write() -> None:
                for number in range(60):
                    value = b"%d" % number
                    await store.commit([Txn((Put("left", value), Put("right", value)))])

            writing = asyncio.create_task(write())
            seen = 0
            while not writing.done():
                snapshot = await store.snapshot()
                assert len({(entry.value, entry.revision) for entry in snapshot.entries}) <= 1
                seen += 1
                # Lets the other side commit where the store itself waits for nothing.
                await loop_turn()
            await writing
            assert seen
            assert await content(store) == {"left": b"59", "right": b"59"}

        harness.run(claim)

    def test_every_transaction_has_its_own_revision_in_order(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            start = (await store.snapshot()).revision
            revisions: list[int] = []
            for round_number in range(3):
                for revision in await store.commit([put(f"{round_number}.{i}") for i in range(5)]):
                    assert revision is not None
                    revisions.append(revision)
            assert len(revisions) == 15
            assert revisions == sorted(set(revisions))
            assert revisions[0] > start
            assert (await store.snapshot()).revision >= revisions[-1]

        harness.run(claim)

    def test_an_empty_batch_does_nothing(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            before = await store.snapshot()
            assert await store.commit([]) == []
            assert await store.snapshot() == before

        harness.run(claim)

    def test_a_delete_removes_a_key_and_ignores_an_absent_one(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            await store.commit([put("a"), put("b")])
            await commit_one(store, Txn((Delete("a"), Delete("never"))))
            assert await content(store) == {"b": b"v"}

        harness.run(claim)

    def test_a_transaction_that_changes_nothing_has_a_revision_too(
        self, harness: StoreHarness
    ) -> None:
        async def claim(store: Store) -> None:
            first, second, third = await store.commit([put("a"), Txn(()), Txn((Delete("x"),))])
            assert first is not None
            assert second is not None
            assert third is not None
            assert first < second < third

        harness.run(claim)

    def test_the_last_operation_on_a_key_counts(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            ops: tuple[Op, ...] = (Put("a", b"1"), Delete("a"), Put("a", b"2"))
            await commit_one(store, Txn((*ops, Put("b", b"1"), Delete("b"))))
            assert await content(store) == {"a": b"2"}

        harness.run(claim)

    def test_keys_are_whole_words_and_not_prefixes(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            keys = ["prod/e/a", "prod-eu/e/a", "prod/e/a0", "prod.e/a", "prod/e/a/b", "PROD/e/a"]
            await commit_one(store, Txn(tuple(Put(key, key.encode()) for key in keys)))
            await commit_one(store, Txn((Delete("prod/e/a"), Put("prod", b"new"))))
            expected = {key: key.encode() for key in keys[1:]} | {"prod": b"new"}
            assert await content(store) == expected

        harness.run(claim)

    def test_values_come_back_byte_for_byte(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            values = {
                "empty": b"",
                "every": bytes(range(256)),
                "zeros": bytes(4096),
                "text": "ä€\N{GRINNING FACE}".encode(),
                "payload": bytes(range(255, -1, -1)) * 2048,
            }
            assert len(values["payload"]) == 512 * 1024
            for key, value in values.items():
                await commit_one(store, put(key, value))
            assert await content(store) == values
            again = await harness.restart(store)
            assert await content(again) == values
            await again.close()

        harness.run(claim)

    # Compares.

    def test_a_failed_compare_writes_nothing_of_its_transaction(
        self, harness: StoreHarness
    ) -> None:
        async def claim(store: Store) -> None:
            await commit_one(store, put("a", b"1"))
            before = await store.snapshot()
            refused = Txn(
                (Put("new", b"x"), Delete("a"), Put("b", b"x")),
                (Compare("new", 0), Compare("a", before.revision + 1000)),
            )
            assert await store.commit([refused]) == [None]
            assert await store.snapshot() == before

        harness.run(claim)

    def test_a_failed_compare_does_not_stop_the_others_of_its_batch(
        self, harness: StoreHarness
    ) -> None:
        async def claim(store: Store) -> None:
            refused = Txn((Put("refused", b"x"),), (Compare("a", 0),))
            first, failed, last = await store.commit([put("a"), refused, put("b")])
            assert first is not None
            assert last is not None
            assert failed is None
            assert first < last
            assert await content(store) == {"a": b"v", "b": b"v"}

        harness.run(claim)

    def test_compare_zero_means_absent(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            create = Txn((Put("a", b"created"),), (Compare("a", 0),))
            assert (await store.commit([create]))[0] is not None
            assert (await store.commit([create]))[0] is None
            await commit_one(store, Txn((Delete("a"),)))
            assert (await store.commit([create]))[0] is not None

        harness.run(claim)

    def test_compare_means_the_revision_that_last_wrote_the_key(
        self, harness: StoreHarness
    ) -> None:
        async def claim(store: Store) -> None:
            def change(revision: int) -> Txn:
                return Txn((Put("a", b"changed"),), (Compare("a", revision),))

            created = await commit_one(store, put("a"))
            await commit_one(store, put("unrelated"))
            (changed,) = await store.commit([change(created)])
            assert changed is not None
            assert await store.commit([change(created)]) == [None]
            await commit_one(store, Txn((Delete("a"),)))
            assert await store.commit([change(changed)]) == [None]
            assert (await content(store)).keys() == {"unrelated"}

        harness.run(claim)

    def test_a_compare_sees_what_came_before_it_in_the_batch(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            claim_slot = [
                Txn((Put("slot", holder),), (Compare("slot", 0),)) for holder in (b"one", b"two")
            ]
            free = Txn((Delete("slot"),))
            results = await store.commit([*claim_slot, free, claim_slot[1]])
            assert [result is None for result in results] == [False, True, False, False]
            assert await content(store) == {"slot": b"two"}

        harness.run(claim)

    def test_a_compare_does_not_see_its_own_operations(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            txn = Txn((Put("a", b"1"), Put("b", b"1")), (Compare("b", 0), Compare("a", 0)))
            assert (await store.commit([txn]))[0] is not None

        harness.run(claim)

    def test_a_commit_on_a_base_is_refused_once_the_book_has_moved(
        self, harness: StoreHarness
    ) -> None:
        async def claim(store: Store) -> None:
            await commit_one(store, put("a"))
            base = (await store.snapshot()).revision
            first, second, free = await store.commit(
                [
                    Txn((Put("a", b"1"),), base=base),
                    Txn((Put("a", b"2"),), base=base),
                    put("free"),
                ]
            )
            assert first is not None
            assert second is None
            assert free is not None
            assert await store.commit([Txn((Put("a", b"3"),), base=first)]) == [None]
            # Also a commit that wrote nothing has moved it.
            empty = await commit_one(store, Txn(()))
            assert await store.commit([Txn((Put("a", b"4"),), base=free)]) == [None]
            assert await commit_one(store, Txn((Put("a", b"5"),), base=empty)) > empty
            assert await content(store) == {"a": b"5", "free": b"v"}

        harness.run(claim)

    # Bounds.

    def test_a_transaction_of_126_operations_is_taken_whole(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            base = (await store.snapshot()).revision
            ops = tuple(Put(f"k{number:03}", b"v") for number in range(126))
            compares = tuple(Compare(op.key, 0) for op in ops)
            revision = await commit_one(store, Txn(ops, compares, base=base))
            entries = (await store.snapshot()).entries
            assert len(entries) == 126
            assert {entry.revision for entry in entries} == {revision}

        harness.run(claim)

    @pytest.mark.parametrize("what", ["operations", "compares"])
    def test_more_than_126_are_refused_with_the_whole_batch(
        self, harness: StoreHarness, what: str
    ) -> None:
        async def claim(store: Store) -> None:
            before = await store.snapshot()
            keys = [f"k{number}" for number in range(127)]
            if what == "operations":
                large = Txn(tuple(Put(key, b"v") for key in keys))
            else:
                large = Txn((Put("a", b"v"),), tuple(Compare(key, 0) for key in keys))
            with pytest.raises(LimitExceeded, match=f"127 {what}") as caught:
                await store.commit([put("before"), large, put("after")])
            assert caught.value.metadata["bound"] == "126"
            assert await store.snapshot() == before

        harness.run(claim)

    # Watches.

    def test_a_watch_yields_every_commit_above_its_revision_in_order(
        self, harness: StoreHarness
    ) -> None:
        async def claim(store: Store) -> None:
            start = await commit_one(store, put("before"))
            txns = [put("a", b"1"), Txn((Put("b", b"2"), Delete("a"))), put("c", b"3")]
            refused = Txn((Put("never", b"x"),), (Compare("b", 0),))
            first, second, _, third = await store.commit([*txns[:2], refused, txns[2]])
            assert first is not None
            assert second is not None
            assert third is not None
            watch = store.watch(start)
            assert await take(watch, 3) == [
                Commit(first, txns[0].ops),
                Commit(second, txns[1].ops),
                Commit(third, txns[2].ops),
            ]

        harness.run(claim)

    def test_a_watch_waits_for_what_is_yet_to_come(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            watch = store.watch((await store.snapshot()).revision)
            started = asyncio.Event()

            async def follow() -> Commit:
                started.set()
                return await anext(watch)

            following = asyncio.create_task(follow())
            await started.wait()
            assert not following.done()
            revision = await commit_one(store, put("a", b"1"))
            assert await following == Commit(revision, (Put("a", b"1"),))

        harness.run(claim)

    def test_a_snapshot_and_a_watch_from_it_miss_nothing_and_repeat_nothing(
        self, harness: StoreHarness
    ) -> None:
        async def claim(store: Store) -> None:
            async def write() -> int:
                last = 0
                for number in range(40):
                    last = await commit_one(store, put(f"k{number}", b"%d" % number))
                return last

            await commit_one(store, put("first"))
            writing = asyncio.create_task(write())
            snapshot = await store.snapshot()
            last = await writing
            seen: list[Commit] = []
            async for commit in store.watch(snapshot.revision):
                seen.append(commit)
                if commit.revision == last:
                    break
            state = {entry.key: entry.value for entry in snapshot.entries}
            assert not state.keys() & replay(seen).keys()
            assert state | replay(seen) == await content(store)

        harness.run(claim)

    def test_a_watch_resumes_where_another_stopped(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            start = (await store.snapshot()).revision
            for number in range(6):
                await commit_one(store, put(f"k{number}"))
            first = await take(store.watch(start), 2)
            rest = await take(store.watch(first[-1].revision), 4)
            keys = [op.key for commit in (*first, *rest) for op in commit.ops]
            assert keys == [f"k{number}" for number in range(6)]

        harness.run(claim)

    def test_two_watches_each_see_everything(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            start = (await store.snapshot()).revision
            slow, quick = store.watch(start), store.watch(start)
            await commit_one(store, put("a"))
            early = await take(quick, 1)
            following = [asyncio.create_task(take(quick, 2)), asyncio.create_task(take(slow, 3))]
            await commit_one(store, put("b"))
            await commit_one(store, put("c"))
            late, everything = await asyncio.gather(*following)
            assert early + late == everything
            assert [op.key for commit in everything for op in commit.ops] == ["a", "b", "c"]

        harness.run(claim)

    def test_a_watch_below_the_history_kept_is_told_so(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            old = await commit_one(store, put("a"))
            await commit_one(store, put("b"))
            await harness.forget_history(store)
            with pytest.raises(Compacted) as caught:
                await anext(store.watch(old))
            assert caught.value.from_revision == old
            assert old < caught.value.floor <= (await store.snapshot()).revision
            revision = (await store.snapshot()).revision
            new = await commit_one(store, put("c"))
            assert (await anext(store.watch(revision))).revision == new

        harness.run(claim)

    def test_a_watch_that_fell_behind_misses_nothing_unnoticed(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            watch = store.watch((await store.snapshot()).revision)
            await commit_one(store, put("a"))
            await commit_one(store, put("b"))
            assert (await anext(watch)).ops == (Put("a", b"v"),)
            await harness.forget_history(store)
            # A store that had sent it already may still deliver it.
            with contextlib.suppress(Compacted):
                assert (await anext(watch)).ops == (Put("b", b"v"),)

        harness.run(claim)

    def test_a_watch_ends_when_the_store_is_closed(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            watch = store.watch((await store.snapshot()).revision)

            async def drain() -> list[Commit]:
                return [commit async for commit in watch]

            await commit_one(store, put("a"))
            started = asyncio.Event()

            async def follow() -> list[Commit]:
                started.set()
                return await drain()

            following = asyncio.create_task(follow())
            await started.wait()
            await store.close()
            assert [op.key for commit in await following for op in commit.ops] == ["a"]

        harness.run(claim)

    # Several callers.

    def test_commits_of_many_tasks_are_whole_and_watched_in_order(
        self, harness: StoreHarness
    ) -> None:
        async def claim(store: Store) -> None:
            start = (await store.snapshot()).revision

            async def write(name: int) -> list[int]:
                revisions = []
                for number in range(5):
                    results = await store.commit(
                        [put(f"{name}.{number}"), Txn((Put("shared", b"%d" % name),))]
                    )
                    revisions += [result for result in results if result is not None]
                return revisions

            written = await asyncio.gather(*(write(name) for name in range(6)))
            seen = await take(store.watch(start), 60)
            revisions = [commit.revision for commit in seen]
            assert revisions == sorted(set(revisions))
            assert set(revisions) == {revision for mine in written for revision in mine}
            assert replay(seen) == await content(store)

        harness.run(claim)

    def test_a_commit_whose_caller_gave_up_happened_for_the_watch_as_for_the_snapshot(
        self, harness: StoreHarness
    ) -> None:
        async def claim(store: Store) -> None:
            start = (await store.snapshot()).revision
            started = asyncio.Event()

            async def call() -> None:
                started.set()
                await store.commit([Txn((Put("a", b"1"), Put("b", b"1")))])

            calling = asyncio.create_task(call())
            await started.wait()
            calling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await calling
            marker = await commit_one(store, put("marker"))
            seen = []
            async for commit in store.watch(start):
                seen.append(commit)
                if commit.revision == marker:
                    break
            assert replay(seen) == await content(store)
            assert (await content(store)).keys() in ({"marker"}, {"a", "b", "marker"})

        harness.run(claim)

    # Liveness.

    def test_a_touched_lease_lives_for_its_time_and_no_longer(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            await store.touch({"short": 2.0, "long": 60.0})
            live = await store.live()
            assert live.keys() == {"short", "long"}
            assert live["short"] == pytest.approx(2.0, abs=1.5)
            assert live["long"] == pytest.approx(60.0, abs=1.5)
            await harness.pass_time(3.5)
            live = await store.live()
            assert live.keys() == {"long"}
            assert live["long"] == pytest.approx(56.5, abs=1.5)

        harness.run(claim)

    def test_a_touch_replaces_the_time_a_lease_has(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            await store.touch({"longer": 2.0, "sooner": 60.0})
            await store.touch({"longer": 60.0, "sooner": 2.0})
            await harness.pass_time(3.5)
            assert (await store.live()).keys() == {"longer"}

        harness.run(claim)

    def test_a_lease_that_ended_can_be_touched_again(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            await store.touch({"a": 2.0})
            await harness.pass_time(3.5)
            assert await store.live() == {}
            await store.touch({"a": 30.0})
            assert (await store.live()).keys() == {"a"}

        harness.run(claim)

    def test_a_dropped_lease_is_gone_at_once_and_others_stay(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            await store.touch({"a": 30.0, "a-b": 30.0, "c": 30.0})
            await store.drop(["a", "never"])
            assert (await store.live()).keys() == {"a-b", "c"}
            await store.drop(["a", "c"])
            assert (await store.live()).keys() == {"a-b"}

        harness.run(claim)

    @pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_time_that_is_none_is_refused_for_all(
        self, harness: StoreHarness, ttl_s: float
    ) -> None:
        async def claim(store: Store) -> None:
            with pytest.raises(ValueError, match="wrong"):
                await store.touch({"right": 30.0, "wrong": ttl_s})
            assert await store.live() == {}

        harness.run(claim)

    def test_liveness_is_no_part_of_the_book(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            revision = (await store.snapshot()).revision
            await store.touch({"a": 30.0})
            await store.drop(["a"])
            after = await store.snapshot()
            assert after.entries == ()
            # Another revision is allowed; a commit seen by the watch is not.
            marker = await commit_one(store, put("marker"))
            assert (await anext(store.watch(revision))).revision == marker

        harness.run(claim)

    def test_a_commit_may_ask_that_leases_do_not_live(self, harness: StoreHarness) -> None:
        async def claim(store: Store) -> None:
            await store.touch({"alive": 60.0, "dropped": 60.0})
            await store.drop(["dropped"])
            before = await store.snapshot()
            refused = Txn((Put("a", b"1"),), away=("dropped", "never", "alive"))
            assert await store.commit([refused]) == [None]
            assert (await store.snapshot()).entries == before.entries
            removes = Txn((Put("a", b"1"),), (Compare("a", 0),), ("dropped", "never"))
            assert (await store.commit([removes]))[0] is not None
            assert await content(store) == {"a": b"1"}

        harness.run(claim)

    # Opening, closing, failing.

    def test_no_call_passes_before_open_or_after_close(self, harness: StoreHarness) -> None:
        async def refuses_all(store: Store) -> None:
            calls: list[Callable[[], Awaitable[object]]] = [
                store.snapshot,
                lambda: store.commit([put("a")]),
                lambda: anext(store.watch(0)),
                lambda: store.touch({"a": 1.0}),
                lambda: store.drop(["a"]),
                store.live,
            ]
            for call in calls:
                with pytest.raises(Unavailable, match="not open") as caught:
                    await call()
                assert caught.value.reason is Reason.STORE_UNAVAILABLE

        async def body() -> None:
            store = harness.new()
            await refuses_all(store)
            await store.open()
            await commit_one(store, put("a"))
            await store.close()
            await refuses_all(store)

        asyncio.run(body())

    def test_open_and_close_may_be_repeated(self, harness: StoreHarness) -> None:
        async def body() -> None:
            store = harness.new()
            await store.close()
            await store.open()
            await commit_one(store, put("a"))
            await store.open()
            assert await content(store) == {"a": b"v"}
            await asyncio.gather(store.close(), store.close())
            await store.close()

        asyncio.run(body())

    def test_a_commit_that_fails_keeps_nothing_and_a_later_one_passes(
        self, harness: StoreHarness
    ) -> None:
        async def claim(store: Store) -> None:
            await commit_one(store, put("kept", b"1"))
            before = await store.snapshot()
            batch = [put("kept", b"2"), Txn((Put("new", bytes(100_000)), Delete("kept")))]
            for _ in range(3):
                with harness.broken(store), pytest.raises(Unavailable) as caught:
                    await store.commit(batch)
                assert caught.value.reason is Reason.STORE_UNAVAILABLE
                assert len(caught.value.message) > 20
                assert await store.snapshot() == before
            watch = store.watch(before.revision)
            first, second = await store.commit(batch)
            assert first is not None
            assert second is not None
            assert before.revision < first < second
            assert await content(store) == {"new": bytes(100_000)}
            assert await take(watch, 2) == [
                Commit(first, batch[0].ops),
                Commit(second, batch[1].ops),
            ]
            again = await harness.restart(store)
            assert await content(again) == {"new": bytes(100_000)}
            assert (await again.snapshot()).revision >= second
            await again.close()

        harness.run(claim)
