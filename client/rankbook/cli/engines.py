"""`rankbook engines`: one line an engine."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.text import Text

from rankbook import convert, v1
from rankbook.cli.invocation import Invocation, global_options, pass_invocation
from rankbook.cli.output import Column, Table
from rankbook.cli.words import (
    STATE_STYLES,
    address_text,
    age_text,
    clean,
    grid_text,
    shorten,
    stages_text,
)
from rankbook.model import Engine, EngineFilter, Role, State

__all__ = ["engine_json", "engines", "engines_table", "filter_options", "make_filter", "state_text"]


def engine_json(engine: Engine) -> dict[str, Any]:
    """An engine as every JSON output shows it: proto field names, zeros written."""
    return convert.to_json(convert.to_message(engine, v1.Engine))


def state_text(state: State) -> Text:
    """A state in its colour."""
    return Text(str(state), style=STATE_STYLES[state])


def engines_table(engines: Iterable[Engine], now: dt.datetime, *, wide: bool = False) -> Table:
    """The table of engines.

    Args:
        engines: In the order to show.
        now: The moment that ages are counted to.
        wide: With every column.
    """
    columns = [
        Column("ENGINE"),
        Column("GROUP"),
        Column("ROLE", optional=True),
        Column("STATE"),
        Column("EPOCH", right=True),
        Column("GRID"),
        Column("RANKS", right=True),
        Column("LAYERS", right=True, optional=True),
        Column("STAGES", optional=True),
        Column("AGE", right=True),
    ]
    if wide:
        columns += [
            Column("REPLICA"),
            Column("DP", right=True),
            Column("GENERATION"),
            Column("REVISION", right=True),
            Column("SEAL", right=True),
            Column("CORE"),
            Column("MODEL"),
            Column("COMPAT"),
            Column("PROBLEMS"),
            Column("LABELS"),
        ]
    table = Table(columns)
    for engine in engines:
        whole = engine.present == engine.declared
        cells: list[str | Text] = [
            engine.engine_id,
            engine.group,
            str(engine.role),
            state_text(engine.state),
            str(engine.epoch),
            grid_text(engine.layout),
            Text(f"{engine.present}/{engine.declared}", style="" if whole else "red"),
            str(engine.layout.num_layers),
            stages_text(engine.stages),
            age_text(engine.start_time, now),
        ]
        if wide:
            cells += _wide_cells(engine)
        table.add(*cells)
    return table


def _wide_cells(engine: Engine) -> list[str | Text]:
    core = engine.core
    addresses = [address_text(address) for address in core.addresses] if core else []
    problems = {problem.reason: None for problem in engine.problems}
    return [
        engine.replica,
        str(engine.dp_rank),
        engine.generation,
        str(engine.revision),
        str(engine.seal.number) if engine.seal else "",
        " ".join(addresses) or (clean(core.process.hostname) if core else ""),
        engine.model.name if engine.model else "",
        " ".join(shorten(value, 16) for value in engine.compat_hashes),
        ",".join(problems),
        ",".join(f"{key}={value}" for key, value in sorted(engine.labels.items())),
    ]


def filter_options(command: Any) -> Any:
    """The flags that choose engines, for `engines` and `watch`."""
    roles = [str(role) for role in Role if role is not Role.UNSPECIFIED]
    states = [str(state) for state in State if state is not State.UNSPECIFIED]
    for option in (
        click.option("--compat-hash", default="", help="Engines with a worker of this hash."),
        click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Repeatable."),
        click.option("--model", default="", help="Engines of this model name."),
        click.option(
            "--state",
            "states",
            multiple=True,
            type=click.Choice(states, case_sensitive=False),
            help="Engines in one of these states; repeatable.",
        ),
        click.option(
            "--role",
            type=click.Choice(roles, case_sensitive=False),
            help="Engines of this role; BOTH counts as either.",
        ),
        click.option("--group", default="", help="Engines of this group."),
    ):
        command = option(command)
    return command


def make_filter(
    group: str,
    role: str | None,
    states: Sequence[str],
    model: str,
    labels: Sequence[str],
    compat_hash: str,
    engine_id: str = "",
) -> EngineFilter:
    """The filter that the flags ask for.

    Raises:
        click.UsageError: A label is not KEY=VALUE.
    """
    pairs = {}
    for label in labels:
        key, equals, value = label.partition("=")
        if not equals or not key:
            raise click.UsageError(f"--label {label!r} is not KEY=VALUE")
        pairs[key] = value
    return EngineFilter(
        group=group,
        role=Role(role.upper()) if role else Role.UNSPECIFIED,
        model=model,
        labels=pairs,
        states=tuple(State(state.upper()) for state in states),
        compat_hash=compat_hash,
        engine_id=engine_id,
    )


@click.command()
@filter_options
@global_options()
@pass_invocation
def engines(
    invocation: Invocation,
    group: str,
    role: str | None,
    states: tuple[str, ...],
    model: str,
    labels: tuple[str, ...],
    compat_hash: str,
) -> None:
    """Lists engines, one line each.

    RANKS is present/declared, STAGES the layers of each stage, AGE the time
    since the current generation got its first worker. A GONE engine is shown
    until its tombstone is dropped.

    \b
    RPC: ListEngines
    Example:
      rankbook engines --group prefill-a --state ready
    """
    wanted = make_filter(group, role, states, model, labels, compat_hash)
    with invocation.client() as client:
        listed = client.list_engines(wanted)
    out = invocation.out
    if out.as_json:
        out.json(
            {
                "engines": [engine_json(engine) for engine in listed.engines],
                "book_revision": listed.book_revision,
                "book_id": listed.book_id,
                "stale_s": listed.stale_s,
            }
        )
        return
    out.stale(listed.stale_s)
    out.table(engines_table(listed.engines, invocation.now, wide=out.wide))
    if not listed.engines:
        namespace = invocation.settings.namespace
        unasked = wanted == EngineFilter()
        what = "no engine is in" if unasked else "no engine is as asked for in"
        out.note(f"{what} namespace {namespace}")
