"""Watches that break, fall behind, or compare too little, as reported of other systems.

The numbers in the docstrings are public reports; README.md lists them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import socket
import threading

import pytest

import rankbook
from rankbook import (
    Address,
    Compat,
    EngineFilter,
    EventType,
    ExtraLayer,
    Handshake,
    KvCache,
    LayerKind,
    Model,
    Slot,
)


class Line:
    """A TCP way to a server that a test can cut."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open = True
        self._ends: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with self._lock:
                    if not self._open:
                        near.close()
                        continue
                    far = socket.create_connection(self._target)
                    self._ends |= {near, far}
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65_536):
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Breaks every connection and takes no other."""
        with self._lock:
            self._open = False
            for end in self._ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Takes connections again."""
        with self._lock:
            self._open = True

    def close(self) -> None:
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            end.close()


@pytest.fixture
def line():
    made = []

    def make(target: str) -> Line:
        made.append(Line(target))
        return made[-1]

    yield make
    for one in made:
        one.close()


def register(client, record, sequence=1):
    key = f"{record.engine_id}-{record.slot.tp_rank}"
    return client.register_workers([record], sequence=sequence, lease_key=key, ttl_s=300)


@pytest.mark.parametrize("past", ["within the horizon", "past the horizon"])
def test_what_was_removed_while_a_watch_was_cut_is_removed_after_it_and_nothing_else(
    rankbookd, line, made, past, any_store
):
    """ai-dynamo/dynamo#11144: a watch that reconnected missed deletions, and dead instances stayed.
    etcd-io/etcd#8668, #18089, #19179: at a compacted revision a watch looped in errors or lost one.

    Three ranks of one engine and a whole engine go while the watch is cut,
    with their tombstones still there or dropped. After the reconnection
    exactly those are gone, and the watch ended with no error.
    """
    server = rankbookd(
        "--tombstone-ttl", "0.2" if past == "past the horizon" else "600", store=any_store
    )
    way = line(server.grpc)
    with (
        rankbook.Client(server.grpc) as other,
        rankbook.Client(way.address) as client,
        rankbook.TopologyView(client) as view,
    ):
        leases = {
            tp: register(other, made.record("wide", 0, tp, tp_size=6)).lease.lease_id
            for tp in range(6)
        }
        dead = register(other, made.record("dead")).lease.lease_id
        register(other, made.record("still"))
        view.wait_synced(10)
        made.eventually(lambda: view.revision >= other.status().book_revision, 5, "all is seen")
        seen = view.revision
        events: queue.Queue = queue.Queue()
        view.subscribe(events.put)
        assert sorted(events.get(timeout=1).topology.engine.engine_id for _ in range(3)) == [
            "dead",
            "still",
            "wide",
        ]

        way.cut()
        made.eventually(lambda: not view.connected, 5, "the cut is noticed")
        for tp in (1, 3, 4):
            other.revoke_lease(leases[tp])
        other.revoke_lease(dead)
        if past == "past the horizon":
            made.eventually(
                lambda: other.status().horizon_revision > seen, 15, "its tombstone is dropped"
            )
            assert other.status().engines.get("GONE", 0) == 0
        assert len(view.get("wide").workers) == 6
        way.mend()

        made.eventually(lambda: view.connected, 10, "it follows again")
        assert [t.engine.engine_id for t in view.engines()] == ["still", "wide"]
        assert [w.slot.tp_rank for w in view.get("wide").workers] == [0, 2, 5]
        told = {}
        for _ in range(events.qsize()):
            event = events.get()
            told.setdefault(event.topology.engine.engine_id, []).append(event)
        assert [event.type for event in told.pop("dead")] == [EventType.REMOVED]
        (changed,) = told.pop("wide")
        assert changed.type is EventType.MODIFIED
        assert changed.removed == (Slot(0, 0, 1), Slot(0, 0, 3), Slot(0, 0, 4))
        # Told again or not, what stayed is as it was.
        assert all(event.type is EventType.MODIFIED for event in told.pop("still", []))
        assert not told


CHANGES = {
    "addresses": (Address("tcp", "10.0.0.99", 7000),),
    "handshake": Handshake("test", 2, b"agent"),
    "kv": KvCache(block_size=32, num_blocks=128),
    "model": Model(name="other", total_num_kv_heads=4),
    "compat": Compat("sha256:2", {"vllm_version": "0.33.0"}),
    "labels": {"zone": "b"},
    "layers": dataclasses.replace(
        rankbook.Layers(0, 8), extra=(ExtraLayer(8, LayerKind.MTP),), names=("model.layers.0",)
    ),
    "process": None,
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_of_any_part_of_a_record_reaches_watchers(
    either_rankbookd, made, engine_id, field
):
    """ai-dynamo/dynamo#12566: only keys were compared, so a changed transport never got through.
    ai-dynamo/nixl PR 1745: watchers took no notice of a value that was put anew.
    sgl-project/sglang#30270: a pod's new address was kept apart from the worker it belonged to.

    Whatever differs, watchers get MODIFIED with the new value, for the same
    worker of the same start: who one is has nothing to do with where one is.
    """
    record = made.record(engine_id)
    value = CHANGES[field]
    if field == "process":
        value = dataclasses.replace(record.process, device="GPU-1", hostname="node-9")
    with rankbook.Client(either_rankbookd.grpc) as client:
        first = register(client, record)
        events: queue.Queue = queue.Queue()
        with rankbook.TopologyView(client, EngineFilter(engine_id=engine_id)) as view:
            view.wait_synced(10)
            view.subscribe(events.put)
            assert events.get(timeout=2).type is EventType.ADDED
            client.update_worker(dataclasses.replace(record, **{field: value}), sequence=2)
            event = events.get(timeout=2)
    assert (event.type, event.changed) == (EventType.MODIFIED, (Slot(),))
    (worker,) = event.topology.workers
    assert getattr(worker, field) == value
    assert worker.process.boot_id == record.process.boot_id
    assert event.topology.engine.epoch == first.epoch
    assert event.topology.engine.present == 1


def test_a_watch_of_one_endpoint_goes_on_at_another_without_a_gap(rankbookd, line, made, any_store):
    """ai-dynamo/dynamo#1592: a watch was bound to one endpoint and did not fail over.

    Two ways lead to one registry. The way in use is cut; the watch goes on
    over the other one, and what happened in between comes as one event.
    """
    server = rankbookd(store=any_store)
    first, second = line(server.grpc), line(server.grpc)
    with (
        rankbook.Client(server.grpc) as other,
        rankbook.Client([first.address, second.address]) as client,
        rankbook.TopologyView(client) as view,
    ):
        register(other, made.record("e"))
        view.wait_synced(10)
        events: queue.Queue = queue.Queue()
        made.eventually(lambda: view.get("e") is not None, 2, "it is seen")
        view.subscribe(events.put)
        assert events.get(timeout=1).type is EventType.ADDED
        first.cut()
        other.update_worker(made.record("e", payload=b"meanwhile"), sequence=2)
        event = events.get(timeout=10)
        assert event.type is EventType.MODIFIED
        assert event.topology.workers[0].handshake.payload == b"meanwhile"
        assert events.empty()
