"""A watch is state sync: nothing missed, nothing queued, whatever the watcher does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from rankbook import v1
from rankbook.limits import MAX_REPLY_BYTES

from .support import SERVICE, Failure, Raw, failure_of_rpc, grid, record, registration, seal_request

ADDED, MODIFIED, REMOVED = (
    v1.EVENT_TYPE_ADDED,
    v1.EVENT_TYPE_MODIFIED,
    v1.EVENT_TYPE_REMOVED,
)


class Fold:
    """What a client has after the messages it took."""

    def __init__(self) -> None:
        self.engines: dict[str, v1.Engine] = {}
        self.workers: dict[str, dict[tuple[int, int], v1.WorkerRecord]] = {}
        self.revision = 0
        self.book_id = ""
        self.synced = False

    def take(self, message: v1.WatchResponse) -> list[tuple[v1.EventType.ValueType, str]]:
        """Takes a message in; its events in short."""
        if message.reset:
            self.engines.clear()
            self.workers.clear()
        for event in message.events:
            name = event.engine.engine_id
            if event.type == REMOVED:
                self.engines.pop(name, None)
                self.workers.pop(name, None)
                continue
            if event.type == ADDED or event.replace:
                self.workers[name] = {}
            self.engines[name] = event.engine
            assert len(event.workers) == len(event.statuses)
            for worker in event.workers:
                assert worker.generation == event.engine.generation
                self.workers[name][worker.slot.pp_rank, worker.slot.tp_rank] = worker
            for slot in event.removed_slots:
                self.workers[name].pop((slot.pp_rank, slot.tp_rank), None)
        if message.synced:
            self.revision, self.book_id = message.book_revision, message.book_id
        self.synced = message.synced
        return [(event.type, event.engine.engine_id) for event in message.events]


class Watching:
    """A watch that is read message by message."""

    def __init__(self, raw: Raw, **request: Any) -> None:
        self.stream = raw.stream("Watch", v1.WatchRequest(**request), timeout_s=60)
        self.fold = Fold()
        self.messages = 0

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.cancel()

    def step(self) -> list[tuple[v1.EventType.ValueType, str]]:
        """Takes the next message."""
        try:
            message = next(self.stream)
        except grpc.RpcError as error:
            raise failure_of_rpc(error) from None
        self.messages += 1
        return self.fold.take(message)

    def until(self, holds: Callable[[Fold], bool]) -> list[tuple[v1.EventType.ValueType, str]]:
        """Takes messages until something holds; all their events."""
        events: list[tuple[v1.EventType.ValueType, str]] = []
        while not (self.fold.synced and holds(self.fold)):
            events += self.step()
        return events


def synced(fold: Fold) -> bool:
    return fold.synced


def resume(raw: Raw, fold: Fold, **request: Any) -> Watching:
    """A watch that goes on where another one was left."""
    again = Watching(raw, from_revision=fold.revision, book_id=fold.book_id, **request)
    again.fold = fold
    return again


def test_a_watch_begins_with_the_state_and_goes_on_with_changes(raw: Raw) -> None:
    raw.register(grid("one"))
    with Watching(raw) as watch:
        assert watch.until(synced) == [(ADDED, "one")]
        assert sorted(watch.fold.workers["one"]) == [(0, 0), (0, 1)]
        raw.register([record("two")])
        assert watch.step() == [(ADDED, "two")]
        raw.register([record("two", tp=1)])
        assert watch.step() == [(MODIFIED, "two")]
        assert sorted(watch.fold.workers["two"]) == [(0, 0), (0, 1)]
        assert watch.fold.engines["two"].state == v1.STATE_COMPLETE


def test_a_change_carries_only_the_slots_that_changed(raw: Raw) -> None:
    raw.register(grid(tp_size=8))
    with Watching(raw) as watch:
        watch.until(synced)
        changed = record(tp=5, tp_size=8, payload=b"changed", boot_id="prefill-a-0.g1.pp0.tp5")
        raw.register([changed], sequence=2)
        message = next(watch.stream)
        assert [w.slot.tp_rank for w in message.events[0].workers] == [5]
        assert message.events[0].workers[0].handshake.payload == b"changed"
        assert not message.events[0].replace


def test_an_emptied_slot_is_named_and_a_dead_engine_is_removed(raw: Raw) -> None:
    leases = [raw.register([one]).lease.lease_id for one in grid()]
    with Watching(raw) as watch:
        watch.until(synced)
        raw.call("RevokeLease", v1.RevokeLeaseRequest(lease_id=leases[1]))
        assert watch.step() == [(MODIFIED, "prefill-a-0")]
        assert sorted(watch.fold.workers["prefill-a-0"]) == [(0, 0)]
        raw.call("RevokeLease", v1.RevokeLeaseRequest(lease_id=leases[0]))
        assert watch.step() == [(REMOVED, "prefill-a-0")]


def test_a_new_generation_replaces_the_old_one_in_one_event(raw: Raw) -> None:
    raw.register(grid(generation="g1"))
    with Watching(raw) as watch:
        watch.until(synced)
        raw.register([record(generation="g2")])
        message = next(watch.stream)
        (event,) = message.events
        assert (event.type, event.replace) == (MODIFIED, True)
        watch.fold.take(message)
        workers = watch.fold.workers["prefill-a-0"]
        assert [worker.generation for worker in workers.values()] == ["g2"]


def test_payloads_are_left_out_where_they_are_not_wanted(raw: Raw) -> None:
    raw.register(grid())
    with Watching(raw, without_payload=True) as watch:
        watch.until(synced)
        for worker in watch.fold.workers["prefill-a-0"].values():
            assert (worker.handshake.payload, worker.handshake.format) == (b"", "test")


def test_resuming_sends_what_changed_since_and_no_more(raw: Raw) -> None:
    raw.register(grid("same"))
    raw.register(grid("changes"))
    dying = raw.register(grid("dies")).lease.lease_id
    with Watching(raw) as watch:
        watch.until(lambda fold: len(fold.engines) == 3)
        fold = watch.fold
    raw.register([record("changes", payload=b"x")], sequence=2)
    raw.call("RevokeLease", v1.RevokeLeaseRequest(lease_id=dying))
    raw.register(grid("comes"))
    with resume(raw, fold) as watch:
        fold.synced = False
        message = next(watch.stream)
        assert not message.reset
        assert sorted((e.engine.engine_id, e.type) for e in message.events) == [
            ("changes", MODIFIED),
            ("comes", ADDED),
            ("dies", REMOVED),
        ]
        changes = next(e for e in message.events if e.engine.engine_id == "changes")
        assert [w.slot.tp_rank for w in changes.workers] == [0]
        assert message.synced
        fold.take(message)
        assert sorted(fold.engines) == ["changes", "comes", "same"]


def test_resuming_with_a_filter_that_can_flip_sends_whole_engines(raw: Raw) -> None:
    ready = v1.EngineFilter(states=[v1.STATE_READY])
    digests = raw.register(grid("late")).record_digests
    with Watching(raw, filter=ready) as watch:
        assert watch.until(synced) == []
        fold = watch.fold
    raw.call("SealEngine", seal_request(grid("late"), digests))
    with resume(raw, fold, filter=ready) as watch:
        watch.step()
        assert sorted(fold.workers["late"]) == [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    "start",
    [
        {"from_revision": 5, "book_id": "another-book"},
        {"from_revision": 1 << 50},
        {"from_revision": 5, "book_id": ""},
    ],
    ids=["another book", "the future", "no book"],
)
def test_a_resume_point_that_means_nothing_here_starts_anew(
    raw: Raw, start: dict[str, Any]
) -> None:
    raw.register(grid())
    start = dict(start)
    if "book_id" not in start:
        start["book_id"] = raw.register(grid()).book_id
    with Watching(raw, **start) as watch:
        message = next(watch.stream)
        assert message.reset
        assert [e.type for e in message.events] == [ADDED]
        assert message.synced


def test_resuming_past_the_horizon_starts_anew_and_misses_no_deletion(rankbookd: Any) -> None:
    server = rankbookd("--tombstone-ttl", "0.3")
    with Raw(server.grpc) as raw:
        leases = [raw.register(grid(f"e{n}")).lease.lease_id for n in range(4)]
        with Watching(raw) as watch:
            watch.until(lambda fold: len(fold.engines) == 4)
            fold = watch.fold
        for lease in leases[:3]:
            raw.call("RevokeLease", v1.RevokeLeaseRequest(lease_id=lease))
        swept = raw.call("GetStatus", v1.GetStatusRequest())
        while swept.horizon_revision <= fold.revision or swept.engines["GONE"]:
            swept = raw.call("GetStatus", v1.GetStatusRequest())
        with resume(raw, fold) as watch:
            message = next(watch.stream)
            assert message.reset
            fold.take(message)
            assert sorted(fold.engines) == ["e3"]
        with pytest.raises(Failure, match="ENGINE_NOT_FOUND"):
            raw.topology("e0")
        assert raw.register(grid("e0", generation="g2")).epoch == 2


def test_an_engine_that_no_longer_matches_is_removed(raw: Raw) -> None:
    complete = v1.EngineFilter(states=[v1.STATE_COMPLETE, v1.STATE_READY])
    raw.register([record()])
    with Watching(raw, filter=complete) as watch:
        assert watch.until(synced) == []
        first = raw.register([record()]).record_digests
        second = raw.register([record(tp=1)]).record_digests
        raw.call("SealEngine", seal_request(grid(), [*first, *second]))
        events = watch.until(lambda f: any(e.state == v1.STATE_READY for e in f.engines.values()))
        assert events[0] == (ADDED, "prefill-a-0")
        raw.call("DrainEngine", v1.DrainEngineRequest(engine_id="prefill-a-0"))
        assert watch.step() == [(REMOVED, "prefill-a-0")]
        raw.call("DrainEngine", v1.DrainEngineRequest(engine_id="prefill-a-0", undo=True))
        assert watch.step() == [(ADDED, "prefill-a-0")]
        assert len(watch.fold.workers["prefill-a-0"]) == 2


def test_a_watch_of_one_group_hears_nothing_of_another(raw: Raw) -> None:
    with Watching(raw, filter=v1.EngineFilter(group="mine")) as watch:
        watch.until(synced)
        raw.register(grid("other", group="theirs"))
        raw.register(grid("wanted", group="mine"))
        assert watch.step() == [(ADDED, "wanted")]


def test_namespaces_hear_nothing_of_each_other(raw: Raw) -> None:
    with Watching(raw) as watch:
        watch.until(synced)
        elsewhere = registration(grid("elsewhere"), namespace="somewhere-else")
        raw.call("RegisterWorkers", elsewhere)
        raw.register(grid("here"))
        assert watch.step() == [(ADDED, "here")]


def test_an_engine_too_large_for_one_message_comes_in_parts_that_are_no_resume_point(
    raw: Raw,
) -> None:
    rng = random.Random(3)
    for tp in range(12):
        raw.register([record(tp=tp, tp_size=12, payload=rng.randbytes(400_000))])
    stream = raw.stream("Watch", v1.WatchRequest())
    fold = Fold()
    sizes = []
    while not fold.synced:
        message = next(stream)
        sizes.append(message.ByteSize())
        fold.take(message)
    stream.cancel()
    assert len(sizes) == 2
    assert max(sizes) <= MAX_REPLY_BYTES
    assert sorted(fold.workers["prefill-a-0"]) == [(0, tp) for tp in range(12)]


def test_a_burst_of_a_hundred_changes_costs_a_watcher_few_messages(embedded_raw: Raw) -> None:
    raw = embedded_raw
    raw.register([record()])
    count = 100
    with Watching(raw) as watch, raw.session() as session:
        watch.until(synced)
        watch.messages = 0
        for n in range(count):
            change = v1.UpdateWorkerRequest(record=record(payload=b"%d" % n), sequence=n + 2)
            session.send("update_worker", change)
        revisions = [session.take().update_worker.revision for _ in range(count)]
        watch.until(lambda fold: fold.engines["prefill-a-0"].revision == revisions[-1])
        worker = watch.fold.workers["prefill-a-0"][0, 0]
        assert worker.handshake.payload == b"99"
        assert watch.messages < count // 2


def test_a_stuck_watcher_holds_up_nobody_and_gets_the_newest_state(raw: Raw) -> None:
    rng = random.Random(5)
    stuck = raw.stream("Watch", v1.WatchRequest(), timeout_s=60)
    fold = Fold()
    fold.take(next(stuck))
    with Watching(raw) as watch:
        watch.until(synced)
        # Far more than the stream's own window holds while nobody reads it.
        for n in range(60):
            raw.register([record(payload=rng.randbytes(300_000))], sequence=n + 1)
        final = raw.topology().engine.revision
        watch.until(lambda f: f.revision >= final)
    messages = 0
    while fold.engines.get("prefill-a-0", v1.Engine()).revision < final:
        fold.take(next(stuck))
        messages += 1
    stuck.cancel()
    assert messages < 50


def test_a_thousand_watchers_all_end_with_the_same_state(raw: Raw) -> None:
    count = 1000
    address = raw.namespace
    raw.register(grid("e0", tp_size=4))

    async def watch(channel: grpc.aio.Channel, last: asyncio.Future[int]) -> tuple[int, int]:
        call = channel.unary_stream(
            SERVICE + "Watch",
            request_serializer=v1.WatchRequest.SerializeToString,
            response_deserializer=v1.WatchResponse.FromString,
        )(v1.WatchRequest(namespace=address))
        fold, messages = Fold(), 0
        async for message in call:
            fold.take(message)
            messages += 1
            if fold.synced and last.done() and fold.revision >= last.result():
                call.cancel()
                return len(fold.engines), messages
            ready.release()
        raise AssertionError("the watch ended")

    async def run(target: str) -> list[tuple[int, int]]:
        nonlocal ready
        ready = asyncio.Semaphore(0)
        last: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        channels = [
            grpc.aio.insecure_channel(target, options=(("grpc.use_local_subchannel_pool", 1),))
            for _ in range(10)
        ]
        watches = [asyncio.create_task(watch(channels[n % 10], last)) for n in range(count)]
        for _ in range(count):
            await ready.acquire()
        await asyncio.to_thread(raw.register, grid("e1", tp_size=4))
        final = await asyncio.to_thread(raw.register, grid("e2", tp_size=4))
        last.set_result(final.revision)
        await asyncio.to_thread(raw.register, grid("e3", tp_size=4))
        results = await asyncio.gather(*watches)
        for channel in channels:
            await channel.close()
        return results

    ready: asyncio.Semaphore
    results = asyncio.run(run(raw.address))
    assert len(results) == count
    assert all(engines >= 3 for engines, _ in results)
    assert all(messages <= 4 for _, messages in results)
