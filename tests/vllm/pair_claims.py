"""What holds for every pair, whichever connector and split it has.

A class with tests of one kind of pair inherits from `PairClaims` and has, or its
module has, a fixture `pair`.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.vllm.engine import BLOCK_TOKENS
from tests.vllm.pair import Moved, bytes_of
from tests.vllm.truth import ANSWER_TOKENS, PROMPTS, prompt


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
