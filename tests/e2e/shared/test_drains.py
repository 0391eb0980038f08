"""A drain that is asked for at one server knows of transfers that another one was told of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.contract.etcd_server import EtcdNode, b64
from tests.rpc.support import Raw, grid, span

import rankbook
from rankbook import v1
from rankbook_server.drains import WORD_TTL_S
from rankbook_server.peers import FORGET_S

IDLE, WAITING, DEADLINE = (
    v1.DRAIN_OUTCOME_IDLE,
    v1.DRAIN_OUTCOME_WAITING,
    v1.DRAIN_OUTCOME_DEADLINE,
)
E = "prefill-a-0"


def report(raw: Raw, count: int, boot_id: str = "decode", engine_id: str = E) -> None:
    """Says that a process has so many transfers in flight."""
    peer = v1.PeerConnection(engine_id=engine_id, generation="g1", transfers_in_flight=count)
    raw.call("ReportPeers", v1.ReportPeersRequest(boot_id=boot_id, peers=[peer]))


def drain(
    raw: Raw, wait_s: float = 0.0, *, engine_id: str = E, deadline_s: float = 0.0
) -> v1.DrainEngineResponse:
    """Asks for a drain and waits so long for its end."""
    request = v1.DrainEngineRequest(engine_id=engine_id, wait=span(wait_s))
    if deadline_s:
        request.deadline.CopyFrom(span(deadline_s))
    reply: v1.DrainEngineResponse = raw.call("DrainEngine", request, timeout_s=wait_s + 20)
    return reply


def undo(raw: Raw, engine_id: str = E) -> None:
    raw.call("DrainEngine", v1.DrainEngineRequest(engine_id=engine_id, undo=True))


class Later:
    """A call in a thread, and when it came back."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.reply: Any = None
        self.ended_s = 0.0
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.reply = self._call()
        self.ended_s = time.monotonic()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> Any:
        self._thread.join(timeout_s)
        assert self.is_done
        return self.reply


def test_a_transfer_reported_at_one_server_keeps_a_drain_at_another_waiting_until_it_ends(
    servers: Callable[..., Sequence[Any]],
) -> None:
    one, two, three = (Raw(server.grpc) for server in servers(3))
    with one, two, three:
        one.ready(grid())
        report(two, 3, "decode-0")
        report(three, 2, "decode-1")
        assert drain(one).outcome == WAITING
        reply = drain(one, 3.0)
        assert (reply.outcome, reply.transfers_in_flight) == (WAITING, 5)
        waiting = Later(lambda: drain(one, 60.0))
        report(two, 0, "decode-0")
        threading.Event().wait(2.0)
        assert not waiting.is_done
        ended_s = time.monotonic()
        report(three, 0, "decode-1")
        reply = waiting.wait(10)
        assert (reply.outcome, reply.transfers_in_flight) == (IDLE, 0)
        assert waiting.ended_s - ended_s < 2.0
        # Also where it is asked at the one that knew, and at one that knew nothing.
        for raw in (two, three):
            assert drain(raw, 5.0).outcome == IDLE


def test_what_was_reported_before_a_drain_is_never_missed_by_it(
    servers: Callable[..., Sequence[Any]],
) -> None:
    one, two = (Raw(server.grpc) for server in servers(2))
    with one, two:
        one.ready(grid())
        for number in range(15):
            report(two, 1)
            asked = drain(one, 0.02 * number)
            assert asked.outcome == WAITING, number
            report(two, 0)
            assert drain(one, 10.0).outcome == IDLE, number
            # It drains still, and what starts now counts for whoever asks next.
            report(two, 4)
            reply = drain(one, 0.5)
            assert (reply.outcome, reply.transfers_in_flight) == (WAITING, 4), number
            undo(one)


def test_an_idle_engine_is_drained_at_once_whoever_is_asked(
    servers: Callable[..., Sequence[Any]],
) -> None:
    raws = [Raw(server.grpc) for server in servers(3)]
    raws[0].ready(grid())
    for turn in range(6):
        began_s = time.monotonic()
        assert drain(raws[turn % 3], 20.0).outcome == IDLE
        assert time.monotonic() - began_s < 2.0
        undo(raws[(turn + 1) % 3])
    for raw in raws:
        raw.channel.close()


def test_a_deadline_ends_a_drain_that_another_server_keeps_waiting(
    servers: Callable[..., Sequence[Any]],
) -> None:
    one, two = (Raw(server.grpc) for server in servers(2))
    with one, two:
        one.ready(grid())
        report(two, 6)
        began_s = time.monotonic()
        reply = drain(one, 30.0, deadline_s=2.0)
        assert (reply.outcome, reply.transfers_in_flight) == (DEADLINE, 6)
        assert 2.0 <= time.monotonic() - began_s < 4.0


