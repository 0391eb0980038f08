"""The rows of an embedded book: what a commit, a snapshot and a checkpoint do in SQL."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rankbook_server.core.ops import Commit, Compare, Entry, Put, Txn
from rankbook_server.store.base import Snapshot

__all__ = ["Written", "copy_log", "read_all", "read_revision", "turn_log", "write"]

_PAGE_BYTES = 4_096

_OP_BYTES = 2 * _PAGE_BYTES
# An operation changes a page of the table and one of its index.

_PUT = (
    "INSERT INTO kv VALUES (?, ?, ?) ON CONFLICT (key)"
    " DO UPDATE SET value = excluded.value, revision = excluded.revision"
)
_DELETE = "DELETE FROM kv WHERE key = ?"
_MOD_REVISION = "SELECT revision FROM kv WHERE key = ?"
_REVISION = "SELECT value FROM meta WHERE key = 'revision'"
_SET_REVISION = "UPDATE meta SET value = ? WHERE key = 'revision'"
_ENTRIES = "SELECT key, value, revision FROM kv ORDER BY key"
_CHECKPOINT = "PRAGMA wal_checkpoint(PASSIVE)"
_SAME_REVISION = "UPDATE meta SET value = value WHERE key = 'revision'"


@dataclass(frozen=True, slots=True)
class Written:
    """What a commit did."""

    results: list[int | None]
    """As `Store.commit` returns them."""
    commits: list[Commit]
    """Those that happened."""
    pages: int
    """Pages it added to the log; an estimate, rather too many."""


def write(
    connection: sqlite3.Connection,
    revision: int,
    txns: Sequence[Txn],
    any_live: Callable[[Sequence[str]], bool],
) -> Written:
    """Writes a batch in one transaction of SQLite; all of it or nothing."""
    results: list[int | None] = []
    commits: list[Commit] = []
    size = 0
    cursor = connection.cursor()
    execute = cursor.execute
    execute("BEGIN IMMEDIATE")
    try:
        for txn in txns:
            moved = txn.base is not None and revision > txn.base
            if (
                moved
                or not all(_holds(cursor, compare) for compare in txn.compares)
                or (txn.away and any_live(txn.away))
            ):
                results.append(None)
                continue
            revision += 1
            for op in txn.ops:
                if isinstance(op, Put):
                    execute(_PUT, (op.key, op.value, revision))
                    size += len(op.value)
                else:
                    execute(_DELETE, (op.key,))
            size += _OP_BYTES * len(txn.ops)
            commits.append(Commit(revision, txn.ops))
            results.append(revision)
        if commits:
            # In the same transaction, so that it never goes back: the keys
            # alone do not tell it once the last of them was deleted.
            execute(_SET_REVISION, (revision,))
            execute("COMMIT")
    finally:
        if connection.in_transaction:
            _rollback(connection)
    return Written(results, commits, size // _PAGE_BYTES + 2)


def read_all(connection: sqlite3.Connection) -> Snapshot:
    """Returns every key at one revision."""
    connection.execute("BEGIN")
    try:
        revision = read_revision(connection)
        entries = tuple(Entry(*row) for row in connection.execute(_ENTRIES))
    finally:
        _rollback(connection)
    return Snapshot(revision, entries)


def read_revision(connection: sqlite3.Connection) -> int:
    """Returns the last revision the book gave out."""
    return int(connection.execute(_REVISION).fetchone()[0])


def _holds(cursor: sqlite3.Cursor, compare: Compare) -> bool:
    row = cursor.execute(_MOD_REVISION, (compare.key,)).fetchone()
    return (row[0] if row else 0) == compare.revision


def _rollback(connection: sqlite3.Connection) -> None:
    # Where this fails SQLite has done it by itself, or the next look reconnects.
    with contextlib.suppress(sqlite3.Error):
        connection.execute("ROLLBACK")


def copy_log(connection: sqlite3.Connection) -> None:
    """Copies the log into the file, as far as it has come; commits may go on."""
    connection.execute(_CHECKPOINT).fetchall()


def turn_log(connection: sqlite3.Connection) -> int:
    """Copies what is left, then starts the log over; returns the pages in it."""
    _, pages, copied = connection.execute(_CHECKPOINT).fetchone()
    if pages != copied:
        # Somebody reads an older state and needs the log as it is.
        return int(pages)
    connection.execute(_SAME_REVISION)
    return 1
