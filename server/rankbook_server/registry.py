"""The books of all namespaces over one store: what is asked of them and written.

Theory of operation. Commands queue up; once a loop turn the writer takes those
that are there, as far as they are not in each other's way (`wave`), lets the
core decide each on the state of the books, and commits what was decided
(`writer`). Only then is it folded into the books, changes are published and
replies given (`replica`). So the books never hold anything that is not kept,
and readers never wait.

Several servers. Over a shared store the `follower` brings what the others do,
and `lease_keys` which leases live whoever hears of them.

Time. A timer ticks four times a second. A tick that comes much too late means
that this process did not run, so every lease gets a full time to live before
anything expires (rule 8); every batch checks this too, since it may run before
the late tick does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import structlog

from rankbook.errors import Overloaded, Reason, Unavailable
from rankbook_server.books import Books
from rankbook_server.clock import Clock
from rankbook_server.core.book import Book
from rankbook_server.core.decision import Instant
from rankbook_server.core.fold import BookLimits
from rankbook_server.core.ops import Txn
from rankbook_server.follower import Follower
from rankbook_server.lease_keys import LeaseKeys
from rankbook_server.liveness import LivenessNews
from rankbook_server.replica import Listener, Replica
from rankbook_server.store.base import SharedStore, Store, is_shared
from rankbook_server.wave import Command, Decide, Step
from rankbook_server.writer import Writer

__all__ = ["Registry", "RegistryLimits"]

R = TypeVar("R")
_RETRY_S = (0.25, 0.5, 1.0, 2.0)


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
    sweeps: bool = True
    """Whether this server forgets what is long over; it goes by the wall clock."""
    spread_s: float = 0.0
    """How much later than it is due upkeep is done: where very many share a
    store, each by another time, so that the first spares the others the work."""


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
        self._log = structlog.get_logger("rankbook.registry")
        self._books = Books(clock, limits.book, limits.max_namespaces)
        self._news = LivenessNews(clock)
        self._shared: SharedStore | None = store if is_shared(store) else None
        self._keys = LeaseKeys(self._books, self._news)
        self._replica = Replica(self._books, clock, self._news, self._keys)
        self._follower: Follower | None = None
        if self._shared is not None:
            self._follower = Follower(self._shared, clock, self._replica, self._keys)
        self._writer = Writer(
            self, store, clock, self._books, self._replica, self._news, self._keys, contain
        )
        self._recovery: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._last_tick_s = 0.0
        self._next_sweep_s = 0.0
        self._retry_s = 0.0
        self._retries = 0
        self._recovering = False
        self._trouble = "it has not answered yet"
        self._closing = False
        self.boot_id = clock.new_id()
        """Names this life of the server."""
        self.started_s = clock.unix()
        """When this life began, in seconds since 1970."""
        self.opened_s: float | None = None
        """When the book was read first, on the clock that never goes back."""
        self.available = False
        """Whether writes can be taken now."""
        self.on_available: Callable[[bool], None] = lambda _: None
        """Called when `available` changes."""
        self.on_replaced: Callable[[], None] = lambda: None
        """Called when another book took the place of the one that was read."""
        self.on_grace: Callable[[Instant], None] = lambda _: None
        """Called when nobody could be heard until now: every lease got a full time
        to live, and so must whatever else has to be repeated."""
        self._books.on_grace = lambda now: self.on_grace(now)

    # ------------------------------------------------------------- life cycle

    async def open(self) -> None:
        """Opens the store and reads the book.

        Raises:
            Unavailable: The store cannot be opened; the message says what to do.
        """
        try:
            await self._store.open()
            await self._replica.load(self._store)
        except Unavailable as error:
            self._trouble = error.message
            raise
        self._set_available(True)

    async def try_open(self, timeout_s: float) -> None:
        """Opens the store and reads the book, or goes on with that when time is up."""
        self._recover_soon()
        assert self._recovery is not None
        await asyncio.wait([self._recovery], timeout=timeout_s)

    @property
    def is_shared(self) -> bool:
        """Whether other servers may write to the book too."""
        return self._shared is not None

    def start(self) -> None:
        """Starts the writer and the timer; `open` came before, or is tried again
        and again from now on where the store is shared."""
        self._last_tick_s = self._clock.mono()
        self._next_sweep_s = self._last_tick_s + self._limits.sweep_s
        self._tasks = [
            asyncio.create_task(self._writer.run(), name="registry-writer"),
            asyncio.create_task(self._tick_loop(), name="registry-timer"),
            asyncio.create_task(
                self._news.tell_loop(self._store, at_once=self.is_shared),
                name="registry-liveness",
            ),
        ]
        if self._follower is not None:
            self._tasks += self._follower.start()
        if not self.available and not self._recovering:
            self._recover_soon()

    async def close(self) -> None:
        """Lets the running wave finish, fails what is still queued, closes the store."""
        self._closing = True
        await self._writer.finish(5.0)
        tasks = [*self._tasks, *([self._recovery] if self._recovery is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for command in self._writer.queue:
            command.fail(self._shutting_down())
        self._writer.queue.clear()
        await self._store.close()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Tasks whose end, before `close`, is a fault."""
        return self._tasks

    def subscribe(self, listener: Listener) -> None:
        """Has a listener told of every later change."""
        self._replica.subscribe(listener)

    # ---------------------------------------------------------------- reading

    @property
    def book_id(self) -> str:
        """Names the book."""
        return self._store.book_id

    @property
    def store_description(self) -> str:
        """The store's URL without secrets."""
        return self._store.description

    @property
    def revision(self) -> int:
        """Revision of the last commit that is in the books."""
        return self._replica.revision

    @property
    def loaded_revision(self) -> int:
        """Revision at which this process read the book first."""
        return self._replica.loaded_revision

    async def reach(self, revision: int) -> bool:
        """Waits a short while for a revision; False where it does not come."""
        return await self._replica.reach(revision)

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

    def check_readable(self) -> None:
        """Refuses a read before the book was read.

        Raises:
            Unavailable: The store has not answered since the start.
        """
        if not self._replica.is_loaded:
            raise self.away()

    @property
    def stale_s(self) -> float:
        """For how long this server has been cut off from a shared store, in
        seconds: what others wrote since is not in the books. Zero is up to date."""
        if self.available or self._follower is None:
            return 0.0
        return self._follower.cut_for_s

    async def last_revision(self) -> int:
        """Revision of the last commit of any server.

        Raises:
            Unavailable: The store is away.
        """
        if self._shared is None:
            return self.revision
        self.check_readable()
        if not self.available:
            raise self.away()
        return await self._shared.last_revision()

    async def catch_up(self) -> None:
        """Returns once everything is in the books that any server had
        acknowledged before the call.

        Raises:
            Unavailable: The store is away, or what it has does not arrive.
        """
        last = await self.last_revision()
        if not await self._replica.reach(last):
            raise Unavailable(
                f"the store is at revision {last} and this server at {self.revision}: it does not "
                "get what other servers wrote, try again or at another server",
                reason=Reason.STORE_UNAVAILABLE,
                metadata={"book_revision": self.revision, "store_revision": last},
            )

    # ---------------------------------------------------------------- writing

    def submit(
        self,
        name: str,
        namespace: str,
        decide: Decide[R],
        notify: Callable[[], None] | None = None,
        subject: str = "",
    ) -> asyncio.Future[R]:
        """Queues a command; its future gets the reply, or a RankbookError.

        Cancelling the future before the command is decided undoes it.

        Args:
            name: The call, for logs.
            namespace: The book it is for.
            decide: Asks the book.
            notify: Called, at once, when the future got its reply or error;
                spares a turn of the loop against a callback of the future.
            subject: The engine or lease it is about: commands on one are
                decided in the order in which they came.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        command = Command(
            name,
            namespace,
            future,
            decide=decide,
            notify=notify,
            subject=subject,
            since_s=self._clock.mono(),
        )
        if self._closing:
            command.fail(self._shutting_down())
        elif not self.available:
            command.fail(self.away())
        elif len(self._writer.queue) >= self._limits.max_queued:
            bound = self._limits.max_queued
            command.fail(
                Overloaded(
                    f"{bound} writes wait already, the most this server holds: try again later",
                    reason=Reason.TOO_MANY_CALLS,
                    metadata={"limit": "queued writes", "bound": bound},
                )
            )
        else:
            self._writer.enqueue(command)
        return future

    def note_renewed(self, leases: Mapping[str, float]) -> None:
        """Tells the store, in a moment, how long these leases live now."""
        if leases:
            self._news.renewed(leases)

    def note_ended(self, lease_ids: Iterable[str]) -> None:
        """Tells the store, in a moment, that these leases have ended."""
        self._news.ended(lease_ids)

    async def confirm_alive(self, leases: Mapping[str, float]) -> frozenset[str]:
        """Tells a shared store how long these leases live now, and returns once it
        has taken that: those that it held for dead until now.

        Raises:
            Unavailable: It did not take it; another server must hear of these leases.
        """
        if not leases:
            return frozenset()
        if not self.available:
            raise self.away()
        return await self._news.confirm(leases)

    def now(self) -> Instant:
        """The instant to decide with; a stall is made good first."""
        now = self._clock.now()
        late_s = now.mono_s - self._last_tick_s - self._limits.tick_s
        if self._last_tick_s and late_s > self._limits.stall_s:
            self._log.warning(
                "this process did not run for a while; every lease gets a full time to live",
                late_s=round(late_s, 3),
            )
            self._keys.doubt(now)
            self._last_tick_s = now.mono_s
        return now

    # ---------------------------------------------------------- load, recover

    async def _recover(self) -> None:
        """Has the store back, and what it holds; the timer tries again."""
        self._recovering = True
        was_loaded = self._replica.is_loaded
        try:
            if self._shared is None:
                await self._replica.load(self._store)
            else:
                await self._come_back(self._shared)
        except Unavailable as error:
            self._trouble = error.message
            self._log.warning("the store is away", error=error.message)
            return
        finally:
            self._recovering = False
        self._retries = 0
        if self._shared is not None:
            # Nobody could say here that he lives.
            self._keys.doubt(self._clock.now())
        self._set_available(True)
        if was_loaded:
            self._log.info("the store is back", revision=self.revision)

    async def _come_back(self, store: SharedStore) -> None:
        replica, book_id = self._replica, store.book_id
        await store.open()
        if replica.is_loaded and store.book_id != book_id:
            self._log.error("another book is in this one's place", book_id=store.book_id)
            replica.forget()
            await replica.load(store)
            self.on_replaced()
        elif not replica.is_loaded:
            await replica.load(store)
            return
        assert self._follower is not None
        await self._follower.catch_up()
        if self._writer.refusals:
            # A store that is full still answers reads.
            await store.commit([Txn(())])
            self._writer.refusals = 0

    def lost(self, trouble: str) -> None:
        """Takes no writes until the store is back."""
        if self.available:
            self._log.error("the store is away", error=trouble)
        self._trouble = trouble
        self._set_available(False)
        if not self._recovering:
            self._recover_soon()

    def _set_available(self, available: bool) -> None:
        if available and self.opened_s is None:
            self.opened_s = self._clock.mono()
        if available != self.available:
            self.available = available
            self.on_available(available)

    # --------------------------------------------------------------- the timer

    async def _tick_loop(self) -> None:
        while True:
            await asyncio.sleep(self._limits.tick_s)
            now = self.now()
            self._last_tick_s = now.mono_s
            if self._follower is not None and self._follower.is_cut_long and self.available:
                self.lost(self._follower.trouble)
            if not self.available:
                if now.mono_s >= self._retry_s and not self._recovering:
                    self._recover_soon()
                continue
            self._housekeep(now)

    def _recover_soon(self) -> None:
        self._retry_s = self._clock.mono() + _RETRY_S[min(self._retries, len(_RETRY_S) - 1)]
        self._retries += 1
        self._recovering = True
        # The timer goes on meanwhile: one that waits would look like a stall.
        self._recovery = asyncio.create_task(self._recover(), name="registry-recovery")

    def _housekeep(self, now: Instant) -> None:
        queued = {(c.namespace, c.name) for c in self._writer.queue if c.step is not None}
        sweeps = self._limits.sweeps and now.mono_s >= self._next_sweep_s
        if sweeps:
            self._next_sweep_s = now.mono_s + self._limits.sweep_s
            if not self._writer.is_busy:
                self._books.retire()
        for book in self._books.all():
            deadline = book.next_deadline()
            due: list[tuple[str, Step]] = []
            if deadline is not None and deadline + self._limits.spread_s <= now.mono_s:
                due.append(("expire", Book.expire))
            if sweeps:
                due.append(("sweep", Book.sweep))
            for name, step in due:
                if (book.namespace, name) not in queued:
                    future = asyncio.get_running_loop().create_future()
                    self._writer.enqueue(Command(name, book.namespace, future, step=step))

    # ------------------------------------------------------------------ errors

    def away(self) -> Unavailable:
        """The error of a write, or of a first read, while the store is away."""
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