def test_reports_write_nothing_while_nobody_drains(
    servers: Callable[..., Sequence[Any]], own_node: EtcdNode, made: Any
) -> None:
    def revision() -> int:
        return int(own_node.call("/v3/maintenance/status")["header"]["revision"])

    def written() -> list[int]:
        request = {"key": b64("book/server/"), "range_end": b64("book/server0")}
        found = own_node.call("/v3/kv/range", request).get("kvs", [])
        return [int(one["version"]) for one in found]

    started = servers(3, store=own_node.url("book"))
    one, two, _ = (Raw(server.grpc) for server in started)
    with one, two:
        one.ready(grid())
        report(one, 1, "rests")
        report(two, 1, "rests-too")
        made.eventually(lambda: written() == [1, 1, 1], 5, "each has a key")
        # Of one that was told nothing there is nothing to wait for.
        started[2].stop()
        assert written() == [1, 1]
        before = revision()
        for number in range(100):
            report(two, number % 3, "busy")
        assert revision() == before
        drain(one)
        for number in range(100):
            report(two, 1 + number % 3, "busy")
            threading.Event().wait(0.02)
        assert drain(one).transfers_in_flight >= 2
        # Once for the drain, once for the first second and once for each after.
        assert max(written()) <= 6


def test_processes_without_a_server_tell_each_other(
    servers: Callable[..., Sequence[Any]], etcd_node: EtcdNode, prefix: str
) -> None:
    def ask(*words: str) -> Any:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("RANKBOOK_")}
        while True:
            done = subprocess.run(
                [sys.executable, "-m", "rankbook.cli", "--server", etcd_node.url(prefix), *words],
                env=environ,
                capture_output=True,
                text=True,
                timeout=60,
            )
            shown = json.loads(done.stdout)
            # A drain is not sent again by itself where the process has no store yet.
            if shown.get("error", {}).get("reason") != "STORE_UNAVAILABLE":
                return shown

    (server,) = servers(1)
    with Raw(server.grpc) as raw, rankbook.Client(etcd_node.url(prefix)) as consumer:
        raw.ready(grid())
        peer = rankbook.PeerConnection(E, "g1", transfers_in_flight=2)
        consumer.report_peers("decode", [peer])
        reply = drain(raw, 2.0)
        assert (reply.outcome, reply.transfers_in_flight) == (WAITING, 2)
        shown = ask("drain", E, "--wait", "3s", "-o", "json")
        assert (shown["outcome"], shown["transfers_in_flight"]) == ("WAITING", 2)
        consumer.report_peers("decode", [rankbook.PeerConnection(E, "g1")])
        shown = ask("drain", E, "--wait", "20s", "-o", "json")
        assert shown["outcome"] == "IDLE"
        assert drain(raw, 5.0).outcome == IDLE


@pytest.mark.slow
def test_servers_that_join_or_are_killed_hold_up_a_drain_for_a_while_and_not_for_ever(
    rankbookd: Any, etcd_node: EtcdNode, prefix: str
) -> None:
    store = etcd_node.url(prefix)
    first = rankbookd(store=store)
    with Raw(first.grpc) as raw:
        raw.ready(grid())
        raw.ready(grid("prefill-a-1"))
    # Both engines are older than those that are asked.
    asked, killed = rankbookd(store=store), rankbookd(store=store)
    first.stop()
    with Raw(asked.grpc) as one:
        with Raw(killed.grpc) as two:
            report(two, 2)
            reply = drain(one, 2.0)
            assert (reply.outcome, reply.transfers_in_flight) == (WAITING, 2)
        killed.kill()
        killed_s = time.monotonic()
        joined = rankbookd(store=store)
        with Raw(joined.grpc) as three:
            # Its consumer goes on here, and says that nothing is in flight any more.
            report(three, 0)
            reply = drain(three, 1.0)
            assert (reply.outcome, reply.transfers_in_flight) == (WAITING, 2)
            assert drain(one, 1.0, engine_id="prefill-a-1").outcome == WAITING
            assert drain(one, 60.0).outcome == IDLE
            assert FORGET_S < time.monotonic() - killed_s < WORD_TTL_S + 3
            # By now they run for long: nothing holds up a drain of an old engine.
            undo(one)
            for raw in (one, three):
                for engine_id in (E, "prefill-a-1"):
                    began_s = time.monotonic()
                    assert drain(raw, 20.0, engine_id=engine_id).outcome == IDLE
                    assert time.monotonic() - began_s < 2.0
                    undo(raw, engine_id)
