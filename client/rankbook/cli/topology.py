"""`rankbook topology` and `rankbook workers`: one engine, its grid and its records."""

from __future__ import annotations

import base64
from typing import Any

import click
from rich.text import Text

from rankbook import convert, v1
from rankbook.cli import grid, picture
from rankbook.cli.engines import engine_json
from rankbook.cli.invocation import (
    Invocation,
    Reported,
    engine_argument,
    global_options,
    pass_invocation,
)
from rankbook.cli.output import Column, Table, error_json
from rankbook.cli.words import address_text, bytes_text, layers_text, shorten, slots_text
from rankbook.errors import Gone, Incomplete, RankbookError, Reason, Refused
from rankbook.model import Requirement, Slot, State, Topology

__all__ = ["state_error", "topology", "topology_json", "workers", "workers_table"]


def topology_json(topology: Topology) -> dict[str, Any]:
    """A topology as every JSON output shows it: the engine's members and its workers."""
    return {
        **engine_json(topology.engine),
        "book_revision": topology.book_revision,
        "book_id": topology.book_id,
        "stale_s": topology.stale_s,
        "workers": [
            convert.to_json(convert.to_message(worker, v1.WorkerRecord))
            for worker in topology.workers
        ],
        "statuses": [
            convert.to_json(convert.to_message(status, v1.WorkerStatus))
            for status in topology.statuses
        ],
    }


def state_error(topology: Topology, *, brief: bool = False) -> RankbookError | None:
    """Why an engine may not be used, or None when it is COMPLETE or better.

    Args:
        topology: The engine.
        brief: Leave out what to do: the picture above says it.
    """
    engine = topology.engine
    values: dict[str, Any] = {
        "engine_id": engine.engine_id,
        "state": engine.state,
        "epoch": engine.epoch,
        "generation": engine.generation,
        "present": engine.present,
        "declared": engine.declared,
    }
    said = f"{engine.engine_id} is {engine.state} with {engine.present} of {engine.declared} ranks"
    if engine.missing:
        values["missing"] = slots_text(engine.missing, engine.layout.pcp_size)
        said += f", missing {shorten(values['missing'], 200)}"
    words = said if brief else f"{said}: {picture.next_step(topology)}"
    if engine.state in (State.FORMING, State.DEGRADED):
        return Incomplete(words, metadata=values)
    if engine.state is State.INVALID:
        problems = "; ".join(problem.message for problem in engine.problems[:3])
        return Refused(f"{said}: {problems}", reason=Reason.ENGINE_INVALID, metadata=values)
    if engine.state is State.GONE:
        if engine.successor is not None:
            values["successor_engine_id"] = engine.successor.engine_id
            values["successor_epoch"] = engine.successor.epoch
            values["successor_generation"] = engine.successor.generation
        return Gone(f"{engine.engine_id} is GONE: {picture.next_step(topology)}", metadata=values)
    return None


def workers_table(topology: Topology, *, wide: bool = False, payload: bool = False) -> Table:
    """The table of an engine's workers, in slot order."""
    with_pcp = topology.engine.layout.pcp_size > 1
    columns = [Column("PP", right=True)]
    columns += [Column("PCP", right=True)] if with_pcp else []
    columns += [
        Column("TP", right=True),
        Column("LAYERS"),
        Column("HOST"),
        Column("PID", right=True, optional=True),
        Column("ADDRESS"),
        Column("HANDSHAKE", optional=True),
        Column("PAYLOAD", right=True),
    ]
    if wide:
        columns += [
            Column("DEVICE"),
            Column("KV"),
            Column("COMPAT"),
            Column("REVISION", right=True),
            Column("BOOT"),
            Column("LEASE"),
            Column("DIGEST"),
            Column("LABELS"),
        ]
    if payload:
        columns.append(Column("PAYLOAD_BASE64"))
    table = Table(columns)
    for worker, status in zip(topology.workers, topology.statuses, strict=True):
        slot, shake, kv = worker.slot, worker.handshake, worker.kv
        size = "asleep" if status.asleep else bytes_text(len(shake.payload)) if shake else ""
        cells: list[str | Text] = [str(slot.pp_rank)]
        cells += [str(slot.pcp_rank)] if with_pcp else []
        cells += [
            str(slot.tp_rank),
            layers_text(worker.layers),
            worker.process.hostname,
            str(worker.process.pid or ""),
            " ".join(map(address_text, worker.addresses)),
            f"{shake.format} v{shake.version}" if shake else "",
            Text(size, style="magenta") if status.asleep else size,
        ]
        if wide:
            cells += [
                worker.process.device,
                f"{kv.num_blocks}x{kv.block_size} {kv.layout}".strip() if kv else "",
                shorten(worker.compat.hash, 20) if worker.compat else "",
                str(status.revision),
                worker.process.boot_id,
                status.lease_id,
                status.record_digest.hex()[:12],
                ",".join(f"{key}={value}" for key, value in sorted(worker.labels.items())),
            ]
        if payload:
            cells.append(base64.b64encode(shake.payload).decode() if shake else "")
        table.add(*cells)
    return table


