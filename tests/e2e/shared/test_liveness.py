"""Leases over a shared store: who lives stays, who died goes, whoever was away."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tests.contract.etcd_server import EtcdCluster, EtcdNode, b64
from tests.rpc.support import Failure, Raw, record

from rankbook import v1

TTL_S = 2.0


class Changes:
    """What a watch has told, in a thread."""

    def __init__(self, address: str) -> None:
        self.raw = Raw(address)
        self.events: list[v1.WatchEvent] = []
        self.stale: list[bool] = []
        self._stream = self.raw.stream("Watch", v1.WatchRequest(), timeout_s=300)
        self._synced = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._synced.wait(20)

    def _run(self) -> None:
        try:
            for message in self._stream:
                self.events += message.events
                self.stale.append(message.HasField("stale_for"))
                if message.synced:
                    self._synced.set()
        except Exception:  # noqa: BLE001 - the stream's end, when the test cancels it
            return

    def of(self, engine_id: str) -> list[str]:
        return [
            f"{v1.EventType.Name(e.type).removeprefix('EVENT_TYPE_')} {e.engine.present}"
            for e in list(self.events)
            if e.engine.engine_id == engine_id
        ]

    def close(self) -> None:
        self._stream.cancel()
        self._thread.join(5)
        self.raw.channel.close()


@pytest.fixture
def changes() -> Iterator[Callable[[str], Changes]]:
    opened: list[Changes] = []

    def open_one(address: str) -> Changes:
        opened.append(Changes(address))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def present(raw: Raw, engine_id: str) -> int:
    try:
        return raw.topology(engine_id).engine.present
    except Failure as failure:
        return -1 if failure.reason == "ENGINE_NOT_FOUND" else -2


def pass_time(seconds: float) -> None:
    """Lets time pass for leases: there is no event to wait for."""
    threading.Event().wait(seconds)


def freeze(program: Any, heartbeat: bool = True) -> None:
    """Stops a worker and its heartbeat process, as a lost node does."""
    program.process.send_signal(signal.SIGSTOP)
    if heartbeat:
        os.kill(program.heartbeat_pid, signal.SIGSTOP)


@pytest.fixture
def holder(program: Callable[..., Any], made: Any) -> Iterator[Callable[..., Any]]:
    """Starts a worker in a process of its own; it knows its heartbeat's pid."""
    import base64

    from rankbook import convert

    text = """
import base64, sys
import rankbook
from rankbook import v1
records = [v1.WorkerRecord.FromString(base64.b64decode(text)) for text in sys.argv[3:]]
registration = rankbook.Registration(records, endpoints=sys.argv[1], ttl_s=float(sys.argv[2]))
registration.start()
registration.wait_registered(20)
print(registration.heartbeat_pid, flush=True)
sys.stdin.readline()
"""

    def start(address: str, *records: Any, ttl_s: float = TTL_S) -> Any:
        sent = [convert.to_message(one, v1.WorkerRecord) for one in records]
        texts = [base64.b64encode(one.SerializeToString()).decode() for one in sent]
        one = program(text, address, str(ttl_s), *texts)
        one.heartbeat_pid = int(one.line())
        started.append(one)
        return one

    started: list[Any] = []
    yield start
    for one in started:
        # One that was frozen ends with nobody.
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.heartbeat_pid, signal.SIGKILL)


def addresses(servers: Sequence[Any]) -> str:
    return ",".join(server.grpc for server in servers)


def test_a_crashed_worker_is_out_of_every_watchers_topology_within_two_seconds(
    servers: Callable[..., Sequence[Any]], holder: Any, made: Any, changes: Any
) -> None:
    started = servers(3)
    worker = holder(addresses(started), made.record("e"))
    watches = [changes(server.grpc) for server in started]
    began = time.monotonic()
    worker.process.kill()
    for watch in watches:
        made.eventually(lambda w=watch: w.of("e")[-1] == "REMOVED 0", 5, "the worker goes")
    assert time.monotonic() - began < 2


def test_a_lost_node_is_out_of_every_watchers_topology_within_a_ttl_and_a_second(
    servers: Callable[..., Sequence[Any]], holder: Any, made: Any, changes: Any
) -> None:
    started = servers(3)
    worker = holder(addresses(started), made.record("e"))
    watches = [changes(server.grpc) for server in started]
    began = time.monotonic()
    freeze(worker)
    for watch in watches:
        made.eventually(lambda w=watch: w.of("e")[-1] == "REMOVED 0", 10, "the worker goes")
    # The last renewal was a moment before.
    assert TTL_S * 2 / 3 - 0.3 < time.monotonic() - began < TTL_S + 1


def test_all_servers_away_for_longer_than_the_ttl_lose_nobody_who_lives(
    servers: Callable[..., Sequence[Any]], holder: Any, made: Any, changes: Any
) -> None:
    started = servers(2)
    holder(addresses(started), made.record("alive"))
    dead = holder(addresses(started), made.record("dead"))
    with Raw(started[0].grpc) as raw:
        made.eventually(lambda: present(raw, "dead") == 1, 5, "both are in")
    for server in started:
        server.kill()
    freeze(dead)
    pass_time(3 * TTL_S)
    for server in started:
        server.start_again(same_port=True)
    watch = changes(started[1].grpc)
    with Raw(started[0].grpc) as raw:
        assert present(raw, "alive") == present(raw, "dead") == 1
        # Who died while every server was away goes too, after a time to live.
        made.eventually(lambda: present(raw, "dead") == 0, TTL_S + 3, "the dead one goes")
        pass_time(2 * TTL_S)
        assert present(raw, "alive") == 1
    assert watch.of("alive") == ["ADDED 1"]


