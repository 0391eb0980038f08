"""What the command line calls: `rankbook export` and `rankbook import`.

The client's package does not import the server's. It finds these two by the
entry points `rankbook.moving`, where the server is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import BinaryIO

from rankbook.errors import BadRequest, NotFound, Reason, Unavailable
from rankbook_server.clock import Clock, SystemClock
from rankbook_server.moving.book import Imported, export_book, import_book
from rankbook_server.moving.export_file import Export, export_lines, read_export
from rankbook_server.moving.rebase import Content, check_content
from rankbook_server.store import MemoryStore, SqliteStore, Store, open_store

__all__ = ["export_to", "import_from"]


def export_to(url: str, target: BinaryIO) -> dict[str, object]:
    """Writes a book to a file.

    Nothing is written to it before all of the book was read.

    Args:
        url: The store's URL.
        target: Where the lines go.

    Returns:
        What was exported, for people and scripts.

    Raises:
        BadRequest: The URL means no store that can be read here.
        NotFound: There is no book, or nothing in it.
        Refused: It holds half an import.
        Unavailable: A server has the book, or the store is away.
    """
    clock = SystemClock()
    export = asyncio.run(_export(url, clock))
    for line in export_lines(export):
        target.write(line)
    # Of a file that was just read from a store, so nothing can be wrong with it.
    content = check_content(export, url)
    return {
        "book_id": export.book_id,
        "revision": export.revision,
        "store": export.store,
        "exported_at": export.exported_at,
        **_counts(content),
    }


def import_from(url: str, source: BinaryIO, name: str, *, overwrite: bool) -> dict[str, object]:
    """Brings a book from a file into a store.

    The file is read and checked whole before the store is opened.

    Args:
        url: The store's URL.
        source: The file.
        name: Its name, for errors.
        overwrite: Takes out what is in the store.

    Returns:
        What was imported, for people and scripts.

    Raises:
        BadRequest: The URL means no store that can be written here, or the file
            is refused.
        LimitExceeded: The store does not take a value so large.
        Refused: There is something in the store, or somebody writes there.
        Unavailable: A server has the book, or the store is away.
    """
    clock = SystemClock()
    store = _store(url, clock, "import into")
    export = read_export(source, name)
    content = check_content(export, name)
    imported, book_id = asyncio.run(_import(store, export, content, overwrite, clock))
    return {
        "book_id": book_id,
        "revision": imported.revision,
        "store": store.description,
        "from_book_id": export.book_id,
        "from_revision": export.revision,
        "from_store": export.store,
        "exported_at": export.exported_at,
        **_counts(content),
        "removed": imported.removed,
    }


async def _export(url: str, clock: Clock) -> Export:
    store = _store(url, clock, "export from")
    if isinstance(store, SqliteStore) and not store.path.exists():
        raise NotFound(
            f"there is no book at {store.path}",
            reason=Reason.BOOK_NOT_FOUND,
            metadata={"store": store.description},
        )
    async with _opened(store, "export from"):
        return await export_book(store, clock.unix())


async def _import(
    store: Store, export: Export, content: Content, overwrite: bool, clock: Clock
) -> tuple[Imported, str]:
    async with _opened(store, "import into"):
        imported = await import_book(
            store, export, content, overwrite=overwrite, unix_s=clock.unix()
        )
        return imported, store.book_id


def _store(url: str, clock: Clock, doing: str) -> Store:
    store = open_store(url, clock.mono, clock.new_id)
    if isinstance(store, MemoryStore):
        raise BadRequest(
            f"{url} is inside a server, and nothing else can {doing} it: name a store that is "
            "kept, such as sqlite:PATH",
            metadata={"field": "store", "value": url, "rule": "a store that is kept"},
        )
    return store


@contextlib.asynccontextmanager
async def _opened(store: Store, doing: str) -> AsyncIterator[None]:
    try:
        await store.open()
    except Unavailable as error:
        if "pid" not in error.metadata:
            raise
        raise Unavailable(
            f"cannot {doing} {store.description}: process {error.metadata['pid']} has it open, a "
            "rankbookd or another export or import; stop it first, workers that come back within "
            "their leases' time to live after its next start lose nothing",
            reason=error.reason,
            metadata=error.metadata,
        ) from error
    try:
        yield
    finally:
        await store.close()


def _counts(content: Content) -> dict[str, object]:
    counts = content.counts
    return {
        "entries": len(content.entries),
        "namespaces": len(content.books),
        "engines": counts["e"],
        "slots": counts["w"],
        "leases": counts["l"],
    }
