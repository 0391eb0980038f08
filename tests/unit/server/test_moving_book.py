"""Into a store: all of it or nothing that anybody would read, and nobody's work mixed in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from rankbook import v1
from rankbook.errors import LimitExceeded, NotFound, Reason, Refused, Unavailable
from rankbook_server.books import Books
from rankbook_server.core.fold import BookLimits
from rankbook_server.core.keys import IMPORT_KEY
from rankbook_server.core.ops import MAX_TXN_OPS, Entry, Put, Txn
from rankbook_server.moving.book import Imported, export_book, import_book
from rankbook_server.moving.export_file import Export
from rankbook_server.moving.mark import check_whole
from rankbook_server.moving.rebase import check_content
from rankbook_server.store import MemoryStore, Snapshot

from .support import FakeClock

NOW_S = 1_700_000_000.0


class Tapped(MemoryStore):
    """A store whose transactions a test sees, and may do something before."""

    def __init__(self) -> None:
        clock = FakeClock()
        super().__init__(clock.mono, clock.new_id)
        self.txns: list[Txn] = []
        self.before: Callable[[int], Awaitable[None]] | None = None

    async def commit(self, txns: Sequence[Txn]) -> list[int | None]:
        if self.before is not None:
            await self.before(len(self.txns))
        self.txns += txns
        return await super().commit(txns)


class Shared(Tapped):
    """A store with a bound of its own, as one that servers share."""

    most_bytes = 20_000

    def presence(self) -> None:
        """Is what makes a store a shared one."""


def entries(count: int, namespace: str = "n", size: int = 10) -> list[Entry]:
    """Leases, as the simplest thing that a book has many of."""
    lease = v1.StoredLease(version=1, lease_key="k" * size, ttl_millis=10_000)
    value = lease.SerializeToString()
    return [Entry(f"{namespace}/l/{n:04}", value, n + 1) for n in range(count)]


def head(engine_id: str, last_epoch: int, namespace: str = "n") -> Entry:
    stored = v1.StoredEngine(version=1, generation="g", epoch=1, last_epoch=last_epoch)
    return Entry(f"{namespace}/e/{engine_id}", stored.SerializeToString(), 1)


async def bring(store: MemoryStore, listed: list[Entry], *, overwrite: bool = False) -> Imported:
    listed = sorted(listed, key=lambda entry: entry.key)
    export = Export("from", 999, "s", "t", listed)
    return await import_book(
        store, export, check_content(export, "f"), overwrite=overwrite, unix_s=NOW_S
    )


async def kept(store: MemoryStore) -> dict[str, bytes]:
    return {entry.key: entry.value for entry in (await store.snapshot()).entries}


def test_a_book_larger_than_a_transaction_comes_in_several_under_a_mark() -> None:
    async def body() -> None:
        store = Tapped()
        await store.open()
        imported = await bring(store, entries(3 * MAX_TXN_OPS))

        assert len(await kept(store)) == imported.written == 3 * MAX_TXN_OPS
        assert [len(txn.ops) for txn in store.txns] == [1, *[MAX_TXN_OPS] * 3, 1]
        first, last = store.txns[0].ops[0], store.txns[-1].ops[0]
        assert isinstance(first, Put)
        assert (first.key, last.key) == (IMPORT_KEY, IMPORT_KEY)
        assert not isinstance(last, Put)
        assert [txn.base for txn in store.txns] == [0, 1, 2, 3, 4]
        assert imported.revision == 5

    asyncio.run(body())


def test_what_a_store_takes_at_once_bounds_a_transaction() -> None:
    async def body() -> None:
        store = Shared()
        await store.open()
        await bring(store, entries(60, size=1000))

        assert len(await kept(store)) == 60
        sizes = [
            sum(len(op.key) + len(op.value) for op in txn.ops if isinstance(op, Put))
            for txn in store.txns
        ]
        assert max(sizes) <= Shared.most_bytes
        assert len(sizes) > 4

    asyncio.run(body())


def test_a_value_that_the_store_does_not_take_is_said_before_anything_is_written() -> None:
    async def body() -> None:
        store = Shared()
        await store.open()
        with pytest.raises(LimitExceeded) as caught:
            await bring(store, [*entries(3), *entries(1, "big", 20_000)])
        assert caught.value.metadata["bound"] == "20000"
        assert "big/l/0000" in caught.value.message
        assert store.txns == []

    asyncio.run(body())


def test_a_book_with_anything_in_it_is_left_alone() -> None:
    async def body() -> None:
        store = Tapped()
        await store.open()
        await bring(store, entries(2))
        before = await kept(store)
        with pytest.raises(Refused) as caught:
            await bring(store, entries(3, "other"))
        assert caught.value.reason is Reason.BOOK_NOT_EMPTY
        assert "--overwrite" in caught.value.message
        assert await kept(store) == before

    asyncio.run(body())


def test_overwriting_takes_out_what_was_there_and_keeps_its_epochs_as_a_floor() -> None:
    async def body() -> None:
        store = Tapped()
        await store.open()
        await bring(store, [*entries(200), head("e", 7), head("old", 4, "gone")])
        imported = await bring(store, [*entries(2, "new"), head("e", 3)], overwrite=True)

        found = await kept(store)
        assert sorted(found) == ["gone/n", "n/e/e", "n/n", "new/l/0000", "new/l/0001"]
        assert imported.removed == 202
        assert v1.StoredEngine.FromString(found["n/e/e"]).last_epoch == 7
        floors = {
            key: v1.StoredNamespace.FromString(found[key]).epoch_floor for key in ("gone/n", "n/n")
        }
        assert floors == {"gone/n": 4, "n/n": 7}

    asyncio.run(body())


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_import_broken_off_anywhere_is_never_read_and_begins_anew(overwrite: bool) -> None:
    """After every transaction in turn; epochs of the book before survive it."""

    async def body() -> None:
        listed = [*entries(300), head("e", 3)]
        at = 0
        while True:
            store = Tapped()
            await store.open()
            if overwrite:
                await bring(store, [*entries(150, "was"), head("e", 9)])
            store.txns.clear()

            async def breaks(number: int, at: int = at) -> None:
                if number == at:
                    raise Unavailable("the power went")

            store.before = breaks
            try:
                await bring(store, listed, overwrite=overwrite)
                return
            except Unavailable:
                pass
            store.before = None
            snapshot = await store.snapshot()
            if at:
                with pytest.raises(Unavailable, match="--overwrite"):
                    check_whole(snapshot.entries, "s")
                with pytest.raises(Refused) as again:
                    await bring(store, listed)
                assert again.value.reason is Reason.IMPORT_UNFINISHED
                with pytest.raises(Refused) as out:
                    await export_book(store, NOW_S)
                assert out.value.reason is Reason.IMPORT_UNFINISHED
            else:
                check_whole(snapshot.entries, "s")
            await bring(store, listed, overwrite=True)
            found = await kept(store)
            assert {entry.key for entry in listed} <= set(found)
            assert set(found) - {entry.key for entry in listed} <= {"n/n", "was/n"}
            epoch = v1.StoredEngine.FromString(found["n/e/e"]).last_epoch
            assert epoch == (9 if overwrite else 3)
            at += 1

    asyncio.run(body())


def test_whoever_else_writes_meanwhile_is_not_mixed_in() -> None:
    other = Put("n/l/theirs", b"")
    words = set()

    async def body() -> None:
        at = 0
        while True:
            store = Tapped()
            await store.open()

            async def writes(number: int, at: int = at, store: Tapped = store) -> None:
                if number == at:
                    await MemoryStore.commit(store, [Txn((other,))])

            store.before = writes
            try:
                await bring(store, entries(300))
            except Refused as error:
                words.add(error.message.partition(" to ")[0])
                # What a server had in its book before is still a book.
                assert (IMPORT_KEY in await kept(store)) is (at > 0)
            else:
                assert at == len(store.txns)
                assert words == {"somebody else writes"}
                return
            at += 1

    asyncio.run(body())


def test_an_empty_book_is_not_exported() -> None:
    async def body() -> None:
        store = Tapped()
        await store.open()
        with pytest.raises(NotFound) as caught:
            await export_book(store, NOW_S)
        assert caught.value.reason is Reason.BOOK_NOT_FOUND

    asyncio.run(body())


def test_what_is_exported_is_the_book_at_one_revision() -> None:
    async def body() -> None:
        store = Tapped()
        await store.open()
        await bring(store, entries(2))
        export = await export_book(store, NOW_S)

        assert [entry.key for entry in export.entries] == ["n/l/0000", "n/l/0001"]
        assert (export.revision, export.book_id) == (3, store.book_id)
        assert export.exported_at == "2023-11-14T22:13:20Z"

    asyncio.run(body())


def test_half_a_book_takes_the_place_of_nothing_that_a_server_has_read() -> None:
    books = Books(FakeClock(), BookLimits(), max_namespaces=8)
    books.load(Snapshot(1, (head("e", 3),)), "s")
    mark = Entry(IMPORT_KEY, b"\xff", 2)

    with pytest.raises(Unavailable) as caught:
        books.load(Snapshot(2, (head("e", 3), head("f", 1), mark)), "s")
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    assert "--overwrite" in caught.value.message
    assert list(books.get("n").engines) == ["e"]