@click.command()
@engine_argument()
@click.option(
    "--allow-incomplete",
    is_flag=True,
    help="Exit 0 whatever the engine's state is, if the book knows it.",
)
@click.option("--payload", is_flag=True, help="Show the handshake payloads below the grid.")
@global_options()
@pass_invocation
def topology(invocation: Invocation, engine_id: str, allow_incomplete: bool, payload: bool) -> None:
    """Shows an engine: stages by ranks, layers, and what is wrong with it.

    Exits 0 for READY, DRAINING and COMPLETE, 5 for FORMING, DEGRADED, INVALID
    and GONE, 3 for an engine the book does not know. JSON carries the handshake
    payloads; -o wide adds hosts and the model.

    \b
    RPC: GetTopology
    Example:
      rankbook topology prefill-a-0
    """
    out = invocation.out
    with invocation.client() as client:
        found = client.get_topology(
            engine_id,
            require=Requirement.ANY,
            without_payload=not (out.as_json or payload),
        )
    assert found is not None  # only a caller that names a revision can be told "not modified"
    error = None if allow_incomplete else state_error(found, brief=not out.as_json)
    if out.as_json:
        shown = topology_json(found)
        if error is not None:
            shown["error"] = error_json(error)
        out.json(shown)
    else:
        out.stale(found.stale_s)
        glyphs = grid.UNICODE if out.unicode else grid.ASCII
        out.lines(
            picture.draw(found, now=invocation.now, width=out.width, glyphs=glyphs, wide=out.wide)
        )
        if payload:
            out.lines(["", *_payload_lines(found)])
    if error is not None:
        raise Reported(error)


def _payload_lines(topology: Topology) -> list[str]:
    return [
        f"{_slot_name(worker.slot)}  {worker.handshake.format} v{worker.handshake.version}  "
        f"{base64.b64encode(worker.handshake.payload).decode()}"
        for worker in topology.workers
        if worker.handshake is not None
    ]


def _slot_name(slot: Slot) -> str:
    return slots_text([slot])


@click.command()
@engine_argument()
@click.option("--payload", is_flag=True, help="Add the handshake payloads, in base64.")
@global_options()
@pass_invocation
def workers(invocation: Invocation, engine_id: str, payload: bool) -> None:
    """Lists an engine's workers, one line each, in slot order.

    JSON carries the whole records with their payloads.

    \b
    RPC: GetTopology
    Example:
      rankbook workers prefill-a-0 -o wide
    """
    out = invocation.out
    with invocation.client() as client:
        found = client.get_topology(
            engine_id,
            require=Requirement.ANY,
        )
    assert found is not None  # only a caller that names a revision can be told "not modified"
    out.stale(found.stale_s if not out.as_json else 0.0)
    if out.as_json:
        whole = topology_json(found)
        names = ("engine_id", "generation", "epoch", "state", "revision", "book_revision")
        out.json({name: whole[name] for name in (*names, "workers", "statuses")})
        return
    out.table(workers_table(found, wide=out.wide, payload=payload))
    if not found.workers:
        out.note(f"{engine_id} has no worker ({found.engine.state})")
