"""Commands over a copy of a desk's book: one after another, in waves, or all at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from tests.unit.core.desk import EPOCH_S, Desk

from rankbook import v1
from rankbook.errors import RankbookError
from rankbook_server.books import Books
from rankbook_server.core.book import Book
from rankbook_server.core.decision import Decision, Instant
from rankbook_server.core.ops import Entry, Put
from rankbook_server.rpc.calls import WRITES
from rankbook_server.rpc.status import boundary
from rankbook_server.store.base import Snapshot
from rankbook_server.wave import Command, Outcome, Wave


@dataclass(frozen=True)
class Ask:
    """A call, or a step of upkeep where there is no request."""

    name: str
    request: Any = None

    @property
    def subject(self) -> str:
        if self.request is None:
            return ""
        if self.name == "register_workers":
            return str(self.request.records[0].engine_id)
        if self.name == "update_worker":
            return str(self.request.record.engine_id)
        return str(getattr(self.request, "lease_id", "") or self.request.engine_id)

    def decide(self, book: Book, now: Instant) -> Decision[Any] | None:
        if self.request is None:
            step: Decision[None] | None = getattr(book, self.name)(now)
            return step
        decision: Decision[Any] = WRITES[self.name](book, self.request, now)
        return decision


def copy(desk: Desk) -> Desk:
    """Another desk with the same book, and the same time left to every lease."""
    other = Desk(desk.limits)
    other.store, other.revision, other.mono_s = dict(desk.store), desk.revision, desk.mono_s
    other.ids.count = desk.ids.count
    other.restart()
    copy_leases(desk.book, other.book)
    return other


def copy_leases(book: Book, other: Book) -> None:
    """Takes over what is known of leases in memory only."""
    other.ended.update(book.ended)
    other.unsaved |= book.unsaved
    for lease_id, entry in book.leases.items():
        mine = other.leases[lease_id]
        mine.ttl_s, mine.deadline = entry.ttl_s, entry.deadline
        mine.due = float("inf")
        other.schedule(mine)


def serially(desk: Desk, asks: Iterable[Ask]) -> list[Any]:
    """Decides and commits one after another; replies, and errors in place of them."""
    results: list[Any] = []
    for ask in asks:
        try:
            decision = ask.decide(desk.book, desk.now)
            results.append(desk.commit(decision) if decision is not None else None)
        except RankbookError as error:
            results.append(error)
    return results


def at_once(desk: Desk, asks: Iterable[Ask]) -> list[Any]:
    """Decides all on one state, and only then commits."""
    decided: list[Any] = []
    for ask in asks:
        try:
            decided.append(ask.decide(desk.book, desk.now))
        except RankbookError as error:
            decided.append(error)
    return [desk.commit(d) if isinstance(d, Decision) else d for d in decided]


class DeskClock:
    """A desk's time and names."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def mono(self) -> float:
        return self._desk.mono_s

    def unix(self) -> float:
        return EPOCH_S + self._desk.mono_s

    def now(self) -> Instant:
        return self._desk.now

    def new_id(self) -> str:
        return self._desk.ids()


