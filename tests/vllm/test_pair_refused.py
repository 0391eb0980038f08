"""A pair that can never work is told so before NIXL is touched: pull from two stages.

The decode engine has two ranks, so that there are numbers that do not divide.
"""

from __future__ import annotations

import time

import pytest
from tests.vllm import forged
from tests.vllm.engine import NoAnswer, Refused
from tests.vllm.pair_claims import is_refused, kv_of, wait_said
from tests.vllm.truth import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def pair(make_pair):
    # vLLM itself starts both without a word, and fails every request in the handshake.
    settings = {"side_channel": False, "prewarm": True, "peer_timeout_s": 2}
    ranks = {"arguments": ("--tensor-parallel-size", "2")}
    with make_pair(connector="NixlConnector", pp_size=2, settings=settings, consumer=ranks) as made:
        made.wait_ready()
        wait_said(made.consumer, "no handshake in advance")
        yield made


def test_a_request_is_refused_with_the_rule_both_values_and_what_to_do(pair):
    sent = time.monotonic()
    with pytest.raises(Refused) as caught:
        pair.ask(prompt(70))
    assert caught.value.engine.startswith("decode")
    assert time.monotonic() - sent < 10.0
    log = pair.consumer.log.read_text()
    said = f"{pair.producer.engine_id} cannot give KV to {pair.consumer.engine_id}"
    assert said in log
    refusal = next(line for line in log.splitlines() if said in line)
    assert "PULL_PP_PRODUCER_UNSUPPORTED" in refusal
    assert "producer has 2 pipeline stages" in refusal
    assert "use NixlPushConnector on both sides" in refusal


def test_it_was_said_before_any_request_where_workers_shake_hands_in_advance(pair):
    log = pair.consumer.log.read_text()
    early = log.index("no handshake in advance")
    assert early < log.index("handshake_failed")
    assert "use NixlPushConnector on both sides" in log[early : early + 1000]


def test_ranks_that_do_not_divide_are_refused_with_both_numbers(pair, forger):
    """Of the producer with three ranks there are the published records only: see `forged`."""
    name = f"three-ranks-{pair.name}"
    said = forger.publish(name, pair.producer.engine_id, forged.of_three_ranks)
    log = is_refused(pair, kv_of(said))
    refusal = next(line for line in log.splitlines() if "TP_NOT_DIVISIBLE" in line)
    assert f"{name} cannot give KV to {pair.consumer.engine_id}" in refusal
    assert "consumer tp_size 2 and producer tp_size 3 do not fit" in refusal
    assert "start one of the two with another --tensor-parallel-size" in refusal


def test_nothing_of_it_reached_nixl_and_the_engines_go_on(pair):
    log = pair.consumer.log.read_text()
    assert "NIXL compatibility check passed" not in log
    assert "Transfer plan" not in log
    for engine in (pair.producer, pair.consumer):
        assert engine.complete(list(prompt(33)), 4)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "change",
    [
        {"remote_engine_id": None},
        {"remote_engine_id": ""},
        {"remote_engine_id": 7},
        {"remote_engine_id": ["a", "list"]},
        {"remote_engine_id": {"an": "object"}},
        {"remote_generation": 7},
        {"remote_generation": "another start"},
        {"remote_block_ids": None},
        {"remote_request_id": None},
        {"remote_request_id": ["a", "list"]},
        {"group": "nobody"},
        {"remote_engine_id": None, "remote_block_ids": None, "group": "nobody"},
        {"remote_engine_id": None, "group": ["a", "list"]},
        {"tp_size": "four", "pp_size": -1, "dcp_size": None},
        {"remote_host": 5, "remote_port": "many"},
        {"do_remote_prefill": "yes"},
    ],
    ids=str,
)
def test_no_parameters_of_a_request_end_an_engine(pair, change):
    with pytest.raises((Refused, NoAnswer)):
        pair.ask(prompt(70), change_params=lambda params: {**params, **change}, timeout_s=30)
    again = pair.consumer.complete(list(prompt(33)), 2)
    assert again["usage"]["completion_tokens"] == 2