@pytest.mark.parametrize("away_s", [1.0, 3 * TTL_S])
def test_etcd_away_for_less_or_more_than_the_ttl_loses_nobody_who_lives(
    servers: Callable[..., Sequence[Any]],
    own_node: EtcdNode,
    holder: Any,
    made: Any,
    changes: Any,
    away_s: float,
) -> None:
    started = servers(2, store=own_node.url("book"))
    holder(addresses(started), made.record("alive"))
    dead = holder(addresses(started), made.record("dead"))
    watch = changes(started[1].grpc)
    made.eventually(lambda: bool(watch.of("dead") and watch.of("alive")), 5, "both are in")
    own_node.kill()
    freeze(dead)
    pass_time(away_s)
    own_node.start()
    with Raw(started[0].grpc) as raw:
        made.eventually(lambda: present(raw, "dead") == 0, 3 * TTL_S + 5, "the dead one goes")
        pass_time(2 * TTL_S)
        assert present(raw, "alive") == 1
    assert watch.of("alive") == ["ADDED 1"]


def test_no_heartbeat_writes_a_key(
    servers: Callable[..., Sequence[Any]], own_node: EtcdNode
) -> None:
    (server,) = servers(1, store=own_node.url("book"))
    with Raw(server.grpc) as raw:
        leases = [
            raw.register([record(f"e{n}", tp_size=1)], ttl_s=5.0).lease.lease_id for n in range(40)
        ]
        request = v1.RenewLeasesRequest(
            leases=[v1.LeaseRenewal(lease_id=lease_id) for lease_id in leases]
        )

        def renew() -> None:
            answers = raw.call("RenewLeases", request).leases
            assert {answer.state for answer in answers} == {v1.LEASE_STATE_ALIVE}

        def written() -> dict[str, str]:
            """Every key with the revision that last wrote it, but the servers' own words."""
            everything = {"key": b64("book/"), "range_end": b64("book0"), "keys_only": True}
            kvs = own_node.call("/v3/kv/range", everything)["kvs"]
            words = b64("book/server/")[:14]
            return {kv["key"]: kv["mod_revision"] for kv in kvs if kv["key"][:14] != words}

        # The last key is written a moment after its registration.
        while len(own_node.call("/v3/kv/range", LIVE_RANGE).get("kvs", ())) < 40:
            renew()
        renew()
        before = written()
        for _ in range(20):
            renew()
            pass_time(0.2)
        assert written() == before
        live = own_node.call("/v3/kv/range", LIVE_RANGE)["kvs"]
        assert all(one["create_revision"] == one["mod_revision"] for one in live)


LIVE_RANGE = {"key": b64("book/live/"), "range_end": b64("book/live0")}


def test_a_leader_that_stands_still_does_not_end_everybody(
    cluster: EtcdCluster,
    servers: Callable[..., Sequence[Any]],
    holder: Any,
    made: Any,
    changes: Any,
) -> None:
    started = servers(3, store=cluster.url("book"))
    names = [f"e{number}" for number in range(6)]
    for name in names:
        holder(addresses(started), made.record(name))
    watches = [changes(server.grpc) for server in started]
    for _ in range(2):
        leader = cluster.leader()
        cluster.pause(leader)
        pass_time(2 * TTL_S)
        cluster.resume(leader)
        pass_time(2 * TTL_S)
    for watch in watches:
        for name in names:
            assert watch.of(name) == ["ADDED 1"], (name, watch.of(name))


def test_leases_that_the_store_revokes_by_mistake_come_back_and_nobody_hears_of_it(
    servers: Callable[..., Sequence[Any]],
    own_node: EtcdNode,
    holder: Any,
    made: Any,
    changes: Any,
) -> None:
    """What an old leader does that comes back from a stall (etcd-io/etcd#15247)."""
    started = servers(3, store=own_node.url("book"))
    names = [f"e{number}" for number in range(5)]
    for number, name in enumerate(names):
        holder(started[number % 3].grpc, made.record(name))
    watches = [changes(server.grpc) for server in started]
    made.eventually(
        lambda: len(own_node.call("/v3/kv/range", LIVE_RANGE).get("kvs", ())) == 5, 5, "keys"
    )
    for _ in range(3):
        for lease in own_node.call("/v3/lease/leases").get("leases", ()):
            own_node.call("/v3/lease/revoke", {"ID": lease["ID"]})
        made.eventually(
            lambda: len(own_node.call("/v3/kv/range", LIVE_RANGE).get("kvs", ())) == 5, 2, "again"
        )
    pass_time(TTL_S)
    for watch in watches:
        for name in names:
            assert watch.of(name) == ["ADDED 1"], (name, watch.of(name))
