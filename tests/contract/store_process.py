"""A store in a process of its own, for tests that lock it, starve it or kill it.

Run as a script: `store_process.py COMMAND PATH [ARGUMENT]`. COMMAND is `hold`
(ARGUMENT: the user to be, zero for this one), `load` (ARGUMENT: a seed) or
`fill`; the last two with `-full` for a store that waits for its disk.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Iterator

from rankbook.errors import RankbookError
from rankbook_server.core.ops import Delete, Op, Put, Txn
from rankbook_server.store.sqlite import SqliteStore

SLOTS = 24
KEYS = ("head", "worker", "lease")


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def write_of(number: int) -> tuple[Op, ...]:
    """Returns the operations of the transaction with this revision.

    Each writes, or deletes, all keys of one slot; a fifth only delete.
    """
    slot = number % SLOTS
    if number % 5 == 4:
        return tuple(Delete(f"{slot}/{key}") for key in KEYS)
    size = 90_000 if number % 37 == 0 else 1_200
    value = b"%d " % number + random.Random(number).randbytes(size)
    return tuple(Put(f"{slot}/{key}", value) for key in KEYS)


def state_at(revision: int) -> dict[str, tuple[bytes, int]]:
    """Returns what a book holds after the transactions 1 to `revision`: value and revision."""
    state: dict[str, tuple[bytes, int]] = {}
    for number in range(max(1, revision - SLOTS + 1), revision + 1):
        for op in write_of(number):
            if isinstance(op, Put):
                state[op.key] = (op.value, number)
    return state


def batches(first: int, rng: random.Random) -> Iterator[list[Txn]]:
    while True:
        size = rng.choice((1, 1, 1, 2, 5, 12))
        yield [Txn(write_of(number)) for number in range(first, first + size)]
        first += size


async def load(store: SqliteStore, seed: int) -> None:
    """Commits without end, and says each revision once it is acknowledged."""
    never = asyncio.get_running_loop().create_future()
    first = (await store.snapshot()).revision + 1
    say("ready", first - 1)
    for batch in batches(first, random.Random(seed)):
        results = await store.commit(batch)
        say(results[-1])
        # The loop turns, as a server's does, so that checkpoints run.
        await asyncio.wait([never], timeout=0)


async def fill(store: SqliteStore) -> None:
    """Commits until it is refused; makes room when told so; commits once more."""
    count = 0
    while True:
        try:
            await store.commit([Txn((Put(f"k{count}", bytes([count % 251]) * 60_000),))])
        except RankbookError as error:
            say("refused", count, error.reason, error.message)
            break
        count += 1
    sys.stdin.readline()
    await store.commit([Txn((Put("after", b"1"),))])
    snapshot = await store.snapshot()
    say("snapshot", snapshot.revision, len(snapshot.entries))


async def main(command: str, path: str, argument: str = "0") -> int:
    store = SqliteStore(
        path,
        time.monotonic,
        lambda: "book-of-a-process",
        sync_full=command.endswith("-full"),
        checkpoint_pages=200,
    )
    if command == "hold" and int(argument):
        # Only now: another user may not be able to read this interpreter.
        os.setgroups([])
        os.setgid(int(argument))
        os.setuid(int(argument))
    try:
        await store.open()
    except RankbookError as error:
        say("refused", error.reason, error.message)
        return 3
    match command.removesuffix("-full"):
        case "hold":
            say("open")
            sys.stdin.readline()
        case "load":
            await load(store, int(argument))
        case "fill":
            await fill(store)
    await store.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
