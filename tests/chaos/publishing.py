"""A process of publishers.

`python -m tests.chaos.publishing FOLDER PROCESS LIFE SEED ENDPOINTS`
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import rankbook

from .cast import publishers
from .journal import Journal
from .publisher import Publisher, Surroundings
from .stage import RUN, STOP, Stage

_LOOK_S = 0.1


async def _look(stage: Stage, around: Surroundings, engine_ids: set[str]) -> None:
    while around.phase != STOP:
        around.phase = stage.phase()
        if around.phase != RUN:
            around.quiet.set()
        for engine_id in engine_ids:
            around.generations[engine_id] = stage.generation(engine_id)
        await asyncio.sleep(_LOOK_S)


async def main(folder: Path, process: int, life: int, seed: int, endpoints: list[str]) -> None:
    """Runs the publishers of a process until the phase is `stop`."""
    stage = Stage(folder)
    journal = Journal(stage.journals / f"publishers-{process}.{life}.jsonl")
    journal.note("life", life=life)
    around = Surroundings(set_generation=stage.set_generation)
    plans = [plan for plan in publishers(stage.scale) if plan.process == process]
    # Each prefers another server.
    orders = [endpoints[n:] + endpoints[:n] for n in range(len(endpoints))]
    clients = [rankbook.AsyncClient(order) for order in orders]
    rng = random.Random(f"{seed}/publishers/{process}/{life}")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_look(stage, around, {plan.engine.engine_id for plan in plans}))
        for plan in plans:
            one = Publisher(
                plan, life, clients, journal, around, random.Random(rng.randrange(1 << 60))
            )
            tasks.create_task(one.run(), name=f"publisher-{plan.number}")
    for client in clients:
        await client.close()
    journal.close()


if __name__ == "__main__":
    asyncio.run(
        main(
            Path(sys.argv[1]),
            int(sys.argv[2]),
            int(sys.argv[3]),
            int(sys.argv[4]),
            sys.argv[5].split(","),
        )
    )
