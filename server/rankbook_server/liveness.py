"""What the store is told about leases: which live for how long, and which ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog

from rankbook.errors import Unavailable
from rankbook_server.clock import Clock
from rankbook_server.core.book import Book
from rankbook_server.core.keys import parse_key
from rankbook_server.core.ops import Op, Put
from rankbook_server.store.base import Liveness

__all__ = ["LivenessNews"]

_GATHER_S = 0.05
# What an embedded store is told waits so long for more; nobody waits for it.
_RETRY_S = 0.25


@dataclass(slots=True)
class _Waiter:
    """Someone who waits until the store has taken some leases."""

    leases: frozenset[str]
    future: asyncio.Future[frozenset[str]]


class LivenessNews:
    """Gathers news and tells them, one call of the store after the other. A
    renewal writes nothing else."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Seconds to live, and when that was said.
        self._alive: dict[str, tuple[float, float]] = {}
        self._ended: set[str] = set()
        self._waiting: list[_Waiter] = []
        self._some = asyncio.Event()

    def renewed(self, leases: Mapping[str, float]) -> None:
        """Notes leases that live so many seconds from now."""
        now_s = self._clock.mono()
        self._alive.update((lease_id, (ttl_s, now_s)) for lease_id, ttl_s in leases.items())
        self._ended -= leases.keys()
        self._some.set()

    def ended(self, lease_ids: Iterable[str]) -> None:
        """Notes leases that have ended."""
        for lease_id in lease_ids:
            self._alive.pop(lease_id, None)
            self._ended.add(lease_id)
        self._some.set()

    async def confirm(self, leases: Mapping[str, float]) -> frozenset[str]:
        """Notes leases that live so many seconds from now, and returns once the
        store has taken that: those of them that it held for dead until then.

        Raises:
            Unavailable: The store did not take it.
        """
        self.renewed(leases)
        waiter = _Waiter(frozenset(leases), asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        return await waiter.future

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
            self.renewed({lease_id: entry.ttl_s})
        else:
            self.ended([lease_id])

    async def tell_loop(self, store: Liveness, *, at_once: bool) -> None:
        """Tells the store again and again, without end.

        Args:
            store: The store.
            at_once: What comes while it is being told goes right after.
        """
        while True:
            await self._some.wait()
            if not await self.tell(store):
                await asyncio.sleep(_RETRY_S)
            elif not at_once:
                await asyncio.sleep(_GATHER_S)

    async def tell(self, store: Liveness) -> bool:
        """Tells the store; what it does not take is kept for the next time, as long
        as it is true."""
        alive, self._alive = self._alive, {}
        ended, self._ended = self._ended, set()
        waiting, self._waiting = self._waiting, []
        self._some.clear()
        try:
            made: frozenset[str] = frozenset()
            if alive:
                made = await store.touch({name: ttl_s for name, (ttl_s, _) in alive.items()})
            for waiter in waiting:
                if not waiter.future.done():
                    waiter.future.set_result(made & waiter.leases)
            waiting.clear()
            if ended:
                await store.drop(ended)
        except Unavailable as error:
            self._keep(alive, ended)
            for waiter in waiting:
                if not waiter.future.done():
                    waiter.future.set_exception(error)
            structlog.get_logger("rankbook.registry").warning(
                "liveness was not told to the store", error=error.message
            )
            return False
        except asyncio.CancelledError:
            for waiter in waiting:
                waiter.future.cancel()
            raise
        return True

    def _keep(self, alive: Mapping[str, tuple[float, float]], ended: set[str]) -> None:
        now_s = self._clock.mono()
        for lease_id, (ttl_s, at_s) in alive.items():
            # Who was not heard of since may well be dead by now.
            if now_s < at_s + ttl_s and lease_id not in self._ended:
                self._alive.setdefault(lease_id, (ttl_s, at_s))
        self._ended |= ended - self._alive.keys()
        if self._alive or self._ended:
            self._some.set()
