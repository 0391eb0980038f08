"""`etcd:`, a store that several servers share.

The book's revision is etcd's: the one that last wrote the book's head, which
every commit does. See `etcd_keys` for the layout.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError

from rankbook import v1
from rankbook.errors import LimitExceeded, Reason, Unavailable
from rankbook_server.core.ops import MAX_TXN_OPS, Commit, Delete, Entry, Op, Put, Txn
from rankbook_server.etcd import etcd_pb2 as pb
from rankbook_server.etcd.client import EtcdClient, Login
from rankbook_server.etcd.failures import EtcdError, What
from rankbook_server.etcd.keeping import LeaseKeeper
from rankbook_server.etcd.watching import Change, EtcdWatch
from rankbook_server.store.base import Compacted, Presence, Snapshot, check_txns, not_open
from rankbook_server.store.etcd_keys import BookKeys
from rankbook_server.store.etcd_liveness import EtcdLiveness
from rankbook_server.store.etcd_url import EtcdAddress
from rankbook_server.store.etcd_words import EtcdWords

__all__ = ["LAYOUT_VERSION", "EtcdStore"]

LAYOUT_VERSION = 1
"""Version of the layout, in the book's head."""

_REQUEST_BYTES = 1_468_006
# 1.4 MiB, of the 1.5 MiB that etcd takes by default.

_OP_BYTES = 72
# What an operation or a compare takes besides the prefix, its key and its value.

_PAGE_KEYS = 64
_PAGE_BYTES = 4 * 1024 * 1024
# The first page of a snapshot, and what the later ones are to come near to: large
# enough to be few, small enough to come within a request's deadline.

_ATTEMPTS = 5
# At reading while history is compacted again and again.

_CLOSE_S = 1.0
# For watches to come to the last commit, when the store is closed.


class _Follower:
    """A watch, as `close` has to know of it."""

    def __init__(self, seen: int) -> None:
        self.seen = seen
        self.waits = True


class _Life:
    """An open book: everything that ends with `close`."""

    def __init__(
        self, client: EtcdClient, keys: BookKeys, head: v1.StoredBook, created: int
    ) -> None:
        self.client = client
        self.head = head
        self.value = head.SerializeToString()
        """What the head's key holds all this life; another value means another book."""
        self.created = created
        """Revision that created the head."""
        self.keeper = LeaseKeeper(client)
        self.liveness = EtcdLiveness(client, self.keeper, keys, head.book_id)
        self.words = EtcdWords(client, self.keeper, keys, head.book_id)
        self.stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last = created
        """The last revision that was committed here."""
        self.seen = created
        """The last revision of the book that was ever seen, whoever committed it."""
        self.followers: set[_Follower] = set()
        self.moved = asyncio.Event()
        self.given_up: set[asyncio.Task[list[int | None]]] = set()
        """Commits whose caller went away."""
        self.replaced = False
        self.went_back = False
        """etcd holds an older state of this book than it did: a backup was restored."""


