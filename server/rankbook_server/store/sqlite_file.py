"""The file of an embedded book: its lock, its schema, and what its errors mean.

All of it blocks, and none of it knows an event loop.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rankbook.errors import Reason, Unavailable

__all__ = [
    "APPLICATION_ID",
    "SCHEMA_VERSION",
    "FileLock",
    "OpenedBook",
    "connect",
    "explain",
    "open_book",
    "refused",
]

APPLICATION_ID = 0x726B626B
"""`rkbk` in the header of every book, by which `file` and people can tell one."""

SCHEMA_VERSION = 1
"""Version of the tables, in the header's user_version."""

_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_VERSION_AT = 60
_APPLICATION_AT = 68
# Offsets from SQLite's description of its file format; they never change.

_BUSY_S = 0.25
# No other server writes here (the lock), so only a person with a tool can be in
# the way, and a commit may hold up the event loop for this long at most.

_CACHE_KIB = 65_536
# 64 MiB: a book of 10,000 workers stays in the cache.

# `kv` has a rowid, so that a record of one or two KiB stays whole inside a page
# of 4 KiB. In a table without one SQLite moves what is over 1,002 bytes to a
# page of its own, which made a commit slower (24 against 21 us) and the log a
# third longer.
_SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID",
    "CREATE TABLE kv (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL)",
)


class FileLock:
    """One process's hold on a path, by an flock on `PATH.lock` that dies with it.

    The lock file stays when the lock goes: removing it would let two processes
    hold two files of one name.
    """

    def __init__(self, path: Path) -> None:
        """Locks.

        Args:
            path: What to lock; its folder must exist.

        Raises:
            Unavailable: Another process has it, or the lock file may not be made.
        """
        self.path = path.with_name(path.name + ".lock")
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise explain(error, path, "its lock file cannot be opened") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise explain(error, path, "its file system gives no lock") from error
            raise Unavailable(
                f"the book {path} is in use by another rankbookd"
                f"{f', process {holder}' if holder else ''}: one book has one server; "
                f"stop that one, or give this one a --store of its own",
                reason=Reason.STORE_UNAVAILABLE,
                metadata={"store": path, "pid": holder},
            ) from error
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            # The name of the holder is a courtesy; on a full disk the lock holds
            # all the same.
            pass

    def release(self) -> None:
        """Lets go; once."""
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class OpenedBook:
    """A book that was opened."""

    connection: sqlite3.Connection
    """To it, in WAL mode."""
    book_id: str
    """Its id."""
    revision: int
    """The last revision it gave out."""
    identity: tuple[int, int]
    """Device and inode of the file."""


def open_book(path: Path, *, full: bool, new_id: Callable[[], str]) -> OpenedBook:
    """Opens a book, and creates it where there is no file or an empty one.

    Args:
        path: The file; locked by the caller.
        full: Commits wait for the disk.
        new_id: Makes the id of a new book.

    Raises:
        Unavailable: The file is no book, is of a newer version, is damaged, or
            may not be read or written.
    """
    fresh = _check_header(path)
    try:
        if fresh:
            _create(path, new_id())
        connection = connect(path, full=full)
    except sqlite3.Error as error:
        raise explain(error, path) from error
    try:
        # The header may lie behind what the log says; this is what counts.
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        _check_version(path, version)
        meta = dict(connection.execute("SELECT key, value FROM meta"))
        stat = path.stat()
        return OpenedBook(
            connection, str(meta["book_id"]), int(meta["revision"]), (stat.st_dev, stat.st_ino)
        )
    except KeyError as error:
        connection.close()
        raise refused(path, f"is a book without its {error.args[0]}", _RESTORE) from error
    except (sqlite3.Error, OSError) as error:
        connection.close()
        raise explain(error, path) from error
    except Unavailable:
        connection.close()
        raise


