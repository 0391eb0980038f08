"""NIXL's workers with the book: peers that it does not know, which are dialled.

See `nixl_desk` for what is real in these tests. Here vLLM's own socket is a stand-in too:
it answers at an address, as the listener of whoever is there would.
"""

import contextlib
import dataclasses
import importlib.util
import time
import warnings

import pytest

from rankbook.errors import BadRecord, LimitExceeded
from rankbook.model import KvCache, Slot

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    import msgspec
    from tests.vllm.nixl_desk import (
        PEER,
        Pull,
        Push,
        agent_metadata,
        both,
        consumer,
        published,
        reached,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlConnectorMetadata,
        NixlHandshakePayload,
    )

    from rankbook_vllm._vllm.nixl_socket import MOST_BLOCKS, check_blocks

HOST, PORT = "10.0.0.9", 5600


class Listener:
    """Who answers at HOST:PORT."""

    def __init__(self):
        self.payload = published(PEER, "dialled", Slot())
        self.dialled = []

    @contextlib.contextmanager
    def zmq_ctx(self, kind, address):
        self.dialled.append(address)
        yield self

    def setsockopt(self, *_):
        pass

    def send(self, message):
        pass

    def recv_multipart(self):
        return [self.payload, msgspec.msgpack.encode(time.perf_counter())]


@pytest.fixture
def listener(monkeypatch):
    """Before a desk is made: its worker puts the book before this socket."""
    made = Listener()
    monkeypatch.setattr(base_worker, "zmq_ctx", made.zmq_ctx)
    return made


def ask(desk, request_id):
    """A step with a request that says where its peer is, and nothing of its start."""
    meta = NixlConnectorMetadata()
    desk.receive(meta, request_id, "")
    remote = meta.reqs_to_recv[request_id].remote
    remote.host, remote.port = HOST, PORT
    for registration in meta.push_registrations.values():
        registration |= {"remote_host": HOST, "remote_port": PORT}
    desk.worker.start_load_kv(meta)


def dialled(desk, request_id="first"):
    """A consumer that has asked the peer itself, for a request that is not over."""
    ask(desk, request_id)
    desk.settle()
    desk.step()
    desk.settle()
    assert reached(desk) == {request_id: "dialled"}
    return desk


def end(desk, request_id="first"):
    """The KV of a request has come."""
    for handle in desk.worker._recving_transfers.get(request_id, ()):
        desk.nixl.transfers[handle] = "DONE"
    if isinstance(desk.worker, Push):
        desk.worker._pending_completion_notifs.put(f"{request_id}:1".encode())
    assert request_id in desk.results()[0].finished_recving
    desk.nixl.sent.clear()
    desk.worker.moved.clear()


def turns(desk):
    for _ in range(3):
        desk.step()
        desk.settle()


@both
def test_a_peer_that_was_dialled_is_dialled_once_while_the_book_does_not_know_it(
    listener, consumer, kind
):
    desk = dialled(consumer(kind))
    end(desk)
    ask(desk, "second")
    turns(desk)
    assert reached(desk) == {"second": "dialled"}
    assert listener.dialled == [f"tcp://{HOST}:{PORT}"]
    assert desk.worker.cleaned == []


@both
def test_what_was_dialled_is_let_go_when_the_book_knows_the_engine(listener, consumer, kind):
    """Whoever answered there, a request of the book's start never goes to him."""
    desk = dialled(consumer(kind))
    end(desk)
    desk.book.put(desk.peer("g1"))
    desk.step(second="g1")
    turns(desk)
    assert reached(desk) == {"second": "g1"}
    assert len(desk.nixl.agents) == 1


@both
def test_the_start_after_the_one_that_was_dialled_is_reached(listener, consumer, kind):
    desk = dialled(consumer(kind))
    end(desk)
    for generation in ("g1", "g2"):
        desk.book.put(desk.peer(generation))
        turns(desk)
    desk.step(second="g2")
    turns(desk)
    assert reached(desk) == {"second": "g2"}


def test_a_read_under_way_keeps_what_was_dialled(listener, consumer):
    desk = dialled(consumer(Pull))
    desk.book.put(desk.peer("g1"))
    desk.step(second="g1")
    turns(desk)
    assert desk.worker.cleaned == []
    assert set(desk.half.held) == {"second"}
    end(desk)
    turns(desk)
    assert reached(desk) == {"second": "g1"}


@both
def test_an_engine_that_comes_while_it_is_dialled_is_shaken_hands_with_by_the_book(
    listener, consumer, kind
):
    desk = consumer(kind)
    ask(desk, "first")
    desk.worker.write()  # the handshake is next
    desk.book.put(desk.peer("g1"))
    desk.settle()
    turns(desk)
    assert reached(desk) == {"first": "g1"}


def test_a_dialled_handshake_that_fails_leaves_nothing_for_the_next(listener, consumer):
    """vLLM keeps the first block counts that it was told of an engine."""
    desk = consumer(Pull)
    desk.worker.fails_at = 1
    ask(desk, "first")
    desk.settle()
    assert desk.failed() == {"first"}
    assert listener.dialled
    assert desk.empty()


