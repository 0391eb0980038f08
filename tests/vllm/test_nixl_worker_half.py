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

import msgspec
import pytest
from tests.unit.vllm_integration.books import HandBook, engine

from rankbook.model import Layout, Role, Slot, State
from rankbook_vllm.config import Settings

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
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

    from rankbook_vllm._vllm import nixl, nixl_socket, nixl_worker
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
        num_blocks=8,
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
        self.pairs._clock = lambda: self.now_s
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


# ------------------------------------------------------------------- orders to fail


@both
def test_an_order_to_fail_is_reported_by_vllm_with_the_blocks(consumer, kind):
    desk = consumer(kind)
    desk.step(failed=["r1"])
    results, invalid = desk.results()
    assert (results.failed_recving, results.finished_recving) == ({"r1"}, {"r1"})
    assert invalid == {7, 8}
    assert desk.worker._recving_metadata == {}
    assert desk.failed() == set()  # once


# ------------------------------------------------------------- one start after another


@both
def test_a_request_reaches_the_start_that_it_is_of(consumer, kind):
    desk = consumer(kind)
    desk.book.put(desk.peer("g1"))
    desk.step(r1="g1")
    desk.settle()
    desk.step()
    assert reached(desk) == {"r1": "g1"}


@both
def test_a_pairing_that_is_over_is_dropped_by_a_step_and_by_no_other_thread(consumer, kind):
    desk = paired(consumer(kind))
    other = threading.Thread(target=desk.book.put, args=(desk.peer("g2"),))
    other.start()
    other.join()
    desk.settle()
    assert desk.worker.cleaned == []
    desk.step()
    assert desk.worker.cleaned == [(PEER, threading.current_thread())]
    assert desk.empty()
    assert not desk.pairs.is_over(PEER)


@both
def test_the_next_start_is_shaken_hands_with_after_the_drop(consumer, kind):
    desk = paired(consumer(kind))
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.settle()
    desk.step()
    assert reached(desk) == {"r2": "g2"}
    assert len(desk.nixl.agents) == 1


def test_a_read_under_way_keeps_the_old_pairing_and_holds_the_next_request(consumer):
    desk = paired(consumer(Pull))
    desk.step(r1="g1")
    (handle,) = desk.worker._recving_transfers["r1"]
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.settle()
    assert desk.worker.cleaned == []
    assert set(desk.half.held) == {"r2"}
    assert reached(desk) == {"r1": "g1"}
    desk.nixl.transfers[handle] = "DONE"
    desk.results()
    assert len(desk.worker.cleaned) == 1
    desk.step()
    desk.settle()
    desk.step()
    assert desk.half.held == {}
    assert reached(desk) == {"r1": "g1", "r2": "g2"}


def test_a_request_that_is_held_too_long_fails(consumer, log):
    desk = paired(consumer(Pull, peer_timeout_s=0.0))
    desk.step(r1="g1")
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.step()
    assert desk.failed() == {"r2"}
    assert desk.half.held == {}
    assert "request r2 fails: transfers of the last start of peer-0" in log.text


def test_a_notice_that_nobody_waits_for_is_never_reported_though_held_too_long(consumer):
    desk = paired(consumer(Pull, peer_timeout_s=0.0))
    desk.step(r1="g1")
    desk.book.put(desk.peer("g2"))
    desk.step()
    meta = NixlConnectorMetadata()
    desk.receive(meta, "aborted", "", blocks=[])
    desk.worker.start_load_kv(meta)
    assert set(desk.half.held) == {"aborted"}
    desk.step()
    assert desk.half.held == {}
    assert desk.failed() == set()
    assert "aborted" not in desk.worker._recving_metadata


@both
def test_a_handshake_under_way_keeps_the_pairing(consumer, kind):
    desk = paired(consumer(kind))
    desk.book.put(desk.peer("g2"))
    desk.worker._handshake_futures[PEER] = Future()
    desk.step()
    assert desk.worker.cleaned == []
    del desk.worker._handshake_futures[PEER]
    desk.step()
    assert len(desk.worker.cleaned) == 1


