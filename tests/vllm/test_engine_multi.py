"""MultiConnector over two stages: a child that would drop one ends the start, by name."""

import os
import time
from pathlib import Path

import pytest
from tests.vllm.watcher import Watcher

import rankbook
from rankbook import EngineFilter, State

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

HERE = Path(__file__).parent
ENGINE = "prefill-d-0"
OURS = EngineFilter(engine_id=ENGINE)
NOWHERE = {"shared_storage_path": "/nonexistent"}


@pytest.fixture(scope="module")
def watcher(registry):
    made = Watcher(registry.address, ENGINE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def log(start_engine, registry, watcher):
    """What an engine said that did not start."""
    engine = start_engine(
        engine_id=ENGINE,
        connector="MultiConnector",
        settings={"endpoints": registry.address, "ttl_s": 60},
        env={"PYTHONPATH": os.pathsep.join([str(HERE / "quiet"), str(HERE)])},
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
                    "kv_connector_extra_config": NOWHERE,
                },
                {
                    "kv_connector": "FirstStageConnector",
                    "kv_connector_module_path": "first_stage_connector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": NOWHERE,
                },
            ]
        },
    )
    assert engine.process.wait(240) != 0
    return engine.log.read_text()


def test_a_child_that_would_drop_a_stage_ends_the_start_by_name_with_what_to_do(log):
    assert "FirstStageConnector needs its peers' handshake metadata" in log
    assert "of 2 it would keep the first" in log
    assert "Set pipeline_parallel_size to 1, or take a connector that knows stages" in log
    assert "Application startup complete" not in log


def test_a_child_that_ignores_metadata_is_named_and_does_not_end_it(log):
    passed = log.index("ExampleConnector takes no handshake metadata")
    assert passed < log.index("FirstStageConnector needs")


def test_nobody_was_told_that_it_may_be_used(log, watcher, registry):
    with rankbook.Client(registry.address) as client:
        deadline = time.monotonic() + 30
        states = [State.FORMING]
        while any(state is not State.GONE for state in states):
            assert time.monotonic() < deadline, states
            states = [one.state for one in client.list_engines(OURS).engines]
    assert State.READY not in watcher.states
