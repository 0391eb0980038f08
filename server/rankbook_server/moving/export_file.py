"""The file of an export: JSON lines, from a header to a digest.

    {"rankbook_export": 1, "book_id": ..., "revision": ..., "store": ...,
     "exported_at": ..., "entries": N}                          one line
    {"key": ..., "revision": ..., "value": BASE64}              N lines, by key
    {"sha256": ...}                                             one line

A value is the stored message's own bytes, not its JSON: bytes keep the fields
that this version does not know, and digests over a record's bytes stay true.
The digest is SHA-256 of every line before it, with its line end, so a file that
was cut, or changed in one character, is refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from rankbook.errors import BadRequest, Reason
from rankbook_server.core.ops import Entry

__all__ = ["FORMAT", "Export", "bad_export", "export_lines", "read_export"]

FORMAT = 1
"""Version of the file."""
_MAX_LINE_BYTES = 64 * 1024 * 1024
# The largest value is the head of the largest grid, with its seal: some 10 MiB as base64.
_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Export:
    """A book as it was at one revision."""

    book_id: str
    """The book."""
    revision: int
    """Its last revision."""
    store: str
    """Where it lay, without secrets."""
    exported_at: str
    """When it was read: RFC 3339, UTC."""
    entries: Sequence[Entry]
    """Every key, in order of the key's UTF-8 bytes."""


def export_lines(export: Export) -> Iterator[bytes]:
    """The lines of a file, each with its end."""
    digest = hashlib.sha256()
    header = {
        "rankbook_export": FORMAT,
        "book_id": export.book_id,
        "revision": export.revision,
        "store": export.store,
        "exported_at": export.exported_at,
        "entries": len(export.entries),
    }
    line = _line(header)
    digest.update(line)
    yield line
    for entry in export.entries:
        value = base64.b64encode(entry.value).decode()
        line = _line({"key": entry.key, "revision": entry.revision, "value": value})
        digest.update(line)
        yield line
    yield _line({"sha256": digest.hexdigest()})


def _line(value: dict[str, object]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def bad_export(name: str, line: int, what: str, **values: object) -> BadRequest:
    """Builds the error of a file that is refused.

    Args:
        name: The file.
        line: The line, from 1; zero is the file as a whole.
        what: What is wrong with it, and what to do.
        values: Further values for the metadata.
    """
    where = f"{name} line {line}" if line else name
    return BadRequest(
        f"{where} {what}",
        reason=Reason.INVALID_EXPORT,
        metadata={"file": name, **({"line": line} if line else {}), **values},
    )


def read_export(source: BinaryIO, name: str) -> Export:
    """Reads a file whole and checks its form, its order and its digest.

    Args:
        source: The file.
        name: Its name, for errors.

    Raises:
        BadRequest: It is no export, of a newer version, damaged or cut; the
            message names the line.
    """
    digest = hashlib.sha256()
    header, count = _read_header(_next(source, name, 1, digest), name)
    entries: list[Entry] = []
    last = b""
    for number in range(2, count + 2):
        entry = _read_entry(_next(source, name, number, digest), name, number)
        key = entry.key.encode()
        if key <= last:
            raise bad_export(name, number, f"holds key {entry.key!r} again, or out of its order")
        last = key
        if entry.revision > header.revision:
            raise bad_export(
                name,
                number,
                f"is of revision {entry.revision}, above the book's {header.revision}",
            )
        entries.append(entry)
    expected = digest.hexdigest()
    number = count + 2
    members = _members(_next(source, name, number, None), name, number, ("sha256",))
    if members["sha256"] != expected:
        raise bad_export(
            name,
            number,
            f"says sha256 {members['sha256']} and what comes before has {expected}: the file was "
            "changed; export again",
            sha256=expected,
        )
    if source.read(1):
        raise bad_export(name, number + 1, "comes after the end of the export: export again")
    return Export(header.book_id, header.revision, header.store, header.exported_at, entries)


def _next(source: BinaryIO, name: str, number: int, digest: Any) -> bytes:
    line = source.readline(_MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        if number == 1:
            raise _no_export(name)
        if len(line) == _MAX_LINE_BYTES:
            raise bad_export(name, number, f"is longer than {_MAX_LINE_BYTES} bytes")
        raise bad_export(
            name, number, "is missing or cut: the file does not reach its end; export again"
        )
    if digest is not None:
        digest.update(line)
    return line


def _read_header(line: bytes, name: str) -> tuple[Export, int]:
    try:
        members = json.loads(line)
        version = members["rankbook_export"]
    except (ValueError, RecursionError, TypeError, LookupError):
        raise _no_export(name) from None
    if type(version) is not int or version < 1:
        raise _no_export(name)
    if version > FORMAT:
        raise bad_export(
            name,
            1,
            f"is an export of version {version} and this rankbook reads up to {FORMAT}: import it "
            "with the version that wrote it or a newer one",
            version=version,
            known=FORMAT,
        )
    # A later version may add what only informs.
    texts = {field: members.get(field) for field in ("book_id", "store", "exported_at")}
    numbers = {field: members.get(field) for field in ("revision", "entries")}
    wrong = [field for field, value in texts.items() if not isinstance(value, str)]
    wrong += [field for field, value in numbers.items() if not _is_count(value)]
    if wrong:
        raise bad_export(name, 1, f"has no {wrong[0]} of its kind: export again", field=wrong[0])
    return Export(revision=numbers["revision"], entries=(), **texts), numbers["entries"]


def _read_entry(line: bytes, name: str, number: int) -> Entry:
    members = _members(line, name, number, ("key", "revision", "value"))
    key, revision, value = members["key"], members["revision"], members["value"]
    if not (
        isinstance(key, str)
        and key.isascii()
        and isinstance(value, str)
        and _is_count(revision)
        and revision
    ):
        raise bad_export(name, number, "is no entry: a key, a revision above zero, a value")
    try:
        return Entry(key, base64.b64decode(value, validate=True), revision)
    except (binascii.Error, ValueError):
        raise bad_export(name, number, f"holds a value for key {key!r} that is no base64") from None


def _members(line: bytes, name: str, number: int, wanted: tuple[str, ...]) -> dict[str, Any]:
    try:
        members = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise bad_export(name, number, f"is no JSON ({error}): export again") from None
    if not isinstance(members, dict) or tuple(members) != wanted:
        raise bad_export(
            name, number, f"is not an object of {', '.join(wanted)}, in this order: export again"
        )
    return members


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_INT64


def _no_export(name: str) -> BadRequest:
    return bad_export(
        name, 0, "is no export of a book: its first line is not the header of `rankbook export`"
    )
