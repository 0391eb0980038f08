"""`kill -9` at any moment loses nothing that was acknowledged."""

from __future__ import annotations

import asyncio
import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankbook_server.store.base import Snapshot
from rankbook_server.store.sqlite import SqliteStore

from . import store_process

ROUNDS = 30
SEED = int(os.environ.get("RANKBOOK_TEST_SEED") or random.SystemRandom().randrange(2**32))


class Writer:
    """A process that writes to a book without end."""

    def __init__(self, command: str, path: Path, seed: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, store_process.__file__, command, str(path), str(seed)],
            stdout=subprocess.PIPE,
        )
        self._said = b""

    def read_for(self, seconds: float) -> None:
        """Reads what it acknowledges; it must not wait for us."""
        assert self.process.stdout is not None
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self.process.stdout], [], [], left)[0]:
                self._said += os.read(self.process.stdout.fileno(), 65_536)

    def kill(self) -> list[list[bytes]]:
        """Kills it and returns every line that it said whole."""
        assert self.process.stdout is not None
        self.process.kill()
        self._said += self.process.stdout.read()
        self.process.stdout.close()
        self.process.wait()
        return [line.split() for line in self._said.split(b"\n")[:-1]]


async def look(path: Path) -> tuple[str, Snapshot]:
    store = SqliteStore(path, time.monotonic, lambda: "made-after-the-kill")
    await store.open()
    snapshot = await store.snapshot()
    book_id = store.book_id
    await store.close()
    return book_id, snapshot


@pytest.mark.parametrize("command", ["load", "load-full"])
def test_a_killed_writer_loses_nothing_it_acknowledged_and_leaves_nothing_by_half(
    tmp_path: Path, command: str
) -> None:
    sys.stdout.write(f"RANKBOOK_TEST_SEED={SEED}\n")
    rng = random.Random(SEED)
    path = tmp_path / "book.db"
    acknowledged = before = written_rounds = 0
    first_id = ""
    for round_number in range(ROUNDS):
        writer = Writer(command, path, rng.randrange(2**32))
        # From before the book is open to well past several checkpoints.
        writer.read_for(rng.choice((rng.uniform(0.05, 0.3), rng.uniform(0.2, 0.6))))
        said = writer.kill()
        for words in said:
            if words[0] == b"ready":
                assert int(words[1]) >= before, "a restart must not go back"
            else:
                assert int(words[0]) > acknowledged, "a revision must be new"
                acknowledged = int(words[0])
        written_rounds += len(said) > 1
        if not path.exists():
            continue
        # Half of the time the next writer is the first to see what is left.
        if round_number % 2 and round_number != ROUNDS - 1:
            continue
        book_id, snapshot = asyncio.run(look(path))
        assert snapshot.revision >= max(acknowledged, before)
        held = {entry.key: (entry.value, entry.revision) for entry in snapshot.entries}
        assert held == store_process.state_at(snapshot.revision)
        # Whoever came first made the book; nobody makes it again.
        first_id = first_id or book_id
        assert book_id == first_id
        before = snapshot.revision
    assert written_rounds > ROUNDS // 3
    assert acknowledged > 100


def test_a_server_killed_while_it_makes_a_book_leaves_one_that_opens(tmp_path: Path) -> None:
    sys.stdout.write(f"RANKBOOK_TEST_SEED={SEED}\n")
    rng = random.Random(SEED + 1)
    for round_number in range(ROUNDS // 2):
        path = tmp_path / f"{round_number}" / "book.db"
        writer = Writer("load", path, 0)
        # The file's first appearance is the moment; then a little later or not.
        deadline = time.monotonic() + 20
        while not path.exists() and time.monotonic() < deadline:
            pass
        until = time.monotonic() + rng.uniform(0, 0.004)
        while time.monotonic() < until:
            pass
        said = writer.kill()
        _, snapshot = asyncio.run(look(path))
        assert snapshot.revision >= max((int(w[-1]) for w in said), default=0)
        held = {entry.key: (entry.value, entry.revision) for entry in snapshot.entries}
        assert held == store_process.state_at(snapshot.revision)
