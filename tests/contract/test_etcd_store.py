"""What a store on etcd promises beyond what every store does."""

from __future__ import annotations

import asyncio
import time

import pytest

from rankbook import v1
from rankbook.errors import LimitExceeded, Reason, Unavailable
from rankbook_server.core.ops import Commit, Compare, Delete, Put, Txn
from rankbook_server.etcd.failures import EtcdError
from rankbook_server.store import Compacted

from .etcd_server import EtcdNode, b64, program_or_give_up
from .opened import build, fresh_prefix, opened, run, take_until
from .store_contract import commit_one, content, put


def etcd_revision(node: EtcdNode) -> int:
    return int(node.call("/v3/kv/range", {"key": b64("none")})["header"]["revision"])


def write_by_hand(node: EtcdNode, key: str, value: bytes = b"x") -> None:
    node.call("/v3/kv/put", {"key": b64(key), "value": b64(value)})


def delete_by_hand(node: EtcdNode, key: str) -> None:
    node.call("/v3/kv/deleterange", {"key": b64(key)})


def forget(node: EtcdNode, revision: int) -> None:
    node.call("/v3/kv/compaction", {"revision": revision, "physical": True})


# Several servers, several books.


def test_two_servers_have_one_book_and_see_what_the_other_commits(etcd: EtcdNode) -> None:
    async def body() -> None:
        url = etcd.url(fresh_prefix())
        async with opened(url) as one, opened(url) as two:
            assert one.book_id == two.book_id
            start = (await two.snapshot()).revision
            watch = two.watch(start)
            first = await commit_one(one, put("a", b"1"))
            second = await commit_one(two, put("b", b"2"))
            assert await take_until(watch, second) == [
                Commit(first, (Put("a", b"1"),)),
                Commit(second, (Put("b", b"2"),)),
            ]
            assert await one.snapshot() == await two.snapshot()
            assert await two.last_revision() == second
            # The one that has not seen it is refused.
            assert await one.commit([Txn((Put("c", b"3"),), base=first)]) == [None]

    run(body())


def test_all_servers_agree_on_the_revision_while_others_write_to_etcd(etcd: EtcdNode) -> None:
    async def body() -> None:
        prefix = fresh_prefix()
        url = etcd.url(prefix)
        async with opened(url) as one, opened(url) as two:
            last = await commit_one(one, put("a"))
            write_by_hand(etcd, f"{prefix}-other")
            await one.touch({"lease": 30.0})
            assert (await one.snapshot()).revision == last
            assert (await two.snapshot()).revision == last
            assert await two.last_revision() == last

    run(body())


def test_a_book_that_two_servers_create_at_once_is_one_book(etcd: EtcdNode) -> None:
    async def body() -> None:
        url = etcd.url(fresh_prefix())
        stores = [build(url) for _ in range(8)]
        await asyncio.gather(*(store.open() for store in stores))
        assert len({store.book_id for store in stores}) == 1
        await asyncio.gather(*(store.close() for store in stores))

    run(body())


@pytest.mark.parametrize("other", ["-eu", "/eu", ".eu", "0", "/book-eu", "/booking"])
def test_books_whose_prefixes_are_alike_do_not_see_each_other(etcd: EtcdNode, other: str) -> None:
    async def body() -> None:
        prefix = fresh_prefix()
        async with opened(etcd.url(prefix)) as one, opened(etcd.url(prefix + other)) as two:
            assert one.book_id != two.book_id
            presence, watch = one.presence(), one.watch(0)
            assert not (await anext(presence)).live
            await commit_one(two, put("a", b"two"))
            await two.touch({"theirs": 30.0, "ours": 30.0})
            revision = await commit_one(one, put("a", b"one"))
            await one.touch({"ours": 30.0})
            assert await content(one) == {"a": b"one"}
            assert await content(two) == {"a": b"two"}
            assert await anext(watch) == Commit(revision, (Put("a", b"one"),))
            assert (await anext(presence)).live == {"ours"}
            await one.drop(["theirs", "ours"])
            assert (await two.live()).keys() == {"theirs", "ours"}
            assert await one.live() == {}

    run(body())


def test_what_is_not_ours_below_the_prefix_is_left_alone(etcd: EtcdNode) -> None:
    async def body() -> None:
        prefix = fresh_prefix()
        write_by_hand(etcd, f"{prefix}/book-notes")
        write_by_hand(etcd, f"{prefix}/readme")
        async with opened(etcd.url(prefix)) as store:
            watch = store.watch(0)
            write_by_hand(etcd, f"{prefix}/book-notes", b"y")
            revision = await commit_one(store, put("a"))
            assert (await anext(watch)).revision == revision
            assert await content(store) == {"a": b"v"}
            kept = etcd.call("/v3/kv/range", {"key": b64(f"{prefix}/book-notes")})
            assert kept["kvs"][0]["value"] == b64("y")

    run(body())


