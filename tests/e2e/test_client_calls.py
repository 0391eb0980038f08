"""Claims about both faces of the client against a real registry."""

from __future__ import annotations

import asyncio
import threading

import pytest

import rankbook
from rankbook import Requirement, State


@pytest.fixture
def client(book):
    with rankbook.Client(book) as made:
        yield made


def test_signing_in_sealing_and_asking_over_the_blocking_face(client, made, engine_id):
    epoch = client.begin_generation(engine_id, "g1")
    for number, record in enumerate(made.grid(engine_id)):
        registered = client.register_workers(
            [record], sequence=1, lease_key=f"{engine_id}-{number}", ttl_s=10, epoch=epoch
        )
        assert registered.epoch == epoch
    topology = client.get_topology(engine_id, require=Requirement.COMPLETE)
    assert [w.slot for w in topology.workers] == [r.slot for r in made.grid(engine_id)]
    assert topology.workers[0].handshake.payload == b"agent"
    sealed = client.seal_engine(
        engine_id,
        "g1",
        made.seal_slots(topology),
        made.core("core"),
        epoch=epoch,
        lease_key=f"{engine_id}-core",
    )
    ready = client.get_topology(engine_id, min_revision=sealed.revision)
    assert (ready.engine.state, ready.engine.seal.digest) == (State.READY, sealed.seal.digest)
    assert ready.book_revision >= sealed.revision
    listed = client.list_engines(rankbook.EngineFilter(engine_id=engine_id))
    assert [engine.engine_id for engine in listed.engines] == [engine_id]
    (grouped,) = (t for t in client.get_group("prefill-a") if t.engine.engine_id == engine_id)
    assert grouped.engine == ready.engine
    assert (
        client.get_topology(
            engine_id, known_revision=ready.engine.revision, known_book_id=ready.book_id
        )
        is None
    )
    bare = client.get_topology(engine_id, without_payload=True, slots=[rankbook.Slot(1, 0, 1)])
    assert [w.slot for w in bare.workers] == [rankbook.Slot(1, 0, 1)]
    assert bare.workers[0].handshake.payload == b""
    drained = client.drain_engine(engine_id, reason="upgrade", requested_by="me")
    assert drained.state is State.DRAINING
    assert client.drain_engine(engine_id, undo=True).state is State.READY
    assert client.compare_peers(engine_id, engine_id) is not None
    assert client.report_peers("reader", [rankbook.PeerConnection(engine_id, "old")]) != ()
    assert client.evict_engine(engine_id).removed == 4
    assert client.status().workers >= 0


def test_the_same_over_the_asyncio_face(book, made, engine_id):
    async def run() -> None:
        async with rankbook.AsyncClient(book) as client:
            epoch = await client.begin_generation(engine_id, "g1")
            replies = await asyncio.gather(
                *(
                    client.register_workers(
                        [record], sequence=1, lease_key=f"{engine_id}-{n}", epoch=epoch
                    )
                    for n, record in enumerate(made.grid(engine_id))
                )
            )
            topology = await client.get_topology(engine_id, require=Requirement.COMPLETE)
            assert [s.record_digest for s in topology.statuses] == [
                reply.record_digests[0] for reply in replies
            ]
            await client.seal_engine(engine_id, "g1", made.seal_slots(topology), made.core("core"))
            renewed = await client.renew_leases([r.lease.lease_id for r in replies])
            assert {s.state for s in renewed.statuses} == {rankbook.LeaseState.ALIVE}
            assert renewed.clock.error_s > 0
            events = client.watch(rankbook.EngineFilter(engine_id=engine_id))
            first = await anext(events)
            assert first.topology.engine.state is State.READY
            await client.revoke_lease(replies[0].lease.lease_id)
            second = await anext(events)
            assert second.removed == (rankbook.Slot(),)
            assert len(second.topology.workers) == 3
            await events.aclose()

    asyncio.run(run())


def test_a_registration_larger_than_a_batch_is_cut_and_whole_in_the_end(client, made, engine_id):
    records = [made.record(engine_id, 0, tp, tp_size=150, boot_id="node") for tp in range(150)]
    registered = client.register_workers(records, sequence=10, lease_key=engine_id)
    # 64 + 64 + 22 records.
    assert registered.sequence == 12
    topology = client.get_topology(engine_id, require=Requirement.COMPLETE)
    assert registered.record_digests == tuple(s.record_digest for s in topology.statuses)
    assert {s.lease_id for s in topology.statuses} == {registered.lease.lease_id}


def test_records_too_large_for_one_batch_are_cut_by_size(client, made, engine_id):
    records = [
        made.record(engine_id, 0, tp, tp_size=3, boot_id="node", payload=bytes(500 * 1024))
        for tp in range(3)
    ]
    registered = client.register_workers(records, sequence=1, lease_key=engine_id)
    assert registered.sequence == 2
    # 1.5 MiB of payload, so the answer comes whole over the session.
    topology = client.get_topology(engine_id, require=Requirement.COMPLETE)
    assert [len(w.handshake.payload) for w in topology.workers] == [500 * 1024] * 3


def test_an_answer_larger_than_one_message_comes_whole(client, made, engine_id):
    records = [
        made.record(engine_id, 0, tp, tp_size=20, boot_id="node", payload=bytes(500 * 1024))
        for tp in range(20)
    ]
    client.register_workers(records, sequence=1, lease_key=engine_id)
    topology = client.get_topology(engine_id, require=Requirement.COMPLETE)
    assert [w.slot.tp_rank for w in topology.workers] == list(range(20))
    watch = client.watch(rankbook.EngineFilter(engine_id=engine_id))
    assert len(next(watch).topology.workers) == 20
    watch.close()