def test_what_the_writer_holds_is_not_dropped_and_not_waited_for(consumer):
    desk = paired(consumer(Push))
    desk.book.put(desk.peer("g2"))
    with desk.half.touching:
        desk.step()
        assert desk.worker.cleaned == []
    desk.step()
    assert len(desk.worker.cleaned) == 1


def test_a_fleet_that_starts_anew_is_let_go_one_at_a_step(producer):
    desk = producer()
    peers = [f"peer-{number}" for number in range(4)]
    desk.book.put(*(desk.peer("g1", engine_id=one) for one in peers))
    for one in peers:
        desk.worker._ensure_handshake(one, one, 0, 1)
    desk.settle()
    desk.book.put(*(desk.peer("g2", engine_id=one) for one in peers))
    for steps in range(1, 5):
        desk.step()
        assert len(desk.worker.cleaned) == steps
    assert desk.empty()


@both
@pytest.mark.parametrize("refused", ["remove", "release"])
def test_a_nixl_that_gives_nothing_back_ends_no_step_loop(consumer, log, kind, refused):
    desk = paired(consumer(kind))
    # Only what is read and written is prepared: a push's consumer has no handle.
    desk.worker.dst_xfer_side_handles.setdefault(PEER, {})[9] = desk.nixl.prepare()
    desk.nixl.refuses = (refused,)
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.nixl.refuses = ()
    desk.settle()
    desk.step()
    assert reached(desk) == {"r2": "g2"}
    assert "could not let go of peer-0" in log.text


@both
def test_two_starts_in_one_step_reach_no_start_but_their_own(consumer, kind):
    desk = paired(consumer(kind))
    desk.book.put(desk.peer("g2"))
    desk.step(old="g1", new="g2")
    desk.settle()
    assert desk.failed() == {"old"}
    desk.step()
    assert reached(desk) == {"new": "g2"}


def test_a_read_that_waited_for_its_handshake_reads_from_no_later_start(consumer):
    desk = consumer(Pull)
    desk.book.put(desk.peer("g1"))
    desk.step(r1="g1")
    desk.settle()  # shaken hands with the first start; the read is next
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.settle()
    assert desk.failed() == {"r1"}
    desk.step()
    assert reached(desk) == {"r2": "g2"}


def test_a_registration_that_waited_for_its_handshake_goes_to_no_later_start(consumer):
    desk = consumer(Push)
    desk.book.put(desk.peer("g1"))
    desk.step(r1="g1")
    desk.worker.write()
    desk.book.serve()
    desk.thread.run()  # the registration is next
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.settle()
    assert reached(desk) == {"r2": "g2"}
    assert desk.failed() == {"r1"}


def test_a_request_held_for_a_start_that_is_over_meanwhile_fails(consumer):
    desk = paired(consumer(Pull))
    desk.step(r1="g1")
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.book.put(desk.peer("g3"))
    desk.step(r3="g3")
    assert desk.failed() == {"r2"}
    assert set(desk.half.held) == {"r3"}


def test_a_registration_that_shared_an_older_starts_handshake_waits_for_its_own(consumer):
    desk = consumer(Push)
    desk.book.put(desk.peer("g1"))
    desk.step(r1="g1")
    desk.worker.write()
    desk.book.serve()  # the handshake with the first start is about to be made
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.settle()
    assert set(desk.half.unsent) == {"r2"}
    desk.step()
    desk.settle()
    assert desk.failed() == {"r1"}
    assert reached(desk) == {"r2": "g2"}
    assert desk.half.unsent == {}
    assert desk.half.orphans == {}


def test_a_dead_consumers_push_takes_nobody_with_it(producer, log):
    desk = producer()
    desk.book.put(desk.peer("g2"))
    desk.worker._do_start_push_kv("p1", BLOCKS, desk.registration("p1-there", "g1"))
    assert desk.worker._handshake_futures == {}
    assert "request p1 is not sent" in log.text
    desk.push("p2", "g2")
    assert reached(desk) == {"p2": "g2"}


