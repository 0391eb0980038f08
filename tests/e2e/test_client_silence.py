"""Claims about what falls silent while its connections stay open: the registry, the
heartbeat process."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time

import pytest

import rankbook


@pytest.mark.slow
def test_a_view_knows_within_20_s_that_its_registry_went_silent(rankbookd):
    server = rankbookd()
    with rankbook.Client(server.grpc) as client:
        view = rankbook.TopologyView(client)
        view.start()
        try:
            view.wait_synced(10)
            server.pause()
            until = time.monotonic() + 20
            # Nothing tells of it, so it is looked at.
            while view.connected and time.monotonic() < until:
                time.sleep(0.05)
            assert not view.connected
            server.resume()
            view.wait_synced(20)
        finally:
            view.close()


def test_a_heartbeat_process_that_reads_nothing_holds_up_neither_an_update_nor_a_stop(
    rankbookd, made, engine_id, registration
):
    server = rankbookd()
    record = made.record(engine_id)
    one = registration([record], endpoints=server.grpc, ttl_s=60)
    one.start()
    one.wait_registered(10)
    os.kill(one.heartbeat_pid, signal.SIGSTOP)
    # More than a pipe holds.
    large = dataclasses.replace(
        record, handshake=dataclasses.replace(record.handshake, payload=b"x" * 400_000)
    )
    stuck = threading.Thread(target=one.update, args=(large,))
    stuck.start()
    began_s = time.monotonic()
    one.stop(1.5)
    assert time.monotonic() - began_s < 3.0
    stuck.join(5)
    assert not stuck.is_alive()


def test_an_update_that_a_frozen_heartbeat_process_did_not_take_reaches_the_book_by_the_next(
    rankbookd, made, engine_id, registration
):
    server = rankbookd()
    record = made.record(engine_id)
    one = registration([record], endpoints=server.grpc, ttl_s=6)
    one.start()
    one.wait_registered(10)
    frozen = one.heartbeat_pid
    os.kill(frozen, signal.SIGSTOP)
    large = dataclasses.replace(
        record, handshake=dataclasses.replace(record.handshake, payload=b"x" * 400_000)
    )
    began_s = time.monotonic()
    one.update(large)
    assert time.monotonic() - began_s < 5.0
    one.wait_registered(20)
    assert one.heartbeat_pid != frozen
    with rankbook.Client(server.grpc) as client:
        topology = client.get_topology(engine_id, require=rankbook.Requirement.ANY)
        assert len(topology.workers[0].handshake.payload) == 400_000
