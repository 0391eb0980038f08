"""The last commits of an embedded store, for its watches.

One ring for all watches: a watch holds a revision, not a queue, so memory does
not depend on how many there are or how slow they read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from rankbook_server.core.ops import Commit, Put
from rankbook_server.store.base import Compacted

__all__ = ["MAX_HISTORY_BYTES", "MAX_HISTORY_COMMITS", "History"]

MAX_HISTORY_COMMITS = 4_096
"""Commits kept: a cold start of 4,096 workers, each in a commit of its own."""

MAX_HISTORY_BYTES = 16 * 1024 * 1024
"""Bytes of keys and values kept: those 4,096 commits with 4 KiB records."""

_COMMIT_BYTES = 256
# A commit's own objects; an empty one counts as this much.


class History:
    """A bounded run of commits without gaps, and waiting for the next one.

    For one event loop; not thread-safe.
    """

    def __init__(
        self,
        revision: int,
        *,
        max_commits: int = MAX_HISTORY_COMMITS,
        max_bytes: int = MAX_HISTORY_BYTES,
    ) -> None:
        """Starts empty.

        Args:
            revision: The book's revision; commits up to it are not known here.
            max_commits: Most commits kept.
            max_bytes: Most bytes of keys and values kept.
        """
        self._last = revision
        self._commits: deque[Commit] = deque()
        self._bytes = 0
        self._max_commits = max_commits
        self._max_bytes = max_bytes
        self._moved = asyncio.Event()
        self._ended = False

    @property
    def floor(self) -> int:
        """The smallest revision a watch may resume from."""
        return self._last - len(self._commits)

    def append(self, commit: Commit) -> None:
        """Adds the next commit; its revision is the last one's plus one."""
        if commit.revision != self._last + 1:
            raise ValueError(f"commit {commit.revision} does not follow {self._last}")
        self._last = commit.revision
        self._commits.append(commit)
        self._bytes += _size(commit)
        while len(self._commits) > self._max_commits or self._bytes > self._max_bytes:
            self._bytes -= _size(self._commits.popleft())
        self._moved.set()

    def restart(self, revision: int) -> None:
        """Forgets everything: what happened up to a revision is not known here."""
        self._last = revision
        self._commits.clear()
        self._bytes = 0
        self._moved.set()

    def end(self) -> None:
        """Ends every watch after what it has not yet seen."""
        self._ended = True
        self._moved.set()

    async def follow(self, from_revision: int) -> AsyncIterator[Commit]:
        """Yields every commit above a revision; see `Store.watch`."""
        seen = from_revision
        while True:
            while seen < self._last:
                if seen < self.floor:
                    raise Compacted(seen, self.floor)
                commit = self._commits[seen - self.floor]
                seen = commit.revision
                yield commit
            if self._ended:
                return
            # No other task runs between the look above and this, so no commit
            # is missed; one that another watch clears has woken us already.
            self._moved.clear()
            await self._moved.wait()


def _size(commit: Commit) -> int:
    size = _COMMIT_BYTES
    for op in commit.ops:
        size += len(op.key)
        if isinstance(op, Put):
            size += len(op.value)
    return size