# The head of the book.


def test_a_book_of_a_newer_version_is_refused(etcd: EtcdNode) -> None:
    async def body() -> None:
        prefix = fresh_prefix()
        head = v1.StoredBook(version=2, book_id="from-the-future")
        write_by_hand(etcd, f"{prefix}/book", head.SerializeToString())
        store = build(etcd.url(prefix))
        with pytest.raises(Unavailable, match="version 2 and this rankbookd knows up to 1"):
            await store.open()
        with pytest.raises(Unavailable, match="not open"):
            await store.snapshot()

    run(body())


@pytest.mark.parametrize("value", [b"", b"hello", b"\xff\xff\xff"])
def test_a_head_that_is_no_book_is_refused_and_kept(etcd: EtcdNode, value: bytes) -> None:
    async def body() -> None:
        prefix = fresh_prefix()
        write_by_hand(etcd, f"{prefix}/book", value)
        with pytest.raises(Unavailable, match="is no book of ours"):
            await build(etcd.url(prefix)).open()
        kept = etcd.call("/v3/kv/range", {"key": b64(f"{prefix}/book")})
        assert kept["kvs"][0].get("value", "") == b64(value)

    run(body())


@pytest.mark.parametrize("made_anew", [False, True])
def test_a_book_that_was_replaced_is_noticed_and_the_new_one_opened(
    etcd: EtcdNode, made_anew: bool
) -> None:
    async def body() -> None:
        prefix = fresh_prefix()
        url = etcd.url(prefix)
        async with opened(url) as store, opened(url) as idle:
            old = store.book_id
            await commit_one(store, put("a"))
            watch = idle.watch((await idle.snapshot()).revision)
            following = asyncio.ensure_future(anext(watch))
            delete_by_hand(etcd, f"{prefix}/book")
            if made_anew:
                async with opened(url) as other:
                    await commit_one(other, put("b"))
            with pytest.raises(Unavailable, match="deleted, replaced") as caught:
                await store.commit([put("c")])
            assert caught.value.reason is Reason.STORE_UNAVAILABLE
            with pytest.raises(Unavailable, match="deleted, replaced"):
                await following
            for call in (store.snapshot, store.last_revision, idle.snapshot):
                with pytest.raises(Unavailable, match="deleted, replaced"):
                    await call()
            await store.open()
            await idle.open()
            assert store.book_id == idle.book_id != old
            # Nothing of the old one came back.
            assert await content(store) == ({"b": b"v"} if made_anew else {})
            await commit_one(store, put("d"))

    run(body())


def test_a_resting_server_learns_from_its_snapshot_that_the_book_was_replaced(
    etcd: EtcdNode,
) -> None:
    async def body() -> None:
        prefix = fresh_prefix()
        async with opened(etcd.url(prefix)) as store:
            delete_by_hand(etcd, f"{prefix}/book")
            with pytest.raises(Unavailable, match="deleted, replaced"):
                await store.snapshot()

    run(body())


# History.


def test_a_book_that_rested_while_etcd_was_compacted_is_watched_on(etcd: EtcdNode) -> None:
    async def body() -> None:
        prefix = fresh_prefix()
        async with opened(etcd.url(prefix)) as store:
            last = await commit_one(store, put("a"))
            for number in range(5):
                write_by_hand(etcd, f"{prefix}-other", b"%d" % number)
            forget(etcd, etcd_revision(etcd))
            assert (await store.snapshot()).revision == last
            first = await commit_one(store, put("b"))
            watch = store.watch(last)
            assert await anext(watch) == Commit(first, (Put("b", b"v"),))
            second = await commit_one(store, put("c"))
            assert await anext(watch) == Commit(second, (Put("c", b"v"),))

    run(body())


def test_a_delete_at_the_revision_that_was_compacted_to_is_not_missed(etcd: EtcdNode) -> None:
    async def body() -> None:
        async with opened(etcd.url(fresh_prefix())) as store:
            before = await commit_one(store, put("a"))
            deleted = await commit_one(store, Txn((Delete("a"), Put("b", b"v"))))
            forget(etcd, deleted)
            with pytest.raises(Compacted) as caught:
                await anext(store.watch(before))
            assert caught.value.floor == deleted
            later = await commit_one(store, put("c"))
            assert (await anext(store.watch(deleted))).revision == later

    run(body())


def test_a_watch_that_catches_up_gets_every_commit_whole(etcd: EtcdNode) -> None:
    # etcd sends 2 MiB in a message: most of these are cut somewhere inside.
    async def body() -> None:
        async with opened(etcd.url(fresh_prefix())) as store:
            start = (await store.snapshot()).revision
            txns = [
                Txn(tuple(Put(f"{key}", bytes([number]) * 37_000) for key in range(30)))
                for number in range(12)
            ]
            revisions = await store.commit(txns)
            assert revisions[-1] is not None
            assert await take_until(store.watch(start), revisions[-1]) == [
                Commit(revision or 0, txn.ops)
                for revision, txn in zip(revisions, txns, strict=True)
            ]

    run(body())


