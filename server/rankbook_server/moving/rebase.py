"""An export, checked and put right for the book that takes it in. Pure.

Everything moves as it is: heads, slots, leases, tombstones, seals, epochs. Only
revisions cannot, for they are numbers of another book. The values name four
kinds of them:

    change_revision     head, slot      the last change that readers see
    start_revision      head            the start's first worker
    write_revision      core            the core's last accepted write
    horizon_revision    namespace       the newest dropped tombstone

Zero means "of this write" in the first three. In the new book the last change
of every engine is the import's own write, so it stays or becomes zero; every
change before it, and the start, becomes the revision at which the import
began. So within an engine the order is kept that tells which change was the
last and when it was; each revision is one that the new book has given out, none
above the write that names it; and what is written in the order of the changes
keeps the order of engines. The horizon is where the import began: whoever
watched this book before gets the full state.

What the book had given out before, where it is overwritten, is not given out
again: its epochs are a floor under those that come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from rankbook import v1
from rankbook.errors import RankbookError
from rankbook.limits import check_id, check_namespace
from rankbook_server.core.fold import BookFold
from rankbook_server.core.keys import Key, namespace_key, parse_key, worker_key
from rankbook_server.core.ops import Entry, Op, Put
from rankbook_server.moving.export_file import Export, bad_export

__all__ = ["Content", "check_content", "epoch_floors", "floor_puts", "rebased"]

_VERSION = 1
# Of every stored message; a newer one means something that we do not know.

_Stored = v1.StoredNamespace | v1.StoredEngine | v1.StoredWorker | v1.StoredLease
_KINDS: Mapping[str, type[_Stored]] = {
    "n": v1.StoredNamespace,
    "e": v1.StoredEngine,
    "w": v1.StoredWorker,
    "l": v1.StoredLease,
}


@dataclass(slots=True)
class Content:
    """What an export holds, as a server would read it."""

    entries: Sequence[Entry]
    """Every key."""
    books: Mapping[str, BookFold]
    """The fold of each namespace."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """How many keys there are of each kind, "n", "e", "w" and "l"."""


def check_content(export: Export, name: str) -> Content:
    """Reads every key and value of an export.

    Args:
        export: What was read.
        name: The file, for errors.

    Raises:
        BadRequest: A key is of no kind that is known, or its value is not what
            belongs there, or of a newer version; the message names the line.
    """
    books: dict[str, BookFold] = {}
    counts = dict.fromkeys(_KINDS, 0)
    for number, entry in enumerate(export.entries, 2):
        try:
            key = _checked(entry)
        except ValueError as error:
            words = error.message if isinstance(error, RankbookError) else str(error)
            raise bad_export(name, number, f"cannot be taken in: {words}", key=entry.key) from None
        counts[key.kind] += 1
        book = books.get(key.namespace)
        if book is None:
            book = books[key.namespace] = BookFold(key.namespace, new_id=str)
        book.apply(Put(entry.key, entry.value), entry.revision)
    return Content(export.entries, books, counts)


def _checked(entry: Entry) -> Key:
    try:
        key = parse_key(entry.key)
    except ValueError:
        raise ValueError(
            f"key {entry.key!r} is of no kind that this rankbook knows; import it with the "
            "version that wrote it or a newer one"
        ) from None
    if not key.namespace:
        raise ValueError(f"key {entry.key!r} names no namespace")
    check_namespace(key.namespace)
    if key.kind != "n":
        check_id("key", key.name)
    if key.slot is not None and entry.key != worker_key(key.namespace, key.name, key.slot):
        raise ValueError(f"key {entry.key!r} does not name its slot as a book does")
    kind = _KINDS[key.kind]
    try:
        version = kind.FromString(entry.value).version
    except DecodeError:
        raise ValueError(f"the value of key {entry.key!r} is no {kind.__name__}") from None
    if version != _VERSION:
        raise ValueError(
            f"key {entry.key!r} is of version {version} and this rankbook knows {_VERSION}; "
            "import it with the version that wrote it or a newer one"
        )
    return key


def epoch_floors(entries: Sequence[Entry]) -> dict[str, int]:
    """By namespace, the largest epoch that a book has given out.

    Args:
        entries: All of the book; what cannot be read counts for nothing.
    """
    floors: dict[str, int] = {}
    for entry in entries:
        try:
            key = parse_key(entry.key)
            if key.kind == "n":
                epoch = v1.StoredNamespace.FromString(entry.value).epoch_floor
            elif key.kind == "e":
                epoch = v1.StoredEngine.FromString(entry.value).last_epoch
            else:
                epoch = 0
        except (ValueError, DecodeError):
            continue
        floors[key.namespace] = max(floors.get(key.namespace, 0), epoch)
    return floors


def rebased(content: Content, began: int, floors: Mapping[str, int]) -> list[Put]:
    """The writes that make the content another book's, in the order of its changes.

    Args:
        content: What is taken in.
        began: A revision that the new book has given out, below the writes'.
        floors: By namespace, the largest epoch that was given out there before.
    """
    puts: list[tuple[int, Put]] = []
    told: set[str] = set()
    for entry in content.entries:
        key = parse_key(entry.key)
        engine = content.books[key.namespace].engines.get(key.name)
        floor = floors.get(key.namespace, 0)
        revision, stored = entry.revision, _KINDS[key.kind].FromString(entry.value)
        if isinstance(stored, v1.StoredNamespace):
            told.add(key.namespace)
            stored.epoch_floor = max(stored.epoch_floor, floor)
            stored.horizon_revision = began
        elif isinstance(stored, v1.StoredEngine):
            assert engine is not None
            revision = stored.change_revision or entry.revision
            stored.change_revision = 0 if revision == engine.revision else began
            stored.start_revision = began if stored.epoch else 0
            stored.last_epoch = max(stored.last_epoch, floor)
            if stored.HasField("core"):
                stored.core.write_revision = 0
        elif isinstance(stored, v1.StoredWorker):
            assert engine is not None
            revision = stored.change_revision or entry.revision
            stored.change_revision = 0 if revision == engine.revision else began
        puts.append((revision, Put(entry.key, stored.SerializeToString())))
    # Python's sort is stable: what changed at once stays in order of its keys.
    puts.sort(key=lambda one: one[0])
    return [
        *(_facts(name, floors[name], began) for name in sorted(floors) if name not in told),
        *(put for _, put in puts),
    ]


def _facts(namespace: str, floor: int, horizon: int) -> Put:
    facts = v1.StoredNamespace(version=1, epoch_floor=floor, horizon_revision=horizon)
    return Put(namespace_key(namespace), facts.SerializeToString())


def floor_puts(floors: Mapping[str, int]) -> list[Op]:
    """The writes that keep the floors of a book whose heads are about to go.

    Its horizon goes with them: it is written anew by `rebased`.
    """
    return [_facts(name, floors[name], 0) for name in sorted(floors)]
