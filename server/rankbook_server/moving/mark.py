"""The mark of an import that has begun and not ended."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError

from rankbook import v1
from rankbook.convert import timestamp
from rankbook.errors import Reason, Unavailable
from rankbook_server.core.keys import IMPORT_KEY
from rankbook_server.core.ops import Entry, Put

__all__ = ["check_whole", "find_mark", "mark_put", "mark_words"]


def mark_put(from_book_id: str, unix_s: float) -> Put:
    """The operation that begins an import."""
    mark = v1.StoredImport(version=1, from_book_id=from_book_id, start_time=timestamp(unix_s))
    return Put(IMPORT_KEY, mark.SerializeToString())


def find_mark(entries: Iterable[Entry]) -> v1.StoredImport | None:
    """The mark among a book's entries; None in a whole book."""
    for entry in entries:
        if entry.key == IMPORT_KEY:
            try:
                return v1.StoredImport.FromString(entry.value)
            except DecodeError:
                return v1.StoredImport()
    return None


def mark_words(mark: v1.StoredImport) -> str:
    """What a mark says, for errors."""
    return (
        f"the import of book {mark.from_book_id or 'of no name'}, which began at "
        f"{mark.start_time.ToJsonString()}"
    )


def check_whole(entries: Iterable[Entry], store: str) -> None:
    """Refuses to read half a book.

    Args:
        entries: All there are.
        store: The store, for the error.

    Raises:
        Unavailable: An import is under way, or was broken off.
    """
    mark = find_mark(entries)
    if mark is not None:
        raise Unavailable(
            f"the book {store} is not whole: {mark_words(mark)}, has not ended. It is served once "
            "it has; where it was broken off, run `rankbook import --overwrite` to its end",
            reason=Reason.STORE_UNAVAILABLE,
            metadata={"store": store, "from_book_id": mark.from_book_id},
        )
