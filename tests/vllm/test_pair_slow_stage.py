"""MultiConnector on both sides, one stage that is slow, and a registry that goes away.

Three things that have nothing to do with each other, on one pair, since a pair
costs half a minute. The last stage takes half a second more for each push, so
whoever counts the first stage's notice as the whole is seen to.
"""

from __future__ import annotations

import time

import pytest
from tests.vllm.engine import Refused, Registry, free_port
from tests.vllm.pair import Moved, Pair, bytes_of
from tests.vllm.truth import ANSWER_TOKENS, PROMPTS, prompt

import rankbook
from rankbook import State

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

SLOW_S = 0.5
PEER_TIMEOUT_S = 3.0


def children(role: str) -> dict:
    """A child that shakes hands, and one that knows nothing of stages."""
    return {
        "connectors": [
            {"kv_connector": "NixlPushConnector", "kv_role": role, "kv_buffer_device": "cpu"},
            {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": "/nonexistent"},
            },
        ]
    }


@pytest.fixture(scope="module")
def own_registry(logs):
    server = Registry(logs, free_port())
    yield server
    server.stop()


@pytest.fixture(scope="module")
def pair(start_engine, own_registry):
    made = Pair(
        start_engine,
        own_registry.address,
        connector="MultiConnector",
        pp_size=2,
        partition="3,1",
        settings={"side_channel": False, "peer_timeout_s": PEER_TIMEOUT_S},
        producer={"extra": children("kv_producer"), "env": {"SLOW_STAGE": f"1:{SLOW_S}"}},
        consumer={"extra": children("kv_consumer")},
    )
    with made:
        made.wait_ready()
        yield made


def test_a_request_waits_for_the_notice_of_its_slowest_stage(pair, truth):
    for asked in (prompt(70), prompt(200), prompt(33)):
        before = pair.moved()
        answer = pair.ask(asked, ANSWER_TOKENS)
        assert answer.tokens == truth(asked)
        assert answer.decode_s >= SLOW_S
        moved = pair.wait_moved(before, bytes_of(asked))
        assert moved == Moved(tokens=len(asked), computed=0, bytes=bytes_of(asked))
    assert pair.wait_blocks_free() == {"producer": 0.0, "consumer": 0.0}
    assert pair.failures() == {}


def test_what_has_shaken_hands_serves_without_a_registry_and_the_rest_gets_a_reason(
    pair, truth, own_registry, logs
):
    asked = prompt(70)
    own_registry.stop()
    assert pair.ask(asked, ANSWER_TOKENS).tokens == truth(asked)

    def unknown(params):
        return {**params, "remote_engine_id": "nobody", "remote_generation": ""}

    sent = time.monotonic()
    with pytest.raises(Refused):
        pair.ask(asked, change_params=unknown)
    assert time.monotonic() - sent < PEER_TIMEOUT_S + 5.0
    log = pair.consumer.log.read_text()
    assert "engine nobody is not known here and the registry is away" in log
    assert "lost the registry" in log
    for other in PROMPTS[:3]:
        assert pair.ask(other, ANSWER_TOKENS).tokens == truth(other)

    # The next registry has an empty book; nobody is restarted for it.
    port = int(own_registry.address.rpartition(":")[2])
    again = Registry(logs, port)
    try:
        with rankbook.Client(again.address) as client:
            for engine in (pair.producer, pair.consumer):
                state = client.get_topology(engine.engine_id, wait_s=60).engine.state
                assert state is State.READY
        assert pair.ask(asked, ANSWER_TOKENS).tokens == truth(asked)
    finally:
        again.stop()
