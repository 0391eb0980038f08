"""A shared store that goes away, stands still, forgets, or is another one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.server.shared import (
    Cluster,
    Server,
    SharedMemoryStore,
    WarpLoop,
    play,
    settled,
    within,
    worker,
)

from rankbook import v1
from rankbook.errors import Unavailable
from rankbook_server.core.keys import IMPORT_KEY
from rankbook_server.core.ops import Delete, Put, Txn
from rankbook_server.moving.mark import mark_put

from .test_several_servers import all_the_same

TTL_S = 10.0


def states(cluster: Cluster) -> set[Any]:
    return {server.book.state("e_dp0") for server in cluster.servers}


# -------------------------------------------------------------------- away and back


def test_after_an_outage_of_the_store_every_lease_has_a_full_time_to_live() -> None:
    async def script(cluster: Cluster) -> None:
        await cluster.servers[0].register(worker(0))
        await cluster.level()
        for server in cluster.servers:
            server.line.down = "unplugged"
        cluster.store.stir()
        await asyncio.sleep(60.0)
        # All keys are gone by now, and nothing was done about it.
        assert await cluster.store.live() == {}
        assert states(cluster) == {v1.STATE_FORMING}
        loop = asyncio.get_running_loop()
        for server in cluster.servers:
            server.line.heal()
        back_s = loop.time()
        await within(5.0, lambda: all(server.registry.available for server in cluster.servers))
        await asyncio.sleep(back_s + TTL_S - 0.5 - loop.time())
        assert states(cluster) == {v1.STATE_FORMING}
        await asyncio.sleep(6.0)
        assert states(cluster) == {v1.STATE_GONE}
        all_the_same(cluster)

    play(2, script)


def test_a_worker_that_comes_back_within_that_time_has_lost_nothing() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        lease_id = (await one.register(worker(0))).lease.lease_id
        await cluster.level()
        for server in cluster.servers:
            server.line.down = "unplugged"
        cluster.store.stir()
        await asyncio.sleep(60.0)
        with pytest.raises(Unavailable, match="unplugged"):
            await two.renew(lease_id)
        for server in cluster.servers:
            server.line.heal()
        await within(5.0, lambda: two.registry.available)
        for _ in range(10):
            assert (await two.renew(lease_id)).state == v1.LEASE_STATE_ALIVE
            await asyncio.sleep(3.0)
        assert states(cluster) == {v1.STATE_FORMING}

    play(2, script)


def test_a_server_that_is_cut_off_alone_ends_nothing_when_it_is_back() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        lease_id = (await two.register(worker(0))).lease.lease_id
        await cluster.level()
        two.line.down = "cut"
        cluster.store.stir()
        for _ in range(10):
            await asyncio.sleep(3.0)
            assert (await one.renew(lease_id)).state == v1.LEASE_STATE_ALIVE
        assert not two.registry.available
        assert two.registry.stale_s == pytest.approx(30.0, abs=2.0)
        assert one.registry.stale_s == 0.0
        two.line.heal()
        for _ in range(5):
            await asyncio.sleep(3.0)
            assert (await one.renew(lease_id)).state == v1.LEASE_STATE_ALIVE
        assert two.registry.available
        assert states(cluster) == {v1.STATE_FORMING}
        assert not any(lease_id in txn.away for txns in two.line.commits for txn in txns)

    play(2, script)


def test_what_others_wrote_meanwhile_is_there_when_it_is_back() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        two.line.down = "cut"
        cluster.store.stir()
        await asyncio.sleep(3.0)
        reply = await one.register(worker(0))
        assert two.registry.revision < reply.revision
        two.line.heal()
        await within(5.0, lambda: two.registry.available)
        # Before it takes writes it has everything.
        assert two.registry.revision >= reply.revision
        assert two.line.snapshots == 1
        all_the_same(cluster)

    play(2, script)


def test_a_short_cut_is_nobodys_business() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        told: list[bool] = []
        two.registry.on_available = told.append
        lease_id = (await one.register(worker(0))).lease.lease_id
        await cluster.level()
        for _ in range(5):
            two.line.down = "another endpoint is looked for"
            cluster.store.stir()
            await asyncio.sleep(0.3)
            two.line.heal()
            await asyncio.sleep(1.5)
            await one.renew(lease_id)
        assert told == []
        assert two.registry.stale_s == 0.0
        # And no reason to give a lease more time than it has.
        await asyncio.sleep(TTL_S + 1.0)
        assert states(cluster) == {v1.STATE_GONE}

    play(2, script)


def test_a_broken_watch_goes_on_from_where_it_was() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        await one.register(worker(0))
        await cluster.level()
        two.line.down = "broken"
        cluster.store.stir()
        await asyncio.sleep(0.1)
        await one.register(worker(1))
        two.line.heal()
        await cluster.level()
        assert two.line.snapshots == 1
        all_the_same(cluster)

    play(2, script)


def test_a_store_that_stands_still_gives_every_lease_its_time_too() -> None:
    """No call fails; each only takes long. Nobody could say that he lives."""

    async def script(cluster: Cluster) -> None:
        (server,) = cluster.servers
        lease_id = (await server.register(worker(0))).lease.lease_id
        await asyncio.sleep(1.0)
        server.line.still = True
        await asyncio.sleep(20.0)
        loop = asyncio.get_running_loop()
        server.line.heal()
        await asyncio.sleep(1.0)
        assert server.registry.available
        left_s = server.book.leases[lease_id].deadline - loop.time()
        assert left_s > TTL_S - 2.0
        assert server.book.state("e_dp0") == v1.STATE_FORMING

    play(1, script)


def test_a_server_that_did_not_run_gives_every_lease_its_time() -> None:
    async def script(cluster: Cluster) -> None:
        (server,) = cluster.servers
        lease_id = (await server.register(worker(0))).lease.lease_id
        await asyncio.sleep(1.0)
        cluster.freeze(60.0)
        await asyncio.sleep(TTL_S - 1.0)
        assert server.book.state("e_dp0") == v1.STATE_FORMING
        assert (await server.renew(lease_id)).state == v1.LEASE_STATE_ALIVE
        await asyncio.sleep(TTL_S + 1.0)
        assert server.book.state("e_dp0") == v1.STATE_GONE

    play(1, script)


def test_a_watch_that_is_behind_makes_the_server_refuse_writes() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        two.line.deaf = True
        await one.register(worker(0))
        await within(5.0, lambda: not two.registry.available)
        assert "and only" in str(await settled(two.register(worker(1))))
        two.line.heal()
        await within(5.0, lambda: two.registry.available)
        assert (await two.register(worker(1))).epoch == 1

    play(2, script)


def test_a_server_that_starts_while_the_store_is_away_serves_once_it_is_back() -> None:
    async def body(loop: WarpLoop) -> None:
        store = SharedMemoryStore(loop)
        async with Server(loop, store, "first") as first:
            await first.register(worker(0))
        late = Server(loop, store, "late")
        late.line.down = "unplugged"
        with pytest.raises(Unavailable):
            await late.registry.open()
        late.registry.start()
        try:
            await asyncio.sleep(5.0)
            with pytest.raises(Unavailable, match="unplugged"):
                late.registry.check_readable()
            late.line.heal()
            await within(5.0, lambda: late.registry.available)
            assert list(late.book.engine_ids()) == ["e_dp0"]
            assert late.book.leases
            assert (await late.register(worker(1))).epoch == 1
            await asyncio.sleep(TTL_S - 2.0)
            assert late.book.state("e_dp0") == v1.STATE_COMPLETE
        finally:
            await late.registry.close()

    loop = WarpLoop()
    loop.play(body(loop))


def test_a_close_ends_whatever_is_under_way() -> None:
    async def script(cluster: Cluster) -> None:
        loop = asyncio.get_running_loop()
        for number, server in enumerate(cluster.servers):
            server.line.deaf = True
            server.line.delay_s = 0.0 if number else 60.0
        writing = [settled(server.register(worker(0))) for server in cluster.servers]
        results = asyncio.gather(*writing)
        await asyncio.sleep(0.1)
        before_s = loop.time()
        await asyncio.gather(*(server.registry.close() for server in cluster.servers))
        assert loop.time() - before_s <= 5.1
        results.cancel()

    play(3, script)


# --------------------------------------------------------------------- read anew


def test_history_that_was_forgotten_has_the_book_read_anew_once() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        two.line.deaf = True
        await one.register(worker(0))
        await one.register(worker(1))
        cluster.store.forget()
        two.line.heal()
        await cluster.level()
        assert two.line.snapshots == 2
        all_the_same(cluster)
        await one.register(worker(0, "f_dp0"))
        await cluster.level()
        assert two.line.snapshots == 2
        all_the_same(cluster)

    play(2, script)


def test_history_that_was_forgotten_is_read_again_until_the_store_answers() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        two.line.deaf = True
        await one.register(worker(0))
        cluster.store.forget()
        real, tries = two.line.snapshot, 0

        async def fail_twice() -> Any:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise Unavailable("not now")
            return await real()

        two.line.snapshot = fail_twice  # type: ignore[method-assign]
        two.line.heal()
        await cluster.level()
        assert tries == 3
        all_the_same(cluster)

    play(2, script)


def test_readers_are_told_of_every_engine_of_a_book_that_is_read_anew() -> None:
    class Heard:
        def __init__(self) -> None:
            self.engines: set[str] = set()
            self.since: list[int] = []

        def changed(self, namespace: str, engine_ids: Any, since: int) -> None:
            self.engines |= set(engine_ids)
            self.since.append(since)

    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        await one.register(worker(0))
        await cluster.level()
        heard, before = Heard(), two.registry.revision
        two.registry.subscribe(heard)
        two.line.deaf = True
        await one.register(worker(0, "f_dp0"))
        cluster.store.forget()
        two.line.heal()
        await cluster.level()
        assert heard.engines == {"e_dp0", "f_dp0"}
        assert heard.since == [before + 1]

    play(2, script)


def test_a_book_that_was_replaced_is_taken_in_place_of_the_old_one() -> None:
    async def script(cluster: Cluster) -> None:
        replaced: list[str] = []
        for server in cluster.servers:
            server.registry.on_replaced = lambda s=server: replaced.append(s.registry.book_id)  # type: ignore[misc]
        one, two = cluster.servers
        await one.register(worker(0))
        await cluster.level()
        old = one.registry.book_id
        cluster.store.replace()
        await within(10.0, lambda: len(replaced) == 2)
        new = cluster.store.book_id
        assert replaced == [new, new]
        assert new != old
        await within(5.0, lambda: all(s.registry.available for s in cluster.servers))
        assert all(not server.book.engines for server in cluster.servers)
        assert (await two.register(worker(0))).epoch == 1
        await cluster.level()
        all_the_same(cluster)
        # Nothing of the old one is left over: this is folded as any other.
        await one.register(worker(1))
        await cluster.level()
        all_the_same(cluster)
        assert all(server.line.snapshots == 2 for server in cluster.servers)

    play(2, script)


def test_half_an_import_is_not_served_and_the_whole_of_it_is() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        await one.register(worker(0))
        await cluster.level()
        head = v1.StoredEngine(version=1, last_epoch=5).SerializeToString()
        await cluster.store.commit([Txn((mark_put("elsewhere", 0.0),))])
        await cluster.store.commit([Txn((Put("default/e/moved", head),))])
        await asyncio.sleep(3.0)
        for server in cluster.servers:
            assert "moved" not in server.book.engines
            error = await settled(server.register(worker(1)))
            assert "is not whole" in str(error)
        await cluster.store.commit([Txn((Delete(IMPORT_KEY),))])
        await within(5.0, lambda: all(s.registry.available for s in cluster.servers))
        assert all("moved" in server.book.engines for server in cluster.servers)
        assert (await two.register(worker(1))).epoch == 1
        await cluster.level()
        all_the_same(cluster)

    play(2, script)
