"""Servers that drain: as many as a test wants, over one store in a time that jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from tests.rpc.support import seal_request, span
from tests.unit.core.desk import registration

from rankbook import v1
from rankbook_server.core.fold import BookLimits
from rankbook_server.drains import Drains
from rankbook_server.peers import FORGET_S, Peers
from rankbook_server.registry import Registry, RegistryLimits
from rankbook_server.rpc.calls import Calls
from rankbook_server.rpc.status import boundary
from rankbook_server.view import View
from rankbook_server.waiters import Waiters

from .shared import Line, SharedMemoryStore, WarpClock, WarpLoop, within, worker

__all__ = ["E", "Site", "World", "play"]

E = "e_dp0"
"""The engine that is spoken of where none is named."""


class Site:
    """A server as far as drains need one."""

    def __init__(self, loop: WarpLoop, store: SharedMemoryStore, name: str, **options: Any) -> None:
        clock = WarpClock(loop, name)
        self.line = Line(store)
        self.registry = Registry(
            self.line,
            clock,
            RegistryLimits(book=BookLimits()),
            contain=lambda call: boundary(call, clock.new_id),
        )
        view = View(self.registry)
        waiters = Waiters(self.registry, 100)
        self.peers = Peers(100)
        self.registry.on_grace = self.peers.grace
        self.drains = Drains(self.registry, self.peers, clock, self.line, **options)
        for listener in (view, waiters, self.drains):
            self.registry.subscribe(listener)
        self._calls = Calls(
            self.registry, view, waiters, cast(Any, None), self.drains, clock, "test"
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.registry.open()
        self.registry.start()
        self._tasks = self.drains.start()

    async def stop(self) -> None:
        await self.drains.close()
        await self.registry.close()

    async def die(self) -> None:
        """Ends it as a crash does: nothing more is said."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.registry.close()

    async def ask(self, field: str, request: Any) -> Any:
        return await self._calls.answer(field, request, None)

    async def ready(self, engine_id: str = E, generation: str = "g1") -> None:
        """Has an engine of two workers signed in and sealed."""
        records = [worker(tp, engine_id, generation=generation) for tp in (0, 1)]
        request = registration(*records, key=f"{engine_id}-{generation}", ttl_s=300.0)
        reply = await self.ask("register_workers", request)
        await self.ask("seal_engine", seal_request(records, reply.record_digests))

    async def report(
        self,
        count: int,
        boot_id: str = "decode",
        *,
        engine_id: str = E,
        generation: str = "g1",
        namespace: str = "default",
    ) -> None:
        peer = v1.PeerConnection(
            engine_id=engine_id, generation=generation, transfers_in_flight=count
        )
        request = v1.ReportPeersRequest(namespace=namespace, boot_id=boot_id, peers=[peer])
        await self.ask("report_peers", request)

    async def drain(
        self, wait_s: float = 0.0, *, deadline_s: float = 0.0, engine_id: str = E, why: str = ""
    ) -> v1.DrainEngineResponse:
        request = v1.DrainEngineRequest(engine_id=engine_id, reason=why)
        request.wait.CopyFrom(span(wait_s))
        if deadline_s:
            request.deadline.CopyFrom(span(deadline_s))
        reply: v1.DrainEngineResponse = await self.ask("drain_engine", request)
        return reply

    async def undo(self, engine_id: str = E) -> None:
        await self.ask("drain_engine", v1.DrainEngineRequest(engine_id=engine_id, undo=True))


class World:
    """Servers over one store, in a time that jumps."""

    def __init__(self, loop: WarpLoop) -> None:
        self.loop = loop
        self.store = SharedMemoryStore(loop)
        self.sites: list[Site] = []

    async def join(self, count: int = 1, **options: Any) -> list[Site]:
        """Starts servers."""
        fresh = []
        for _ in range(count):
            site = Site(self.loop, self.store, f"s{len(self.sites)}", **options)
            self.sites.append(site)
            await site.start()
            fresh.append(site)
        return fresh

    async def level(self) -> None:
        """Waits until every server has everything."""
        for site in self.sites:
            if site.line._open:
                await within(5.0, lambda s=site: s.registry.revision >= self.store.revision)  # type: ignore[misc]

    async def grown(self, count: int) -> list[Site]:
        """Servers that have run for long, and an engine that is older than they are."""
        (first,) = await self.join()
        await first.ready()
        sites = await self.join(count)
        await first.stop()
        await asyncio.sleep(FORGET_S + 1)
        return sites

    def word(self, site: Site) -> v1.StoredServer | None:
        value = self.store.words().get(site.registry.boot_id)
        return v1.StoredServer.FromString(value) if value is not None else None

    def now(self) -> float:
        return self.loop.now_s


def play(script: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    """Runs a test on servers of its own."""

    async def run(loop: WarpLoop) -> None:
        world = World(loop)
        try:
            await script(world)
        finally:
            for site in world.sites:
                await site.stop()

    loop = WarpLoop()
    try:
        loop.run_until_complete(run(loop))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
