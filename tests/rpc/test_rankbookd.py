"""The process: starting, settings, signals, health, and its own stalls."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rankbook import v1

from .support import Raw, failure_of, grid, span

TIMEOUT_S = 20.0


def run(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RANKBOOK_")}
    return subprocess.run(
        [sys.executable, "-m", "rankbook_server.app", *flags],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**clean, **(env or {})},
        check=False,
    )


def test_the_ready_file_says_where_it_serves_and_goes_with_it(rankbookd: Any) -> None:
    server = rankbookd()
    ready = json.loads(server.ready_file.read_text())
    assert ready == {"grpc": server.grpc, "http": server.http, "pid": server.pid}
    assert not server.grpc.endswith(":0")
    assert server.stop() == 0
    assert not server.ready_file.exists()


def test_a_stop_ends_watches_and_waits_with_a_reason_and_exits_0(rankbookd: Any) -> None:
    server = rankbookd()
    with Raw(server.grpc) as raw, raw.session() as session:
        watch = session.send("watch", v1.WatchRequest())
        assert session.take().watch.synced
        wait = session.send("get_topology", v1.GetTopologyRequest(engine_id="e", wait=span(60)))
        health = health_pb2_grpc.HealthStub(raw.channel)
        states = health.Watch(health_pb2.HealthCheckRequest(service="rankbook.v1"))
        assert next(states).status == health_pb2.HealthCheckResponse.SERVING
        server.process.send_signal(signal.SIGTERM)
        assert next(states).status == health_pb2.HealthCheckResponse.NOT_SERVING
        replies = [session.take(), session.take()]
        ended = {reply.request_id: failure_of(reply.status).reason for reply in replies}
        assert ended == {watch: "SHUTTING_DOWN", wait: "SHUTTING_DOWN"}
        with pytest.raises(grpc.RpcError) as caught:
            session.take()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        states.cancel()
    assert server.process.wait(TIMEOUT_S) == 0
    assert '"event": "stopped"' in server.log


def test_an_interrupt_is_a_clean_stop_too(rankbookd: Any) -> None:
    server = rankbookd()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(TIMEOUT_S) == 0


def test_a_second_signal_ends_it_at_once(rankbookd: Any) -> None:
    server = rankbookd("--drain-grace", "60")
    with Raw(server.grpc) as raw:
        health = health_pb2_grpc.HealthStub(raw.channel)
        # An open call is what the first signal waits for, here a minute.
        states = health.Watch(health_pb2.HealthCheckRequest(service="rankbook.v1"))
        assert next(states).status == health_pb2.HealthCheckResponse.SERVING
        server.process.send_signal(signal.SIGTERM)
        assert next(states).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_S) == 1
        states.cancel()


def test_what_was_acknowledged_is_there_after_a_restart(rankbookd: Any, tmp_path: Path) -> None:
    server = rankbookd(store=f"sqlite:{tmp_path / 'book.db'}")
    with Raw(server.grpc) as raw:
        raw.ready(grid())
        before = raw.topology()
        boot_id = raw.call("GetStatus", v1.GetStatusRequest()).boot_id
    assert server.stop() == 0
    server.start_again()
    with Raw(server.grpc) as raw:
        assert raw.topology() == before
        assert raw.call("GetStatus", v1.GetStatusRequest()).boot_id != boot_id
        lease = raw.register(grid()).lease.lease_id
        renewal = v1.RenewLeasesRequest(leases=[v1.LeaseRenewal(lease_id=lease)])
        assert raw.call("RenewLeases", renewal).leases[0].state == v1.LEASE_STATE_ALIVE


def test_a_frozen_server_expires_nobody_when_it_runs_on(rankbookd: Any) -> None:
    server = rankbookd()
    with Raw(server.grpc) as raw:
        lease = raw.register(grid(), ttl_s=2.0).lease.lease_id
        server.pause()
        deadline = time.monotonic() + 4.5
        while time.monotonic() < deadline:
            os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            select_idle(0.1)
        server.resume()
        assert raw.topology().engine.state == v1.STATE_COMPLETE
        renewal = v1.RenewLeasesRequest(leases=[v1.LeaseRenewal(lease_id=lease)])
        assert raw.call("RenewLeases", renewal).leases[0].state == v1.LEASE_STATE_ALIVE
        # Left alone it ends as always, a full time to live later.
        gone = v1.GetTopologyRequest(
            engine_id="prefill-a-0", require=v1.REQUIREMENT_READY, wait=span(10)
        )
        started = time.monotonic()
        with pytest.raises(Exception, match="ENGINE_GONE"):
            raw.call("GetTopology", gone)
        assert 1.5 < time.monotonic() - started < 4.0
    assert "did not run for a while" in server.log


def select_idle(seconds: float) -> None:
    """Lets real time pass: the frozen process is what is observed."""
    left, right = socket.socketpair()
    with left, right:
        left.settimeout(seconds)
        with pytest.raises(TimeoutError):
            left.recv(1)


def test_help_tells_a_newcomer_what_it_is_and_every_setting() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    for words in ("book of ranks", "--listen", "RANKBOOK_MAX_SESSIONS", "127.0.0.1:7420"):
        assert words in shown.stdout


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rankbookd.toml"
    file.write_text("max_sessions = 1\nmax_watchers = 2\nmax_waiters = 3\n")
    env = {"RANKBOOK_MAX_SESSIONS": "10", "RANKBOOK_MAX_WATCHERS": "20"}
    shown = run("--config", str(file), "--max-sessions", "100", "--show-config", env=env)
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in shown.stdout.splitlines()}
    assert lines["max_sessions"] == ["100", "(flag --max-sessions)"]
    assert lines["max_watchers"] == ["20", "(env RANKBOOK_MAX_WATCHERS)"]
    assert lines["max_waiters"] == ["3", f"(file {file})"]
    assert lines["max_leases"] == ["100000", "(default)"]


BAD_SETTINGS = {
    "unknown in the file": ("max_sesions = 1\n", (), "max_sesions"),
    "no number": ("", ("--tombstone-ttl", "soon"), "tombstone-ttl"),
    "zero": ("max_sessions = 0\n", (), "max_sessions"),
    "no port": ("", ("--listen", "127.0.0.1"), "HOST:PORT"),
    "beyond this machine without TLS": ("", ("--listen", "0.0.0.0:0"), "insecure"),
    "a certificate without its key": ("", ("--tls-cert", "c.pem"), "tls_key"),
    "no TOML": ("=\n", (), "TOML"),
}


@pytest.mark.parametrize(("file", "flags", "words"), BAD_SETTINGS.values(), ids=BAD_SETTINGS.keys())
def test_a_bad_setting_is_named_and_nothing_starts(
    tmp_path: Path, file: str, flags: tuple[str, ...], words: str
) -> None:
    path = tmp_path / "rankbookd.toml"
    path.write_text(file)
    failed = run("--config", str(path), "--store", "memory:", *flags)
    assert failed.returncode == 2
    assert words in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_port_in_use_is_a_clear_error(rankbookd: Any) -> None:
    server = rankbookd()
    for flag, address in (("--listen", server.grpc), ("--http", server.http)):
        others = {"--listen": "127.0.0.1:0", "--http": "127.0.0.1:0", flag: address}
        words = [word for pair in others.items() for word in pair]
        failed = run("--store", "memory:", *words)
        assert failed.returncode == 1
        assert address in failed.stderr
        (line,) = failed.stderr.splitlines()
        assert "address already in use" in line


def test_two_servers_on_one_book_are_one_too_many(rankbookd: Any, tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'book.db'}"
    server = rankbookd(store=store)
    failed = run("--listen", "127.0.0.1:0", "--http", "off", "--store", store)
    assert failed.returncode == 1
    assert "Traceback" not in failed.stderr
    with Raw(server.grpc) as raw:
        assert raw.register(grid()).epoch == 1


def test_listening_beyond_this_machine_works_when_said_by_name(rankbookd: Any) -> None:
    server = rankbookd("--insecure", listen="0.0.0.0:0")
    with Raw(f"127.0.0.1:{server.grpc.rpartition(':')[2]}") as raw:
        assert raw.call("GetStatus", v1.GetStatusRequest()).store_available


def test_the_web_side_has_health_metrics_and_a_hint(rankbookd: Any) -> None:
    server = rankbookd()
    for path in ("/healthz", "/livez", "/readyz"):
        assert server.get(path) == "ok\n"
    with Raw(server.grpc) as raw:
        raw.ready(grid())
        with pytest.raises(Exception, match="ENGINE_NOT_FOUND"):
            raw.topology("none")
    metrics = server.get("/metrics")
    for line in (
        'rankbook_calls_total{method="RegisterWorkers",reason="OK"} 1.0',
        'rankbook_calls_total{method="GetTopology",reason="ENGINE_NOT_FOUND"} 1.0',
        'rankbook_call_seconds_count{method="SealEngine"} 1.0',
        'rankbook_engines{namespace="default",state="READY"} 1.0',
        'rankbook_workers{namespace="default"} 2.0',
        "rankbook_leases 2.0",
        "rankbook_watchers 0.0",
        "rankbook_sessions 0.0",
        "rankbook_store_available 1.0",
    ):
        assert line in metrics.splitlines()
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.get("/metadata")
    assert caught.value.code == 404
    assert b"/metrics" in caught.value.read()
    caught.value.close()


def test_payloads_are_never_logged_and_seals_are(rankbookd: Any) -> None:
    server = rankbookd("--log-level", "debug")
    secret = b"do-not-log-this-payload"
    with Raw(server.grpc) as raw:
        raw.ready(grid(payload=secret))
        raw.call("EvictEngine", v1.EvictEngineRequest(engine_id="prefill-a-0", requested_by="me"))
    assert server.stop() == 0
    events = [json.loads(line)["event"] for line in server.log.splitlines()]
    assert "engine_evicted" in events
    assert any("seal" in event for event in events)
    assert secret.decode() not in server.log
    assert "ZG8tbm90LWxvZy10aGlz" not in server.log
