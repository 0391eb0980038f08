"""Long polls: who is woken, by what, and how many there may be."""

from __future__ import annotations

import asyncio

import pytest

from rankbook.errors import Overloaded, Reason, Unavailable
from rankbook_server.rpc.service import shutting_down
from rankbook_server.waiters import Waiters

from .support import Bench, running


def waiters_of(bench: Bench, bound: int = 10) -> Waiters:
    waiters = Waiters(bench.registry, bound)
    bench.registry.subscribe(waiters)
    return waiters


def test_a_wait_ends_with_a_change_of_state_and_not_with_each_worker() -> None:
    async def run() -> None:
        async with running() as bench:
            waiters = waiters_of(bench)
            await bench.register(tp=0, tp_size=4)
            first = asyncio.ensure_future(waiters.engine("n", "e", 60))
            await asyncio.sleep(0)
            await bench.register(tp=1, tp_size=4)
            # The first change that is seen wakes; from then on only another state does.
            assert await first
            second = asyncio.ensure_future(waiters.engine("n", "e", 60))
            await asyncio.sleep(0)
            await bench.register(tp=2, tp_size=4)
            await asyncio.sleep(0)
            assert not second.done()
            await bench.register(tp=3, tp_size=4)
            assert await second
            assert len(waiters) == 0

    asyncio.run(run())


def test_a_wait_for_a_group_ends_with_a_change_of_any_of_its_engines() -> None:
    async def run() -> None:
        async with running() as bench:
            waiters = waiters_of(bench)
            wait = asyncio.ensure_future(waiters.group("n", "a", 60))
            other = asyncio.ensure_future(waiters.group("n", "b", 60))
            await asyncio.sleep(0)
            await bench.register("e9")
            assert await wait
            assert not other.done()
            other.cancel()

    asyncio.run(run())


def test_time_that_is_up_ends_a_wait_with_no() -> None:
    async def run() -> None:
        async with running() as bench:
            assert not await waiters_of(bench).engine("n", "e", 0.0)

    asyncio.run(run())


def test_waits_over_the_bound_are_refused() -> None:
    async def run() -> None:
        async with running() as bench:
            waiters = waiters_of(bench, 1)
            first = asyncio.ensure_future(waiters.engine("n", "e", 60))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded) as caught:
                await waiters.engine("n", "e", 60)
            assert caught.value.reason is Reason.TOO_MANY_WAITERS
            first.cancel()

    asyncio.run(run())


def test_a_revision_is_waited_for_and_never_answered_short() -> None:
    async def run() -> None:
        async with running() as bench:
            waiters = waiters_of(bench)
            reached = asyncio.ensure_future(waiters.revision(2, 60))
            await bench.register("one")
            await asyncio.sleep(0)
            assert not reached.done()
            await bench.register("two")
            await reached
            with pytest.raises(Unavailable) as caught:
                await waiters.revision(3, 0.0)
            assert caught.value.reason is Reason.REVISION_NOT_REACHED
            assert caught.value.metadata == {"min_revision": "3", "book_revision": "2"}

    asyncio.run(run())


def test_a_stopping_server_ends_every_wait_with_a_reason() -> None:
    async def run() -> None:
        async with running() as bench:
            waiters = waiters_of(bench)
            waits = [
                asyncio.ensure_future(waiters.engine("n", "e", 60)),
                asyncio.ensure_future(waiters.revision(9, 60)),
            ]
            await asyncio.sleep(0)
            waiters.end(shutting_down())
            results = await asyncio.gather(*waits, return_exceptions=True)
            assert [r.reason for r in results] == [Reason.SHUTTING_DOWN] * 2  # type: ignore[union-attr]

    asyncio.run(run())