class EtcdStore:
    """A book on etcd, as a server sees it; see `SharedStore`."""

    def __init__(
        self,
        address: EtcdAddress,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        unix: Callable[[], float],
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Connects to nothing yet.

        Args:
            address: Where.
            clock: Seconds on a clock that never goes back.
            new_id: Makes the id of a new book.
            unix: Seconds since 1970, for when a book was created.
            timeout_s: Deadline of a request to one member, by default the client's.
        """
        self._address = address
        self._clock = clock
        self._new_id = new_id
        self._unix = unix
        self._timeout = {} if timeout_s is None else {"timeout_s": timeout_s}
        self._keys = BookKeys(address.prefix)
        self._book_id = ""
        self._life: _Life | None = None
        self._opening = asyncio.Lock()

    @property
    def book_id(self) -> str:
        """See `Store`."""
        return self._book_id

    @property
    def description(self) -> str:
        """See `Store`."""
        return str(self._address)

    @property
    def most_bytes(self) -> int:
        """See `SharedStore`."""
        parts = 2 * MAX_TXN_OPS + 4
        return _REQUEST_BYTES - parts * (_OP_BYTES + len(self._address.prefix))

    async def open(self) -> None:
        """See `Store`. A book that took the place of the one that was open is opened."""
        async with self._opening:
            before = self._life
            if before is not None:
                if not before.replaced:
                    return
                self._life = None
                await _end(before)
            client = EtcdClient(
                self._address.endpoints,
                clock=self._clock,
                credentials=_credentials(self._address),
                login=_login(self._address),
                **self._timeout,
            )
            try:
                head, created = await self._read_head(client)
                if before is not None and before.went_back and head == before.head:
                    head, created = await self._rename(client, head)
            except BaseException:
                await client.close()
                raise
            self._life = _Life(client, self._keys, head, created)
            self._book_id = head.book_id

    async def snapshot(self) -> Snapshot:
        """See `Store`."""
        life = self._opened()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._read_all(life)
            except EtcdError as error:
                # Compacted between two pages: the revision of the first is gone.
                if error.what is not What.COMPACTED or attempt == _ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def last_revision(self) -> int:
        """See `SharedStore`."""
        life = self._opened()
        before = life.seen
        last = await self._read_last(life)
        if last < before:
            # Whoever has read this book has newer numbers than it has now.
            life.replaced = life.went_back = True
            raise self._gone(life)
        return last

    async def commit(self, txns: Sequence[Txn]) -> list[int | None]:
        """See `Store`. Each transaction is one of etcd's, one after the other."""
        life = self._opened()
        check_txns(txns)
        self._check_bytes(txns)
        if not txns:
            return []
        # What others gave up still happens before what is asked for now.
        if life.given_up:
            await asyncio.wait(life.given_up)
        committing = asyncio.ensure_future(self._commit(life, txns))
        try:
            return await asyncio.shield(committing)
        except asyncio.CancelledError:
            if not committing.done():
                life.given_up.add(committing)
                committing.add_done_callback(life.given_up.discard)
                committing.add_done_callback(_heard)
            raise

    def watch(self, from_revision: int) -> AsyncIterator[Commit]:
        """See `Store`."""
        return self._follow(self._opened(), from_revision)

    async def touch(self, leases: Mapping[str, float]) -> frozenset[str]:
        """See `Liveness`."""
        return await self._opened().liveness.touch(leases)

    async def drop(self, lease_ids: Iterable[str]) -> None:
        """See `Liveness`."""
        await self._opened().liveness.drop(lease_ids)

    async def live(self) -> Mapping[str, float]:
        """See `Liveness`."""
        return await self._opened().liveness.live()

    def presence(self) -> AsyncIterator[Presence]:
        """See `SharedStore`."""
        life = self._opened()
        return life.liveness.presence(life.stop)

    async def announce(self, server_id: str, word: bytes, ttl_s: float) -> bool:
        """See `SharedStore`."""
        return await self._opened().words.announce(server_id, word, ttl_s)

    async def announced(self) -> Mapping[str, bytes]:
        """See `SharedStore`."""
        return await self._opened().words.announced()

    async def withdraw(self, server_id: str) -> None:
        """See `SharedStore`."""
        await self._opened().words.withdraw(server_id)

    async def close(self) -> None:
        """See `Store`."""
        if self._life is None:
            return
        life, self._life = self._life, None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while any(one.waits and one.seen < life.last for one in life.followers):
                    life.moved.clear()
                    await life.moved.wait()
                if life.given_up:
                    await asyncio.wait(life.given_up)
        await _end(life)

    def _opened(self) -> _Life:
        if self._life is None:
            raise not_open(self.description)
        if self._life.replaced:
            raise self._gone(self._life)
        return self._life

    # The head.

    async def _read_head(self, client: EtcdClient) -> tuple[v1.StoredBook, int]:
        """Reads the book's head, and makes one where there is none."""
        answer = await client.range(pb.RangeRequest(key=self._keys.head))
        kvs = answer.kvs
        if not kvs:
            head = v1.StoredBook(version=LAYOUT_VERSION, book_id=self._new_id())
            head.create_time.FromMilliseconds(int(self._unix() * 1000))
            made = await client.txn(
                pb.TxnRequest(
                    compare=[_created(self._keys.head, 0)],
                    success=[
                        # What a book leaves whose head alone was deleted.
                        pb.RequestOp(
                            delete_range=pb.DeleteRangeRequest(
                                key=self._keys.entries, range_end=self._keys.end
                            )
                        ),
                        pb.RequestOp(
                            put=pb.PutRequest(key=self._keys.head, value=head.SerializeToString())
                        ),
                    ],
                    failure=[pb.RequestOp(range=pb.RangeRequest(key=self._keys.head))],
                ),
                twice=True,
            )
            if made.succeeded:
                return head, made.header.revision
            kvs = made.responses[0].range.kvs
        (kv,) = kvs
        try:
            head = v1.StoredBook.FromString(kv.value)
        except DecodeError:
            head = v1.StoredBook()
        if not head.version or (head.version <= LAYOUT_VERSION and not head.book_id):
            raise self._refused(
                f"the key {self._keys.head.decode()} is no book of ours",
                "give --store another prefix",
            )
        if head.version > LAYOUT_VERSION:
            raise self._refused(
                f"the book is of version {head.version} and this rankbookd knows up to "
                f"{LAYOUT_VERSION}",
                "run the rankbookd that wrote it or a newer one, or give this one another --store",
            )
        return head, kv.create_revision

    async def _rename(self, client: EtcdClient, head: v1.StoredBook) -> tuple[v1.StoredBook, int]:
        """Gives a book that went back an id of its own, so that every client takes
        it anew, and nobody compares its revisions with those that are gone."""
        renamed = v1.StoredBook()
        renamed.CopyFrom(head)
        renamed.book_id = self._new_id()
        await client.txn(
            pb.TxnRequest(
                compare=[_holds(self._keys.head, head.SerializeToString())],
                success=[
                    pb.RequestOp(
                        put=pb.PutRequest(key=self._keys.head, value=renamed.SerializeToString())
                    )
                ],
            ),
            twice=True,
        )
        # Another server may have been faster; what is there now counts.
        return await self._read_head(client)

    async def _read_last(self, life: _Life, at: int = 0) -> int:
        """The revision of the last commit, up to a revision or, for zero, now."""
        answer = await life.client.range(pb.RangeRequest(key=self._keys.head, revision=at))
        return self._check_head(life, answer.kvs).mod_revision

    def _check_head(self, life: _Life, kvs: Sequence[pb.KeyValue]) -> pb.KeyValue:
        if not kvs or kvs[0].value != life.value:
            life.replaced = True
            raise self._gone(life)
        life.seen = max(life.seen, kvs[0].mod_revision)
        return kvs[0]

    def _gone(self, life: _Life) -> Unavailable:
        return Unavailable(
            f"the book {life.head.book_id} at {self.description} was deleted, replaced by another "
            f"one, or set back by a restored backup, since it was opened: open the store again, or "
            f"restart this server, for the one that is there now; clients publish anew",
            reason=Reason.STORE_UNAVAILABLE,
            metadata={"store": self.description, "book_id": life.head.book_id},
        )

    def _refused(self, what: str, then: str) -> Unavailable:
        return Unavailable(
            f"{self.description}: {what}: {then}",
            reason=Reason.STORE_UNAVAILABLE,
            metadata={"store": self.description},
        )

    # Reading.

    async def _read_all(self, life: _Life) -> Snapshot:
        keys = self._keys
        entries: list[Entry] = []
        key, pinned, limit, last = keys.head, 0, _PAGE_KEYS, 0
        while True:
            answer = await life.client.range(
                pb.RangeRequest(key=key, range_end=keys.end, revision=pinned, limit=limit)
            )
            if not pinned:
                pinned = answer.header.revision
                last = self._check_head(life, answer.kvs[:1]).mod_revision
            for kv in answer.kvs:
                name = keys.name(kv.key)
                if name is not None:
                    entries.append(Entry(name, kv.value, kv.mod_revision))
                    # Only one that was written by hand is newer than the head.
                    last = max(last, kv.mod_revision)
            if not answer.more:
                return Snapshot(last, tuple(entries))
            key = answer.kvs[-1].key + b"\0"
            limit = max(1, min(4 * limit, limit * _PAGE_BYTES // (answer.ByteSize() or 1)))

    async def _follow(self, life: _Life, from_revision: int) -> AsyncIterator[Commit]:
        # Nothing of this book happened before it was created.
        seen = from_etcd = max(from_revision, life.created)
        follower = _Follower(seen)
        life.followers.add(follower)
        try:
            while not life.stop.done():
                watch = EtcdWatch(life.client, self._keys.head, self._keys.end, from_etcd)
                try:
                    await watch.start()
                    while (changes := await watch.read(life.stop)) is not None:
                        for change in changes:
                            if change.revision <= seen:
                                continue
                            ops = self._ops(life, change)
                            follower.seen = seen = change.revision
                            if ops is None:
                                continue
                            follower.waits = False
                            life.moved.set()
                            yield Commit(change.revision, ops)
                            follower.waits = True
                        life.moved.set()
                except EtcdError as error:
                    if life.stop.done():
                        return
                    if error.what is not What.COMPACTED:
                        raise
                    floor = error.compact_revision
                finally:
                    watch.cancel()
                if life.stop.done():
                    return
                # All that was forgotten may be other people's: etcd's history
                # goes on while the book rests. Then nothing was missed.
                try:
                    last = await self._read_last(life, floor)
                except EtcdError as error:
                    if error.what is not What.COMPACTED:
                        raise
                    # Compacted again; the next watch says up to where.
                    continue
                if last > seen:
                    raise Compacted(max(from_revision, seen), last)
                from_etcd = floor
        finally:
            life.followers.discard(follower)
            life.moved.set()

    def _ops(self, life: _Life, change: Change) -> tuple[Op, ...] | None:
        """What a revision did; None where that is nothing of the book's."""
        ops: list[Op] = []
        ours = False
        for event in change.events:
            kv, put = event.kv, event.kind == pb.Event.PUT
            if kv.key == self._keys.head:
                self._check_head(life, [kv] if put else [])
                ours = True
                continue
            name = self._keys.name(kv.key)
            if name is not None:
                ops.append(Put(name, kv.value) if put else Delete(name))
        return tuple(ops) if ours or ops else None

    # Writing.

    def _check_bytes(self, txns: Sequence[Txn]) -> None:
        for txn in txns:
            size = sum(len(op.value) for op in txn.ops if isinstance(op, Put))
            keys = [part.key for part in (*txn.ops, *txn.compares)]
            size += sum(len(key.encode()) for key in (*keys, *txn.away))
            if size > self.most_bytes:
                raise LimitExceeded(
                    f"a transaction has {size} bytes of keys and values and etcd takes "
                    f"{self.most_bytes}: split it, or publish less in one record",
                    metadata={
                        "limit": "bytes of a transaction",
                        "value": size,
                        "bound": self.most_bytes,
                    },
                )

    async def _commit(self, life: _Life, txns: Sequence[Txn]) -> list[int | None]:
        results: list[int | None] = []
        for txn in txns:
            try:
                answer = await life.client.txn(self._request(life, txn))
            except EtcdError as error:
                if error.what is What.TOO_LARGE and not results:
                    # It will be no smaller the next time.
                    raise LimitExceeded(error.message, metadata=error.metadata) from error
                raise _half_done(error, len(results), len(txns), any(results)) from error
            if answer.succeeded:
                life.last = max(life.last, answer.header.revision)
                life.seen = max(life.seen, life.last)
                results.append(answer.header.revision)
            else:
                self._check_head(life, answer.responses[0].range.kvs)
                results.append(None)
        return results

    def _request(self, life: _Life, txn: Txn) -> pb.TxnRequest:
        keys = self._keys
        compares = [_holds(keys.head, life.value)]
        if txn.base is not None:
            compares.append(
                pb.Compare(
                    key=keys.head,
                    target=pb.Compare.MOD,
                    result=pb.Compare.LESS,
                    mod_revision=txn.base + 1,
                )
            )
        compares += [
            pb.Compare(
                key=keys.entry(compare.key),
                target=pb.Compare.MOD,
                result=pb.Compare.EQUAL,
                mod_revision=compare.revision,
            )
            for compare in txn.compares
        ]
        compares += [_created(keys.lease(lease_id), 0) for lease_id in dict.fromkeys(txn.away)]
        # etcd takes one operation a key: the last one counts.
        last = {op.key: op for op in txn.ops}
        success = [
            pb.RequestOp(put=pb.PutRequest(key=keys.entry(op.key), value=op.value))
            if isinstance(op, Put)
            else pb.RequestOp(delete_range=pb.DeleteRangeRequest(key=keys.entry(op.key)))
            for op in last.values()
        ]
        success.append(pb.RequestOp(put=pb.PutRequest(key=keys.head, value=life.value)))
        # Tells a compare that failed from a book that is another.
        failure = [pb.RequestOp(range=pb.RangeRequest(key=keys.head))]
        return pb.TxnRequest(compare=compares, success=success, failure=failure)


def _holds(key: bytes, value: bytes) -> pb.Compare:
    """That a key has a value."""
    return pb.Compare(key=key, target=pb.Compare.VALUE, result=pb.Compare.EQUAL, value=value)


def _created(key: bytes, revision: int) -> pb.Compare:
    """That a key was created at a revision; zero for an absent one."""
    return pb.Compare(
        key=key,
        target=pb.Compare.CREATE,
        result=pb.Compare.EQUAL,
        create_revision=revision,
    )


def _half_done(error: EtcdError, done: int, count: int, written: bool) -> Unavailable:
    """Says which part of a batch may be kept, after an error."""
    if not error.unknown and not written:
        return error
    parts = []
    if done:
        parts.append(f"{done} of the batch's {count} transactions were decided before")
    if error.unknown:
        parts.append("whether the one it was asked for was written is not known")
    return Unavailable(
        f"{error.message}; {', and '.join(parts)}",
        reason=error.reason,
        metadata={**error.metadata, "outcome": "unknown"},
    )


def _heard(committing: asyncio.Task[list[int | None]]) -> None:
    """Takes note of how a commit ended that nobody waits for."""
    if not committing.cancelled():
        committing.exception()


async def _end(life: _Life) -> None:
    if not life.stop.done():
        life.stop.set_result(None)
    await life.keeper.close()
    await life.client.close()


def _credentials(address: EtcdAddress) -> grpc.ChannelCredentials | None:
    if not address.tls:
        return None

    def read(path: Path | None) -> bytes | None:
        if path is None:
            return None
        try:
            return path.read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from error

    return grpc.ssl_channel_credentials(read(address.ca), read(address.key), read(address.cert))


def _login(address: EtcdAddress) -> Login | None:
    if not address.user:
        return None

    def password() -> str:
        if address.password_file is None:
            return address.password
        try:
            return address.password_file.read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(address.password_file, error) from None

    return Login(address.user, password)


def _unreadable(path: Path, error: Exception) -> Unavailable:
    said = error.strerror if isinstance(error, OSError) else "it is no text"
    return Unavailable(
        f"{path}, which the store's URL names, cannot be read ({said}): "
        f"put it there and let this process's user read it",
        reason=Reason.STORE_UNAVAILABLE,
        metadata={"path": path, "cause": said},
    )
