"""What the chaos test found broken, each as a small scene of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

import rankbook
from rankbook import v1
from rankbook.model import LeaseState
from rankbook.v1 import registry_pb2_grpc

from .cast import EnginePlan, Scale, record
from .deployment import Deployment
from .stage import Stage

ENGINE = EnginePlan("engine-0", "group-0", 1, 1, (0,))
TTL_S = 2.0
_ALARM = "/v3/maintenance/alarm"

pytestmark = [
    pytest.mark.slow,
]

Scene = Callable[[Deployment, list[rankbook.AsyncClient]], Awaitable[None]]


def play(
    folder: Path,
    scene: Scene,
    *,
    servers: int = 2,
    etcd_nodes: int = 1,
) -> None:
    """Runs a scene with servers over one etcd node, and a client of each."""

    async def run() -> None:
        stage = Stage(folder)
        scale = Scale(servers, etcd_nodes, 0, 0, 0, 0)
        deployment = Deployment(stage, scale, 0)
        try:
            await deployment.start()
            clients = [rankbook.AsyncClient(address) for address in deployment.addresses]
            async with asyncio.timeout(60):
                await scene(deployment, clients)
            for client in clients:
                await client.close()
        finally:
            await deployment.close()

    asyncio.run(run())


async def sign_in(
    client: rankbook.AsyncClient, sequence: int = 1, *, boot_id: str = "a"
) -> rankbook.Registered:
    """Signs the engine's only worker in."""
    return await client.register_workers(
        [record(ENGINE, (0, 0), "g1", boot_id, sequence)],
        sequence=sequence,
        lease_key=boot_id,
        ttl_s=TTL_S,
    )


async def is_alive(client: rankbook.AsyncClient, lease_id: str) -> bool:
    """Renews; whether the lease lives."""
    (status,) = (await client.renew_leases([lease_id], timeout_s=0.8)).statuses
    return status.state is LeaseState.ALIVE


async def holds_until(client: rankbook.AsyncClient, until_s: float) -> bool:
    """Whether a server shows the worker until a moment of the loop's clock."""
    while asyncio.get_running_loop().time() < until_s - 0.02:
        topology = await client.get_topology("engine-0", require=rankbook.Requirement.ANY)
        assert topology is not None
        if not topology.workers:
            return False
        await asyncio.sleep(0.02)
    return True


def test_a_lease_lives_as_long_as_a_server_that_was_then_cut_off_said(tmp_path: Path) -> None:
    async def scene(deployment: Deployment, clients: list[rankbook.AsyncClient]) -> None:
        loop = asyncio.get_running_loop()
        lease_id = (await sign_in(clients[0])).lease.lease_id
        await asyncio.sleep(0.3)
        deployment.network.cut("server-0", "etcd-0")
        promised_s = 0.0
        for _ in range(3):
            await asyncio.sleep(TTL_S / 3)
            sent_s = loop.time()
            with contextlib.suppress(rankbook.Unavailable, rankbook.DeadlineExceeded):
                if await is_alive(clients[0], lease_id):
                    promised_s = sent_s + TTL_S
        assert await holds_until(clients[1], promised_s)

    play(tmp_path, scene)


def test_a_renewal_that_a_server_with_a_slow_store_has_answered_keeps_the_lease(
    tmp_path: Path,
) -> None:
    async def scene(deployment: Deployment, clients: list[rankbook.AsyncClient]) -> None:
        loop = asyncio.get_running_loop()
        for way in (("server-0", "etcd-0"), ("etcd-0", "server-0")):
            deployment.network.slow(*way, 0.15)
        lease_id = (await sign_in(clients[1])).lease.lease_id
        promised = 0
        # Ever later, up to where the lease ends while the renewal is on its way.
        for share in (0.5, 0.7, 0.8, 0.9, 0.95):
            await asyncio.sleep(share * TTL_S)
            sent_s = loop.time()
            try:
                alive = await is_alive(clients[0], lease_id)
            except (rankbook.Unavailable, rankbook.DeadlineExceeded):
                alive = False
            if not alive:
                break
            promised += 1
            assert await holds_until(clients[1], sent_s + TTL_S / 2)
        assert promised
        assert await holds_until(clients[1], sent_s + TTL_S) or not alive

    play(tmp_path, scene)


def test_a_write_under_a_lease_keeps_it_also_when_its_server_ends_then(tmp_path: Path) -> None:
    async def scene(deployment: Deployment, clients: list[rankbook.AsyncClient]) -> None:
        loop = asyncio.get_running_loop()
        await sign_in(clients[1])
        await asyncio.sleep(TTL_S * 0.8)
        sent_s = loop.time()
        assert (await sign_in(clients[0], 2)).lease.ttl_s == TTL_S
        # Longer than it takes to tell the store.
        await asyncio.sleep(0.2)
        deployment.servers[0].kill()
        assert await holds_until(clients[1], sent_s + TTL_S)

    play(tmp_path, scene)


