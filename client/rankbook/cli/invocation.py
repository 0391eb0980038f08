"""One run of the command: its settings, its output, its client.

`global_options` puts the global flags on a command, so that
`rankbook -o json engines` and `rankbook engines -o json` are the same.
"""

from __future__ import annotations

import datetime as dt
import os
import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import click

import rankbook
from rankbook import _clock
from rankbook.cli.durations import Seconds
from rankbook.cli.output import Output, open_output
from rankbook.cli.settings import FORMS, TABLE, Settings, resolve
from rankbook.errors import RankbookError

__all__ = ["Invocation", "Reported", "engine_argument", "global_options", "pass_invocation"]

F = TypeVar("F", bound=Callable[..., Any])


class Reported(Exception):
    """Ends a command whose data already carries the error; only the words are left to say."""

    def __init__(self, error: RankbookError) -> None:
        super().__init__(error.message)
        self.error = error


class Invocation:
    """What the commands share. Opens nothing until it is asked for."""

    def __init__(self) -> None:
        self.flags: dict[str, Any] = {}

    @cached_property
    def settings(self) -> Settings:
        """The global values.

        Raises:
            BadRequest: One of them is none that it takes.
        """
        return resolve(self.flags, os.environ)

    @cached_property
    def out(self) -> Output:
        """Where data and words go."""
        return open_output(sys.stdout, sys.stderr, self.settings.form, os.environ)

    @property
    def now(self) -> dt.datetime:
        """This host's wall clock; ages are counted to it."""
        return dt.datetime.fromtimestamp(_clock.unix_s(), dt.UTC)

    def client(self) -> rankbook.Client:
        """A client of the registry; close it, or use it as a context manager."""
        settings = self.settings
        return rankbook.Client(
            settings.endpoints,
            namespace=settings.namespace,
            timeout_s=settings.timeout_s,
            token=settings.token,
        )

    def async_client(self) -> rankbook.AsyncClient:
        """The same for code on an event loop."""
        settings = self.settings
        return rankbook.AsyncClient(
            settings.endpoints,
            namespace=settings.namespace,
            timeout_s=settings.timeout_s,
            token=settings.token,
        )


pass_invocation = click.make_pass_decorator(Invocation, ensure=True)


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is not None:
        ctx.ensure_object(Invocation).flags[str(param.name)] = value
    else:
        ctx.ensure_object(Invocation)


def global_options(*, hidden: bool = True, without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Puts the global flags on a command.

    Args:
        hidden: Leaves all but --output out of the command's help.
        without: Settings whose flag means something else here.
    """

    def wrap(command: F) -> F:
        for setting in reversed(TABLE):
            if setting.name in without:
                continue
            kind: click.ParamType[Any] | None = None
            if setting.name == "output":
                kind = click.Choice(FORMS)
            default = f"default {setting.default}; " if setting.default else ""
            command = click.option(
                *setting.flags,
                setting.name,
                type=kind or str,
                metavar=_METAVARS[setting.name],
                callback=_check_timeout if setting.name == "timeout" else _remember,
                expose_value=False,
                hidden=hidden and setting.name != "output",
                help=f"{setting.help}  [{default}env {setting.variable}]",
            )(command)
        return command

    return wrap


_METAVARS = {
    "server": "ADDR",
    "namespace": "NS",
    "output": "|".join(FORMS),
    "timeout": "DURATION",
    "token": "TOKEN",
}


def _check_timeout(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is not None:
        Seconds(above_zero=True).convert(value, param, ctx)
    _remember(ctx, param, value)


def _complete_engine(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Engine ids for the shell's completion; none when the registry does not answer at once."""
    root = ctx.find_root()
    flags = {s.name: root.params.get(s.name) for s in TABLE}
    try:
        settings = resolve(flags, os.environ)
        with rankbook.Client(
            settings.endpoints, namespace=settings.namespace, timeout_s=1.0, token=settings.token
        ) as client:
            listed = client.list_engines().engines
    except RankbookError:
        return []
    return [engine.engine_id for engine in listed if engine.engine_id.startswith(incomplete)]


def engine_argument(name: str = "engine_id", metavar: str = "ENGINE") -> Callable[[F], F]:
    """An argument that takes an engine id and completes from the book."""
    return click.argument(name, metavar=metavar, shell_complete=_complete_engine)
