"""The books of all namespaces, as this process holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rankbook import v1
from rankbook.errors import Overloaded, Reason, Unavailable
from rankbook_server.clock import Clock
from rankbook_server.core.book import Book
from rankbook_server.core.decision import Instant
from rankbook_server.core.fold import BookLimits
from rankbook_server.core.keys import STORED_VERSION, Unreadable
from rankbook_server.core.ops import Put
from rankbook_server.moving.mark import check_whole
from rankbook_server.store.base import Snapshot

__all__ = ["Books"]

_REMEMBERED = 64
"""Names that are remembered of namespaces with nothing in them, for each one that
may have something: some 10 MB at the default bound."""


def _unreadable(error: Unreadable, store: str) -> Unavailable:
    """What a server says of a book that it cannot read."""
    return Unavailable(
        f"the book {store} cannot be read: {error}: run the rankbookd that wrote it or a newer one",
        reason=Reason.STORE_UNAVAILABLE,
        metadata={"store": store},
    )


class Books:
    """One book a namespace. Owned by the registry's writer; bounded.

    A namespace that became empty gives its place to another. What it must not
    forget, its epoch floor and its horizon, stays.
    """

    def __init__(self, clock: Clock, limits: BookLimits, max_namespaces: int) -> None:
        """Begins without any.

        Args:
            clock: Time and ids.
            limits: Bounds of one namespace.
            max_namespaces: Most namespaces.
        """
        self._clock = clock
        self._limits = limits
        self._max = max_namespaces
        self._books: dict[str, Book] = {}
        self._emptied: dict[str, v1.StoredNamespace] = {}
        self.on_grace: Callable[[Instant], None] = lambda _: None
        """Called when every lease got a full time to live."""

    def get(self, namespace: str) -> Book:
        """A namespace's book; an empty one, not kept, where nothing was written."""
        return self._books.get(namespace) or self._new(namespace)

    def admit(self, book: Book) -> None:
        """Keeps a book that is about to be written to first.

        Raises:
            Overloaded: It would be one namespace too many.
        """
        if book.namespace in self._books:
            return
        known = book.namespace in self._emptied
        remembered = len(self._emptied) - known
        if len(self._books) >= self._max or remembered >= self._max * _REMEMBERED:
            raise Overloaded(
                f"namespace {book.namespace} would be one more than the {self._max} this server "
                "holds: use an existing one, or raise --max-namespaces",
                reason=Reason.TOO_MANY_ENGINES,
                metadata={
                    "limit": "namespaces",
                    "bound": self._max,
                    "namespace": book.namespace,
                },
            )
        self._emptied.pop(book.namespace, None)
        self._books[book.namespace] = book

    def keep(self, book: Book) -> None:
        """Keeps a book that another server has written to, whatever the bound."""
        self._emptied.pop(book.namespace, None)
        self._books[book.namespace] = book

    def retire(self) -> None:
        """Lets go of books with nothing in them; none may hold what is not committed."""
        for namespace, book in list(self._books.items()):
            if not book.engines and not book.leases:
                self._emptied[namespace] = self._books.pop(namespace).facts

    def all(self) -> Iterable[Book]:
        """Every book that is kept, by namespace."""
        return [self._books[namespace] for namespace in sorted(self._books)]

    def grant_grace(self, now: Instant) -> None:
        """Gives every lease a full time to live from now (rule 8)."""
        for book in self._books.values():
            book.grant_grace(now)
        self.on_grace(now)

    def load(self, snapshot: Snapshot, store: str) -> dict[str, set[str]]:
        """Takes a store's content in place of what is held, with grace for every lease.

        Args:
            snapshot: What the store holds.
            store: The store, for errors.

        Returns:
            By namespace, every engine that was held before or is now.

        Raises:
            Unavailable: It holds half an import, or what this version cannot
                read; nothing was taken.
        """
        check_whole(snapshot.entries, store)
        books: dict[str, Book] = {}
        for entry in snapshot.entries:
            namespace = entry.key.partition("/")[0]
            book = books.get(namespace)
            if book is None:
                book = books[namespace] = self._new(namespace)
                book.facts = v1.StoredNamespace(version=STORED_VERSION)
            try:
                book.apply(Put(entry.key, entry.value), entry.revision)
            except Unreadable as error:
                raise _unreadable(error, store) from None
        engines = {namespace: set(book.engines) for namespace, book in self._books.items()}
        self._books, self._emptied = books, {}
        for namespace, book in self._books.items():
            book.link_leases()
            book.take_touched()
            engines.setdefault(namespace, set()).update(book.engines)
        self.retire()
        self.grant_grace(self._clock.now())
        return engines

    def _new(self, namespace: str) -> Book:
        book = Book(namespace, new_id=self._clock.new_id, limits=self._limits)
        book.clock_s = self._clock.mono()
        facts = self._emptied.get(namespace)
        if facts is not None:
            book.facts = facts
        return book
