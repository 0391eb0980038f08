"""The proxy's command line. NOT for production."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import uvicorn
from starlette.applications import Starlette

import rankbook
from rankbook.errors import RankbookError
from rankbook_vllm.config import DEFAULT_ENDPOINT
from rankbook_vllm.proxy.app import Proxy

__all__ = ["cli"]

DEFAULT_LISTEN = "127.0.0.1:7430"
_MAX_REQUESTS = 256
_GRACE_S = 2

_HELP = """A small prefill/decode proxy for trying things out. NOT for production.

It watches the registry and sends each request to a READY producer for the
prefill and then to a READY consumer, each in turn. An engine needs the setting
serving_address (HOST:PORT). There is no TLS and no user: whoever reaches
--listen may use the engines.

\b
POST /v1/completions, /v1/chat/completions    with and without a stream
GET  /health                                  200 once the book has been read
GET  /engines                                 whom it would ask
"""


def _listen(_: click.Context, __: click.Parameter, value: str) -> tuple[str, int]:
    host, colon, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise click.BadParameter(f"{value!r} is no HOST:PORT, for example 127.0.0.1:7430")
    return host, int(port)


@click.command(
    help=_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--listen",
    default=DEFAULT_LISTEN,
    show_default=True,
    metavar="HOST:PORT",
    callback=_listen,
    help="Where to take requests; port 0 takes a free one.",
)
@click.option(
    "--server",
    "-s",
    envvar="RANKBOOK_SERVER",
    default=DEFAULT_ENDPOINT,
    show_default=True,
    show_envvar=True,
    metavar="HOST:PORT",
    help="Registry to watch, or several with commas. A token is taken from RANKBOOK_TOKEN.",
)
@click.option(
    "--namespace",
    "-n",
    envvar="RANKBOOK_NAMESPACE",
    default="default",
    show_default=True,
    show_envvar=True,
    help="Part of the book to look at.",
)
@click.option("--prefill-group", default="", help="Only producers of this group.")
@click.option("--decode-group", default="", help="Only consumers of this group.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.1),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest silence of an engine, also between two tokens of a stream.",
)
@click.option(
    "--all-params",
    is_flag=True,
    help="Pass on all kv_transfer_params that the producer returned, for consumers that do not "
    "look their peers up in the book.",
)
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Written once serving, as JSON (http, pid); removed at the end.",
)
def cli(
    listen: tuple[str, int],
    server: str,
    namespace: str,
    prefill_group: str,
    decode_group: str,
    timeout: float,
    all_params: bool,
    ready_file: Path | None,
) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    host, port = listen
    try:
        listener = _bind(host, port)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}") from None
    address = f"[{host}]" if ":" in host else host
    address += f":{listener.getsockname()[1]}"

    def serving() -> None:
        click.echo(
            f"rankbook proxy, for trying things out, NOT for production: http://{address}, "
            f"registry {server}, producers of {prefill_group or 'every group'}, "
            f"consumers of {decode_group or 'every group'}",
            err=True,
        )
        if ready_file is not None:
            _write_ready(ready_file, address)

    try:
        with (
            listener,
            rankbook.Client(server, namespace=namespace) as client,
            rankbook.TopologyView(client, without_payload=True) as view,
        ):
            proxy = Proxy(
                view,
                prefill_group=prefill_group,
                decode_group=decode_group,
                timeout_s=timeout,
                all_params=all_params,
            )
            asyncio.run(_serve(proxy.app(), listener, serving))
    except RankbookError as error:
        raise click.ClickException(error.message) from None
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _write_ready(path: Path, address: str) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps({"http": address, "pid": os.getpid()}) + "\n", encoding="utf-8")
    fresh.replace(path)


class _Server(uvicorn.Server):
    """Says when it serves, and leaves signals to the process's own handlers."""

    def __init__(self, config: uvicorn.Config, serving: Callable[[], None]) -> None:
        super().__init__(config)
        self._serving = serving

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes no signal."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts, then says so."""
        await super().startup(sockets)
        self._serving()


async def _serve(app: Starlette, listener: socket.socket, serving: Callable[[], None]) -> None:
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            loop="none",
            http="h11",
            ws="none",
            limit_concurrency=_MAX_REQUESTS,
            timeout_graceful_shutdown=_GRACE_S,
        ),
        serving,
    )

    def stop() -> None:
        if server.should_exit:
            os._exit(1)
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await server.serve(sockets=[listener])
