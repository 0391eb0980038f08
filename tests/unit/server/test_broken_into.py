"""What somebody found who tried to break several servers over one store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

from tests.unit.core.desk import registration
from tests.unit.server.shared import Cluster, Server, play, worker

from rankbook import v1
from rankbook_server.core.book import Book
from rankbook_server.core.ops import Put, Txn


async def sign_in(server: Server, namespace: str, engine_id: str, ttl_s: float) -> str:
    """Signs a worker in in a namespace of its own; returns its lease."""
    one = worker(engine_id=engine_id)
    one.namespace = namespace
    request = registration(one, ttl_s=ttl_s, key=engine_id)
    request.namespace = namespace

    def decide(book: Book, now: Any) -> Any:
        return book.register(request, now)

    reply = await server.registry.submit("register_workers", namespace, decide, subject=engine_id)
    return cast(str, reply.lease.lease_id)


def test_a_renewal_in_one_namespace_touches_no_lease_of_another() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        victim = await sign_in(one, "default", "e_dp0", 10)
        mine = await sign_in(two, "other", "x_dp0", 2)
        await cluster.level()
        await asyncio.sleep(0.5)
        # A key that was lost a moment ago: the renewal has to look at the book once more.
        await cluster.store.drop([mine])
        dropped: list[str] = []
        drop = cluster.store.drop

        async def note(lease_ids: Iterable[str]) -> None:
            names = list(lease_ids)
            dropped.extend(names)
            await drop(names)

        cluster.store.drop = note  # type: ignore[method-assign]
        leases = [v1.LeaseRenewal(lease_id=name) for name in (mine, victim)]
        request = v1.RenewLeasesRequest(namespace="other", leases=leases)
        reply = cast(Any, await two._calls.answer("renew_leases", request, None))
        states = [status.state for status in reply.leases]
        assert states == [v1.LEASE_STATE_ALIVE, v1.LEASE_STATE_UNKNOWN]
        await asyncio.sleep(0.5)
        assert victim not in dropped
        assert victim in await cluster.store.live()

    play(2, script)


def test_of_a_commit_that_cannot_be_read_nothing_is_shown() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        for tp in range(2):
            await one.register(worker(tp))
        await cluster.level()
        before = two.book.engine("e_dp0")
        assert before is not None
        # A newer version starts the engine anew: its head as ever, its worker not.
        head = v1.StoredEngine()
        head.CopyFrom(two.book.engines["e_dp0"].head)
        head.epoch = head.last_epoch = 2
        slot = v1.StoredWorker(version=2, epoch=2, live=True)
        ops = (
            Put("default/e/e_dp0", head.SerializeToString()),
            Put("default/w/e_dp0/0.0.0", slot.SerializeToString()),
        )
        await cluster.store.commit([Txn(ops)])
        await asyncio.sleep(3.0)
        assert not two.registry.available
        assert two.book.engine("e_dp0") == before

    play(2, script)
