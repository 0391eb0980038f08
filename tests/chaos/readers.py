"""Readers of the book: each follows it in another way and notes all it is shown.

RawWatcher     the wire's own Watch, at changing servers, resumed by hand
ClientWatcher  `AsyncClient.watch`
ViewWatcher    `TopologyView`, in threads
Querier        GetTopology at changing servers, never older than it has seen
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

import rankbook
from rankbook import v1
from rankbook.model import EngineFilter, EventType, Requirement, WatchEvent
from rankbook.v1 import registry_pb2_grpc

from .cast import EnginePlan
from .content import Content, content_of, content_of_topology, digest_of
from .journal import Journal

__all__ = ["ClientWatcher", "Notes", "Querier", "RawWatcher", "ViewWatcher"]

_CHANNEL = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 16 << 20),
)
_RETRY_S = 0.3


class _BaselessError(Exception):
    """A part of an engine was told that this reader does not have."""


class Notes:
    """The journal of a process of readers; each content is written once."""

    def __init__(self, journal: Journal) -> None:
        """Takes note of the journal."""
        self.journal = journal
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def content(self, content: Content) -> str:
        """Notes a content; returns its name."""
        digest = digest_of(content)
        with self._lock:
            if digest in self._known:
                return digest
            self._known.add(digest)
        self.journal.note("content", digest=digest, **content)
        return digest

    def event(self, content: Content, kind: str) -> list[Any]:
        """Notes the content of an event; returns what is noted of the event itself."""
        return [content["engine"], kind, content["rev"], self.content(content)]


class RawWatcher:
    """Watches at one server, then at another, and resumes where it was."""

    def __init__(
        self,
        name: str,
        endpoints: Sequence[str],
        notes: Notes,
        rng: random.Random,
        *,
        group: str = "",
        ready_only: bool = False,
        bare: bool = False,
    ) -> None:
        """Watches nothing yet."""
        self.name = name
        self._endpoints = endpoints
        self._notes = notes
        self._rng = rng
        self._filter = v1.EngineFilter(group=group, states=[v1.STATE_READY] if ready_only else [])
        self._bare = bare
        self._heads: dict[str, v1.Engine] = {}
        self._cells: dict[str, dict[tuple[int, int], tuple[v1.WorkerRecord, v1.WorkerStatus]]] = {}
        self._shown: dict[str, tuple[int, str]] = {}
        self._unconfirmed: set[str] = set()
        self._revision = 0
        self._book_id = ""
        self._synced = False
        notes.journal.note(
            "reader", reader=name, way="raw", group=group, ready_only=ready_only, bare=bare
        )

    async def run(self) -> None:
        """Watches until it is cancelled."""
        while True:
            number = self._rng.randrange(len(self._endpoints))
            try:
                async with asyncio.timeout(self._rng.uniform(3, 20)):
                    await self._watch(number)
            except TimeoutError:
                pass
            except _BaselessError:
                self._revision, self._book_id = 0, ""
            except grpc.RpcError as error:
                self._notes.journal.note(
                    "broken", reader=self.name, server=number, code=str(_code(error))
                )
                await asyncio.sleep(_RETRY_S)

    async def _watch(self, number: int) -> None:
        request = v1.WatchRequest(
            filter=self._filter,
            from_revision=self._revision,
            book_id=self._book_id,
            without_payload=self._bare,
        )
        self._notes.journal.note(
            "watch", reader=self.name, server=number, since=self._revision, book=self._book_id
        )
        async with grpc.aio.insecure_channel(self._endpoints[number], options=_CHANNEL) as channel:
            stub: Any = registry_pb2_grpc.RegistryStub(channel)
            call = stub.Watch(request)
            self._synced = False
            try:
                async for response in call:
                    self._take(response, number)
            finally:
                call.cancel()

    def _take(self, response: v1.WatchResponse, number: int) -> None:
        if response.reset:
            self._unconfirmed = set(self._heads)
        events = [self._fold(event) for event in response.events]
        if response.synced:
            self._revision, self._book_id = response.book_revision, response.book_id
            for engine_id in sorted(self._unconfirmed):
                self._forget(engine_id)
                events.append([engine_id, "dropped", 0, ""])
            self._unconfirmed.clear()
            self._synced = True
        self._notes.journal.note(
            "message",
            reader=self.name,
            server=number,
            rev=response.book_revision,
            book=response.book_id,
            synced=response.synced,
            reset=response.reset,
            events=events,
        )

    def _fold(self, event: v1.WatchEvent) -> list[Any]:
        engine = event.engine
        name = engine.engine_id
        self._unconfirmed.discard(name)
        if event.type == v1.EVENT_TYPE_REMOVED:
            # A filter may take out what never was in.
            kind = "removed" if name in self._heads else "absent"
            self._forget(name)
            return [name, kind, engine.revision, ""]
        whole = event.type == v1.EVENT_TYPE_ADDED or event.replace
        known = self._heads.get(name)
        if not whole and (known is None or known.generation != engine.generation):
            self._notes.journal.note(
                "baseless",
                reader=self.name,
                engine=name,
                rev=engine.revision,
                gen=engine.generation,
                known="" if known is None else known.generation,
            )
            raise _BaselessError
        cells = {} if whole else self._cells[name]
        for record, status in zip(event.workers, event.statuses, strict=True):
            cells[record.slot.pp_rank, record.slot.tp_rank] = (record, status)
        for slot in event.removed_slots:
            cells.pop((slot.pp_rank, slot.tp_rank), None)
        self._heads[name], self._cells[name] = engine, cells
        shown = self._notes.event(
            content_of(engine, cells.values(), bare=self._bare),
            v1.EventType.Name(event.type).removeprefix("EVENT_TYPE_").lower(),
        )
        self._shown[name] = (shown[2], shown[3])
        return shown

    def _forget(self, engine_id: str) -> None:
        self._heads.pop(engine_id, None)
        self._cells.pop(engine_id, None)
        self._shown.pop(engine_id, None)

    def end(self) -> None:
        """Notes what it has."""
        self._notes.journal.note(
            "end",
            reader=self.name,
            rev=self._revision,
            book=self._book_id,
            synced=self._synced,
            engines=self._shown,
        )


def _code(error: grpc.RpcError) -> object:
    return error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else type(error)


class _Told:
    """What the events of one of the client's watches came to."""

    def __init__(self, name: str, notes: Notes, way: str) -> None:
        self.name = name
        self._notes = notes
        self.shown: dict[str, tuple[int, str]] = {}
        notes.journal.note("reader", reader=name, way=way, group="", ready_only=False, bare=False)

    def take(self, event: WatchEvent) -> None:
        topology = event.topology
        engine_id = topology.engine.engine_id
        if event.type is EventType.REMOVED:
            self.shown.pop(engine_id, None)
            shown: list[Any] = [engine_id, "removed", event.revision, ""]
        else:
            shown = self._notes.event(content_of_topology(topology), event.type.name.lower())
            self.shown[engine_id] = (shown[2], shown[3])
        self._notes.journal.note(
            "told",
            reader=self.name,
            rev=topology.book_revision,
            book=topology.book_id,
            events=[shown],
        )


