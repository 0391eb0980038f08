"""A store on etcd while members die, freeze and come back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from rankbook.errors import Unavailable
from rankbook_server.core.ops import Commit, Compare, Put, Txn
from rankbook_server.store.etcd import EtcdStore

from .etcd_server import EtcdCluster, EtcdNode, free_ports, program_or_give_up, store_url, versions
from .opened import build, fresh_prefix, opened, run, until_served
from .store_contract import commit_one, content, put


@pytest.fixture(params=versions())
def mortal_etcd(request: pytest.FixtureRequest) -> Iterator[EtcdNode]:
    with EtcdNode(binary=program_or_give_up(request.param)) as node:
        yield node


class Writer:
    """Commits one numbered key after the other, each once, through every outage."""

    def __init__(self, store: EtcdStore) -> None:
        self.store = store
        self.acknowledged: list[int] = []
        self.stop = asyncio.Event()
        self.longest_gap_s = 0.0
        self._moved = asyncio.Event()

    async def run(self) -> None:
        number, last = 0, time.monotonic()
        while not self.stop.is_set():
            # Absent or not: so what was written without an answer is not repeated.
            name = f"k{number:06}"
            txn = Txn((Put(name, b"%d" % number),), (Compare(name, 0),))
            try:
                if (await self.store.commit([txn]))[0] is not None:
                    self.acknowledged.append(number)
                    self._moved.set()
            except Unavailable:
                await asyncio.sleep(0.02)
                continue
            now = time.monotonic()
            self.longest_gap_s = max(self.longest_gap_s, now - last)
            last = now
            number += 1

    async def count(self, more: int) -> None:
        """Waits until so many more are acknowledged."""
        wanted = len(self.acknowledged) + more
        while len(self.acknowledged) < wanted:
            self._moved.clear()
            await self._moved.wait()


class Reader:
    """Follows a book through every outage, as a server does."""

    def __init__(self, store: EtcdStore, revision: int) -> None:
        self.store = store
        self.revision = revision
        self.commits: list[Commit] = []
        self.breaks = 0
        self._moved = asyncio.Event()

    async def run(self) -> None:
        while True:
            try:
                async for commit in self.store.watch(self.revision):
                    self.commits.append(commit)
                    self.revision = commit.revision
                    self._moved.set()
                return
            except Unavailable:
                self.breaks += 1
                await asyncio.sleep(0.02)

    async def reach(self, revision: int) -> None:
        while self.revision < revision:
            self._moved.clear()
            await self._moved.wait()


@contextlib.asynccontextmanager
async def at_work(url: str) -> AsyncIterator[tuple[Writer, Reader]]:
    """A writer and a reader with stores of their own; checked at the end."""
    async with opened(url) as one, opened(url) as two:
        start = await one.snapshot()
        assert start.entries == ()
        writer, reader = Writer(one), Reader(two, start.revision)
        tasks = [asyncio.ensure_future(writer.run()), asyncio.ensure_future(reader.run())]
        yield writer, reader
        writer.stop.set()
        await tasks[0]
        last = await until_served(one.last_revision)
        await reader.reach(last)
        kept = await content(one)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Nothing that was acknowledged is lost.
        assert {f"k{number:06}" for number in writer.acknowledged} <= kept.keys()
        # The reader got everything, once, in order.
        revisions = [commit.revision for commit in reader.commits]
        assert revisions == sorted(set(revisions))
        names = [op.key for commit in reader.commits for op in commit.ops]
        assert names == sorted(kept)


@pytest.mark.slow
def test_kills_of_a_lone_etcd_lose_and_repeat_nothing(mortal_etcd: EtcdNode) -> None:
    async def body() -> None:
        async with at_work(mortal_etcd.url(fresh_prefix())) as (writer, reader):
            for _ in range(4):
                await writer.count(200)
                mortal_etcd.kill()
                await asyncio.to_thread(mortal_etcd.start)
            await writer.count(50)
        assert reader.breaks >= 4

    run(body())


@pytest.mark.slow
def test_kills_of_each_member_in_turn_lose_and_repeat_nothing(etcd_cluster: EtcdCluster) -> None:
    async def body() -> None:
        async with at_work(etcd_cluster.url(fresh_prefix())) as (writer, reader):
            for number in range(3):
                await writer.count(100)
                etcd_cluster.kill(number)
                await writer.count(100)
                await asyncio.to_thread(etcd_cluster.start, number)
            await writer.count(50)
        # An election takes up to two seconds; an answer that is lost with a
        # member costs a deadline of two more.
        assert writer.longest_gap_s < 6
        assert reader.breaks >= 1

    run(body())


@pytest.mark.slow
def test_a_frozen_member_is_left_and_nothing_is_lost(etcd_cluster: EtcdCluster) -> None:
    async def body() -> None:
        async with at_work(etcd_cluster.url(fresh_prefix())) as (writer, reader):
            await writer.count(100)
            # Both stores are connected to the first member.
            etcd_cluster.pause(0)
            try:
                await writer.count(100)
                frozen = time.monotonic()
                await reader.reach(await until_served(writer.store.last_revision))
                assert time.monotonic() - frozen < 8
            finally:
                etcd_cluster.resume(0)
            await writer.count(50)
        assert writer.longest_gap_s < 6

    run(body())


def test_a_resting_watch_notices_a_frozen_member(mortal_etcd: EtcdNode) -> None:
    async def body() -> None:
        async with opened(mortal_etcd.url(fresh_prefix())) as store:
            watch = store.watch((await store.snapshot()).revision)
            presence = store.presence()
            await anext(presence)
            following = [asyncio.ensure_future(anext(each)) for each in (watch, presence)]
            # A watch that hears from etcd stays.
            await asyncio.sleep(3)
            assert not any(each.done() for each in following)
            mortal_etcd.pause()
            try:
                started = time.monotonic()
                for each in following:
                    with pytest.raises(Unavailable, match="did not answer within"):
                        await each
                assert time.monotonic() - started < 6
            finally:
                mortal_etcd.resume()
            following = [asyncio.ensure_future(anext(store.watch(1)))]
            revision = await until_served(lambda: commit_one(store, put("a")))
            assert (await following[0]).revision == revision

    run(body())


@pytest.mark.slow
def test_a_member_without_the_others_says_so_within_ten_seconds(etcd_cluster: EtcdCluster) -> None:
    async def body() -> None:
        # Connected to the survivor alone.
        url = store_url(etcd_cluster.endpoints[:1], fresh_prefix())
        async with opened(url) as store:
            await store.touch({"lease": 60.0})
            revision = await commit_one(store, put("a"))
            watch = store.watch(revision)
            presence = store.presence()
            await anext(presence)
            following = [asyncio.ensure_future(anext(each)) for each in (watch, presence)]
            started = time.monotonic()
            etcd_cluster.kill(1)
            etcd_cluster.kill(2)
            for each in following:
                with pytest.raises(Unavailable, match="has no leader"):
                    await each
            assert time.monotonic() - started < 10
            calls = [
                store.snapshot,
                store.last_revision,
                lambda: store.commit([put("b")]),
                lambda: store.touch({"lease": 60.0}),
                lambda: store.touch({"new": 60.0}),
                lambda: anext(store.watch(revision)),
                lambda: anext(store.presence()),
            ]
            for call in calls:
                asked = time.monotonic()
                with pytest.raises(Unavailable, match="has no leader"):
                    await call()
                assert time.monotonic() - asked < 4
            other = build(url)
            with pytest.raises(Unavailable, match="has no leader"):
                await other.open()
            await asyncio.to_thread(etcd_cluster.start, 1)
            await until_served(lambda: commit_one(store, put("c")))
            await until_served(lambda: store.touch({"lease": 60.0}))
            assert (await content(store)).keys() == {"a", "c"}

    run(body())


def test_leases_outlive_a_kill_of_etcd_and_are_touched_on(mortal_etcd: EtcdNode) -> None:
    async def body() -> None:
        async with opened(mortal_etcd.url(fresh_prefix())) as store:
            leases = {f"lease-{number}": 4.0 for number in range(20)}
            await store.touch(leases)
            mortal_etcd.kill()
            with pytest.raises(Unavailable, match="cannot be reached"):
                await store.touch(leases)
            await asyncio.to_thread(mortal_etcd.start)
            for _ in range(5):
                await until_served(lambda: store.touch(leases))
                await asyncio.sleep(1)
            assert (await store.live()).keys() == leases.keys()

    run(body())


def test_an_etcd_that_is_down_is_told_within_its_deadline_and_found_once_it_is_up(
    mortal_etcd: EtcdNode,
) -> None:
    async def body() -> None:
        url = mortal_etcd.url(fresh_prefix())
        async with opened(url) as store:
            await commit_one(store, put("a"))
            mortal_etcd.kill()
            # The first call may still meet the old connection.
            with contextlib.suppress(Unavailable):
                await store.snapshot()
            for call in (lambda: store.commit([put("b")]), store.snapshot, build(url).open):
                started = time.monotonic()
                with pytest.raises(Unavailable, match="cannot be reached") as caught:
                    await call()
                assert mortal_etcd.endpoint in caught.value.message
                assert time.monotonic() - started < 4
            with pytest.raises(Unavailable) as caught:
                await store.commit([put("b")])
            assert caught.value.metadata["outcome"] == "nothing was written"
            await asyncio.to_thread(mortal_etcd.start)
            # The time between two attempts to connect, and no more.
            await until_served(lambda: commit_one(store, put("c")), 4.0)
            assert (await content(store)).keys() == {"a", "c"}

    run(body())


@contextlib.contextmanager
def silent_port() -> Iterator[str]:
    """An address that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("first", ["refuses", "is silent"])
