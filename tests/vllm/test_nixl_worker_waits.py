"""NIXL's workers with the book: what became of a request's blocks while it waited."""

import importlib.util
import logging
import time
import warnings
from types import SimpleNamespace

import pytest

from rankbook.model import Role, State
from rankbook_vllm.config import Settings
from rankbook_vllm.requests import WAITED, Requests, Verdict

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    from tests.vllm.nixl_desk import (
        BLOCKS,
        LEASE_S,
        OWN,
        PEER,
        Desk,
        Orders,
        Parts,
        Pull,
        both,
        consumer,
        log,
        producer,
        reached,
        said,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlConnectorMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )


# --------------------------------------------------------------------------- too late


def test_blocks_that_were_freed_while_the_handshake_waited_are_sent_to_nobody(producer, log):
    desk = producer()
    desk.book.put(desk.peer("g1", state=State.COMPLETE))
    desk.push("p1")
    desk.worker._reqs_to_send["p1"] = time.perf_counter() - 1  # vLLM's lease is over
    assert desk.results()[0].finished_sending == {"p1"}
    desk.book.put(desk.peer("g1"))
    desk.settle()
    desk.step()
    desk.settle()
    assert desk.worker.moved == []
    assert (
        "p1-there of peer-0 waited for the blocks of request p1 until they were freed" in log.text
    )
    assert desk.pairs.counted()["late"] == 1


@both
def test_a_handshake_that_took_as_long_as_blocks_are_kept_fails_the_request(consumer, log, kind):
    desk = consumer(kind, peer_timeout_s=3600.0)
    desk.book.put(desk.peer("g1", state=State.COMPLETE))
    desk.step(r1="g1")
    desk.settle()
    desk.now_s += LEASE_S * WAITED + 1
    desk.book.put(desk.peer("g1"))
    desk.settle()
    desk.step()
    desk.settle()
    assert reached(desk) == {}
    assert desk.failed() == {"r1"}
    assert "the handshake with peer-0 took longer than" in log.text
    desk.step(r2="g1")  # who comes now has waited for nothing
    desk.settle()
    desk.step()
    assert reached(desk) == {"r2": "g1"}


@both
def test_a_handshake_that_was_soon_over_serves_the_request(consumer, kind):
    desk = consumer(kind)
    desk.book.put(desk.peer("g1", state=State.COMPLETE))
    desk.step(r1="g1")
    desk.settle()
    desk.now_s += LEASE_S * WAITED - 1
    desk.book.put(desk.peer("g1"))
    desk.settle()
    desk.step()
    assert reached(desk) == {"r1": "g1"}


def test_a_second_registration_of_what_was_sent_is_not_late(producer):
    """Each rank of a consumer asks."""
    desk = producer()
    desk.book.put(desk.peer("g1"))
    desk.push("r-11111111")
    for handle in desk.nixl.transfers:
        desk.nixl.transfers[handle] = "DONE"
    assert desk.results()[0].finished_sending == {"r-11111111"}
    desk.say("r-22222222")
    assert desk.pairs.counted().get("late", 0) == 0


def test_a_parked_push_of_freed_blocks_is_told_of_though_its_start_never_comes(producer, log):
    desk = producer()
    desk.book.put(desk.peer("g1"))
    desk.push("p1")
    desk.push("p2", "g2")  # of a start that the book does not show
    assert [push[0] for push in desk.half.parked] == ["p2"]
    desk.worker._reqs_to_send["p2"] = 0.0  # vLLM's lease is over
    assert "p2" in desk.results()[0].finished_sending
    desk.step()
    assert desk.half.parked == []
    assert (
        "p2-there of peer-0 waited for the blocks of request p2 until they were freed" in log.text
    )


