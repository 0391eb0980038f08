"""Completeness, order and readiness, as reported of other systems.

The numbers in the docstrings are public reports; README.md lists them all.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import threading

import pytest

import rankbook
from rankbook import Process, Requirement, SealedSlot, Slot, State, v1
from rankbook.convert import to_message


def register(client, *records, sequence=1, ttl_s=60):
    key = f"{records[0].engine_id}-{records[0].process.boot_id}"
    return client.register_workers(records, sequence=sequence, lease_key=key, ttl_s=ttl_s)


@pytest.fixture
def client(shared_rankbookd):
    with rankbook.Client(shared_rankbookd.grpc) as one:
        yield one


@pytest.fixture
def nobody():
    """An address where nothing listens, and nothing will until the test is over."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{probe.getsockname()[1]}"


READS = {
    "topology": lambda client, name: client.get_topology(name, require=Requirement.ANY),
    "ready topology": lambda client, name: client.get_topology(name),
    "group": lambda client, name: client.get_group(name),
    "plan": lambda client, name: client.plan_transfer(
        name, consumer_layout=v1.ConsumerLayout(tp_size=1)
    ),
    "comparison": lambda client, name: client.compare_peers(name, name),
    "drain": lambda client, name: client.drain_engine(name),
    "eviction": lambda client, name: client.evict_engine(name),
}


@pytest.mark.parametrize("read", READS)
def test_asking_before_anybody_has_signed_in_is_a_typed_answer(client, engine_id, read):
    """sgl-project/sglang#19288: a GET before the first PUT was a TypeError and HTTP 500.

    An unknown name, a name without characters, and one that is only reserved
    by a start: NOT_FOUND or a broken rule, never a fault or an empty answer.
    """
    with pytest.raises(rankbook.NotFound) as caught:
        READS[read](client, engine_id)
    assert engine_id in caught.value.message
    with pytest.raises(rankbook.BadRequest):
        READS[read](client, "")
    client.begin_generation(engine_id, "g1")
    with pytest.raises(rankbook.NotFound):
        READS[read](client, engine_id)
    assert client.status().version


def test_one_rank_that_is_sent_four_times_is_one_of_four(client, made, engine_id):
    """SGLang, rank table filled by counting PUTs: a repeated PUT counted as another rank.
    vLLM Mooncake, partial query: one of four ranks was there, so tp_size was cached as 1.

    Repeated as it was, changed, or sent anew: it is one rank of four, the
    other three are named, and the sizes are those that were declared.
    """
    rank = made.record(engine_id, 0, 0, tp_size=4)
    for sequence, payload in ((1, b"agent"), (1, b"agent"), (2, b"agent"), (3, b"changed")):
        one = dataclasses.replace(rank, handshake=rankbook.Handshake("test", 1, payload))
        register(client, one, sequence=sequence)
    engine = client.get_topology(engine_id, require=Requirement.ANY).engine
    assert (engine.state, engine.present, engine.declared) == (State.FORMING, 1, 4)
    assert engine.layout.tp_size == 4
    assert engine.missing == (Slot(0, 0, 1), Slot(0, 0, 2), Slot(0, 0, 3))
    for require in (Requirement.COMPLETE, Requirement.READY):
        with pytest.raises(rankbook.Incomplete) as caught:
            client.get_topology(engine_id, require=require)
        assert caught.value.metadata["present"] == "1"
        assert caught.value.metadata["declared"] == "4"
        assert caught.value.metadata["missing"] == "pp0 tp1, pp0 tp2, pp0 tp3"
    layout = v1.ConsumerLayout(tp_size=4)
    with pytest.raises(rankbook.Incomplete):
        client.plan_transfer(engine_id, consumer_layout=layout)


