"""`python -m tests.chaos`: one run, and what the checker says of it."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from .cast import Scale
from .faults import ALL
from .play import play


def main() -> int:
    """Plays and checks; 1 when a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long there are faults")
    parser.add_argument("--mix", choices=[mix.name for mix in ALL], default=ALL[0].name)
    parser.add_argument("--sqlite", action="store_true", help="one server over one file")
    parser.add_argument("--folder", type=Path, required=True, help="for everything that is kept")
    given = parser.parse_args()
    (mix,) = [mix for mix in ALL if mix.name == given.mix]
    scale = Scale(servers=1, etcd_nodes=0) if given.sqlite else Scale()

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await play(given.folder, seed=given.seed, seconds=given.seconds, mix=mix, scale=scale)

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