@both
def test_a_handshake_that_has_just_been_made_is_not_forgotten(consumer, kind):
    """vLLM takes the future away and puts the agents down under its lock."""
    desk = paired(consumer(kind))
    agents = desk.worker._remote_agents.pop(PEER)  # between the two
    desk.book.put(desk.peer("g2"))
    entered, done = threading.Event(), threading.Event()

    def callback():
        with desk.worker._handshake_lock:
            entered.set()
            done.wait(5)
            desk.worker._remote_agents[PEER] = agents

    thread = threading.Thread(target=callback)
    thread.start()
    entered.wait(5)
    threading.Timer(0.1, done.set).start()
    desk.step()
    thread.join()
    assert desk.pairs.is_over(PEER) or PEER not in desk.worker._remote_agents


@both
def test_nothing_is_remembered_of_an_engine_that_came_and_went(consumer, kind):
    desk = paired(consumer(kind))
    desk.now_s = time.monotonic()
    desk.book.put(desk.peer("g1", state=State.GONE))
    desk.step()
    assert desk.empty()
    assert desk.pairs.bound(PEER) == ""
    assert not desk.pairs.over()
    kept = [value for value in vars(desk.half).values() if isinstance(value, dict | list)]
    assert kept
    assert not any(kept)


# ---------------------------------------------------------------- waiting for a push


def waiting(desk):
    """A consumer whose request waits for a push of the first start."""
    desk.book.put(desk.peer("g1"))
    desk.step(r1="g1")
    desk.settle()
    assert reached(desk) == {"r1": "g1"}
    return desk


def test_who_waits_for_a_producer_that_surely_ended_fails_at_once_and_once(consumer, log):
    desk = waiting(consumer())
    desk.book.put(desk.peer("g1", state=State.GONE))
    desk.now_s = time.monotonic() - 1  # deadlines are on the process's clock
    desk.book.tell(PEER)
    desk.step()
    assert desk.failed() == {"r1"}
    desk.step()
    assert desk.failed() == set()
    assert desk.half.orphans == {}
    assert said(log, "request r1 fails") == 1


def test_who_waits_for_a_producer_that_may_still_write_waits_out_its_lease(consumer):
    desk = consumer()
    start_s = time.monotonic()
    desk.now_s = start_s
    waiting(desk)
    desk.book.put(desk.peer("g2"))
    desk.step()
    assert desk.failed() == set()
    ((engine_id, until_s),) = desk.half.orphans.values()
    assert (engine_id, until_s) == (PEER, start_s + LEASE_S)
    desk.half.orphans["r1"] = (PEER, start_s)  # the lease is over
    desk.step()
    assert desk.failed() == {"r1"}


def test_kv_that_comes_within_the_lease_is_taken(consumer):
    desk = consumer()
    desk.now_s = time.monotonic()
    waiting(desk)
    desk.book.put(desk.peer("g2"))
    desk.step()
    desk.worker._pending_completion_notifs.put(b"r1:1")
    results, _ = desk.results()
    assert (results.finished_recving, results.failed_recving) == ({"r1"}, set())
    desk.step()
    assert desk.half.orphans == {}


def test_one_that_waits_for_nothing_is_no_orphan(consumer):
    """vLLM keeps a push request that was aborted, or whose tokens were all here, for ever;
    an engine core that hears of it again dies."""
    desk = waiting(consumer())
    meta = NixlConnectorMetadata()
    desk.receive(meta, "aborted", "", blocks=[])
    meta.push_registrations.clear()
    desk.worker.start_load_kv(meta)
    assert "aborted" in desk.worker._recving_metadata
    desk.now_s = time.monotonic() - 1
    desk.book.put(desk.peer("g1", state=State.GONE))
    desk.step()
    assert desk.failed() == {"r1"}


# ------------------------------------------------------------------------- pushing