def connect(path: Path, *, full: bool) -> sqlite3.Connection:
    """Connects to a book that is there.

    The connection may be used from any thread, by one at a time. It leaves
    checkpoints to its owner.

    Raises:
        sqlite3.Error: It cannot be.
    """
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, timeout=_BUSY_S
    )
    try:
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise sqlite3.OperationalError("this file system cannot hold a write-ahead log")
        connection.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _check_header(path: Path) -> bool:
    """Looks at a file without touching it; True where a book is to be made.

    Through SQLite even a look would leave its own files beside a stranger's.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            header = os.pread(fd, _HEADER_BYTES, 0)
        finally:
            os.close(fd)
    except OSError as error:
        raise explain(error, path) from error
    # A journal is what a server leaves that was killed while it made the book;
    # SQLite takes back what it had written. A book in use never has one.
    if not header or path.with_name(path.name + "-journal").exists():
        return True
    other = "give --store the path of a book, or one where there is no file yet"
    if not header.startswith(_MAGIC):
        raise refused(path, "is not a book but some other file", other)
    if int.from_bytes(header[_APPLICATION_AT : _APPLICATION_AT + 4], "big") != APPLICATION_ID:
        raise refused(path, "is not a book but another program's SQLite database", other)
    _check_version(path, int.from_bytes(header[_VERSION_AT : _VERSION_AT + 4], "big"))
    return False


def _check_version(path: Path, version: int) -> None:
    if version > SCHEMA_VERSION:
        raise refused(
            path,
            f"is of version {version} and this rankbookd knows up to {SCHEMA_VERSION}",
            "run the rankbookd that wrote it or a newer one, or give this one another --store",
        )


def _create(path: Path, book_id: str) -> None:
    """Makes a book in an empty file, all of it or nothing."""
    # Still with a rollback journal, which takes back a half-made book.
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("BEGIN EXCLUSIVE")
        if connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            return
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.executemany(
            "INSERT INTO meta VALUES (?, ?)", [("book_id", book_id), ("revision", 0)]
        )
        connection.execute("COMMIT")
    finally:
        connection.close()


_RESTORE = "move it away, or bring back a copy of it, and start again; clients publish anew"


def refused(path: Path, what: str, then: str) -> Unavailable:
    """Builds the error of a file that is not as it must be: what it is, what to do."""
    return Unavailable(
        f"{path} {what}: {then}",
        reason=Reason.STORE_UNAVAILABLE,
        metadata={"store": path},
    )


_PERMIT = "give this process's user the right to read and write the file and its folder"
_FREE = "free some space; writes are refused until then and nothing that was answered is lost"
_LOOK = "look at the disk and its mount; the server goes on by itself once it works"

_ADVICE = {
    sqlite3.SQLITE_FULL: ("has no room left on its disk", _FREE),
    sqlite3.SQLITE_IOERR: ("cannot be read or written", _LOOK),
    sqlite3.SQLITE_READONLY: ("may not be written", _PERMIT),
    sqlite3.SQLITE_CANTOPEN: ("cannot be opened", _PERMIT),
    sqlite3.SQLITE_PERM: ("may not be opened", _PERMIT),
    sqlite3.SQLITE_CORRUPT: ("is damaged", _RESTORE),
    sqlite3.SQLITE_NOTADB: ("is damaged", _RESTORE),
    sqlite3.SQLITE_BUSY: ("is locked by another program", "close the tool that has it open"),
    sqlite3.SQLITE_LOCKED: ("is locked by another program", "close the tool that has it open"),
    sqlite3.SQLITE_TOOBIG: ("refuses a value this large", "publish less in one record"),
}
_PUT_BACK = "put it back; or restart rankbookd for a new book, in which clients publish anew"
_OS_ADVICE = {
    errno.ENOSPC: ("has no room left on its disk", _FREE),
    errno.EDQUOT: ("has no room left in its quota", _FREE),
    errno.EACCES: ("may not be opened", _PERMIT),
    errno.EPERM: ("may not be opened", _PERMIT),
    errno.EROFS: ("lies on a file system that is mounted read-only", _PERMIT),
    errno.EISDIR: ("is a folder", "give --store the path of a file in it"),
    errno.ENOTDIR: ("is inside something that is a file", "give --store another path"),
    errno.ENOENT: ("was moved or deleted", _PUT_BACK),
}


def explain(error: sqlite3.Error | OSError, path: Path, what: str = "") -> Unavailable:
    """Says what an error of the medium means, and what to do.

    Args:
        error: What SQLite or the system said.
        path: The book.
        what: What did not work, where that is more than the error tells.
    """
    if isinstance(error, OSError):
        happened, then = _OS_ADVICE.get(error.errno or 0, ("cannot be used", _LOOK))
        said = error.strerror or str(error)
    else:
        # The low byte is the kind; the rest says where inside SQLite.
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        happened, then = _ADVICE.get(code, ("cannot be used", _LOOK))
        name = getattr(error, "sqlite_errorname", "")
        said = f"{error}, {name}" if name else str(error)
    if what:
        said = f"{what}: {said}"
    return Unavailable(
        f"the book {path} {happened} ({said}): {then}",
        reason=Reason.STORE_UNAVAILABLE,
        metadata={"store": path, "cause": said},
    )
