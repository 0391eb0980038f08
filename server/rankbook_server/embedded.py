"""A server inside another program's process: over a store, for that process alone.

It listens on a socket file in a folder that only this user may enter, in a
thread with a loop of its own, and ends with the process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import random
import shutil
import tempfile
import threading
from pathlib import Path

import structlog

from rankbook_server.clock import SystemClock
from rankbook_server.config import Settings, load
from rankbook_server.server import Server
from rankbook_server.store import open_store

__all__ = ["serve"]

_STOP_S = 5.0
_SPREAD_S = 1.0
# Every process that serves itself sees what is due at the same moment; the first
# to act spares the others the work.

_log = logging.getLogger(__name__)


def serve(url: str) -> str:
    """Starts a server over a shared store; returns gRPC's target for it at once.

    The store need not be there: calls are refused with the reason until it is.

    Args:
        url: The store's URL.

    Raises:
        BadRequest: The URL is malformed.
    """
    # Looked at here, so that it is the caller who gets the error.
    open_store(url, SystemClock().mono, SystemClock().new_id)
    if not structlog.is_configured():
        _log_like_the_host()
    folder = Path(tempfile.mkdtemp(prefix="rankbook-"))
    target = f"unix:{folder / 'socket'}"
    flags = {"store": url, "listen": target, "http": "off", "drain_grace": 0.0}
    # The variables of a rankbookd in the environment are not meant for this one.
    _Host(load(flags, {}, None).settings, folder).start()
    return target


class _Host:
    """The thread, and its end with the process."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(
            target=self._run, name="rankbook-embedded-server", daemon=True
        )

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()
        atexit.register(self._end)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:  # noqa: BLE001 - a thread's fault is seen nowhere else
            _log.exception("the server over %s ended", self._settings.store)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        spread_s = random.random() * _SPREAD_S
        server = Server(self._settings, SystemClock(), spread_s=spread_s, alone=True)
        await server.start()
        failed = asyncio.create_task(server.failed())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((failed, stopping), return_when=asyncio.FIRST_COMPLETED)
        for task in (failed, stopping):
            task.cancel()
        await server.stop()

    def _end(self) -> None:
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_STOP_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def _log_like_the_host() -> None:
    """Has the server's events go where this program's own log goes."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
