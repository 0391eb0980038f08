"""Following a shared store: cuts, their ends, and what they mean for leases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.unit.server.shared import Line, SharedMemoryStore, WarpClock, WarpLoop, within

from rankbook import v1
from rankbook.errors import Unavailable
from rankbook_server.books import Books
from rankbook_server.core.fold import BookLimits, LeaseEntry
from rankbook_server.core.ops import Put, Txn
from rankbook_server.follower import Follower
from rankbook_server.lease_keys import OTHERS_S, LeaseKeys
from rankbook_server.liveness import LivenessNews
from rankbook_server.replica import Replica

TTL_S = 10.0


class Rig:
    """A follower and what it keeps up."""

    def __init__(self, loop: WarpLoop) -> None:
        self.loop = loop
        self.clock = WarpClock(loop, "x")
        self.store = SharedMemoryStore(loop)
        self.line = Line(self.store)
        self.books = Books(self.clock, BookLimits(), 4)
        news = LivenessNews(self.clock)
        self.keys = LeaseKeys(self.books, news)
        self.replica = Replica(self.books, self.clock, news, self.keys)
        self.follower = Follower(self.line, self.clock, self.replica, self.keys)

    def entry(self, lease_id: str = "a") -> LeaseEntry:
        return self.books.get("n").leases[lease_id]

    async def grant(self, lease_id: str = "a") -> None:
        """Another server grants a lease, and hears of it once."""
        stored = v1.StoredLease(version=1, lease_key=lease_id, ttl_millis=int(1000 * TTL_S))
        await self.store.commit([Txn((Put(f"n/l/{lease_id}", stored.SerializeToString()),))])
        await self.store.touch({lease_id: 300.0})
        await asyncio.sleep(0.01)

    async def drop(self, lease_id: str = "a") -> None:
        await self.store.drop([lease_id])
        await asyncio.sleep(0.01)

    def left_s(self, lease_id: str = "a") -> float:
        return self.entry(lease_id).deadline - self.clock.mono()


def play(script: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        rig = Rig(loop)
        await rig.line.open()
        await rig.replica.load(rig.line)
        tasks = rig.follower.start()
        try:
            await asyncio.sleep(1.5)
            await script(rig)
            assert not any(task.done() for task in tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    loop = WarpLoop()
    loop.play(run())


def test_what_others_commit_and_hear_of_is_here_in_a_moment() -> None:
    async def script(rig: Rig) -> None:
        await rig.grant()
        assert rig.replica.revision == rig.store.revision
        assert rig.entry().kept
        await rig.follower.catch_up()
        assert rig.follower.cut_for_s == 0.0

    play(script)


def test_a_server_that_does_not_yet_hear_of_leases_has_not_caught_up() -> None:
    async def body(loop: WarpLoop) -> None:
        rig = Rig(loop)
        await rig.line.open()
        await rig.replica.load(rig.line)
        with pytest.raises(Unavailable, match="not followed yet"):
            await rig.follower.catch_up()
        tasks = rig.follower.start()
        await asyncio.sleep(0.1)
        await rig.follower.catch_up()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop = WarpLoop()
    loop.play(body(loop))


@pytest.mark.parametrize("broken", ["deaf", "still", "down"])
def test_a_cut_is_noticed_within_moments(broken: str) -> None:
    async def script(rig: Rig) -> None:
        setattr(rig.line, broken, True if broken != "down" else "unplugged")
        await rig.store.commit([Txn(())])
        await asyncio.sleep(4.0)
        if broken == "still":
            # A call that is not answered ends by the store's own deadline.
            assert not rig.follower.is_cut_long
        else:
            assert rig.follower.is_cut_long
            assert rig.follower.trouble
        rig.line.heal()
        await asyncio.sleep(1.0)
        assert rig.follower.cut_for_s == 0.0
        assert rig.replica.revision == rig.store.revision

    play(script)


def test_a_cut_is_as_long_as_it_began_ago() -> None:
    async def script(rig: Rig) -> None:
        rig.follower.cut("first")
        await asyncio.sleep(0.1)
        rig.line.down = "unplugged"
        rig.store.stir()
        rig.follower.cut("second")
        assert rig.follower.cut_for_s == pytest.approx(0.1)
        assert rig.follower.trouble == "second"
        await asyncio.sleep(0.8)
        assert not rig.follower.is_cut_long
        await asyncio.sleep(0.2)
        assert rig.follower.is_cut_long

    play(script)


def test_why_following_fails_is_said_and_not_only_that_something_is_missing() -> None:
    async def script(rig: Rig) -> None:
        real = rig.line.watch

        def broken(from_revision: int) -> Any:
            raise Unavailable("permission denied")

        rig.line.watch = broken  # type: ignore[method-assign]
        rig.line.deaf = True
        rig.line.down = "x"
        rig.store.stir()
        await asyncio.sleep(0.1)
        rig.line.heal()
        await rig.store.commit([Txn(())])
        await asyncio.sleep(4.0)
        assert rig.follower.is_cut_long
        assert rig.follower.trouble == "permission denied"
        rig.line.watch = real  # type: ignore[method-assign]
        await asyncio.sleep(1.0)
        assert rig.follower.cut_for_s == 0.0

    play(script)


@pytest.mark.parametrize("watch", ["watch", "presence"])
def test_a_server_without_one_of_its_watches_is_cut_off_though_nothing_is_missing_yet(
    watch: str,
) -> None:
    async def script(rig: Rig) -> None:
        real = getattr(rig.line, watch)

        def broken(*_: int) -> Any:
            raise Unavailable(f"{watch} is refused")

        setattr(rig.line, watch, broken)
        rig.line.down = "broken for a moment"
        rig.store.stir()
        await asyncio.sleep(0.1)
        rig.line.heal()
        await asyncio.sleep(4.0)
        assert rig.follower.is_cut_long
        with pytest.raises(Unavailable, match="is refused"):
            await rig.follower.catch_up()
        setattr(rig.line, watch, real)
        await asyncio.sleep(1.0)
        assert rig.follower.cut_for_s == 0.0

    play(script)


def test_a_store_that_does_not_say_its_last_revision_cuts_this_server_off() -> None:
    async def script(rig: Rig) -> None:
        real = rig.line.last_revision

        async def refused() -> int:
            raise Unavailable("no leader")

        rig.line.last_revision = refused  # type: ignore[method-assign]
        await asyncio.sleep(4.0)
        assert rig.follower.is_cut_long
        assert rig.follower.trouble == "no leader"
        rig.line.last_revision = real  # type: ignore[method-assign]
        await asyncio.sleep(1.0)
        assert rig.follower.cut_for_s == 0.0

    play(script)


def test_leases_whose_key_went_in_a_long_cut_are_in_doubt_from_the_first_moment() -> None:
    async def script(rig: Rig) -> None:
        await rig.grant()
        rig.line.down = "unplugged"
        rig.store.stir()
        await asyncio.sleep(30.0)
        await rig.store.drop(["a"])

        async def not_yet() -> int:
            raise Unavailable("not yet")

        rig.line.last_revision = not_yet  # type: ignore[method-assign]
        rig.line.heal()
        await within(1.0, lambda: not rig.entry().kept)
        assert rig.left_s() > TTL_S - 0.1

    play(script)


def test_catching_up_says_how_far_behind_this_server_is() -> None:
    async def script(rig: Rig) -> None:
        rig.line.deaf = True
        await rig.grant()
        last, here = rig.store.revision, rig.replica.revision
        with pytest.raises(Unavailable, match=f"at revision {last}, and only {here} came"):
            await rig.follower.catch_up()

    play(script)


def test_after_a_long_cut_every_lease_has_a_full_time_from_its_end() -> None:
    async def script(rig: Rig) -> None:
        await rig.grant()
        rig.line.down = "unplugged"
        rig.store.stir()
        await asyncio.sleep(30.0)
        await rig.store.drop(["a"])
        rig.line.heal()
        await asyncio.sleep(0.5)
        assert not rig.entry().kept
        assert rig.left_s() > TTL_S - 1.0

    play(script)


def test_a_lease_whose_key_goes_soon_after_a_long_cut_still_has_that_time() -> None:
    async def script(rig: Rig) -> None:
        await rig.grant()
        rig.line.down = "unplugged"
        rig.store.stir()
        await asyncio.sleep(30.0)
        rig.line.heal()
        await asyncio.sleep(2.0)
        await rig.drop()
        assert TTL_S - 3.0 < rig.left_s() < TTL_S - 1.0

    play(script)


def test_a_short_cut_gives_no_lease_more_time() -> None:
    async def script(rig: Rig) -> None:
        await rig.grant()
        await asyncio.sleep(TTL_S)
        rig.line.down = "another endpoint is looked for"
        rig.store.stir()
        await asyncio.sleep(0.3)
        await rig.store.drop(["a"])
        rig.line.heal()
        await asyncio.sleep(0.3)
        assert not rig.entry().kept
        assert rig.left_s() <= OTHERS_S
        # Nor once the cut is known to have ended.
        await asyncio.sleep(1.5)
        assert rig.follower.cut_for_s == 0.0
        assert rig.left_s() <= OTHERS_S

    play(script)


def test_a_server_that_was_long_behind_gives_every_lease_a_full_time_too() -> None:
    async def script(rig: Rig) -> None:
        await rig.grant()
        rig.line.deaf = True
        await rig.store.commit([Txn(())])
        await asyncio.sleep(20.0)
        rig.line.heal()
        await asyncio.sleep(0.5)
        assert rig.follower.cut_for_s == 0.0
        await rig.drop()
        assert rig.left_s() > TTL_S - 1.0

    play(script)


def test_a_store_that_stood_still_gives_every_lease_its_time() -> None:
    async def script(rig: Rig) -> None:
        await rig.grant()
        await asyncio.sleep(TTL_S)
        rig.line.still = True
        await asyncio.sleep(3.0)
        await rig.store.drop(["a"])
        rig.line.heal()
        await asyncio.sleep(0.1)
        assert rig.left_s() > TTL_S - 0.5
        assert rig.follower.cut_for_s == 0.0

    play(script)


def test_a_watch_that_breaks_is_begun_again_from_the_last_revision_that_was_seen() -> None:
    async def script(rig: Rig) -> None:
        begun: list[int] = []
        real = rig.line.watch

        def noted(from_revision: int) -> Any:
            begun.append(from_revision)
            return real(from_revision)

        rig.line.watch = noted  # type: ignore[method-assign]
        await rig.grant()
        rig.line.down = "broken"
        rig.store.stir()
        await asyncio.sleep(0.1)
        rig.line.heal()
        await asyncio.sleep(0.5)
        await rig.grant("b")
        assert begun == [rig.store.revision - 1]
        assert rig.line.snapshots == 1

    play(script)


def test_nothing_is_followed_before_the_book_was_read() -> None:
    async def body(loop: WarpLoop) -> None:
        rig = Rig(loop)
        tasks = rig.follower.start()
        await asyncio.sleep(5.0)
        assert rig.follower.cut_for_s == 0.0
        await rig.line.open()
        await rig.replica.load(rig.line)
        await rig.grant()
        await asyncio.sleep(0.5)
        assert rig.entry().kept
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop = WarpLoop()
    loop.play(body(loop))


def test_a_copy_that_is_torn_is_read_anew_before_it_is_followed_on() -> None:
    async def script(rig: Rig) -> None:
        failures = 2
        real = rig.line.snapshot

        async def fail() -> Any:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise Unavailable("not now")
            return await real()

        rig.line.snapshot = fail  # type: ignore[method-assign]
        rig.replica.is_torn = True
        rig.line.down = "broken"
        rig.store.stir()
        await asyncio.sleep(0.1)
        rig.line.heal()
        await asyncio.sleep(2.0)
        assert failures == -1
        assert not rig.replica.is_torn
        assert rig.line.snapshots == 2

    play(script)
