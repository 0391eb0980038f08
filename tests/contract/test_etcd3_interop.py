"""The package etcd3 0.12.0 at a book on real etcd, with servers and workers at work.

etcd3 runs as a program of its own (`etcd3_peer.py`) in `.venv-etcd3`, where protobuf
runs in pure Python, and is asked line by line. `make test-etcd3` runs this; it is not
part of `make test`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.etcd_server import EtcdNode, b64
from tests.rpc.support import Failure, Raw, grid, record

from rankbook import v1

pytestmark = [pytest.mark.etcd3, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-etcd3/bin/python"
PEER = ROOT / "tests/contract/etcd3_peer.py"
LATE = "somebody wrote to the book without asking for its last revision; it is read anew"
_numbers = itertools.count(1)


def environment(protobuf: str) -> dict[str, str]:
    """The environment of a program in `.venv-etcd3`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RANKBOOK_", "PYTHON"))}
    return {**clean, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": protobuf}


@pytest.fixture(autouse=True)
def _there_is_etcd3() -> None:
    if not PYTHON.exists():
        pytest.skip("no etcd3 here: `make setup-etcd3` installs it into .venv-etcd3")


def eventually(claim: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Waits for other processes to make a claim true."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not claim():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        pause.wait(0.02)


class Etcd3:
    """The program over etcd3."""

    def __init__(self, endpoint: str, prefix: str) -> None:
        self._process = subprocess.Popen(
            [str(PYTHON), str(PEER), endpoint, prefix],
            env=environment("python"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.saw: list[tuple[int, dict[str, str]]] = []
        """What its watch brought: revision, and key to "put" or "delete"."""
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._listen)
        self._reader.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if "saw" not in told:
                self._answers.put(told)
                continue
            for revision, events in itertools.groupby(told["saw"], lambda event: event[0]):
                self.saw.append((revision, {key: what for _, what, key in events}))
        self._answers.put({"failed": "the program ended"})

    def __call__(self, what: str, **arguments: Any) -> Any:
        """Has it do something; returns what it answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._answers.get(timeout=60)
        assert "did" in answer, answer
        return answer["did"]

    def close(self) -> None:
        """Ends it, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Place:
    """A book of a test's own, with a server and etcd3 at it."""

    def __init__(self, node: EtcdNode, rankbookd: Any, etcd3: Any) -> None:
        self.prefix = f"stranger-{os.getpid()}-{next(_numbers)}"
        self.node = node
        self.url = node.url(self.prefix)
        self.start_server = lambda: rankbookd(store=self.url)
        self.server = self.start_server()
        self.etcd3: Etcd3 = etcd3(node.endpoint, self.prefix)

    def rankbook(self, *words: str, server: str = "") -> Any:
        """What a command of `rankbook` says in JSON."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "rankbook.cli", "-s", server or self.server.grpc),
                *(*words, "-o", "json"),
            ],
            env=environment("upb"),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        return json.loads(done.stdout)

    def state(self, engine_id: str) -> str:
        """An engine's state as the server has it; empty where it has none."""
        with Raw(self.server.grpc) as raw:
            try:
                found = raw.topology(engine_id).engine.state
            except Failure as failure:
                return "" if failure.reason == "ENGINE_NOT_FOUND" else failure.reason
        return v1.State.Name(found).removeprefix("STATE_")


@pytest.fixture
def place(each_etcd: EtcdNode, rankbookd: Any) -> Iterator[Place]:
    started: list[Etcd3] = []

    def etcd3(endpoint: str, prefix: str) -> Etcd3:
        started.append(Etcd3(endpoint, prefix))
        return started[-1]

    try:
        yield Place(each_etcd, rankbookd, etcd3)
    finally:
        for one in started:
            one.close()


WORKER = """
import base64, sys
import rankbook
from rankbook import v1
worker = v1.WorkerRecord.FromString(base64.b64decode(sys.argv[3]))
held = rankbook.Registration([worker], endpoints=sys.argv[1], ttl_s=float(sys.argv[2]))
held.start()
held.wait_registered(20)
print(held.heartbeat_pid, flush=True)
for line in sys.stdin:
    worker.labels["said"] = line.strip()
    held.update(worker)
"""


class Worker:
    """A worker in a process of its own, with the heartbeat process that keeps it."""

    def __init__(self, address: str, sent: v1.WorkerRecord, ttl_s: float) -> None:
        text = base64.b64encode(sent.SerializeToString()).decode()
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, address, str(ttl_s), text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self.process.stdout is not None
        self.heartbeat_pid = int(self.process.stdout.readline())

    def change(self, text: str) -> None:
        """Changes a label of its record."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def lose(self) -> None:
        """Ends it as a lost node does: nobody can say anything any more."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)
        os.kill(self.heartbeat_pid, signal.SIGKILL)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def start(address: str, sent: v1.WorkerRecord, ttl_s: float = 6.0) -> Worker:
        started.append(Worker(address, sent, ttl_s))
        return started[-1]

    yield start
    for one in started:
        one.close()


def all_live(place: Place, leases: int) -> None:
    """Waits for the liveness keys, which are written a moment after the leases."""

    def claim() -> bool:
        read = place.etcd3("read")
        return len(read["leases"]) == len(read["live"]) == leases

    eventually(claim, 5, f"a liveness key for each of {leases} leases")


def agreed(place: Place, engine_id: str, server: str = "") -> dict[str, Any]:
    """An engine as etcd3 makes it of the keys, after a look that the server says the same."""
    theirs = place.rankbook("topology", engine_id, "--allow-incomplete", server=server)
    ours: dict[str, Any] = place.etcd3("read")["engines"][engine_id]
    # States, and what follows from them, are the server's to say; all else is in the keys.
    assert set(theirs) - set(ours) <= {
        *("state", "problems", "seal", "core", "compat_hashes", "labels", "asleep", "lapsed"),
        *("namespace", "dp_rank", "revision", "start_revision", "start_time", "change_time"),
        *("stale_s", "drain", "successor"),
    }
    assert ours == {name: theirs[name] for name in ours}
    return ours


def test_etcd3_does_not_load_beside_compiled_protobuf_and_does_beside_pure_python() -> None:
    def load(protobuf: str) -> subprocess.CompletedProcess[str]:
        text = "import etcd3, google.protobuf.internal.api_implementation as a; print(a.Type())"
        return subprocess.run(
            [str(PYTHON), "-c", text],
            env=environment(protobuf),
            capture_output=True,
            text=True,
            timeout=60,
        )

    refused = load("upb")
    assert refused.returncode == 1
    assert "Descriptors cannot be created directly" in refused.stderr
    assert load("python").stdout == "python\n"


def test_etcd3_reads_every_key_and_makes_the_topology_that_rankbook_shows(
    place: Place, worker: Callable[..., Worker]
) -> None:
    with Raw(place.server.grpc) as raw:
        raw.ready(grid("whole", pp_size=2, num_layers=8, labels={"zone": "a", "b": "c"}))
        raw.register([record("half", tp=1, num_layers=8)])
        # The other slot of the first start stays for a while, and counts no more.
        raw.register(grid("again", generation="g1"))
        raw.register([record("again", generation="g2")])
    worker(place.server.grpc, record("kept", tp_size=1))

    all_live(place, 6)
    assert agreed(place, "whole")["present"] == 4
    assert agreed(place, "half")["missing"] == [{"pp_rank": 0, "pcp_rank": 0, "tp_rank": 0}]
    again = agreed(place, "again")
    assert (again["epoch"], again["present"], again["declared"]) == (2, 1, 2)
    assert agreed(place, "kept")["present"] == 1
    read = place.etcd3("read")
    assert read["version"] == 1
    assert all(read["digests"])
    everything = {"key": b64(f"{place.prefix}/"), "range_end": b64(f"{place.prefix}0")}
    kvs = place.node.call("/v3/kv/range", {**everything, "keys_only": True})["kvs"]
    keys = {base64.b64decode(kv["key"]).decode() for kv in kvs}
    mine = {key for key in keys if not key.startswith(f"{place.prefix}/server/")}
    assert {f"{place.prefix}/{key}" for key in read["keys"]} == mine
    assert set(read["engines"]) == {"whole", "half", "again", "kept"}
    assert read["leases"] == {name: millis for name, (millis, _) in read["live"].items()}
    # With nobody there to bring its key back, a worker is in the book and may be dead.
    place.server.kill()
    place.etcd3("revoke", engine_id="kept")
    after = place.etcd3("read")
    assert "book/default/w/kept/0.0.0" in after["keys"]
    assert after["engines"]["kept"]["present"] == 0
    assert after["engines"]["whole"]["present"] == 4


def test_the_readmes_example_prints_the_workers_that_rankbook_shows(
    place: Place, worker: Callable[..., Worker]
) -> None:
    found = re.findall(r"<!-- etcd3 -->\n```py\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (code,) = found
    port = place.node.endpoint.rpartition(":")[2]
    assert code.count('"127.0.0.1", 2379') == 1
    assert code.count('"rankbook/') == 2
    code = code.replace("2379", port).replace('"rankbook/', f'"{place.prefix}/')
    with Raw(place.server.grpc) as raw:
        raw.ready(grid("whole", pp_size=2, num_layers=8))
        # Of a start that is over, and of a process that has left.
        raw.register([record("again", generation="g1"), record("again", tp=1, generation="g1")])
        raw.register([record("again", generation="g2")])
        left = raw.register([record("gone", tp_size=1)]).lease
        raw.call("RevokeLease", v1.RevokeLeaseRequest(lease_id=left.lease_id))
    lost = worker(place.server.grpc, record("lost", tp_size=1), ttl_s=60)
    all_live(place, 5)

    def printed() -> list[str]:
        done = subprocess.run(
            [str(PYTHON), "-c", code],
            env=environment("python"),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    shown = [
        f"{name} {slot['pp_rank']}.{slot['pcp_rank']}.{slot['tp_rank']} {start} {end}"
        for name in ("again", "lost", "whole")
        for one in place.rankbook("topology", name, "--allow-incomplete")["workers"]
        for slot, start, end in [
            (one["slot"], one["layers"]["start_layer"], one["layers"]["end_layer"])
        ]
    ]
    assert len(shown) == 1 + 1 + 4
    assert printed() == [f"{line} lives" for line in shown]
    # Its heartbeat and its server are away, and then its key.
    place.server.kill()
    lost.lose()
    place.etcd3("revoke", engine_id="lost")
    assert [line for line in printed() if not line.endswith(" lives")] == [
        "lost 0.0.0 0 4 is being waited for"
    ]


def test_etcd3_sees_a_registration_a_change_and_the_end_of_a_lease_and_of_a_heartbeat_nothing(
    place: Place, worker: Callable[..., Worker]
) -> None:
    etcd3 = place.etcd3
    etcd3("watch")
    held = worker(place.server.grpc, record("e", tp_size=1))
    eventually(lambda: len(etcd3.saw) == 2, 5, "the registration, and its liveness key")
    (lease_id,) = etcd3("read")["live"]
    head, lease, live = "book/default/e/e", f"book/default/l/{lease_id}", f"live/{lease_id}"
    slot = "book/default/w/e/0.0.0"
    # All that one call changes comes at one revision.
    assert etcd3.saw[0][1] == dict.fromkeys(("book", head, slot, lease), "put")
    assert etcd3.saw[1][1] == {live: "put"}

    # Heartbeats arrive: the etcd lease has more left than a moment ago, twice.
    rises, left = 0, 0

    def renewed_twice() -> bool:
        nonlocal rises, left
        now = int(etcd3("lease", lease_id=lease_id)["left"])
        rises, left = rises + (left > 0 and now > left), now
        return rises == 2

    eventually(renewed_twice, 20, "two heartbeats reach etcd")
    assert len(etcd3.saw) == 2
    assert etcd3("read")["revision"] == etcd3.saw[0][0]

    held.change("hello")
    eventually(lambda: len(etcd3.saw) > 2, 5, "the change")
    revision, keys = etcd3.saw[2]
    assert keys.items() >= {"book": "put", slot: "put"}.items()
    assert keys.keys() <= {"book", slot, head}
    changed = agreed(place, "e")
    assert changed["book_revision"] == changed["statuses"][0]["revision"] == revision
    assert changed["workers"][0]["labels"] == {"said": "hello"}

    held.lose()
    eventually(lambda: len(etcd3.saw) > 4, 10, "the lease ends and the worker goes")
    # The key goes first, by etcd's own clock; the record follows in a commit of a server's.
    assert etcd3.saw[3][1] == {live: "delete"}
    assert etcd3.saw[4][1] == {"book": "put", head: "put", slot: "put", lease: "delete"}
    assert place.state("e") == "GONE"
    assert agreed(place, "e")["present"] == 0


def test_the_etcd_lease_of_a_liveness_key_has_the_time_the_key_and_the_number_that_are_documented(
    place: Place, worker: Callable[..., Worker]
) -> None:
    worker(place.server.grpc, record("e", tp_size=1), ttl_s=7.0)
    eventually(lambda: bool(place.etcd3("read")["live"]), 5, "the liveness key")
    read = place.etcd3("read")
    ((lease_id, (millis, number)),) = read["live"].items()
    found = place.etcd3("lease", lease_id=lease_id)
    assert millis == 7000
    assert found["granted"] == 7
    assert 0 < found["left"] <= 7
    assert found["keys"] == [f"live/{lease_id}"]
    book_id = read["engines"]["e"]["book_id"]
    whole = hashlib.sha256(f"{book_id}\0{lease_id}\0007".encode()).digest()[:8]
    assert found["number"] == number == int.from_bytes(whole, "big") & (2**63 - 1)


@pytest.mark.parametrize(("seal", "state"), [(True, "READY"), (False, "COMPLETE")])
def test_an_engine_that_etcd3_published_is_shown_and_goes_once_etcd3_stops_renewing(
    place: Place, seal: bool, state: str
) -> None:
    assert place.etcd3(
        *("publish",), engine_id="s", generation="g", pp_size=2, tp_size=2, ttl_s=2, seal=seal
    )
    eventually(lambda: place.state("s") == state, 2, state)
    shown = agreed(place, "s")
    assert (shown["present"], shown["group"], shown["epoch"]) == (4, "strangers", 1)
    assert all(place.etcd3("read")["digests"])
    # It stays for as long as it is renewed: for three times its time to live.
    threading.Event().wait(6)
    assert place.state("s") == state
    place.etcd3("let_go", lease_id="s.g.lease")
    eventually(lambda: place.state("s") == "GONE", 8, "it goes")
    assert agreed(place, "s")["present"] == 0


def test_starts_at_a_server_and_starts_of_etcd3_share_the_epochs_of_an_engine(
    place: Place,
) -> None:
    start = {"engine_id": "s", "pp_size": 1, "tp_size": 1, "ttl_s": 20}
    assert place.etcd3("publish", **start, generation="g1")
    with Raw(place.server.grpc) as raw:
        eventually(lambda: place.state("s") == "COMPLETE", 2, "COMPLETE")
        assert raw.register([record("s", tp_size=1, generation="g2")]).epoch == 2
        assert agreed(place, "s")["generation"] == "g2"
        assert place.etcd3("publish", **start, generation="g3")
        eventually(lambda: raw.topology("s").engine.generation == "g3", 2, "the third start")
        assert agreed(place, "s")["epoch"] == 3
        # The second start is over, also for its own worker.
        with pytest.raises(Failure) as refused:
            raw.register([record("s", tp_size=1, generation="g2")], sequence=2)
        assert refused.value.reason == "GENERATION_FENCED"


def test_a_write_of_etcd3_on_an_outdated_revision_is_refused_and_changes_nothing(
    place: Place,
) -> None:
    before = place.etcd3("read")["revision"]
    with Raw(place.server.grpc) as raw:
        raw.register([record("first", tp_size=1)])
    wanted = {"engine_id": "s", "generation": "g", "pp_size": 1, "tp_size": 1, "ttl_s": 5}
    assert place.etcd3("publish", **wanted, revision=before) is False
    read = place.etcd3("read")
    assert set(read["engines"]) == {"first"}
    assert "s.g.lease" not in read["live"]
    assert place.state("s") == ""
    assert place.etcd3("publish", **wanted) is True
    eventually(lambda: place.state("s") == "COMPLETE", 2, "COMPLETE")
    assert place.state("first") == "COMPLETE"
    assert LATE not in place.server.log


def test_servers_survive_writes_without_the_rule_and_keep_what_they_acknowledged(
    place: Place,
) -> None:
    other = place.start_server()
    grid_of = {"pp_size": 4, "tp_size": 24, "ttl_s": 20}
    assert place.etcd3("publish", engine_id="s", generation="g", **grid_of)
    told: dict[str, bytes] = {}

    def late() -> list[int]:
        return [server.log.count(LATE) for server in (place.server, other)]

    place.etcd3("pound", engine_id="s", size=16_384)
    with Raw(place.server.grpc) as raw, Raw(other.grpc) as raw2:
        deadline, before = time.monotonic() + 60, [0, 0]
        for number in itertools.count():
            name = f"e{number}"
            at = raw2 if number % 2 else raw
            told[name] = at.register([record(name, tp_size=1)]).record_digests[0]
            if number == 50:
                before = late()
            if number > 50 and all(now > then for now, then in zip(late(), before, strict=True)):
                # At once: what came late just now has not been put once more.
                break
            assert time.monotonic() < deadline, f"no write came late, in {number} registrations"
        place.etcd3("rest")
        # A commit after all of it, to wait for at every server.
        revision = raw.register([record("after", tp_size=1)]).revision
    for server in (place.server, other, place.start_server()):
        with Raw(server.grpc) as now:
            for name, digest in told.items():
                (status,) = now.topology(name, min_revision=revision).statuses
                assert status.record_digest == digest, name
        # Read anew, so every slot is as it was put last.
        assert agreed(place, "s", server.grpc)["present"] == 96
    assert set(place.etcd3("read")["engines"]) == {"s", "after", *told}