def test_a_push_reaches_the_start_that_asked(producer):
    desk = producer()
    desk.book.put(desk.peer("g1"))
    desk.push("p1")
    assert reached(desk) == {"p1": "g1"}


def test_a_push_under_way_keeps_the_pairing_and_parks_the_next_start(producer):
    desk = producer()
    desk.book.put(desk.peer("g1"))
    desk.push("p1")
    desk.book.put(desk.peer("g2"))
    desk.push("p2", "g2")
    assert [one[0] for one in desk.half.parked] == ["p2"]
    assert desk.worker.cleaned == []
    (handle,) = desk.worker._sending_transfers["p1"]
    desk.nixl.transfers[handle] = "DONE"
    desk.results()
    assert len(desk.worker.cleaned) == 1
    desk.step()
    desk.settle()
    assert reached(desk) == {"p1": "g1", "p2": "g2"}
    assert desk.half.parked == []


def test_a_push_that_is_parked_until_its_blocks_are_freed_never_goes(producer, log):
    desk = producer()
    desk.book.put(desk.peer("g1"))
    desk.push("p1")
    desk.book.put(desk.peer("g2"))
    desk.push("p2", "g2")
    desk.worker._reqs_to_send["p2"] = 0.0  # its lease is over
    (handle,) = desk.worker._sending_transfers["p1"]
    desk.nixl.transfers[handle] = "DONE"
    assert "p2" in desk.results()[0].finished_sending
    desk.step()
    desk.settle()
    assert reached(desk) == {"p1": "g1"}
    assert desk.half.parked == []
    assert "request p2 is not sent to peer-0: its blocks were freed" in log.text


def test_a_consumer_that_died_after_it_asked_takes_nothing_from_the_next_start(producer):
    desk = producer()
    desk.book.put(desk.peer("g2"))
    desk.push("p2", "g2")
    desk.push("p1", "g1")  # the notice had come before the restart
    desk.step()
    assert not desk.pairs.is_over(PEER)
    desk.push("p3", "g2")
    assert reached(desk) == {"p2": "g2", "p3": "g2"}
    assert [one[0] for one in desk.half.parked] == ["p1"]


def test_a_consumer_that_this_book_does_not_know_yet_is_waited_for(producer):
    desk = producer()
    desk.book.put(desk.peer("g1"))
    desk.push("p1")
    (handle,) = desk.worker._sending_transfers["p1"]
    desk.nixl.transfers[handle] = "DONE"
    desk.results()
    desk.push("p2", "g2")  # the book is late
    desk.step()
    desk.settle()
    assert reached(desk) == {"p1": "g1"}
    desk.book.put(desk.peer("g2"))
    for _ in range(2):
        desk.step()
        desk.settle()
    assert reached(desk) == {"p1": "g1", "p2": "g2"}


def test_pushes_that_are_over_are_not_remembered(producer):
    desk = producer()
    desk.book.put(desk.peer("g1"))
    for number in range(20):
        desk.push(f"p{number}")
        (handle,) = desk.worker._sending_transfers[f"p{number}"]
        desk.nixl.transfers[handle] = "DONE"
        desk.results()
    assert desk.half.pushes == {}


# ------------------------------------------------------------------ late registrations

SHARED = "cmpl-1-0"
OURS, THEIRS = f"{SHARED}-0a1b2c3d", f"{SHARED}-99887766"


def freed(desk, request_id=OURS):
    """A request whose blocks were freed before anybody asked."""
    desk.worker._reqs_to_process.add(request_id)
    desk.step(finished=[request_id])
    desk.worker._reqs_to_send[request_id] = 0.0
    assert desk.results()[0].finished_sending == {request_id}
    return desk


def test_a_registration_that_comes_too_late_is_said_counted_and_not_kept(producer, log):
    desk = freed(producer())
    desk.say(THEIRS)
    assert desk.worker._pending_d_registrations == {}
    assert desk.pairs.counts["late"] == 1
    assert OURS in log.text
    assert THEIRS in log.text
    assert PEER in log.text


