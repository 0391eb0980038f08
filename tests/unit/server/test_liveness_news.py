"""What the store is told of leases: once, in time, and again where it did not take it."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.server.shared import Line, SharedMemoryStore, WarpClock, WarpLoop

from rankbook import v1
from rankbook.errors import Unavailable
from rankbook_server.core.book import Book
from rankbook_server.core.ops import Delete, Put
from rankbook_server.liveness import LivenessNews


class Rig:
    def __init__(self, loop: WarpLoop) -> None:
        self.loop = loop
        self.clock = WarpClock(loop, "x")
        self.store = SharedMemoryStore(loop)
        self.line = Line(self.store)
        self.news = LivenessNews(self.clock)
        self.book = Book("n", new_id=self.clock.new_id)
        self.book.clock_s = self.clock.mono()

    def fold(self, lease_id: str, *, ended: bool = False, ttl_s: float = 10.0) -> None:
        stored = v1.StoredLease(version=1, ttl_millis=int(1000 * ttl_s), ended=ended)
        op = Put(f"n/l/{lease_id}", stored.SerializeToString())
        self.book.apply(op, 1)
        self.news.folded(self.book, op)

    def end(self, lease_id: str) -> None:
        op = Delete(f"n/l/{lease_id}")
        self.book.apply(op, 2)
        self.news.folded(self.book, op)

    async def live(self) -> dict[str, float]:
        return dict(await self.store.live())


def play(script: object) -> None:
    async def run() -> None:
        rig = Rig(loop)
        await rig.line.open()
        await script(rig)  # type: ignore[operator]

    loop = WarpLoop()
    loop.play(run())


def test_what_was_granted_renewed_and_ended_is_told() -> None:
    async def script(rig: Rig) -> None:
        rig.fold("a")
        rig.fold("b")
        rig.news.renewed({"c": 4.0})
        assert await rig.news.tell(rig.line)
        assert await rig.live() == {"a": 10.0, "b": 10.0, "c": 4.0}
        rig.end("a")
        rig.fold("b", ended=True)
        assert await rig.news.tell(rig.line)
        assert await rig.live() == {"c": 4.0}
        assert rig.book.leases["b"].heard_s == rig.clock.mono()

    play(script)


def test_what_is_no_lease_is_nothing_to_tell() -> None:
    async def script(rig: Rig) -> None:
        rig.news.folded(rig.book, Put("n/e/e", b""))
        # Nor one that is not in the book any more.
        rig.news.folded(rig.book, Put("n/l/gone", b""))
        assert not rig.news._some.is_set()

    play(script)


def test_a_lease_that_ends_before_it_was_told_is_dropped_and_not_touched() -> None:
    async def script(rig: Rig) -> None:
        rig.fold("a")
        rig.end("a")
        assert await rig.news.tell(rig.line)
        assert await rig.live() == {}

    play(script)


@pytest.mark.parametrize("after", ["nothing", "renewed", "ended", "granted"])
def test_what_was_not_taken_is_told_again_and_newer_news_count(after: str) -> None:
    async def script(rig: Rig) -> None:
        await rig.store.touch({"b": 20.0})
        rig.fold("a")
        rig.fold("b")
        rig.end("b")
        rig.line.mute = "too slow"
        assert not await rig.news.tell(rig.line)
        if after == "renewed":
            rig.news.renewed({"a": 4.0})
        elif after == "ended":
            rig.end("a")
        elif after == "granted":
            rig.fold("b")
        rig.line.heal()
        assert await rig.news.tell(rig.line)
        expected = {
            "nothing": {"a": 10.0},
            "renewed": {"a": 4.0},
            "ended": {},
            "granted": {"a": 10.0, "b": 10.0},
        }
        assert await rig.live() == expected[after]

    play(script)


def test_an_end_that_comes_while_the_store_does_not_take_the_renewal_counts() -> None:
    async def script(rig: Rig) -> None:
        rig.fold("a")
        rig.line.still = True
        telling = asyncio.ensure_future(rig.news.tell(rig.line))
        await asyncio.sleep(0.1)
        rig.end("a")
        rig.line.mute = "too slow"
        rig.line.still = False
        rig.store.stir()
        assert not await telling
        rig.line.heal()
        assert await rig.news.tell(rig.line)
        assert await rig.live() == {}

    play(script)


@pytest.mark.parametrize("at_once", [False, True])
def test_what_comes_while_the_store_is_told_goes_right_after_or_with_more(at_once: bool) -> None:
    async def script(rig: Rig) -> None:
        told: list[set[str]] = []
        real = rig.line.touch

        async def noted(leases: dict[str, float]) -> frozenset[str]:
            told.append(set(leases))
            made: frozenset[str] = await real(leases)
            return made

        rig.line.touch = noted  # type: ignore[method-assign,assignment]
        telling = asyncio.ensure_future(rig.news.tell_loop(rig.line, at_once=at_once))
        for name in "abc":
            rig.news.renewed({name: 10.0})
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        assert told == ([{"a"}, {"b"}, {"c"}] if at_once else [{"a"}, {"b", "c"}])
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)

    play(script)


def test_news_that_come_while_the_store_is_told_are_told_next() -> None:
    async def script(rig: Rig) -> None:
        rig.line.delay_s = 1.0
        rig.news.renewed({"a": 10.0})
        telling = asyncio.ensure_future(rig.news.tell(rig.line))
        await asyncio.sleep(0.5)
        rig.news.renewed({"b": 10.0})
        assert await telling
        assert (await rig.live()).keys() == {"a"}
        rig.line.delay_s = 0.0
        assert await rig.news.tell(rig.line)
        assert (await rig.live()).keys() == {"a", "b"}

    play(script)


def test_who_waits_until_the_store_has_taken_a_renewal_hears_which_it_held_for_dead() -> None:
    async def script(rig: Rig) -> None:
        await rig.store.touch({"a": 10.0})
        rig.line.delay_s = 1.0
        telling = asyncio.ensure_future(rig.news.tell_loop(rig.line, at_once=True))
        both = asyncio.ensure_future(rig.news.confirm({"a": 4.0, "b": 4.0}))
        first = asyncio.ensure_future(rig.news.confirm({"a": 4.0}))
        await asyncio.sleep(0.9)
        # This one goes right after.
        other = asyncio.ensure_future(rig.news.confirm({"b": 4.0}))
        assert not both.done()
        await asyncio.sleep(0.2)
        assert await both == {"b"}
        assert await first == frozenset()
        assert not other.done()
        await asyncio.sleep(1.0)
        assert await other == frozenset()
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)

    play(script)


def test_a_renewal_that_the_store_does_not_take_is_an_error_for_who_waits() -> None:
    async def script(rig: Rig) -> None:
        waiting = [asyncio.ensure_future(rig.news.confirm({name: 10.0})) for name in "ab"]
        await asyncio.sleep(0)
        waiting[1].cancel()
        rig.line.mute = "too slow"
        assert not await rig.news.tell(rig.line)
        with pytest.raises(Unavailable, match="too slow"):
            await waiting[0]
        # It is told all the same, once the store takes it.
        rig.line.heal()
        assert await rig.news.tell(rig.line)
        assert (await rig.live()).keys() == {"a", "b"}

    play(script)


def test_a_drop_that_fails_is_no_error_for_who_waits_for_a_renewal() -> None:
    async def script(rig: Rig) -> None:
        rig.fold("old")
        rig.end("old")
        waiting = asyncio.ensure_future(rig.news.confirm({"a": 10.0}))
        await asyncio.sleep(0)

        async def fail(_: object) -> None:
            raise Unavailable("not now")

        rig.line.drop = fail  # type: ignore[method-assign,assignment]
        assert not await rig.news.tell(rig.line)
        assert await waiting == {"a"}

    play(script)


def test_who_waits_is_let_go_when_the_server_ends() -> None:
    async def script(rig: Rig) -> None:
        rig.line.still = True
        telling = asyncio.ensure_future(rig.news.tell_loop(rig.line, at_once=True))
        waiting = asyncio.ensure_future(rig.news.confirm({"a": 10.0}))
        await asyncio.sleep(0.1)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        with pytest.raises(asyncio.CancelledError):
            await waiting

    play(script)


def test_what_was_not_taken_for_a_whole_time_to_live_is_not_told_any_more() -> None:
    async def script(rig: Rig) -> None:
        rig.news.renewed({"a": 10.0})
        rig.line.mute = "too slow"
        await asyncio.sleep(9.0)
        assert not await rig.news.tell(rig.line)
        assert set(rig.news._alive) == {"a"}
        await asyncio.sleep(1.0)
        assert not await rig.news.tell(rig.line)
        rig.line.heal()
        assert await rig.news.tell(rig.line)
        assert await rig.live() == {}

    play(script)


@pytest.mark.parametrize("at_once", [False, True])
def test_news_of_one_moment_go_together_and_failures_are_tried_again(at_once: bool) -> None:
    async def script(rig: Rig) -> None:
        told: list[set[str]] = []
        real = rig.line.touch
        failures = 2

        async def noted(leases: dict[str, float]) -> frozenset[str]:
            nonlocal failures
            told.append(set(leases))
            failures -= 1
            if failures >= 0:
                raise Unavailable("not now")
            made: frozenset[str] = await real(leases)
            return made

        rig.line.touch = noted  # type: ignore[method-assign,assignment]
        telling = asyncio.ensure_future(rig.news.tell_loop(rig.line, at_once=at_once))
        rig.news.renewed({"a": 10.0})
        await asyncio.sleep(0.01)
        for name in "bcd":
            rig.news.renewed({name: 10.0})
            await asyncio.sleep(0.01)
        await asyncio.sleep(2.0)
        assert told == [{"a"}, {"a", "b", "c", "d"}, {"a", "b", "c", "d"}]
        assert (await rig.live()).keys() == set("abcd")
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)

    play(script)
