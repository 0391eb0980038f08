"""What each server tells the others, on etcd: a key each, on an etcd lease.

To repeat a word keeps the lease alive and writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rankbook.errors import Reason, Unavailable
from rankbook_server.etcd import etcd_pb2 as pb
from rankbook_server.etcd.client import EtcdClient
from rankbook_server.etcd.failures import EtcdError, What
from rankbook_server.etcd.keeping import LeaseKeeper
from rankbook_server.store.etcd_keys import BookKeys, lease_number
from rankbook_server.store.etcd_liveness import MIN_TTL_S

__all__ = ["EtcdWords"]

_ROUNDS = 4
# A lease can only vanish between two requests if it ran out or was revoked, and a
# key changes only where an earlier request of ours comes late.


class EtcdWords:
    """The words of a book's servers. For one event loop."""

    def __init__(
        self, client: EtcdClient, keeper: LeaseKeeper, keys: BookKeys, book_id: str
    ) -> None:
        """Knows of no word yet."""
        self._client = client
        self._keeper = keeper
        self._keys = keys
        self._book_id = book_id
        # Of each server that speaks here: the word that its key holds, the etcd
        # lease it hangs on, and the revision of its last put.
        self._said: dict[str, bytes] = {}
        self._numbers: dict[str, int] = {}
        self._revisions: dict[str, int] = {}

    async def announce(self, server_id: str, word: bytes, ttl_s: float) -> bool:
        """See `SharedStore.announce`."""
        if not 0 < ttl_s < math.inf:
            raise ValueError(f"a word cannot be kept for {ttl_s} s")
        seconds = max(MIN_TTL_S, math.ceil(ttl_s))
        # No lease has a slash in its name.
        number = lease_number(self._book_id, f"server/{server_id}", seconds)
        kept = there = (await self._keeper.renew([number]))[number] > 0
        if kept and self._numbers.get(server_id) == number and self._said.get(server_id) == word:
            return True
        # From here on it is not known what the key holds, until a put is answered.
        self._said.pop(server_id, None)
        self._numbers[server_id] = number
        for _ in range(_ROUNDS):
            # Where there is one already, an answer of ours was lost.
            if not there and not await self._client.grant(number, seconds):
                await self._keeper.renew([number])
            if await self._put(server_id, word, number):
                self._said[server_id] = word
                return kept
            there = False
        raise Unavailable(
            "a key of this server's ends in etcd as soon as it is made: look at its load",
            reason=Reason.STORE_UNAVAILABLE,
        )

    async def announced(self) -> Mapping[str, bytes]:
        """See `SharedStore.announced`."""
        answer = await self._client.range(
            pb.RangeRequest(key=self._keys.servers, range_end=self._keys.servers_end)
        )
        return {self._keys.server_id(kv.key): kv.value for kv in answer.kvs}

    async def withdraw(self, server_id: str) -> None:
        """See `SharedStore.withdraw`."""
        self._said.pop(server_id, None)
        self._revisions.pop(server_id, None)
        number = self._numbers.pop(server_id, None)
        if number is not None:
            # Its key goes with it.
            await self._client.revoke(number)

    async def _put(self, server_id: str, word: bytes, number: int) -> bool:
        """Hangs a word on an etcd lease; False where that is gone.

        Only in place of the word before, so that a request which comes late
        cannot put an old word over a newer one.
        """
        key = self._keys.server(server_id)
        for _ in range(_ROUNDS):
            request = pb.TxnRequest(
                compare=[
                    pb.Compare(
                        key=key,
                        target=pb.Compare.MOD,
                        result=pb.Compare.EQUAL,
                        mod_revision=self._revisions.get(server_id, 0),
                    )
                ],
                success=[
                    pb.RequestOp(put=pb.PutRequest(key=key, value=word, lease=number)),
                ],
                failure=[pb.RequestOp(range=pb.RangeRequest(key=key))],
            )
            try:
                answer = await self._client.txn(request, twice=True)
            except EtcdError as error:
                if error.what is What.LEASE_MISSING:
                    return False
                raise
            if answer.succeeded:
                self._revisions[server_id] = answer.header.revision
                return True
            kvs = answer.responses[0].range.kvs
            self._revisions[server_id] = kvs[0].mod_revision if kvs else 0
            if kvs and kvs[0].value == word and kvs[0].lease == number:
                # Put by a request of ours whose answer was lost.
                return True
        return False
