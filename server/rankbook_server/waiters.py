"""Long polls: calls that wait until a book changes.

A change wakes those that wait for its engine or its group, and only when the
engine's state or start is another one: a thousand decode ranks that wait for a
large engine sleep through the sign-in of each of its workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rankbook.errors import Overloaded, RankbookError, Reason, Unavailable
from rankbook_server.registry import Registry

__all__ = ["Waiters"]

_Subject = tuple[str, str, str]


class Waiters:
    """Everyone who waits. For one event loop; bounded."""

    def __init__(self, registry: Registry, max_waiters: int) -> None:
        self._registry = registry
        self._max = max_waiters
        self._count = 0
        self._waiting: dict[_Subject, set[asyncio.Future[bool]]] = {}
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}
        self._revisions: set[tuple[int, asyncio.Future[bool]]] = set()
        self._end: RankbookError | None = None

    def __len__(self) -> int:
        """Calls that wait now."""
        return self._count

    async def engine(self, namespace: str, engine_id: str, timeout_s: float) -> bool:
        """Waits for `stir`, or a change of an engine's state or start; False when time is up.

        Raises:
            Overloaded: As many calls as the server may hold wait already.
            Unavailable: The server is shutting down.
        """
        return await self._wait((namespace, "engine", engine_id), timeout_s)

    async def group(self, namespace: str, group: str, timeout_s: float) -> bool:
        """Waits for such a change of any engine of a group; False when time is up.

        Raises:
            Overloaded: As many calls as the server may hold wait already.
            Unavailable: The server is shutting down.
        """
        return await self._wait((namespace, "group", group), timeout_s)

    def stir(self, namespace: str, engine_id: str) -> None:
        """Wakes those that wait for an engine, for a change outside the book."""
        self._wake((namespace, "engine", engine_id))

    async def revision(self, revision: int, timeout_s: float) -> None:
        """Waits until the book has a revision.

        Raises:
            Unavailable: It has not in time (REVISION_NOT_REACHED), or the
                server is shutting down.
            Overloaded: As many calls as the server may hold wait already.
        """
        if self._registry.revision >= revision:
            return
        future = self._enter()
        entry = (revision, future)
        self._revisions.add(entry)
        try:
            reached = await self._sleep(future, timeout_s)
        finally:
            self._revisions.discard(entry)
        if not reached:
            now = self._registry.revision
            raise Unavailable(
                f"the book is at revision {now} and {revision} was asked for: try again, or take "
                "the full state if the number is of another book",
                reason=Reason.REVISION_NOT_REACHED,
                metadata={"min_revision": revision, "book_revision": now},
            )

    def end(self, error: RankbookError) -> None:
        """Ends every wait, and every later one, with an error."""
        self._end = error
        futures = [future for waiting in self._waiting.values() for future in waiting]
        for future in [*futures, *(future for _, future in self._revisions)]:
            if not future.done():
                future.set_exception(error)

    def changed(self, namespace: str, engine_ids: Iterable[str], since: int) -> None:
        """Wakes whom it concerns; see `registry.Listener`."""
        revision = self._registry.revision
        for wanted, future in self._revisions:
            if wanted <= revision and not future.done():
                future.set_result(True)
        if not self._waiting:
            self._seen.clear()
            return
        engines = self._registry.book(namespace).engines
        for engine_id in engine_ids:
            engine = engines.get(engine_id)
            by_engine = (namespace, "engine", engine_id)
            if engine is None:
                self._seen.pop((namespace, engine_id), None)
                self._wake(by_engine)
                continue
            by_group = (namespace, "group", engine.head.group)
            if by_engine not in self._waiting and by_group not in self._waiting:
                continue
            seen = (engine.state(), engine.head.epoch)
            if self._seen.get((namespace, engine_id)) != seen:
                self._seen[namespace, engine_id] = seen
                self._wake(by_engine)
                self._wake(by_group)

    def _wake(self, subject: _Subject) -> None:
        for future in self._waiting.get(subject, ()):
            if not future.done():
                future.set_result(True)

    def _enter(self) -> asyncio.Future[bool]:
        if self._end is not None:
            raise self._end
        if self._count >= self._max:
            raise Overloaded(
                f"{self._max} calls wait already, the most this server holds: try again later, "
                "ask without a wait, or watch",
                reason=Reason.TOO_MANY_WAITERS,
                metadata={"limit": "waiters", "bound": self._max},
            )
        return asyncio.get_running_loop().create_future()

    async def _wait(self, subject: _Subject, timeout_s: float) -> bool:
        future = self._enter()
        waiting = self._waiting.setdefault(subject, set())
        waiting.add(future)
        try:
            return await self._sleep(future, timeout_s)
        finally:
            waiting.discard(future)
            if not waiting and self._waiting.get(subject) is waiting:
                del self._waiting[subject]

    async def _sleep(self, future: asyncio.Future[bool], timeout_s: float) -> bool:
        self._count += 1
        timer = asyncio.get_running_loop().call_later(max(timeout_s, 0.0), _expire, future)
        try:
            return await future
        finally:
            timer.cancel()
            self._count -= 1


def _expire(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)
