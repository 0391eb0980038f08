"""Mooncake from two prefill stages to one decode engine, over TCP: real KV, right tokens.

The engines find each other by the book alone. On CPU one call of vLLM's
connector is answered for torch by `quiet/sitecustomize.py`, which says why;
everything that moves is moved by Mooncake's own engine.
"""

import os
import re
import signal
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.vllm.engine import Refused, free_port
from tests.vllm.pair import BLOCK_BYTES, Moved, Pair
from tests.vllm.pair_claims import PairClaims, listens
from tests.vllm.truth import ANSWER_TOKENS, PROMPTS, prompt

import rankbook
from rankbook import State

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

try:
    import mooncake.engine  # noqa: F401
except ImportError as error:
    pytest.skip(f"Mooncake's engine cannot be loaded here: {error}", allow_module_level=True)

BOOTSTRAP_PORT = free_port()
"""Where vLLM's bootstrap server would listen."""
_TOLD = re.compile(
    r"KV Transfer metrics: Num successful transfers=(\d+), .*?Avg MB per transfer=([\d.]+), "
    r".*?Num failed transfers=(\d+), Num failed recvs=(\d+), Num KV expired reqs=(\d+)"
)


class MooncakePair(Pair):
    """A pair whose counters are in its logs: vLLM has no metrics of Mooncake's transfers."""

    def __init__(self, *args, **options):
        one = {
            "extra": {"mooncake_protocol": "tcp"},
            "env": {
                "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(BOOTSTRAP_PORT),
                "VLLM_LOG_STATS_INTERVAL": "1",
            },
        }
        super().__init__(
            *args, connector="MooncakeConnector", producer=one, consumer=one, **options
        )

    def _told(self):
        return [
            (str(engine), line.groups())
            for engine in (self.producer, self.consumer)
            for line in _TOLD.finditer(engine.log.read_text(errors="replace"))
        ]

    def moved(self):
        """What was moved so far. The producer writes; each stage counts for itself."""
        source = "vllm:prompt_tokens_by_source_total"
        metrics = self.consumer.metrics()
        # The log rounds megabytes to 0.001; a block of a layer is 0.03125.
        blocks = [
            round(int(n) * float(mb) * 2**20 / BLOCK_BYTES) for _, (n, mb, *_) in self._told()
        ]
        return Moved(
            tokens=int(metrics.total(source, source="external_kv_transfer")),
            computed=int(metrics.total(source, source="local_compute")),
            bytes=sum(blocks) * BLOCK_BYTES,
        )

    def failures(self):
        """Lines in which something is counted as failed."""
        return {
            f"{engine}: failed transfers, failed receives, expired": counts
            for engine, (_, _, *counts) in self._told()
            if counts != ["0"] * 3
        }


@pytest.fixture(scope="module")
def pair(truth, start_engine, registry):
    made = MooncakePair(
        start_engine,
        registry.address,
        pp_size=2,
        partition="3,1",
        settings={"side_channel": False},
    )
    with made:
        made.wait_ready()
        yield made


@pytest.fixture
def client(registry):
    with rankbook.Client(registry.address) as made:
        yield made


class TestMooncake(PairClaims):
    """Four layers over two stages of three and one, in one."""

    def test_the_side_channel_listens_at_both_unless_it_is_off(self, pair):
        assert not pair.settings["side_channel"]
        assert not listens(BOOTSTRAP_PORT)

    def test_every_stage_is_sealed_with_the_address_where_it_listens(self, pair, client):
        topology = client.get_topology(pair.producer.engine_id, wait_s=30)
        assert topology.engine.state is State.READY
        found = []
        for worker in topology.workers:
            assert worker.handshake.format == "vllm.mooncake"
            host, port = re.search(rb"tcp://([\d.]+):(\d+)", worker.handshake.payload).groups()
            socket.create_connection((host.decode(), int(port)), timeout=5).close()
            found.append((worker.layers.start_layer, worker.layers.end_layer, int(port)))
        assert [layers[:2] for layers in found] == [(0, 3), (3, 4)]
        assert found[0][2] != found[1][2]

    def test_a_request_needs_a_transfer_and_an_engine_only(self, pair, truth):
        asked = PROMPTS[0]
        answer = pair.ask(
            asked,
            change_params=lambda params: {
                "do_remote_prefill": True,
                "transfer_id": params["transfer_id"],
                "remote_engine_id": params["remote_engine_id"],
            },
        )
        assert answer.tokens == truth(asked)

    def test_a_proxy_may_name_the_transfer_itself(self, pair, truth):
        asked, transfer_id = PROMPTS[1], str(uuid.uuid4())
        pair.prefill(asked, "r1", params={"do_remote_decode": True, "transfer_id": transfer_id})
        wanted = {
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_engine_id": pair.producer.engine_id,
        }
        (choice,) = pair.decode(asked, ANSWER_TOKENS, "r1", wanted)["choices"]
        assert choice["token_ids"] == truth(asked)


def test_a_request_of_another_start_fails_at_once_and_says_why(pair):
    sent = time.monotonic()
    with pytest.raises(Refused) as caught:
        pair.ask(PROMPTS[0], change_params=lambda params: params | {"remote_generation": "older"})
    assert caught.value.status == 500
    assert time.monotonic() - sent < 5
    assert "the request is of start older" in pair.consumer.log.read_text()


def test_a_decode_of_a_producer_that_is_killed_fails_and_its_successor_serves(pair, truth, client):
    """vLLM's consumer would wait for nine minutes and then never ask again."""
    topology = client.get_topology(pair.producer.engine_id)
    wanted = {
        "do_remote_prefill": True,
        "transfer_id": "never prefilled",
        "remote_engine_id": pair.producer.engine_id,
    }
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pair.decode, prompt(70), ANSWER_TOKENS, "r2", wanted)
        # Its question is at the producer once the one after it was served.
        assert pair.ask(PROMPTS[0]).tokens == truth(PROMPTS[0])
        assert not waiting.done()
        # The heartbeat processes live on, as they do when an engine crashes.
        core = topology.engine.core.process.pid
        workers = [worker.process.pid for worker in topology.workers]
        for pid in (pair.producer.process.pid, core, *workers):
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(Refused) as caught:
            waiting.result(30)
        assert caught.value.status == 500
        assert time.monotonic() - killed < 5
    assert "have ended" in pair.consumer.log.read_text()
    with pytest.raises(Refused):
        pair.decode(prompt(70), ANSWER_TOKENS, "r3", wanted)
    assert time.monotonic() - killed < 5
    pair.producer.kill()

    pair.launch("producer")
    pair.producer.wait_serving()
    assert [pair.ask(asked).tokens for asked in PROMPTS[:3]] == [
        truth(asked) for asked in PROMPTS[:3]
    ]
    again = client.get_topology(pair.producer.engine_id)
    assert again.engine.generation != topology.engine.generation
