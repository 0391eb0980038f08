"""Room for requests and replies: over the bound one is refused or waits, never kept."""

from __future__ import annotations

import asyncio

import pytest

from rankbook.errors import Overloaded
from rankbook.limits import MAX_REPLY_BYTES
from rankbook_server.rpc.room import SMALL_REPLY_BYTES, ReplyRoom, RequestRoom, Turn


def nothing() -> None:
    """Ends no call."""


def test_a_request_over_the_room_is_refused_and_takes_none() -> None:
    room = RequestRoom(100)
    room.take(60)
    with pytest.raises(Overloaded) as over:
        room.take(41)
    assert (over.value.metadata["value"], over.value.metadata["bound"]) == ("101", "100")
    room.take(40)
    room.give(60)
    room.take(60)


def test_replies_get_room_in_the_order_in_which_they_asked() -> None:
    async def run() -> None:
        room = ReplyRoom(100)
        first = await room.take(100, nothing)
        order: list[int] = []

        async def ask(size: int) -> None:
            held = await room.take(size, nothing)
            order.append(size)
            room.give(held)

        # The small one asked last and would fit; it may not pass the large one.
        tasks = [asyncio.create_task(ask(size)) for size in (90, 80, 10)]
        await asyncio.sleep(0)
        room.shrink(first, 50)
        await asyncio.sleep(0)
        assert order == []
        room.give(first)
        room.give(first)
        await asyncio.gather(*tasks)
        assert order == [90, 80, 10]

    asyncio.run(run())


def test_a_reply_larger_than_all_room_goes_alone() -> None:
    async def run() -> None:
        room = ReplyRoom(100)
        room.give(await room.take(1000, nothing))
        held = await room.take(1, nothing)
        waiting = asyncio.create_task(room.take(1000, nothing))
        await asyncio.sleep(0)
        assert not waiting.done()
        room.give(held)
        room.give(await waiting)

    asyncio.run(run())


def test_who_waits_too_long_is_told_so_and_leaves_no_trace() -> None:
    async def run() -> None:
        room = ReplyRoom(100, wait_s=0.02)
        held = await room.take(100, nothing)
        with pytest.raises(Overloaded) as over:
            await room.take(50, nothing)
        assert over.value.metadata["bound"] == "100"
        given_up = asyncio.create_task(room.take(50, nothing))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        room.give(held)
        # All of the room is free.
        await room.take(100, nothing)

    asyncio.run(run())


def test_a_reply_that_is_given_its_turn_and_cancelled_at_once_holds_nothing() -> None:
    async def run() -> None:
        room = ReplyRoom(100)
        held = await room.take(100, nothing)
        waiting = asyncio.create_task(room.take(100, nothing))
        await asyncio.sleep(0)
        room.give(held)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await room.take(100, nothing)

    asyncio.run(run())


def test_a_call_that_keeps_others_waiting_is_ended_and_one_that_does_not_is_left() -> None:
    async def run() -> None:
        room = ReplyRoom(100, wait_s=0.2)
        dropped: list[str] = []
        stuck = await room.take(100, lambda: (dropped.append("stuck"), room.give(stuck)))
        # Nobody waits for it, for however long.
        await asyncio.sleep(0.25)
        assert dropped == []
        await room.take(100, lambda: dropped.append("new"))
        assert dropped == ["stuck"]

    asyncio.run(run())


def test_a_watch_makes_no_message_while_room_is_tight_or_its_stream_is_taken() -> None:
    async def run() -> None:
        room, stream = ReplyRoom(MAX_REPLY_BYTES), asyncio.Lock()
        one, two = Turn(room, nothing, stream), Turn(room, nothing, stream)
        await one.enter()
        await one.enter()
        second = asyncio.create_task(two.enter())
        await asyncio.sleep(0)
        assert not second.done()
        await one.fit(SMALL_REPLY_BYTES + 1)
        one.leave()
        one.leave()
        await second
        two.leave()
        held = await room.take(1, nothing)
        third = asyncio.create_task(one.enter())
        await asyncio.sleep(0)
        assert not third.done()
        room.give(held)
        await third
        # What it does not need of the room, others get.
        await one.fit(10)
        room.give(await room.take(MAX_REPLY_BYTES - 10, nothing))
        one.leave()
        await room.take(MAX_REPLY_BYTES, nothing)

    asyncio.run(run())
