"""The file of an export: what was written is what is read, and nothing else is."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Callable

import pytest

from rankbook.errors import BadRequest, Reason
from rankbook_server.core.ops import Entry
from rankbook_server.moving.export_file import Export, export_lines, read_export

BOOK = Export(
    book_id="book-1",
    revision=9,
    store="sqlite:/var/book.db",
    exported_at="2026-01-02T03:04:05Z",
    entries=(
        Entry("default/e/a", b"\x08\x01\xff", 3),
        Entry("default/l/b", b"", 9),
        Entry("default/w/a/0.0.0", b"line\nline", 4),
    ),
)


def text(export: Export = BOOK) -> bytes:
    return b"".join(export_lines(export))


def read(content: bytes) -> Export:
    return read_export(io.BytesIO(content), "f.jsonl")


def resealed(content: bytes, change: Callable[[list[bytes]], None]) -> bytes:
    """A file whose lines were changed, with a digest that fits."""
    lines = content.splitlines(keepends=True)[:-1]
    change(lines)
    body = b"".join(lines)
    return body + json.dumps({"sha256": hashlib.sha256(body).hexdigest()}).encode() + b"\n"


def refused(content: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(content)
    assert caught.value.reason is Reason.INVALID_EXPORT
    assert caught.value.exit_code == 5
    assert caught.value.metadata["file"] == "f.jsonl"
    return caught.value


def test_what_was_written_is_read_again() -> None:
    found = read(text())

    assert (found.book_id, found.revision, found.store) == ("book-1", 9, "sqlite:/var/book.db")
    assert found.exported_at == "2026-01-02T03:04:05Z"
    assert tuple(found.entries) == BOOK.entries


def test_a_file_is_lines_of_json_that_other_tools_read() -> None:
    header, first, *_, last = [json.loads(line) for line in text().splitlines()]

    assert (header["rankbook_export"], header["entries"]) == (1, 3)
    assert (first["key"], base64.b64decode(first["value"])) == ("default/e/a", b"\x08\x01\xff")
    assert last["sha256"] == hashlib.sha256(b"".join(text().splitlines(True)[:-1])).hexdigest()


def test_a_file_that_was_cut_anywhere_is_refused() -> None:
    for left in range(len(text())):
        refused(text()[:left])


def test_a_file_with_any_one_character_changed_is_refused() -> None:
    for at in range(len(text())):
        content = bytearray(text())
        content[at] ^= 0x01
        refused(bytes(content))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"SQLite format 3\x00",
        b"[]\n",
        b"7\n",
        b"null\n",
        b'{"records": []}\n',
        b"{" * 9999,
        b'{"rankbook_export": "1"}\n',
        b'{"rankbook_export": true}\n',
        b'{"rankbook_export": 0}\n',
    ],
)
def test_what_is_no_export_is_called_so(content: bytes) -> None:
    assert "is no export of a book" in refused(content).message


def test_a_newer_version_is_refused_by_its_number() -> None:
    error = refused(text().replace(b'"rankbook_export":1', b'"rankbook_export":2'))

    assert error.metadata["version"] == "2"
    assert error.metadata["known"] == "1"
    assert "version 2" in error.message


def test_what_a_newer_version_adds_to_the_header_only_informs() -> None:
    def add(lines: list[bytes]) -> None:
        lines[0] = lines[0].replace(b"{", b'{"since":"then",', 1)

    assert tuple(read(resealed(text(), add)).entries) == BOOK.entries


@pytest.mark.parametrize(
    ("line", "old", "new", "words"),
    [
        (0, b'"book_id":"book-1"', b'"book_id":7', "no book_id"),
        (0, b'"entries":3', b'"entries":-3', "no entries"),
        (0, b'"revision":9', b'"revision":9.5', "no revision"),
        (1, b'"key"', b'"name"', "not an object of key"),
        (1, b'"revision":3', b'"revision":0', "is no entry"),
        (1, b'"revision":3', b'"revision":true', "is no entry"),
        (1, b'"revision":3', b'"revision":10', "above the book's 9"),
        (1, b'"value":"', b'"value":"*', "no base64"),
        (1, b'"key":"default/e/a"', b'"key":"\\ud800"', "is no entry"),
        (2, b"}", b"", "is no JSON"),
        (2, b"}", b',"more":1}', "not an object of key"),
        (2, b"default/l/b", b"default/e/a", "again, or out of its order"),
        (2, b"default/l/b", b"default/a", "again, or out of its order"),
    ],
)
def test_a_line_that_is_not_as_it_must_be_is_named(
    line: int, old: bytes, new: bytes, words: str
) -> None:
    def change(lines: list[bytes]) -> None:
        assert old in lines[line]
        lines[line] = lines[line].replace(old, new, 1)

    error = refused(resealed(text(), change))

    assert error.metadata["line"] == str(line + 1)
    assert f"line {line + 1} " in error.message
    assert words in error.message


def test_lines_that_are_missing_or_too_many_are_refused() -> None:
    assert refused(resealed(text(), lambda lines: lines.pop())).metadata["line"] == "4"
    assert refused(resealed(text(), lambda lines: lines.append(lines[-1]))).metadata["line"] == "5"
    assert "after the end" in refused(text() + b"\n").message
