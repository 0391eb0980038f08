"""/healthz, /livez, /readyz and /metrics, in the server's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from rankbook_server.metrics import CONTENT_TYPE

__all__ = ["MAX_CONNECTIONS", "MAX_CONNECTION_S", "WebServer", "web_app"]

MAX_CONNECTIONS = 200
"""Most connections at a time."""
MAX_CONNECTION_S = 30.0
"""Longest life of a connection, in seconds."""

_PATHS = ("/healthz", "/livez", "/readyz", "/metrics")


def web_app(ready: Callable[[], bool], metrics: Callable[[], bytes]) -> Starlette:
    """The application.

    Args:
        ready: Whether the book is loaded and its store reachable.
        metrics: The metrics in Prometheus' text format.
    """

    def live(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    def readiness(_: Request) -> Response:
        if ready():
            return PlainTextResponse("ok\n")
        return PlainTextResponse("the store is away or the server is stopping\n", 503)

    def show_metrics(_: Request) -> Response:
        return Response(metrics(), media_type=CONTENT_TYPE)

    async def call(handler: Callable[[Request], Response], request: Request) -> Response:
        return handler(request)

    def route(path: str, handler: Callable[[Request], Response]) -> Route:
        # A coroutine, so that it runs in the loop: what it reads is the loop's.
        async def endpoint(request: Request) -> Response:
            return await call(handler, request)

        return Route(path, endpoint)

    async def lost(request: Request, error: Exception) -> Response:
        return JSONResponse(
            {
                "error": {
                    "reason": "NOT_FOUND",
                    "message": f"there is nothing at {request.url.path}; here are "
                    f"{', '.join(_PATHS)}. Engines are asked for over gRPC, on another port",
                }
            },
            404,
        )

    return Starlette(
        routes=[
            route("/healthz", readiness),
            route("/readyz", readiness),
            route("/livez", live),
            route("/metrics", show_metrics),
        ],
        exception_handlers={404: lost},
    )


class _Connection(H11Protocol):
    """One that ends: what asks here is done in milliseconds or holds a place on purpose.

    A probe must get in whatever else is open, so a connection too many costs
    the oldest its place and not the newest.
    """

    opened_s = 0.0
    _end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Gives it a place and an end."""
        super().connection_made(transport)
        self.opened_s = self.loop.time()
        self._end = self.loop.call_later(MAX_CONNECTION_S, transport.abort)
        kept = [
            one
            for one in self.connections
            if isinstance(one, _Connection) and not one.transport.is_closing()
        ]
        if len(kept) > MAX_CONNECTIONS:
            min(kept, key=lambda one: one.opened_s).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives its place back."""
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """Leaves signals to the process's own handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes no signal."""
        yield


class WebServer:
    """Serves an application on a socket of its own until told to stop."""

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._server: _Server | None = None

    @staticmethod
    def bind(host: str, port: int) -> socket.socket:
        """A listening socket.

        Raises:
            OSError: The address is in use or not this machine's.
        """
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

    async def run(self, listener: socket.socket) -> None:
        """Serves until `stop`."""
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="off",
            loop="none",
            ws="none",
            http=_Connection,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        await self._server.serve(sockets=[listener])

    def stop(self) -> None:
        """Has `run` return soon."""
        if self._server is not None:
            self._server.should_exit = True
