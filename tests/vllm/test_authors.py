"""A connector of one's own moves real KV by the plan, over layouts that NIXL on CPU cannot.

`example_connector.py` between three engines that each give and take, in every
direction: two stages, two ranks, and a grid of both whose stages are cut elsewhere.
Four layers and four KV heads, so that each worker has a part of both.
"""

import itertools
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.vllm.engine import Engine, Refused
from tests.vllm.truth import ANSWER_TOKENS, PROMPTS, prompt

import rankbook

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(500)]

HERE = Path(__file__).parent
ENGINES = {"stages": ("3,1", 1), "ranks": ("4", 2), "grid": ("1,3", 2)}
"""Layers of each stage and ranks of a stage, by engine_id."""
WORKERS = {"stages": 2, "ranks": 2, "grid": 4}
WAYS = list(itertools.permutations(ENGINES, 2))


@pytest.fixture(scope="module")
def engines(truth, start_engine, registry) -> dict[str, Engine]:
    """The three, serving; after `truth`, whose engine would make it four."""
    started = {
        engine_id: start_engine(
            connector="BookConnector",
            module="example_connector",
            role="kv_both",
            engine_id=engine_id,
            pp_size=len(layers.split(",")),
            settings={"endpoints": registry.address, "ttl_s": 60},
            arguments=["--tensor-parallel-size", str(ranks)],
            env={
                "PYTHONPATH": os.pathsep.join([str(HERE / "quiet"), str(HERE)]),
                "VLLM_PP_LAYER_PARTITION": layers,
            },
        )
        for engine_id, (layers, ranks) in ENGINES.items()
    }
    for engine in started.values():
        engine.wait_serving()
    return started


@pytest.fixture(scope="module", params=WAYS, ids=" to ".join)
def way(request, engines) -> tuple[Engine, Engine]:
    """A producer and a consumer."""
    producer, consumer = request.param
    return engines[producer], engines[consumer]


def prefill(producer: Engine, asked: tuple[int, ...]) -> dict:
    """kv_transfer_params of a prompt whose KV the producer keeps."""
    answer = producer.complete(
        list(asked), 1, request_id=str(uuid.uuid4()), kv_transfer_params={"do_remote_decode": True}
    )
    return answer["kv_transfer_params"]


def decode(consumer: Engine, asked: tuple[int, ...], params: dict) -> list[int]:
    """The answer to a prompt whose KV is elsewhere."""
    (choice,) = consumer.complete(
        list(asked),
        ANSWER_TOKENS,
        request_id=str(uuid.uuid4()),
        return_token_ids=True,
        kv_transfer_params=params,
    )["choices"]
    assert choice["finish_reason"] == "length"
    return choice["token_ids"]


def external_tokens(engine: Engine) -> float:
    """Prompt tokens that the engine got from its peers so far."""
    source = "vllm:prompt_tokens_by_source_total"
    return engine.metrics().total(source, source="external_kv_transfer")


def test_every_worker_has_published_its_own_door(engines, registry):
    with rankbook.Client(registry.address) as client:
        for engine_id in engines:
            topology = client.get_topology(engine_id, wait_s=30)
            assert topology.engine.state is rankbook.State.READY
            assert {worker.handshake.format for worker in topology.workers} == {"vllm.Door"}
            doors = {worker.handshake.payload for worker in topology.workers}
            assert len(doors) == WORKERS[engine_id]


def test_a_prompt_is_answered_as_by_one_engine_from_kv_that_was_moved(way, truth):
    producer, consumer = way
    for asked in PROMPTS[:6]:
        before = external_tokens(consumer)
        assert decode(consumer, asked, prefill(producer, asked)) == truth(asked)
        assert external_tokens(consumer) - before == len(asked)


def test_requests_at_once_get_each_its_own_kv(way, truth):
    producer, consumer = way
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(
            lambda asked: decode(consumer, asked, prefill(producer, asked)), PROMPTS
        )
        assert list(answers) == [truth(asked) for asked in PROMPTS]


def test_kv_of_another_prompt_makes_other_tokens(way, truth):
    """So tokens that are right were made from what was moved."""
    producer, consumer = way
    asked = prompt(70)
    assert decode(consumer, asked, prefill(producer, prompt(70, seed=1))) != truth(asked)


def test_blocks_of_another_start_are_refused_at_once_and_those_of_this_one_stay_good(
    engines, truth
):
    producer, consumer = engines["stages"], engines["grid"]
    asked = PROMPTS[0]
    params = prefill(producer, asked)
    began = time.monotonic()
    with pytest.raises(Refused):
        decode(consumer, asked, {**params, "remote_generation": "a-start-before"})
    assert time.monotonic() - began < 10  # not the 30 s for which a peer is waited for
    assert "the request is of start a-start-before" in consumer.log.read_text()
    assert decode(consumer, asked, params) == truth(asked)


def test_every_block_is_free_again_when_all_readers_have_told(engines):
    """The last of these: it is about all requests before it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        used = {
            engine_id: engine.metrics().total("vllm:kv_cache_usage_perc")
            for engine_id, engine in engines.items()
        }
        if not any(used.values()):
            break
        time.sleep(0.05)
    assert used == dict.fromkeys(engines, 0.0)
    for engine in engines.values():
        assert "nobody has read" not in engine.log.read_text()
