"""What servers tell each other over a store on etcd."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rankbook.errors import Unavailable
from rankbook_server.core.ops import Put, Txn
from rankbook_server.etcd import etcd_pb2 as pb
from rankbook_server.etcd.client import EtcdClient
from rankbook_server.etcd.keeping import LeaseKeeper
from rankbook_server.store.etcd_keys import BookKeys, lease_number
from rankbook_server.store.etcd_words import EtcdWords

from .etcd_server import EtcdNode, b64
from .opened import build, fresh_prefix, opened, run, until_served
from .store_contract import commit_one
from .test_etcd_liveness import leases_of
from .test_etcd_store import etcd_revision


def test_every_server_reads_the_last_word_of_each(each_etcd: EtcdNode) -> None:
    async def body() -> None:
        url = each_etcd.url(fresh_prefix())
        async with opened(url) as one, opened(url) as two:
            assert await one.announced() == {}
            assert not await one.announce("a", b"first", 30.0)
            assert not await two.announce("b", b"\0\xff", 30.0)
            assert await one.announce("a", b"second", 30.0)
            for store in (one, two):
                assert await store.announced() == {"a": b"second", "b": b"\0\xff"}

    run(body())


def test_a_word_is_beside_the_book_and_no_part_of_it(each_etcd: EtcdNode) -> None:
    async def body() -> None:
        prefix = fresh_prefix()
        url = each_etcd.url(prefix)
        async with opened(url) as store, opened(each_etcd.url(f"{prefix}-b")) as other:
            before = await store.snapshot()
            await store.announce("a", b"word", 30.0)
            assert await store.snapshot() == before
            assert await store.last_revision() == before.revision
            assert await commit_one(store, Txn((Put("k", b"v"),), base=before.revision))
            assert await other.announced() == {}
            assert (await store.live()).keys() == set()
            found = each_etcd.call("/v3/kv/range", {"key": b64(f"{prefix}/server/a")})
            (kv,) = found["kvs"]
            assert kv["value"] == b64("word")
            assert int(kv["lease"]) == lease_number(store.book_id, "server/a", 30)

    run(body())


def test_the_same_word_again_takes_no_revision_and_keeps_it_beyond_its_time(
    each_etcd: EtcdNode,
) -> None:
    async def body() -> None:
        url = each_etcd.url(fresh_prefix())
        async with opened(url) as one, opened(url) as two:
            await one.announce("kept", b"w", 2.0)
            await one.announce("left", b"w", 2.0)
            before = etcd_revision(each_etcd)
            ends = time.monotonic() + 5
            while time.monotonic() < ends:
                assert await one.announce("kept", b"w", 2.0)
                await asyncio.sleep(0.5)
            assert await two.announced() == {"kept": b"w"}
            # The one that was left is the only change.
            assert etcd_revision(each_etcd) == before + 1

    run(body())


def test_a_word_stays_for_its_time_when_its_server_is_closed_without_a_farewell(
    etcd: EtcdNode,
) -> None:
    async def body() -> None:
        url = etcd.url(fresh_prefix())
        async with opened(url) as one:
            async with opened(url) as two:
                await two.announce("b", b"w", 2.0)
            assert await one.announced() == {"b": b"w"}
            ends = time.monotonic() + 8
            while await one.announced():
                assert time.monotonic() < ends
                await asyncio.sleep(0.1)

    run(body())


def test_a_word_that_is_taken_back_leaves_no_key_and_no_lease(each_etcd: EtcdNode) -> None:
    async def body() -> None:
        url = each_etcd.url(fresh_prefix())
        async with opened(url) as one, opened(url) as two:
            others = leases_of(each_etcd)
            await one.announce("a", b"w", 30.0)
            # Not its own: it says so, and changes nothing.
            await two.withdraw("a")
            assert await two.announced() == {"a": b"w"}
            await one.withdraw("a")
            await one.withdraw("a")
            assert await two.announced() == {}
            assert leases_of(each_etcd) == others
            assert not await one.announce("a", b"again", 30.0)
            assert await two.announced() == {"a": b"again"}
            await one.withdraw("a")

    run(body())


def test_a_word_that_etcd_lost_comes_back_and_the_server_is_told(each_etcd: EtcdNode) -> None:
    async def body() -> None:
        async with opened(each_etcd.url(fresh_prefix())) as store:
            await store.announce("a", b"w", 30.0)
            each_etcd.call("/v3/lease/revoke", {"ID": lease_number(store.book_id, "server/a", 30)})
            assert await store.announced() == {}
            assert not await store.announce("a", b"w", 30.0)
            assert await store.announced() == {"a": b"w"}
            assert await store.announce("a", b"w", 30.0)
            await store.withdraw("a")

    run(body())


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_word_for_no_time_is_refused(etcd: EtcdNode, ttl_s: float) -> None:
    async def body() -> None:
        async with opened(etcd.url(fresh_prefix())) as store:
            with pytest.raises(ValueError, match="cannot be kept"):
                await store.announce("a", b"w", ttl_s)
            assert await store.announced() == {}

    run(body())


def test_without_etcd_nothing_is_said_or_heard_and_it_goes_on_afterwards() -> None:
    async def body() -> None:
        with EtcdNode() as node:
            store = build(node.url(fresh_prefix()))
            with pytest.raises(Unavailable):
                await store.announced()
            await store.open()
            await store.announce("a", b"w", 30.0)
            node.kill()
            for call in (store.announced(), store.announce("a", b"new", 30.0)):
                with pytest.raises(Unavailable):
                    await call
            node.start()
            await until_served(lambda: store.announce("a", b"newer", 30.0))
            assert await store.announced() == {"a": b"newer"}
            await store.close()

    run(body())


class LateClient(EtcdClient):
    """Loses the answer of puts: the first comes to etcd only when it is let go."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.hold = False
        self.held: list[pb.TxnRequest] = []

    async def txn(self, request: pb.TxnRequest, *, twice: bool = False) -> pb.TxnResponse:
        if self.hold:
            self.hold = False
            self.held.append(request)
            raise Unavailable("no answer came; whether it was written is not known")
        return await super().txn(request, twice=twice)


def test_a_put_that_comes_late_never_takes_the_place_of_a_newer_word(etcd: EtcdNode) -> None:
    async def body() -> None:
        client = LateClient(etcd.endpoints, clock=time.monotonic)
        keeper = LeaseKeeper(client)
        words = EtcdWords(client, keeper, BookKeys(fresh_prefix()), "book")
        try:
            await words.announce("a", b"one", 30.0)
            client.hold = True
            with pytest.raises(Unavailable):
                await words.announce("a", b"two", 30.0)
            await words.announce("a", b"three", 30.0)
            (late,) = client.held
            assert not (await client.txn(late)).succeeded
            assert await words.announced() == {"a": b"three"}
            # One that comes before the next word is found, and written over.
            client.hold = True
            with pytest.raises(Unavailable):
                await words.announce("a", b"four", 30.0)
            assert (await client.txn(client.held[-1])).succeeded
            assert await words.announce("a", b"three", 30.0)
            assert await words.announced() == {"a": b"three"}
            await words.withdraw("a")
        finally:
            await keeper.close()
            await client.close()

    run(body())