def test_a_lease_has_its_full_time_after_the_store_took_no_writes(tmp_path: Path) -> None:
    async def scene(deployment: Deployment, clients: list[rankbook.AsyncClient]) -> None:
        loop = asyncio.get_running_loop()
        lease_id = (await sign_in(clients[0])).lease.lease_id
        # The server tells etcd of it within 50 ms.
        await asyncio.sleep(0.3)
        node = deployment.members[0].node
        (member,) = node.call("/v3/cluster/member/list")["members"]
        alarm = {"memberID": member["ID"], "alarm": "NOSPACE"}
        await asyncio.to_thread(node.call, _ALARM, {"action": "ACTIVATE", **alarm})
        until_s = loop.time() + 2 * TTL_S
        while loop.time() < until_s:
            # No renewal is taken either, so nobody can say that he lives.
            for number, client in enumerate(clients):
                with pytest.raises((rankbook.Unavailable, rankbook.DeadlineExceeded)):
                    await client.begin_generation(f"other-{number}", "g1", timeout_s=0.3)
        await asyncio.to_thread(node.call, _ALARM, {"action": "DEACTIVATE", **alarm})
        while True:
            try:
                assert await is_alive(clients[0], lease_id)
            except rankbook.Unavailable:
                await asyncio.sleep(0.02)
                continue
            return

    play(tmp_path, scene)


async def watched(
    address: str, revision: int, book_id: str, timeout_s: float = 8.0
) -> list[v1.WatchResponse] | grpc.StatusCode:
    """Messages of a watch up to the first that is synced, or why there are none."""
    found: list[v1.WatchResponse] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = registry_pb2_grpc.RegistryStub(channel)
        call = stub.Watch(
            v1.WatchRequest(from_revision=revision, book_id=book_id), timeout=timeout_s
        )
        try:
            async for response in call:
                found.append(response)
                if response.synced:
                    return found
        except grpc.aio.AioRpcError as error:
            return error.code()
    return found


def test_a_watch_never_goes_back_at_a_server_that_is_behind(tmp_path: Path) -> None:
    async def scene(deployment: Deployment, clients: list[rankbook.AsyncClient]) -> None:
        registered = await sign_in(clients[0])
        for way in (("server-1", "etcd-0"), ("etcd-0", "server-1")):
            deployment.network.cut(*way)
        newer = await sign_in(clients[0], 2)
        found = await watched(deployment.addresses[1], newer.revision, registered.book_id)
        if not isinstance(found, grpc.StatusCode):
            assert found[-1].book_revision >= newer.revision

    play(tmp_path, scene)


def test_a_watch_begins_no_earlier_than_it_resumes_while_changes_come_in(tmp_path: Path) -> None:
    async def scene(deployment: Deployment, clients: list[rankbook.AsyncClient]) -> None:
        newest = await sign_in(clients[0])

        async def write(sequence: int) -> None:
            nonlocal newest
            newest = await sign_in(clients[0], sequence)

        async def write_all() -> None:
            # Many at once, but fewer than a session takes.
            for first in range(2, 1500, 100):
                await asyncio.gather(*(write(first + number) for number in range(100)))

        async def watch() -> None:
            since = newest.revision
            found = await watched(deployment.addresses[1], since, newest.book_id)
            assert not isinstance(found, grpc.StatusCode)
            assert found[-1].book_revision >= since

        writing = asyncio.create_task(write_all())
        try:
            while not writing.done():
                await asyncio.gather(*(watch() for _ in range(8)))
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    play(tmp_path, scene)


def test_an_engine_that_was_removed_and_returned_is_told_whole(tmp_path: Path) -> None:
    async def scene(deployment: Deployment, clients: list[rankbook.AsyncClient]) -> None:
        book_id = (await sign_in(clients[0])).book_id
        await clients[0].deregister("engine-0", "g1", "a", sequence=2)
        (*_, gone) = await _messages(deployment.addresses[0], book_id)
        assert not gone.events
        # The watcher that had this knows of no engine now.
        await sign_in(clients[0], 1, boot_id="b")
        found = await watched(deployment.addresses[0], gone.book_revision, book_id)
        assert not isinstance(found, grpc.StatusCode)
        (event,) = [event for message in found for event in message.events]
        assert event.type == v1.EVENT_TYPE_ADDED or event.replace

    play(tmp_path, scene, servers=1, etcd_nodes=0)


async def _messages(address: str, book_id: str) -> list[v1.WatchResponse]:
    found = await watched(address, 0, book_id)
    assert not isinstance(found, grpc.StatusCode)
    return found


@pytest.fixture(autouse=True)
def _journals(tmp_path: Path) -> None:
    (tmp_path / "journals").mkdir()
