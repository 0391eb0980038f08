"""`sqlite:PATH`, the embedded store: one file that survives `kill -9`.

How it keeps its promise and its speed:

* With `synchronous=NORMAL` a commit appends to the write-ahead log, in the
  page cache of the system, and waits for no disk: it survives the death of the
  process, not that of the machine. That takes some tens of microseconds, less
  than handing it to a thread and back, so it runs on the event loop.
* With `?sync=full` a commit waits for the disk, so it runs in a thread of its
  own, one after the other; what queues up meanwhile is the next group.
* Checkpoints (copying the log into the file) wait for the disk in either mode.
  They run in a second thread, on a connection of their own, and commits go on
  meanwhile. Only their last step, which turns the log back to its start, holds
  off commits; those wait without holding up the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rankbook_server.core.ops import Commit, Txn
from rankbook_server.store.base import Snapshot, check_txns, not_open
from rankbook_server.store.history import MAX_HISTORY_BYTES, MAX_HISTORY_COMMITS, History
from rankbook_server.store.liveness import LivenessTable
from rankbook_server.store.sqlite_file import FileLock, connect, explain, open_book, refused
from rankbook_server.store.sqlite_rows import (
    Written,
    copy_log,
    read_all,
    read_revision,
    turn_log,
    write,
)

__all__ = ["CHECKPOINT_PAGES", "SqliteStore"]

CHECKPOINT_PAGES = 2_048
"""Pages in the log, of 4 KiB, at which a checkpoint starts: 8 MiB."""

_WAIT_FACTOR = 8
# At this many times as much, 64 MiB, commits wait for the checkpoint to end.

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """What an open store holds."""

    lock: FileLock
    connection: sqlite3.Connection
    side: sqlite3.Connection
    """For checkpoints, beside commits on the other one."""
    identity: tuple[int, int]
    revision: int
    history: History
    thread: ThreadPoolExecutor
    """For opening, checkpoints and closing."""
    commits: ThreadPoolExecutor | None
    """For all use of `connection`, where commits wait for the disk."""
    checkpoint_at: int
    """Pages in the log at which the next checkpoint starts."""
    wait_at: int
    """Pages in the log at which commits wait for its end."""
    log_pages: int = 0
    """Pages in the log since it last started over; an estimate, rather too many."""
    checkpoint: asyncio.Task[None] | None = None
    turning: bool = False
    """A checkpoint has `connection` for itself."""
    suspect: bool = False
    """The last write failed: look before the next."""


class SqliteStore:
    """A book in one SQLite file; see `Store`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: Callable[[], float],
        new_id: Callable[[], str],
        *,
        sync_full: bool = False,
        max_history_commits: int = MAX_HISTORY_COMMITS,
        max_history_bytes: int = MAX_HISTORY_BYTES,
        checkpoint_pages: int = CHECKPOINT_PAGES,
    ) -> None:
        """Opens nothing.

        Args:
            path: The file. It and its folder are created where absent, for
                this user alone. It must lie on a local file system.
            clock: Seconds on a clock that never goes back; for liveness.
            new_id: Makes the id of a new book.
            sync_full: Commits wait for the disk and survive a loss of power.
            max_history_commits: Most commits kept for watches.
            max_history_bytes: Most bytes kept for watches.
            checkpoint_pages: Pages in the log at which a checkpoint starts; at
                eight times as many commits wait for it.
        """
        self._checkpoint_pages = checkpoint_pages
        self._path = Path(os.path.abspath(path))
        self._new_id = new_id
        self._full = sync_full
        self._book_id = ""
        self._bounds = (max_history_commits, max_history_bytes)
        self._leases = LivenessTable(clock)
        self._open: _Open | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def book_id(self) -> str:
        """See `Store`."""
        return self._book_id

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def description(self) -> str:
        """See `Store`."""
        return f"sqlite:{self._path}{'?sync=full' if self._full else ''}"

    async def open(self) -> None:
        """See `Store`."""
        if self._open is not None:
            return
        if self._closing is not None:
            await asyncio.shield(self._closing)
        thread = ThreadPoolExecutor(1, thread_name_prefix="rankbook-store")
        opening = asyncio.get_running_loop().run_in_executor(thread, self._open_blocking, thread)
        try:
            self._open = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # Nobody waits for what the thread still opens: it must let go of it.
            opening.add_done_callback(_abandon)
            raise
        finally:
            if self._open is None:
                thread.shutdown(wait=False)
        self._leases.clear()

    async def snapshot(self) -> Snapshot:
        """See `Store`."""
        opened = self._opened()
        while opened.turning:
            await self._checkpointed(opened)
            opened = self._opened()
        if opened.commits is None:
            return self._read(opened)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(opened.commits, self._read, opened)

    async def commit(self, txns: Sequence[Txn]) -> list[int | None]:
        """See `Store`."""
        opened = self._opened()
        check_txns(txns)
        while opened.turning or opened.log_pages > opened.wait_at:
            await self._checkpointed(opened)
            opened = self._opened()
        if opened.commits is None:
            written = self._write(opened, txns)
            self._publish(opened, written)
            return written.results

        def finished(writing: asyncio.Future[Written]) -> None:
            if not writing.cancelled() and writing.exception() is None:
                self._publish(opened, writing.result())

        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(opened.commits, self._write, opened, txns)
        # The thread goes on where its caller is cancelled, and the watches must
        # see what it did; callbacks run in the order of the commits.
        writing.add_done_callback(finished)
        return (await asyncio.shield(writing)).results

    def watch(self, from_revision: int) -> AsyncIterator[Commit]:
        """See `Store`."""
        return self._opened().history.follow(from_revision)

    async def touch(self, leases: Mapping[str, float]) -> frozenset[str]:
        """See `Store`."""
        self._opened()
        return self._leases.touch(leases)

    async def drop(self, lease_ids: Iterable[str]) -> None:
        """See `Store`."""
        self._opened()
        self._leases.drop(lease_ids)

    async def live(self) -> Mapping[str, float]:
        """See `Store`."""
        self._opened()
        return self._leases.live()

    async def close(self) -> None:
        """See `Store`."""
        opened, self._open = self._open, None
        if opened is not None:
            self._closing = asyncio.create_task(self._close(opened))
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self, opened: _Open) -> None:
        opened.history.end()
        try:
            if opened.checkpoint is not None:
                await opened.checkpoint
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(opened.thread, _close_blocking, opened)
            opened.thread.shutdown(wait=False)
        finally:
            self._closing = None

    def _opened(self) -> _Open:
        if self._open is None:
            raise not_open(self.description)
        return self._open

    def _open_blocking(self, thread: ThreadPoolExecutor) -> _Open:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise explain(error, self._path, "its folder cannot be made") from error
        # One file has one lock, whatever link it is reached by.
        path = self._path.resolve()
        lock = FileLock(path)
        try:
            book = open_book(path, full=self._full, new_id=self._new_id)
            try:
                side = connect(path, full=self._full)
            except sqlite3.Error as error:
                book.connection.close()
                raise explain(error, path) from error
        except BaseException:
            lock.release()
            raise
        self._book_id = book.book_id
        max_commits, max_bytes = self._bounds
        return _Open(
            lock=lock,
            connection=book.connection,
            side=side,
            identity=book.identity,
            revision=book.revision,
            history=History(book.revision, max_commits=max_commits, max_bytes=max_bytes),
            checkpoint_at=self._checkpoint_pages,
            wait_at=_WAIT_FACTOR * self._checkpoint_pages,
            thread=thread,
            commits=ThreadPoolExecutor(1, thread_name_prefix="rankbook-commit")
            if self._full
            else None,
        )

    def _read(self, opened: _Open) -> Snapshot:
        try:
            self._look(opened)
            return read_all(opened.connection)
        except (sqlite3.Error, OSError) as error:
            opened.suspect = True
            raise explain(error, self._path) from error

    def _write(self, opened: _Open, txns: Sequence[Txn]) -> Written:
        try:
            self._look(opened)
            written = write(opened.connection, opened.revision, txns, self._leases.any_live)
        except (sqlite3.Error, OSError) as error:
            opened.suspect = True
            raise explain(error, self._path) from error
        opened.revision += len(written.commits)
        return written

    def _look(self, opened: _Open) -> None:
        """Makes sure that what is written goes where the next start reads it."""
        stat = os.stat(self._path)
        if (stat.st_dev, stat.st_ino) != opened.identity:
            raise FileNotFoundError(errno.ENOENT, "another file is in its place")
        if not opened.suspect:
            return
        try:
            if opened.connection.in_transaction:
                raise sqlite3.OperationalError("a transaction could not be taken back")
            revision = read_revision(opened.connection)
        except sqlite3.Error:
            with contextlib.suppress(sqlite3.Error):
                opened.connection.close()
            opened.connection = connect(self._path, full=self._full)
            revision = read_revision(opened.connection)
        if revision != opened.revision:
            raise refused(
                self._path,
                f"is at revision {revision} and this server answered {opened.revision}",
                "restart rankbookd so that it reads the book anew",
            )
        opened.suspect = False

    def _publish(self, opened: _Open, written: Written) -> None:
        for commit in written.commits:
            opened.history.append(commit)
        opened.log_pages += written.pages
        if opened.log_pages > opened.checkpoint_at and self._open is opened:
            self._start_checkpoint(opened)

    def _start_checkpoint(self, opened: _Open) -> asyncio.Task[None]:
        if opened.checkpoint is None:
            opened.checkpoint = asyncio.create_task(self._checkpoint(opened))
        return opened.checkpoint

    async def _checkpointed(self, opened: _Open) -> None:
        await asyncio.shield(self._start_checkpoint(opened))

    async def _checkpoint(self, opened: _Open) -> None:
        """Copies the log into the file and turns the log back to its start.

        SQLite turns the log by itself only at a write that finds all of it
        copied, so under steady load it would grow for ever; and that write
        waits for the disk, so it must not be one of the loop's.
        """
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(opened.thread, copy_log, opened.side)
            opened.turning = True
            opened.log_pages = await loop.run_in_executor(
                opened.commits or opened.thread, turn_log, opened.connection
            )
        except sqlite3.Error as error:
            opened.suspect = True
            _log.warning("%s; the log grows meanwhile", explain(error, self._path))
        finally:
            # Where it did not turn (an error, or a tool that still reads an
            # older state), trying at every commit would help nobody.
            opened.checkpoint_at = opened.log_pages + self._checkpoint_pages
            opened.wait_at = opened.log_pages + _WAIT_FACTOR * self._checkpoint_pages
            opened.turning = False
            opened.checkpoint = None


def _close_blocking(opened: _Open) -> None:
    try:
        if opened.commits is not None:
            opened.commits.shutdown(wait=True)
        # The last one copies the log; what it cannot copy the next start does.
        for connection in (opened.side, opened.connection):
            with contextlib.suppress(sqlite3.Error):
                connection.close()
    finally:
        opened.lock.release()


def _abandon(opening: asyncio.Future[_Open]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        _close_blocking(opening.result())
