"""Several servers over one shared store: races, refusals, replies that were lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tests.unit.server.shared import Cluster, play, settled, within, worker
from tests.unit.server.turns import Ask

from rankbook import v1
from rankbook.errors import Conflict, Fenced, Reason, Unavailable
from rankbook_server.core.ops import Put, Txn
from rankbook_server.waiters import Waiters


def begin(generation: str, engine_id: str = "e_dp0") -> Ask:
    request = v1.BeginGenerationRequest(engine_id=engine_id, generation=generation)
    return Ask("begin_generation", request)


def evict(engine_id: str = "e_dp0") -> Ask:
    return Ask("evict_engine", v1.EvictEngineRequest(engine_id=engine_id))


def drain(engine_id: str = "e_dp0", *, undo: bool = False) -> Ask:
    return Ask("drain_engine", v1.DrainEngineRequest(engine_id=engine_id, undo=undo))


def all_the_same(cluster: Cluster) -> None:
    kept = [server.kept() for server in cluster.servers]
    assert all(other == kept[0] for other in kept)
    assert len({server.registry.revision for server in cluster.servers}) == 1


# ------------------------------------------------------------------------- races


def test_of_two_that_want_one_slot_at_two_servers_one_has_it_and_the_other_hears_who() -> None:
    async def script(cluster: Cluster) -> None:
        await cluster.servers[0].register(worker(1))
        await cluster.level()
        calls = [
            settled(server.register(worker(0, boot_id=name)))
            for server, name in zip(cluster.servers, ("p", "q", "r"), strict=True)
        ]
        results = await asyncio.gather(*calls)
        (won,) = [n for n, r in zip("pqr", results, strict=True) if not isinstance(r, Conflict)]
        for result in results:
            if isinstance(result, Conflict):
                assert result.reason is Reason.SLOT_HELD
                assert result.metadata["holder"] == won
        await cluster.level()
        all_the_same(cluster)
        for server in cluster.servers:
            (held,) = [v for v in server.book.workers("e_dp0") if v.slot == (0, 0, 0)]
            assert held.record.process.boot_id == won

    play(3, script)


def test_two_generations_that_race_get_two_epochs_and_the_older_is_fenced_everywhere() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        first, second = await asyncio.gather(one.call(begin("g1")), two.call(begin("g2")))
        assert {first.epoch, second.epoch} == {1, 2}
        older, newer = ("g1", "g2") if first.epoch < second.epoch else ("g2", "g1")
        # The newer one signs in at one server, and the older at the other.
        late, _ = await asyncio.gather(
            settled(one.register(worker(0, generation=older))),
            two.register(worker(0, generation=newer)),
        )
        again = await settled(one.register(worker(0, generation=older), sequence=2))
        assert isinstance(again, Fenced)
        assert again.reason is Reason.GENERATION_FENCED
        assert again.metadata["current_generation"] == newer
        if isinstance(late, Fenced):
            assert late.metadata["current_generation"] == newer
        await cluster.level()
        all_the_same(cluster)
        assert {v.record.generation for v in one.book.workers("e_dp0")} == {newer}

    play(2, script)


def test_first_registrations_of_two_tokens_at_two_servers_never_mix() -> None:
    async def script(cluster: Cluster) -> None:
        results = await asyncio.gather(
            *(
                settled(server.register(worker(tp, generation=f"g{n}")))
                for tp in (0, 1)
                for n, server in enumerate(cluster.servers)
            )
        )
        epochs = {r.epoch for r in results if isinstance(r, v1.RegisterWorkersResponse)}
        assert len(epochs) >= 1
        await cluster.level()
        all_the_same(cluster)
        found = cluster.servers[0].book.workers("e_dp0")
        assert len({view.record.generation for view in found}) == 1

    play(3, script)


def test_a_crowd_at_three_servers_is_all_in_every_book_at_the_same_revisions() -> None:
    async def script(cluster: Cluster) -> None:
        calls = [
            server.register(worker(tp, f"e{n}_dp0"))
            for n in range(20)
            for tp, server in enumerate(cluster.servers[:2])
        ]
        replies = await asyncio.gather(*calls)
        await cluster.level()
        all_the_same(cluster)
        assert cluster.servers[2].book.worker_count == 40
        for number, reply in enumerate(replies):
            (view,) = [
                v
                for v in cluster.servers[2].book.workers(f"e{number // 2}_dp0")
                if v.slot == (0, 0, number % 2)
            ]
            assert view.revision == reply.revision

    play(3, script)


def test_every_wave_asks_that_nobody_has_written_since() -> None:
    async def script(cluster: Cluster) -> None:
        (server,) = cluster.servers
        await server.register(worker(0))
        before = server.registry.revision
        await server.register(worker(1))
        assert [txn.base for txns in server.line.commits for txn in txns][-1] == before

    play(1, script)


# ------------------------------------------------------- a copy that is behind


def test_a_refusal_on_a_copy_that_is_behind_is_decided_again() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        two.line.deaf = True
        await one.register(worker(0))
        # Its copy knows no such engine; the store does.
        refused_before = two.call(drain())
        await asyncio.sleep(0.1)
        assert not refused_before.done()
        two.line.heal()
        assert (await refused_before).state == v1.STATE_FORMING
        assert two.book.engines["e_dp0"].head.HasField("drain")

    play(2, script)


def test_what_writes_nothing_is_answered_on_the_newest_book() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        await one.register(worker(0))
        await cluster.level()
        two.line.deaf = True
        await one.call(drain())
        # On its own copy there is nothing to undo.
        undone = two.call(drain(undo=True))
        await asyncio.sleep(0.1)
        assert not undone.done()
        two.line.heal()
        await undone
        await cluster.level()
        assert not one.book.engines["e_dp0"].head.HasField("drain")

    play(2, script)


def test_a_refusal_that_stands_says_so_after_the_store_was_asked() -> None:
    async def script(cluster: Cluster) -> None:
        (server,) = cluster.servers
        error = await settled(server.call(drain("nobody")))
        assert error.reason is Reason.ENGINE_NOT_FOUND
        assert server.line.commits == []
        server.line.down = "unplugged"
        error = await settled(server.call(drain("nobody")))
        assert error.reason is Reason.STORE_UNAVAILABLE

    play(1, script)


def test_a_copy_that_never_catches_up_ends_in_an_error_that_says_so() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        two.line.deaf = True
        await one.register(worker(0))
        error = await settled(two.register(worker(1)))
        assert isinstance(error, Unavailable)
        assert not two.registry.available
        assert "only" in str(await settled(two.register(worker(1))))
        assert two.registry.stale_s > 1.0
        two.line.heal()
        await within(5.0, lambda: two.registry.available)
        assert (await two.register(worker(1))).epoch == 1
        assert two.registry.stale_s == 0.0

    play(2, script)


def test_catching_up_returns_once_everything_that_was_acknowledged_is_here() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        two.line.deaf = True
        reply = await one.register(worker(0))
        catching = asyncio.ensure_future(two.registry.catch_up())
        await asyncio.sleep(0.1)
        assert not catching.done()
        two.line.heal()
        await catching
        assert two.registry.revision >= reply.revision
        two.line.deaf = True
        await one.register(worker(1))
        with pytest.raises(Unavailable, match="it does not get what other servers wrote"):
            await two.registry.catch_up()

    play(2, script)


# -------------------------------------------------------- replies that are lost


def test_a_write_whose_outcome_is_unknown_is_answered_as_the_first_time() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        one.line.lose_replies = 1
        reply = await one.register(worker(0))
        await cluster.level()
        all_the_same(cluster)
        assert one.registry.available
        (view,) = two.book.workers("e_dp0")
        assert reply.revision == view.revision == cluster.store.revision
        assert reply.lease.lease_id == view.status.lease_id
        assert len(two.book.leases) == 1

    play(2, script)


def test_a_wave_whose_outcome_is_unknown_is_decided_again_whole() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        await one.register(worker(0, "f_dp0"))
        one.line.lose_replies = 1
        results = await asyncio.gather(
            one.register(worker(0)),
            one.call(begin("g7", "g_dp0")),
            one.call(evict("f_dp0")),
            settled(one.call(drain("nobody"))),
        )
        assert results[1].epoch == 1
        assert results[3].reason is Reason.ENGINE_NOT_FOUND
        await cluster.level()
        all_the_same(cluster)
        assert set(two.book.engines) == {"e_dp0", "f_dp0", "g_dp0"}
        assert two.book.state("f_dp0") == v1.STATE_GONE

    play(2, script)


def test_a_write_that_was_not_kept_after_all_is_made_again() -> None:
    async def script(cluster: Cluster) -> None:
        (server,) = cluster.servers

        async def fail() -> None:
            server.line.full = "no space"
            asyncio.get_running_loop().call_later(0.005, server.line.heal)

        server.line.before_commit = fail
        writing = server.register(worker(0))
        await asyncio.sleep(0)
        server.line.full = ""
        assert (await settled(writing)) is not None

    play(1, script)


def test_a_store_that_takes_no_writes_makes_the_server_refuse_until_it_does() -> None:
    async def script(cluster: Cluster) -> None:
        (server,) = cluster.servers
        await server.register(worker(0))
        server.line.full = "no space left"
        error = await settled(server.register(worker(1)))
        assert isinstance(error, Unavailable)
        assert not server.registry.available
        assert "no space left" in str(await settled(server.register(worker(1))))
        # A store that is full answers reads; that alone does not make it whole.
        await asyncio.sleep(5.0)
        assert not server.registry.available
        server.line.heal()
        await within(5.0, lambda: server.registry.available)
        assert (await server.register(worker(1))).epoch == 1

    play(1, script)


# ---------------------------------------------------------------------- renewals


def test_a_renewal_at_a_server_that_has_not_seen_the_lease_yet_is_taken() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        two.line.deaf = True
        lease_id = (await one.register(worker(0))).lease.lease_id
        renewing = asyncio.ensure_future(two.renew(lease_id))
        await asyncio.sleep(0.1)
        assert not renewing.done()
        two.line.heal()
        assert (await renewing).state == v1.LEASE_STATE_ALIVE
        never = await two.renew("never")
        assert never.state == v1.LEASE_STATE_UNKNOWN

    play(2, script)


def test_a_lease_lives_as_long_as_any_server_hears_of_it() -> None:
    async def script(cluster: Cluster) -> None:
        one, two, three = cluster.servers
        lease_id = (await one.register(worker(0))).lease.lease_id
        for number in range(12):
            await asyncio.sleep(3.0)
            status = await (two, three)[number % 2].renew(lease_id)
            assert status.state == v1.LEASE_STATE_ALIVE
        await cluster.level()
        assert all(server.book.state("e_dp0") == v1.STATE_FORMING for server in cluster.servers)
        await asyncio.sleep(11.5)
        await cluster.level()
        assert all(server.book.state("e_dp0") == v1.STATE_GONE for server in cluster.servers)
        all_the_same(cluster)

    play(3, script)


def test_a_server_that_the_store_takes_no_news_from_refuses_renewals_and_others_take_them() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        lease_id = (await one.register(worker(0))).lease.lease_id
        await asyncio.sleep(1.0)
        one.line.mute = "too slow"
        with pytest.raises(Unavailable, match="too slow"):
            await one.renew(lease_id)
        assert (await two.renew(lease_id)).state == v1.LEASE_STATE_ALIVE
        one.line.heal()
        await asyncio.sleep(0.3)
        assert (await one.renew(lease_id)).state == v1.LEASE_STATE_ALIVE

    play(2, script)


def test_alive_is_said_once_the_store_has_it() -> None:
    """This server may be cut off in the next moment, and the others know nothing."""

    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        lease_id = (await one.register(worker(0))).lease.lease_id
        await asyncio.sleep(8.0)
        two.line.delay_s = 0.5
        renewing = asyncio.ensure_future(two.renew(lease_id))
        await asyncio.sleep(0.4)
        assert not renewing.done()
        assert (await renewing).state == v1.LEASE_STATE_ALIVE
        two.line.down = "cut"
        cluster.store.stir()
        await asyncio.sleep(9.0)
        assert one.book.state("e_dp0") == v1.STATE_FORMING

    play(2, script)


def test_a_lease_that_ended_is_taken_out_by_one_of_them_and_once() -> None:
    async def script(cluster: Cluster) -> None:
        await cluster.servers[0].register(worker(0))
        await cluster.servers[1].register(worker(1))
        await asyncio.sleep(12.0)
        await cluster.level()
        all_the_same(cluster)
        for server in cluster.servers:
            assert server.book.state("e_dp0") == v1.STATE_GONE
            assert not server.book.leases

    play(3, script)


# ------------------------------------------------ leases that are only thought dead


def test_nothing_expires_while_its_key_is_in_the_store() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        two.line.blind = True
        lease_id = (await one.register(worker(0))).lease.lease_id
        for _ in range(10):
            await asyncio.sleep(3.0)
            assert (await one.renew(lease_id)).state == v1.LEASE_STATE_ALIVE
        # The second took it for dead more than once, and the store knew better.
        assert any(txn.away for txns in two.line.commits for txn in txns)
        await cluster.level()
        assert one.book.state("e_dp0") == two.book.state("e_dp0") == v1.STATE_FORMING

    play(2, script)


def test_an_expiry_that_the_store_refuses_holds_no_write_up() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        two.line.blind = True
        lease_id = (await one.register(worker(0))).lease.lease_id
        for number in range(10):
            await asyncio.sleep(3.0)
            await one.renew(lease_id)
            loop = asyncio.get_running_loop()
            before = loop.time()
            await two.register(worker(0, f"f{number}_dp0"))
            assert loop.time() - before < 0.1

    play(2, script)


def test_a_lease_that_has_ended_and_still_has_its_key_holds_no_write_up() -> None:
    """Whoever ended it died before it took the key away, or somebody renewed it late."""

    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        reply = await one.register(worker(0))
        await cluster.level()
        one.line.mute = two.line.mute = "no news is taken"
        lease_id = reply.lease.lease_id
        ended = v1.StoredLease.FromString(one.book.leases[lease_id].stored.SerializeToString())
        ended.ended = True
        put = Put(f"default/l/{lease_id}", ended.SerializeToString())
        await cluster.store.commit([Txn((put,))])
        await cluster.store.touch({lease_id: 300.0})
        await asyncio.sleep(0.5)
        loop = asyncio.get_running_loop()
        before, commits = loop.time(), len(two.line.commits)
        await two.register(worker(0, "f_dp0"))
        assert loop.time() - before < 0.1
        assert len(two.line.commits) - commits < 5
        await within(1.0, lambda: two.book.state("e_dp0") == v1.STATE_GONE)

    play(2, script)


def test_nobody_takes_the_slot_of_a_holder_whose_key_is_in_the_store() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        two.line.blind = True
        lease_id = (await one.register(worker(0))).lease.lease_id
        for _ in range(3):
            await asyncio.sleep(3.0)
            await one.renew(lease_id)
        # By its own clock the second server takes the holder for dead just now.
        two.book.leases[lease_id].deadline = two.clock.mono()
        claim = await settled(two.register(worker(0, boot_id="thief")))
        assert isinstance(claim, Conflict)
        assert claim.reason is Reason.SLOT_HELD
        # Nor is a second lease made under its key.
        two.book.leases[lease_id].deadline = two.clock.mono()
        again = await two.register(worker(0), sequence=2)
        assert again.lease.lease_id == lease_id

    play(2, script)


# -------------------------------------------------------------- a book read anew


def test_a_book_that_is_read_anew_keeps_the_leases_whose_keys_are_there() -> None:
    async def script(cluster: Cluster) -> None:
        one, two = cluster.servers
        lease_id = (await one.register(worker(0))).lease.lease_id
        await asyncio.sleep(1.0)
        snapshots = two.line.snapshots
        two.line.deaf = True
        await one.register(worker(1))
        cluster.store.forget()
        two.line.heal()
        await cluster.level()
        assert two.line.snapshots == snapshots + 1
        all_the_same(cluster)
        for _ in range(4):
            await asyncio.sleep(3.0)
            await one.renew(lease_id)
        # Only the first server has heard of it since.
        assert not any(lease_id in txn.away for txns in two.line.commits for txn in txns)
        claim = await settled(two.register(worker(0, boot_id="thief")))
        assert isinstance(claim, Conflict)
        assert (await two.renew(lease_id)).state == v1.LEASE_STATE_ALIVE

    play(2, script)


@pytest.mark.parametrize("hold_up", [False, True])
def test_a_commit_that_did_not_ask_for_the_last_revision_has_the_book_read_anew(
    hold_up: bool,
) -> None:
    """It comes after this server's own, newer one: it cannot be folded in its place."""

    async def script(cluster: Cluster) -> None:
        one = cluster.servers[0]
        await one.register(worker(0))
        await cluster.level()
        one.line.deaf = True
        head = Put(
            "default/e/by-hand", v1.StoredEngine(version=1, last_epoch=3).SerializeToString()
        )
        real = cluster.store.commit
        late: list[Txn] = []

        async def somebody_was_faster() -> None:
            # As a store would that lets such a write by without moving its last revision.
            await cluster.store.commit([Txn((head,))])
            late.append(Txn((head,)))
            cluster.store.commit = without_base  # type: ignore[method-assign]

        async def without_base(txns: Sequence[Txn]) -> list[int | None]:
            cluster.store.commit = real  # type: ignore[method-assign]
            return await real([Txn(txn.ops, txn.compares, txn.away) for txn in txns])

        one.line.before_commit = somebody_was_faster
        await one.register(worker(1))
        assert late
        assert "by-hand" not in one.book.engines
        snapshots = one.line.snapshots
        if hold_up:
            one.line.deaf = False
            one.line.snapshot_delay_s = 0.5
            cluster.store.stir()
            for number in range(10):
                await asyncio.sleep(0.1)
                await one.register(worker(0, f"f{number}_dp0"))
        one.line.heal()
        await within(5.0, lambda: "by-hand" in one.book.engines)
        assert one.line.snapshots > snapshots
        await cluster.level()
        all_the_same(cluster)

    play(2, script)


def test_a_read_that_waits_for_a_revision_is_woken_by_a_commit_of_nothing() -> None:
    async def script(cluster: Cluster) -> None:
        (server,) = cluster.servers
        await server.register(worker(0))
        waiters = Waiters(server.registry, 10)
        server.registry.subscribe(waiters)
        (revision,) = await cluster.store.commit([Txn(())])
        assert revision is not None
        await waiters.revision(revision, 2.0)
        assert server.registry.revision == revision

    play(1, script)