def test_a_registration_that_comes_early_stays(producer):
    desk = freed(producer())
    desk.say("cmpl-2-0-99887766")
    assert set(desk.worker._pending_d_registrations) == {"cmpl-2-0-99887766"}
    assert desk.pairs.counts["late"] == 0


def test_an_id_that_a_client_uses_again_is_not_late(producer):
    desk = freed(producer())
    desk.step(in_batch=[f"{SHARED}-11111111"])
    desk.say(THEIRS)
    assert set(desk.worker._pending_d_registrations) == {THEIRS}


def test_no_more_than_a_few_thousand_freed_requests_are_remembered(producer):
    desk = producer()
    nixl_worker._note_freed(desk.worker, (f"r{number}" for number in range(5000)))
    assert len(desk.half.freed) == 4096
    assert "r4999" in desk.half.freed
    assert "r0" not in desk.half.freed


# ------------------------------------------------------------------ failed handshakes


def test_a_handshake_that_fails_inside_vllm_leaves_nothing_and_the_next_runs_clean(producer):
    desk = producer()
    desk.book.put(desk.peer("g1"))
    desk.worker.fails_at = 1
    failed = desk.worker._ensure_handshake(PEER, PEER, 0, 1)
    desk.settle()
    assert "layouts differ" in str(failed.exception())
    assert desk.empty()
    assert desk.worker._handshake_futures == {}
    desk.worker.fails_at = None
    again = desk.worker._ensure_handshake(PEER, PEER, 0, 1)
    desk.settle()
    agents, _ = again.result()
    assert set(agents.values()) == desk.nixl.agents
    assert len(desk.nixl.handles) == 1


def test_a_handshake_that_fails_at_the_second_stage_gives_the_first_back(consumer):
    desk = consumer(Push)
    desk.book.put(desk.peer("g1", layout=STAGES))
    ask = {"pp_size": 2, "notif_agents_only": True}
    desk.nixl.agents_left = 1
    failed = desk.worker._ensure_handshake(PEER, PEER, 0, 1, **ask)
    desk.settle()
    assert "no more agents" in str(failed.exception())
    assert desk.empty()
    desk.nixl.agents_left = 2
    again = desk.worker._ensure_handshake(PEER, PEER, 0, 1, **ask)
    desk.settle()
    agents, _ = again.result()
    assert {key: name.rsplit(" #")[0] for key, name in agents.items()} == {
        (0, 0): "peer-0 g1 pp0 tp0",
        (1, 0): "peer-0 g1 pp1 tp0",
    }
    assert set(agents.values()) == desk.nixl.agents


def test_a_handshake_that_nixl_does_not_take_back_still_fails_with_its_own_error(producer):
    desk = producer()
    desk.book.put(desk.peer("g1"))
    desk.worker.fails_at = 1
    desk.nixl.refuses = ("remove", "release")
    failed = desk.worker._ensure_handshake(PEER, PEER, 0, 1)
    desk.settle()
    assert "layouts differ" in str(failed.exception())
    assert not any(getattr(desk.worker, name) for name in TABLES)


def test_a_peer_whose_clock_is_unknown_is_not_paired_where_clocks_are_compared(consumer):
    desk = consumer(Pull, bidirectional=True)
    desk.book.clocks = False
    desk.book.put(desk.peer("g1"))
    desk.step(r1="g1")
    desk.settle()
    assert desk.failed() == {"r1"}
    assert desk.empty()
    desk.book.clocks = True
    desk.step(r2="g1")
    desk.settle()
    desk.step()
    assert reached(desk) == {"r2": "g1"}


# ------------------------------------------------------------------------ the socket


def test_the_socket_answers_each_rank_with_the_peers_clock():
    socket = nixl_socket._BookSocket({(1, 3): b"stage", (0, 2): b"plain"}, 500.0)
    socket.setsockopt("whatever", 5000)
    for asked, expected in (((b"get", 1, 3), b"stage"), ((b"get", 2), b"plain")):
        socket.send(msgspec.msgpack.encode(asked))
        before = time.perf_counter()
        payload, clock = socket.recv_multipart()
        assert payload == expected
        assert before + 500 <= msgspec.msgpack.decode(clock) <= time.perf_counter() + 500


