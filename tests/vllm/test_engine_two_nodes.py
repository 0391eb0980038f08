"""One engine over two nodes: each node's workers publish their own address.

Two loopback addresses stand for the nodes. The engine_id is left unset, so each
node's command line makes one of its own, and there is no engine core on the
second node: what is known of it comes from its workers alone.
"""

import os
import signal
import time
import uuid

import pytest
from tests.vllm.engine import HERE, family, free_port
from tests.vllm.watcher import Watcher

import rankbook
from rankbook import EngineFilter, Slot, State

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

GROUP = "prefill-two-nodes"


@pytest.fixture(scope="module")
def nodes(start_engine, registry):
    """The node with the engine core, and the one that only lends its worker."""
    grid = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))

    def start(rank, host, *arguments, **options):
        return start_engine(
            settings={"endpoints": registry.address, "group": GROUP, "ttl_s": 60},
            arguments=(*grid, "--node-rank", str(rank), *arguments),
            env={
                "VLLM_HOST_IP": host,
                "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
                "VLLM_PP_LAYER_PARTITION": "3,1",
            },
            **options,
        )

    head = start(0, "127.0.0.1")
    follower = start(1, "127.0.0.2", "--headless", launch=(str(HERE / "headless.py"),))
    try:
        head.wait_serving()
    except RuntimeError as error:
        error.add_note(f"the follower:\n{follower.tail()}")
        raise
    return head, follower


@pytest.fixture(scope="module")
def topology(nodes, registry):
    with rankbook.Client(registry.address) as client:
        (found,) = client.get_group(GROUP, wait_s=30)
    return found


def test_both_nodes_are_one_start_of_one_engine_under_the_id_that_vllm_made(topology, registry):
    with rankbook.Client(registry.address) as client:
        (engine,) = client.list_engines(EngineFilter(group=GROUP)).engines
    assert engine.engine_id == topology.engine.engine_id == str(uuid.UUID(engine.engine_id))
    assert (engine.state, engine.present, engine.declared) == (State.READY, 2, 2)
    assert engine.epoch == 1
    assert {worker.generation for worker in topology.workers} == {engine.generation}
    stages = [(s.pp_rank, s.start_layer, s.end_layer) for s in engine.stages]
    assert stages == [(0, 0, 3), (1, 3, 4)]


def test_each_stage_has_the_address_of_the_node_that_its_worker_runs_on(nodes, topology):
    assert [worker.slot for worker in topology.workers] == [Slot(0, 0, 0), Slot(1, 0, 0)]
    for node, worker, host in zip(nodes, topology.workers, ("127.0.0.1", "127.0.0.2"), strict=True):
        assert [address.host for address in worker.addresses] == [host]
        assert worker.process.pid in family(node.process.pid)
        assert worker.handshake.payload


def test_the_core_is_the_first_nodes(nodes, topology):
    head, _ = nodes
    assert topology.engine.core.process.pid in family(head.process.pid)
    assert [(a.host, a.port) for a in topology.engine.core.addresses] == [
        ("127.0.0.1", head.side_port)
    ]


def test_the_engine_answers_requests_over_both_nodes(nodes):
    assert nodes[0].complete("three here, one there")["usage"]["completion_tokens"] == 4


def test_a_node_whose_vllm_is_killed_with_9_makes_its_engine_degraded_within_2_s(
    nodes, registry, topology
):
    head, follower = nodes
    watcher = Watcher(registry.address, topology.engine.engine_id)
    try:
        watcher.wait_for(lambda state: state is State.READY, 30)
        killed = time.monotonic()
        os.killpg(follower.process.pid, signal.SIGKILL)  # all of its vLLM at once
        at, seen = watcher.wait_for(lambda state: state is not State.READY, 30, since=killed)
        assert at - killed < 2.0
        assert seen.engine.state is State.DEGRADED
        assert seen.engine.missing == (Slot(1, 0, 0),)
        (left,) = seen.workers
        assert left.process.pid in family(head.process.pid)
    finally:
        watcher.close()
