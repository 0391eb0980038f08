"""One run, from the first process to the last: play, heal, be quiet, report, end.

run      faults, and publishers that write, leave, crash and come back
quiet    everything is healed and started; publishers only see to it that
         they are in the book; this is the end that watchers converge after
report   every server is asked for everything, readers note what they have
stop     every process ends
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

import rankbook
from rankbook.model import Requirement

from .cast import Scale
from .content import content_of_topology, digest_of
from .deployment import Deployment
from .faults import Faults, Mix
from .journal import Journal
from .stage import QUIET, REPORT, STOP, Stage

__all__ = ["CONVERGE_S", "play"]

CONVERGE_S = 10.0
"""So long after the last fault every watcher has what every server has."""
_SETTLE_S = 2.0
_WARM_S = 4.0
_LAST_WORDS_S = 3.0
_STOP_S = 15.0


async def play(folder: Path, *, seed: int, seconds: float, mix: Mix, scale: Scale) -> None:
    """Runs everything and leaves the journals in `folder`.

    Args:
        folder: An empty folder.
        seed: Of the faults, the publishers and the watchers.
        seconds: How long there are faults.
        mix: Which faults.
        scale: How many there are of each.
    """
    stage = Stage(folder)
    stage.journals.mkdir(parents=True)
    # Whatever a node keeps goes with the folder, also where the run is killed.
    tempfile.tempdir = str(folder)
    stage.set_scale(scale)
    journal = Journal(stage.journals / "play.jsonl")
    journal.note("begin", seed=seed, seconds=seconds, mix=mix.name, scale=vars_of(scale))
    deployment = Deployment(stage, scale, seed, etcd_flags=mix.etcd_flags)
    faults = Faults(deployment, mix, seed, journal)
    try:
        await deployment.start()
        await asyncio.sleep(_WARM_S)
        watch = asyncio.create_task(_watch_over(deployment, journal))
        journal.note("faults begin")
        await faults.run(seconds)
        stage.set_phase(QUIET)
        journal.note("faults end", passed_bytes=deployment.network.passed_bytes)
        await asyncio.sleep(CONVERGE_S + _SETTLE_S)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        stage.set_phase(REPORT)
        await asyncio.sleep(_LAST_WORDS_S)
        for number, address in enumerate(deployment.addresses):
            await _ask_everything(f"server-{number}", address, journal)
        stage.set_phase(STOP)
        for node in (*deployment.publishers, *deployment.watchers):
            if not await asyncio.to_thread(node.wait, _STOP_S):
                journal.note("did not stop", node=node.name)
            elif node.exit_code:
                journal.note("failed", node=node.name, code=node.exit_code)
    finally:
        await deployment.close()
        journal.note("closed")
        journal.close()


def vars_of(scale: Scale) -> dict[str, int]:
    """A scale as values by name."""
    return {name: getattr(scale, name) for name in Scale.__slots__}


async def _watch_over(deployment: Deployment, journal: Journal) -> None:
    """Notes a process that ended without being told to."""
    told: set[str] = set()
    while True:
        for node in deployment.python_nodes:
            code = node.exit_code
            if code is not None and node.name not in told:
                told.add(node.name)
                journal.note("ended by itself", node=node.name, code=code)
        await asyncio.sleep(0.2)


async def _ask_everything(server: str, address: str, journal: Journal) -> None:
    """Notes every engine as a server has it, tombstones included."""
    async with rankbook.AsyncClient(address, timeout_s=10) as client:
        try:
            listed = await client.list_engines()
            revisions = set()
            for engine in listed.engines:
                with contextlib.suppress(rankbook.NotFound):
                    found = await client.get_topology(
                        engine.engine_id, require=Requirement.ANY, min_revision=listed.book_revision
                    )
                    assert found is not None
                    content = content_of_topology(found)
                    revisions.add(found.book_revision)
                    journal.note("truth", server=server, digest=digest_of(content), **content)
            journal.note(
                "whole truth",
                server=server,
                book=listed.book_id,
                rev=listed.book_revision,
                engines=len(listed.engines),
            )
        except rankbook.RankbookError as error:
            journal.note("no truth", server=server, reason=str(error.reason), text=error.message)
