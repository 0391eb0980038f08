"""Leases of a store on etcd: heartbeats write nothing, and every server learns who lives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from rankbook import v1
from rankbook_server.core.ops import Put, Txn
from rankbook_server.store import Presence
from rankbook_server.store.etcd_keys import lease_number

from .etcd_server import EtcdNode, b64
from .opened import fresh_prefix, opened, run
from .store_contract import commit_one
from .test_etcd_store import etcd_revision


def leases_of(node: EtcdNode) -> set[int]:
    answer = node.call("/v3/lease/leases")
    return {int(lease["ID"]) for lease in answer.get("leases", [])}


async def fold(
    presence: AsyncIterator[Presence],
    wanted: set[str],
    live: set[str] | frozenset[str] = frozenset(),
) -> None:
    """Follows a presence until exactly these live, from those that did."""
    async for news in presence:
        if news.anew:
            live = frozenset()
        live = (live | news.live) - news.away
        if live == wanted:
            return


def test_a_heartbeat_takes_no_revision_at_whichever_server(each_etcd: EtcdNode) -> None:
    async def body() -> None:
        url = each_etcd.url(fresh_prefix())
        async with opened(url) as one, opened(url) as two:
            leases = {f"lease-{number}": 30.0 for number in range(20)}
            await one.touch(leases)
            before = etcd_revision(each_etcd)
            for _ in range(3):
                await one.touch(leases)
                # This one learns of them only by touching them.
                await two.touch(leases)
            assert etcd_revision(each_etcd) == before
            assert (await two.live()).keys() == leases.keys()

    run(body())


def test_a_heartbeat_keeps_a_lease_alive_beyond_its_time(each_etcd: EtcdNode) -> None:
    async def body() -> None:
        url = each_etcd.url(fresh_prefix())
        async with opened(url) as one, opened(url) as two:
            await one.touch({"kept": 2.0, "left": 2.0})
            presence = two.presence()
            await fold(presence, {"kept", "left"})
            following = asyncio.ensure_future(fold(presence, {"kept"}, {"kept", "left"}))
            ends = time.monotonic() + 5
            while time.monotonic() < ends:
                await one.touch({"kept": 2.0})
                await asyncio.sleep(0.5)
            await following
            assert (await two.live()).keys() <= {"kept"}
            refused = Txn((Put("a", b"1"),), away=("kept",))
            assert await two.commit([refused]) == [None]

    run(body())


def test_a_lease_whose_time_changes_hangs_on_one_etcd_lease(each_etcd: EtcdNode) -> None:
    async def body() -> None:
        url = each_etcd.url(fresh_prefix())
        async with opened(url) as one, opened(url) as two:
            others = leases_of(each_etcd)
            await one.touch({"a": 30.0})
            assert leases_of(each_etcd) - others == {lease_number(one.book_id, "a", 30)}
            await two.touch({"a": 20.0})
            assert leases_of(each_etcd) - others == {lease_number(one.book_id, "a", 20)}
            assert 15 < (await one.live())["a"] <= 20
            # The first server does not know yet that its etcd lease is gone.
            await one.touch({"a": 30.0})
            assert leases_of(each_etcd) - others == {lease_number(one.book_id, "a", 30)}
            assert 25 < (await two.live())["a"] <= 30
            await two.drop(["a"])
            assert leases_of(each_etcd) == others
            await one.touch({"a": 30.0})
            assert (await two.live()).keys() == {"a"}
            await one.drop(["a"])

    run(body())


def test_seconds_are_rounded_up_and_never_below_two(etcd: EtcdNode) -> None:
    async def body() -> None:
        prefix = fresh_prefix()
        async with opened(etcd.url(prefix)) as store:
            await store.touch({"tiny": 0.01, "odd": 12.2})
            for lease_id, seconds in (("tiny", 2), ("odd", 13)):
                found = etcd.call("/v3/kv/range", {"key": b64(f"{prefix}/live/{lease_id}")})
                (kv,) = found["kvs"]
                assert int(kv["lease"]) == lease_number(store.book_id, lease_id, seconds)
                value = v1.StoredLiveness(version=1, ttl_millis=seconds * 1000)
                assert kv["value"] == b64(value.SerializeToString())
            await store.drop(["tiny", "odd"])

    run(body())


def test_presence_tells_every_server_who_came_and_who_went(each_etcd: EtcdNode) -> None:
    async def body() -> None:
        url = each_etcd.url(fresh_prefix())
        async with opened(url) as one, opened(url) as two:
            await one.touch({"before": 30.0})
            presence = two.presence()
            assert await anext(presence) == Presence(frozenset({"before"}), anew=True)
            await one.touch({"after": 30.0})
            assert await anext(presence) == Presence(frozenset({"after"}))
            await one.drop(["before", "never"])
            assert await anext(presence) == Presence(frozenset(), frozenset({"before"}))
            await one.touch({"short": 2.0})
            assert await anext(presence) == Presence(frozenset({"short"}))
            started = time.monotonic()
            assert await anext(presence) == Presence(frozenset(), frozenset({"short"}))
            assert 1 < time.monotonic() - started < 8
            following = asyncio.ensure_future(anext(presence, None))
            await two.close()
            assert await following is None
            await one.drop(["after"])

    run(body())


def test_presence_has_no_part_in_the_book(etcd: EtcdNode) -> None:
    async def body() -> None:
        async with opened(etcd.url(fresh_prefix())) as store:
            presence = store.presence()
            await anext(presence)
            await commit_one(store, Txn((Put("live/a", b""), Put("a", b""))))
            await store.touch({"mark": 30.0})
            assert await anext(presence) == Presence(frozenset({"mark"}))
            await store.drop(["mark"])

    run(body())


@pytest.mark.parametrize("left_behind", ["lease", "lease of other time", "key"])
def test_what_a_server_left_half_done_is_finished_by_the_next_touch(
    etcd: EtcdNode, left_behind: str
) -> None:
    async def body() -> None:
        prefix = fresh_prefix()
        async with opened(etcd.url(prefix)) as store:
            seconds = 40 if left_behind == "lease of other time" else 30
            number = lease_number(store.book_id, "a", seconds)
            etcd.call("/v3/lease/grant", {"ID": number, "TTL": seconds})
            if left_behind != "lease":
                key = {"key": b64(f"{prefix}/live/a"), "value": b64("old")}
                lease = {} if left_behind == "key" else {"lease": number}
                etcd.call("/v3/kv/put", {**key, **lease})
            await store.touch({"a": 30.0})
            assert 20 < (await store.live())["a"] <= 30
            found = etcd.call("/v3/kv/range", {"key": b64(f"{prefix}/live/a")})
            assert int(found["kvs"][0]["lease"]) == lease_number(store.book_id, "a", 30)
            await store.drop(["a"])
            assert await store.live() == {}

    run(body())


def test_a_thousand_leases_come_stay_and_go_in_few_seconds(each_etcd: EtcdNode) -> None:
    async def body() -> None:
        url = each_etcd.url(fresh_prefix())
        async with opened(url) as one, opened(url) as two:
            others = leases_of(each_etcd)
            leases = {f"lease-{number}": 60.0 for number in range(1_000)}
            presence = two.presence()
            await anext(presence)
            following = asyncio.ensure_future(fold(presence, set(leases)))
            times = [time.monotonic()]
            for store in (one, one, two):
                await store.touch(leases)
                times.append(time.monotonic())
            await following
            assert (await one.live()).keys() == leases.keys()
            await one.drop(leases)
            times.append(time.monotonic())
            new, again, elsewhere, _ = (later - sooner for sooner, later in pairwise(times))
            # On a quiet machine of two cores 0.5, 0.1 and 0.6.
            assert new < 5, times
            assert again < 2, times
            assert elsewhere < 5, times
            assert await one.live() == {}
            assert leases_of(each_etcd) == others

    run(body())


def test_touches_of_many_callers_at_once_all_count(etcd: EtcdNode) -> None:
    async def body() -> None:
        async with opened(etcd.url(fresh_prefix())) as store:
            await asyncio.gather(
                *(store.touch({f"own-{n}": 30.0, "shared": 30.0}) for n in range(50))
            )
            await asyncio.gather(
                *(store.touch({f"own-{n}": 30.0, "shared": 30.0}) for n in range(50))
            )
            names = {f"own-{n}" for n in range(50)} | {"shared"}
            assert (await store.live()).keys() == names
            await store.drop(names)

    run(body())


def test_a_touch_whose_caller_gave_up_does_not_spoil_the_others(etcd: EtcdNode) -> None:
    async def body() -> None:
        async with opened(etcd.url(fresh_prefix())) as store:
            leases = {f"lease-{number}": 30.0 for number in range(300)}
            await store.touch(leases)
            before = etcd_revision(etcd)
            for _ in range(10):
                given_up = asyncio.ensure_future(store.touch(leases))
                other = asyncio.ensure_future(store.touch(leases))
                await asyncio.sleep(0.002)
                given_up.cancel()
                await asyncio.gather(given_up, return_exceptions=True)
                await other
            assert etcd_revision(etcd) == before
            assert (await store.live()).keys() == leases.keys()
            await store.drop(leases)

    run(body())
