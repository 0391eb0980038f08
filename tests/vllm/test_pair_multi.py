"""MultiConnector from both ends: from here with vLLM's children, and vLLM's with ours.

The producer, of two stages, runs vLLM's own MultiConnector with children from here;
the consumer runs ours with children as vLLM has them. The producer keeps blocks for
a few seconds only, so that a request can come too late.
"""

from __future__ import annotations

import re
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.vllm import forged
from tests.vllm.engine import NoAnswer
from tests.vllm.pair import Moved, bytes_of
from tests.vllm.pair_claims import ASKED, listens, nixl_is_not_asked, wait_said
from tests.vllm.truth import ANSWER_TOKENS, PROMPTS
from tests.vllm.watcher import Watcher

import rankbook
from rankbook import State

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

NAME = "multi"
LEASE_S = 4
"""vLLM's kv_lease_duration at the producer."""
VLLMS_OWN = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"


def children(role: str, settings: dict | None = None) -> dict:
    """A child that shakes hands, and one that knows nothing of stages.

    With settings they are ours, and these are theirs.
    """
    ours = {"kv_connector_module_path": "rankbook_vllm.connectors"} if settings else {}
    book = {"rankbook": settings} if settings else {}
    return {
        "connectors": [
            {
                "kv_connector": "NixlPushConnector",
                "kv_role": role,
                "kv_buffer_device": "cpu",
                "kv_connector_extra_config": {"kv_lease_duration": LEASE_S, **book},
                **ours,
            },
            {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": "/nonexistent", **book},
                **ours,
            },
        ]
    }


@pytest.fixture(scope="module")
def pair(truth, registry, make_pair):
    settings = {"required": True, "side_channel": False, "prewarm": True}
    childs = {"endpoints": registry.address, "ttl_s": 60, "group": f"prefill-{NAME}", **settings}
    with make_pair(
        connector="MultiConnector",
        pp_size=2,
        partition="3,1",
        name=NAME,
        settings=settings,
        producer={
            "module": VLLMS_OWN,
            "extra": children("kv_producer", childs),
            # By default vLLM kills its own processes; with time to end they sign out.
            "arguments": ("--shutdown-timeout", "20"),
        },
        consumer={"extra": children("kv_consumer")},
    ) as made:
        yield made


def test_both_are_sealed_by_the_time_they_serve_where_required(pair, registry):
    with rankbook.Client(registry.address) as client:
        producer = client.get_topology(pair.producer.engine_id)
        consumer = client.get_topology(pair.consumer.engine_id)
    assert (producer.engine.state, consumer.engine.state) == (State.READY, State.READY)
    # Who signs in is who the book names: the child there, the parent here.
    assert producer.engine.core.connector == "NixlPushConnector"
    assert consumer.engine.core.connector == "MultiConnector"
    workers = (*producer.workers, *consumer.workers)
    assert [worker.handshake.format for worker in workers] == ["vllm.nixl"] * 3
    assert all(worker.handshake.payload for worker in workers)


def test_the_child_that_ignores_metadata_is_named_in_the_log(pair):
    assert "ExampleConnector takes no handshake metadata" in pair.producer.log.read_text()


def test_kv_moves_between_them_by_the_book_alone(pair, truth):
    assert [listens(engine.side_port) for engine in (pair.producer, pair.consumer)] == [False] * 2
    for asked in PROMPTS[:6]:
        before = pair.moved()
        answer = pair.ask(asked, ANSWER_TOKENS)
        assert (answer.tokens, answer.finish_reason) == (truth(asked), "length")
        moved = pair.wait_moved(before, bytes_of(asked))
        assert moved == Moved(tokens=len(asked), computed=0, bytes=bytes_of(asked))
    assert pair.failures() == {}
    assert pair.wait_blocks_free() == {"producer": 0.0, "consumer": 0.0}


def test_a_consumer_with_stages_is_refused_by_the_producer_before_any_request(pair, forger):
    """vLLM itself starts no such consumer: of this one there are the records only."""
    name = f"two-stages-{NAME}"
    with nixl_is_not_asked(pair.producer) as said:
        forger.publish(name, pair.consumer.engine_id, forged.consumer_of_two_stages)
        for stage in ("PP0", "PP1"):
            wait_said(pair.producer, rf"Worker_{stage} .*{pair.producer} cannot give KV to {name}")
    refusals = [line for line in said[0].splitlines() if name in line]
    assert len(refusals) == 2
    for refusal in refusals:
        assert "no handshake in advance" in refusal
        assert "PP_CONSUMER_UNSUPPORTED: consumer has 2 pipeline stages" in refusal
        assert "use pp_size 1 on the consumer" in refusal


def test_a_registration_that_comes_after_its_blocks_expired_is_told_of_with_both_names(pair, truth):
    """vLLM itself keeps it for ever and says nothing, while the decode engine waits."""
    request_ids = [str(uuid.uuid4()) for _ in range(2)]
    params = [pair.prefill(ASKED, request_id)["kv_transfer_params"] for request_id in request_ids]
    wait_expired(pair)

    def too_late(request_id, params):
        with pytest.raises(NoAnswer):
            pair.decode(ASKED, 4, request_id, params, timeout_s=2)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(too_late, request_ids, params))
    # Both go on; and it is the producer's next step that takes the notices in.
    assert pair.ask(ASKED).tokens == truth(ASKED)
    told = re.compile(
        rf"request (\S+) of {pair.consumer.engine_id} came for the blocks of request (\S+) after "
        r"they were freed: .* \((\d+) so far\)"
    )
    found = told.findall(pair.producer.log.read_text())
    assert sorted(count for *_, count in found) == ["1", "1", "2", "2"]  # by each stage
    ours = {
        one["remote_request_id"]: request_id
        for one, request_id in zip(params, request_ids, strict=True)
    }
    assert {freed for _, freed, _ in found} == set(ours)
    for late, freed, _ in found:
        assert ours[freed] in late
        assert late != freed


def wait_expired(pair, timeout_s: float = LEASE_S + 20.0) -> None:
    """Waits until the producer has given up blocks that nobody came for."""
    deadline = time.monotonic() + timeout_s
    while not pair.failures().get(f"{pair.producer} vllm:nixl_num_kv_expired_reqs_total"):
        assert time.monotonic() < deadline, "the blocks never expired"
        time.sleep(0.05)
    assert pair.wait_blocks_free()["producer"] == 0.0


def test_stopping_it_cleanly_takes_it_out_at_once(pair, registry):
    watcher = Watcher(registry.address, pair.producer.engine_id)
    try:
        watcher.wait_for(lambda state: state is State.READY, 30)
        asked = time.monotonic()
        pair.producer.terminate()
        pair.producer.process.wait(60)
        # The lease would live 60 s more.
        _, seen = watcher.wait_for(lambda state: state is State.GONE, 1.0, since=asked)
        assert seen.workers == ()
    finally:
        watcher.close()
