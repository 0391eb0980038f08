"""A process of readers.

`python -m tests.chaos.watching FOLDER PROCESS LIFE SEED ENDPOINTS`
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from pathlib import Path

import rankbook

from .cast import Scale, engines
from .journal import Journal
from .readers import ClientWatcher, Notes, Querier, RawWatcher, ViewWatcher
from .stage import REPORT, STOP, Stage

_LOOK_S = 0.1

Reader = RawWatcher | ClientWatcher | ViewWatcher | Querier


def _readers(
    scale: Scale,
    process: int,
    life: int,
    endpoints: list[str],
    notes: Notes,
    rng: random.Random,
    closing: contextlib.ExitStack,
    clients: list[rankbook.AsyncClient],
) -> list[Reader]:
    orders = [endpoints[n:] + endpoints[:n] for n in range(len(endpoints))]
    single = [rankbook.AsyncClient(endpoint) for endpoint in endpoints]
    clients += single
    found: list[Reader] = []
    for number in range(process, scale.watchers, scale.watcher_processes):
        name = f"w{number}.{life}"
        chance = random.Random(rng.randrange(1 << 60))
        way = number // scale.watcher_processes
        if way == 0:
            client = rankbook.Client(chance.choice(orders))
            closing.callback(client.close)
            view = ViewWatcher(name, client, notes)
            closing.callback(view.close)
            found.append(view)
        elif way == 1:
            clients.append(rankbook.AsyncClient(chance.choice(orders)))
            found.append(ClientWatcher(name, clients[-1], notes))
        elif way == 2:
            found.append(Querier(name, single, engines(scale), notes, chance))
        else:
            found.append(
                RawWatcher(
                    name,
                    endpoints,
                    notes,
                    chance,
                    group=f"group-{process}" if way == 3 else "",
                    ready_only=way == 4 and process == 0,
                    bare=way == 4 and process == 1,
                )
            )
    return found


async def main(folder: Path, process: int, life: int, seed: int, endpoints: list[str]) -> None:
    """Runs the readers of a process until the phase is `stop`."""
    stage = Stage(folder)
    journal = Journal(stage.journals / f"watchers-{process}.{life}.jsonl")
    journal.note("life", life=life)
    rng = random.Random(f"{seed}/watchers/{process}/{life}")
    clients: list[rankbook.AsyncClient] = []
    with contextlib.ExitStack() as closing:
        readers = _readers(
            stage.scale, process, life, endpoints, Notes(journal), rng, closing, clients
        )
        tasks = [asyncio.create_task(reader.run()) for reader in readers]
        has_reported = False
        while (phase := stage.phase()) != STOP:
            for task in tasks:
                if task.done():
                    task.result()
            if phase == REPORT and not has_reported:
                has_reported = True
                for reader in readers:
                    reader.end()
            await asyncio.sleep(_LOOK_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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