def test_a_dialled_peer_of_too_many_blocks_is_not_taken_note_of(listener, consumer):
    desk = consumer(Pull)
    listener.payload = payload(num_blocks=MOST_BLOCKS + 1)
    ask(desk, "first")
    desk.settle()
    assert desk.failed() == {"first"}
    assert listener.dialled
    assert desk.nixl._names == 0  # nobody was added, and nothing prepared


@both
def test_a_dialled_peer_that_vllm_has_let_go_of_is_not_remembered(listener, consumer, kind):
    desk = dialled(consumer(kind))
    end(desk)
    desk.worker._engine_ttl = 0.001
    desk.worker._engine_last_active[PEER] = 0.0
    desk.worker._ensure_handshake("peer-1", "peer-1", 0, 1)
    assert [one for one, _ in desk.worker.cleaned] == [PEER]
    assert PEER not in desk.pairs._made


# --------------------------------------------------------------- how much there is


def payload(without=(), **changes):
    """As vLLM would encode it; `without` what an older one does not have."""
    said = dataclasses.asdict(agent_metadata(PEER, b"agent")) | changes
    inner = {name: value for name, value in said.items() if name not in without}
    return msgspec.msgpack.encode(NixlHandshakePayload("same", msgspec.msgpack.encode(inner)))


LATER = (
    "block_strides",
    "dcp_size",
    "pcp_size",
    "ple_block_len",
    "packed_member_layouts",
    "region_group_ids",
    "region_members",
    "region_mem_types",
    "region_names",
    "region_num_blocks",
)
"""What vLLM 0.28 does not have."""


@pytest.mark.parametrize("without", [(), LATER], ids=["now", "0.28"])
@pytest.mark.parametrize(
    ("kv", "said"),
    [
        (KvCache(num_blocks=256), {}),
        (KvCache(), {}),
        (None, {}),
        # A record of the cache's own blocks, of which NIXL makes several.
        (KvCache(num_blocks=64), {"physical_blocks_per_logical_kv_block": 4}),
        # As many as there may be.
        (None, {"num_blocks": MOST_BLOCKS // 4, "kv_caches_base_addr": [0] * 4}),
    ],
    ids=["the same", "not published", "no record", "logical", "the most"],
)
def test_a_payload_that_agrees_with_its_record_is_taken(without, kv, said):
    check_blocks("peer-0 pp0 tp0", payload(without, **said), kv)


@pytest.mark.parametrize("without", [(), LATER], ids=["now", "0.28"])
def test_blocks_that_contradict_the_record_are_refused_with_both_values(without):
    with pytest.raises(BadRecord, match="peer-0 pp0 tp0 has 8000000 blocks, its record 256") as bad:
        check_blocks(
            "peer-0 pp0 tp0", payload(without, num_blocks=8_000_000), KvCache(num_blocks=256)
        )
    assert bad.value.metadata["value"] == "8000000"
    assert "256" in bad.value.metadata["rule"]


@pytest.mark.parametrize("counts", [[256], [256, 256, 256], [1 << 40, -(1 << 40)]])
def test_counts_that_are_not_one_for_each_region_are_refused(counts):
    said = payload(kv_caches_base_addr=[0, 0], region_num_blocks=counts)
    with pytest.raises(BadRecord, match="2 regions"):
        check_blocks("peer-0 pp0 tp0", said, KvCache(num_blocks=256))


A_QUARTER = MOST_BLOCKS // 4 + 1


@pytest.mark.parametrize(
    "said",
    [
        {"num_blocks": A_QUARTER, "kv_caches_base_addr": [0] * 4},
        {"region_num_blocks": [A_QUARTER] * 4, "kv_caches_base_addr": [0] * 4},
        # A state-space layer has a state for each of the cache's own blocks.
        {"num_blocks": A_QUARTER, "region_num_blocks": [1] * 4, "kv_caches_base_addr": [0] * 4},
    ],
    ids=["all the same", "each its own", "states"],
)
def test_more_blocks_than_any_device_has_are_refused_though_the_record_agrees(said):
    kv = KvCache(num_blocks=said.get("num_blocks", 256))
    with pytest.raises(LimitExceeded) as over:
        check_blocks("peer-0 pp0 tp0", payload(**said), kv)
    assert over.value.metadata["value"] == str(MOST_BLOCKS + 4)
    assert over.value.metadata["bound"] == str(MOST_BLOCKS)


@pytest.mark.parametrize("said", [b"", b"\x00", msgspec.msgpack.encode({"some": "thing"})])
def test_what_cannot_be_read_is_left_to_vllm(said):
    check_blocks("peer-0 pp0 tp0", said, KvCache(num_blocks=256))


@both
def test_a_record_that_contradicts_its_payload_is_refused_before_nixl(consumer, kind):
    desk = consumer(kind)
    peer = desk.peer("g1")
    workers = tuple(
        dataclasses.replace(one, kv=dataclasses.replace(one.kv, num_blocks=8))
        for one in peer.workers
    )
    desk.book.put(dataclasses.replace(peer, workers=workers))
    desk.step(first="g1")
    desk.settle()
    assert desk.failed() == {"first"}
    assert desk.nixl._names == 0
    assert desk.empty()
