"""Any server will do: one book, the same revisions and answers everywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tests.rpc.support import Failure, Raw, grid, record, seal_request

from rankbook import v1

ANY = v1.REQUIREMENT_ANY


def topology_at(raw: Raw, revision: int, engine_id: str = "prefill-a-0") -> v1.Topology:
    """The engine, at a revision or later."""
    return raw.topology(engine_id, min_revision=revision)


def test_register_at_one_renew_at_another_watch_at_a_third_and_query_at_any(
    servers: Callable[..., Sequence[Any]],
) -> None:
    first, second, third = (Raw(server.grpc) for server in servers(3))
    with first, second, third:
        watch = third.stream("Watch", v1.WatchRequest())
        assert next(watch).reset
        signed = first.register(grid())
        leases = v1.RenewLeasesRequest(leases=[v1.LeaseRenewal(lease_id=signed.lease.lease_id)])
        renewed = second.call("RenewLeases", leases)
        assert [status.state for status in renewed.leases] == [v1.LEASE_STATE_ALIVE]
        assert renewed.book_id == signed.book_id
        seen = next(message for message in watch if message.events)
        assert seen.book_id == signed.book_id
        assert seen.events[0].type == v1.EVENT_TYPE_ADDED
        assert seen.events[0].engine.revision == signed.revision
        sealed = third.call("SealEngine", seal_request(grid(), signed.record_digests))
        answers = [topology_at(raw, sealed.revision) for raw in (first, second, third)]
        assert answers[0].engine.state == v1.STATE_READY
        assert answers[0].engine.revision == sealed.revision
        assert answers[0] == answers[1] == answers[2]
        watch.cancel()


def test_a_renewal_finds_a_lease_that_another_server_granted_a_moment_ago(
    servers: Callable[..., Sequence[Any]],
) -> None:
    first, second = (Raw(server.grpc) for server in servers(2))
    with first, second:
        for number in range(30):
            signed = first.register([record(f"e{number}", tp_size=1)])
            request = v1.RenewLeasesRequest(
                leases=[v1.LeaseRenewal(lease_id=signed.lease.lease_id)]
            )
            (status,) = second.call("RenewLeases", request).leases
            assert status.state == v1.LEASE_STATE_ALIVE, number


def test_a_write_is_decided_on_what_any_server_has_acknowledged(
    servers: Callable[..., Sequence[Any]],
) -> None:
    raws = [Raw(server.grpc) for server in servers(3)]
    for number in range(10):
        name = f"e{number}"
        records = [record(name, tp=tp, tp_size=3) for tp in range(3)]
        digests = [
            raw.register([one]).record_digests[0] for raw, one in zip(raws, records, strict=True)
        ]
        sealed = raws[number % 3].call("SealEngine", seal_request(records, digests))
        assert sealed.seal.number == 1
        again = record(name, tp=1, tp_size=3, boot_id="another")
        with pytest.raises(Failure) as refused:
            raws[(number + 1) % 3].register([again], epoch=sealed.epoch)
        assert refused.value.reason == "SLOT_HELD"
    for raw in raws:
        raw.channel.close()


def test_a_watch_resumed_at_another_server_misses_nothing_and_repeats_nothing(
    servers: Callable[..., Sequence[Any]],
) -> None:
    raws = [Raw(server.grpc) for server in servers(3)]
    held: dict[str, int] = {}
    told: list[tuple[str, int]] = []
    resume, book_id = 0, ""
    for turn in range(9):
        # Changes come in between two watches and while one runs.
        wanted = {}
        for engine in range(3):
            writer = raws[(turn + engine) % 3]
            name = f"e{engine}"
            one = record(name, tp_size=1, payload=b"%d" % turn)
            reply = writer.register([one], sequence=turn + 1)
            wanted[name] = reply.revision
        request = v1.WatchRequest(from_revision=resume, book_id=book_id)
        watch = raws[turn % 3].stream("Watch", request)
        for message in watch:
            assert message.reset == (turn == 0), turn
            for event in message.events:
                name, revision = event.engine.engine_id, event.engine.revision
                assert revision > held.get(name, 0), (turn, name)
                held[name] = revision
                told.append((name, revision))
            if message.synced:
                resume, book_id = message.book_revision, message.book_id
            if held == wanted:
                break
        watch.cancel()
    assert len(told) == len(set(told)) == 27
    for raw in raws:
        raw.channel.close()


def test_two_workers_race_for_a_slot_and_the_loser_is_told_by_whom(
    servers: Callable[..., Sequence[Any]],
) -> None:
    raws = [Raw(server.grpc) for server in servers(3)]
    with ThreadPoolExecutor(3) as pool:
        for number in range(20):
            start = threading.Barrier(3)

            def claim(index: int, number: int = number, start: Any = start) -> str:
                boot_id = f"worker-{index}"
                one = record(f"e{number}", tp_size=1, boot_id=boot_id)
                start.wait()
                try:
                    raws[index].register([one], lease_key=boot_id)
                except Failure as failure:
                    about = failure.metadata["claimant"] == boot_id
                    return f"{failure.reason} {about} {failure.metadata['holder']}"
                return boot_id

            outcomes = list(pool.map(claim, range(3)))
            (winner,) = [text for text in outcomes if text.startswith("worker")]
            assert outcomes.count(f"SLOT_HELD True {winner}") == 2
            for raw in raws:
                (worker,) = raw.topology(f"e{number}").workers
                assert worker.process.boot_id == winner
    for raw in raws:
        raw.channel.close()


def test_two_generations_race_and_one_epoch_is_the_end_everywhere(
    servers: Callable[..., Sequence[Any]],
) -> None:
    raws = [Raw(server.grpc) for server in servers(3)]
    with ThreadPoolExecutor(3) as pool:
        for number in range(15):
            name, start = f"e{number}", threading.Barrier(3)

            def begin(index: int, name: str = name, start: Any = start) -> tuple[int, int]:
                records = grid(name, generation=f"g{index}")
                start.wait()
                try:
                    reply = raws[index].register(records)
                except Failure as failure:
                    return 0 if failure.reason == "GENERATION_FENCED" else -1, 0
                return reply.epoch, reply.revision

            outcomes = list(pool.map(begin, range(3)))
            epochs = [epoch for epoch, _ in outcomes]
            assert min(epochs) >= 0
            assert len(set(epochs) - {0}) == len([epoch for epoch in epochs if epoch])
            last = max(range(3), key=epochs.__getitem__)
            answers = [topology_at(raw, outcomes[last][1], name) for raw in raws]
            assert answers[0] == answers[1] == answers[2]
            assert answers[0].engine.epoch == epochs[last]
            assert {worker.generation for worker in answers[0].workers} == {f"g{last}"}
    for raw in raws:
        raw.channel.close()


def test_namespaces_engines_and_prefixes_are_whole_words(
    rankbookd: Any, etcd_node: Any, prefix: str
) -> None:
    stores = [etcd_node.url(f"{prefix}/{name}") for name in ("prod", "prod-eu", "prod/eu")]
    servers = [rankbookd(store=store) for store in stores]
    raws = [Raw(server.grpc) for server in servers]
    for namespace in ("prod", "prod-eu", "prod.eu"):
        for name in ("e1", "e10", "e1-0", "e1.0"):
            one = [record(name, tp_size=1, boot_id=f"{namespace}.{name}")]
            raws[0].register(one, namespace=namespace)
    raws[1].register([record("e1", tp_size=1, boot_id="other")], namespace="prod")
    listed = v1.ListEnginesRequest(namespace="prod")
    names = [engine.engine_id for engine in raws[0].call("ListEngines", listed).engines]
    assert names == ["e1", "e1-0", "e1.0", "e10"]
    assert len(raws[1].call("ListEngines", listed).engines) == 1
    assert not raws[2].call("ListEngines", listed).engines
    evict = v1.EvictEngineRequest(namespace="prod", engine_id="e1", reason="t", requested_by="t")
    assert raws[0].call("EvictEngine", evict).removed == 1
    for namespace, name, present in (
        ("prod", "e1", 0),
        ("prod", "e10", 1),
        ("prod", "e1-0", 1),
        ("prod-eu", "e1", 1),
        ("prod.eu", "e1", 1),
    ):
        found = raws[0].topology(name, namespace=namespace)
        assert (namespace, name, found.engine.present) == (namespace, name, present)
    (worker,) = raws[1].topology("e1", namespace="prod").workers
    assert worker.process.boot_id == "other"
    for raw in raws:
        raw.channel.close()


def test_a_client_goes_on_at_the_next_server_when_its_own_dies(
    servers: Callable[..., Sequence[Any]], worker: Any, made: Any, engine_id: str
) -> None:
    first, second = servers(2)
    worker(f"{first.grpc},{second.grpc}", made.record(engine_id))
    with Raw(second.grpc) as raw:
        watch = raw.stream("Watch", v1.WatchRequest(), timeout_s=60)
        assert next(m for m in watch if m.events).events[0].engine.present == 1
        first.kill()
        # Three times to live later it has renewed at the other one all along.
        waited = threading.Event()
        waited.wait(6.5)
        found = raw.topology(engine_id)
        assert (found.engine.present, found.engine.epoch) == (1, 1)
        told = []

        def drain() -> None:
            told.extend(m for m in watch if m.events)

        watch.cancel()
        with pytest.raises(grpc.RpcError):
            drain()
        assert told == []
