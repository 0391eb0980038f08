"""Leases, heartbeats and pauses, as reported of other systems.

The numbers in the docstrings are public reports; README.md lists them all.
"""

from __future__ import annotations

import os
import queue
import threading
import time

import pytest

import rankbook
from rankbook import EventType, LeaseState, Requirement, State
from rankbook import RegistrationState as Believed

TTL_S = 2.0


def changes_of(view, engine_id):
    """Types of an engine's events, from now on."""
    events: queue.Queue = queue.Queue()
    view.subscribe(
        lambda event: event.topology.engine.engine_id == engine_id and events.put(event.type)
    )
    return events


def drained(events):
    return [events.get() for _ in range(events.qsize())]


@pytest.fixture
def view(either_rankbookd):
    with rankbook.Client(either_rankbookd.grpc) as client, rankbook.TopologyView(client) as made:
        made.wait_synced(10)
        yield made


def test_an_outage_of_the_store_for_two_ttls_costs_nobody_a_lease(
    rankbookd, registration, made, tmp_path
):
    """ai-dynamo/dynamo#3493: seconds without etcd, and every service restarted.

    The book's file is away for twice the TTL. Reads go on, a write says why it
    waits, and after the return even a lease that nobody renewed has its full
    time: no watcher is told of any removal.
    """
    book, away = tmp_path / "book.db", tmp_path / "away"
    server = rankbookd(store=f"sqlite:{book}")
    with rankbook.Client(server.grpc) as client, rankbook.TopologyView(client) as view:
        view.wait_synced(10)
        renewed, idle = changes_of(view, "renewed"), changes_of(view, "idle")
        one = registration([made.record("renewed")], endpoints=server.grpc)
        one.start()
        lease = one.wait_registered(10).lease
        client.register_workers([made.record("idle")], sequence=1, lease_key="idle", ttl_s=TTL_S)
        made.eventually(lambda: view.get("idle") is not None, 2, "both are seen")
        os.rename(book, away)
        refused = queue.Queue()
        over = threading.Event()

        def write() -> None:
            sequence = 0
            while not over.is_set():
                sequence += 1
                try:
                    client.register_workers(
                        [made.record("writer")], sequence=sequence, lease_key="writer", ttl_s=60
                    )
                except rankbook.Unavailable as error:
                    refused.put(error)

        writing = threading.Thread(target=write)
        writing.start()
        assert "STORE_UNAVAILABLE" in str(refused.get(timeout=10).reason)
        over.set()
        writing.join(10)
        assert not threading.Event().wait(2 * TTL_S)
        assert view.get("idle").engine.state is State.COMPLETE
        os.rename(away, book)
        made.eventually(lambda: client.status().store_available, 5, "the store is back")
        returned_s = time.monotonic()
        assert client.get_topology("idle", require=Requirement.COMPLETE).workers
        made.eventually(lambda: view.get("idle") is None, TTL_S + 2, "the idle one ends")
        # Its grace began a little before the return was seen.
        assert time.monotonic() - returned_s > TTL_S / 2
        assert drained(idle) == [EventType.ADDED, EventType.REMOVED]
        assert one.wait_registered(5).lease.lease_id == lease.lease_id
        assert drained(renewed) == [EventType.ADDED]


# The event loop does the work that its heartbeat would have to certify.
STARVED = """
import asyncio, time
async def work():
    time.sleep(6)
asyncio.run(work())
print(registration.state, flush=True)
sys.stdin.readline()
"""

# usleep by way of PyDLL keeps the interpreter's lock while it sleeps.
BLOCKED = """
import ctypes
ctypes.PyDLL(None).usleep(ctypes.c_uint(4_000_000))
pause = threading.Event()
while "SUSPENDED" not in [c.state for c in changes] or changes[-1].state != "REGISTERED":
    pause.wait(0.01)
print(",".join(change.state for change in changes), flush=True)
sys.stdin.readline()
"""


def test_a_worker_whose_event_loop_is_starved_for_three_ttls_stays(
    either_rankbookd, view, worker, made, engine_id
):
    """ai-dynamo/dynamo#5656, NVIDIA/TensorRT-LLM#16445, agno#9512: the heartbeat shared a
    loop with model loading, or with the work it was to certify, and the worker was taken for dead.

    The lease is kept by another process, so nobody hears of a pause of 3 x TTL.
    """
    events = changes_of(view, engine_id)
    one = worker(either_rankbookd.grpc, made.record(engine_id, boot_id=""), then=STARVED)
    assert events.get(timeout=2) is EventType.ADDED
    assert one.line() == "REGISTERED"
    assert events.empty()


def test_a_worker_that_keeps_its_lease_in_process_is_back_by_itself_after_a_pause(
    either_rankbookd, view, worker, made, engine_id
):
    """ai-dynamo/dynamo#5656, the other half: where the heartbeat lives in the worker after all.

    A blocked interpreter lets the lease run out. The worker hears that it was
    suspended and is signed in again; watchers see one pair of events.
    """
    events = changes_of(view, engine_id)
    record = made.record(engine_id, boot_id="")
    one = worker(either_rankbookd.grpc, record, mode="thread", then=BLOCKED)
    assert [events.get(timeout=8) for _ in range(3)] == [
        EventType.ADDED,
        EventType.REMOVED,
        EventType.ADDED,
    ]
    believed = one.line().split(",")
    assert Believed.SUSPENDED in believed
    assert believed[-1] == Believed.REGISTERED
    assert events.empty()


def test_nobody_has_to_ask_for_a_heartbeat(rankbookd, made, any_store):
    """LMCache/LMCache#4808: a server reaped after 30 s workers whose default was to send nothing.
    LMCache/LMCache#4715: the heartbeat began with the first request, so idle ranks were reaped.

    With every setting left at its default, client and server agree: renewals
    come unasked, before anything was served, at most a third of the TTL apart.
    """
    server = rankbookd(store=any_store)

    def renewals() -> float:
        name = 'rankbook_calls_total{method="RenewLeases",reason="OK"}'
        lines = [line for line in server.get("/metrics").splitlines() if line.startswith(name)]
        return float(lines[0].split()[-1]) if lines else 0.0

    with rankbook.Registration([made.record("idle")], endpoints=server.grpc) as one:
        lease = one.wait_registered(10).lease
        assert lease.renew_interval_s <= lease.ttl_s / 3 + 0.01
        before = renewals()
        took_s = made.eventually(lambda: renewals() > before, lease.ttl_s / 2, "a renewal")
        assert took_s <= lease.ttl_s / 3 + 1
        assert one.state is Believed.REGISTERED


def test_a_restart_of_the_registry_gives_a_dead_worker_one_ttl_and_no_more(
    rankbookd, made, any_store
):
    """etcd-io/etcd#20273: a restart refreshed every TTL, for dead holders too.

    A worker died before the registry did. It is shown for at most one full
    TTL from the moment the registry serves again, and then is gone.
    """
    server = rankbookd(store=any_store)
    with rankbook.Client(server.grpc, timeout_s=10) as client:
        registered = client.register_workers(
            [made.record("e")], sequence=1, lease_key="dead", ttl_s=TTL_S
        )
        server.kill()
        server.start_again(same_port=True)
        assert client.get_topology("e", require=Requirement.COMPLETE).workers
        took_s = made.eventually(
            lambda: client.status().engines.get("COMPLETE", 0) == 0, TTL_S + 2, "it is gone"
        )
        assert took_s < TTL_S + 1
        (status,) = client.renew_leases([registered.lease.lease_id]).statuses
        assert status.state in (LeaseState.ENDED, LeaseState.UNKNOWN)
