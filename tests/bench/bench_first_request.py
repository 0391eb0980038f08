"""What a handshake in advance saves: the first request with and without `prewarm`.

    .venv-vllm/bin/python tests/bench/bench_first_request.py [STARTS]

Fresh pairs of vLLM on CPU (NIXL push, two stages to one), in turn with and
without, so that what else the machine does falls on both. Prints the decode
time of the first request and the median of the next five, in seconds.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.vllm.engine import Engine, Registry, make_model
from tests.vllm.pair import Pair
from tests.vllm.truth import prompt

WARM_S = 30.0


def wait_warm(pair: Pair) -> None:
    """Waits until both sides have shaken hands, as their logs say."""
    deadline = time.monotonic() + WARM_S
    # The consumer asks each of two stages; each stage asks the one consumer.
    wanted = {pair.producer: 2, pair.consumer: 2}
    while time.monotonic() < deadline:
        if all(
            engine.log.read_text().count("NIXL compatibility check passed") >= count
            for engine, count in wanted.items()
        ):
            return
        time.sleep(0.05)
    raise RuntimeError("no handshake in advance")


def measure(start_engine, registry: str, prewarm: bool) -> tuple[float, float]:
    """The first request's decode time, and the median of the next five."""
    settings = {"side_channel": False, "prewarm": prewarm}
    with Pair(start_engine, registry, settings=settings) as pair:
        pair.wait_ready()
        if prewarm:
            wait_warm(pair)
        times = [pair.ask(prompt(70, seed), 4).decode_s for seed in range(6)]
    return times[0], statistics.median(times[1:])


def _print(what: str, first: float, later: float) -> None:
    print(f"{what}  first {first:.3f} s  later {later:.3f} s", flush=True)  # noqa: T201


def main(starts: int) -> None:
    """Prints a line a start and the medians."""
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        registry = Registry(folder)
        start_engine = functools.partial(Engine, make_model(folder / "model"), folder)
        try:
            for number in range(starts):
                for prewarm in (False, True) if number % 2 == 0 else (True, False):
                    first, later = measure(start_engine, registry.address, prewarm)
                    found[prewarm].append((first, later))
                    _print(f"prewarm {prewarm!s:5}", first, later)
        finally:
            registry.stop()
    for prewarm, times in found.items():
        first, later = (statistics.median(column) for column in zip(*times, strict=True))
        _print(f"median of {starts}, prewarm {prewarm!s:5}", first, later)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
