"""Claims about watches and `rankbook.TopologyView` against a real registry."""

from __future__ import annotations

import queue
import threading
import time

import pytest

import rankbook
from rankbook import EventType, State


def register(client, records, key, sequence=1, ttl_s=300):
    return client.register_workers(records, sequence=sequence, lease_key=key, ttl_s=ttl_s)


@pytest.fixture
def sqlite_server(rankbookd, tmp_path):
    return rankbookd(store=f"sqlite:{tmp_path}/book.db")


def test_a_watch_cut_by_a_restart_resumes_and_misses_no_removal(sqlite_server, made):
    names = [f"e{n}" for n in range(6)]
    server = sqlite_server
    with rankbook.Client(server.grpc) as client:
        leases = {
            name: register(client, [made.record(name)], f"key-{name}").lease.lease_id
            for name in names
        }
        events: queue.Queue = queue.Queue()
        with rankbook.TopologyView(client) as view:
            view.wait_synced(10)
            view.subscribe(events.put)
            assert sorted(events.get(timeout=2).topology.engine.engine_id for _ in names) == names
            server.kill()
            made.eventually(lambda: not view.connected, 5, "the break is noticed")
            assert view.get("e0").engine.state is State.COMPLETE
            server.start_again(same_port=True)
            with rankbook.Client(server.grpc) as other:
                for name in names[:3]:
                    other.revoke_lease(leases[name])
                register(other, [made.record("new")], "key-new")
            seen = [events.get(timeout=10) for _ in range(4)]
            got = sorted((e.topology.engine.engine_id, e.type) for e in seen)
            assert got == [
                ("e0", EventType.REMOVED),
                ("e1", EventType.REMOVED),
                ("e2", EventType.REMOVED),
                ("new", EventType.ADDED),
            ]
            made.eventually(lambda: view.connected, 5, "it follows again")
            assert [t.engine.engine_id for t in view.engines()] == ["e3", "e4", "e5", "new"]
            assert events.empty()


def test_a_subscriber_that_raises_keeps_nobody_from_hearing(book, made, engine_id):
    def raises(event):
        raise ValueError("a fault of the subscriber's")

    with rankbook.Client(book) as client:
        register(client, [made.record(engine_id)], f"{engine_id}-1")
        wanted = rankbook.EngineFilter(engine_id=engine_id)
        with rankbook.TopologyView(client, wanted) as view:
            view.wait_synced(10)
            events: queue.Queue = queue.Queue()
            view.subscribe(raises)
            view.subscribe(events.put)
            assert events.get(timeout=2).type is EventType.ADDED
            register(client, [made.record(engine_id, payload=b"other")], f"{engine_id}-1", 2)
            assert events.get(timeout=5).type is EventType.MODIFIED


def test_another_book_is_taken_anew_and_what_it_lacks_is_removed(rankbookd, made):
    server = rankbookd()
    with rankbook.Client(server.grpc) as client, rankbook.TopologyView(client) as view:
        view.wait_synced(10)
        events: queue.Queue = queue.Queue()
        view.subscribe(events.put)
        register(client, [made.record("lost")], "k1")
        register(client, [made.record("kept")], "k2")
        assert [events.get(timeout=2).type for _ in range(2)] == [EventType.ADDED] * 2
        server.kill()
        server.start_again(same_port=True)
        register(client, [made.record("kept", payload=b"anew")], "k2", sequence=2)
        last = {}
        while last.get("lost") is not EventType.REMOVED or "kept" not in last:
            event = events.get(timeout=10)
            last[event.topology.engine.engine_id] = event.type
        made.eventually(lambda: view.get("kept") is not None, 5, "the kept engine is back")
        assert view.get("kept").workers[0].handshake.payload == b"anew"
        assert view.get("lost") is None


def test_a_restart_is_one_change_and_no_topology_is_ever_mixed(book, made, engine_id):
    with rankbook.Client(book) as client:
        events: queue.Queue = queue.Queue()
        wanted = rankbook.EngineFilter(engine_id=engine_id)
        with rankbook.TopologyView(client, wanted) as view:
            view.wait_synced(10)
            view.subscribe(events.put)
            for generation in ("g1", "g2", "g3"):
                client.begin_generation(engine_id, generation)
                for n, record in enumerate(made.grid(engine_id, generation=generation)):
                    register(client, [record], f"{engine_id}-{generation}-{n}", 1)
            seen = []
            while (
                not seen
                or seen[-1].topology.engine.generation != "g3"
                or len(seen[-1].topology.workers) < 4
            ):
                seen.append(events.get(timeout=5))
    for event in seen:
        topology = event.topology
        assert {w.generation for w in topology.workers} <= {topology.engine.generation}
        assert len(topology.workers) == topology.engine.present
    revisions = [event.revision for event in seen]
    assert revisions == sorted(revisions)


