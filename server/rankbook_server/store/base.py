"""What a server needs of a store: atomic commits, a snapshot, a watch, liveness.

The words are etcd's, so that an embedded store and a distributed one keep the
same promises; one suite of tests holds every store to them. A store knows
nothing of engines: keys and values are opaque to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from rankbook.errors import LimitExceeded, Reason, Unavailable
from rankbook_server.core.ops import MAX_TXN_OPS, Commit, Entry, Txn

__all__ = [
    "Compacted",
    "Liveness",
    "Presence",
    "SharedStore",
    "Snapshot",
    "Store",
    "check_txns",
    "is_shared",
    "not_open",
]


class Compacted(LookupError):
    """The history a watch asked for is no longer kept: take a snapshot anew.

    Attributes:
        from_revision: What the watch had seen.
        floor: The smallest revision a watch may resume from now.
    """

    def __init__(self, from_revision: int, floor: int) -> None:
        super().__init__(
            f"commits above revision {from_revision} are only kept above {floor}: "
            f"take a snapshot and watch from its revision"
        )
        self.from_revision = from_revision
        self.floor = floor


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys as they were at one revision."""

    revision: int
    """Revision of the book: the last one given out, also where it left no key."""
    entries: tuple[Entry, ...]
    """Every key, in order of the key's UTF-8 bytes."""


@dataclass(frozen=True, slots=True)
class Presence:
    """News of which leases live."""

    live: frozenset[str]
    """Leases that live from now on; with `anew` all that do."""
    away: frozenset[str] = frozenset()
    """Leases that ceased to live."""
    anew: bool = False
    """What was told before counts no more."""


class Liveness(Protocol):
    """Which leases were heard of lately. Not part of the book's content.

    An embedded store forgets this when it is closed, and a distributed one may
    lose it in an outage: whoever removes records because a lease is away gives
    each one a full time to live first.
    """

    async def touch(self, leases: Mapping[str, float]) -> frozenset[str]:
        """Makes each lease live for so many seconds from now, also if that is sooner.

        Returns:
            Those that did not live until now.

        Args:
            leases: Lease id to seconds, each above zero.

        Raises:
            ValueError: A time is zero, negative or not finite; none was touched.
            Unavailable: The store is away or not open.
        """

    async def drop(self, lease_ids: Iterable[str]) -> None:
        """Makes the leases not live; those that are not live already are ignored.

        Raises:
            Unavailable: The store is away or not open.
        """

    async def live(self) -> Mapping[str, float]:
        """Returns each live lease with the seconds it has left, above zero.

        Raises:
            Unavailable: The store is away or not open.
        """


class Store(Liveness, Protocol):
    """Where a book is kept. For one event loop; not thread-safe.

    A constructor opens nothing. Calls before `open` and after `close` raise
    `Unavailable`, except `close`. Whatever goes wrong with the medium is an
    `Unavailable` with reason STORE_UNAVAILABLE, whose message says what
    happened and what to do; the store works again by itself once the cause is
    gone.
    """

    @property
    def book_id(self) -> str:
        """Made when the book was created; empty before the first `open`."""

    @property
    def description(self) -> str:
        """The store's URL without secrets, for status and logs."""

    async def open(self) -> None:
        """Opens the book and creates it where there is none; no effect if open.

        Raises:
            Unavailable: It is locked by another server, is no book, is of a
                newer version, or may not be read or written.
        """

    async def snapshot(self) -> Snapshot:
        """Returns all keys at one revision.

        Raises:
            Unavailable: The store is away or not open.
        """

    async def commit(self, txns: Sequence[Txn]) -> list[int | None]:
        """Commits a batch as one durable write.

        Each transaction is atomic, sees those before it, and takes a revision
        of its own, also where it has no operation; one whose compare fails,
        whose `away` leases live, or whose `base` is no longer the book's last
        revision, writes nothing and takes none, and the others go on. Where a key occurs
        twice in a transaction its last operation counts.

        Returns:
            The revision of each, rising; None where a compare failed. What was
            returned is kept.

        Raises:
            LimitExceeded: A transaction is over `MAX_TXN_OPS`, or larger than
                the store takes; nothing was written.
            Unavailable: The store is away or not open. Nothing of the batch is
                kept where the store is of one process; a distributed one may
                have kept all of it. Take a snapshot to know.
        """

    def watch(self, from_revision: int) -> AsyncIterator[Commit]:
        """Yields every commit above a revision, in order, each once, without end.

        Ends quietly when the store is closed. Any number of watches may run; a
        slow one costs no memory, and one that falls behind the history kept
        ends with `Compacted`.

        Raises:
            Compacted: History above `from_revision` is gone; at the first step
                or, for a watch that fell behind, at a later one.
            Unavailable: The store is away or not open.
        """

    async def close(self) -> None:
        """Lets go of everything; a second call has no effect."""