def test_vllm_takes_the_offset_of_the_peers_clock_from_it(consumer):
    desk = consumer(Pull)
    desk.book.offset_s = 500.0
    paired(desk)
    assert desk.worker._engine_clock_offset[PEER] == pytest.approx(500.0, abs=0.5)


def test_other_threads_still_get_vllms_own_socket(monkeypatch):
    original = base_worker.zmq_ctx
    opened = []

    class Real:
        def __init__(self, kind, address):
            opened.append(address)

        def __enter__(self):
            return "vllm's own"

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(base_worker, "zmq_ctx", Real)
    nixl_socket.answer_from_book()
    put = base_worker.zmq_ctx
    nixl_socket.answer_from_book()
    assert base_worker.zmq_ctx is put  # once
    found = {}

    def other():
        with put("kind", "tcp://elsewhere") as socket:
            found["other"] = socket

    monkeypatch.setattr(nixl_socket._local, "socket", "the book's", raising=False)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    with put("kind", "tcp://here") as socket:
        found["own"] = socket
    assert found == {"other": "vllm's own", "own": "the book's"}
    assert opened == ["tcp://elsewhere"]
    assert original is not put


# -------------------------------------------------------------------------- in advance


def asked(desk):
    """Notices only, by peer: what a handshake in advance was asked for."""
    seen = []
    real = desk.worker._nixl_handshake

    def handshake(
        host, port, remote_tp_size, expected_engine_id, remote_dcp_size=1, remote_pp_size=1,
        notif_agents_only=False,
    ):  # fmt: skip
        seen.append((expected_engine_id, remote_pp_size, notif_agents_only))
        return real(
            host, port, remote_tp_size, expected_engine_id, remote_dcp_size, remote_pp_size,
            notif_agents_only,
        )  # fmt: skip

    desk.worker._nixl_handshake = handshake
    return seen


@pytest.mark.parametrize(
    ("kind", "role", "expected"),
    [
        (Push, Role.CONSUMER, [(PEER, 1, True)]),
        (Push, Role.PRODUCER, [(PEER, 1, False)]),
        (Pull, Role.CONSUMER, [(PEER, 1, False)]),
        (Pull, Role.PRODUCER, []),
        (Push, Role.BOTH, [(PEER, 1, False)]),
        (Pull, Role.BOTH, [(PEER, 1, False)]),
    ],
    ids=[
        "push consumes",
        "push produces",
        "pull consumes",
        "pull produces",
        "push does both",
        "pull does both",
    ],
)
def test_hands_are_shaken_in_advance_by_whoever_will_need_it(kind, role, expected):
    desk = Desk(kind, role, prewarm=True)
    seen = asked(desk)
    desk.book.put(desk.peer("g1", state=State.FORMING))
    desk.settle()
    assert seen == []
    desk.book.put(desk.peer("g1"))
    desk.settle()
    assert seen == expected
    desk.book.tell(PEER)
    desk.settle()
    assert seen == expected


def test_every_peer_is_shaken_hands_with_when_this_engine_becomes_known(consumer):
    desk = consumer(prewarm=True)
    desk.book.forget(OWN)
    seen = asked(desk)
    desk.book.put(desk.peer("g1"), desk.peer("g1", engine_id="peer-1"))
    desk.settle()
    assert seen == []
    desk.book.put(desk.own())
    desk.settle()
    assert [one[0] for one in seen] == [PEER, "peer-1"]


def test_each_start_is_shaken_hands_with_once_though_it_fails(producer):
    desk = producer(prewarm=True)
    seen = asked(desk)
    desk.worker.fails_at = 1
    for generation in ("g1", "g1", "g2", "g2"):
        desk.book.put(desk.peer(generation))
        desk.settle()
    assert len(seen) == 2