class Turns:
    """A copy of a desk's book, and a queue of which waves are taken."""

    def __init__(
        self,
        desk: Desk,
        loop: asyncio.AbstractEventLoop,
        *,
        most_ops: int = 65_536,
        most_bytes: int = 16 * 1024 * 1024,
        merged: bool = False,
        namespace: str = "default",
    ) -> None:
        self.desk = copy(desk)
        self.loop = loop
        self.most_ops, self.most_bytes, self.merged = most_ops, most_bytes, merged
        self.namespace = namespace
        self.books = Books(DeskClock(self.desk), desk.limits, 4)
        entries = tuple(Entry(key, *kept) for key, kept in sorted(self.desk.store.items()))
        self.books.load(Snapshot(self.desk.revision, entries), "memory:")
        if "default" in {book.namespace for book in self.books.all()}:
            copy_leases(desk.book, self.books.get("default"))
        self.queue: deque[Command] = deque()
        self.waves: list[Wave] = []
        self.asked: dict[int, Ask] = {}

    @property
    def book(self) -> Book:
        return self.books.get(self.namespace)

    def ask(self, ask: Ask) -> asyncio.Future[Any]:
        """Queues a command."""
        future: asyncio.Future[Any] = self.loop.create_future()
        command = Command(ask.name, self.namespace, future, subject=ask.subject)
        if ask.request is None:
            command.step = ask.decide  # type: ignore[assignment]
        else:
            command.decide = ask.decide  # type: ignore[assignment]
        self.asked[id(command)] = ask
        self.queue.append(command)
        return future

    def take(self) -> Wave:
        """Takes a wave off the queue, and commits nothing."""
        wave = Wave(
            self.books,
            self.desk.now,
            lambda call: boundary(call, lambda: "x"),
            revision=self.desk.revision,
            most_ops=self.most_ops,
            most_bytes=self.most_bytes,
        )
        wave.take(self.queue)
        return wave

    def turn(self) -> Wave:
        """Takes a wave, commits it as a store does, and answers."""
        wave = self.take()
        self.waves.append(wave)
        if self.merged and wave.writes:
            self.desk.revision += 1
        for outcome in wave.writes:
            if not self.merged:
                self.desk.revision += 1
            outcome.revision = self.desk.revision
            for op in outcome.txn_to_keep.ops:
                self.book.apply(op, self.desk.revision)
                if isinstance(op, Put):
                    self.desk.store[op.key] = (op.value, self.desk.revision)
                else:
                    self.desk.store.pop(op.key, None)
        for outcome in wave.outcomes:
            outcome.settle()
            if outcome.command.step is not None and outcome.decision is not None:
                self.queue.append(outcome.command)
        return wave

    def run(self, asks: Iterable[Ask]) -> list[Any]:
        """Queues all at once and turns until all are answered."""
        futures = [self.ask(ask) for ask in asks]
        while self.queue:
            before = len(self.queue)
            wave = self.turn()
            assert wave.outcomes or len(self.queue) < before, "a wave took nothing"
        return [future.exception() or future.result() for future in futures]

    def order(self, wave: Wave) -> list[tuple[Ask, Outcome]]:
        """What a wave decided, beside what was asked."""
        return [(self.asked[id(outcome.command)], outcome) for outcome in wave.outcomes]


def content(book: Book, known: Iterable[str]) -> dict[str, Any]:
    """What a book keeps and says, but for revisions, for the names of leases that are
    not among those known, and for deadlines: whoever asks to write under a lease
    lives, also where the write waits."""
    names = {lease_id: lease_id for lease_id in known}
    for lease_id, entry in book.leases.items():
        names.setdefault(lease_id, f"new, of {entry.stored.lease_key}")

    def lease(lease_id: str) -> str:
        return names.get(lease_id, "new, and gone")

    engines: dict[str, Any] = {}
    for name, engine in book.engines.items():
        head = v1.StoredEngine.FromString(engine.head.SerializeToString())
        head.change_revision = min(head.change_revision, 1)
        head.start_revision = min(head.start_revision, 1)
        head.core.write_revision = min(head.core.write_revision, 1)
        head.core.lease_id = lease(head.core.lease_id)
        slots = {}
        for slot, state in engine.slots.items():
            stored = v1.StoredWorker.FromString(state.stored.SerializeToString())
            stored.change_revision = min(stored.change_revision, 1)
            stored.lease_id = lease(stored.lease_id)
            slots[slot] = str(stored)
        state_name = v1.State.Name(book.state(name))
        engines[name] = (str(head), slots, state_name, engine.unsaved)
    leases = {
        lease(lease_id): (str(entry.stored), sorted(entry.holds), entry.lives(book.clock_s))
        for lease_id, entry in book.leases.items()
    }
    facts = v1.StoredNamespace.FromString(book.facts.SerializeToString())
    facts.horizon_revision = min(facts.horizon_revision, 1)
    return {"engines": engines, "leases": leases, "facts": str(facts)}


def said(result: Any, known: Iterable[str]) -> str:
    """A reply, but for revisions and the names of new leases; or an error's reason."""
    if isinstance(result, RankbookError):
        return f"refused: {result.reason}"
    if not isinstance(result, Message):
        return str(result)
    bare: Any = type(result).FromString(result.SerializeToString())
    if hasattr(bare, "revision"):
        bare.revision = 0
    if hasattr(bare, "lease") and bare.lease.lease_id not in set(known):
        bare.lease.lease_id = "new"
    return f"{type(result).__name__}: {bare}"
