"""This process's copy of the book: what is committed, and nothing else.

Commits come in from the writer, which made them, and over a shared store from
the follower, which reads what other servers made and this one's own once more.
Each is folded in once, in order, and whoever listens is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

import structlog

from rankbook.errors import Reason, Unavailable
from rankbook_server.books import Books
from rankbook_server.clock import Clock
from rankbook_server.core.book import Book
from rankbook_server.core.keys import IMPORT_KEY, Unreadable
from rankbook_server.core.ops import Commit, Op
from rankbook_server.core.stored import check
from rankbook_server.lease_keys import LeaseKeys
from rankbook_server.liveness import LivenessNews
from rankbook_server.store.base import Store
from rankbook_server.wave import Outcome

__all__ = ["REACH_S", "Listener", "Replica"]

_READS = 8
# Of a book that this server writes to meanwhile.

REACH_S = 2.0
"""What another server has committed is here within milliseconds; so long is waited."""


class Listener(Protocol):
    """Is told of committed changes, inside the loop; must not block."""

    def changed(self, namespace: str, engine_ids: Iterable[str], since: int) -> None:
        """Engines of a namespace changed, none before the revision `since`."""


class Replica:
    """Books by namespace, at one revision. For one event loop."""

    def __init__(self, books: Books, clock: Clock, news: LivenessNews, keys: LeaseKeys) -> None:
        """Begins empty.

        Args:
            books: What is folded into.
            clock: Time.
            news: Told of leases that this server granted or ended.
            keys: Told of leases that others did.
        """
        self._books = books
        self._clock = clock
        self._news = news
        self._keys = keys
        self._log = structlog.get_logger("rankbook.registry")
        self._listeners: list[Listener] = []
        self._reaching: set[tuple[int, asyncio.Future[None]]] = set()
        self._own: set[int] = set()
        self._read_revision = 0
        self.revision = 0
        """Revision of the last commit that is in the books."""
        self.loaded_revision = 0
        """Revision at which this process read the book first."""
        self.is_loaded = False
        """Whether the book was read since the start."""
        self.is_torn = False
        """Whether something is missing here that no later commit brings: the book
        must be read anew."""

    def subscribe(self, listener: Listener) -> None:
        """Has a listener told of every later change."""
        self._listeners.append(listener)

    async def reach(self, revision: int, timeout_s: float = REACH_S) -> bool:
        """Waits until the books have a revision; False when time is up."""
        if self.revision >= revision:
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (revision, future)
        self._reaching.add(entry)
        try:
            # Not `wait_for`: before 3.12 that one may swallow a cancellation.
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return False
        finally:
            self._reaching.discard(entry)
        return True

    async def load(self, store: Store) -> None:
        """Takes a store's content in place of what is held, and has every lease
        given a full time to live (rule 8).

        Raises:
            Unavailable: The store is away, or holds half an import, or an older book
                than was read before; nothing was taken.
        """
        for _ in range(_READS):
            snapshot = await store.snapshot()
            if not self.is_loaded or snapshot.revision >= self.revision:
                break
            # What was committed meanwhile is newer; a store of one process has no such.
        else:
            raise Unavailable(
                f"the book {store.description} is at revision {snapshot.revision} and this "
                f"server's copy at {self.revision}: it was set back, or it is written to faster "
                "than it is read",
                reason=Reason.STORE_UNAVAILABLE,
                metadata={
                    "store": store.description,
                    "store_revision": snapshot.revision,
                    "book_revision": self.revision,
                },
            )
        since = self.revision + 1
        engines = self._books.load(snapshot, store.description)
        self._keys.loaded()
        self._keys.doubt(self._clock.now())
        self.is_loaded, self.is_torn = True, False
        self._read_revision = snapshot.revision
        self.loaded_revision = self.loaded_revision or snapshot.revision
        self._moved(max(self.revision, snapshot.revision))
        for namespace, engine_ids in (engines or {"": set()}).items():
            self._publish(namespace, engine_ids, since)

    def forget(self) -> None:
        """Counts as not loaded: what is held is of another book."""
        self.revision = self.loaded_revision = 0
        self.is_loaded = False
        self._own.clear()

    def fold(
        self, writes: Sequence[Outcome], revisions: Sequence[int], *, own: bool = False
    ) -> None:
        """Takes what was committed into the books and publishes it.

        Args:
            writes: What writes something.
            revisions: What each was committed at, rising.
            own: The follower will bring it once more, or was faster.
        """
        if own and revisions[-1] <= self.revision:
            for outcome, revision in zip(writes, revisions, strict=True):
                outcome.revision = revision
            self._tell_own(writes)
            return
        if own:
            self._own.update(revisions)
        touched: dict[str, Book] = {}
        for outcome, revision in zip(writes, revisions, strict=True):
            # Not the outcome's own: the books may have been read anew meanwhile.
            book = self._books.get(outcome.command.namespace)
            self._books.keep(book)
            book.clock_s = self._clock.mono()
            touched[book.namespace] = book
            outcome.revision = revision
            for op in outcome.txn_to_keep.ops:
                book.apply(op, revision)
        since = revisions[0]
        self._moved(revisions[-1])
        self._tell_own(writes)
        for namespace, book in touched.items():
            self._publish(namespace, book.take_touched(), since)

    def _tell_own(self, writes: Sequence[Outcome]) -> None:
        for outcome in writes:
            book = self._books.get(outcome.command.namespace)
            for op in outcome.txn_to_keep.ops:
                self._news.folded(book, op)

    def fold_commit(self, commit: Commit) -> bool:
        """Takes in what the store says was committed, by whichever server.

        Returns:
            False where the book must be read anew: an import is under way, or
            the commit comes too late, since somebody writes without asking for
            the book's last revision, or this version cannot read what it holds.
        """
        if commit.revision <= self.revision:
            if commit.revision in self._own:
                self._own = {r for r in self._own if r > commit.revision}
                return True
            if commit.revision <= self._read_revision:
                return True
            self._log.error(
                "somebody wrote to the book without asking for its last revision; it is read anew",
                revision=commit.revision,
            )
            self.is_torn = True
            return False
        if any(op.key == IMPORT_KEY for op in commit.ops):
            # Nothing of it is taken in before it is whole.
            return False
        by_namespace: dict[str, list[Op]] = {}
        try:
            # All of it or nothing is shown.
            for op in commit.ops:
                check(op)
        except Unreadable as error:
            self._log.error("a commit cannot be read", error=str(error))
            return False
        for op in commit.ops:
            by_namespace.setdefault(op.key.partition("/")[0], []).append(op)
        touched: list[tuple[str, set[str]]] = []
        for namespace, ops in by_namespace.items():
            book = self._books.get(namespace)
            self._books.keep(book)
            book.clock_s = self._clock.mono()
            for op in ops:
                book.apply(op, commit.revision)
                self._keys.folded(book, op)
            touched.append((namespace, book.take_touched()))
        self._moved(commit.revision)
        # A commit of nothing is a revision that somebody may wait for all the same.
        for namespace, engine_ids in touched or [("", set())]:
            self._publish(namespace, engine_ids, commit.revision)
        return True

    def _moved(self, revision: int) -> None:
        self.revision = revision
        for wanted, future in self._reaching:
            if wanted <= revision and not future.done():
                future.set_result(None)

    def _publish(self, namespace: str, engine_ids: Iterable[str], since: int) -> None:
        for listener in self._listeners:
            listener.changed(namespace, engine_ids, since)