def test_two_producers_that_listen_at_localhost_are_two(consumer):
    """vLLM takes the second at an address for the first one started anew."""
    desk = consumer(Pull)
    names = ("peer-a", "peer-b")
    for name in names:
        desk.book.put(desk.peer("g1", engine_id=name, listens=("localhost", 5600)))
    asked = Requests(
        desk.book, Settings(), logging.getLogger("rankbook"), time.monotonic, needs_block_ids=True
    )
    for turn in range(2):
        for name in names:
            request_id = f"{name}-{turn}"
            params = {
                "do_remote_prefill": True,
                "remote_engine_id": name,
                "remote_request_id": "there",
                "remote_block_ids": [[1, 2]],
            }
            assert asked.ask(request_id, params) is Verdict.GO
            meta = NixlConnectorMetadata()
            meta.add_new_req_to_recv(request_id, BLOCKS, params, awaiting_kvs=True)
            meta.rankbook = Orders({request_id: "g1"}, {})
            desk.worker.start_load_kv(meta)
            desk.settle()
            desk.step()
            for handle in desk.nixl.transfers:
                desk.nixl.transfers[handle] = "DONE"
            desk.results()
            desk.results()
    assert desk.pairs.counted()["shaken"] == 2


# ------------------------------------------------------------------ blocks that do not fit


class Reads(Parts, NixlPullConnectorWorker):
    """vLLM's own reading; NIXL's last calls are stand-ins."""

    def __init__(self, **options):
        super().__init__(**options)
        self.use_mla = self._has_mamba = self._mixed_mem_types = False
        self._uses_region_group_mapping = False
        self.kv_cache_config = SimpleNamespace(transfer_groups=[1], transfer_group_ids=[0])
        self._group_spec_types = (object,)
        self.region_group_ids, self.num_regions = [0], 1
        self.block_size, self.num_blocks = 16, 8
        self.src_xfer_handles_by_block_size = {16: 1}
        self.dst_num_blocks[OWN], self.dst_region_num_blocks[OWN] = 8, [8]
        self.transfer_topo.tp_ratio = lambda tp_size: 1
        self.transfer_topo.get_engine_info = lambda engine_id: SimpleNamespace(
            remote_block_size=16,
            remote_physical_blocks_per_logical=1,
            remote_tp_size=1,
            remote_dcp_size=1,
        )
        self.nixl_wrapper.make_prepped_xfer = lambda *args, **options: 1
        self.nixl_wrapper.transfer = lambda handle: None
        self.nixl_wrapper.transfers[1] = "PROC"

    def add_remote_agent(self, metadata, *args, **options):
        agent = super().add_remote_agent(metadata, *args, **options)
        engine_id = metadata.engine_id
        ranks = {"all_source_ranks": [0], "source_ranks_per_group": [[0]], "local_consumers": 1}
        self.tp_mappings[engine_id] = SimpleNamespace(**ranks)
        self.dst_region_group_ids[engine_id] = [0]
        self.dst_num_blocks[engine_id], self.dst_region_num_blocks[engine_id] = 8, [8]
        self.dst_uses_region_group_mapping[engine_id] = False
        return agent

    def _compute_desc_ids(self, block_ids, **options):
        return [block for group in block_ids for block in group]

    def write(self):
        """Pull has no thread of its own."""


def read(remote_blocks, **more):
    """A worker that was told to read these blocks into two of its own."""
    desk = Desk(Reads, Role.CONSUMER, bidirectional=bool(more))
    desk.connector = "NixlPullConnector"
    desk.book.put(desk.own())
    desk.book.put(desk.peer("g1"))
    meta = NixlConnectorMetadata()
    params = {
        "remote_engine_id": PEER,
        "remote_request_id": "there",
        "remote_block_ids": remote_blocks,
        "remote_host": PEER,
        "remote_port": 0,
    }
    meta.add_new_req_to_recv("r1", ([4, 5],), params | more, awaiting_kvs=True)
    meta.rankbook = Orders({"r1": "g1"}, {})
    desk.worker.start_load_kv(meta)
    desk.settle()
    desk.step()
    return desk


def test_blocks_that_fit_are_read():
    desk = read([[1, 2]])
    assert desk.worker._recving_transfers == {"r1": [1]}
    assert desk.failed() == set()


@pytest.mark.parametrize(
    ("remote_blocks", "more"),
    [
        ([1, 2], {}),
        ([[1]], {}),
        ([[]], {}),
        ([[1, 2]], {"remote_blocks_expiry_time": "soon"}),
    ],
    ids=["in no group", "too few", "none", "a time that is text"],
)
def test_blocks_that_do_not_fit_fail_the_request_and_end_no_worker(log, remote_blocks, more):
    desk = read(remote_blocks, **more)
    assert desk.failed() == {"r1"}
    assert said(log, "request r1 fails: what it says of its blocks at peer-0 does not fit") == 1
    desk.step()
    assert desk.failed() == set()