def test_the_next_start_is_shaken_hands_with_in_advance_when_the_last_is_let_go(consumer):
    desk = consumer(prewarm=True)
    seen = asked(desk)
    desk.book.put(desk.peer("g1"))
    desk.settle()
    desk.book.put(desk.peer("g2"))
    desk.settle()
    assert len(seen) == 1
    desk.step()
    desk.settle()
    assert len(seen) == 2
    (agent,) = desk.nixl.agents
    assert agent.startswith("peer-0 g2")


def test_a_peer_that_does_not_fit_is_said_once_and_not_tried(consumer, log):
    desk = consumer(prewarm=True)
    seen = asked(desk)
    for _ in range(3):
        desk.book.put(desk.peer("g1", compat_hash="other"))
        desk.settle()
    assert seen == []
    assert said(log, "no handshake in advance") == 1


def test_peers_that_are_gone_are_not_remembered(consumer):
    desk = consumer(prewarm=True)
    for number in range(5):
        desk.book.put(desk.peer("g1", engine_id=f"peer-{number}"))
    assert len(desk.half.warmed) == 5
    desk.book.put(desk.peer("g1", engine_id="peer-0", state=State.GONE))
    for number in range(1, 5):
        desk.book.forget(f"peer-{number}")
    assert desk.half.warmed == {}


def test_nobody_shakes_hands_in_advance_while_asleep(consumer):
    desk = consumer(prewarm=True)
    desk.book.put(desk.own(asleep=(Slot(0, 0, 0),)))
    seen = asked(desk)
    desk.book.put(desk.peer("g1"))
    desk.settle()
    assert seen == []


def test_shaking_hands_in_advance_evicts_nobody(consumer):
    desk = paired(consumer(prewarm=True))
    desk.worker._engine_ttl = 0.001
    desk.worker._engine_last_active[PEER] = 0.0
    desk.book.put(desk.peer("g1", engine_id="peer-1"))
    desk.settle()
    assert desk.worker.cleaned == []
    desk.worker._ensure_handshake("peer-2", "peer-2", 0, 1)  # a request does
    assert [one for one, _ in desk.worker.cleaned] == [PEER]


# --------------------------------------------------------------------- asleep and awake


@both
def test_a_producer_that_slept_is_shaken_hands_with_anew(consumer, kind):
    desk = paired(consumer(kind))
    desk.book.put(desk.peer("g1", state=State.DEGRADED, asleep=(Slot(0, 0, 0),)))
    desk.step()
    assert len(desk.worker.cleaned) == 1
    desk.book.put(desk.peer("g1", said=" awake"))
    desk.step(r2="g1")
    desk.settle()
    desk.step()
    assert reached(desk) == {"r2": "g1"}
    (agent,) = desk.nixl.agents
    assert agent.startswith("peer-0 g1 awake")


# ---------------------------------------------------------------------------- vLLM 0.28


class Old:
    """How vLLM 0.28 takes failures: blocks at once, and an assertion at the end."""

    def __init__(self):
        self._failed_recv_reqs, self._recving_metadata = queue.Queue(), {}
        self.invalid = []

    def _handle_failed_transfer(self, request_id, handle):
        self.invalid.append(self._recving_metadata[request_id].local_block_ids)
        self._failed_recv_reqs.put(request_id)

    def get_finished(self):
        failed = set()
        while not self._failed_recv_reqs.empty():
            failed.add(self._failed_recv_reqs.get_nowait())
        for request_id in failed:
            assert self._recving_metadata.pop(request_id, None) is not None
        return set(), failed


def old_worker():
    worker = Old()
    desk = Desk(Push, Role.CONSUMER)
    worker.rankbook = desk.half
    nixl.become(worker, nixl_worker.BookWorker)
    return worker


def test_vllm_0_28_is_told_which_blocks_are_bad():
    worker = old_worker()
    nixl_worker._fail(worker, "r1", BLOCKS)
    assert worker.invalid == [BLOCKS]
    assert worker.get_finished() == (set(), {"r1"})


