"""An engine does not need the registry to start, to serve, or to outlive it."""

import time

import pytest
from tests.vllm.engine import Registry, free_port
from tests.vllm.watcher import Watcher

import rankbook
from rankbook import State

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

ENGINE = "prefill-b-0"
TTL_S = 3.0


@pytest.fixture(scope="module")
def registry_port():
    return free_port()


@pytest.fixture(scope="module")
def engine(start_engine, registry_port):
    """Started with nobody at the registry's address."""
    made = start_engine(
        engine_id=ENGINE,
        env={
            "RANKBOOK_SERVER": f"127.0.0.1:{registry_port}",
            "RANKBOOK_GROUP": "prefill-b",
            "RANKBOOK_TTL_S": str(TTL_S),
        },
    )
    made.wait_serving()
    return made


def ready(port):
    """The engine once it is READY; the registry may still be starting."""
    with rankbook.Client(f"127.0.0.1:{port}") as client:
        for topology in (
            event.topology for event in client.watch(rankbook.EngineFilter(engine_id=ENGINE))
        ):
            if topology.engine.state is State.READY:
                return topology
    raise AssertionError("the watch ended")


def test_it_starts_and_serves_without_a_registry_and_says_so(engine):
    assert engine.complete("nobody there")["usage"]["completion_tokens"] == 4
    assert "no epoch for this start" in engine.log.read_text()


def test_it_signs_in_and_seals_when_the_registry_comes(engine, registry_port, tmp_path):
    came = time.monotonic()
    server = Registry(tmp_path, registry_port)
    try:
        topology = ready(registry_port)
        assert time.monotonic() - came < 20
        stages = [(s.pp_rank, s.start_layer, s.end_layer) for s in topology.engine.stages]
        assert stages == [(0, 0, 2), (1, 2, 4)]
        assert topology.engine.group == "prefill-b"
    finally:
        server.stop()


def test_it_is_back_after_a_registry_that_lost_its_book_and_frozen_it_is_out_by_the_ttl(
    engine, registry_port, tmp_path
):
    server = Registry(tmp_path, registry_port)
    watcher = Watcher(server.address, ENGINE)
    try:
        watcher.wait_for(lambda state: state is State.READY, 60)
        frozen = time.monotonic()
        engine.freeze()
        at, _ = watcher.wait_for(lambda state: state is not State.READY, 30, since=frozen)
        assert at - frozen < TTL_S + 1.0
        _, seen = watcher.wait_for(lambda state: state is State.GONE, 10, since=frozen)
        assert seen.workers == ()
    finally:
        watcher.close()
        server.stop()