def test_a_snapshot_of_many_pages_is_of_one_revision_while_etcd_is_written_and_compacted(
    etcd: EtcdNode,
) -> None:
    async def body() -> None:
        async with opened(etcd.url(fresh_prefix())) as store, asyncio.TaskGroup() as tasks:
            fillers = [Put(f"m{number:04}", bytes(2_000)) for number in range(1_000)]
            await store.commit(
                [Txn(tuple(fillers[at : at + 100])) for at in range(0, len(fillers), 100)]
            )
            done = asyncio.Event()

            async def write() -> None:
                number = 0
                while not done.is_set():
                    number += 1
                    value = b"%d" % number
                    revision = await commit_one(store, Txn((Put("a", value), Put("z", value))))
                    if number % 20 == 0:
                        await asyncio.to_thread(forget, etcd, revision)

            writing = tasks.create_task(write())
            for _ in range(10):
                entries = {entry.key: entry for entry in (await store.snapshot()).entries}
                first, last = entries.get("a"), entries.get("z")
                assert (first and (first.value, first.revision)) == (
                    last and (last.value, last.revision)
                )
                assert len(entries) in (1_000, 1_002)
            done.set()
            await writing

    run(body())


# Bounds.


def test_a_transaction_as_large_as_the_store_says_is_taken(etcd: EtcdNode) -> None:
    async def body() -> None:
        prefix = f"{fresh_prefix()}/".ljust(200, "p")
        async with opened(etcd.url(prefix)) as store:
            base = (await store.snapshot()).revision
            keys = [f"{number:03}".ljust(500, "k") for number in range(126)]
            room = store.most_bytes - 2 * sum(map(len, keys))
            values = [bytes(room // 126)] * 125 + [bytes(room // 126 + room % 126)]
            whole = Txn(
                tuple(Put(key, value) for key, value in zip(keys, values, strict=True)),
                tuple(Compare(key, 0) for key in keys),
                base=base,
            )
            assert await commit_one(store, whole) > base
            more = Txn((*whole.ops[:-1], Put(keys[-1], values[-1] + b"!")), whole.compares)
            with pytest.raises(LimitExceeded, match="bytes of keys and values"):
                await store.commit([put("never"), more])
            assert "never" not in await content(store)

    run(body())


def test_an_etcd_that_takes_less_than_by_default_says_what_to_raise() -> None:
    async def body(node: EtcdNode) -> None:
        async with opened(node.url()) as store:
            # It will be no smaller the next time, so nobody is told to try again.
            with pytest.raises(LimitExceeded, match="--max-request-bytes"):
                await store.commit([put("a", bytes(100_000))])
            assert await content(store) == {}

    with EtcdNode(binary=program_or_give_up(), flags=["--max-request-bytes=65536"]) as node:
        run(body(node))


def test_a_quota_that_is_used_up_is_told_with_what_to_do(etcd: EtcdNode) -> None:
    async def body() -> None:
        async with opened(etcd.url(fresh_prefix())) as store:
            last = await commit_one(store, put("a"))
            alarm = {"memberID": 0, "alarm": "NOSPACE"}
            etcd.call("/v3/maintenance/alarm", {"action": "ACTIVATE", **alarm})
            try:
                with pytest.raises(Unavailable, match="etcdctl alarm disarm") as caught:
                    await store.commit([put("b")])
                assert etcd.endpoint in caught.value.message
                assert caught.value.metadata["outcome"] == "nothing was written"
                assert (await store.snapshot()).revision == last
                # A server that starts now serves reads, too.
                async with opened(etcd.url(store.description.rpartition("/")[2])) as other:
                    assert await content(other) == {"a": b"v"}
            finally:
                etcd.call("/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})
            await commit_one(store, put("b"))

    run(body())


def test_an_outcome_that_is_not_known_is_called_so(each_etcd: EtcdNode) -> None:
    async def body() -> None:
        async with opened(each_etcd.url(fresh_prefix())) as store:
            await commit_one(store, put("a"))
            each_etcd.pause()
            try:
                started = time.monotonic()
                with pytest.raises(Unavailable, match="not known") as caught:
                    await store.commit([put("b")])
                assert caught.value.metadata["outcome"] == "unknown"
                assert isinstance(caught.value.__cause__, EtcdError)
                assert time.monotonic() - started < 4
            finally:
                each_etcd.resume()
            # The connection was the same, so it was done before this is asked.
            assert (await content(store)).keys() in ({"a"}, {"a", "b"})
            await commit_one(store, put("c"))

    run(body())
