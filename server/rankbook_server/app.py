"""`rankbookd`: the command line of the server."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import typing
from pathlib import Path
from typing import Any

import click
import structlog

from rankbook.errors import BadRequest, RankbookError
from rankbook_server.clock import SystemClock
from rankbook_server.config import ENV_PREFIX, Config, Settings, load
from rankbook_server.logs import setup_logs
from rankbook_server.server import ListenError, Server, version

__all__ = ["cli", "main", "serve"]

_HELP = """Serve rankbook, the book of ranks.

Prefill and decode engines sign their workers in here, and find each other's
handshake metadata here. Without any flag, the book is kept in your state
folder and served to this machine only:

\b
    rankbookd
    rankbook engines            # in another terminal

Every setting below is also an environment variable (--max-sessions is
RANKBOOK_MAX_SESSIONS) and a line of the TOML file that --config names
(max_sessions = 100). A flag wins over the environment, that over the file.

SIGTERM and Ctrl-C stop it cleanly: what was acknowledged is kept, and workers
that renew within their lease's time after the next start have lost nothing.
"""


async def serve(settings: Settings) -> int:
    """Runs a server until a signal comes.

    Returns:
        The exit code: 0 after a clean stop, 1 when it could not start or a
        part of it failed.
    """
    log = structlog.get_logger("rankbook.server")
    try:
        server = Server(settings, SystemClock())
        await server.start()
    except (RankbookError, ListenError) as error:
        log.error("cannot start", error=str(error))
        return 1
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    failed = asyncio.create_task(server.failed())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((failed, stopping), return_when=asyncio.FIRST_COMPLETED)
    broken = failed.done()
    for task in (failed, stopping):
        task.cancel()
    await server.stop()
    return 1 if broken else 0


def _options() -> list[click.Option]:
    options = []
    for name, field in Settings.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        default = field.get_default()
        text = field.description or ""
        if default not in (None, False):
            text += (
                f" [default: {default:g}]"
                if isinstance(default, float)
                else (f" [default: {default}]")
            )
        kind: Any = str
        is_flag = field.annotation is bool
        if typing.get_origin(field.annotation) is typing.Literal:
            kind = click.Choice(typing.get_args(field.annotation))
        elif field.annotation in (int, float):
            kind = field.annotation
        metavar = {"listen": "HOST:PORT", "http": "HOST:PORT", "store": "URL"}.get(name)
        if metavar is None and "Path" in str(field.annotation):
            metavar = "FILE"
        options.append(
            click.Option(
                [flag],
                type=None if is_flag else kind,
                is_flag=is_flag,
                default=None,
                metavar=metavar,
                help=text,
            )
        )
    return options


def _run(config: Path | None, show_config: bool, **flags: Any) -> None:
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        loaded: Config = load(given, os.environ, config)
    except BadRequest as error:
        click.echo(f"rankbookd: {error.message}", err=True)
        sys.exit(2)
    if show_config:
        click.echo("\n".join(loaded.lines()))
        return
    setup_logs(loaded.settings.log_format, loaded.settings.log_level)
    sys.exit(asyncio.run(serve(loaded.settings)))


cli = click.Command(
    "rankbookd",
    help=_HELP,
    callback=_run,
    params=[
        *_options(),
        click.Option(
            ["--config"],
            type=click.Path(path_type=Path),
            envvar=f"{ENV_PREFIX}CONFIG",
            metavar="FILE",
            help="a TOML file with settings",
        ),
        click.Option(
            ["--show-config"], is_flag=True, help="print every setting with its origin, and exit"
        ),
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
click.version_option(version(), prog_name="rankbookd")(cli)


def main() -> None:
    """Entry point of `rankbookd`."""
    cli.main()


if __name__ == "__main__":
    main()
