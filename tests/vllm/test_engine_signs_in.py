"""The main job: a real engine of two stages is in the book, whole and true.

The split is 3,1 so that nothing can be right by dividing. The lease lives 60 s,
so that what is seen within seconds was not its expiry.
"""

import datetime as dt
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.vllm.engine import family
from tests.vllm.watcher import Watcher

import rankbook
from rankbook import Role, Slot, State

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

ENGINE = "prefill-a-0"


@pytest.fixture(scope="module")
def engine(start_engine, registry):
    made = start_engine(
        engine_id=ENGINE,
        settings={"endpoints": registry.address, "group": "prefill-a", "ttl_s": 60}
        | {"labels": {"zone": "a"}},
        env={"VLLM_PP_LAYER_PARTITION": "3,1"},
        fork=False,
    )
    made.wait_serving()
    return made


@pytest.fixture(scope="module")
def topology(engine, registry):
    """What another process gets: this one, which knows the registry and a name."""
    with rankbook.Client(registry.address) as client:
        return client.get_topology(ENGINE, wait_s=30)


def ask_side_channel(engine, pp_rank):
    """What vLLM's own listener answers for a stage: payload and clock."""
    import msgspec
    import zmq

    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{engine.side_port}")
        socket.send(msgspec.msgpack.encode((b"get_meta_msg", pp_rank, 0)))
        payload, clock = socket.recv_multipart()
    return payload, msgspec.msgpack.decode(clock)


def test_the_engine_is_sealed_with_every_stage(topology):
    assert topology.engine.state is State.READY
    assert (topology.engine.present, topology.engine.declared) == (2, 2)
    assert topology.engine.epoch == 1
    assert topology.engine.group == "prefill-a"
    assert topology.engine.role is Role.PRODUCER
    assert topology.engine.seal.number == 1
    assert {worker.generation for worker in topology.workers} == {topology.engine.generation}


def test_every_stage_has_its_true_layers(topology):
    stages = [(s.pp_rank, s.start_layer, s.end_layer) for s in topology.engine.stages]
    assert stages == [(0, 0, 3), (1, 3, 4)]
    names = [worker.layers.names for worker in topology.workers]
    assert names == [
        tuple(f"model.layers.{index}.self_attn.attn" for index in range(3)),
        ("model.layers.3.self_attn.attn",),
    ]


@pytest.mark.parametrize("pp_rank", [0, 1])
def test_the_payload_is_byte_for_byte_what_vllm_itself_serves(engine, topology, pp_rank):
    served, _ = ask_side_channel(engine, pp_rank)
    worker = topology.worker(pp_rank, 0)
    assert worker.handshake.format == "vllm.nixl"
    assert worker.handshake.payload == served


def test_the_payload_is_that_stages_own(topology):
    import msgspec

    for worker in topology.workers:
        payload = msgspec.msgpack.decode(worker.handshake.payload)
        agent = msgspec.msgpack.decode(payload["agent_metadata_bytes"])
        assert agent["engine_id"] == ENGINE
        if "region_names" in agent:  # not in vLLM 0.28
            assert tuple(agent["region_names"]) == worker.layers.names
        assert worker.compat.hash == payload["compatibility_hash"]
        assert worker.kv.block_len_bytes == agent["block_lens"][0]


def test_a_record_has_the_geometry_of_the_model_and_its_cache(topology):
    for worker in topology.workers:
        assert worker.layout.num_layers == 4
        assert (worker.model.total_num_kv_heads, worker.model.head_size) == (4, 32)
        assert (worker.model.dtype, worker.model.is_mla) == ("float32", False)
        # K and V of 4 heads x 32 values x 32 tokens in float32.
        assert (worker.kv.block_size, worker.kv.block_len_bytes) == (32, 2 * 4 * 32 * 32 * 4)
        assert worker.kv.num_blocks == 256
        assert worker.compat.factors["connector"] == "NixlPushConnector"
        assert worker.compat.factors["transfer_mode"] == "push"
        assert worker.labels == {"zone": "a"}
        assert [address.host for address in worker.addresses] == ["127.0.0.1"]


def test_each_record_is_held_by_its_own_worker_process_of_the_engine(engine, topology):
    pids = [worker.process.pid for worker in topology.workers]
    assert len(set(pids)) == 2
    assert set(pids) < set(family(engine.process.pid))


def test_the_core_says_where_it_listens_and_what_its_clock_reads(engine, topology):
    core = topology.engine.core
    assert core.connector == "NixlPushConnector"
    assert [(a.scheme, a.host, a.port, a.label) for a in core.addresses] == [
        ("zmq", "127.0.0.1", engine.side_port, "side-channel")
    ]
    assert core.process.pid in family(engine.process.pid)
    # The registry is on this machine, so this machine's clock is the registry's.
    before = dt.datetime.now(dt.UTC)
    _, reading = ask_side_channel(engine, 0)
    after = dt.datetime.now(dt.UTC)
    early, late = (
        core.clock.local_s + (now - core.clock.registry_time).total_seconds()
        for now in (before, after)
    )
    assert early - core.clock.error_s - 0.01 <= reading <= late + core.clock.error_s + 0.01


def test_an_operator_sees_it(registry, topology):
    def run(*arguments):
        command = [Path(sys.executable).with_name("rankbook"), "--server", registry.address]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = json.loads(run("-o", "json", "topology", ENGINE))
    assert shown["state"] == "READY"
    assert shown["stages"] == [
        {"pp_rank": 0, "start_layer": 0, "end_layer": 3},
        {"pp_rank": 1, "start_layer": 3, "end_layer": 4},
    ]
    table = run("topology", ENGINE)
    assert ENGINE in table
    assert "READY" in table


def test_the_engine_answers_requests_as_ever(engine):
    answer = engine.complete("three layers here, one there", max_tokens=5)
    assert answer["usage"]["completion_tokens"] == 5


def test_a_worker_killed_with_9_is_out_of_ready_within_2_s_and_its_engine_then_gone(
    engine, registry, topology
):
    watcher = Watcher(registry.address, ENGINE)
    core = topology.engine.core.process.pid
    try:
        watcher.wait_for(lambda state: state is State.READY, 30)
        # vLLM ends the other workers within a tenth of a second; held, it shows
        # what the book alone knows of the one that died.
        os.kill(core, signal.SIGSTOP)
        killed = time.monotonic()
        os.kill(topology.worker(1, 0).process.pid, signal.SIGKILL)
        at, seen = watcher.wait_for(lambda state: state is not State.READY, 30, since=killed)
        assert at - killed < 2.0
        assert seen.engine.state is State.DEGRADED
        assert seen.engine.missing == (Slot(1, 0, 0),)
        assert [worker.slot for worker in seen.workers] == [Slot(0, 0, 0)]
        os.kill(core, signal.SIGCONT)
        _, seen = watcher.wait_for(lambda state: state is State.GONE, 60, since=killed)
        assert seen.workers == ()
    finally:
        watcher.close()
