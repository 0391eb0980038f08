"""What the store is told about leases: which live for how long, and which ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from rankbook.errors import Unavailable
from rankbook_server.clock import Clock
from rankbook_server.core.book import Book
from rankbook_server.core.keys import parse_key
from rankbook_server.core.ops import Op, Put
from rankbook_server.store.base import Liveness

__all__ = ["LivenessNews"]

_GATHER_S = 0.05
# News of so long go together; an embedded store takes no notice of the rest.
_RETRY_S = 0.25
_BEHIND_S = 1.5
# A lease of two seconds, the shortest, is then still alive, and renewed elsewhere in time;
# thousands of new leases take about a second.


class LivenessNews:
    """Gathers news and tells them. A renewal writes nothing else."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._alive: dict[str, float] = {}
        self._ended: set[str] = set()
        self._since_s: float | None = None
        self._some = asyncio.Event()

    def renewed(self, leases: Mapping[str, float]) -> None:
        """Notes leases that live so many seconds from now."""
        self._alive.update(leases)
        self._note()

    def folded(self, book: Book, op: Op) -> None:
        """Notes a lease that an operation of this server granted, changed or ended."""
        if "/l/" not in op.key:
            return
        lease_id = parse_key(op.key).name
        entry = book.leases.get(lease_id)
        if isinstance(op, Put) and entry is None:
            return
        if entry is not None and not entry.stored.ended:
            entry.heard_s = max(entry.heard_s, self._clock.mono())
            self._ended.discard(lease_id)
            self._alive[lease_id] = entry.ttl_s
        else:
            self._alive.pop(lease_id, None)
            self._ended.add(lease_id)
        self._note()

    @property
    def is_behind(self) -> bool:
        """Whether the store has not taken news that are a while old."""
        return self._since_s is not None and self._clock.mono() - self._since_s > _BEHIND_S

    def _note(self) -> None:
        if self._since_s is None:
            self._since_s = self._clock.mono()
        self._some.set()

    async def tell_loop(self, store: Liveness) -> None:
        """Tells the store again and again, without end."""
        while True:
            await self._some.wait()
            await asyncio.sleep(_GATHER_S if await self.tell(store) else _RETRY_S)

    async def tell(self, store: Liveness) -> bool:
        """Tells the store; what it does not take is kept for the next time."""
        alive, self._alive = self._alive, {}
        ended, self._ended = self._ended, set()
        since_s = self._since_s
        self._some.clear()
        try:
            if alive:
                await store.touch(alive)
            if ended:
                await store.drop(ended)
        except Unavailable as error:
            self._alive = {k: v for k, v in alive.items() if k not in self._ended} | self._alive
            self._ended |= ended - self._alive.keys()
            self._since_s = since_s
            self._some.set()
            structlog.get_logger("rankbook.registry").warning(
                "liveness was not told to the store", error=error.message
            )
            return False
        self._since_s = self._clock.mono() if self._some.is_set() else None
        return True
