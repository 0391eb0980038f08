"""A connector of one's own moves real KV by the plan, in layouts that NIXL on CPU has not."""

import os
from pathlib import Path

import pytest
from tests.vllm.pair import Pair
from tests.vllm.truth import ANSWER_TOKENS, PROMPTS, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

HERE = Path(__file__).parent


def side(pp: int = 1, tp: int = 1, layers: str = "") -> dict:
    """Options of an engine of so many stages and ranks."""
    return {
        "module": "example_connector",
        "pp_size": pp,
        "arguments": ["--tensor-parallel-size", str(tp)],
        "env": {"PYTHONPATH": os.pathsep.join([str(HERE / "quiet"), str(HERE)])}
        | ({"VLLM_PP_LAYER_PARTITION": layers} if layers else {}),
    }


LAYOUTS = {
    "PP2 3,1 to TP2": (side(pp=2, layers="3,1"), side(tp=2)),
    "TP2 to PP2 1,3": (side(tp=2), side(pp=2, layers="1,3")),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def pair(request, truth, make_pair):
    producer, consumer = LAYOUTS[request.param]
    with make_pair(connector="BookConnector", producer=producer, consumer=consumer) as made:
        yield made


def test_answers(pair: Pair, truth):
    for asked in PROMPTS:
        answer = pair.ask(asked, ANSWER_TOKENS)
        assert (answer.tokens, answer.finish_reason) == (truth(asked), "length")


def test_negative(pair: Pair, truth):
    answer = pair.ask(prompt(70), prefill_prompt=prompt(70, seed=1))
    assert answer.tokens != truth(prompt(70))