class SharedStore(Store, Protocol):
    """A store that several servers write to at once.

    What one of them commits reaches the others by `watch`, and what it touches
    or drops by `presence`. Both end with `Unavailable` when the connection
    breaks; whoever follows calls them again, `watch` from the last revision
    that was seen.
    """

    @property
    def most_bytes(self) -> int:
        """Most bytes of keys and values that one transaction may have."""

    async def last_revision(self) -> int:
        """Returns the revision of the last commit, of whichever server.

        Everything that was acknowledged before the call counts.

        Raises:
            Unavailable: The store is away or not open.
        """

    def presence(self) -> AsyncIterator[Presence]:
        """Yields which leases live, then every change of it, without end.

        The first is `anew`. Ends quietly when the store is closed.

        Raises:
            Unavailable: The store is away or not open, or the connection broke.
        """

    async def announce(self, server_id: str, word: bytes, ttl_s: float) -> bool:
        """Has every server read a word of one server's, for so long from now.

        It takes the place of that server's word before. The same one again only
        moves its end, which writes nothing and takes no revision. One call at a
        time for each server.

        Args:
            server_id: The server that speaks, a word of `[A-Za-z0-9._-]`.
            word: What it says.
            ttl_s: How long it is kept, in seconds, above zero.

        Returns:
            Whether the word before was still kept; False at the first one.

        Raises:
            ValueError: The time is zero, negative or not finite.
            Unavailable: The store is away or not open; the word may be kept.
        """

    async def announced(self) -> Mapping[str, bytes]:
        """Returns the words that are kept now, by server.

        Everything that was announced before the call and has not run out is there.

        Raises:
            Unavailable: The store is away or not open.
        """

    async def withdraw(self, server_id: str) -> None:
        """Takes a server's word back; no effect where this store holds none of it.

        Raises:
            Unavailable: The store is away or not open.
        """


def is_shared(store: Store) -> TypeGuard[SharedStore]:
    """Whether several servers may write to a store."""
    return hasattr(store, "presence")


def check_txns(txns: Sequence[Txn]) -> None:
    """Holds a batch to the bounds of a transaction.

    Raises:
        LimitExceeded: A transaction has more operations or compares than
            `MAX_TXN_OPS`.
    """
    for txn in txns:
        conditions = len(txn.compares) + len(txn.away)
        if len(txn.ops) > MAX_TXN_OPS or conditions > MAX_TXN_OPS:
            what, count = "operations", len(txn.ops)
            if count <= MAX_TXN_OPS:
                what, count = "compares", conditions
            raise LimitExceeded(
                f"a transaction has {count} {what} and may have {MAX_TXN_OPS}: split it",
                metadata={
                    "limit": f"{what} of a transaction",
                    "value": count,
                    "bound": MAX_TXN_OPS,
                },
            )


def not_open(description: str) -> Unavailable:
    """Builds the error of a call on a store that is not open."""
    return Unavailable(
        f"the store {description} is not open: open it, or use the one that took its place",
        reason=Reason.STORE_UNAVAILABLE,
        metadata={"store": description},
    )
