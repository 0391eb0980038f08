"""A drain is over once no server knows of a transfer, whichever was asked or told."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from rankbook import v1
from rankbook.errors import Unavailable
from rankbook_server.drains import WORD_TTL_S
from rankbook_server.peers import FORGET_S

from .drain_world import E, Site, World, play
from .shared import within

IDLE, WAITING, DEADLINE = (
    v1.DRAIN_OUTCOME_IDLE,
    v1.DRAIN_OUTCOME_WAITING,
    v1.DRAIN_OUTCOME_DEADLINE,
)


def test_transfers_that_were_reported_elsewhere_keep_a_drain_waiting() -> None:
    async def script(world: World) -> None:
        one, two, three = await world.grown(3)
        await two.report(3, "a")
        await three.report(2, "b")
        reply = await one.drain()
        # The others have not answered yet.
        assert reply.outcome == WAITING
        reply = await one.drain(5.0)
        assert (reply.outcome, reply.transfers_in_flight) == (WAITING, 5)
        waiting = asyncio.ensure_future(one.drain(60.0))
        await two.report(0, "a")
        await asyncio.sleep(3.0)
        assert not waiting.done()
        began_s = world.now()
        await three.report(0, "b")
        reply = await waiting
        assert (reply.outcome, reply.transfers_in_flight) == (IDLE, 0)
        assert world.now() - began_s < 2.0

    play(script)


def test_a_drain_of_an_idle_engine_is_over_as_soon_as_every_server_has_answered() -> None:
    async def script(world: World) -> None:
        one, *_ = await world.grown(3)
        began_s = world.now()
        assert (await one.drain(60.0)).outcome == IDLE
        assert world.now() - began_s < 1.0
        # Asked again, there is nothing to wait for.
        assert (await one.drain()).outcome == IDLE

    play(script)


def test_a_drain_asks_for_answers_of_its_own_not_for_those_to_an_earlier_one() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        assert (await one.drain(60.0)).outcome == IDLE
        await one.undo()
        await world.level()
        two.line.deaf = True
        await two.report(1)
        before = world.word(two)
        # The other one does not know of this drain, and so says nothing of it.
        assert (await one.drain(3.0)).outcome == WAITING
        assert world.word(two) == before
        two.line.heal()
        reply = await one.drain(3.0)
        assert (reply.outcome, reply.transfers_in_flight) == (WAITING, 1)

    play(script)


def test_a_report_that_was_acknowledged_before_the_drain_is_never_missed() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        for number in range(20):
            await two.report(1)
            reply = await one.drain(0.3 * (number % 4))
            assert reply.outcome == WAITING, number
            await two.report(0)
            assert (await one.drain(10.0)).outcome == IDLE
            await one.undo()

    play(script)


def test_only_the_start_that_drains_and_its_namespace_count() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        await two.report(1, "a", generation="g0")
        await two.report(1, "b", engine_id="e_dp1")
        await two.report(1, "c", namespace="other")
        assert (await one.drain(60.0)).outcome == IDLE
        word = world.word(two)
        assert word is not None
        assert not word.flying

    play(script)


def test_servers_that_rest_write_once_and_a_drain_costs_each_one_write_a_second() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        await two.report(1, "resting")
        await asyncio.sleep(20.0)
        before = world.store.words_written
        for number in range(600):
            await two.report(number % 7, "busy")
            await asyncio.sleep(0.1)
        assert world.store.words_written == before
        await one.drain()
        for number in range(200):
            await two.report(1 + number % 7, "busy")
            await asyncio.sleep(0.1)
        # Twenty seconds, and a first word of each.
        assert world.store.words_written - before <= 20 + 3
        await two.report(5, "old", generation="g0")
        await asyncio.sleep(3.0)
        before = world.store.words_written
        two.line.delay_s = 0.5
        began_s = world.now()
        for number in range(50):
            # A start that is over is nobody's business.
            await two.report(1 + number % 7, "old", generation="g0")
        assert world.now() == began_s
        two.line.delay_s = 0.0
        assert world.store.words_written == before
        await one.undo()
        await within(3.0, lambda: not cast(v1.StoredServer, world.word(two)).flying)
        before = world.store.words_written
        for number in range(50):
            await two.report(1 + number % 7, "busy")
            await asyncio.sleep(0.1)
        assert world.store.words_written == before

    play(script)


def test_a_word_is_kept_for_as_long_as_its_server_lives() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        await two.report(4)
        await one.drain(1.0)
        for _ in range(40):
            await asyncio.sleep(5.0)
            await two.report(4)
            assert world.word(one) is not None
            word = world.word(two)
            assert word is not None
            (flying,) = word.flying
            assert flying.transfers_in_flight == 4

    play(script)


def test_what_a_killed_server_was_told_counts_until_everybody_has_reported_elsewhere() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        await two.report(2, "a")
        assert (await one.drain(2.0)).transfers_in_flight == 2
        died_s = world.now()
        await two.die()
        reply = await one.drain(FORGET_S - 3)
        assert (reply.outcome, reply.transfers_in_flight) == (WAITING, 2)
        # It comes back here just before its report would have run out there.
        await one.report(1, "a")
        waiting = asyncio.ensure_future(one.drain(60.0))
        await within(60.0, lambda: world.word(two) is None)
        assert FORGET_S < world.now() - died_s <= WORD_TTL_S
        await one.report(1, "a")
        await asyncio.sleep(20.0)
        assert not waiting.done()
        await one.report(0, "a")
        assert (await waiting).outcome == IDLE

    play(script)


def test_a_server_that_died_before_it_answered_is_waited_for_until_its_word_runs_out() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        await two.report(1)
        await two.die()
        died_s = world.now()
        reply = await one.drain(60.0)
        assert reply.outcome == IDLE
        assert FORGET_S <= world.now() - died_s <= WORD_TTL_S + 1

    play(script)


def test_a_server_that_nobody_reports_to_says_farewell_and_one_that_knows_something_does_not() -> (
    None
):
    async def script(world: World) -> None:
        one, two, three = await world.grown(3)
        await three.report(0)
        await two.stop()
        await three.stop()
        assert world.word(two) is None
        assert world.word(three) is not None
        assert world.word(one) is not None

    play(script)


def test_a_server_that_joins_speaks_for_engines_older_than_it_only_after_a_while() -> None:
    async def script(world: World) -> None:
        (one,) = await world.grown(1)
        began_s = world.now()
        (late,) = await world.join()
        await one.ready("young_dp0")
        assert (await one.drain(10.0)).outcome == WAITING
        # Whoever is connected to this one has connected since.
        young_s = world.now()
        assert (await one.drain(10.0, engine_id="young_dp0")).outcome == IDLE
        assert (await late.drain(10.0, engine_id="young_dp0")).outcome == IDLE
        assert world.now() - young_s < 3
        assert (await one.drain(60.0)).outcome == IDLE
        assert FORGET_S <= world.now() - began_s < FORGET_S + 3
        await late.report(1)
        assert (await one.drain(3.0)).transfers_in_flight == 1

    play(script)


def test_the_time_to_report_begins_when_a_server_has_its_store() -> None:
    async def script(world: World) -> None:
        (one,) = await world.grown(1)
        late = Site(world.loop, world.store, "late")
        world.sites.append(late)
        late.line.down = "away"
        late.registry.start()
        late.drains.start()
        await asyncio.sleep(2 * FORGET_S)
        assert world.word(late) is None
        late.line.heal()
        await within(10.0, lambda: late.registry.available)
        assert (await late.drain(10.0)).outcome == WAITING
        assert (await one.drain(FORGET_S + 5)).outcome == IDLE

    play(script)


def test_a_deadline_ends_a_drain_that_others_keep_waiting() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        await two.report(6)
        began_s = world.now()
        reply = await one.drain(60.0, deadline_s=7.0)
        assert (reply.outcome, reply.transfers_in_flight) == (DEADLINE, 6)
        assert 7.0 <= world.now() - began_s < 8.5

    play(script)


def test_a_server_that_cannot_read_what_others_say_calls_nobody_idle() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        two.line.deaf = True
        await one.drain()
        waiting = asyncio.ensure_future(one.drain(30.0))
        await asyncio.sleep(1.0)
        one.line.down = two.line.down = "cut"
        await asyncio.sleep(10.0)
        assert not waiting.done()
        one.line.heal()
        two.line.heal()
        assert (await waiting).outcome == IDLE

    play(script)


def test_a_word_of_another_version_or_book_or_none_at_all_answers_for_nothing() -> None:
    async def script(world: World) -> None:
        (one,) = await world.grown(1)
        assert (await one.drain(5.0)).outcome == IDLE
        word = world.word(one)
        assert word is not None
        word.boot_id, word.revision = "x", 2**40
        for change, outcome in (
            ({}, IDLE),
            ({"version": 2}, WAITING),
            ({"book_id": "another"}, WAITING),
            ({"revision": word.loaded_revision}, WAITING),
        ):
            told = v1.StoredServer()
            told.CopyFrom(word)
            for name, value in cast(dict[str, Any], change).items():
                setattr(told, name, value)
            world.store.say("x", told.SerializeToString(), 60.0)
            assert (await one.drain()).outcome == outcome, change
        world.store.say("x", b"\xff\xff", 60.0)
        assert (await one.drain()).outcome == WAITING

    play(script)


def test_of_a_word_only_the_engine_that_is_asked_for_counts() -> None:
    async def script(world: World) -> None:
        (one,) = await world.grown(1)
        assert (await one.drain(5.0)).outcome == IDLE
        word = world.word(one)
        assert word is not None
        word.boot_id, word.revision = "x", 2**40
        for namespace, engine_id, generation in (
            ("other", E, "g1"),
            ("default", "e_dp1", "g1"),
            ("default", E, "g0"),
        ):
            word.flying.add(
                namespace=namespace,
                engine_id=engine_id,
                generation=generation,
                transfers_in_flight=5,
            )
        world.store.say("x", word.SerializeToString(), 60.0)
        assert (await one.drain()).outcome == IDLE
        most = 2**32 - 1
        word.flying.add(namespace="default", engine_id=E, generation="g1", transfers_in_flight=most)
        world.store.say("x", word.SerializeToString(), 60.0)
        await one.report(7)
        reply = await one.drain()
        # More than the answer has room for is as much as it has room for.
        assert (reply.outcome, reply.transfers_in_flight) == (WAITING, most)

    play(script)


def test_a_report_that_runs_out_at_another_server_ends_the_wait() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        await two.report(3)
        began_s = world.now()
        assert (await one.drain(60.0)).outcome == IDLE
        assert FORGET_S <= world.now() - began_s < FORGET_S + 3

    play(script)


def test_a_store_that_is_away_is_not_asked_what_the_others_say() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        await two.report(1)
        await one.drain()
        waiting = asyncio.ensure_future(one.drain(30.0))
        await asyncio.sleep(1.0)
        one.line.down = "cut"
        await within(5.0, lambda: not one.registry.available)
        looks = 0

        async def counted() -> Any:
            nonlocal looks
            looks += 1
            raise Unavailable("cut")

        one.line.announced = counted  # type: ignore[method-assign]
        assert (await waiting).outcome == WAITING
        assert looks == 0

    play(script)


def test_a_first_report_is_acknowledged_only_once_the_others_can_know_of_its_server() -> None:
    async def script(world: World) -> None:
        (one,) = await world.grown(1)
        (own,) = await world.join(alone=True)
        assert world.word(own) is None
        own.line.delay_s = 1.0
        reporting = asyncio.ensure_future(own.report(2))
        await asyncio.sleep(0.5)
        assert not reporting.done()
        await reporting
        assert world.word(own) is not None
        own.line.delay_s = 0.0
        assert (await one.drain(3.0)).transfers_in_flight == 2

    play(script)


def test_a_report_that_the_others_cannot_know_of_is_refused_and_counts_here() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        await two.report(1, "a")
        two.line.mute = "read only"
        await asyncio.sleep(20.0)
        with pytest.raises(Unavailable):
            await two.report(5, "b")
        two.line.heal()
        await two.report(1, "a")
        assert (await one.drain(3.0)).transfers_in_flight == 6

    play(script)


def test_a_server_of_one_process_says_nothing_until_that_has_peers() -> None:
    async def script(world: World) -> None:
        (one,) = await world.grown(1)
        crowd = await world.join(20, alone=True)
        words = len(world.store.words())
        began_s = world.now()
        assert (await one.drain(60.0)).outcome == IDLE
        assert world.now() - began_s < 1.0
        # Any of them can be asked, at once.
        assert (await crowd[0].drain(60.0)).outcome == IDLE
        await asyncio.sleep(60.0)
        assert len(world.store.words()) == words
        await crowd[7].report(1)
        assert (await crowd[3].drain(2.0)).transfers_in_flight == 1
        assert len(world.store.words()) == words + 1
        # The connections end with the process.
        await crowd[7].stop()
        assert (await crowd[3].drain(60.0)).outcome == IDLE
        assert world.now() - began_s < 66.0

    play(script)


def test_when_the_store_loses_the_words_nobody_is_called_idle_before_they_are_back() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        await two.report(3)
        assert (await one.drain(3.0)).transfers_in_flight == 3
        for _ in range(3):
            world.store.lose()
            # The other server notices only when it repeats its word.
            assert (await one.drain()).outcome == WAITING
            # Who is asked notices then.
            await within(1.0, lambda: world.word(one) is not None)
            assert world.word(two) is None
            reply = await one.drain(20.0)
            assert (reply.outcome, reply.transfers_in_flight) == (WAITING, 3)
            await two.report(3)
        await two.report(0)
        assert (await one.drain(60.0)).outcome == IDLE

    play(script)


def test_words_that_were_lost_before_anybody_asked_are_waited_for_too() -> None:
    async def script(world: World) -> None:
        (one,) = await world.grown(1)
        await asyncio.sleep(5.0)
        (two,) = await world.join()
        await asyncio.sleep(FORGET_S + 1)
        written = world.store.words_written
        world.store.lose()
        await within(20.0, lambda: world.store.words_written > written)
        back, gone = (one, two) if world.word(one) is not None else (two, one)
        await gone.report(3)
        assert world.word(gone) is None
        assert (await back.drain()).outcome == WAITING
        reply = await back.drain(15.0)
        assert (reply.outcome, reply.transfers_in_flight) == (WAITING, 3)

    play(script)


def test_a_server_that_stood_still_forgets_no_report_that_could_not_be_repeated() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        await two.report(3)
        assert (await one.drain(3.0)).transfers_in_flight == 3
        world.loop.now_s += 2 * FORGET_S
        reply = await two.drain(FORGET_S - 5)
        assert (reply.outcome, reply.transfers_in_flight) == (WAITING, 3)
        # Nobody has repeated it since.
        assert (await two.drain(60.0)).outcome == IDLE

    play(script)


def test_another_book_in_the_place_of_the_first_is_spoken_of_anew() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        world.store.replace()
        book_id = world.store.book_id
        await within(20.0, lambda: all(s.registry.book_id == book_id for s in (one, two)))
        await within(20.0, lambda: all(s.registry.available for s in (one, two)))
        await one.ready()
        await two.report(1)
        reply = await one.drain(5.0)
        assert (reply.outcome, reply.transfers_in_flight) == (WAITING, 1)
        await two.report(0)
        began_s = world.now()
        assert (await one.drain(10.0)).outcome == IDLE
        # Nothing was lost, it is of another book.
        assert world.now() - began_s < 2.0

    play(script)


def test_more_than_a_word_can_hold_keeps_every_drain_waiting() -> None:
    async def script(world: World) -> None:
        (one,) = await world.grown(1)
        (two,) = await world.join(word_bytes=1000)
        await asyncio.sleep(FORGET_S + 1)
        names = [f"x{number}" for number in range(40)]
        for name in names:
            await one.ready(name)
            await one.drain(engine_id=name)
        for count, outcome in ((20, IDLE), (40, WAITING), (20, IDLE)):
            peers = [
                v1.PeerConnection(engine_id=name, generation="g1", transfers_in_flight=1)
                for name in names[:count]
            ]
            await two.ask("report_peers", v1.ReportPeersRequest(boot_id="a", peers=peers))
            assert (await one.drain(5.0)).outcome == outcome
            word = world.word(two)
            assert word is not None
            assert len(word.flying) < 30

    play(script)


def test_many_who_wait_share_the_looks_at_the_others() -> None:
    async def script(world: World) -> None:
        one, two = await world.grown(2)
        await two.report(1)
        await one.drain(1.0)
        looks = 0
        announced = one.line.announced

        async def counted() -> Any:
            nonlocal looks
            looks += 1
            await asyncio.sleep(0.01)
            return await announced()

        one.line.announced = counted  # type: ignore[method-assign]
        replies = await asyncio.gather(*(one.drain(10.0) for _ in range(50)))
        assert {reply.outcome for reply in replies} == {WAITING}
        assert looks <= 10.0 / 0.25 + 5

    play(script)
