"""The whole server in this process, over a store that can be taken away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rankbook import v1
from rankbook.errors import BadRequest
from rankbook.v1 import registry_pb2_grpc
from rankbook_server.clock import Clock, SystemClock
from rankbook_server.config import Settings
from rankbook_server.core.decision import Instant
from rankbook_server.peers import FORGET_S
from rankbook_server.server import ListenError, Server
from rankbook_server.store import MemoryStore

from .support import registration

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.asynccontextmanager
async def serving(
    clock: Clock | None = None, **settings: Any
) -> AsyncIterator[tuple[Server, grpc.aio.Channel]]:
    values = {"listen": "127.0.0.1:0", "http": "off", "store": "memory:", **settings}
    server = Server(Settings(**values), clock or SystemClock())
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            yield server, channel
    finally:
        await server.stop()


def store_of(server: Server) -> MemoryStore:
    store = server.registry._store
    assert isinstance(store, MemoryStore)
    return store


class JumpingClock(SystemClock):
    """The machine's clocks, with time in which this process did not run."""

    away_s = 0.0

    def mono(self) -> float:
        return super().mono() + self.away_s

    def now(self) -> Instant:
        return Instant(self.mono(), self.unix())


def test_a_report_that_could_not_be_repeated_while_the_server_stood_still_counts() -> None:
    async def run() -> None:
        clock = JumpingClock()
        async with serving(clock) as (_, channel):
            registry = registry_pb2_grpc.RegistryStub(channel)
            request = registration("e")
            await registry.RegisterWorkers(request)
            peer = v1.PeerConnection(
                engine_id="e",
                generation=request.records[0].generation,
                transfers_in_flight=2,
            )
            await registry.ReportPeers(v1.ReportPeersRequest(boot_id="decode", peers=[peer]))
            clock.away_s = 2 * FORGET_S
            drained = await registry.DrainEngine(v1.DrainEngineRequest(engine_id="e"))
            assert drained.outcome == v1.DRAIN_OUTCOME_WAITING
            assert drained.transfers_in_flight == 2

    asyncio.run(run())


def test_readiness_goes_red_with_the_store_and_comes_back_and_liveness_stays() -> None:
    async def run() -> None:
        async with serving() as (server, channel):
            health = health_pb2_grpc.HealthStub(channel)
            registry = registry_pb2_grpc.RegistryStub(channel)
            await registry.RegisterWorkers(registration("kept"))
            ready = health.Watch(health_pb2.HealthCheckRequest(service="rankbook.v1"))
            assert (await ready.read()).status == SERVING
            store_of(server).outage = "unplugged"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await registry.RegisterWorkers(registration("lost"))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "STORE_UNAVAILABLE" in str(caught.value.trailing_metadata())
            assert (await ready.read()).status == NOT_SERVING
            live = await health.Check(health_pb2.HealthCheckRequest(service="live"))
            assert live.status == SERVING
            assert not server.is_ready
            for namespace in ("other", ""):
                status = await registry.GetStatus(v1.GetStatusRequest(namespace=namespace))
                assert not status.store_available
            assert "unplugged" in (caught.value.details() or "")
            # Nobody else writes to this store: what was read is still true.
            kept = v1.GetTopologyRequest(engine_id="kept", require=v1.REQUIREMENT_ANY)
            assert (await registry.GetTopology(kept)).topologies[0].engine.present == 1
            store_of(server).outage = ""
            assert (await ready.read()).status == SERVING
            reply = await registry.GetTopology(
                v1.GetTopologyRequest(engine_id="kept", require=v1.REQUIREMENT_ANY)
            )
            assert reply.topologies[0].engine.present == 1
            ready.cancel()

    asyncio.run(run())


def test_a_server_is_built_without_opening_anything(tmp_path: Any) -> None:
    path = tmp_path / "folder" / "book.db"
    Server(Settings(store=f"sqlite:{path}"), SystemClock())
    assert not path.parent.exists()


def test_a_store_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="memory:, sqlite:"):
        Server(Settings(store="floppy:a"), SystemClock())


def test_an_address_of_another_machine_is_refused_and_the_store_is_let_go(tmp_path: Any) -> None:
    store = f"sqlite:{tmp_path / 'book.db'}"

    async def run() -> None:
        elsewhere = Settings(listen="192.0.2.1:7420", http="off", store=store, insecure=True)
        with pytest.raises(ListenError, match=r"192\.0\.2\.1:7420"):
            await Server(elsewhere, SystemClock()).start()
        async with serving(store=store) as (server, _):
            assert server.is_ready

    asyncio.run(run())


def test_a_ready_file_that_cannot_be_written_is_a_reason_not_to_start(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "file" / "ready.json"
    store = f"sqlite:{tmp_path / 'book.db'}"

    async def run() -> None:
        with pytest.raises(BadRequest, match=r"file/ready\.json"):
            async with serving(ready_file=path, store=store):
                raise AssertionError("it serves, and nobody can know where")
        async with serving(store=store):
            pass

    asyncio.run(run())