def test_errors_come_back_typed_with_their_values(client, made, engine_id):
    with pytest.raises(rankbook.NotFound) as missing:
        client.get_topology(engine_id)
    assert missing.value.reason is rankbook.Reason.ENGINE_NOT_FOUND
    assert missing.value.metadata["engine_id"] == engine_id
    record = made.record(engine_id, 0, 0, tp_size=2)
    client.register_workers([record], sequence=1, lease_key=engine_id)
    with pytest.raises(rankbook.Incomplete) as incomplete:
        client.get_topology(engine_id, wait_s=0.2)
    assert "missing" in incomplete.value.metadata
    with pytest.raises(rankbook.Conflict):
        client.register_workers(
            [made.record(engine_id, 0, 0, tp_size=2, boot_id="other")],
            sequence=1,
            lease_key=f"{engine_id}-other",
        )


def test_what_is_wrong_with_the_callers_words_is_said_before_anything_is_sent(made, engine_id):
    # No registry is there: these would raise Unavailable if they were sent.
    with rankbook.Client("127.0.0.1:1", timeout_s=0.2) as client:
        record = made.record(engine_id, pp_rank=5)
        with pytest.raises(rankbook.BadRecord, match="pp_rank"):
            client.register_workers([record], sequence=1, lease_key="k")
        with pytest.raises(rankbook.BadRequest, match="engine_id"):
            client.get_topology("with space")
        with pytest.raises(rankbook.BadRequest, match="ttl_s"):
            client.renew_leases(["lease"], ttl_s=-1)
        with pytest.raises(rankbook.LimitExceeded, match="payload"):
            client.register_workers(
                [made.record(engine_id, payload=bytes(513 * 1024))], sequence=1, lease_key="k"
            )
        with pytest.raises(rankbook.BadRequest, match="records is empty"):
            client.register_workers([], sequence=1, lease_key="k")
        with pytest.raises(rankbook.BadRequest, match="sequence"):
            client.register_workers([made.record(engine_id)], sequence=0, lease_key="k")
        with pytest.raises(rankbook.BadRequest, match="wait_s"):
            client.get_topology(engine_id, wait_s=301)


def test_many_threads_share_one_client(client, made, engine_id):
    digests = {}

    def sign_in(tp_rank: int) -> None:
        for sequence in (1, 2, 3):
            reply = client.register_workers(
                [made.record(engine_id, 0, tp_rank, tp_size=16, payload=bytes([sequence]))],
                sequence=sequence,
                lease_key=f"{engine_id}-{tp_rank}",
            )
        digests[tp_rank] = reply.record_digests[0]

    threads = [threading.Thread(target=sign_in, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    topology = client.get_topology(engine_id, require=Requirement.COMPLETE)
    assert {
        w.slot.tp_rank: s.record_digest
        for w, s in zip(topology.workers, topology.statuses, strict=True)
    } == digests
    assert all(w.handshake.payload == bytes([3]) for w in topology.workers)


def test_a_long_poll_is_answered_by_the_change_and_holds_up_no_other_call(client, made, engine_id):
    got = []
    poll = threading.Thread(
        target=lambda: got.append(
            client.get_topology(engine_id, require=Requirement.COMPLETE, wait_s=20)
        )
    )
    poll.start()
    assert client.status().version
    client.register_workers([made.record(engine_id)], sequence=1, lease_key=engine_id)
    poll.join(5)
    assert got[0].engine.state is State.COMPLETE


def test_cancelling_one_asyncio_call_leaves_the_others_alone(book, made, engine_id):
    async def run() -> None:
        async with rankbook.AsyncClient(book) as client:
            await client.status()
            poll = asyncio.create_task(client.get_topology(engine_id, wait_s=30))
            other = asyncio.create_task(
                client.get_topology(engine_id, require=Requirement.COMPLETE, wait_s=30)
            )
            await client.status()
            poll.cancel()
            with pytest.raises(asyncio.CancelledError):
                await poll
            await client.register_workers([made.record(engine_id)], sequence=1, lease_key=engine_id)
            assert (await other).engine.state is State.COMPLETE

    asyncio.run(run())


def test_a_client_is_refused_in_a_forked_child_and_by_another_loop(book, program):
    text = (
        "import os, sys, asyncio, rankbook\n"
        "client = rankbook.Client(sys.argv[1])\n"
        "client.status()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        client.status()\n"
        "    except rankbook.BadRequest as error:\n"
        "        print('fork' in error.message, flush=True)\n"
        "    client.close()\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(client.status().sessions > 0, flush=True)\n"
        "other = rankbook.AsyncClient(sys.argv[1])\n"
        "asyncio.run(other.status())\n"
        "try:\n"
        "    asyncio.run(other.status())\n"
        "except rankbook.BadRequest as error:\n"
        "    print('loop' in error.message, flush=True)\n"
    )
    one = program(text, book)
    assert [one.line(), one.line(), one.line()] == ["True", "True", "True"]


def test_a_closed_client_answers_so(book):
    client = rankbook.Client(book)
    client.status()
    client.close()
    client.close()
    with pytest.raises(rankbook.Cancelled):
        client.status()


def test_closing_ends_a_call_that_still_waits(book, engine_id):
    client = rankbook.Client(book)
    client.status()
    ended = []

    def wait() -> None:
        try:
            client.get_topology(engine_id, wait_s=60)
        except rankbook.RankbookError as error:
            ended.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    client.status()
    client.close()
    thread.join(2)
    assert ended == [rankbook.Cancelled]
