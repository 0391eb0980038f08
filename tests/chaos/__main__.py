"""One run of the chaos test, or a second look at one: see tests/chaos/README.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections import Counter
from pathlib import Path

from .cast import Scale
from .checker.history import read_history
from .checker.verdict import figures, violations
from .faults import ALL
from .isolation import raise_loopback
from .journal import read_journals
from .play import CONVERGE_S, play

_SHOWN = 3
_LINE_CHARS = 500


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def main() -> int:
    """Plays and checks; 1 when a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("folder", type=Path, help="for the journals and the logs; must be new")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long there are faults")
    parser.add_argument("--mix", choices=[mix.name for mix in ALL], default=ALL[0].name)
    parser.add_argument("--sqlite", action="store_true", help="one server over one file")
    parser.add_argument("--check", action="store_true", help="only judge what the folder has")
    given = parser.parse_args()
    if not given.check:
        raise_loopback()
        try:
            asyncio.run(_run(given))
        except asyncio.CancelledError:
            _say("interrupted; everything is ended")
            return 130
    return _judge(given.folder)


async def _run(given: argparse.Namespace) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    (mix,) = [mix for mix in ALL if mix.name == given.mix]
    scale = Scale(servers=1, etcd_nodes=0) if given.sqlite else Scale()
    await play(given.folder, seed=given.seed, seconds=given.seconds, mix=mix, scale=scale)


def _judge(folder: Path) -> int:
    history = read_history(read_journals(folder / "journals"))
    (begin,) = [line for line in history.others if line["kind"] == "begin"]
    _say(f"seed {begin['seed']}, {begin['mix']}, {begin['seconds']:g} s of faults: {folder}")
    _say(json.dumps(figures(history), indent=1))
    broken: Counter[str] = Counter()
    for found in violations(history, converge_s=CONVERGE_S):
        broken[found.rule] += 1
        if broken[found.rule] <= _SHOWN:
            _say(f"BROKEN {found.rule}: {found.text}")
            for line in found.lines:
                _say(f"    {json.dumps(line)[:_LINE_CHARS]}")
    for rule, count in broken.items():
        _say(f"{rule}: broken {count} times")
    _say(f"{sum(broken.values())} breaches of {len(broken)} rules")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
