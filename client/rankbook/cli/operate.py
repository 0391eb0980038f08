"""`rankbook seal`, `drain` and `evict`: what an operator does to an engine."""

from __future__ import annotations

import getpass
import os
import socket

import click

import rankbook
from rankbook import _clock, convert, limits, v1
from rankbook.cli.durations import SECONDS, duration_text
from rankbook.cli.invocation import (
    Invocation,
    Reported,
    engine_argument,
    global_options,
    pass_invocation,
)
from rankbook.cli.output import error_json
from rankbook.errors import DeadlineExceeded
from rankbook.model import CoreRecord, DrainOutcome, Process, Requirement, SealedSlot

__all__ = ["drain", "evict", "seal", "who_asks"]


def who_asks() -> str:
    """USER@HOST of this process, for the audit line."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[: limits.MAX_ID_CHARS]


@click.command()
@engine_argument()
@click.option("--connector", default="", help="Connector class to state in the core's record.")
@global_options()
@pass_invocation
def seal(invocation: Invocation, engine_id: str, connector: str) -> None:
    """Seals an engine by hand with what the book has now: COMPLETE becomes READY.

    For engines published by tools; a vLLM engine core seals itself. The seal
    lives as long as the lease of the engine's first worker.

    \b
    RPC: GetTopology, SealEngine
    Example:
      rankbook seal prefill-a-0
    """
    with invocation.client() as client:
        found = client.get_topology(engine_id, require=Requirement.ANY, without_payload=True)
        assert found is not None  # only who names a revision can be told "not modified"
        slots = [
            SealedSlot(worker.slot, worker.process.boot_id, status.record_digest)
            for worker, status in zip(found.workers, found.statuses, strict=True)
        ]
        process = Process(boot_id=rankbook.new_id(), hostname=socket.gethostname(), pid=os.getpid())
        sealed = client.seal_engine(
            engine_id,
            found.engine.generation,
            slots,
            CoreRecord(process=process, connector=connector),
            # Rises from one run of this command to the next.
            sequence=int(_clock.unix_s() * 1000),
            epoch=found.engine.epoch,
        )
    out = invocation.out
    if out.as_json:
        out.json(
            {
                "engine_id": engine_id,
                "generation": found.engine.generation,
                "epoch": sealed.epoch,
                "revision": sealed.revision,
                "lease_id": sealed.lease.lease_id,
                "seal": convert.to_json(convert.to_message(sealed.seal, v1.Seal)),
            }
        )
        return
    out.lines(
        [
            f"{engine_id} sealed #{sealed.seal.number}: {len(slots)} of {len(slots)} ranks, "
            f"epoch {sealed.epoch}, revision {sealed.revision}"
        ]
    )


@click.command()
@engine_argument()
@click.option("--undo", is_flag=True, help="Clear the flag: the engine takes new peers again.")
@click.option("--reason", default="", help="Why, for the audit line and for who looks.")
@click.option(
    "--deadline",
    type=SECONDS,
    default=0.0,
    metavar="DURATION",
    help="Stop waiting for transfers after this long.  [default: wait without end]",
)
@click.option(
    "--wait",
    "wait_s",
    type=SECONDS,
    default=0.0,
    metavar="DURATION",
    help="Wait so long for the engine to be drained; exit 1 when it is not.",
)
@global_options()
@pass_invocation
def drain(
    invocation: Invocation,
    engine_id: str,
    undo: bool,
    reason: str,
    deadline: float,
    wait_s: float,
) -> None:
    """Sets the drain flag: no new peers, existing ones go on.

    The engine is drained when no consumer reports a transfer in flight, at
    whichever server, or when the deadline passes; the outcome says which.
    Where servers share a store, give --wait: each must have answered first.

    \b
    RPC: DrainEngine
    Example:
      rankbook drain prefill-a-0 --reason "node-7 maintenance" --deadline 2m --wait 3m
      rankbook drain prefill-a-0 --undo
    """
    asked_at = _clock.mono_s()
    with invocation.client() as client:
        while True:
            spent = _clock.mono_s() - asked_at
            drained = client.drain_engine(
                engine_id,
                undo=undo,
                reason=reason,
                requested_by=who_asks(),
                # A repeat must not push the deadline away.
                deadline_s=max(deadline - spent, 0.001) if deadline > 0 else deadline,
                wait_s=wait_s
                if wait_s < 0
                else min(max(wait_s - spent, 0), limits.MAX_DRAIN_WAIT_S),
            )
            waiting = not undo and drained.outcome is DrainOutcome.WAITING
            if not waiting or _clock.mono_s() - asked_at >= wait_s:
                break
    out = invocation.out
    shown = {
        "engine_id": engine_id,
        "state": str(drained.state),
        "revision": drained.revision,
        "outcome": str(drained.outcome),
        "transfers_in_flight": drained.transfers_in_flight,
    }
    error = None
    if waiting and wait_s > 0:
        error = DeadlineExceeded(
            f"{engine_id} is not drained after {duration_text(wait_s)}: "
            f"{drained.transfers_in_flight} transfers in flight; the flag stays set",
            metadata={**shown, "wait_s": wait_s},
        )
    if out.as_json:
        out.json({**shown, "error": error_json(error)} if error else shown)
    elif undo:
        out.lines([f"{engine_id} takes new peers again: {drained.state}"])
    else:
        out.lines(
            [
                f"{engine_id} {drained.state}: {_OUTCOMES[drained.outcome]}, "
                f"{drained.transfers_in_flight} transfers in flight"
            ]
        )
    if error is not None:
        raise Reported(error)


_OUTCOMES = {
    DrainOutcome.UNSPECIFIED: "not draining",
    DrainOutcome.WAITING: "waits for transfers",
    DrainOutcome.IDLE: "drained",
    DrainOutcome.DEADLINE: "drained by its deadline",
}


@click.command()
@engine_argument()
@click.option(
    "--epoch",
    type=click.IntRange(min=0),
    default=0,
    help="Only this epoch.  [default: whichever is current]",
)
@click.option("--reason", default="", help="Why, for the audit line.")
@global_options()
@pass_invocation
def evict(invocation: Invocation, engine_id: str, epoch: int, reason: str) -> None:
    """Takes an engine out at once and fences its generation.

    Its workers cannot come back; a new start of the engine can.

    \b
    RPC: EvictEngine
    Example:
      rankbook evict prefill-a-0 --reason "node-7 is gone"
    """
    with invocation.client() as client:
        evicted = client.evict_engine(
            engine_id, epoch=epoch, reason=reason, requested_by=who_asks()
        )
    out = invocation.out
    if out.as_json:
        out.json({"engine_id": engine_id, "removed": evicted.removed, "revision": evicted.revision})
        return
    out.lines([f"{engine_id} evicted: {evicted.removed} records taken out"])
