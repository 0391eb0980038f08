"""What a watcher is sent, message by message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rankbook import v1
from rankbook.errors import Unavailable
from rankbook_server.registry import Registry
from rankbook_server.rpc.room import ReplyRoom, Turn
from rankbook_server.rpc.service import shutting_down
from rankbook_server.view import View
from rankbook_server.watch import Hub, Watcher

from .support import Bench, running, until


def hub_of(registry: Registry) -> Hub:
    view = View(registry)
    hub = Hub(registry, view, 10)
    registry.subscribe(view)
    registry.subscribe(hub)
    return hub


async def take(messages: Watcher) -> v1.WatchResponse:
    async with asyncio.timeout(10):
        return v1.WatchResponse.FromString(await messages.next(Turn(ReplyRoom(), lambda: None)))


def watch(hub: Hub, **request: Any) -> Watcher:
    return hub.watch(v1.WatchRequest(namespace="n", **request))


def test_an_event_is_serialised_once_for_all_who_are_at_the_same_point() -> None:
    async def run() -> None:
        async with running() as bench:
            hub = hub_of(bench.registry)
            await bench.register()
            view = hub.view.engine("n", "e")
            assert view is not None
            first = view.events(0, without_payload=False)
            assert view.events(0, without_payload=False) is first
            bare = view.events(0, without_payload=True)
            assert bare is not first
            assert b"payload" in first[0]
            assert b"payload" not in bare[0]

    asyncio.run(run())


def test_a_watcher_that_takes_nothing_is_sent_one_message_for_many_changes() -> None:
    async def run() -> None:
        async with running() as bench:
            hub = hub_of(bench.registry)
            messages = watch(hub)
            assert (await take(messages)).synced
            for n in range(50):
                await bench.register(f"e{n % 5}", sequence=n // 5 + 1, generation=f"g{n // 5}")
            await until(lambda: hub.marked_revision == bench.registry.revision)
            message = await take(messages)
            assert sorted(e.engine.engine_id for e in message.events) == [f"e{n}" for n in range(5)]
            assert {e.engine.generation for e in message.events} == {"g9"}
            assert {e.type for e in message.events} == {v1.EVENT_TYPE_ADDED}
            assert message.book_revision == bench.registry.revision
            messages.close()

    asyncio.run(run())


def test_an_engine_that_came_and_went_unseen_is_no_event() -> None:
    async def run() -> None:
        async with running() as bench:
            hub = hub_of(bench.registry)
            messages = watch(hub)
            await take(messages)
            lease = (await bench.register("gone")).lease.lease_id
            request = v1.RevokeLeaseRequest(lease_id=lease)
            await bench.registry.submit("r", "n", lambda b, now: b.revoke_lease(request, now))
            await bench.register("here")
            await until(lambda: hub.marked_revision == bench.registry.revision)
            message = await take(messages)
            assert [e.engine.engine_id for e in message.events] == ["here"]
            messages.close()

    asyncio.run(run())


def test_an_idle_watch_says_how_far_it_is_and_a_busy_one_need_not() -> None:
    async def run() -> None:
        async with running() as bench:
            hub = hub_of(bench.registry)
            messages = watch(hub, filter=v1.EngineFilter(group="nobody"))
            await take(messages)
            await bench.register()
            step = asyncio.ensure_future(take(messages))
            await until(lambda: hub.marked_revision == bench.registry.revision)
            hub.tick()
            await asyncio.sleep(0)
            assert not step.done()
            hub.tick()
            message = await step
            assert (len(message.events), message.synced) == (0, True)
            assert message.book_revision == bench.registry.revision == 1
            messages.close()

    asyncio.run(run())


def test_the_resume_point_is_never_beyond_a_change_that_was_not_sent() -> None:
    async def run() -> None:
        async with running() as bench:
            hub = hub_of(bench.registry)
            await bench.register("e0")
            messages = watch(hub)
            first = await take(messages)
            assert first.book_revision == 1
            # Within the time in which changes are gathered, two more come.
            await bench.register("e1")
            await bench.register("e2")
            fresh = watch(hub)
            message = await take(fresh)
            names = {e.engine.engine_id for e in message.events}
            assert message.book_revision <= 3
            resumed = watch(hub, from_revision=message.book_revision, book_id=message.book_id)
            step = asyncio.ensure_future(take(resumed))
            await until(lambda: hub.marked_revision == bench.registry.revision)
            later = {e.engine.engine_id for e in (await step).events}
            assert names | later >= {"e0", "e1", "e2"}
            for generator in (messages, fresh, resumed):
                generator.close()
            assert len(hub) == 0

    asyncio.run(run())


def test_a_stopping_server_ends_a_waiting_watch() -> None:
    async def run(bench: Bench) -> None:
        hub = hub_of(bench.registry)
        messages = watch(hub)
        await take(messages)
        step = asyncio.ensure_future(take(messages))
        await asyncio.sleep(0)
        hub.end(shutting_down())
        with pytest.raises(Unavailable, match="shutting down"):
            await step
        with pytest.raises(Unavailable, match="shutting down"):
            await take(watch(hub))

    async def main() -> None:
        async with running() as bench:
            await run(bench)

    asyncio.run(main())
