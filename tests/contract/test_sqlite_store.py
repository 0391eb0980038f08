"""What the embedded store does with its file, its disk and its neighbours."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from rankbook.errors import Reason, Unavailable
from rankbook_server.core.ops import Put, Txn
from rankbook_server.store.base import Compacted
from rankbook_server.store.sqlite import SqliteStore

from .store_contract import (
    TEST_TIMEOUT_S,
    FakeClock,
    IdSequence,
    commit_one,
    content,
    loop_turn,
    put,
)

SOMEBODY = 65_534
"""A user who is not root, by custom `nobody`."""

PROCESS = str(Path(__file__).with_name("store_process.py"))


def new(path: Path, *, sync_full: bool = False, checkpoint_pages: int = 2_048) -> SqliteStore:
    return SqliteStore(
        path, FakeClock(), IdSequence(), sync_full=sync_full, checkpoint_pages=checkpoint_pages
    )


def run(store: SqliteStore, claim: Callable[[SqliteStore], Awaitable[None]]) -> None:
    async def body() -> None:
        await store.open()
        try:
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await claim(store)
        finally:
            await store.close()

    asyncio.run(body())


def refusal(store: SqliteStore) -> str:
    """Opens a store that must not open, and returns what it says."""
    with pytest.raises(Unavailable) as caught:
        asyncio.run(store.open())
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    return caught.value.message


def write_a_book(path: Path) -> None:
    async def claim(store: SqliteStore) -> None:
        await commit_one(store, put("a", b"1"))

    run(new(path), claim)


def size_of(path: Path) -> int:
    return path.stat().st_size


def spawn(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, PROCESS, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


# The file.


def test_the_book_and_its_folder_are_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "book.db"

    async def claim(store: SqliteStore) -> None:
        await commit_one(store, put("a"))
        names = sorted(os.listdir(path.parent))
        assert names == ["book.db", "book.db-shm", "book.db-wal", "book.db.lock"]
        for name in names:
            assert stat.S_IMODE((path.parent / name).stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    before = os.umask(0)
    try:
        run(new(path), claim)
    finally:
        os.umask(before)


def test_a_closed_book_is_one_plain_sqlite_file_that_people_can_read(tmp_path: Path) -> None:
    path = tmp_path / "book.db"
    write_a_book(path)
    assert sorted(os.listdir(tmp_path)) == ["book.db", "book.db.lock"]
    assert path.read_bytes()[68:72] == b"rkbk"
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("SELECT key, value FROM kv").fetchall() == [("a", b"1")]
    connection.close()


def test_history_before_the_start_is_not_kept(tmp_path: Path) -> None:
    write_a_book(tmp_path / "book.db")

    async def claim(store: SqliteStore) -> None:
        with pytest.raises(Compacted):
            await anext(store.watch(0))

    run(new(tmp_path / "book.db"), claim)


def test_an_empty_file_becomes_a_book(tmp_path: Path) -> None:
    path = tmp_path / "book.db"
    path.touch()
    write_a_book(path)
    assert path.stat().st_size > 0


def test_a_creation_that_was_cut_short_is_done_again(tmp_path: Path) -> None:
    # What a server leaves that is killed while it makes the book: pages in the
    # file, and the journal that takes them back. SQLite itself makes both.
    path = tmp_path / "book.db"
    script = (
        "import os, sqlite3, sys\n"
        "c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('PRAGMA cache_size = 1'); c.execute('PRAGMA cache_spill = 1')\n"
        "c.execute('BEGIN EXCLUSIVE'); c.execute(f'PRAGMA application_id = {0x726B626B}')\n"
        "c.execute('CREATE TABLE meta (key TEXT PRIMARY KEY, value NOT NULL)')\n"
        "c.executemany('INSERT INTO meta VALUES (?, ?)', ((i, bytes(3000)) for i in range(99)))\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script, path], check=True)
    assert path.stat().st_size > 0
    assert (tmp_path / "book.db-journal").stat().st_size > 0
    write_a_book(path)


# What is no book.


def test_a_file_that_is_no_book_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"remember the milk\n" * 100)
    assert "is not a book" in refusal(new(path))
    assert path.read_bytes() == b"remember the milk\n" * 100


@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_another_programs_database_is_refused_and_left_as_it_was(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "theirs.db"
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA journal_mode = {mode}")
    connection.execute("CREATE TABLE meta (key, value)")
    connection.close()
    before = path.read_bytes()
    assert "another program's SQLite database" in refusal(new(path))
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["theirs.db", "theirs.db.lock"]


def test_a_book_of_a_newer_version_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "book.db"
    write_a_book(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    before = path.read_bytes()
    message = refusal(new(path))
    assert "version 2" in message
    assert "up to 1" in message
    assert path.read_bytes() == before


def test_a_newer_version_that_only_the_log_knows_is_refused(tmp_path: Path) -> None:
    path, copy = tmp_path / "book.db", tmp_path / "copy.db"
    write_a_book(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 7")
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    connection.close()
    assert copy.read_bytes()[60:64] == (1).to_bytes(4, "big")
    assert "version 7" in refusal(new(copy))


def test_a_book_without_its_revision_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "book.db"
    write_a_book(path)
    connection = sqlite3.connect(path)
    connection.execute("DELETE FROM meta WHERE key = 'revision'")
    connection.commit()
    connection.close()
    assert "without its revision" in refusal(new(path))


def test_a_damaged_book_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "book.db"
    write_a_book(path)
    header = path.read_bytes()[:100]
    path.write_bytes(header + b"\xff" * 20_000)
    message = refusal(new(path))
    assert "is damaged" in message
    assert "bring back a copy" in message


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert "is a folder" in refusal(new(tmp_path))


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = refusal(new(tmp_path / "file" / "book.db"))
    assert "its folder cannot be made" in message


def test_a_store_that_was_refused_opens_once_the_cause_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "book.db"
    path.write_bytes(b"no book")
    store = new(path)
    refusal(store)
    path.unlink()

    async def claim(store: SqliteStore) -> None:
        await commit_one(store, put("a"))

    run(store, claim)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach; pytest's own cannot be."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_a_folder_that_may_not_be_written_is_refused(open_folder: Path) -> None:
    os.chmod(open_folder, 0o555)
    # Root may write anywhere, so somebody else has to try.
    process = spawn("hold", open_folder / "book.db", 0 if os.geteuid() else SOMEBODY)
    said, _ = process.communicate(timeout=TEST_TIMEOUT_S)
    assert process.returncode == 3
    assert said.startswith("refused STORE_UNAVAILABLE")
    assert "Permission denied" in said
    assert "the right to read and write" in said


def test_a_book_that_may_not_be_read_is_refused(open_folder: Path) -> None:
    path = open_folder / "book.db"
    write_a_book(path)
    user = 0 if os.geteuid() else SOMEBODY
    path.chmod(0)
    if user:
        os.chown(open_folder, user, user)
        os.chown(f"{path}.lock", user, user)
    process = spawn("hold", path, user)
    said, _ = process.communicate(timeout=TEST_TIMEOUT_S)
    assert process.returncode == 3
    assert "may not be opened" in said


# Its neighbours.


def test_a_book_has_one_process_and_the_other_is_told_which(tmp_path: Path) -> None:
    path = tmp_path / "book.db"
    link = tmp_path / "link.db"
    holder = spawn("hold", path)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        link.symlink_to(path)
        for name in (path, link):
            message = refusal(new(name))
            assert f"process {holder.pid}" in message
            assert "in use by another rankbookd" in message
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=TEST_TIMEOUT_S)
        write_a_book(path)
    finally:
        end(holder)


def test_a_book_is_opened_once_in_one_process_too(tmp_path: Path) -> None:
    async def claim(store: SqliteStore) -> None:
        other = new(tmp_path / "book.db")
        with pytest.raises(Unavailable, match=f"process {os.getpid()}"):
            await other.open()
        await store.close()
        await other.open()
        await other.close()

    run(new(tmp_path / "book.db"), claim)


def test_a_book_that_was_moved_away_takes_no_commits_until_it_is_back(tmp_path: Path) -> None:
    path, away = tmp_path / "book.db", tmp_path / "away.db"

    async def claim(store: SqliteStore) -> None:
        await commit_one(store, put("a", b"1"))
        path.rename(away)
        with pytest.raises(Unavailable, match="moved or deleted"):
            await store.commit([put("a", b"2")])
        path.touch()
        with pytest.raises(Unavailable, match="another file is in its place"):
            await store.commit([put("a", b"2")])
        away.rename(path)
        await commit_one(store, put("b", b"3"))
        assert await content(store) == {"a": b"1", "b": b"3"}

    run(new(path), claim)


def test_a_book_that_somebody_else_wrote_to_is_not_written_over(tmp_path: Path) -> None:
    async def claim(store: SqliteStore) -> None:
        await commit_one(store, put("a"))
        connection = sqlite3.connect(tmp_path / "book.db", isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE meta SET value = 99 WHERE key = 'revision'")
        # The lock is what makes the store look again.
        with pytest.raises(Unavailable, match="locked by another program"):
            await store.commit([put("b")])
        connection.execute("COMMIT")
        connection.close()
        with pytest.raises(Unavailable, match="revision 99"):
            await store.commit([put("b")])

    run(new(tmp_path / "book.db"), claim)


# The loop, the log and the disk.


def test_with_full_sync_the_loop_goes_on_while_a_commit_waits(tmp_path: Path) -> None:
    async def claim(store: SqliteStore) -> None:
        blocker = sqlite3.connect(tmp_path / "book.db", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        started = asyncio.Event()

        async def call() -> int:
            started.set()
            return await commit_one(store, put("a"))

        calling = asyncio.create_task(call())
        await started.wait()
        # Only a loop that is free comes here before the commit gives up.
        assert not calling.done()
        blocker.execute("ROLLBACK")
        blocker.close()
        await calling
        assert await content(store) == {"a": b"v"}

    run(new(tmp_path / "book.db", sync_full=True), claim)


@pytest.mark.parametrize("sync_full", [False, True])
def test_a_checkpoint_starts_by_itself_and_needs_no_further_commit(
    tmp_path: Path, sync_full: bool
) -> None:
    path = tmp_path / "book.db"

    async def claim(store: SqliteStore) -> None:
        # Past the bound of a checkpoint, and far from that of waiting for one.
        for number in range(60):
            await store.commit([put(f"k{number}", os.urandom(10_000))])
        never = asyncio.get_running_loop().create_future()
        # A thread does it: it can only be observed.
        while size_of(path) < 20 * 10_000:
            await asyncio.wait([never], timeout=0.005)

    run(new(path, sync_full=sync_full, checkpoint_pages=200), claim)


@pytest.mark.parametrize("sync_full", [False, True])
def test_the_log_stays_small_under_steady_load(tmp_path: Path, sync_full: bool) -> None:
    pages = 100
    log = Path(f"{tmp_path}/book.db-wal")

    async def claim(store: SqliteStore) -> None:
        largest = 0
        for number in range(1_500):
            await store.commit([put(f"k{number % 50}", os.urandom(10_000))])
            largest = max(largest, size_of(log))
            await loop_turn()
        # 15 MB of values went through it.
        assert largest < 8 * pages * 4_200 + 100_000
        assert size_of(tmp_path / "book.db") > 50 * 10_000

    run(new(tmp_path / "book.db", sync_full=sync_full, checkpoint_pages=pages), claim)


def test_a_tool_that_reads_an_older_state_stops_no_commit(tmp_path: Path) -> None:
    log = Path(f"{tmp_path}/book.db-wal")

    async def claim(store: SqliteStore) -> None:
        async def load(count: int) -> None:
            for number in range(count):
                await store.commit([put(f"k{number % 50}", os.urandom(10_000))])
                await loop_turn()

        await load(50)
        reader = sqlite3.connect(tmp_path / "book.db", isolation_level=None)
        reader.execute("BEGIN")
        old = reader.execute("SELECT value FROM kv WHERE key = 'k0'").fetchone()
        await load(400)
        assert size_of(log) > 400 * 10_000
        assert reader.execute("SELECT value FROM kv WHERE key = 'k0'").fetchone() == old
        reader.execute("COMMIT")
        reader.close()
        await load(400)
        grown = size_of(log)
        await load(1_000)
        assert size_of(log) == grown

    run(new(tmp_path / "book.db", checkpoint_pages=100), claim)


def test_a_batch_of_large_values_is_one_commit(tmp_path: Path) -> None:
    payloads = {f"k{number:03}": os.urandom(512 * 1024) for number in range(64)}

    async def claim(store: SqliteStore) -> None:
        revision = await commit_one(
            store, Txn(tuple(Put(key, value) for key, value in payloads.items()))
        )
        assert await content(store) == payloads
        assert (await store.snapshot()).revision == revision

    run(new(tmp_path / "book.db"), claim)
    run(new(tmp_path / "book.db"), lambda store: _holds(store, payloads))


async def _holds(store: SqliteStore, payloads: dict[str, bytes]) -> None:
    assert await content(store) == payloads


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command: the full disk was not tried")
    if done.returncode:
        pytest.skip(f"no file system could be mounted, the full disk was not tried: {done.stderr}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("command", ["fill", "fill-full"])
def test_a_full_disk_refuses_writes_keeps_what_it_took_and_recovers(
    small_disk: Path, command: str
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_500_000))
    process = spawn(command, small_disk / "book.db")
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        word, count, reason, *message = process.stdout.readline().split()
        assert (word, reason) == ("refused", "STORE_UNAVAILABLE")
        assert int(count) > 5
        assert "no room left on its disk" in " ".join(message)
        assert "free some space" in " ".join(message)
        ballast.unlink()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"snapshot {int(count) + 1} {int(count) + 1}\n"
        process.send_signal(signal.SIGKILL)
    finally:
        end(process)

    async def claim(store: SqliteStore) -> None:
        expected = {f"k{n}": bytes([n % 251]) * 60_000 for n in range(int(count))}
        assert await content(store) == expected | {"after": b"1"}

    run(new(small_disk / "book.db"), claim)
