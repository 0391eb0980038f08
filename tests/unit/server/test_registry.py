"""The one writer: waves, failures, stalls, bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rankbook import v1
from rankbook.errors import Internal, Overloaded, RankbookError, Reason, Unavailable
from rankbook_server.core.book import Book
from rankbook_server.core.fold import BookLimits
from rankbook_server.core.ops import Txn

from .support import Bench, Heard, registration, running, until


async def settled(future: asyncio.Future[Any]) -> Any:
    try:
        return await future
    except RankbookError as error:
        return error


def test_what_comes_in_one_turn_of_the_loop_is_one_wave_with_revisions_in_order() -> None:
    async def run() -> None:
        async with running() as bench:
            groups: list[int] = []
            commit = bench.store.commit

            async def counted(txns: Sequence[Txn]) -> list[int | None]:
                groups.append(len(txns))
                return await commit(txns)

            bench.store.commit = counted  # type: ignore[method-assign]
            replies = await asyncio.gather(*(bench.register(f"e{n}") for n in range(10)))
            assert groups == [10]
            assert [reply.revision for reply in replies] == list(range(1, 11))
            assert bench.registry.revision == 10

    asyncio.run(run())


def test_a_later_command_on_an_engine_sees_what_an_earlier_one_did() -> None:
    async def run() -> None:
        async with running() as bench:
            first = bench.register()
            other = registration()
            other.records[0].process.boot_id = "another"
            other.lease.lease_key = "another"
            second = bench.registry.submit("register", "n", lambda b, now: b.register(other, now))
            results = await asyncio.gather(first, settled(second))
            assert results[0].revision == 1
            assert results[1].reason is Reason.SLOT_HELD

    asyncio.run(run())


def test_a_failed_commit_leaves_nothing_and_every_command_of_the_wave_is_told() -> None:
    async def run() -> None:
        async with running() as bench:
            await bench.register("kept")
            heard = Heard()
            bench.registry.subscribe(heard)
            commit = bench.store.commit

            async def fail(txns: Sequence[Txn]) -> list[int | None]:
                bench.store.commit = commit  # type: ignore[method-assign]
                raise Unavailable("the disk is full", reason=Reason.STORE_UNAVAILABLE)

            bench.store.commit = fail  # type: ignore[method-assign]
            refused = registration("lost")
            refused.sequence = 0
            results = await asyncio.gather(
                bench.register("lost"),
                settled(bench.registry.submit("r", "n", lambda b, now: b.register(refused, now))),
                return_exceptions=True,
            )
            assert [r.reason for r in results] == [Reason.STORE_UNAVAILABLE] * 2  # type: ignore[union-attr]
            await until(lambda: bench.registry.available)
            book = bench.registry.book("n")
            assert list(book.engine_ids()) == ["kept"]
            assert bench.registry.revision == 1
            assert (await bench.register("lost")).revision == 2

    asyncio.run(run())


def test_while_the_store_is_away_reads_go_on_and_it_comes_back_by_itself() -> None:
    async def run() -> None:
        async with running() as bench:
            told: list[bool] = []
            bench.registry.on_available = told.append
            await bench.register("kept")
            bench.store.outage = "unplugged"
            assert (await settled(bench.register("lost"))).reason is Reason.STORE_UNAVAILABLE
            assert not bench.registry.available
            bench.registry.check_readable()
            assert list(bench.registry.book("n").engine_ids()) == ["kept"]
            assert (await settled(bench.register("x"))).reason is Reason.STORE_UNAVAILABLE
            bench.store.outage = ""
            bench.clock.seconds += 0.3
            await until(lambda: bench.registry.available)
            assert list(bench.registry.book("n").engine_ids()) == ["kept"]
            assert told == [False, True]

    asyncio.run(run())


def test_readers_never_see_what_is_not_kept() -> None:
    async def run() -> None:
        async with running() as bench:
            commit, gate = bench.store.commit, asyncio.Event()

            async def slow(txns: Sequence[Txn]) -> list[int | None]:
                began.set()
                await gate.wait()
                return await commit(txns)

            began = asyncio.Event()
            bench.store.commit = slow  # type: ignore[method-assign]
            writing = bench.register()
            await began.wait()
            assert bench.registry.revision == 0
            assert list(bench.registry.book("n").engine_ids()) == []
            gate.set()
            await writing
            assert bench.registry.revision == 1
            assert list(bench.registry.book("n").engine_ids()) == ["e"]

    asyncio.run(run())


def test_a_write_that_was_cancelled_before_its_turn_does_not_happen() -> None:
    async def run() -> None:
        async with running() as bench:
            request = registration()
            future = bench.registry.submit("r", "n", lambda book, now: book.register(request, now))
            future.cancel()
            await bench.register("other")
            assert list(bench.registry.book("n").engine_ids()) == ["other"]

    asyncio.run(run())


def test_a_lease_that_is_not_renewed_ends_and_its_records_go() -> None:
    async def run() -> None:
        async with running() as bench:
            lease = v1.LeaseRequest(lease_key="k")
            lease.ttl.seconds = 2
            await bench.register(lease=lease)
            for _ in range(5):
                await bench.pass_time(0.5)
            assert bench.registry.leases_alive == 0
            assert bench.registry.book("n").state("e") == v1.STATE_GONE

    asyncio.run(run())


def test_after_a_stall_every_lease_lives_a_full_time_more() -> None:
    async def run() -> None:
        async with running() as bench:
            lease = v1.LeaseRequest(lease_key="k")
            lease.ttl.seconds = 2
            await bench.register(lease=lease)
            bench.clock.seconds += 60.0
            # The first to notice may be a write, before the late tick.
            await bench.register("other")
            for _ in range(3):
                await bench.pass_time(0.5)
            assert bench.registry.book("n").state("e") != v1.STATE_GONE
            await bench.pass_time(0.6)
            assert bench.registry.book("n").state("e") == v1.STATE_GONE

    asyncio.run(run())


def test_a_fault_in_a_decision_fails_one_call_and_not_the_writer() -> None:
    def broken(book: Book, now: object) -> Any:
        raise ZeroDivisionError

    async def run() -> None:
        async with running() as bench:
            results = await asyncio.gather(
                settled(bench.registry.submit("broken", "n", broken)), bench.register()
            )
            assert isinstance(results[0], Internal)
            assert "ZeroDivision" not in str(results[0])
            assert results[1].revision == 1

    asyncio.run(run())


def test_writes_over_the_bound_are_refused() -> None:
    async def run() -> None:
        async with running(max_queued=2) as bench:
            calls = [settled(bench.register(f"e{n}")) for n in range(3)]
            results = await asyncio.gather(*calls)
            assert [isinstance(r, Overloaded) for r in results] == [False, False, True]

    asyncio.run(run())


def test_a_refused_write_leaves_no_namespace_behind() -> None:
    async def run() -> None:
        async with running() as bench:
            bad = registration(sequence=0)
            await settled(bench.registry.submit("r", "empty", lambda b, now: b.register(bad, now)))
            assert bench.registry.namespaces() == []
            await bench.register(namespace="full")
            assert bench.registry.namespaces() == ["full"]

    asyncio.run(run())


def test_changes_are_told_with_a_revision_that_none_of_them_is_before() -> None:
    async def run() -> None:
        async with running() as bench:
            heard = Heard()
            bench.registry.subscribe(heard)
            await bench.register("e0")
            await asyncio.gather(bench.register("e1"), bench.register("e2", namespace="m"))
            assert heard.changes[0] == ("n", frozenset({"e0"}), 1)
            others = {namespace: (ids, since) for namespace, ids, since in heard.changes[1:]}
            assert others["m"] == (frozenset({"e2"}), 2)
            assert "e1" in others["n"][0]
            assert others["n"][1] == 2

    asyncio.run(run())


def test_a_book_read_anew_is_the_same_and_its_leases_have_their_time() -> None:
    async def run() -> None:
        async with running() as bench:
            reply = await bench.register()
            again = Bench()
            again.store, again.clock = bench.store, bench.clock
            again.registry._store = bench.store
            await again.registry.open()
            assert again.registry.revision == 1
            assert again.registry.book("n").engine("e") == bench.registry.book("n").engine("e")
            assert again.registry.book("n").leases[reply.lease.lease_id].ttl_s == 10.0

    asyncio.run(run())


def test_a_namespace_that_became_empty_gives_its_place_away_and_keeps_its_epoch_floor() -> None:
    async def begin(bench: Bench, namespace: str) -> Any:
        request = v1.BeginGenerationRequest(engine_id="e", generation="g")
        return await bench.registry.submit(
            "begin", namespace, lambda book, now: Book.begin_generation(book, request, now)
        )

    async def run() -> None:
        book = BookLimits(tombstone_ttl_s=1.0)
        async with running(book=book, max_namespaces=1, sweep_s=1.0) as bench:
            assert (await begin(bench, "a")).epoch == 1
            with pytest.raises(Overloaded, match="namespace b"):
                await begin(bench, "b")
            for _ in range(4):
                await bench.pass_time(1.5)
            assert (await begin(bench, "b")).epoch == 1
            assert bench.registry.book("a").epoch_floor == 1
            with pytest.raises(Overloaded, match="namespace a"):
                await begin(bench, "a")
            for _ in range(4):
                await bench.pass_time(1.5)
            assert (await begin(bench, "a")).epoch == 2
            # Also when the book is read anew.
            await bench.registry._replica.load(bench.store)
            assert bench.registry.book("b").epoch_floor == 1
            assert bench.registry.namespaces() == ["a"]

    asyncio.run(run())
