"""The one that commits: takes what waits, as waves, and answers.

Over a shared store a wave is one transaction, which is refused if anything was
committed since the state that it was decided on: then the writer waits until
that has arrived, and decides the same commands again. What it refuses a client,
or answers without writing, it says only once the store has confirmed that the
state was the newest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import structlog

from rankbook.errors import RankbookError, Reason, Unavailable
from rankbook_server.books import Books
from rankbook_server.clock import Clock
from rankbook_server.core.decision import Instant
from rankbook_server.core.ops import MAX_TXN_OPS, Op, Txn
from rankbook_server.lease_keys import LeaseKeys
from rankbook_server.liveness import LivenessNews
from rankbook_server.replica import Replica
from rankbook_server.store.base import SharedStore, Store, is_shared
from rankbook_server.wave import Command, Outcome, Wave

__all__ = ["Owner", "Writer"]

_WAVE_OPS = 65_536
_WAVE_BYTES = 16 * 1024 * 1024
# Of a wave over an embedded store, which takes transactions one by one.
_PATIENCE_S = 10.0
# So long a command is decided anew because other servers were faster.


class Owner(Protocol):
    """Who a writer writes for."""

    available: bool

    def now(self) -> Instant:
        """The instant to decide with."""

    def lost(self, trouble: str) -> None:
        """The store takes no writes."""

    def away(self) -> Unavailable:
        """The error of a write while it does not."""


class Writer:
    """Commands, one wave after another. For one event loop."""

    def __init__(
        self,
        owner: Owner,
        store: Store,
        clock: Clock,
        books: Books,
        replica: Replica,
        news: LivenessNews,
        keys: LeaseKeys,
        contain: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Starts nothing.

        Args:
            owner: Told when the store takes no writes.
            store: Where the book is kept.
            clock: Time.
            books: What is decided on.
            replica: Takes in what was committed.
            news: Tells the store of leases that writes rest on.
            keys: Hears of leases that live after all.
            contain: Turns a fault inside a decision into a RankbookError.
        """
        self._owner = owner
        self._store = store
        self._shared: SharedStore | None = store if is_shared(store) else None
        self._clock = clock
        self._books = books
        self._replica = replica
        self._news = news
        self._keys = keys
        self._contain = contain
        self._log = structlog.get_logger("rankbook.registry")
        self._audit = structlog.get_logger("rankbook.audit")
        self._wake: asyncio.Future[None] | None = None
        self._busy: asyncio.Future[None] | None = None
        self.queue: deque[Command] = deque()
        """What waits."""
        self.refusals = 0
        """Times in a row that a shared store did not take a write."""

    @property
    def is_busy(self) -> bool:
        """Whether a wave is under way."""
        return self._busy is not None

    def enqueue(self, command: Command) -> None:
        """Queues a command."""
        self.queue.append(command)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def finish(self, timeout_s: float) -> None:
        """Waits for the wave that is under way."""
        if self._busy is not None:
            await asyncio.wait([self._busy], timeout=timeout_s)

    async def run(self) -> None:
        """Commits what comes, without end."""
        loop = asyncio.get_running_loop()
        while True:
            if not self.queue:
                self._wake = loop.create_future()
                await self._wake
            await self._run_wave()

    async def _run_wave(self) -> None:
        if not self._owner.available:
            while self.queue:
                self.queue.popleft().fail(self._owner.away())
            return
        shared = self._shared
        wave = Wave(
            self._books,
            self._owner.now(),
            self._contain,
            revision=self._replica.revision,
            most_ops=_WAVE_OPS if shared is None else MAX_TXN_OPS,
            most_bytes=_WAVE_BYTES if shared is None else shared.most_bytes,
        )
        wave.take(self.queue)
        self._busy = asyncio.get_running_loop().create_future()
        try:
            if shared is None:
                await self._keep(wave)
            else:
                await self._keep_shared(wave, shared)
        finally:
            self._busy.set_result(None)
            self._busy = None

    async def _keep(self, wave: Wave) -> None:
        """Commits a wave where nobody else writes."""
        writes = wave.writes
        if writes:
            expected = list(
                range(self._replica.revision + 1, self._replica.revision + 1 + len(writes))
            )
            try:
                revisions = await self._store.commit([outcome.txn_to_keep for outcome in writes])
                if revisions != expected:
                    raise Unavailable(
                        "another server writes into this book: the book is read anew, try again",
                        reason=Reason.STORE_UNAVAILABLE,
                        metadata={"store": self._store.description},
                    )
            except Unavailable as error:
                self._log.error("a commit failed", error=error.message)
                for outcome in wave.outcomes:
                    outcome.command.fail(error)
                self._owner.lost(error.message)
                return
            self._replica.fold(writes, expected)
        self._settle(wave)

    async def _keep_shared(self, wave: Wave, store: SharedStore) -> None:
        """Commits a wave, if nobody has written since what it was decided on."""
        base, writes = self._replica.revision, wave.writes
        relied = self._relied_on(wave)
        try:
            # Whoever writes is told that his lease has its full time.
            if relied:
                await self._news.confirm(relied)
            if writes:
                (revision,) = await store.commit([_merged(writes, base)])
                self.refusals = 0
            elif all(outcome.command.step is not None for outcome in wave.outcomes):
                revision = base
            else:
                revision = base if await store.last_revision() <= base else None
            if revision is None:
                await self._step_back(wave, store, base)
                return
        except Unavailable as error:
            # It may have been kept or not: decided anew, a repeat finds its first reply.
            self._log.warning("the store did not take a write", error=error.message)
            wave.give_back(self.queue)
            self.refusals += 1
            if self.refusals > 1:
                self._owner.lost(error.message)
            return
        except RankbookError as error:
            # A decision that no transaction of this store holds; the others come again.
            for outcome in writes:
                outcome.command.fail(error)
                if outcome.command.step is not None:
                    self._log.error(
                        "upkeep cannot be written",
                        upkeep=outcome.command.name,
                        namespace=outcome.command.namespace,
                        error=error.message,
                    )
            wave.give_back(self.queue)
            return
        if writes:
            self._replica.fold(writes, [revision] * len(writes), own=True)
        self._settle(wave)

    def _relied_on(self, wave: Wave) -> dict[str, float]:
        """Leases that decisions of a wave found living, with their times to live."""
        found: dict[str, float] = {}
        now_s = self._clock.mono()
        for outcome in wave.outcomes:
            if outcome.decision is not None:
                for lease_id in outcome.decision.leases:
                    entry = outcome.book.leases.get(lease_id)
                    if entry is not None and entry.lives(now_s):
                        found[lease_id] = entry.ttl_s
        return found

    async def _step_back(self, wave: Wave, store: SharedStore, base: int) -> None:
        """Waits until what got in the way of a wave is in the books."""
        now_s = self._clock.mono()
        for outcome in wave.outcomes:
            if outcome.command.since_s + _PATIENCE_S < now_s and outcome.command.step is None:
                outcome.command.fail(self._overtaken())
        last = await store.last_revision()
        if last > base:
            await self._replica.reach(last)
        else:
            # Then it was a lease that was taken for dead and lives.
            self._keys.alive(await store.live(), self._owner.now())
        wave.give_back(self.queue)

    def _settle(self, wave: Wave) -> None:
        for outcome in wave.outcomes:
            if outcome.decision is not None:
                for note in outcome.decision.notes:
                    self._audit.info(note.event, namespace=outcome.command.namespace, **note.fields)
            outcome.settle()
            if outcome.command.step is not None and outcome.decision is not None:
                # The rest takes its turn behind the calls that wait.
                self.enqueue(outcome.command)

    def _overtaken(self) -> Unavailable:
        return Unavailable(
            f"other servers wrote to the book {self._store.description} all the time for "
            f"{_PATIENCE_S:g} s: try again",
            reason=Reason.STORE_UNAVAILABLE,
            metadata={"store": self._store.description},
        )


def _merged(writes: list[Outcome], base: int) -> Txn:
    """A wave as one transaction on what it was decided on."""
    ops: list[Op] = []
    expired: list[str] = []
    for outcome in writes:
        assert outcome.decision is not None
        ops += outcome.txn_to_keep.ops
        expired += outcome.decision.expired
    return Txn(tuple(ops), away=tuple(expired), base=base)
