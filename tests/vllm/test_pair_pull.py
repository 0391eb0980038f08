"""NIXL pull between engines of one stage: real KV, right tokens."""

import pytest
from tests.vllm.pair_claims import PairClaims, RefusalClaims

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def pair(truth, make_pair):
    settings = {"side_channel": False}
    with make_pair(connector="NixlConnector", pp_size=1, settings=settings) as made:
        made.wait_ready()
        yield made


class TestPull(PairClaims):
    """The decode engine reads."""


class TestPullRefused(RefusalClaims):
    """The decode engine is asked to read from others."""
