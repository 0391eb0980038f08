"""Mooncake's consumer with the book in place of the bootstrap server; no engine moves bytes.

The worker is vLLM's own class without its transfer engine, and it asks real
sockets. The book is the tests' own, so that each change comes when it should.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import queue
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


class Bootstrap:
    """A producer's bootstrap server, which says what the test wants."""

    def __init__(self):
        made = self
        self.answer, self.asked, self.go_on = b"", threading.Event(), threading.Event()
        self.go_on.set()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                made.asked.set()
                made.go_on.wait(SOON_S)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(made.answer)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def name(self, **engines):
        """Says of each engine, with _ for -, that it is one rank of stages that listen there."""
        self.answer = json.dumps(
            {
                str(place): {
                    "engine_id": engine_id.replace("_", "-"),
                    "worker_addr": {"0": dict(enumerate(addresses))},
                }
                for place, (engine_id, addresses) in enumerate(engines.items())
            }
        ).encode()

    def close(self):
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def make_bootstrap():
    made = []

    def make():
        made.append(Bootstrap())
        return made[-1]

    yield make
    for bootstrap in made:
        bootstrap.close()
