"""Mooncake's consumer with the book in place of the bootstrap server; no engine moves bytes.

The worker is vLLM's own class without its transfer engine, and it asks real
sockets. The book is the tests' own, so that each change comes when it should.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import queue
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
from tests.unit.vllm_integration.facts import LAYOUT, facts

from rankbook.model import Compat, Engine, Handshake, Layout, Role, State, Topology
from rankbook_vllm.config import Settings
from rankbook_vllm.lookup import Refuse, Use, judge
from rankbook_vllm.mooncake import Listener
from rankbook_vllm.record import NO_METADATA, Start, worker_record

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    import msgspec
    import zmq
    import zmq.asyncio
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as vllms
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import (
        MooncakeKVConnectorStats,
    )

    from rankbook_vllm._vllm import mooncake

PEER, OWN = "prefill-a-0", "decode-a-0"
MOONCAKE = Compat("", {"connector": "MooncakeConnector"})
SOON_S = 5.0
"""Long enough for anything that happens at once; vLLM's own deadline is minutes."""


ALONE = Layout(pp_size=1, tp_size=1, num_layers=4)


def topology(addresses=(), *, state=State.READY, generation="g1", lapsed=False):
    """A producer of two stages that listen there; without addresses, one of no workers."""
    records = tuple(
        record(facts(stage, compat=MOONCAKE, handshake=Listener(where, "tcp").encode()), generation)
        for stage, where in enumerate(addresses)
    )
    return Topology(engine(PEER, Role.PRODUCER, LAYOUT, state, generation, lapsed), records, ())


def own_topology():
    """The consumer itself."""
    told = facts(
        layout=ALONE,
        stage=(0, 4),
        engine_id=OWN,
        kv_role="kv_consumer",
        compat=MOONCAKE,
        handshake=Handshake(NO_METADATA),
    )
    return Topology(engine(OWN, Role.CONSUMER, ALONE, State.READY, "d1"), (record(told, "d1"),), ())


def record(told, generation):
    return worker_record(told, Start(generation, 1), Settings(), f"boot-{told.worker_rank}")


def engine(engine_id, role, layout, state, generation, lapsed=False):
    return Engine(
        namespace="default",
        engine_id=engine_id,
        group=engine_id,
        replica=engine_id,
        dp_rank=0,
        role=role,
        state=state,
        generation=generation,
        epoch=1,
        revision=7,
        start_revision=5,
        layout=layout,
        present=0,
        declared=layout.pp_size,
        lapsed=lapsed,
    )


class Book:
    """What a `PeerBook` is to a worker; told by the test. Waiters with no deadline."""

    def __init__(self):
        self._known = {OWN: own_topology()}
        self._callbacks, self._waiters = [], []
        self.asked = threading.Event()

    def tell(self, now):
        self._known[now.engine.engine_id] = now
        for callback in self._callbacks:
            callback(now.engine.engine_id, now)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            self.when(*waiter)

    def get(self, engine_id):
        return self._known.get(engine_id)

    def judge(self, engine_id, generation=""):
        return judge(self.get(engine_id), engine_id, generation=generation, current=True)

    def when(self, engine_id, generation, timeout_s, done):
        answer = self.judge(engine_id, generation)
        if isinstance(answer, Use | Refuse):
            done(answer.topology if isinstance(answer, Use) else answer.why)
        else:
            self._waiters.append((engine_id, generation, timeout_s, done))
        self.asked.set()

    def on_change(self, callback):
        self._callbacks.append(callback)


