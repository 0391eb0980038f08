"""Out of a store and into another: what an export reads and an import writes.

An import is many transactions, since one holds at most 126 operations. The first
puts the mark, the last takes it away. Every one asks that nothing was committed
since the one before, so that two imports, or an import and a server, cannot mix:
whoever comes second is refused, and the mark keeps servers from reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rankbook.convert import timestamp
from rankbook.errors import LimitExceeded, NotFound, Reason, Refused
from rankbook_server.core.keys import IMPORT_KEY, namespace_key
from rankbook_server.core.ops import MAX_TXN_OPS, Delete, Entry, Op, Put, Txn
from rankbook_server.moving.export_file import Export
from rankbook_server.moving.mark import find_mark, mark_put, mark_words
from rankbook_server.moving.rebase import Content, epoch_floors, floor_puts, rebased
from rankbook_server.store.base import Store, is_shared

__all__ = ["Imported", "export_book", "import_book"]

_TXN_BYTES = 4 * 1024 * 1024
# Of a store that sets no bound of its own.
_HEADROOM = 64
# What a value may grow by: its revisions may be larger numbers here.


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did."""

    revision: int
    """The book's revision after it."""
    written: int
    """Keys that were written."""
    removed: int
    """Keys of before that were taken out."""


async def export_book(store: Store, unix_s: float) -> Export:
    """Reads a book at one revision.

    Args:
        store: An open store.
        unix_s: Now, in seconds since 1970.

    Raises:
        NotFound: There is nothing in it.
        Refused: It holds half an import.
        Unavailable: The store is away.
    """
    snapshot = await store.snapshot()
    mark = find_mark(snapshot.entries)
    if mark is not None:
        raise Refused(
            f"{mark_words(mark)}, has not ended in {store.description}: there is no whole book to "
            "export; run `rankbook import --overwrite` there to its end",
            reason=Reason.IMPORT_UNFINISHED,
            metadata={"store": store.description, "from_book_id": mark.from_book_id},
        )
    if not snapshot.entries:
        raise NotFound(
            f"the book {store.description} is empty: there is nothing to export; is it the right "
            "store?",
            reason=Reason.BOOK_NOT_FOUND,
            metadata={"store": store.description, "book_id": store.book_id},
        )
    return Export(
        book_id=store.book_id,
        revision=snapshot.revision,
        store=store.description,
        exported_at=timestamp(unix_s).ToJsonString(),
        entries=snapshot.entries,
    )


async def import_book(
    store: Store, export: Export, content: Content, *, overwrite: bool, unix_s: float
) -> Imported:
    """Writes a book into a store.

    Args:
        store: An open store.
        export: Where the content comes from.
        content: What is written; all of it was checked.
        overwrite: Takes out what is there. Epochs that were given out there
            are not given out again.
        unix_s: Now, in seconds since 1970.

    Raises:
        LimitExceeded: The store does not take a value so large; nothing was
            written.
        Refused: There is something in the store, or an import that has not
            ended; or somebody else writes there.
        Unavailable: The store went away. What was written is half a book,
            which no server reads; the import begins anew with `overwrite`.
    """
    snapshot = await store.snapshot()
    if not overwrite:
        _check_empty(store, snapshot.entries)
    most = _most_bytes(store)
    floors = epoch_floors(snapshot.entries)
    _check_sizes(store, rebased(content, snapshot.revision, floors), most)
    writer = _Writer(store, snapshot.revision, most)
    await writer.write([mark_put(export.book_id, unix_s)])
    await writer.write(floor_puts(floors))
    kept = {IMPORT_KEY, *map(namespace_key, floors)}
    removed = [Delete(entry.key) for entry in snapshot.entries if entry.key not in kept]
    await writer.write(removed)
    puts = rebased(content, writer.revision, floors)
    await writer.write(puts)
    await writer.write([Delete(IMPORT_KEY)])
    return Imported(writer.revision, len(puts), len(removed))


def _check_empty(store: Store, entries: Iterable[Entry]) -> None:
    there = list(entries)
    mark = find_mark(there)
    metadata = {"store": store.description, "book_id": store.book_id, "entries": len(there)}
    if mark is not None:
        raise Refused(
            f"{mark_words(mark)}, has not ended in {store.description}: wait for it; where it was "
            "broken off, import again with --overwrite, which begins anew",
            reason=Reason.IMPORT_UNFINISHED,
            metadata={**metadata, "from_book_id": mark.from_book_id},
        )
    if there:
        raise Refused(
            f"there is a book with {len(there)} keys in {store.description}: import into an empty "
            "one, or give --overwrite to take out what is there",
            reason=Reason.BOOK_NOT_EMPTY,
            metadata=metadata,
        )


def _most_bytes(store: Store) -> int:
    return store.most_bytes if is_shared(store) else _TXN_BYTES


def _check_sizes(store: Store, puts: Iterable[Put], most: int) -> None:
    if not is_shared(store):
        return
    for put in puts:
        if (size := _size(put) + _HEADROOM) > most:
            raise LimitExceeded(
                f"key {put.key} has {size} bytes and {store.description} takes {most}: raise its "
                "bound, or take that engine out first",
                metadata={"limit": "bytes of a transaction", "value": size, "bound": most},
            )


def _size(op: Op) -> int:
    return len(op.key) + (len(op.value) if isinstance(op, Put) else 0)


class _Writer:
    """Writes operations, each transaction right after the one before."""

    def __init__(self, store: Store, revision: int, most_bytes: int) -> None:
        self._store = store
        self._most = most_bytes
        self.revision = revision

    async def write(self, ops: Iterable[Op]) -> None:
        for group in self._groups(ops):
            (revision,) = await self._store.commit([Txn(tuple(group), base=self.revision)])
            if revision is None:
                raise Refused(
                    f"somebody else writes to {self._store.description}, a server or another "
                    "import: stop it; where this import had begun, import again with --overwrite",
                    reason=Reason.BOOK_NOT_EMPTY,
                    metadata={"store": self._store.description, "base": self.revision},
                )
            self.revision = revision

    def _groups(self, ops: Iterable[Op]) -> Iterator[list[Op]]:
        group: list[Op] = []
        size = 0
        for op in ops:
            if group and (len(group) == MAX_TXN_OPS or size + _size(op) > self._most):
                yield group
                group, size = [], 0
            group.append(op)
            size += _size(op)
        if group:
            yield group
