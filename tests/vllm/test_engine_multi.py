"""MultiConnector over two stages, with a child that would refuse the second one."""

import time

import pytest
from tests.vllm.watcher import Watcher

import rankbook
from rankbook import State

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

ENGINE = "prefill-d-0"


@pytest.fixture(scope="module")
def engine(start_engine, registry):
    made = start_engine(
        engine_id=ENGINE,
        connector="MultiConnector",
        # By default vLLM kills its own processes; with time to end they sign out.
        arguments=("--shutdown-timeout", "20"),
        settings={"endpoints": registry.address, "ttl_s": 60, "required": True},
        extra={
            "connectors": [
                {
                    "kv_connector": "NixlPushConnector",
                    "kv_role": "kv_producer",
                    "kv_buffer_device": "cpu",
                },
                {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"shared_storage_path": "/nonexistent"},
                },
            ]
        },
    )
    made.wait_serving()
    return made


def test_it_is_sealed_by_the_time_it_serves_where_required(engine, registry):
    with rankbook.Client(registry.address) as client:
        topology = client.get_topology(ENGINE)
    assert topology.engine.state is State.READY
    assert topology.engine.core.connector == "MultiConnector"
    assert [worker.handshake.format for worker in topology.workers] == ["vllm.nixl"] * 2
    assert all(worker.handshake.payload for worker in topology.workers)


def test_the_child_that_ignores_metadata_is_named_in_the_log(engine):
    assert "ExampleConnector takes no handshake metadata" in engine.log.read_text()


def test_stopping_it_cleanly_takes_it_out_at_once(engine, registry):
    watcher = Watcher(registry.address, ENGINE)
    try:
        watcher.wait_for(lambda state: state is State.READY, 30)
        asked = time.monotonic()
        engine.terminate()
        engine.process.wait(60)
        # The lease would live 60 s more.
        _, seen = watcher.wait_for(lambda state: state is State.GONE, 1.0, since=asked)
        assert seen.workers == ()
    finally:
        watcher.close()
