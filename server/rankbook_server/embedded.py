"""A server beside another program's process: over a store, for that process alone.

It is a small process of its own, so that the program may fork, block its
interpreter, or log as it likes. It listens on a socket file in a folder that only
this user may enter, ends with the program, and takes the folder with it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rankbook.errors import Reason, Unavailable
from rankbook_server.clock import SystemClock
from rankbook_server.config import load
from rankbook_server.logs import setup_logs
from rankbook_server.server import Server
from rankbook_server.store import open_store

__all__ = ["LOG_VARIABLE", "EmbeddedServer", "serve"]

LOG_VARIABLE = "RANKBOOK_STORE_LOG"
"""Set to "off" in the environment: nothing is written to standard error."""
_START_S = 10.0
_GRACE_S = 5.0
# So long after the program's end its heartbeat may still give its lease up.
_SPREAD_S = 1.0
# Every process that serves itself sees what is due at the same moment; the first
# to act spares the others the work.
_PARENT_POLL_S = 0.5


class EmbeddedServer:
    """A server of this process. Safe from any thread."""

    def __init__(self, target: str, process: subprocess.Popen[bytes]) -> None:
        self.target = target
        """gRPC's name of it."""
        self._process = process

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Asks it to end, and does not wait."""
        with contextlib.suppress(OSError):
            self._process.terminate()


def serve(url: str) -> EmbeddedServer:
    """Starts a server over a shared store; returns once it listens.

    The store need not be there: calls are refused with the reason until it is.

    Args:
        url: The store's URL.

    Raises:
        BadRequest: The URL is malformed.
        Unavailable: It does not start.
    """
    # Looked at here, so that it is the caller who gets the error.
    open_store(url, SystemClock().mono, SystemClock().new_id)
    folder = tempfile.mkdtemp(prefix="rankbook-")
    quiet = os.environ.get(LOG_VARIABLE) == "off"
    environment = {"GRPC_VERBOSITY": "NONE", **os.environ}
    # So that it finds these very packages, wherever they were imported from.
    here = [str(Path(module).resolve().parents[1]) for module in (__file__, _client_file())]
    paths = [*here, *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, url, folder, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as said:
        ready, _, _ = select.select([said], [], [], _START_S)
        if not ready or not said.read(1):
            process.kill()
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)
            raise Unavailable(
                f"the server of this process over {url.partition('?')[0]} did not start: its words "
                f"on standard error say why ({LOG_VARIABLE}=off leaves them out)",
                reason=Reason.UNREACHABLE,
                metadata={"store": url.partition("?")[0]},
            )
    server = EmbeddedServer(_target(folder), process)
    atexit.register(server.stop)
    return server


def _client_file() -> str:
    import rankbook

    return str(rankbook.__file__)


def _target(folder: str) -> str:
    return f"unix:{folder}/socket"


async def _serve(url: str, folder: str, parent: int) -> None:
    flags = {"store": url, "listen": _target(folder), "http": "off", "drain_grace": 0.0}
    # The variables of a rankbookd in the environment are not meant for this one.
    settings = load(flags, {}, None).settings
    spread_s = random.random() * _SPREAD_S
    server = Server(settings, SystemClock(), spread_s=spread_s, alone=True)
    server.on_bound = _say_bound
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    await server.start()
    ends = [
        asyncio.create_task(server.failed()),
        asyncio.create_task(_outlive(parent)),
        asyncio.create_task(told.wait()),
    ]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in ends:
        task.cancel()
    await server.stop()


def _say_bound() -> None:
    with contextlib.suppress(OSError):
        os.write(1, b"!")
        os.close(1)


async def _outlive(parent: int) -> None:
    """Returns a while after the program has ended."""
    while os.getppid() == parent:  # noqa: ASYNC110 - no event tells of a parent's end
        await asyncio.sleep(_PARENT_POLL_S)
    await asyncio.sleep(_GRACE_S)


def main() -> None:
    """Serves until the program that started this has ended."""
    url, folder, parent = sys.argv[1], sys.argv[2], int(sys.argv[3])
    setup_logs("json", "error")
    try:
        asyncio.run(_serve(url, folder, parent))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
