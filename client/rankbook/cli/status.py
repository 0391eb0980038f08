"""`rankbook status`, `config show` and `completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from rankbook import convert, v1
from rankbook.cli.invocation import Invocation, global_options, pass_invocation
from rankbook.cli.output import Column, Table
from rankbook.cli.words import age_text
from rankbook.errors import Internal

__all__ = ["completion", "config", "status"]


@click.command()
@global_options()
@pass_invocation
def status(invocation: Invocation) -> None:
    """Shows how the registry does: version, book, store, revision, counts.

    \b
    RPC: GetStatus
    Example:
      rankbook status -o json
    """
    with invocation.client() as client:
        found = client.status()
    out = invocation.out
    if out.as_json:
        out.json(convert.to_json(convert.to_message(found, v1.GetStatusResponse)))
        return
    table = Table([Column("WHAT"), Column("VALUE")])
    engines = ", ".join(f"{count} {state}" for state, count in sorted(found.engines.items()))
    clock = "-"
    if found.server_time is not None:
        clock = f"{(invocation.now - found.server_time).total_seconds():+.3f} s"
    stale = f" (cut off for {found.stale_for_s:.0f} s)" if found.stale_for_s else ""
    for name, value in (
        ("server", ",".join(invocation.settings.endpoints)),
        ("namespace", invocation.settings.namespace),
        ("version", found.version),
        ("up", age_text(found.start_time, found.server_time or invocation.now)),
        ("boot id", found.boot_id),
        ("book id", found.book_id),
        ("store", f"{found.store} ({'available' if found.store_available else 'AWAY'})"),
        ("book revision", str(found.book_revision) + stale),
        ("engines", engines or "none"),
        ("workers", str(found.workers)),
        ("leases", str(found.leases)),
        ("watchers", str(found.watchers)),
        ("sessions", str(found.sessions)),
        ("epoch floor", str(found.epoch_floor)),
        ("horizon revision", str(found.horizon_revision)),
        ("our clock minus its", clock),
    ):
        table.add(name, value)
    out.table(table)


@click.group()
def config() -> None:
    """Shows the settings of this command line."""


@config.command()
@global_options(hidden=False)
@pass_invocation
def show(invocation: Invocation) -> None:
    """Shows every setting with where its value comes from.

    A flag wins over a RANKBOOK_* variable, a variable over the default. Secrets
    are only said to be set.

    \b
    RPC: none
    Example:
      rankbook config show
    """
    out = invocation.out
    values = invocation.settings.values
    if out.as_json:
        out.json(
            {
                "settings": [
                    {
                        "name": value.setting.name,
                        "value": value.shown,
                        "origin": value.origin,
                        "flag": value.setting.flags[0],
                        "variable": value.setting.variable,
                    }
                    for value in values
                ]
            }
        )
        return
    table = Table([Column("SETTING"), Column("VALUE"), Column("ORIGIN"), Column("VARIABLE")])
    for value in values:
        table.add(value.setting.name, value.shown, value.origin, value.setting.variable)
    out.table(table)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Prints the completion script of a shell; engine ids complete from the book.

    \b
    RPC: ListEngines, when an engine is completed
    Example:
      eval "$(rankbook completion bash)"
      rankbook completion fish > ~/.config/fish/completions/rankbook.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise Internal(f"no completion for {shell}")
    script = kind(ctx.find_root().command, {}, "rankbook", "_RANKBOOK_COMPLETE").source_vars()
    click.echo(kind.source_template % script)