def command(server: str, *words: str):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RANKBOOK_")}
    return subprocess.run(
        [sys.executable, "-m", "rankbook.cli", "--server", server, *words],
        env=clean,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_an_operator_sees_which_ranks_a_misconfigured_node_owes(
    rankbookd, registration, nobody, made
):
    """sgl-project/sglang#24378: a follower node sent its ranks to a port of its own choice.

    Two nodes of eight ranks each; the second one signs in elsewhere. One look
    names its ranks, the doctor says which host has the others, and the second
    node's own registrations say where they tried.
    """
    server = rankbookd()

    def rank(tp: int, host: str):
        one = made.record("wide", 0, tp, tp_size=16)
        return dataclasses.replace(one, process=Process(f"b{tp}", hostname=host))

    with rankbook.Client(server.grpc) as client:
        for tp in range(8):
            register(client, rank(tp, "node-0"))
    lost = registration([rank(tp, "node-1") for tp in range(8, 16)], endpoints=nobody)
    lost.start()
    shown = command(server.grpc, "topology", "wide")
    assert shown.returncode == 5
    assert "missing 8 of 16: pp0 tp8-15" in shown.stdout
    found = json.loads(command(server.grpc, "doctor", "-o", "json").stdout)["findings"]
    (missing,) = [one for one in found if one["id"] == "MISSING_RANKS"]
    assert "tp8-15" in missing["evidence"]
    assert "node-0 has pp0 tp0-7" in missing["evidence"]
    with pytest.raises(rankbook.Unavailable, match=nobody):
        lost.wait_registered(0.5)


def test_an_engine_is_ready_when_its_core_says_so_and_not_when_its_leader_does(
    client, made, engine_id
):
    """ai-dynamo/dynamo#12555: ranks that were no leader counted as ready too early.
    NVIDIA/TensorRT-LLM#14289: a worker was published before it could take connections.
    sgl-project/sglang#33719: healthy for 264 s before its warm-up was done.

    The leader alone is no engine, and no seal makes it one. All ranks make it
    complete, which nobody gets who did not ask for it. Only the core's word
    about every rank makes it ready.
    """
    leader, follower = made.grid(engine_id, pp_size=1, tp_size=2)
    digest = register(client, leader).record_digests[0]
    core = made.core(f"{engine_id}-core")
    word = [SealedSlot(leader.slot, leader.process.boot_id, digest)]
    with pytest.raises(rankbook.Incomplete):
        client.seal_engine(engine_id, "g1", word, core)
    assert client.get_topology(engine_id, require=Requirement.ANY).engine.state is State.FORMING
    register(client, follower)
    with pytest.raises(rankbook.SealMismatch):
        client.seal_engine(engine_id, "g1", word, core)
    with pytest.raises(rankbook.Incomplete) as caught:
        client.get_topology(engine_id)
    assert caught.value.metadata["state"] == "COMPLETE"
    topology = client.get_topology(engine_id, require=Requirement.COMPLETE)
    client.seal_engine(engine_id, "g1", made.seal_slots(topology), core, sequence=2)
    assert client.get_topology(engine_id).engine.state is State.READY


def test_the_revision_of_ready_is_one_to_gate_on(client, shared_rankbookd, made, engine_id):
    """ai-dynamo/dynamo#13622: a pod was ready before the frontend could route to it.

    Whoever waited for READY has a revision. A view that reached it has the
    engine, and a read that names it is never answered from before.
    """
    register(client, *made.grid(engine_id))
    topology = client.get_topology(engine_id, require=Requirement.COMPLETE)
    core = made.core(f"{engine_id}-core")
    sealed = client.seal_engine(engine_id, "g1", made.seal_slots(topology), core)
    ready = client.get_topology(engine_id, wait_s=5)
    assert ready.book_revision >= sealed.revision
    with rankbook.TopologyView(client) as view:
        made.eventually(lambda: view.revision >= ready.book_revision, 5, "the view is there")
        assert view.get(engine_id).engine.state is State.READY
    with rankbook.Client(shared_rankbookd.grpc) as another:
        listed = another.list_engines(min_revision=ready.book_revision)
        assert listed.book_revision >= ready.book_revision
        with pytest.raises(rankbook.Unavailable) as caught:
            another.list_engines(min_revision=ready.book_revision + 1000, timeout_s=1.5)
        assert caught.value.reason is rankbook.Reason.REVISION_NOT_REACHED


ORDERS = ["-".join(order) for order in itertools.permutations(("registry", "prefill", "decode"))]


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_starting_comes_to_the_same(order, rankbookd, registration, made):
    """kvcache-ai/Mooncake#1198: does it matter in which order things are started?

    It does not: whoever is first waits for the others, and the consumer gets
    the sealed engine.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    ready: queue.Queue = queue.Queue()
    client = rankbook.Client(address)
    view = rankbook.TopologyView(client)
    view.subscribe(
        lambda event: event.topology.engine.state is State.READY and ready.put(event.topology)
    )

    def prefill() -> None:
        core = registration(endpoints=address)

        def seal_when_in(change: rankbook.RegistrationChange) -> None:
            if change.state is rankbook.RegistrationState.REGISTERED:
                slot = SealedSlot(Slot(), "p-0-0", change.registered.record_digests[0])
                core.seal([slot], made.core("core"), engine_id="p", generation="g1")

        core.start()
        registration([made.record("p")], endpoints=address, on_change=seal_when_in).start()

    starts = {
        "registry": lambda: rankbookd(listen=address),
        "prefill": prefill,
        "decode": view.start,
    }
    try:
        for name in order.split("-"):
            starts[name]()
        topology = ready.get(timeout=10)
        assert [w.process.boot_id for w in topology.workers] == ["p-0-0"]
    finally:
        view.close()
        client.close()


def test_a_consumer_gets_all_ranks_or_none_while_they_sign_in(client, made, engine_id):
    """PrimeIntellect-ai/prime-rl#2964: discovery returned the first few workers as the list.
    sgl-project/sglang#14494: two stages disagreed because each saw another moment.

    Ranks sign in one by one. Readers that ask for the whole, by name and by
    group, waiting and not, get a refusal that counts or every rank; two
    readers of one revision get the same.
    """
    records = made.grid(engine_id, pp_size=2, tp_size=4)
    group = f"{engine_id}-group"
    records = [dataclasses.replace(one, group=group) for one in records]
    over = threading.Event()
    seen: queue.Queue = queue.Queue()
    refused: queue.Queue = queue.Queue()

    def ask() -> None:
        with rankbook.Client(client.endpoints) as other:
            while not over.is_set():
                try:
                    seen.put(other.get_topology(engine_id, require=Requirement.COMPLETE))
                    over.set()
                except (rankbook.Incomplete, rankbook.NotFound) as error:
                    refused.put(error)
                try:
                    for one in other.get_group(group, require=Requirement.COMPLETE):
                        seen.put(one)
                except (rankbook.Incomplete, rankbook.NotFound) as error:
                    refused.put(error)

    def wait() -> None:
        seen.put(client.get_topology(engine_id, require=Requirement.COMPLETE, wait_s=20))

    readers = [threading.Thread(target=target) for target in (ask, wait, wait)]
    for reader in readers:
        reader.start()
    for one in records:
        # Somebody asks between any two ranks.
        refused.get(timeout=5)
        register(client, one)
    for reader in readers:
        reader.join(20)
        assert not reader.is_alive()
    over.set()
    answers = [seen.get() for _ in range(seen.qsize())]
    assert len(answers) >= 3
    by_revision: dict[int, set[bytes]] = {}
    for topology in answers:
        assert [w.slot for w in topology.workers] == sorted(one.slot for one in records)
        workers = [to_message(one, v1.WorkerRecord) for one in topology.workers]
        written = b"".join(one.SerializeToString(deterministic=True) for one in workers)
        by_revision.setdefault(topology.engine.revision, set()).add(written)
    assert all(len(kinds) == 1 for kinds in by_revision.values())
