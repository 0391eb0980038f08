"""NIXL's workers with the book: vLLM's own worker objects, no engine beside them.

Real: vLLM's worker classes with their handshake, result and notice code, and the
book's `Gate` and `Pairs`. Stand-ins: NIXL itself, the rank topology, the thread of
the handshakes and the one of the pushes (both are the test), what moves the bytes,
and a book that is written by hand.
"""

import collections
import dataclasses
import importlib.util
import logging
import queue
import threading
import time
import warnings
from concurrent.futures import Executor, Future
from types import SimpleNamespace

import pytest
from tests.unit.vllm_integration.books import HandBook, engine

from rankbook.model import Layout, Role
from rankbook_vllm.config import Settings

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    import msgspec
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlAgentMetadata,
        NixlConnectorMetadata,
        NixlHandshakePayload,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import (
        NixlPushConnectorWorker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

    from rankbook_vllm._vllm import nixl
    from rankbook_vllm._vllm.halves import Orders

OWN = "own-0"
PEER = "peer-0"
ONE = Layout(pp_size=1, tp_size=1, num_layers=4)
STAGES = Layout(pp_size=2, tp_size=1, num_layers=4)
BLOCKS = ([7, 8],)
LEASE_S = 30.0


# ------------------------------------------------------------------------- stand-ins


class Nixl:
    """NIXL's agent: what it was given and has not given back."""

    def __init__(self):
        self.agents = set()
        self.handles = set()
        self.sent = []
        self.transfers = {}
        self.refuses = ()
        self.agents_left = 1000
        self._names = 0

    def add_remote_agent(self, blob):
        if not self.agents_left:
            raise RuntimeError("no more agents")
        self.agents_left -= 1
        self._names += 1
        name = f"{blob.decode()} #{self._names}"
        self.agents.add(name)
        return name

    def remove_remote_agent(self, name):
        if "remove" in self.refuses:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self.agents.remove(name)

    def prepare(self):
        self._names += 1
        self.handles.add(self._names)
        return self._names

    def release_dlist_handle(self, handle):
        if "release" in self.refuses:
            raise RuntimeError("NIXL_ERR_INVALID_PARAM")
        self.handles.remove(handle)

    def get_new_notifs(self):
        return {}

    def send_notif(self, agent, notif_msg):
        assert agent in self.agents
        self.sent.append((agent, notif_msg))

    def transfer(self):
        self._names += 1
        self.transfers[self._names] = "PROC"
        return self._names

    def check_xfer_state(self, handle):
        return self.transfers[handle]

    def get_xfer_telemetry(self, handle):
        return None

    def release_xfer_handle(self, handle):
        del self.transfers[handle]


class Ranks:
    """The rank topology, where every rank asks one; what it knows of peers."""

    def __init__(self):
        self.known = set()

    def handshake_target_ranks(self, tp_size, dcp_size=1):
        return [0]

    def register_remote_engine(self, engine_id, info):
        self.known.add(engine_id)

    def unregister_remote_engine(self, engine_id):
        self.known.discard(engine_id)

    def get_engine_info(self, engine_id):
        return SimpleNamespace(remote_block_size=16, remote_physical_blocks_per_logical=1)

    def block_size_ratio(self, size):
        return 1


class HandshakeThread(Executor):
    """The thread of the handshakes: does nothing before `run`."""

    def __init__(self):
        self._todo = collections.deque()

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        self._todo.append((future, fn, args, kwargs))
        return future

    def run(self):
        while self._todo:
            future, fn, args, kwargs = self._todo.popleft()
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - as a pool's thread does
                future.set_exception(error)

    def __len__(self):
        return len(self._todo)

    def shutdown(self, wait=True, *, cancel_futures=False):
        pass


class Book(HandBook):
    """A book that knows how far the peers' clocks are."""

    offset_s = 0.0
    clocks = True

    def clock_of(self, topology):
        return SimpleNamespace(offset_s=self.offset_s) if self.clocks else None


class Parts:
    """What vLLM's `__init__` sets, and the parts that move bytes."""

    def __init__(self, bidirectional=False):
        self.engine_id = OWN
        self.kv_transfer_config = SimpleNamespace(
            get_from_extra_config=lambda name, default: default
        )
        self.tp_rank, self.world_size, self.pcp_rank, self.pcp_size = 0, 1, 0, 1
        self.dcp_size, self.pcp_dcp_sharded = 1, False
        self.transfer_topo, self.nixl_wrapper = Ranks(), Nixl()
        for name in (*TABLES, "dst_xfer_side_handles", "_handshake_futures", "_remote_agents"):
            setattr(self, name, {})
        self._engine_last_active, self._engine_clock_offset = {}, {}
        self._engine_by_address, self._invalid_engine_backoff = {}, {}
        self._failed_remote_engines, self._invalid_remote_engines = set(), set()
        self._handshake_lock = threading.RLock()
        self._handshake_initiation_executor = HandshakeThread()
        self._engine_ttl = 0.0
        self.compat_hash, self.enforce_compat_hash = "same", True
        self._is_csa_linear, self.use_host_buffer = False, True
        self._recving_metadata, self._recving_transfers = {}, collections.defaultdict(list)
        self._failed_recv_reqs, self._recv_failures = queue.Queue(), set()
        self._invalid_block_ids, self._ready_requests = queue.Queue(), queue.Queue()
        self._pending_recv_notifs, self._replicated_pcp_done_sending = {}, set()
        self._is_hma_required = False
        self._reqs_to_send, self._reqs_to_process = {}, set()
        self.consumer_notification_counts_by_req = collections.defaultdict(int)
        self.expected_consumer_notifications_by_req = {}
        self._physical_blocks_per_logical_kv_block = 1
        self.enable_permute_local_kv = self.enable_heterogeneous_attn_post_process = False
        self._bidirectional_kv_xfer_enabled = bidirectional
        self.xfer_stats = NixlKVConnectorStats()
        self._hb_handshake_notif_only = True
        self.fails_at = None
        self.cleaned, self.moved = [], []

    def shutdown(self):
        pass

    def sync_recved_kv_to_device(self, request_id, meta):
        pass

    def add_remote_agent(self, metadata, remote_tp_rank=0, remote_tp_size=1, remote_dcp_size=1):
        engine_id = metadata.engine_id
        self.transfer_topo.register_remote_engine(engine_id, None)
        for name in TABLES:
            getattr(self, name)[engine_id] = "something"
        agent = self.nixl_wrapper.add_remote_agent(metadata.agent_metadata)
        handles = self.dst_xfer_side_handles.setdefault(engine_id, {})
        handles[len(handles)] = self.nixl_wrapper.prepare()
        if self.fails_at == len(handles):
            raise RuntimeError("the layouts differ")
        return agent

    def _cleanup_remote_engine(self, engine_id, *, log_eviction=True):
        self.cleaned.append((engine_id, threading.current_thread()))
        super()._cleanup_remote_engine(engine_id, log_eviction=log_eviction)


TABLES = (
    "kv_caches_base_addr",
    "dst_num_blocks",
    "dst_region_num_blocks",
    "dst_region_group_ids",
    "dst_uses_region_group_mapping",
    "dst_region_mem_types",
    "tp_mappings",
)


class Push(Parts, NixlPushConnectorWorker):
    def __init__(self, **options):
        super().__init__(**options)
        self._sending_transfers, self._send_failures = collections.defaultdict(list), set()
        self._sending_transfers_lock = threading.Lock()
        self._push_finished_blocks, self._pending_d_registrations = {}, {}
        self._reg_send_inbox, self._finished_blocks_inbox = queue.Queue(), queue.Queue()
        self._pending_completion_notifs = queue.Queue()
        self._evict_finished_inbox, self._deferred_push_inbox = queue.Queue(), queue.Queue()
        self._push_writer_wake = threading.Event()

    def _xfer_blocks_for_req(self, req_id, meta):
        (agent,) = self._remote_agents[meta.remote.engine_id].values()
        self.moved.append((req_id, agent))
        self._sending_transfers[req_id].append(self.nixl_wrapper.transfer())

    def write(self):
        """One turn of the thread of the pushes."""
        for inbox, do in (
            (self._reg_send_inbox, self._send_registration_to_p),
            (self._deferred_push_inbox, self._do_start_push_kv),
        ):
            for _ in range(inbox.qsize()):
                do(*inbox.get_nowait())


class Pull(Parts, NixlPullConnectorWorker):
    def _read_blocks_for_req(self, req_id, meta):
        if meta.remote.engine_id not in self._remote_agents:
            self._background_nixl_handshake(req_id, meta.remote.engine_id, meta)
            return
        (agent,) = self._remote_agents[meta.remote.engine_id].values()
        if meta.local_block_ids:
            self.moved.append((req_id, agent))
            self._recving_transfers[req_id].append(self.nixl_wrapper.transfer())

    def write(self):
        """Pull has no thread of its own."""


# --------------------------------------------------------------------------- the rest


def agent_metadata(engine_id, blob):
    return NixlAgentMetadata(
        engine_id=engine_id,
        agent_metadata=blob,
        kv_caches_base_addr=[0],
        device_id=0,
        num_blocks=256,  # as the records of `books` have it
        block_lens=[64],
        block_strides=[64],
        kv_cache_layout="NHD",
        block_size=16,
        ssm_sizes=(0, 0),
        attn_backend_name="CPU",
        physical_blocks_per_logical_kv_block=1,
    )


def published(engine_id, generation, slot, compat="same"):
    blob = f"{engine_id} {generation} pp{slot.pp_rank} tp{slot.tp_rank}".encode()
    inner = msgspec.msgpack.encode(agent_metadata(engine_id, blob))
    return msgspec.msgpack.encode(NixlHandshakePayload(compat, inner))


def topology(engine_id, connector, **changes):
    """An engine whose workers publish what vLLM's would."""
    said = changes.pop("said", "")
    made = engine(engine_id, **({"layout": ONE, "connector": connector} | changes))
    generation = made.engine.generation + said
    workers = tuple(
        dataclasses.replace(
            worker,
            handshake=dataclasses.replace(
                worker.handshake, payload=published(engine_id, generation, worker.slot)
            ),
        )
        for worker in made.workers
    )
    return dataclasses.replace(made, workers=workers)


class Desk:
    """A worker, and everything around it that the test moves."""

    def __init__(self, kind, own_role, **options):
        self.connector = "NixlPushConnector" if kind is Push else "NixlPullConnector"
        self.book = Book()
        self.worker = kind(bidirectional=options.pop("bidirectional", False))
        self.thread = self.worker._handshake_initiation_executor
        self.half = nixl.extend_worker(self.worker, Settings(**options), self.book)
        self.pairs, self.nixl = self.half.pairs, self.worker.nixl_wrapper
        self.now_s = 1000.0
        self.pairs._clock = self.half._clock = lambda: self.now_s
        self.peer_role = {
            Role.PRODUCER: Role.CONSUMER,
            Role.CONSUMER: Role.PRODUCER,
            Role.BOTH: Role.BOTH,
        }[own_role]
        self.own_role = own_role
        self.book.put(self.own())

    def own(self, **changes):
        return topology(OWN, self.connector, **({"role": self.own_role} | changes))

    def peer(self, generation="g1", **changes):
        epoch = int(generation[1:])
        return topology(
            changes.pop("engine_id", PEER),
            self.connector,
            **({"role": self.peer_role, "generation": generation, "epoch": epoch} | changes),
        )

    def step(self, failed=(), in_batch=(), finished=None, **receives):
        """A step: receives by request are (generation of the peer, or "")."""
        meta = NixlConnectorMetadata()
        for request_id, generation in receives.items():
            self.receive(meta, request_id, generation)
        meta.rankbook = Orders(
            {one: generation for one, generation in receives.items() if generation},
            dict.fromkeys(failed, BLOCKS),
        )
        meta.reqs_in_batch = set(in_batch)
        for request_id in finished or ():
            meta.reqs_to_send[request_id] = time.perf_counter() + LEASE_S
        self.worker.start_load_kv(meta)

    def receive(self, meta, request_id, generation, blocks=BLOCKS):
        params = {
            "remote_block_ids": ([1, 2],),
            "remote_engine_id": PEER,
            "remote_request_id": f"{request_id}-there",
            "remote_host": PEER,
            "remote_port": 0,
        }
        meta.add_new_req_to_recv(request_id, blocks, params, awaiting_kvs=any(blocks))
        if isinstance(self.worker, Push):
            meta.push_registrations[request_id] = {
                "request_id": request_id,
                "decode_engine_id": OWN,
                "local_block_ids": blocks,
                "remote_engine_id": PEER,
                "remote_host": PEER,
                "remote_port": 0,
                "remote_tp_size": 1,
                "remote_pp_size": 1,
                "remote_generation": generation,
            }

    def settle(self):
        """Everything but the step loop runs until nothing is left to do."""
        for _ in range(4):
            self.worker.write()
            self.book.serve()
            self.thread.run()

    def results(self):
        results = self.worker.get_transfer_results()
        invalid = self.worker.get_block_ids_with_load_errors()
        return results, invalid

    def failed(self):
        return self.results()[0].failed_recving

    def registration(self, request_id, generation):
        """What a consumer tells a producer."""
        return {
            "request_id": request_id,
            "local_block_ids": BLOCKS,
            "decode_engine_id": PEER,
            "decode_host": PEER,
            "decode_port": 0,
            "decode_tp_size": 1,
            "decode_generation": generation,
        }

    def push(self, request_id, generation="g1"):
        """A push that a consumer has asked for, whose blocks are kept."""
        self.worker._reqs_to_process.add(request_id)
        self.step(finished=[request_id])
        registration = self.registration(f"{request_id}-there", generation)
        self.worker._do_start_push_kv(request_id, BLOCKS, registration)
        self.settle()

    def say(self, request_id, generation="g1"):
        """A consumer's notice arrives."""
        notice = msgspec.msgpack.encode(self.registration(request_id, generation))
        self.worker._handle_push_reg_notif(b"PUSH_REG:" + notice)

    def empty(self):
        """Whether vLLM and NIXL hold nothing of any peer."""
        tables = {name: getattr(self.worker, name) for name in TABLES}
        tables["dst_xfer_side_handles"] = self.worker.dst_xfer_side_handles
        tables["_remote_agents"] = self.worker._remote_agents
        held = {name for name, table in tables.items() if table}
        return not (
            held or self.nixl.agents or self.nixl.handles or self.worker.transfer_topo.known
        )


@pytest.fixture
def consumer():
    return lambda kind=Push, **options: Desk(kind, Role.CONSUMER, **options)


@pytest.fixture
def producer():
    return lambda **options: Desk(Push, Role.PRODUCER, **options)


@pytest.fixture
def log(caplog):
    """What the book's side says."""
    logger = logging.getLogger("vllm.rankbook")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def said(log, text):
    """How often; a record may reach the log on two ways."""
    records = {id(record): record for record in log.records}.values()
    return sum(text in record.getMessage() for record in records)


both = pytest.mark.parametrize("kind", [Push, Pull], ids=["push", "pull"])


def paired(desk, generation="g1"):
    """A consumer that has shaken hands with this start, for a request that is over."""
    desk.book.put(desk.peer(generation))
    desk.step(first=generation)
    desk.settle()
    desk.step()
    for handles in desk.worker._recving_transfers.values():
        for handle in handles:
            desk.nixl.transfers[handle] = "DONE"
    if isinstance(desk.worker, Push):
        desk.worker._pending_completion_notifs.put(b"first:1")
    assert desk.results()[0].finished_recving == {"first"}
    assert PEER in desk.worker._remote_agents
    desk.nixl.sent.clear()
    desk.worker.moved.clear()
    return desk


def reached(desk):
    """Which start each request went to: where its registration was sent, or it reads from."""
    told = {
        msgspec.msgpack.decode(notice.removeprefix(b"PUSH_REG:"))["request_id"]: agent
        for agent, notice in desk.nixl.sent
        if notice.startswith(b"PUSH_REG:")
    } | dict(desk.worker.moved)
    return {request_id: agent.split()[1] for request_id, agent in told.items()}