def test_an_endpoint_that_serves_is_found_behind_one_that_does_not(
    etcd: EtcdNode, first: str
) -> None:
    async def body() -> None:
        with silent_port() as silent:
            bad = silent if first == "is silent" else f"127.0.0.1:{free_ports(1)[0]}"
            started = time.monotonic()
            url = store_url([bad, etcd.endpoint], fresh_prefix())
            async with opened(url) as store:
                assert time.monotonic() - started < (1 if first == "refuses" else 4)
                started = time.monotonic()
                revision = await commit_one(store, put("a"))
                await store.touch({"lease": 30.0})
                assert (await anext(store.watch(revision - 1))).revision == revision
                # It stays with the one that works.
                assert time.monotonic() - started < 1
                await store.drop(["lease"])

    run(body())


def test_an_endpoint_that_is_silent_is_told_and_nothing_was_sent_to_it() -> None:
    async def body() -> None:
        with silent_port() as silent:
            store = build(store_url([silent]))
            with pytest.raises(Unavailable, match="no connection within 2 s") as caught:
                await store.open()
            assert caught.value.metadata["outcome"] == "nothing was written"

    run(body())


def test_closing_ends_what_waits_for_a_frozen_etcd(mortal_etcd: EtcdNode) -> None:
    async def body() -> None:
        store = build(mortal_etcd.url(fresh_prefix()))
        await store.open()
        await commit_one(store, put("a"))
        watch = store.watch((await store.snapshot()).revision)
        following = asyncio.ensure_future(anext(watch, None))
        await store.touch({"lease": 30.0})
        mortal_etcd.pause()
        try:
            calls = [
                asyncio.ensure_future(store.snapshot()),
                asyncio.ensure_future(store.commit([put("b")])),
                asyncio.ensure_future(store.touch({"lease": 30.0})),
                asyncio.ensure_future(store.touch({"new": 30.0})),
            ]
            await asyncio.sleep(0.2)
            started = time.monotonic()
            await store.close()
            assert time.monotonic() - started < 3
            assert await following is None
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(result, Unavailable), result
        finally:
            mortal_etcd.resume()

    run(body())
