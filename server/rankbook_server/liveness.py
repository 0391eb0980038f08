"""What the store is told about leases: which live for how long, and which ended."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from rankbook.errors import Unavailable
from rankbook_server.core.book import Book
from rankbook_server.core.keys import parse_key
from rankbook_server.core.ops import Op, Put
from rankbook_server.store.base import Liveness

__all__ = ["LivenessNews"]


class LivenessNews:
    """Gathers news between two ticks. A renewal writes nothing else."""

    def __init__(self) -> None:
        self._alive: dict[str, float] = {}
        self._ended: set[str] = set()

    def renewed(self, leases: Mapping[str, float]) -> None:
        """Notes leases that live so many seconds from now."""
        self._alive.update(leases)

    def folded(self, book: Book, op: Op) -> None:
        """Notes a lease that an operation granted, changed or ended."""
        if "/l/" not in op.key:
            return
        lease_id = parse_key(op.key).name
        if isinstance(op, Put):
            self._ended.discard(lease_id)
            self._alive[lease_id] = book.leases[lease_id].ttl_s
        else:
            self._alive.pop(lease_id, None)
            self._ended.add(lease_id)

    async def tell(self, store: Liveness) -> None:
        """Tells the store; what it does not take is kept for the next time."""
        alive, self._alive = self._alive, {}
        ended, self._ended = self._ended, set()
        try:
            if alive:
                await store.touch(alive)
            if ended:
                await store.drop(ended)
        except Unavailable as error:
            self._alive = {**alive, **self._alive}
            self._ended |= ended
            structlog.get_logger("rankbook.registry").warning(
                "liveness was not told to the store", error=error.message
            )