class Consumer:
    """vLLM's worker as its `__init__` leaves it, but for the engine, and extended."""

    def __init__(self, book, **settings):
        worker = self.worker = object.__new__(vllms.MooncakeConnectorWorker)
        extra = {"mooncake_protocol": "tcp"}
        worker.vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra)
        )
        worker.is_kv_producer, worker.is_kv_consumer = False, True
        worker.engine_id, worker.hostname, worker.rpc_port = OWN, "127.0.0.1", 1
        worker.tp_rank, worker.tp_size, worker.pp_rank, worker.pp_size = 0, 1, 0, 1
        worker.side_channel_port = 0
        for name in (
            *("kv_caches_base_addr", "block_len_per_layer", "kv_block_len_per_layer"),
            *("registered_layer_names", "registered_layer_indices", "registered_group_indices"),
            *("region_shared_groups", "region_row_offsets"),
        ):
            setattr(worker, name, [])
        worker._remote_agents, worker._tp_size = {}, {OWN: 1}
        worker._pending_bootstrap_queries = {}
        worker.finished_recving_reqs = set()
        worker._invalid_block_ids, worker._failed_recv_reqs = queue.Queue(), queue.Queue()
        worker._is_hma_required = False
        worker.xfer_stats = MooncakeKVConnectorStats()
        worker.transfer_topo = SimpleNamespace(handshake_target_ranks=lambda size: [0])
        worker.async_zmq_ctx = zmq.asyncio.Context()
        worker._encoder = msgspec.msgpack.Encoder()
        worker._xfer_resp_decoder = msgspec.msgpack.Decoder(vllms.MooncakeXferResponse)
        worker.receiver_loop = asyncio.new_event_loop()
        worker._mooncake_receiver_t = threading.Thread(
            target=vllms._async_loop, args=(worker.receiver_loop,), daemon=True
        )
        worker._mooncake_receiver_t.start()
        mooncake.extend_worker(worker, Settings(**settings), book)
        self.errors = set()

    def pull(self, request_id, generation="g1", bootstrap="", engine_id=PEER):
        """A step with one request to pull."""
        metadata = vllms.MooncakeConnectorMetadata()
        pull = vllms.PullReqMeta(request_id, f"t-{request_id}", [[7, 8]], engine_id, bootstrap)
        pull.rankbook_generation = generation
        metadata.reqs_to_recv[engine_id][request_id] = pull
        self.worker.start_load_kv(metadata)

    def wait(self, request_id):
        """Steps until the request is over; returns whether its KV came."""
        deadline = time.monotonic() + SOON_S
        while time.monotonic() < deadline:
            _, received = self.worker.get_finished()
            self.errors |= self.worker.get_block_ids_with_load_errors()
            if received and request_id in received:
                return not self.errors
            time.sleep(0.01)
        raise TimeoutError(f"{request_id} is not over after {SOON_S:g} s")

    def close(self):
        self.worker.shutdown()
        self.worker.receiver_loop.close()


@pytest.fixture
def book():
    return Book()


@pytest.fixture
def make_consumer(book):
    made = []

    def make(**settings):
        made.append(Consumer(book, **settings))
        return made[-1]

    yield make
    for consumer in made:
        consumer.close()


class Stages:
    """Two workers of a producer: real sockets that are asked for KV."""

    def __init__(self):
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.ROUTER) for _ in range(2)]
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in self._sockets]
        self.addresses = tuple(f"tcp://127.0.0.1:{port}" for port in ports)

    def asked(self):
        """Waits until both are asked; returns who asked and for which requests."""
        questions = []
        for socket in self._sockets:
            assert socket.poll(SOON_S * 1000), "a stage was not asked"
            peer, question = socket.recv_multipart()
            questions.append((socket, peer, msgspec.msgpack.decode(question)["req_blocks"]))
        return questions

    def answer(self, questions):
        """Says that everything was written."""
        for socket, peer, blocks in questions:
            socket.send_multipart(
                [peer, msgspec.msgpack.encode({"status": 0, "ok_reqs": list(blocks)})]
            )

    def quiet(self):
        """Whether nobody asked."""
        return not any(socket.poll(200) for socket in self._sockets)

    def close(self):
        self._context.destroy(linger=0)


@pytest.fixture
def stages():
    made = Stages()
    yield made
    made.close()


@pytest.fixture
def later_stages():
    made = Stages()
    yield made
    made.close()


def test_every_stage_that_the_sealed_topology_names_is_asked(book, make_consumer, stages):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    questions = stages.asked()
    assert [list(blocks) for _, _, blocks in questions] == [["r1"], ["r1"]]
    stages.answer(questions)
    assert consumer.wait("r1")


def test_a_pull_waits_for_a_producer_that_is_not_sealed_and_asks_no_part_of_it(
    book, make_consumer, stages
):
    consumer = make_consumer()
    book.tell(topology(stages.addresses[:1], state=State.FORMING))
    consumer.pull("r1", generation="")
    assert book.asked.wait(SOON_S)
    book.tell(topology(stages.addresses, state=State.COMPLETE))
    assert stages.quiet()
    book.tell(topology(stages.addresses))
    stages.answer(stages.asked())
    assert consumer.wait("r1")


def test_pulls_of_a_producer_that_died_fail_at_once_and_leave_nothing(book, make_consumer, stages):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    stages.asked()
    book.tell(topology(state=State.GONE))
    assert not consumer.wait("r1")
    assert consumer.errors == {7, 8}
    half = consumer.worker.rankbook
    assert (half.known, half.pulls, half.tasks) == ({}, {}, set())
    assert consumer.worker._remote_agents == {}
    assert consumer.worker._tp_size == {OWN: 1}


