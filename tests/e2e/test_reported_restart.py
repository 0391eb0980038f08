"""Restarts, stale entries and incarnations, as reported of other systems.

The numbers in the docstrings are public reports; README.md lists them all.
"""

from __future__ import annotations

import dataclasses
import queue
import threading

import pytest

import rankbook
from rankbook import Address, EventType, LeaseState, Requirement, State


def register(client, *records, sequence=1, ttl_s=60, lease_key=None):
    key = f"{records[0].engine_id}-{lease_key or records[0].process.boot_id}"
    return client.register_workers(records, sequence=sequence, lease_key=key, ttl_s=ttl_s)


def seal(client, made, engine_id, sequence=1):
    topology = client.get_topology(engine_id, require=Requirement.COMPLETE)
    return client.seal_engine(
        engine_id,
        topology.engine.generation,
        made.seal_slots(topology),
        made.core(f"core-{topology.engine.generation}"),
        sequence=sequence,
    )


@pytest.fixture
def client(either_rankbookd):
    with rankbook.Client(either_rankbookd.grpc) as one:
        yield one


@pytest.fixture
def watched(client, engine_id):
    """A view of everything, and the events of the test's engine."""
    events: queue.Queue = queue.Queue()
    with rankbook.TopologyView(client) as view:
        view.wait_synced(10)
        view.subscribe(
            lambda event: (
                event.topology.engine.engine_id.startswith(engine_id) and events.put(event)
            )
        )
        yield view, events


def test_replaced_workers_are_one_change_and_no_answer_mixes_two_starts(
    either_rankbookd, client, watched, worker, made, engine_id
):
    """sgl-project/sglang#33789: a replaced prefill left a pair that looked ready and did not serve.

    Both ranks die and come back at the same host and port. Whoever asks
    meanwhile, and however often, gets ranks of one start only.
    """
    view, events = watched

    def rank(tp: int, generation: str):
        one = made.record(
            engine_id,
            0,
            tp,
            tp_size=2,
            generation=generation,
            boot_id="",
            payload=f"{generation}/{tp}".encode(),
        )
        return dataclasses.replace(one, addresses=(Address("zmq", "10.0.0.5", 5600 + tp),))

    old = [worker(either_rankbookd.grpc, rank(tp, "g1")) for tp in range(2)]
    over = threading.Event()
    answers: queue.Queue = queue.Queue()

    def ask() -> None:
        with rankbook.Client(either_rankbookd.grpc) as other:
            while not over.is_set():
                answers.put(other.get_topology(engine_id, require=Requirement.ANY))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for one in old:
            one.kill()
        for tp in range(2):
            worker(either_rankbookd.grpc, rank(tp, "g2"))
        made.eventually(
            lambda: (
                (t := view.get(engine_id)) is not None
                and t.engine.generation == "g2"
                and len(t.workers) == 2
            ),
            5,
            "the new start is whole",
        )
    finally:
        over.set()
        asking.join(10)
    told = [events.get() for _ in range(events.qsize())]
    topologies = [event.topology for event in told]
    topologies += [answers.get() for _ in range(answers.qsize())]
    assert {t.engine.generation for t in topologies} == {"g1", "g2"}
    for topology in topologies:
        for one in topology.workers:
            assert one.generation == topology.engine.generation
            assert one.handshake.payload.startswith(topology.engine.generation.encode())
    epochs = [event.topology.engine.epoch for event in told]
    assert epochs == sorted(epochs)


def test_a_draining_old_start_is_fenced_and_the_new_one_is_seen_undrained(client, made, engine_id):
    """sgl-project/sglang#34289: health checks went to the old process that was still draining.

    Old and new both renew. Every renewal of the old one is answered FENCED
    with the name of what took over, and its drain flag is not inherited.
    """
    old = register(client, made.record(engine_id, boot_id="b1"))
    seal(client, made, engine_id)
    client.drain_engine(engine_id)
    new = register(client, made.record(engine_id, boot_id="b2", generation="g2"))
    for _ in range(3):
        leases = (old.lease.lease_id, new.lease.lease_id)
        ended, alive = client.renew_leases(leases).statuses
        assert (ended.state, alive.state) == (LeaseState.FENCED, LeaseState.ALIVE)
        assert (ended.replaced_by.generation, ended.replaced_by.epoch) == ("g2", new.epoch)
    topology = client.get_topology(engine_id, require=Requirement.COMPLETE)
    assert [w.process.boot_id for w in topology.workers] == ["b2"]
    assert topology.engine.state is State.COMPLETE
    with pytest.raises(rankbook.Fenced):
        register(client, made.record(engine_id, boot_id="b1"), sequence=2, lease_key="again")


