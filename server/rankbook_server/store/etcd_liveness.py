"""Which leases live, on etcd: a key each, on an etcd lease of the same time.

A heartbeat writes nothing: it keeps the etcd lease alive, and that takes no
revision. Where a lease's time changes its key moves to another etcd lease.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import TypeVar

from rankbook import v1
from rankbook.errors import Reason, Unavailable
from rankbook_server.core.ops import MAX_TXN_OPS
from rankbook_server.etcd import etcd_pb2 as pb
from rankbook_server.etcd.client import EtcdClient
from rankbook_server.etcd.failures import EtcdError, What
from rankbook_server.etcd.keeping import LeaseKeeper
from rankbook_server.etcd.watching import Change, EtcdWatch
from rankbook_server.store.base import Presence
from rankbook_server.store.etcd_keys import BookKeys, lease_number

__all__ = ["MIN_TTL_S", "EtcdLiveness"]

MIN_TTL_S = 2
"""Shortest life of an etcd lease, in seconds: its own minimum by default."""

_AT_ONCE = 64
# Requests in flight of one call.

_ROUNDS = 4
# A lease can only vanish between two requests if it ran out or was dropped.

Item = TypeVar("Item")


class EtcdLiveness:
    """The liveness of a book on etcd. For one event loop."""

    def __init__(
        self, client: EtcdClient, keeper: LeaseKeeper, keys: BookKeys, book_id: str
    ) -> None:
        """Knows of no lease yet."""
        self._client = client
        self._keeper = keeper
        self._keys = keys
        self._book_id = book_id
        # Lease id to the etcd lease that its key was last seen to hang on. A
        # hint: what it says is found out again where it proves wrong. The
        # server follows `presence`, which takes out those that went.
        self._known: dict[str, int] = {}

    async def touch(self, leases: Mapping[str, float]) -> frozenset[str]:
        """See `Liveness.touch`."""
        for lease_id, ttl_s in leases.items():
            if not 0 < ttl_s < math.inf:
                raise ValueError(f"lease {lease_id} cannot live for {ttl_s} s")
        wanted = {lease_id: max(MIN_TTL_S, math.ceil(ttl_s)) for lease_id, ttl_s in leases.items()}
        numbers = {
            lease_id: lease_number(self._book_id, lease_id, ttl_s)
            for lease_id, ttl_s in wanted.items()
        }
        known = [lease_id for lease_id in wanted if self._known.get(lease_id) == numbers[lease_id]]
        ttls = await self._keeper.renew([numbers[lease_id] for lease_id in known])
        for lease_id in known:
            if ttls[numbers[lease_id]] > 0:
                del wanted[lease_id]
        made: set[str] = set()
        for _ in range(_ROUNDS):
            if not wanted:
                return frozenset(made)
            wanted = await self._place(wanted, numbers, made)
        raise Unavailable(
            f"{len(wanted)} leases end in etcd as soon as they are made: look at its load",
            reason=Reason.STORE_UNAVAILABLE,
        )

    async def drop(self, lease_ids: Iterable[str]) -> None:
        """See `Liveness.drop`."""
        names = list(dict.fromkeys(lease_ids))
        for lease_id in names:
            self._known.pop(lease_id, None)
        orphans: list[int] = []
        for chunk in _chunks(names):
            request = pb.TxnRequest(
                success=[
                    pb.RequestOp(
                        delete_range=pb.DeleteRangeRequest(
                            key=self._keys.lease(lease_id), prev_kv=True
                        )
                    )
                    for lease_id in chunk
                ]
            )
            answer = await self._client.txn(request, twice=True)
            orphans += [
                kv.lease
                for response in answer.responses
                for kv in response.delete_range.prev_kvs
                if kv.lease
            ]
        await _each(orphans, self._client.revoke)

    async def live(self) -> Mapping[str, float]:
        """See `Liveness.live`."""
        left: dict[str, float] = {}

        async def ask(kv: pb.KeyValue) -> None:
            ttl_s = await self._client.time_to_live(kv.lease)
            if ttl_s > 0:
                left[self._keys.lease_id(kv.key)] = float(ttl_s)

        answer = await self._read()
        await _each([kv for kv in answer.kvs if kv.lease], ask)
        return left

    async def presence(self, stop: asyncio.Future[None]) -> AsyncIterator[Presence]:
        """See `SharedStore.presence`; ends once `stop` is done."""
        while not stop.done():
            answer = await self._read()
            self._known = {self._keys.lease_id(kv.key): kv.lease for kv in answer.kvs}
            yield Presence(frozenset(self._known), anew=True)
            watch = EtcdWatch(
                self._client, self._keys.live, self._keys.live_end, answer.header.revision
            )
            try:
                await watch.start()
                while (changes := await watch.read(stop)) is not None:
                    yield self._fold(changes)
            except EtcdError as error:
                if stop.done():
                    return
                if error.what is not What.COMPACTED:
                    raise
            finally:
                watch.cancel()

    def _fold(self, changes: Iterable[Change]) -> Presence:
        came: set[str] = set()
        went: set[str] = set()
        for change in changes:
            for event in change.events:
                lease_id = self._keys.lease_id(event.kv.key)
                if event.kind == pb.Event.PUT:
                    self._known[lease_id] = event.kv.lease
                    came.add(lease_id)
                    went.discard(lease_id)
                else:
                    self._known.pop(lease_id, None)
                    went.add(lease_id)
                    came.discard(lease_id)
        return Presence(frozenset(came), frozenset(went))

    async def _read(self) -> pb.RangeResponse:
        return await self._client.range(
            pb.RangeRequest(key=self._keys.live, range_end=self._keys.live_end, keys_only=True)
        )

    async def _place(
        self, wanted: Mapping[str, int], numbers: Mapping[str, int], made: set[str]
    ) -> dict[str, int]:
        """Makes etcd leases and hangs keys on them; returns those it did not get done,
        and adds to `made` those that had no key."""
        there: list[str] = []

        async def grant(lease_id: str) -> None:
            if not await self._client.grant(numbers[lease_id], wanted[lease_id]):
                there.append(lease_id)

        await _each(list(wanted), grant)
        ttls = await self._keeper.renew([numbers[lease_id] for lease_id in there])
        again = {lease_id for lease_id in there if ttls[numbers[lease_id]] <= 0}
        # Another server may have done the same: then there is nothing to write.
        hung = await self._hung([name for name in there if name not in again], numbers)
        for lease_id in hung:
            self._known[lease_id] = numbers[lease_id]
        bare = [name for name in wanted if name not in again and name not in hung]
        for chunk in _chunks(bare):
            if not await self._put(chunk, wanted, numbers, made):
                again.update(chunk)
        return {lease_id: wanted[lease_id] for lease_id in again}

    async def _hung(self, lease_ids: Collection[str], numbers: Mapping[str, int]) -> set[str]:
        """Which of the leases have their key on their etcd lease."""
        hung: set[str] = set()
        for chunk in _chunks(lease_ids):
            reads = [
                pb.RequestOp(range=pb.RangeRequest(key=self._keys.lease(name), keys_only=True))
                for name in chunk
            ]
            answer = await self._client.txn(pb.TxnRequest(success=reads), twice=True)
            for lease_id, response in zip(chunk, answer.responses, strict=True):
                if any(kv.lease == numbers[lease_id] for kv in response.range.kvs):
                    hung.add(lease_id)
        return hung

    async def _put(
        self,
        chunk: Collection[str],
        wanted: Mapping[str, int],
        numbers: Mapping[str, int],
        made: set[str],
    ) -> bool:
        """Hangs keys on etcd leases; False where one of these is gone."""
        request = pb.TxnRequest(
            success=[
                pb.RequestOp(
                    put=pb.PutRequest(
                        key=self._keys.lease(lease_id),
                        value=v1.StoredLiveness(
                            version=1, ttl_millis=wanted[lease_id] * 1000
                        ).SerializeToString(),
                        lease=numbers[lease_id],
                        prev_kv=True,
                    )
                )
                for lease_id in chunk
            ]
        )
        try:
            answer = await self._client.txn(request, twice=True)
        except EtcdError as error:
            if error.what is What.LEASE_MISSING:
                return False
            raise
        left = []
        for lease_id, response in zip(chunk, answer.responses, strict=True):
            self._known[lease_id] = numbers[lease_id]
            before = response.put.prev_kv.lease
            if not response.put.HasField("prev_kv"):
                made.add(lease_id)
            if before and before != numbers[lease_id]:
                left.append(before)
        # Only now that no key hangs on them any more.
        await _each(left, self._client.revoke)
        return True


def _chunks(names: Iterable[str]) -> Iterable[list[str]]:
    rest = iter(names)
    while chunk := list(islice(rest, MAX_TXN_OPS)):
        yield chunk


async def _each(items: Collection[Item], call: Callable[[Item], Awaitable[None]]) -> None:
    """Makes a call for each item, some at a time; the first error ends the others."""
    rest = iter(items)

    async def work() -> None:
        for item in rest:
            await call(item)

    workers = [asyncio.ensure_future(work()) for _ in range(min(_AT_ONCE, len(items)))]
    try:
        await asyncio.gather(*workers)
    except BaseException:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        raise