def test_a_death_that_was_told_before_the_question_was_asked_ends_it_too(
    book, make_consumer, stages
):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    stages.answer(stages.asked())
    assert consumer.wait("r1")
    judge = book.judge
    book.judge = lambda *args: (judge(*args), book.tell(topology(state=State.GONE)))[0]
    consumer.pull("r2")
    assert not consumer.wait("r2")
    assert consumer.worker.rankbook.pulls == {}


def test_a_producer_that_lapsed_may_still_write_so_its_pull_is_left_alone(
    book, make_consumer, stages
):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    questions = stages.asked()
    book.tell(topology(state=State.GONE, lapsed=True))
    consumer.pull("r2")
    assert not consumer.wait("r2")
    consumer.errors.clear()
    stages.answer(questions)
    assert consumer.wait("r1")


def test_a_restarted_producer_is_asked_where_it_listens_now(
    book, make_consumer, stages, later_stages
):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    stages.answer(stages.asked())
    assert consumer.wait("r1")
    book.tell(topology(state=State.GONE))
    book.tell(topology(later_stages.addresses, generation="g2"))
    consumer.pull("r2", generation="g2")
    later_stages.answer(later_stages.asked())
    assert consumer.wait("r2")
    assert stages.quiet()


def test_a_producer_that_published_other_addresses_is_asked_there(
    book, make_consumer, stages, later_stages
):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    stages.answer(stages.asked())
    assert consumer.wait("r1")
    book.tell(topology(later_stages.addresses))
    consumer.pull("r2")
    later_stages.answer(later_stages.asked())
    assert consumer.wait("r2")


def test_a_start_that_was_replaced_alive_may_still_finish_what_it_was_asked(
    book, make_consumer, stages, later_stages
):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    questions = stages.asked()
    book.tell(topology(later_stages.addresses, generation="g2"))
    consumer.pull("r2", generation="g2")
    later_stages.answer(later_stages.asked())
    assert consumer.wait("r2")
    stages.answer(questions)
    assert consumer.wait("r1")


def test_a_pull_of_an_older_start_fails_and_nobody_is_asked(book, make_consumer, stages):
    consumer = make_consumer()
    book.tell(topology(stages.addresses, generation="g2"))
    consumer.pull("r1", generation="g1")
    assert not consumer.wait("r1")
    assert stages.quiet()


def test_a_producer_that_may_not_pair_is_refused_before_it_is_asked(book, make_consumer, stages):
    consumer = make_consumer()
    whole = topology(stages.addresses)
    other = tuple(
        dataclasses.replace(worker, model=dataclasses.replace(worker.model, head_size=64))
        for worker in whole.workers
    )
    book.tell(dataclasses.replace(whole, workers=other))
    consumer.pull("r1")
    assert not consumer.wait("r1")
    assert stages.quiet()


def test_what_the_engine_core_refused_is_handed_back_with_its_blocks(make_consumer):
    consumer = make_consumer()
    metadata = vllms.MooncakeConnectorMetadata()
    metadata.rankbook = SimpleNamespace(failed={"r1": ([3, 4],)})
    consumer.worker.start_load_kv(metadata)
    assert not consumer.wait("r1")
    assert consumer.errors == {3, 4}


def test_shutdown_does_not_wait_for_an_answer_that_never_comes(book, make_consumer, stages):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    stages.asked()
    asleep = threading.Thread(target=consumer.worker.shutdown, daemon=True)
    asleep.start()
    asleep.join(SOON_S)
    assert not asleep.is_alive()
    assert not consumer.worker._mooncake_receiver_t.is_alive()


def test_no_bootstrap_server_is_launched_where_the_side_channel_is_off():
    def transfer(**options):
        return SimpleNamespace(
            kv_connector="MooncakeConnector", kv_connector_extra_config={}, **options
        )

    original = vllms.should_launch_bootstrap_server
    with mooncake.without_bootstrap(transfer(), Settings(side_channel=False)):
        assert vllms.should_launch_bootstrap_server(None) is False
    assert vllms.should_launch_bootstrap_server is original
    for settings in (Settings(), Settings(side_channel=False, handshake="vllm")):
        with mooncake.without_bootstrap(transfer(), settings):
            assert vllms.should_launch_bootstrap_server is original