def test_an_engine_that_expires_and_returns_is_seen_by_the_same_consumer(
    client, watched, made, engine_id
):
    """ai-dynamo/nixl#795: without a heartbeat every decode had to restart after a prefill did.

    A node that is lost is REMOVED when its lease runs out, its return is
    ADDED, and the consumer that watched is never restarted.
    """
    view, events = watched
    register(client, made.record(engine_id, payload=b"first"), ttl_s=2)
    assert events.get(timeout=5).type is EventType.ADDED
    gone = events.get(timeout=6)
    assert gone.type is EventType.REMOVED
    assert gone.topology.engine.state is State.GONE
    made.eventually(lambda: view.get(engine_id) is None, 2, "it is out")
    register(client, made.record(engine_id, payload=b"second"), sequence=2, lease_key="returned")
    assert events.get(timeout=5).type is EventType.ADDED
    made.eventually(lambda: view.get(engine_id) is not None, 2, "it is back")
    assert view.get(engine_id).workers[0].handshake.payload == b"second"
    assert view.get(engine_id).engine.epoch == 1


@pytest.mark.parametrize("same_bytes", [False, True], ids=["new bytes", "equal bytes"])
def test_what_a_consumer_remembers_is_never_confirmed_after_a_restart(
    client, watched, made, engine_id, same_bytes
):
    """vllm-project/vllm#49238, llm-d#2187: old agent bytes were loaded after a restart.
    kvcache-ai/Mooncake#2762: after a restart even the metadata may be equal byte by byte.

    "Not modified" is no answer for another start, equal bytes are still
    another start, and who asks for the old start hears that it is gone.
    """
    view, events = watched
    kind = {"payload": b"agent", "boot_id": "b"}
    register(client, made.record(engine_id, **kind), lease_key="one")
    seal(client, made, engine_id)
    old = client.get_topology(engine_id)
    known = {"known_revision": old.engine.revision, "known_book_id": old.book_id}
    assert client.get_topology(engine_id, **known) is None

    kind["payload"] = b"agent" if same_bytes else b"another"
    register(client, made.record(engine_id, generation="g2", **kind), lease_key="two")
    with pytest.raises(rankbook.Incomplete):
        client.get_topology(engine_id, **known)
    seal(client, made, engine_id)
    new = client.get_topology(engine_id, **known)
    assert (new.engine.generation, new.engine.epoch) == ("g2", old.engine.epoch + 1)
    assert new.workers[0].handshake.payload == kind["payload"]
    with pytest.raises(rankbook.Gone) as caught:
        client.get_topology(engine_id, generation="g1", require=Requirement.ANY)
    assert caught.value.metadata["successor_generation"] == "g2"
    made.eventually(lambda: view.get(engine_id).engine.seal is not None, 2, "the seal is seen")
    made.eventually(lambda: view.get(engine_id).engine.generation == "g2", 2, "it is seen")
    told = [events.get() for _ in range(events.qsize())]
    assert EventType.REMOVED not in [event.type for event in told]
    assert {event.topology.engine.generation for event in told} == {"g1", "g2"}


def test_a_groups_name_leads_to_the_new_engine_and_the_dead_id_to_its_successor(
    either_rankbookd, client, watched, worker, made, engine_id
):
    """vllm-project/vllm#37745: a proxy kept the engine_id it read at its start.
    smg#2491: a gateway went on with the old id and hung for 480 s.

    One event resolves the deployment's name to the new engine. The dead id
    is answered at once, whatever wait was asked for, and names the new one.
    """
    _, events = watched
    group = f"{engine_id}-group"

    def start(suffix: str):
        one = made.record(f"{engine_id}-{suffix}", boot_id="")
        return dataclasses.replace(one, group=group, replica="r0")

    first = worker(either_rankbookd.grpc, start("old"))
    assert events.get(timeout=5).type is EventType.ADDED
    first.kill()
    assert events.get(timeout=3).type is EventType.REMOVED
    worker(either_rankbookd.grpc, start("new"))
    event = events.get(timeout=5)
    assert event.type is EventType.ADDED
    engine = event.topology.engine
    assert (engine.group, engine.replica) == (group, "r0")
    assert engine.engine_id == f"{engine_id}-new"
    found = client.get_group(group, require=Requirement.COMPLETE)
    assert [t.engine.engine_id for t in found] == [f"{engine_id}-new"]
    # A call that waited would end with its own deadline, and not with this.
    with pytest.raises(rankbook.Gone) as caught:
        client.get_topology(f"{engine_id}-old", wait_s=60, timeout_s=5)
    assert caught.value.metadata["successor_engine_id"] == f"{engine_id}-new"


