"""Serialised answers: the same bytes protobuf makes, renewed piece by piece."""

from __future__ import annotations

import asyncio

from rankbook import v1
from rankbook.limits import MAX_REPLY_BYTES
from rankbook_server.core.fold import BookLimits
from rankbook_server.view import View

from .support import Bench, registration, running, until


def view_of(bench: Bench) -> View:
    view = View(bench.registry)
    bench.registry.subscribe(view)
    return view


def topology(view: View, *, bare: bool = False) -> v1.Topology:
    found = view.engine("n", "e")
    assert found is not None
    (body,) = found.topology(without_payload=bare)
    data = body.join()
    assert len(data) == body.size
    (parsed,) = v1.GetTopologyResponse.FromString(data).topologies
    return parsed


def test_the_joined_pieces_are_what_the_book_says() -> None:
    async def run() -> None:
        async with running() as bench:
            view = view_of(bench)
            for tp in (1, 0):
                await bench.register(tp=tp)
            found = topology(view)
            book = bench.registry.book("n")
            assert found.engine == book.engine("e")
            workers = book.workers("e")
            assert list(found.workers) == [w.record for w in workers]
            assert list(found.statuses) == [w.status for w in workers]
            assert [w.slot.tp_rank for w in found.workers] == [0, 1]

    asyncio.run(run())


def test_a_change_renews_its_own_piece_only() -> None:
    async def run() -> None:
        async with running() as bench:
            view = view_of(bench)
            for tp in (0, 1):
                await bench.register(tp=tp)
            found = view.engine("n", "e")
            assert found is not None
            before = found.topology(without_payload=False)[0].pieces
            changed = registration(tp=1, sequence=2)
            changed.records[0].handshake.payload = b"changed"
            await bench.registry.submit("r", "n", lambda book, now: book.register(changed, now))
            again = view.engine("n", "e")
            assert again is not None
            after = again.topology(without_payload=False)[0].pieces
            # The head, then one piece a worker.
            assert after[1] is before[1]
            assert b"changed" in after[2]
            assert b"changed" not in before[2]

    asyncio.run(run())


def test_a_payload_left_out_is_nowhere_in_the_answer_and_still_in_the_book() -> None:
    async def run() -> None:
        async with running() as bench:
            view = view_of(bench)
            await bench.register()
            bare = topology(view, bare=True)
            assert b"payload" not in bare.SerializeToString()
            assert bare.workers[0].handshake.format == "test"
            assert topology(view).workers[0].handshake.payload == b"payload"

    asyncio.run(run())


def test_a_record_under_another_lease_shows_it_though_nothing_else_changed() -> None:
    async def run() -> None:
        async with running() as bench:
            view = view_of(bench)
            await bench.register()
            before = topology(view)
            other = v1.LeaseRequest(lease_key="another")
            moved = await bench.register(sequence=2, lease=other)
            after = topology(view)
            assert after.statuses[0].lease_id == moved.lease.lease_id
            assert after.statuses[0].lease_id != before.statuses[0].lease_id
            assert after.engine.revision == before.engine.revision

    asyncio.run(run())


def test_an_engine_that_is_not_there_has_no_view() -> None:
    async def run() -> None:
        async with running() as bench:
            view = view_of(bench)
            assert view.engine("n", "e") is None
            await bench.register()
            assert view.engine("n", "e") is not None
            assert view.engine("other", "e") is None

    asyncio.run(run())


def test_an_answer_is_cut_where_a_part_is_full_and_loses_nothing() -> None:
    async def run() -> None:
        async with running() as bench:
            view = view_of(bench)
            for tp in range(9):
                request = registration(tp=tp, tp_size=9)
                request.records[0].handshake.payload = b"%d" % tp * 400_000
                await bench.registry.submit("r", "n", lambda b, now, r=request: b.register(r, now))
            found = view.engine("n", "e")
            assert found is not None
            bodies = found.topology(without_payload=False)
            assert [body.size < MAX_REPLY_BYTES for body in bodies] == [True, True]
            parts = [v1.GetTopologyResponse.FromString(body.join()) for body in bodies]
            topologies = [topology for part in parts for topology in part.topologies]
            assert [t.HasField("engine") for t in topologies] == [True, False]
            ranks = [w.slot.tp_rank for t in topologies for w in t.workers]
            assert ranks == list(range(9))

    asyncio.run(run())


def test_of_an_engine_without_workers_nothing_is_kept_until_someone_asks() -> None:
    async def run() -> None:
        async with running(book=BookLimits(tombstone_ttl_s=5.0), sweep_s=1.0) as bench:
            view = view_of(bench)
            for name in ("gone", "stays"):
                reply = await bench.register(name, tp_size=1)
                assert view.engine("n", name) is not None
                if name == "gone":
                    lease = reply.lease.lease_id
            request = v1.RevokeLeaseRequest(lease_id=lease)
            await bench.registry.submit("r", "n", lambda book, now: book.revoke_lease(request, now))
            assert len(view) == 1
            tombstone = view.engine("n", "gone")
            assert tombstone is not None
            assert tombstone.engine.state == v1.STATE_GONE
            await bench.pass_time(6.0)
            await until(lambda: "gone" not in bench.registry.book("n").engines)
            assert len(view) == 1

    asyncio.run(run())
