"""An import into a store that servers share: they stand back until it is whole."""

from __future__ import annotations

import json
import subprocess
import sys
from urllib.error import HTTPError

import pytest
from tests.contract.etcd_server import EtcdNode, NoProgramError

import rankbook
from rankbook import Requirement, State

pytestmark = pytest.mark.timeout(180)

IMPORT = """
import os, sys
from rankbook.cli.main import run
from rankbook_server.store.etcd import EtcdStore

commit, left = EtcdStore.commit, [int(sys.argv[1])]


async def dies(self, txns):
    if not left[0]:
        os.kill(os.getpid(), 9)
    left[0] -= 1
    return await commit(self, txns)


EtcdStore.commit = dies
sys.exit(run(["import", *sys.argv[2:], "-o", "json"]))
"""


@pytest.fixture
def etcd():
    try:
        node = EtcdNode()
    except NoProgramError as error:
        pytest.skip(str(error))
    with node:
        yield node


def bring(commits: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Imports, and is killed before its next commit after so many."""
    return subprocess.run(
        [sys.executable, "-c", IMPORT, str(commits), *words],
        capture_output=True,
        text=True,
        timeout=60,
    )


def is_ready(server) -> bool:
    try:
        server.get("/readyz")
    except HTTPError:
        return False
    return True


def test_running_servers_wait_for_the_end_of_an_import_and_show_what_came(
    etcd, rankbookd, made, tmp_path
):
    """The import dies half-way under two servers; a third comes only then."""
    source, file = f"sqlite:{tmp_path}/a.db", str(tmp_path / "book")
    old = rankbookd(store=source)
    with rankbook.Client(old.grpc) as client:
        for number in range(60):
            client.register_workers(
                made.grid(f"e{number}"), sequence=1, lease_key=f"k{number}", ttl_s=300
            )
    old.stop()
    exported = subprocess.run([sys.executable, "-m", "rankbook.cli", "export", source, file])
    assert exported.returncode == 0

    store = etcd.url("book")
    servers = [rankbookd(store=store) for _ in range(2)]
    with (
        rankbook.Client(servers[0].grpc) as one,
        rankbook.Client(servers[1].grpc) as two,
        rankbook.TopologyView(two) as view,
    ):
        view.wait_synced(10)
        one.register_workers([made.record("mine")], sequence=1, lease_key="mine", ttl_s=300)
        made.eventually(lambda: view.get("mine") is not None, 5, "both serve")
        one.evict_engine("mine")
        refused = bring(99, store, file)
        assert json.loads(refused.stdout)["error"]["reason"] == "BOOK_NOT_EMPTY"
        assert bring(3, store, file, "--overwrite").returncode == -9

        for server in servers:
            made.eventually(lambda server=server: not is_ready(server), 10, "it stands back")
        with pytest.raises(rankbook.Unavailable, match="is not whole: the import of book"):
            one.register_workers([made.record("no")], sequence=1, lease_key="no", ttl_s=300)
        assert [e.engine_id for e in two.list_engines().engines] == ["mine"]
        # Killed and brought to its end by another.
        assert bring(99, store, file).returncode == 5
        brought = bring(99, store, file, "--overwrite")
        assert brought.returncode == 0, brought.stderr

        for server in servers:
            made.eventually(lambda server=server: is_ready(server), 20, "it serves again")
        made.eventually(lambda: len(view.engines()) == 60, 20, "the watch has what came")
        assert view.get("mine") is None
        for client in (one, two):
            listed = client.list_engines().engines
            assert len([e for e in listed if e.state is State.COMPLETE]) == 60
            topology = client.get_topology("e7", require=Requirement.COMPLETE)
            assert [w.handshake.payload for w in topology.workers] == [b"agent"] * 4
            assert topology.engine.revision <= topology.book_revision
        # An epoch that the overwritten book had given out is not given again.
        assert one.begin_generation("mine", "again") == 2
        reply = one.register_workers([made.record("new")], sequence=1, lease_key="n", ttl_s=300)
        assert reply.revision > json.loads(brought.stdout)["revision"]
        made.eventually(lambda: view.get("new") is not None, 5, "they follow each other again")
    for server in servers:
        assert "somebody wrote" not in server.log
        assert "cannot be read" not in server.log