def test_a_ranks_next_process_gets_its_slot_when_the_lost_ones_lease_is_over(
    either_rankbookd, client, registration, made, engine_id
):
    """vLLM 0.32, Mooncake bootstrap: a restarted rank was answered 400 for ever.

    While the lost process's lease lives, its slot is refused with the holder
    and the time that is left; then it is taken, by itself, at the new address.
    """

    def at(host: str, boot_id: str):
        one = made.record(engine_id, boot_id=boot_id)
        return dataclasses.replace(one, addresses=(Address("zmq", host, 5600),))

    changes: queue.Queue = queue.Queue()
    register(client, at("10.0.0.1", "b1"), ttl_s=2)
    one = registration(
        [at("10.0.0.2", "b2")], endpoints=either_rankbookd.grpc, on_change=changes.put
    )
    one.start()
    while (refused := changes.get(timeout=5)).error is None:
        assert refused.state is rankbook.RegistrationState.PENDING
    assert isinstance(refused.error, rankbook.Conflict)
    assert refused.error.metadata["holder"] == "b1"
    assert 0 < float(refused.error.metadata["remaining_s"]) <= 2
    one.wait_registered(5)
    (record,) = client.get_topology(engine_id, require=Requirement.COMPLETE).workers
    assert (record.process.boot_id, record.addresses[0].host) == ("b2", "10.0.0.2")


def test_a_killed_registry_comes_back_with_every_lease_entry_and_its_order(
    rankbookd, registration, made, any_store
):
    """kvcache-ai/Mooncake#2246, LMCache/LMCache#2167: a restart of the metadata server lost all.

    After kill -9 and a start on the same file every record, seal, lease and
    epoch is there, revisions go on upwards, and who watched sees no change.
    """
    server = rankbookd(store=any_store)
    with rankbook.Client(server.grpc) as client, rankbook.TopologyView(client) as view:
        kept = registration([made.record("kept")], endpoints=server.grpc)
        kept.start()
        lease = kept.wait_registered(10).lease
        for name in ("a", "b"):
            register(client, *made.grid(name), ttl_s=300)
        seal(client, made, "a")
        view.wait_synced(10)
        made.eventually(lambda: view.revision >= client.status().book_revision, 5, "all is seen")
        before = {t.engine.engine_id: t for t in view.engines()}
        assert sorted(before) == ["a", "b", "kept"]
        revision = client.status().book_revision
        events: queue.Queue = queue.Queue()
        end = view.subscribe(events.put)
        for _ in before:
            events.get(timeout=1)

        server.kill()
        server.start_again(same_port=True)
        made.eventually(lambda: view.connected, 5, "it follows again")
        for name, topology in before.items():
            found = client.get_topology(name, require=Requirement.ANY)
            assert found.engine == topology.engine
            assert (found.workers, found.statuses) == (topology.workers, topology.statuses)
        made.eventually(
            lambda: kept.current.boot_id == client.status().boot_id, 3, "the restart is noticed"
        )
        assert kept.current.registered.lease.lease_id == lease.lease_id
        assert events.empty()
        end()
        assert register(client, made.record("c")).revision > revision
        assert register(client, made.record("a", generation="g2")).epoch == 2


def test_a_thousand_crashes_leave_an_empty_book_of_bounded_size(rankbookd, made, tmp_path):
    """kvcache-ai/Mooncake#1078: entries of crashed processes piled up without end.
    ai-dynamo/nixl#1010: a killed agent's keys stayed for ever.

    A thousand starts whose processes vanish: nothing of them is left after
    their TTL and their tombstones' time, and the file takes no more for the
    second half than it took for the first.
    """
    path = tmp_path / "book.db"
    server = rankbookd("--tombstone-ttl", "0.2", store=f"sqlite:{path}")

    def size() -> int:
        return sum(one.stat().st_size for one in tmp_path.glob("book.db*") if one.is_file())

    sizes = []
    with rankbook.Client(server.grpc) as client:
        for wave in range(2):
            for number in range(500):
                # Half of them are restarts of few engines, half are engines never seen again.
                name = f"e{number % 10}" if number % 2 else f"e{wave}-{number}"
                one = made.record(name, generation=f"g{wave}-{number}", boot_id=f"b{wave}-{number}")
                register(client, one, ttl_s=2)
            assert client.status().engines

            def empty() -> bool:
                status = client.status()
                return not (status.workers or status.leases or any(status.engines.values()))

            # Two seconds to live, and at most ten until the next sweep.
            made.eventually(empty, 16, "nothing is left")
            assert client.list_engines().engines == ()
            # A clean stop copies the log, which has a bound of its own, into the file.
            server.stop()
            sizes.append(size())
            server.start_again(same_port=True)
    assert sizes[1] < sizes[0] * 1.25 + 65_536