def test_a_watch_from_a_revision_tells_only_what_came_after_it(book, made, engine_id):
    with rankbook.Client(book) as client:
        register(client, [made.record(engine_id, 0, 0, tp_size=2)], f"{engine_id}-0")
        book = client.list_engines()
        register(client, [made.record(engine_id, 0, 1, tp_size=2)], f"{engine_id}-1")
        watch = client.watch(
            rankbook.EngineFilter(group="prefill-a"),
            from_revision=book.book_revision,
            book_id=book.book_id,
        )
        event = next(watch)
        watch.close()
    assert event.topology.engine.engine_id == engine_id
    # Whole, though only its second worker is news.
    assert [w.slot.tp_rank for w in event.topology.workers] == [0, 1]


def test_a_filter_is_the_registrys_and_a_bad_one_is_refused_at_once(book):
    with rankbook.Client(book) as client:
        with pytest.raises(rankbook.BadRequest):
            next(client.watch(rankbook.EngineFilter(group="no such/group")))
        view = rankbook.TopologyView(client, rankbook.EngineFilter(group="no such/group"))
        view.start()
        with pytest.raises(rankbook.BadRequest):
            view.wait_synced(5)


def test_closing_the_client_ends_a_watch_that_is_being_read(book):
    client = rankbook.Client(book)
    ended = threading.Event()

    def read() -> None:
        for _ in client.watch(rankbook.EngineFilter(engine_id="nobody")):
            pass
        ended.set()

    client.status()
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    # The watch must be open before it can be ended.
    while client.status().watchers == 0:
        pass
    client.close()
    assert ended.wait(2)


def test_look_ups_answer_at_once_while_the_registry_is_frozen(rankbookd, made):
    server = rankbookd()
    with rankbook.Client(server.grpc) as client, rankbook.TopologyView(client) as view:
        register(client, [made.record("e")], "k")
        view.wait_synced(10)
        made.eventually(lambda: view.get("e") is not None, 2, "the engine is seen")
        server.pause()
        slowest = 0.0
        for _ in range(1000):
            before = time.perf_counter()
            topology = view.get("e")
            slowest = max(slowest, time.perf_counter() - before)
            assert topology.engine.engine_id == "e"
        # 10 ms is the bound for a caller that must not be held up.
        assert slowest < 0.01
        age = view.age_s
        made.eventually(lambda: view.age_s > age, 1, "the answer grows older")


def test_a_look_up_takes_less_than_two_microseconds(book, made, engine_id):
    with rankbook.Client(book) as client:
        register(client, [made.record(engine_id)], engine_id)
        with rankbook.TopologyView(client) as view:
            view.wait_synced(10)
            made.eventually(lambda: view.get(engine_id) is not None, 2, "the engine is seen")
            best = min(_per_call(lambda: view.get(engine_id), 10_000) for _ in range(5))
    assert best < 2e-6


def _per_call(call, count: int) -> float:
    before = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - before) / count


def test_a_view_started_first_finds_the_registry_when_it_comes(rankbookd, made):
    server = rankbookd()
    server.kill()
    with rankbook.Client(server.grpc) as client, rankbook.TopologyView(client) as view:
        with pytest.raises(rankbook.Unavailable):
            view.wait_synced(0.5)
        assert (view.connected, view.engines()) == (False, ())
        server.start_again(same_port=True)
        view.wait_synced(3)
        assert view.connected


def test_a_subscriber_that_raises_ends_nothing_and_one_that_left_hears_nothing(
    book, made, engine_id
):
    with rankbook.Client(book) as client:
        wanted = rankbook.EngineFilter(engine_id=engine_id)
        with rankbook.TopologyView(client, wanted) as view:
            view.wait_synced(10)
            heard: queue.Queue = queue.Queue()
            left: queue.Queue = queue.Queue()

            def broken(event):
                raise RuntimeError("a fault of the caller's")

            view.subscribe(broken)
            view.subscribe(left.put)()
            view.subscribe(heard.put)
            register(client, [made.record(engine_id)], engine_id)
            assert heard.get(timeout=2).type is EventType.ADDED
            assert left.empty()
