"""NIXL push from two prefill stages to one decode engine: real KV, right tokens.

Every claim is checked on several fresh starts of the uneven split: what goes
wrong with a handshake goes wrong in the first seconds of some starts only.
RANKBOOK_STARTS says of how many (3).
"""

import os

import pytest
from tests.vllm.pair_claims import PairClaims

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

STARTS = int(os.environ.get("RANKBOOK_STARTS", "3"))


@pytest.fixture(
    scope="module",
    params=["2,2", *(f"3,1 start {number}" for number in range(1, STARTS + 1))],
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
        settings={"side_channel": partition == "2,2"},
    ) as made:
        yield made


class TestPush(PairClaims):
    """Four layers over two stages, in one."""