def test_a_second_failure_of_a_request_does_not_end_vllm_0_28():
    worker = old_worker()
    nixl_worker._fail(worker, "r1", BLOCKS)
    assert worker.get_finished() == (set(), {"r1"})
    worker._failed_recv_reqs.put("r1")  # a handshake that was waited for fails too
    nixl_worker._fail(worker, "r2", BLOCKS)
    assert worker.get_finished() == (set(), {"r2"})


# ------------------------------------------------------------- all threads at once

RESTARTS = 30
PER_START = 10
TOGETHER_S = 30.0


class Threads:
    """The book's thread, the handshakes' and the pushes', until the block ends."""

    def __init__(self, desk):
        self._desk = desk
        self._over = threading.Event()
        self._turns = queue.SimpleQueue()
        self.errors = []
        self._threads = [
            threading.Thread(target=self._loop, args=(work,))
            for work in (self._keep_book, desk.thread.run, desk.worker.write)
        ]

    def put(self, topology):
        """The book learns of it, on its own thread."""
        known = threading.Event()
        self._turns.put((topology, known))
        assert known.wait(TOGETHER_S)

    def _keep_book(self):
        if not self._turns.empty():
            topology, known = self._turns.get()
            self._desk.book.put(topology)
            known.set()
        self._desk.book.serve()

    def _loop(self, work):
        try:
            while not self._over.wait(0.0005):
                work()
        except Exception as error:  # noqa: BLE001 - told by the test
            self.errors.append(error)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join(TOGETHER_S)
        assert not any(thread.is_alive() for thread in self._threads)
        assert self.errors == []


def finish_transfers(desk):
    for handle in tuple(desk.nixl.transfers):
        desk.nixl.transfers[handle] = "DONE"


def test_reads_through_many_restarts_end_once_and_never_at_another_start(consumer):
    desk = consumer(Pull)
    of, ended = {}, collections.Counter()
    deadline = time.monotonic() + TOGETHER_S

    def turn(**receives):
        desk.step(**receives)
        finish_transfers(desk)
        ended.update(desk.results()[0].finished_recving)

    with Threads(desk) as threads:
        for number in range(RESTARTS):
            generation = f"g{number + 1}"
            threads.put(desk.peer(generation))
            for request in range(PER_START):
                of[f"r{number}-{request}"] = generation
                turn(**{f"r{number}-{request}": generation})
        while len(ended) < len(of) and time.monotonic() < deadline:
            turn()
    assert set(ended) == set(of)
    assert set(ended.values()) == {1}
    assert {request: of[request] for request in reached(desk)} == reached(desk)
    assert reached(desk)
    assert len(desk.nixl.agents) <= 1
    assert desk.half.held == {}


def test_pushes_through_many_restarts_never_reach_another_start(producer):
    desk = producer()
    of = {}
    deadline = time.monotonic() + TOGETHER_S

    def turn():
        desk.step()
        finish_transfers(desk)
        desk.results()

    with Threads(desk) as threads:
        for number in range(RESTARTS):
            generation = f"g{number + 1}"
            threads.put(desk.peer(generation))
            for request in range(PER_START):
                name = f"p{number}-{request}"
                of[name] = generation
                desk.worker._reqs_to_process.add(name)
                desk.step(finished=[name])
                registration = desk.registration(f"{name}-there", generation)
                desk.worker._deferred_push_inbox.put((name, BLOCKS, registration))
                turn()
        last = f"p{RESTARTS - 1}-{PER_START - 1}"
        while last not in reached(desk) and time.monotonic() < deadline:
            turn()
        for name in desk.worker._reqs_to_send:
            desk.worker._reqs_to_send[name] = 0.0  # the leases of the rest end
        while (desk.half.parked or desk.half.pushes) and time.monotonic() < deadline:
            turn()
    assert {name: of[name] for name in reached(desk)} == reached(desk)
    assert last in reached(desk)
    assert len(desk.nixl.agents) <= 1
    assert desk.half.parked == []
    assert desk.half.pushes == {}
