"""NIXL push from two prefill stages to one decode engine: real KV, right tokens.

Every claim about KV is checked on several fresh starts: what goes wrong with a
handshake goes wrong in the first seconds of some starts only. RANKBOOK_STARTS
says of how many (3); the first has an even split, the others an uneven one.
"""

import os
import uuid

import pytest
from tests.vllm.pair import Moved, bytes_of
from tests.vllm.pair_claims import ASKED, PairClaims, RefusalClaims, is_refused
from tests.vllm.truth import ANSWER_TOKENS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

STARTS = int(os.environ.get("RANKBOOK_STARTS", "3"))
EVEN = "2,2"


@pytest.fixture(
    scope="module",
    params=[EVEN, *(f"3,1 start {number}" for number in range(2, STARTS + 1))],
)
def pair(request, truth, make_pair):
    """A pair with an even split, then pairs with one that nothing gets right by dividing.

    vLLM's own listeners are kept in the first only: the others have the book.
    """
    partition = request.param.partition(" ")[0]
    with make_pair(
        connector="NixlPushConnector",
        pp_size=2,
        partition=partition,
        settings={"side_channel": partition == EVEN},
    ) as made:
        made.wait_ready()
        yield made


class TestPush(PairClaims):
    """Four layers over two stages, in one."""


@pytest.mark.parametrize("pair", [EVEN], indirect=True)
class TestPushToAGroup:
    """A request that names a group in place of an engine."""

    def test_a_group_stands_for_its_engine_where_no_blocks_are_named(self, pair, truth):
        before = pair.moved()
        answer = pair.ask(
            ASKED,
            change_params=lambda _: {"do_remote_prefill": True, "group": f"prefill-{pair.name}"},
        )
        assert answer.tokens == truth(ASKED)
        moved = pair.wait_moved(before, bytes_of(ASKED))
        assert moved == Moved(tokens=len(ASKED), computed=0, bytes=bytes_of(ASKED))
        assert pair.wait_blocks_free() == {"producer": 0.0, "consumer": 0.0}

    def test_a_group_is_refused_where_blocks_are_named_and_the_blocks_stay_good(self, pair, truth):
        request_id = str(uuid.uuid4())
        params = pair.prefill(ASKED, request_id)["kv_transfer_params"]
        named = {**params, "remote_engine_id": None, "group": f"prefill-{pair.name}"}
        log = is_refused(pair, named)
        assert (
            f"names group 'prefill-{pair.name}' and block ids: blocks are of one engine, name "
            "it as remote_engine_id"
        ) in log
        (choice,) = pair.decode(ASKED, ANSWER_TOKENS, request_id, params)["choices"]
        assert choice["token_ids"] == truth(ASKED)
        assert pair.wait_blocks_free() == {"producer": 0.0, "consumer": 0.0}


@pytest.mark.parametrize("pair", [EVEN], indirect=True)
class TestPushRefused(RefusalClaims):
    """The decode engine is asked to let itself be written to by others."""
