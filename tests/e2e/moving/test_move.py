"""A book moves to another store, and whoever is in it notices no more than a restart."""

from __future__ import annotations

import json
import os
import queue
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.contract.etcd_server import EtcdNode, NoProgramError

import rankbook
from rankbook import EventType, Fenced, Reason, Requirement, State
from rankbook import RegistrationState as Believed

pytestmark = pytest.mark.timeout(180)

ENGINE = "prefill-a-0"
TTL_S = 15.0
# Long enough for a stop, an export, an import and a start on a busy machine.


def run(*words: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """The command line, without a server to talk to."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RANKBOOK_")}
    return subprocess.run(
        [sys.executable, "-m", "rankbook.cli", *words],
        env=clean,
        input=stdin,
        capture_output=True,
        timeout=60,
    )


def moved(*words: str) -> Any:
    """What a command that must go well says as JSON."""
    done = run(*words, "-o", "json")
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def refusal(code: int, *words: str) -> Any:
    """What a command that must be refused says as JSON."""
    done = run(*words, "-o", "json")
    assert done.returncode == code, (done.stdout, done.stderr)
    return json.loads(done.stdout)["error"]


class Changes:
    """What a registration says of itself."""

    def __init__(self) -> None:
        self.seen: list[rankbook.RegistrationChange] = []
        self._told = threading.Condition()

    def __call__(self, change: rankbook.RegistrationChange) -> None:
        with self._told:
            self.seen.append(change)
            self._told.notify_all()

    def wait_for_book(self, book_id: str) -> None:
        """Waits until it is registered in a book."""
        with self._told:
            assert self._told.wait_for(
                lambda: (
                    self.seen[-1].book_id == book_id and self.seen[-1].state is Believed.REGISTERED
                ),
                30,
            ), self.seen


@pytest.fixture(params=["sqlite to sqlite", "sqlite to etcd", "etcd to sqlite"])
def stores(request, tmp_path):
    """The store that a book is in, and the one it goes to."""
    first, last = request.param.split(" to ")
    if "etcd" not in (first, last):
        yield f"sqlite:{tmp_path}/a.db", f"sqlite:{tmp_path}/b.db"
        return
    try:
        node = EtcdNode()
    except NoProgramError as error:
        pytest.skip(str(error))
    with node:
        urls = {"etcd": node.url("moved"), "sqlite": f"sqlite:{tmp_path}/a.db"}
        yield urls[first], urls[last]


def start_over(server, store: str) -> None:
    """Starts a stopped server on its port, over another store."""
    server.command[server.command.index("--store") + 1] = store
    server.start_again(same_port=True)


def test_engines_workers_and_epochs_come_along(stores, rankbookd, registration, made, tmp_path):
    source, target = stores
    file = tmp_path / "book.jsonl"
    server = rankbookd(store=source)
    heard = [Changes() for _ in range(5)]
    grid = made.grid(ENGINE, generation="g2")
    workers = [
        registration([record], endpoints=server.grpc, ttl_s=TTL_S, on_change=changes)
        for record, changes in zip(grid, heard, strict=False)
    ]
    core = registration([], endpoints=server.grpc, ttl_s=TTL_S, on_change=heard[-1])
    with rankbook.Client(server.grpc) as client:
        # A start that is over, a start to come, and a tombstone.
        assert client.begin_generation(ENGINE, "g1") == 1
        assert client.begin_generation(ENGINE, "g2") == 2
        assert client.begin_generation("later", "g1") == 1
        gone = client.register_workers([made.record("gone")], sequence=1, lease_key="k", ttl_s=60)
        client.revoke_lease(gone.lease.lease_id)
        for one in workers:
            one.start()
        assert [one.wait_registered(30).epoch for one in workers] == [2] * 4
        seen = client.get_topology(ENGINE, require=Requirement.COMPLETE, wait_s=20)
        core.seal(made.seal_slots(seen), made.core("core"), engine_id=ENGINE, generation="g2")
        core.start()
        core.wait_sealed(30)
        before = client.get_topology(ENGINE, wait_s=20)
        book_id = client.status().book_id
    with rankbook.Client(server.grpc) as watching, rankbook.TopologyView(watching) as view:
        view.wait_synced(10)
        events: queue.Queue = queue.Queue()
        view.subscribe(events.put)
        if source.startswith("sqlite:"):
            locked = refusal(4, "export", source, str(file))
            assert f"process {server.pid} " in locked["message"]
            assert not file.exists()
        assert server.stop() == 0
        exported = moved("export", source, str(file))
        assert exported["book_id"] == book_id
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        brought = moved("import", target, str(file))
        assert (brought["from_book_id"], brought["entries"]) == (book_id, exported["entries"])
        assert brought["book_id"] != book_id
        start_over(server, target)

        with rankbook.Client(server.grpc) as client:
            at_once = client.get_topology(ENGINE)
            for changes in heard:
                changes.wait_for_book(brought["book_id"])
            after = client.get_topology(ENGINE)
            for topology in (at_once, after):
                assert topology.book_id == brought["book_id"]
                assert topology.engine.revision <= topology.book_revision
                assert topology.engine.state is State.READY
                assert topology.workers == before.workers
                for name in ("generation", "epoch", "seal", "core", "start_time", "change_time"):
                    assert getattr(topology.engine, name) == getattr(before.engine, name), name
            tombstone = client.get_topology("gone", require=Requirement.ANY)
            assert tombstone.engine.state is State.GONE
            zombie = made.record(ENGINE, pp_size=2, tp_size=2, generation="g1", boot_id="zombie")
            with pytest.raises(Fenced) as fenced:
                client.register_workers([zombie], sequence=1, lease_key="zombie")
            assert fenced.value.reason is Reason.GENERATION_FENCED
            assert client.begin_generation("later", "g1") == 1
            assert client.begin_generation("gone", "g9") == 2
            assert client.begin_generation(ENGINE, "g3") == 3
        made.eventually(
            lambda: view.get(ENGINE).book_id == brought["book_id"],
            20,
            "the view is of the new book",
        )
        assert view.get(ENGINE).engine.state is State.READY
        told = [events.get() for _ in range(events.qsize())]
        assert [e for e in told if e.type is EventType.REMOVED] == []
    assert not any(change.state is Believed.FENCED for one in heard for change in one.seen)


def test_a_broken_off_import_is_served_by_nobody_and_begins_anew(rankbookd, made, tmp_path):
    source, target, file = f"sqlite:{tmp_path}/a.db", f"sqlite:{tmp_path}/b.db", tmp_path / "f"
    server = rankbookd(store=source)
    with rankbook.Client(server.grpc) as client:
        for number in range(60):
            client.register_workers(
                made.grid(f"e{number}"), sequence=1, lease_key=f"k{number}", ttl_s=300
            )
    server.stop()
    moved("export", source, str(file))
    program = (
        "import os, sys\n"
        "from rankbook.cli.main import run\n"
        "from rankbook_server.store import SqliteStore\n"
        "commit, left = SqliteStore.commit, [2]\n"
        "async def dies(self, txns):\n"
        "    if not left[0]:\n"
        "        os.kill(os.getpid(), 9)\n"
        "    left[0] -= 1\n"
        "    return await commit(self, txns)\n"
        "SqliteStore.commit = dies\n"
        "run(['import', *sys.argv[1:]])\n"
    )
    broken = subprocess.run([sys.executable, "-c", program, target, str(file)], timeout=60)
    assert broken.returncode == -9

    server.command[server.command.index("--store") + 1] = target
    with pytest.raises(AssertionError, match="is not whole: the import of book"):
        server.start_again()
    assert refusal(5, "import", target, str(file))["reason"] == "IMPORT_UNFINISHED"
    assert refusal(5, "export", target)["reason"] == "IMPORT_UNFINISHED"
    assert moved("import", target, str(file), "--overwrite")["engines"] == 60
    server.start_again()
    with rankbook.Client(server.grpc) as client:
        assert len(client.list_engines().engines) == 60


def test_an_export_is_a_pipe_into_an_import(rankbookd, made, tmp_path):
    source, target = f"sqlite:{tmp_path}/a.db", f"sqlite:{tmp_path}/b.db"
    server = rankbookd(store=source)
    with rankbook.Client(server.grpc) as client:
        client.register_workers([made.record("e")], sequence=1, lease_key="k", ttl_s=300)
    server.stop()
    exported = run("export", source)
    assert exported.returncode == 0
    assert b"payloads" not in exported.stdout
    imported = run("import", target, "-o", "json", stdin=exported.stdout)
    assert json.loads(imported.stdout)["engines"] == 1
    start_over(server, target)
    with rankbook.Client(server.grpc) as client:
        (worker,) = client.get_topology("e", require=Requirement.COMPLETE).workers
        assert worker.handshake.payload == b"agent"


def test_what_is_wrong_is_said_before_anything_is_made(tmp_path: Path):
    file, target = tmp_path / "f", tmp_path / "b.db"
    file.write_text("a line\n")
    assert refusal(5, "import", f"sqlite:{target}", str(file))["reason"] == "INVALID_EXPORT"
    assert refusal(2, "import", f"sqlite:{target}", str(tmp_path / "none"))["code"]
    assert refusal(3, "export", f"sqlite:{target}")["reason"] == "BOOK_NOT_FOUND"
    assert refusal(2, "export", "memory:")["metadata"]["field"] == "store"
    assert refusal(2, "export", f"sqlite:{target}", str(tmp_path / "no" / "f"))["code"] or True
    assert not target.exists()


def test_a_reader_that_leaves_is_an_error_and_a_file_that_fails_is_none(rankbookd, made, tmp_path):
    source = f"sqlite:{tmp_path}/a.db"
    server = rankbookd(store=source)
    with rankbook.Client(server.grpc) as client:
        for number in range(8):
            client.register_workers(
                [made.record(f"e{number}", payload=bytes(100_000))],
                sequence=1,
                lease_key=f"k{number}",
                ttl_s=300,
            )
    server.stop()
    left = subprocess.Popen(
        [sys.executable, "-m", "rankbook.cli", "export", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert left.stdout is not None
    left.stdout.close()
    assert left.stderr is not None
    words = left.stderr.read().decode()
    left.stderr.close()
    assert left.wait(30) == 2
    assert "is not whole" in words
    assert "Traceback" not in words
    assert run("export", source, "/dev/full").returncode == 2
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    missing = tmp_path / "no" / "file"
    assert run("export", source, str(missing)).returncode == 2
    assert not missing.parent.exists()
