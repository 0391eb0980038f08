"""`memory:`, a store that keeps its book in the process; for tests and trials."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

from rankbook.errors import Reason, Unavailable
from rankbook_server.core.ops import Commit, Entry, Put, Txn
from rankbook_server.store.base import Snapshot, check_txns, not_open
from rankbook_server.store.history import MAX_HISTORY_BYTES, MAX_HISTORY_COMMITS, History
from rankbook_server.store.liveness import LivenessTable

__all__ = ["MemoryStore"]


class MemoryStore:
    """A book in memory. It lives as long as this object, over `close` and `open`."""

    def __init__(
        self,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        *,
        max_history_commits: int = MAX_HISTORY_COMMITS,
        max_history_bytes: int = MAX_HISTORY_BYTES,
    ) -> None:
        """Holds nothing yet.

        Args:
            clock: Seconds on a clock that never goes back.
            new_id: Makes the book's id.
            max_history_commits: Most commits kept for watches.
            max_history_bytes: Most bytes kept for watches.
        """
        self.outage = ""
        """What a made-up outage says; every call but `close` fails with it while not empty."""
        self._new_id = new_id
        self._book_id = ""
        self._revision = 0
        self._entries: dict[str, Entry] = {}
        self._leases = LivenessTable(clock)
        self._bounds = (max_history_commits, max_history_bytes)
        self._history: History | None = None

    @property
    def book_id(self) -> str:
        """See `Store`."""
        return self._book_id

    @property
    def description(self) -> str:
        """See `Store`."""
        return "memory:"

    async def open(self) -> None:
        """See `Store`."""
        self._check_outage()
        if self._history is not None:
            return
        if not self._book_id:
            self._book_id = self._new_id()
        self._leases.clear()
        commits, size = self._bounds
        self._history = History(self._revision, max_commits=commits, max_bytes=size)

    async def snapshot(self) -> Snapshot:
        """See `Store`."""
        self._opened()
        entries = sorted(self._entries.values(), key=lambda entry: entry.key)
        return Snapshot(self._revision, tuple(entries))

    async def commit(self, txns: Sequence[Txn]) -> list[int | None]:
        """See `Store`."""
        history = self._opened()
        check_txns(txns)
        results: list[int | None] = []
        for txn in txns:
            if not self._holds(txn):
                results.append(None)
                continue
            self._revision += 1
            for op in txn.ops:
                if isinstance(op, Put):
                    self._entries[op.key] = Entry(op.key, op.value, self._revision)
                else:
                    self._entries.pop(op.key, None)
            history.append(Commit(self._revision, txn.ops))
            results.append(self._revision)
        return results

    def watch(self, from_revision: int) -> AsyncIterator[Commit]:
        """See `Store`."""
        return self._opened().follow(from_revision)

    async def touch(self, leases: Mapping[str, float]) -> frozenset[str]:
        """See `Store`."""
        self._opened()
        return self._leases.touch(leases)

    async def drop(self, lease_ids: Iterable[str]) -> None:
        """See `Store`."""
        self._opened()
        self._leases.drop(lease_ids)

    async def live(self) -> Mapping[str, float]:
        """See `Store`."""
        self._opened()
        return self._leases.live()

    async def close(self) -> None:
        """See `Store`."""
        if self._history is not None:
            self._history.end()
            self._history = None

    def _holds(self, txn: Txn) -> bool:
        return (
            (txn.base is None or self._revision <= txn.base)
            and all(self._mod_revision(c.key) == c.revision for c in txn.compares)
            and not self._leases.any_live(txn.away)
        )

    def _mod_revision(self, key: str) -> int:
        entry = self._entries.get(key)
        return entry.revision if entry else 0

    def _check_outage(self) -> None:
        if self.outage:
            raise Unavailable(
                self.outage, reason=Reason.STORE_UNAVAILABLE, metadata={"store": self.description}
            )

    def _opened(self) -> History:
        self._check_outage()
        if self._history is None:
            raise not_open(self.description)
        return self._history
