"""How long a step loop is in the connector, with a registry, a frozen one and none.

    .venv-vllm/bin/python tests/bench/bench_step_loop.py [REQUESTS]

A pair of vLLM on CPU (NIXL push, two stages to one) answers requests, first with
vLLM's own connector, then with rankbook's while the registry runs, is frozen
(SIGSTOP, so that every call to it waits), and is dead. Half of the requests name
a peer that nobody knows, so that there is something to wait for. Prints the
longest call of each kind on either side, in milliseconds, wall and CPU time; what
of the wall time is not CPU time the thread waited, for whatever or for a core.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.vllm.engine import HERE, Engine, NoAnswer, Refused, Registry, make_model
from tests.vllm.pair import Pair
from tests.vllm.truth import prompt


@contextlib.contextmanager
def pair_of(model: Path, folder: Path, times: Path, registry: str, plain: bool) -> Iterator[Pair]:
    """A pair whose connectors note their times in a folder."""
    env = {
        "PYTHONPATH": f"{HERE / 'quiet'}:{Path(__file__).parent}",
        "RANKBOOK_STEP_TIMES": str(times),
        "RANKBOOK_PLAIN": "1" if plain else "",
    }

    def start(**options: object) -> Engine:
        options["env"] = {**options.get("env", {}), **env}  # type: ignore[dict-item]
        return Engine(model, folder, module="step_times", **options)  # type: ignore[arg-type]

    settings = {"side_channel": plain, "peer_timeout_s": 2}
    with Pair(start, registry, settings=settings) as pair:
        if not plain:
            pair.wait_ready()
        yield pair


def serve(pair: Pair, requests: int, strangers: bool) -> None:
    """Asks, four at once; every second request for an engine that nobody knows."""

    def ask(number: int) -> None:
        def change(params):
            stranger = {"remote_engine_id": "nobody", "remote_host": None}
            return {**params, **stranger} if strangers and number % 2 else params

        with contextlib.suppress(Refused, NoAnswer):
            pair.ask(prompt(70, number), 4, change_params=change)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(requests)))


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def report(times: Path, mark: str) -> None:
    """Prints the longest calls since a mark, by method."""
    longest: dict[str, tuple[float, float]] = {}
    for path in times.glob(f"{mark}.*.times"):
        for line in path.read_text().splitlines():
            name, wall, cpu = line.split()
            longest[name] = max(longest.get(name, (0.0, 0.0)), (float(wall), float(cpu)))
    _print(mark)
    for name, (wall, cpu) in sorted(longest.items(), key=lambda item: -item[1][0]):
        _print(f"  {name:28} wall {wall / 1e3:7.2f} ms  CPU {cpu / 1e3:7.2f} ms")


def main(requests: int) -> None:
    """Prints a table for each state of the registry."""
    with tempfile.TemporaryDirectory() as name:
        folder, times = Path(name), Path(name) / "times"
        times.mkdir()
        model, registry = make_model(folder / "model"), Registry(folder)

        def phase(pair: Pair, mark: str, *, strangers: bool) -> None:
            serve(pair, 2, strangers=False)  # what only a first request costs is not of a step
            (times / f"{mark}.mark").touch()
            serve(pair, requests, strangers)
            report(times, mark)

        with pair_of(model, folder, times, registry.address, plain=True) as pair:
            phase(pair, "1 vLLM alone", strangers=False)
        with pair_of(model, folder, times, registry.address, plain=False) as pair:
            phase(pair, "2 rankbook", strangers=True)
            registry.freeze()
            phase(pair, "3 rankbook, the registry frozen", strangers=True)
            registry.kill()
            phase(pair, "4 rankbook, no registry", strangers=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
