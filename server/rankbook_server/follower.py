"""Brings what other servers do to a shared book into this one.

Three things run side by side: a watch of commits, a watch of leases, and a look
at the store once a second. The look notices what a quiet watch does not: a store
that stands still, and a watch that is behind. Whatever breaks is tried again
four times a second, from the last revision that was seen.

While something is broken this server is *cut off*. A short cut is nobody's
business; a longer one makes it refuse writes, and gives every lease a full time
to live from its end (rule 8).
"""

from __future__ import annotations

import asyncio

from rankbook.errors import Unavailable
from rankbook_server.clock import Clock
from rankbook_server.lease_keys import LeaseKeys
from rankbook_server.replica import Replica
from rankbook_server.store.base import Compacted, SharedStore

__all__ = ["Follower"]

_LOOK_S = 1.0
_RETRY_S = 0.25
_LONG_S = 1.0
# Of a cut: another endpoint is found within milliseconds.


class Follower:
    """Follows a shared store for a replica. For one event loop."""

    def __init__(self, store: SharedStore, clock: Clock, replica: Replica, keys: LeaseKeys) -> None:
        """Starts nothing.

        Args:
            store: The store.
            clock: Time.
            replica: Takes commits in.
            keys: Takes news of leases in.
        """
        self._store = store
        self._clock = clock
        self._replica = replica
        self._keys = keys
        self._cut_s: float | None = None
        self._following = False
        self._hearing = False
        self.trouble = ""
        """Why this server is cut off."""

    def start(self) -> list[asyncio.Task[None]]:
        """Starts to follow; the tasks run until they are cancelled."""
        return [
            asyncio.create_task(self._follow(), name="registry-follower"),
            asyncio.create_task(self._hear(), name="registry-lease-keys"),
            asyncio.create_task(self._look(), name="registry-look"),
        ]

    # -------------------------------------------------------------------- cut

    def cut(self, trouble: str) -> None:
        """Notes that the store does not answer."""
        self.trouble = trouble
        if self._cut_s is None:
            self._cut_s = self._clock.mono()

    @property
    def cut_for_s(self) -> float:
        """How long this server has been cut off; zero where it is not."""
        return 0.0 if self._cut_s is None else self._clock.mono() - self._cut_s

    @property
    def is_cut_long(self) -> bool:
        """Whether it is cut off for longer than it takes to find another endpoint."""
        return self.cut_for_s > _LONG_S

    async def catch_up(self) -> None:
        """Makes sure that the store answers and that everything it holds is here.

        Raises:
            Unavailable: It does not, or not yet.
        """
        started_s = self._clock.mono()
        last = await self._store.last_revision()
        if not await self._replica.reach(last, _LONG_S):
            # Where following fails, that is why.
            known = self.trouble if self._cut_s is not None and not self._following else ""
            behind = f"the store is at revision {last}, and only {self._replica.revision} came"
            self.cut(known or behind)
        elif not (self._following and self._hearing):
            self.cut(self.trouble or "the store is not followed yet")
        elif self._clock.mono() - started_s > _LONG_S:
            # It stood still: nobody could say that he lives.
            self._mend()
            self._keys.doubt(self._clock.now())
            return
        else:
            self._mend()
            return
        if self._cut_s is not None:
            raise Unavailable(self.trouble, metadata={"store": self._store.description})

    def _mend(self) -> None:
        if self._cut_s is None:
            return
        was_long, self._cut_s = self.is_cut_long, None
        if was_long:
            self._keys.doubt(self._clock.now())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S if self._cut_s is None else _RETRY_S)
            if not self._replica.is_loaded:
                continue
            try:
                await self.catch_up()
            except Unavailable as error:
                self.cut(error.message)

    # ---------------------------------------------------------------- watches

    async def _follow(self) -> None:
        replica = self._replica
        while True:
            if not replica.is_loaded:
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                if replica.is_torn:
                    await replica.load(self._store)
                self._following = True
                async for commit in self._store.watch(replica.revision):
                    if not replica.fold_commit(commit):
                        await replica.load(self._store)
                        break
            except Compacted:
                await self._load()
            except Unavailable as error:
                self._following = False
                self.cut(error.message)
                await asyncio.sleep(_RETRY_S)

    async def _load(self) -> None:
        try:
            await self._replica.load(self._store)
        except Unavailable as error:
            self._following = False
            self.cut(error.message)
            await asyncio.sleep(_RETRY_S)

    async def _hear(self) -> None:
        while True:
            if not self._replica.is_loaded:
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                async for presence in self._store.presence():
                    if presence.anew and self.is_cut_long:
                        self._keys.doubt(self._clock.now())
                    self._hearing = True
                    self._keys.hear(presence, self._clock.now())
            except Unavailable as error:
                self._hearing = False
                self.cut(error.message)
                await asyncio.sleep(_RETRY_S)
