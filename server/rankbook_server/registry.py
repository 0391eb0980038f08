"""The one writer: every change of a book goes through here, one after another.

Theory of operation. Commands queue up; once a loop turn the writer takes all
that are there, lets the core decide each on the state that the ones before it
leave, folds what was decided into the books at once, and commits everything
as one group. Only after the commit are changes published and replies given,
errors included: what a command saw may still have been undone. A commit that
fails is undone by reading the books anew from the store.

Between fold and commit a book holds what is not yet kept. Readers therefore
call `settle` first, which waits for that short while.

Time. A timer ticks four times a second. A tick that comes much too late means
that this process did not run, so every lease gets a full time to live before
anything expires (rule 8); every batch checks this too, since it may run before
the late tick does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog

from rankbook.errors import Overloaded, Reason, Unavailable
from rankbook_server.books import Books
from rankbook_server.clock import Clock
from rankbook_server.core.book import Book
from rankbook_server.core.decision import Instant
from rankbook_server.core.fold import BookLimits
from rankbook_server.group import Command, Decide, Group, Step
from rankbook_server.liveness import LivenessNews
from rankbook_server.store.base import Store

__all__ = ["Listener", "Registry", "RegistryLimits"]

R = TypeVar("R")
_RETRY_S = (0.25, 0.5, 1.0, 2.0)


class Listener(Protocol):
    """Is told of committed changes, inside the loop; must not block."""

    def changed(self, namespace: str, engine_ids: Iterable[str], since: int) -> None:
        """Engines of a namespace changed, none before the revision `since`."""


@dataclass(frozen=True, slots=True)
class RegistryLimits:
    """Bounds and periods of the writer."""

    book: BookLimits
    """Bounds of one namespace."""
    max_namespaces: int = 1024
    """Most namespaces with anything in them."""
    max_queued: int = 16_384
    """Most commands that wait for the writer."""
    tick_s: float = 0.25
    """How often leases are looked at."""
    stall_s: float = 1.0
    """How late a tick may be before this process counts as stalled."""
    sweep_s: float = 10.0
    """How often what may be forgotten is looked for."""


class Registry:
    """Books by namespace over one store. For one event loop."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        limits: RegistryLimits,
        contain: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Opens nothing.

        Args:
            store: Where the book is kept.
            clock: Time and ids.
            limits: Bounds and periods.
            contain: Turns a fault inside a decision into a RankbookError.
        """
        self._store = store
        self._clock = clock
        self._limits = limits
        self._contain = contain
        self._log = structlog.get_logger("rankbook.registry")
        self._audit = structlog.get_logger("rankbook.audit")
        self._books = Books(clock, limits.book, limits.max_namespaces)
        self._queue: deque[Command] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._in_flight: asyncio.Future[None] | None = None
        self._unsettled: set[str] = set()
        self._listeners: list[Listener] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._last_tick_s = 0.0
        self._next_sweep_s = 0.0
        self._retries = 0
        self._recovering = False
        self._trouble = ""
        self._news = LivenessNews()
        self._closing = False
        self.revision = 0
        """Revision of the last commit."""
        self.loaded_revision = 0
        """Revision at which this process read the book."""
        self.boot_id = clock.new_id()
        """Names this life of the server."""
        self.started_s = clock.unix()
        """When this life began, in seconds since 1970."""
        self.available = False
        """Whether writes can be taken now."""
        self.on_available: Callable[[bool], None] = lambda _: None
        """Called when `available` changes."""

    # ------------------------------------------------------------- life cycle

    async def open(self) -> None:
        """Opens the store and reads the book.

        Raises:
            Unavailable: The store cannot be opened; the message says what to do.
        """
        await self._store.open()
        await self._load()
        self.loaded_revision = self.revision
        self._set_available(True)

    def start(self) -> None:
        """Starts the writer and the timer; `open` came before."""
        self._last_tick_s = self._clock.mono()
        self._next_sweep_s = self._last_tick_s + self._limits.sweep_s
        self._tasks = [
            asyncio.create_task(self._write_loop(), name="registry-writer"),
            asyncio.create_task(self._tick_loop(), name="registry-timer"),
        ]

    async def close(self) -> None:
        """Lets the running batch finish, fails what is still queued, closes the store."""
        self._closing = True
        if self._in_flight is not None:
            await asyncio.wait([self._in_flight], timeout=5.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for command in self._queue:
            command.fail(self._shutting_down())
        self._queue.clear()
        await self._store.close()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Tasks whose end, before `close`, is a fault."""
        return self._tasks

    def subscribe(self, listener: Listener) -> None:
        """Has a listener told of every later change."""
        self._listeners.append(listener)

    # ---------------------------------------------------------------- reading

    @property
    def book_id(self) -> str:
        """Names the book."""
        return self._store.book_id

    @property
    def store_description(self) -> str:
        """The store's URL without secrets."""
        return self._store.description

    def book(self, namespace: str) -> Book:
        """The namespace's book, an empty one where nothing was written. Read only."""
        return self._books.get(namespace)

    def namespaces(self) -> list[str]:
        """Namespaces with anything in them."""
        return [book.namespace for book in self._books.all()]

    @property
    def leases_alive(self) -> int:
        """Leases of all namespaces."""
        return sum(book.leases_alive for book in self._books.all())

    @property
    def is_busy(self) -> bool:
        """Whether `settle` would wait or fail now."""
        return self._in_flight is not None or bool(self._unsettled)

    async def settle(self, namespace: str) -> None:
        """Returns once the namespace's book holds nothing that is not committed.

        What the caller reads before it next awaits is committed.

        Raises:
            Unavailable: A commit failed and the store cannot be read to undo it.
        """
        while self._in_flight is not None:
            await asyncio.shield(self._in_flight)
        if namespace in self._unsettled:
            raise self._store_away()

    # ---------------------------------------------------------------- writing

    def submit(
        self,
        name: str,
        namespace: str,
        decide: Decide[R],
        notify: Callable[[], None] | None = None,
    ) -> asyncio.Future[R]:
        """Queues a command; its future gets the reply, or a RankbookError.

        Cancelling the future before the command is decided undoes it.

        Args:
            name: The call, for logs.
            namespace: The book it is for.
            decide: Asks the book.
            notify: Called, at once, when the future got its reply or error;
                spares a turn of the loop against a callback of the future.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        command = Command(name, namespace, future, decide=decide, notify=notify)
        if self._closing:
            command.fail(self._shutting_down())
        elif not self.available:
            command.fail(self._store_away())
        elif len(self._queue) >= self._limits.max_queued:
            bound = self._limits.max_queued
            command.fail(
                Overloaded(
                    f"{bound} writes wait already, the most this server holds: try again later",
                    reason=Reason.TOO_MANY_CALLS,
                    metadata={"limit": "queued writes", "bound": bound},
                )
            )
        else:
            self._enqueue(command)
        return future

    def note_renewed(self, leases: Mapping[str, float]) -> None:
        """Tells the store, with the next tick, how long these leases live now."""
        self._news.renewed(leases)

    def now(self) -> Instant:
        """The instant to decide with; a stall is made good first."""
        now = self._clock.now()
        late_s = now.mono_s - self._last_tick_s - self._limits.tick_s
        if self._last_tick_s and late_s > self._limits.stall_s:
            self._log.warning(
                "this process did not run for a while; every lease gets a full time to live",
                late_s=round(late_s, 3),
            )
            self._books.grant_grace(now)
            self._last_tick_s = now.mono_s
        return now

    # ------------------------------------------------------------- the writer

    def _enqueue(self, command: Command) -> None:
        self._queue.append(command)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _write_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._queue:
                self._wake = loop.create_future()
                await self._wake
            await self._run_group()

    async def _run_group(self) -> None:
        if not self.available:
            while self._queue:
                self._queue.popleft().fail(self._store_away())
            return
        group = Group(self._books, self.now(), self.revision, self._contain, self._news.folded)
        group.take(self._queue)
        if group.txns and not await self._commit(group):
            return
        for namespace, note in group.notes:
            self._audit.info(note.event, namespace=namespace, **note.fields)
        for namespace in group.namespaces:
            touched = self._books.get(namespace).take_touched()
            self._publish(namespace, touched, group.first_revision)
        group.resolve()

    async def _commit(self, group: Group) -> bool:
        expected = list(range(group.first_revision, group.revision + 1))
        self._in_flight = asyncio.get_running_loop().create_future()
        self._unsettled |= group.namespaces
        try:
            revisions = await self._store.commit(group.txns)
            if revisions == expected:
                self.revision = group.revision
                self._unsettled -= group.namespaces
                return True
            failure = Unavailable(
                "another server writes into this book: the book is read anew, try again",
                reason=Reason.STORE_UNAVAILABLE,
                metadata={"store": self._store.description},
            )
        except Unavailable as error:
            failure = error
        finally:
            in_flight, self._in_flight = self._in_flight, None
            in_flight.set_result(None)
        self._trouble = failure.message
        self._log.error("a commit failed", error=failure.message)
        self._set_available(False)
        self._recovering = True
        group.fail(failure)
        await self._recover()
        return False

    def _publish(self, namespace: str, engine_ids: Iterable[str], since: int) -> None:
        for listener in self._listeners:
            listener.changed(namespace, engine_ids, since)

    # ------------------------------------------------------------ load, undo

    async def _load(self) -> None:
        snapshot = await self._store.snapshot()
        since = self.revision + 1
        engines = self._books.load(snapshot)
        self.revision = max(self.revision, snapshot.revision)
        self._unsettled.clear()
        for namespace, engine_ids in engines.items():
            self._publish(namespace, engine_ids, since)

    async def _recover(self) -> None:
        """Reads the book anew after a failed commit; the timer tries again."""
        self._recovering = True
        try:
            await self._load()
        except Unavailable as error:
            self._trouble = error.message
            self._log.warning("the store is away", error=error.message)
            return
        finally:
            self._recovering = False
        self._retries = 0
        self._set_available(True)
        self._log.info("the store is back", revision=self.revision)

    def _set_available(self, available: bool) -> None:
        if available != self.available:
            self.available = available
            self.on_available(available)

    # --------------------------------------------------------------- the timer

    async def _tick_loop(self) -> None:
        retry_s = 0.0
        while True:
            await asyncio.sleep(self._limits.tick_s)
            now = self.now()
            self._last_tick_s = now.mono_s
            if not self.available:
                if now.mono_s >= retry_s and not self._recovering:
                    retry_s = now.mono_s + _RETRY_S[min(self._retries, len(_RETRY_S) - 1)]
                    self._retries += 1
                    await self._recover()
                continue
            self._housekeep(now)
            await self._news.tell(self._store)

    def _housekeep(self, now: Instant) -> None:
        queued = {(c.namespace, c.name) for c in self._queue if c.step is not None}
        sweeps = now.mono_s >= self._next_sweep_s
        if sweeps:
            self._next_sweep_s = now.mono_s + self._limits.sweep_s
            if self._in_flight is None and not self._unsettled:
                self._books.retire()
        for book in self._books.all():
            deadline = book.next_deadline()
            due: list[tuple[str, Step]] = []
            if deadline is not None and deadline <= now.mono_s:
                due.append(("expire", Book.expire))
            if sweeps:
                due.append(("sweep", Book.sweep))
            for name, step in due:
                if (book.namespace, name) not in queued:
                    future = asyncio.get_running_loop().create_future()
                    self._enqueue(Command(name, book.namespace, future, step=step))

    # ------------------------------------------------------------------ errors

    def _store_away(self) -> Unavailable:
        # Whoever is refused is told why: the log is on another machine.
        why = f" ({self._trouble})" if self._trouble else ""
        return Unavailable(
            f"the store {self._store.description} is away{why}: nothing is taken until it is "
            "back, try again later",
            reason=Reason.STORE_UNAVAILABLE,
            metadata={"store": self._store.description},
        )

    @staticmethod
    def _shutting_down() -> Unavailable:
        return Unavailable(
            "the server is shutting down: try again, or at another one",
            reason=Reason.SHUTTING_DOWN,
        )
