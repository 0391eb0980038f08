"""A shared store that is away: at the start, later, or without a quorum."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.contract.etcd_server import EtcdCluster, EtcdNode, b64, free_ports
from tests.rpc.support import Failure, Raw, grid, record

from rankbook import v1

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health(address: str, service: str = "rankbook.v1") -> Any:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        return stub.Check(request, timeout=10, wait_for_ready=True).status


def eventually(claim: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Waits for another process to make a claim true; returns the seconds it took."""
    began = time.monotonic()
    pause = threading.Event()
    while not claim():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s} s: {what}"
        pause.wait(0.02)
    return time.monotonic() - began


@pytest.fixture
def waiting_server(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Starts a server that is not awaited: address, process, log file."""
    started: list[subprocess.Popen[bytes]] = []

    def start(store: str) -> tuple[str, Path, Path]:
        (port,) = free_ports(1)
        log, ready = tmp_path / "log", tmp_path / "ready"
        command = [sys.executable, "-m", "rankbook_server.app", "--store", store]
        command += ["--listen", f"127.0.0.1:{port}", "--http", "off", "--log-format", "json"]
        with log.open("wb") as out:
            process = subprocess.Popen([*command, "--ready-file", str(ready)], stderr=out)
        started.append(process)
        return f"127.0.0.1:{port}", ready, log

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_server_waits_for_its_store_and_says_so_and_serves_once_it_is_there(
    waiting_server: Callable[[str], Any],
) -> None:
    node = EtcdNode()
    try:
        address, ready, log = waiting_server(node.url("book"))
        assert health(address) == NOT_SERVING
        assert health(address, "live") == SERVING
        with Raw(address) as raw:
            for call in (
                lambda: raw.register(grid()),
                lambda: raw.topology(),
                lambda: raw.call("ListEngines", v1.ListEnginesRequest()),
            ):
                with pytest.raises(Failure) as refused:
                    call()
                assert refused.value.reason == "STORE_UNAVAILABLE"
            eventually(lambda: "the store is away" in log.read_text(), 10, "it says so")
            with pytest.raises(Failure) as refused:
                raw.register(grid())
            assert node.endpoint in refused.value.message
            status = raw.call("GetStatus", v1.GetStatusRequest())
            assert not status.store_available
            assert not ready.exists()
            node.start()
            eventually(lambda: health(address) == SERVING, 10, "it serves")
            eventually(ready.exists, 5, "the ready file")
            assert json.loads(ready.read_text())["grpc"] == address
            assert raw.ready(grid()).seal.number == 1
    finally:
        node.close()


def test_without_its_store_a_server_reads_on_with_a_mark_and_refuses_writes_at_once(
    servers: Callable[..., Sequence[Any]], own_node: EtcdNode
) -> None:
    first, second = servers(2, store=own_node.url("book"))
    with Raw(first.grpc) as raw, Raw(second.grpc) as other:
        signed = raw.ready(grid())
        before = other.topology(min_revision=signed.revision)
        watch = other.stream("Watch", v1.WatchRequest(), timeout_s=60)
        assert not next(watch).HasField("stale_for")
        own_node.kill()
        message = next(m for m in watch if m.HasField("stale_for"))
        assert not message.events
        for server, one in ((first, raw), (second, other)):
            eventually(lambda s=server: health(s.grpc) == NOT_SERVING, 10, "it says so")
            assert health(server.grpc, "live") == SERVING
            topology = v1.GetTopologyRequest(
                engine_id="prefill-a-0", require=v1.REQUIREMENT_READY, min_revision=signed.revision
            )
            answer = one.call("GetTopology", topology)
            assert answer.topologies[0] == before
            assert answer.stale_for.ToMilliseconds() > 0
            listed = one.call("ListEngines", v1.ListEnginesRequest())
            assert listed.stale_for.ToMilliseconds() > 0
            status = one.call("GetStatus", v1.GetStatusRequest())
            assert not status.store_available
            assert status.stale_for.ToMilliseconds() > 0
            began = time.monotonic()
            with pytest.raises(Failure) as refused:
                one.register([record("late", tp_size=1)])
            assert time.monotonic() - began < 1
            assert refused.value.reason == "STORE_UNAVAILABLE"
            assert own_node.endpoint in refused.value.message
        own_node.start()
        for server in (first, second):
            eventually(lambda s=server: health(s.grpc) == SERVING, 15, "it is back")
        assert not next(m for m in watch if not m.HasField("stale_for")).events
        late = raw.register([record("late", tp_size=1)])
        again = other.call(
            "GetTopology",
            v1.GetTopologyRequest(
                engine_id="late", require=v1.REQUIREMENT_ANY, min_revision=late.revision
            ),
        )
        assert again.topologies[0].engine.present == 1
        assert not again.HasField("stale_for")
        watch.cancel()


def test_a_store_without_quorum_is_visible_to_clients_within_ten_seconds(
    servers: Callable[..., Sequence[Any]], cluster: EtcdCluster
) -> None:
    (server,) = servers(1, store=cluster.url("book"))
    with Raw(server.grpc) as raw:
        raw.register(grid())
        cluster.kill(0)
        # Two of three are enough.
        raw.register([record("two", tp_size=1)])
        cluster.pause(1)
        took = eventually(lambda: health(server.grpc) == NOT_SERVING, 10, "health says so")
        with pytest.raises(Failure) as refused:
            raw.register([record("one", tp_size=1)])
        assert refused.value.reason == "STORE_UNAVAILABLE"
        asked = v1.GetTopologyRequest(engine_id="two", require=v1.REQUIREMENT_ANY)
        assert raw.call("GetTopology", asked).HasField("stale_for")
        assert took < 10
        cluster.resume(1)
        eventually(lambda: health(server.grpc) == SERVING, 15, "it is back")
        assert raw.register([record("one", tp_size=1)]).epoch == 1


def test_the_death_of_any_member_is_a_gap_of_seconds_and_loses_no_write(
    servers: Callable[..., Sequence[Any]], cluster: EtcdCluster
) -> None:
    started = servers(2, store=cluster.url("book"))
    raws = [Raw(server.grpc) for server in started]
    acknowledged: dict[str, int] = {}
    refusals: set[str] = set()
    late = False
    for number in range(3):
        cluster.kill(cluster.leader(ask=next(i for i in range(3) if i != number - 1)))
        deadline = time.monotonic() + 12
        count = 0
        while count < 20 and not late:
            name = f"e{number}.{count}"
            try:
                reply = raws[count % 2].register([record(name, tp_size=1)])
            except Failure as failure:
                refusals.add(failure.reason)
                late = late or time.monotonic() > deadline
                continue
            acknowledged[name] = reply.revision
            count += 1
        for node in cluster.nodes:
            if node._process is None:
                node.start()
    assert not late, "no write within 12 s"
    assert refusals <= {"STORE_UNAVAILABLE"}
    assert list(acknowledged.values()) == sorted(set(acknowledged.values()))
    for raw in raws:
        for name, revision in acknowledged.items():
            assert raw.topology(name, min_revision=revision).engine.revision == revision
        raw.channel.close()


def test_history_that_etcd_has_forgotten_ends_in_the_full_state_and_no_lost_removal(
    servers: Callable[..., Sequence[Any]], own_node: EtcdNode
) -> None:
    first, second = servers(2, store=own_node.url("book"))
    with Raw(first.grpc) as raw, Raw(second.grpc) as other:
        raw.register([record("stays", tp_size=1)])
        signed = raw.register([record("goes", tp_size=1)])
        assert other.topology("goes", min_revision=signed.revision).engine.present == 1
        second.pause()
        raw.call("RevokeLease", v1.RevokeLeaseRequest(lease_id=signed.lease.lease_id))
        last = raw.register([record("comes", tp_size=1)])
        revision = own_node.call("/v3/maintenance/status")["header"]["revision"]
        own_node.call("/v3/kv/compaction", {"revision": revision, "physical": True})
        own_node.stop()
        own_node.start()
        second.resume()
        found = other.topology("goes", min_revision=last.revision, without_payload=True)
        assert (found.engine.present, found.engine.state) == (0, v1.STATE_GONE)
        assert found == raw.topology("goes")
        assert other.topology("stays").engine.present == 1
        assert other.topology("comes").engine.present == 1


def test_a_full_etcd_refuses_writes_with_what_to_do_and_goes_on_once_there_is_room(
    servers: Callable[..., Sequence[Any]], own_node: EtcdNode
) -> None:
    (server,) = servers(1, store=own_node.url("book"))
    with Raw(server.grpc) as raw:
        raw.register([record("before", tp_size=1)])
        alarm = {"action": "ACTIVATE", "alarm": "NOSPACE", "memberID": "0"}
        own_node.call("/v3/maintenance/alarm", alarm)
        with pytest.raises(Failure) as refused:
            raw.register([record("during", tp_size=1)])
        assert refused.value.reason == "STORE_UNAVAILABLE"
        assert "space" in refused.value.message
        eventually(lambda: health(server.grpc) == NOT_SERVING, 10, "it says so")
        assert raw.topology("before").engine.present == 1
        own_node.call("/v3/maintenance/alarm", {**alarm, "action": "DEACTIVATE"})
        eventually(lambda: health(server.grpc) == SERVING, 15, "it is back")
        assert raw.register([record("after", tp_size=1)]).epoch == 1


def test_a_store_that_was_emptied_is_another_book_in_which_clients_publish_anew(
    servers: Callable[..., Sequence[Any]], own_node: EtcdNode
) -> None:
    first, second = servers(2, store=own_node.url("book"))
    with Raw(first.grpc) as raw, Raw(second.grpc) as other:
        signed = raw.register([record("e", tp_size=1)])
        watch = other.stream("Watch", v1.WatchRequest(), timeout_s=60)
        assert next(watch).book_id == signed.book_id
        everything = {"key": b64("book"), "range_end": b64("book0")}
        own_node.call("/v3/kv/deleterange", everything)
        eventually(
            lambda: raw.call("GetStatus", v1.GetStatusRequest()).book_id != signed.book_id,
            15,
            "the other book",
        )
        for server in (first, second):
            eventually(lambda s=server: health(s.grpc) == SERVING, 15, "it serves")
        again = raw.register([record("e", tp_size=1)], lease_key="another")
        assert again.book_id != signed.book_id
        assert again.epoch == 1
        book = other.call("GetStatus", v1.GetStatusRequest()).book_id
        assert book == again.book_id
        assert other.topology("e", min_revision=again.revision).engine.present == 1
        with pytest.raises(grpc.RpcError) as ended:
            list(watch)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


def test_an_etcd_that_lost_its_data_is_another_book_at_every_server(
    servers: Callable[..., Sequence[Any]], own_node: EtcdNode
) -> None:
    """The head is created at the same revision as before: only its value tells."""
    started = servers(2, store=own_node.url("book"))
    raws = [Raw(server.grpc) for server in started]
    signed = raws[0].register([record("e", tp_size=1)])
    own_node.stop()
    shutil.rmtree(own_node.folder / "data")
    own_node.start()
    for server, raw in zip(started, raws, strict=True):
        eventually(
            lambda r=raw: r.call("GetStatus", v1.GetStatusRequest()).book_id != signed.book_id,
            15,
            "the other book",
        )
        eventually(lambda s=server: health(s.grpc) == SERVING, 15, "it serves")
        assert not raw.call("ListEngines", v1.ListEnginesRequest()).engines
    again = raws[0].register([record("e", tp_size=1)], lease_key="another")
    assert raws[1].topology("e", min_revision=again.revision).engine.epoch == 1
    for raw in raws:
        raw.channel.close()


def test_a_backup_that_was_restored_is_another_book_so_that_no_reader_goes_back(
    servers: Callable[..., Sequence[Any]], own_node: EtcdNode
) -> None:
    started = servers(2, store=own_node.url("book"))
    raws = [Raw(server.grpc) for server in started]
    signed = raws[0].register([record("kept", tp_size=1)])
    own_node.stop()
    backup = own_node.folder / "backup"
    shutil.copytree(own_node.folder / "data", backup)
    own_node.start()
    for server in started:
        eventually(lambda s=server: health(s.grpc) == SERVING, 15, "it serves")
    lost = raws[1].register([record("lost", tp_size=1)])
    assert raws[0].topology("lost", min_revision=lost.revision).engine.present == 1
    own_node.stop()
    shutil.rmtree(own_node.folder / "data")
    backup.rename(own_node.folder / "data")
    own_node.start()
    ids = set()
    for server, raw in zip(started, raws, strict=True):
        eventually(
            lambda r=raw: r.call("GetStatus", v1.GetStatusRequest()).book_id != signed.book_id,
            15,
            "the other book",
        )
        eventually(lambda s=server: health(s.grpc) == SERVING, 15, "it serves")
        listed = raw.call("ListEngines", v1.ListEnginesRequest())
        assert [engine.engine_id for engine in listed.engines] == ["kept"]
        ids.add(listed.book_id)
    assert len(ids) == 1
    for raw in raws:
        raw.channel.close()
