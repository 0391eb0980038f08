"""What a single engine answers: the tokens that a pair must answer too.

The prompts are token ids, because the model's text means nothing. Their lengths
are around the block's, because blocks are what is moved.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.vllm.engine import BLOCK_TOKENS, Engine

ANSWER_TOKENS = 16
"""Tokens of each answer."""
MARGIN = 1e-3
"""How much likelier, in log probability, the best token must be than the next: more
than rounding makes of it, in whichever order the same numbers are summed."""
_WORDS = range(4, 260)  # the ids after the special ones


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt of so many tokens; another seed gives another one."""
    return tuple(random.Random(f"{length} {seed}").choices(_WORDS, k=length))


PROMPTS = tuple(
    prompt(length)
    for length in (
        *(70, 2, 7, 200, 500, 990),
        *(BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1),
        *(2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS - 1, 10 * BLOCK_TOKENS),
        *(50, 80, 101, 160, 150, 180, 250, 300),
    )
)
"""Twenty prompts."""


class Truth:
    """The greedy tokens of a single engine, for prompts named in advance."""

    def __init__(self, model: Path, folder: Path, prompts: Iterable[Sequence[int]]) -> None:
        """Asks an engine of one stage without a connector, and ends it.

        Raises:
            ValueError: The second best token was about as likely somewhere, so
                that the answer would depend on rounding.
        """
        self._answers: dict[tuple[int, ...], tuple[int, ...]] = {}
        engine = Engine(model, folder, connector="", engine_id="truth", pp_size=1)
        try:
            engine.wait_serving()
            for asked in prompts:
                self._answers[tuple(asked)] = _answer(engine, asked)
        finally:
            engine.kill()

    def __call__(self, prompt: Sequence[int], n: int = ANSWER_TOKENS) -> list[int]:
        """The first `n` tokens of the answer to a prompt.

        Raises:
            KeyError: The prompt was not named in advance.
        """
        return list(self._answers[tuple(prompt)][:n])


def _answer(engine: Engine, asked: Sequence[int]) -> tuple[int, ...]:
    (choice,) = engine.complete(
        list(asked),
        ANSWER_TOKENS,
        logprobs=2,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
    )["choices"]
    for place, likely in enumerate(choice["logprobs"]["top_logprobs"]):
        best, second = sorted(likely.values(), reverse=True)[:2]
        if best - second < MARGIN:
            raise ValueError(
                f"token {place} of the answer to a prompt of {len(asked)} tokens is "
                f"{best - second:g} likelier than the next, less than {MARGIN:g}: "
                "take another prompt"
            )
    return tuple(choice["token_ids"])