class ClientWatcher:
    """Follows by `AsyncClient.watch`."""

    def __init__(self, name: str, client: rankbook.AsyncClient, notes: Notes) -> None:
        """Watches nothing yet."""
        self._client = client
        self._told = _Told(name, notes, "client")
        self._notes = notes

    async def run(self) -> None:
        """Watches until it is cancelled."""
        while True:
            try:
                async for event in self._client.watch():
                    self._told.take(event)
            except rankbook.Unavailable:
                # Only the first connection is not tried again by itself.
                await asyncio.sleep(_RETRY_S)

    def end(self) -> None:
        """Notes what it has."""
        self._notes.journal.note(
            "end", reader=self._told.name, synced=True, engines=self._told.shown
        )


class ViewWatcher:
    """Keeps a `TopologyView`."""

    def __init__(self, name: str, client: rankbook.Client, notes: Notes) -> None:
        """Watches nothing yet."""
        self._view = rankbook.TopologyView(client, EngineFilter())
        self._told = _Told(name, notes, "view")
        self._notes = notes

    async def run(self) -> None:
        """Watches until it is cancelled."""
        self._view.subscribe(self._told.take)
        self._view.start()
        seen = 0
        while True:
            await asyncio.sleep(0.25)
            if self._view.connected and self._view.revision != seen:
                seen = self._view.revision
                self._notes.journal.note("view", reader=self._told.name, rev=seen)

    def end(self) -> None:
        """Notes what look-ups give."""
        engines = {
            topology.engine.engine_id: (
                topology.engine.revision,
                self._notes.content(content_of_topology(topology)),
            )
            for topology in self._view.engines()
        }
        self._notes.journal.note(
            "end",
            reader=self._told.name,
            rev=self._view.revision,
            synced=self._view.connected,
            engines=engines,
        )

    def close(self) -> None:
        """Ends the view."""
        self._view.close()


class Querier:
    """Asks, at a server that chance picks, for what is not older than it has seen."""

    def __init__(
        self,
        name: str,
        clients: Sequence[rankbook.AsyncClient],
        engines: Sequence[EnginePlan],
        notes: Notes,
        rng: random.Random,
    ) -> None:
        """Asks nothing yet."""
        self.name = name
        self._clients = clients
        self._engines = engines
        self._notes = notes
        self._rng = rng
        self._revision = 0
        self._book_id = ""
        notes.journal.note("reader", reader=name, way="query", group="", ready_only=False)

    async def run(self) -> None:
        """Asks until it is cancelled."""
        while True:
            await self._ask()
            await asyncio.sleep(self._rng.expovariate(1 / 0.3))

    async def _ask(self) -> None:
        engine = self._rng.choice(self._engines)
        number = self._rng.randrange(len(self._clients))
        client = self._clients[number]
        least = self._revision if self._rng.random() < 0.8 else 0
        found: Sequence[rankbook.Topology] | None
        try:
            if self._rng.random() < 0.3:
                found = await client.get_group(
                    engine.group, require=Requirement.ANY, min_revision=least, timeout_s=2.0
                )
            else:
                found = [
                    await client.get_topology(
                        engine.engine_id, require=Requirement.ANY, min_revision=least, timeout_s=2.0
                    )
                ]
        except rankbook.RankbookError as error:
            self._notes.journal.note(
                "refused", reader=self.name, server=number, min=least, reason=str(error.reason)
            )
            return
        assert found is not None
        if not found:
            return
        revision, book_id = found[0].book_revision, found[0].book_id
        self._notes.journal.note(
            "answer",
            reader=self.name,
            server=number,
            min=least,
            rev=revision,
            book=book_id,
            engines=[
                [t.engine.engine_id, t.engine.revision, self._notes.content(content_of_topology(t))]
                for t in found
            ],
        )
        if book_id != self._book_id:
            self._revision = 0
        self._book_id, self._revision = book_id, max(self._revision, revision)

    def end(self) -> None:
        """Has nothing of its own to note."""
