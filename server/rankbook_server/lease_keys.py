"""Which leases have their key in a shared store, and when one without it ends.

Every lease has a small key on a lease of the store's own, which the server that
hears of it keeps alive. Each server watches those keys. A lease whose key is
there lives, whoever hears of it. One whose key went is dead, unless

    this server heard of it within its time to live: then the store lost the key
        and gets it back
    another server heard of it: that one brings the key back, so there is a while
        before anything ends; a short one where this server was the last to hear,
        and can tell that by the time: a key lives for a time to live after that
    this server, or the store, did not run or could not be reached lately: then
        nobody could hear of anything, and every lease has a full time to live
        from the end of that (rule 8)
    very many went at once: then the store is not taken at its word, for a stalled
        leader that comes back can revoke the leases of everyone
        (etcd-io/etcd#15247)

And the transaction that takes a dead lease's records out is refused by the
store if the key is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import structlog

from rankbook_server.books import Books
from rankbook_server.core.book import Book
from rankbook_server.core.decision import Instant
from rankbook_server.core.fold import LeaseEntry
from rankbook_server.core.keys import parse_key
from rankbook_server.core.ops import Op, Put
from rankbook_server.liveness import LivenessNews
from rankbook_server.store.base import Presence

__all__ = ["CONFIRM_S", "OTHERS_S", "LeaseKeys"]

CONFIRM_S = 0.2
"""How long other servers have to bring a key back where this one was the last to
hear, in seconds: its holder may have gone to them a moment ago."""
OTHERS_S = 1.5
"""How long they have where this server was not: they see the key go and write it
at once, over links that may be slow."""
_LAG_S = 1.5
# So long after its time an etcd lease may end: etcd looks twice a second, and what
# this server heard takes a moment to get there.
_MASS = 16
_MASS_SHARE = 0.5
_MASS_S = 2.0
# So many leases, and this share of all, within so many seconds are no mishap of
# some workers. A lost node of eight workers stays below.


class LeaseKeys:
    """Keeps leases by their keys. For one event loop; unused where the store is
    not shared."""

    def __init__(self, books: Books, news: LivenessNews) -> None:
        self._books = books
        self._news = news
        self._live: set[str] = set()
        self._doubt_s = float("-inf")
        self._mass_s = float("-inf")
        self._went_s: deque[float] = deque()
        self._lost: deque[tuple[float, LeaseEntry, Book]] = deque()

    def __len__(self) -> int:
        """Leases whose key is there."""
        return len(self._live)

    def doubt(self, now: Instant) -> None:
        """Gives every lease a full time to live from now: what its holder could
        not say until now, it may still say."""
        self._doubt_s = now.mono_s
        self._books.grant_grace(now)

    def hear(self, presence: Presence, now: Instant) -> None:
        """Takes news of the keys in."""
        away = presence.away
        if presence.anew:
            away = frozenset(self._live - presence.live)
            self._live = set(presence.live)
            self.loaded()
        else:
            self._live |= presence.live
            self._live -= away
            for _, entry in self._entries(presence.live):
                entry.kept = not entry.stored.ended
        for book, entry in self._entries(away):
            if not entry.stored.ended:
                self._went(book, entry, now)

    def loaded(self) -> None:
        """Notes which leases of books that were read anew have their key: news are
        only of changes."""
        for book in self._books.all():
            for lease_id, entry in book.leases.items():
                entry.kept = lease_id in self._live and not entry.stored.ended

    def alive(self, lease_ids: Iterable[str], now: Instant) -> None:
        """Takes the store's word that leases live that were taken for dead."""
        for book, entry in self._entries(lease_ids):
            if not entry.lives(now.mono_s) and not entry.stored.ended:
                entry.deadline = now.mono_s + entry.ttl_s
                book.schedule(entry)

    def folded(self, book: Book, op: Op) -> None:
        """Notes a lease that another server granted or changed."""
        if "/l/" not in op.key or not isinstance(op, Put):
            return
        lease_id = parse_key(op.key).name
        entry = book.leases.get(lease_id)
        if entry is not None:
            entry.kept = lease_id in self._live and not entry.stored.ended

    def _entries(self, lease_ids: Iterable[str]) -> Iterator[tuple[Book, LeaseEntry]]:
        ids = list(lease_ids)
        for book in self._books.all():
            leases = book.leases
            for lease_id in ids:
                if (entry := leases.get(lease_id)) is not None:
                    yield book, entry

    def _went(self, book: Book, entry: LeaseEntry, now: Instant) -> None:
        entry.kept = False
        if now.mono_s < entry.heard_s + entry.ttl_s:
            entry.deadline = entry.heard_s + entry.ttl_s
            # With its whole time: another one would be another lease of the store's.
            self._news.renewed({entry.lease_id: entry.ttl_s})
        else:
            is_last = now.mono_s < entry.heard_s + entry.ttl_s + _LAG_S
            while_s = CONFIRM_S if is_last else OTHERS_S
            entry.deadline = max(now.mono_s + while_s, self._doubt_s + entry.ttl_s)
            self._went_s.append(now.mono_s)
            self._lost.append((now.mono_s, entry, book))
        book.schedule(entry)
        self._look_for_mass(now)

    def _look_for_mass(self, now: Instant) -> None:
        since_s = now.mono_s - _MASS_S
        while self._went_s and self._went_s[0] < since_s:
            self._went_s.popleft()
        while self._lost and self._lost[0][0] < since_s:
            self._lost.popleft()
        lost = len(self._went_s)
        if lost < _MASS:
            return
        # What goes in the moments after a mass belongs to it.
        if self._mass_s < since_s:
            if lost < _MASS_SHARE * (len(self._live) + lost):
                return
            structlog.get_logger("rankbook.registry").error(
                "very many leases went at once; none of them ends before a full time to live",
                leases=lost,
                live=len(self._live),
            )
        self._mass_s = now.mono_s
        for _, entry, book in self._lost:
            if not entry.kept and not entry.stored.ended and entry.lease_id in book.leases:
                entry.deadline = max(entry.deadline, now.mono_s + entry.ttl_s)
                book.schedule(entry)
        self._lost.clear()
