"""`rankbook doctor`: what is wrong, why it matters, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from google.protobuf.message import Message
from rich.text import Text

import rankbook
from rankbook import convert
from rankbook.cli.findings import Finding, registry_findings, topology_findings, unreachable
from rankbook.cli.invocation import (
    Invocation,
    Reported,
    global_options,
    pass_invocation,
)
from rankbook.cli.output import error_json, wrapped
from rankbook.cli.words import clean
from rankbook.errors import (
    DeadlineExceeded,
    NotFound,
    RankbookError,
    Refused,
    Unavailable,
)
from rankbook.model import Requirement, Role, Severity, State, Status, Topology

__all__ = ["doctor"]

_PATIENCE_S = 4.0
"""A registry that is away is reported within so long, whatever --timeout says."""
_MAX_PAIRS = 200
_LOOKS = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "dim"}
_USABLE = frozenset((State.READY, State.COMPLETE, State.DRAINING))


@click.command()
@click.argument("engine_id", metavar="[ENGINE]", required=False)
@global_options()
@pass_invocation
def doctor(invocation: Invocation, engine_id: str | None) -> None:
    """Looks for what is wrong: the registry, and every engine or just one.

    Each finding has an id, a severity, the evidence, why it matters and what
    to do. Exits 0 when nothing of severity ERROR was found, else 5; 4 when no
    registry answers.

    \b
    RPC: GetStatus, ListEngines, GetTopology, ComparePeers
    Example:
      rankbook doctor
      rankbook doctor prefill-a-0 -o json
    """
    endpoints = invocation.settings.endpoints
    patience = min(invocation.settings.timeout_s, _PATIENCE_S)
    with invocation.client() as client:
        try:
            status = client.status(timeout_s=patience)
        except (Unavailable, DeadlineExceeded) as trouble:
            away: RankbookError = trouble
            if isinstance(trouble, DeadlineExceeded):
                # Whatever listens there says nothing: as good as nobody.
                away = Unavailable(trouble.message, metadata=trouble.metadata)
            _report(invocation, [unreachable(endpoints, away)], None, 0, away)
            raise Reported(away) from trouble
        found = registry_findings(
            status,
            endpoints=endpoints,
            client_version=rankbook.__version__,
            now=invocation.now,
        )
        try:
            topologies = _read(client)
        except Unavailable as away:
            if status.store_available:
                raise
            # What was found of the registry says why nothing can be read.
            _report(invocation, found, status, 0, away)
            raise Reported(away) from away
        if engine_id is not None and all(
            topology.engine.engine_id != engine_id for topology in topologies
        ):
            # Not among the living: the book's own answer says what became of it.
            client.get_topology(engine_id, require=Requirement.COMPLETE, without_payload=True)
        found += topology_findings(
            topologies, _broken_pairs(client, topologies, engine_id), now=invocation.now
        )
    if engine_id is not None:
        found = [
            finding
            for finding in found
            if engine_id in finding.subject.split(",") or finding.subject == ",".join(endpoints)
        ]
        topologies = [one for one in topologies if one.engine.engine_id == engine_id]
    errors = [finding for finding in found if finding.severity is Severity.ERROR]
    error: RankbookError | None = None
    if any(finding.id == "STORE_AWAY" for finding in errors):
        # What a server without its store knows may be read, and is not what is asked.
        error = Unavailable(
            "the registry is cut off from its store: it takes no writes",
            reason=rankbook.Reason.STORE_UNAVAILABLE,
            metadata={"findings": ",".join(finding.id for finding in errors)},
        )
    elif errors:
        error = Refused(
            f"{len(errors)} of {len(found)} findings are errors",
            reason=rankbook.Reason.ENGINE_INCOMPLETE
            if errors[0].id == "MISSING_RANKS"
            else rankbook.Reason.ENGINE_INVALID,
            metadata={"findings": ",".join(finding.id for finding in errors)},
        )
    _report(invocation, found, status, len(topologies), error)
    if error is not None:
        raise Reported(error)


def _read(client: rankbook.Client) -> list[Topology]:
    """Every engine that is not GONE, with its workers."""
    topologies = []
    for engine in client.list_engines().engines:
        if engine.state is State.GONE:
            continue
        try:
            topology = client.get_topology(
                engine.engine_id, require=Requirement.ANY, without_payload=True
            )
        except NotFound:
            continue  # it left between the two calls
        if topology is not None:
            topologies.append(topology)
    return topologies


def _broken_pairs(
    client: rankbook.Client, topologies: Sequence[Topology], engine_id: str | None
) -> list[tuple[str, str, list[str]]]:
    """Producers and consumers of one model that may not pair, with every reason."""
    usable = [one.engine for one in topologies if one.engine.state in _USABLE]
    producers = [one for one in usable if one.role in (Role.PRODUCER, Role.BOTH)]
    consumers = [one for one in usable if one.role in (Role.CONSUMER, Role.BOTH)]
    pairs = [
        (producer.engine_id, consumer.engine_id)
        for producer in producers
        for consumer in consumers
        if producer.engine_id != consumer.engine_id
        and (producer.model.name if producer.model else "")
        == (consumer.model.name if consumer.model else "")
        and (engine_id is None or engine_id in (producer.engine_id, consumer.engine_id))
    ]
    broken = []
    for producer_id, consumer_id in pairs[:_MAX_PAIRS]:
        try:
            reply: Any = client.compare_peers(producer_id, consumer_id)
        except (NotFound, Refused):
            continue  # one of them changed meanwhile
        shown = convert.to_json(reply) if isinstance(reply, Message) else reply.as_dict()
        if not shown["compatible"]:
            reasons = [f"{one['reason']}: {one['message']}" for one in shown["reasons"]]
            broken.append((producer_id, consumer_id, reasons))
    return broken


def _report(
    invocation: Invocation,
    found: Sequence[Finding],
    status: Status | None,
    engines: int,
    error: RankbookError | None,
) -> None:
    out = invocation.out
    server = None
    if status is not None:
        server = {
            "endpoints": list(invocation.settings.endpoints),
            "version": status.version,
            "store": status.store,
            "book_id": status.book_id,
            "book_revision": status.book_revision,
        }
    if out.as_json:
        shown: dict[str, Any] = {
            "findings": [finding.as_json() for finding in found],
            "server": server,
            "engines": engines,
        }
        out.json({**shown, "error": error_json(error)} if error else shown)
        return
    lines: list[str | Text] = []
    if status is not None:
        looked = (
            f"registry {','.join(invocation.settings.endpoints)}: rankbookd {status.version}, "
            f"{status.store}, revision {status.book_revision}; "
            f"{engines} engine{'' if engines == 1 else 's'} looked at"
        )
        lines += wrapped(Text(looked), out.width)
    for finding in found:
        style = _LOOKS.get(finding.severity, "")
        lines += [
            "",
            Text.assemble(
                (f"{finding.severity} {finding.id}", style), "  ", (finding.subject, "bold")
            ),
        ]
        for name, words in (
            ("seen", finding.evidence),
            ("why ", finding.why),
            ("do  ", finding.next_step),
        ):
            lines += wrapped(Text(f"  {name}  {clean(words)}"), out.width, " " * 8)
    if not found:
        lines.append(Text("nothing found", style="green"))
    out.lines(lines)
