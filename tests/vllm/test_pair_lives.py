"""Pairs through restarts and deaths: right tokens or a reason, and never a hang.

No listener is open on either side, so all that one engine knows of the other it
has from the book. The lease lives 60 s: what is seen sooner was not its expiry.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.vllm.engine import Engine, Refused, family
from tests.vllm.pair import Pair
from tests.vllm.truth import prompt

import rankbook
from rankbook import State

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

ASKED = prompt(70)
LEAST = (
    "do_remote_prefill",
    "remote_engine_id",
    "remote_generation",
    "remote_block_ids",
    "remote_request_id",
)
AT_ONCE_S = 5.0
"""Longest time to a refusal that waits for nothing, on a machine with other work."""


def least(params):
    """What a request must say, and nothing more."""
    return {name: params[name] for name in LEAST}


@pytest.fixture(scope="module", params=["push", "pull"])
def pair(request, make_pair):
    options = {"connector": "NixlPushConnector", "pp_size": 2, "partition": "3,1"}
    if request.param == "pull":
        options = {"connector": "NixlConnector", "pp_size": 1}
    with make_pair(**options, settings={"side_channel": False, "peer_timeout_s": 20}) as made:
        yield made


@pytest.fixture
def client(registry):
    with rankbook.Client(registry.address) as made:
        yield made


def restart(pair: Pair, side) -> None:
    getattr(pair, side).kill()
    pair.launch(side).wait_serving()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def keeps_a_lease(pid: int) -> bool:
    """Whether it is a heartbeat process: what kills a node takes it too, a crash does not."""
    return b"rankbook._heartbeat" in Path(f"/proc/{pid}/cmdline").read_bytes()


def half_done(pair: Pair) -> tuple[str, dict]:
    """A request whose KV is at the producer and waits to be fetched."""
    request_id = str(uuid.uuid4())
    first = pair.prefill(ASKED, request_id)
    return request_id, least(first["kv_transfer_params"])


def refusal(pair: Pair, request_id: str, params: dict) -> float:
    """How long the decode engine takes to refuse; fails if it makes tokens."""
    sent = time.monotonic()
    with pytest.raises(Refused) as caught:
        pair.decode(ASKED, 4, request_id, params)
    assert caught.value.status == 500
    return time.monotonic() - sent


def counted(engine: Engine, name: str, outcome: str) -> float:
    """A count as the engine shows it, once it does: that is a step after the answer."""
    deadline = time.monotonic() + 10
    while True:
        count = engine.metrics().total(name, outcome=outcome)
        if count or time.monotonic() > deadline:
            return count
        time.sleep(0.05)


def test_a_request_needs_no_address_and_no_sizes(pair, truth):
    answer = pair.ask(ASKED, change_params=least)
    assert answer.tokens == truth(ASKED)


def test_wrong_sizes_and_addresses_of_a_request_are_corrected_and_counted(pair, truth):
    def wrong(params):
        return {**params, "tp_size": 4, "pp_size": 7, "remote_host": "192.0.2.1", "remote_port": 1}

    answer = pair.ask(ASKED, change_params=wrong)
    assert answer.tokens == truth(ASKED)
    stages = 2 if "Push" in pair.producer.log.read_text() else 1
    log = pair.consumer.log.read_text()
    assert "tp_size 4 instead of 1" in log
    assert f"pp_size 7 instead of {stages}" in log
    assert counted(pair.consumer, "rankbook_requests_total", "corrected") == 1
    assert counted(pair.consumer, "rankbook_handshakes_total", "shaken") == 1


def test_a_restarted_producer_is_shaken_hands_with_anew_and_its_old_start_refused(pair, truth):
    request_id, params = half_done(pair)
    restart(pair, "producer")
    assert pair.ask(ASKED, change_params=least).tokens == truth(ASKED)
    assert refusal(pair, request_id, params) < AT_ONCE_S
    assert f"is of start {params['remote_generation']}" in pair.consumer.log.read_text()
    # Nobody asked for the consumer's restart, and both go on.
    assert pair.ask(prompt(200), change_params=least).tokens == truth(prompt(200))


def test_a_restarted_consumer_is_served_by_the_same_producer(pair, truth):
    restart(pair, "consumer")
    for asked in (ASKED, prompt(200)):
        assert pair.ask(asked, change_params=least).tokens == truth(asked)


def test_requests_for_a_producer_that_was_killed_fail_fast_and_the_consumer_lives(pair, client):
    engine_id = pair.producer.engine_id
    pids = [pid for pid in family(pair.producer.process.pid) if not keeps_a_lease(pid)]
    request_id, params = half_done(pair)
    for pid in pids:
        kill(pid)
    killed = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        # Sent before anybody can know, and again when everybody does.
        early = thread.submit(refusal, pair, request_id, params)
        assert early.result() < 2.0 + AT_ONCE_S
    assert refusal(pair, str(uuid.uuid4()), params) < AT_ONCE_S
    # NIXL may notice before the book does, which has two seconds.
    states = {}
    while states.get(engine_id) is not State.GONE:
        assert time.monotonic() - killed < 2.0 + AT_ONCE_S
        states = {one.engine_id: one.state for one in client.list_engines().engines}
        time.sleep(0.05)
    assert states[pair.consumer.engine_id] is State.READY
    pair.producer.kill()


def test_a_producer_that_lost_one_stage_gives_no_token(pair, truth, client, request):
    if request.node.callspec.params["pair"] == "pull":
        pytest.skip("one stage is all of a producer that is pulled from")
    pair.producer.kill()
    pair.launch("producer").wait_serving()
    assert pair.ask(ASKED, change_params=least).tokens == truth(ASKED)
    topology = client.get_topology(pair.producer.engine_id)
    request_id, params = half_done(pair)
    kill(topology.worker(1, 0).process.pid)
    assert refusal(pair, request_id, params) < 2.0 + AT_ONCE_S
