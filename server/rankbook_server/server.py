"""The running server: builds every part, starts them, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rankbook.errors import BadRequest
from rankbook.limits import MAX_MESSAGE_BYTES
from rankbook_server.clock import Clock
from rankbook_server.config import Listen, Settings, parse_listen
from rankbook_server.core.fold import BookLimits
from rankbook_server.drains import Drains
from rankbook_server.metrics import Metrics
from rankbook_server.peers import Peers
from rankbook_server.registry import Registry, RegistryLimits
from rankbook_server.rpc.calls import Calls
from rankbook_server.rpc.methods import SERVICE
from rankbook_server.rpc.service import Service, shutting_down
from rankbook_server.rpc.status import boundary
from rankbook_server.store import open_store
from rankbook_server.store.base import is_shared
from rankbook_server.view import View
from rankbook_server.waiters import Waiters
from rankbook_server.watch import Hub

__all__ = ["LIVENESS", "READINESS", "ListenError", "Server", "version"]

READINESS = "rankbook.v1"
"""Health service that is SERVING while the book is loaded and its store reachable."""
LIVENESS = "live"
"""Health service that is SERVING while the process runs."""
_PROGRESS_S = 10.0
_OPEN_S = 1.0
# A store that is there takes half of it; a client waits two for a connection.
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def version() -> str:
    """Version of the installed server."""
    return metadata.version("rankbook")


class ListenError(Exception):
    """An address cannot be listened on; the message says which and what to do."""

    def __init__(self, flag: str, listen: Listen, why: str) -> None:
        super().__init__(
            f"cannot listen on {listen} ({flag}): {why}; choose another port, or 0 for a free one"
        )


class Server:
    """rankbookd in one object. For one event loop; `start`, then `stop`."""

    def __init__(
        self, settings: Settings, clock: Clock, *, spread_s: float = 0.0, alone: bool = False
    ) -> None:
        """Builds every part and opens nothing.

        Args:
            settings: All settings.
            clock: Time and ids.
            spread_s: Upkeep is done so much later than it is due, in seconds.
            alone: Serves nobody but its own process.

        Raises:
            BadRequest: The store's URL means no store.
        """
        self._settings = settings
        self._log = structlog.get_logger("rankbook.server")
        self._listen = parse_listen(settings.listen)
        store = open_store(settings.store, clock.mono, clock.new_id)
        limits = RegistryLimits(
            book=BookLimits(
                max_engines=settings.max_engines,
                max_leases=settings.max_leases,
                tombstone_ttl_s=settings.tombstone_ttl,
            ),
            max_namespaces=settings.max_namespaces,
            sweep_s=min(10.0, max(settings.tombstone_ttl / 4, 0.25)),
            # The clock of whatever machine a tool runs on must not end anything.
            sweeps=not alone,
            spread_s=spread_s,
        )
        self.registry = Registry(
            store, clock, limits, contain=lambda call: boundary(call, clock.new_id)
        )
        view = View(self.registry)
        self._waiters = Waiters(self.registry, settings.max_waiters)
        self._hub = Hub(self.registry, view, settings.max_watchers)
        self.registry.on_replaced = self._hub.look
        # The view goes first: whoever is woken reads it.
        for listener in (view, self._waiters, self._hub):
            self.registry.subscribe(listener)
        peers = Peers(settings.max_reporters)
        self.registry.on_grace = peers.grace
        shared = store if is_shared(store) else None
        self._alone = alone
        self._drains = Drains(self.registry, peers, clock, shared, alone=alone)
        if shared is not None:
            self.registry.subscribe(self._drains)
        calls = Calls(self.registry, view, self._waiters, self._hub, self._drains, clock, version())
        self.metrics = Metrics()
        self._service = Service(
            calls,
            self.metrics,
            clock,
            max_sessions=settings.max_sessions,
            max_calls=settings.max_calls,
        )
        calls.sessions = lambda: self._service.sessions
        self.metrics.observe(self.registry, lambda: len(self._hub), lambda: self._service.sessions)
        self._health: health.aio.HealthServicer | None = None
        self._grpc: grpc.aio.Server | None = None
        self._web_stop: Callable[[], None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._health_tasks: set[asyncio.Task[None]] = set()
        self._serving = False
        self._said_serving = False
        self.on_bound: Callable[[], None] = lambda: None
        """Called once it listens: who connects now waits for an answer."""
        self.grpc_address = ""
        """HOST:PORT that gRPC is served on, once started."""
        self.http_address = ""
        """HOST:PORT that HTTP is served on; empty without it."""

    # ------------------------------------------------------------------- start

    async def start(self) -> None:
        """Opens the store, reads the book, and serves.

        Raises:
            ListenError: An address is in use or not this machine's.
            BadRequest: A TLS file cannot be read or used, or the ready file
                cannot be written.
            Unavailable: The store cannot be opened; the message says what to do.
        """
        web_socket = self._bind_web()
        try:
            if not self.registry.is_shared:
                await self.registry.open()
            self._grpc = self._build_grpc()
            port = self._bind_grpc(self._grpc)
            self.on_bound()
            if self._alone:
                # Its one client has called already, and not every call is sent again:
                # it waits for the connection meanwhile.
                await self.registry.try_open(_OPEN_S)
        except BaseException:
            if web_socket is not None:
                web_socket.close()
            await self.registry.close()
            raise
        self.grpc_address = self._listen.with_port(port)
        self.registry.on_available = self._tell_health
        await self._grpc.start()
        self._serving = True
        # A store that others keep running may be away for now: it is opened, and
        # looked for, while calls are refused with the reason.
        self.registry.start()
        self._tasks = [
            *self.registry.tasks,
            *self._drains.start(),
            asyncio.create_task(self._tick_watches(), name="watch-progress"),
        ]
        if web_socket is not None:
            self._start_web(web_socket)
        await self._set_health(available=self.registry.available)
        if self.registry.available:
            try:
                self._say_serving()
            except BadRequest:
                await self.stop()
                raise

    def _say_serving(self) -> None:
        """Tells the log and the ready file, once."""
        self._said_serving = True
        self._log.info(
            "serving",
            grpc=self.grpc_address,
            http=self.http_address,
            store=self.registry.store_description,
            revision=self.registry.revision,
            version=version(),
        )
        if self._settings.ready_file is not None:
            try:
                self._write_ready(self._settings.ready_file)
            except (OSError, ValueError) as error:
                raise BadRequest(
                    f"ready_file {self._settings.ready_file} cannot be written: {error}",
                    metadata={"field": "ready_file", "value": str(self._settings.ready_file)},
                ) from None

    def _bind_web(self) -> socket.socket | None:
        if self._settings.http == "off":
            return None
        from rankbook_server.http.web import WebServer

        listen = parse_listen(self._settings.http)
        try:
            return WebServer.bind(listen.host, listen.port)
        except OSError as error:
            raise ListenError("--http", listen, (error.strerror or str(error)).lower()) from None

    def _start_web(self, listener: socket.socket) -> None:
        from rankbook_server.http.web import WebServer, web_app

        web = WebServer(web_app(lambda: self.is_ready, self.metrics.exposition))
        listen = parse_listen(self._settings.http)
        self.http_address = listen.with_port(listener.getsockname()[1])
        self._web_stop = web.stop
        self._tasks.append(asyncio.create_task(web.run(listener), name="web"))

    def _build_grpc(self) -> grpc.aio.Server:
        settings = self._settings
        most_calls = settings.max_sessions + settings.max_watchers + settings.max_calls
        server = grpc.aio.server(
            options=(
                # Twice what a message may be, so that ours is the error that says so.
                ("grpc.max_receive_message_length", 2 * MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", 2 * MAX_MESSAGE_BYTES),
                # A port in use is an error, not a second server behind it.
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 20_000),
                # Without it gRPC waits a minute for the answer to a ping.
                ("grpc.http2.ping_timeout_ms", 20_000),
                ("grpc.server_handshake_timeout_ms", 20_000),
                # By default gRPC cancels some calls of a burst of 3,000, without a word
                # of ours: all clients come back at once after a restart.
                ("grpc.server.max_pending_requests", most_calls),
                ("grpc.server.max_pending_requests_hard_limit", most_calls),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ),
            maximum_concurrent_rpcs=most_calls,
        )
        server.add_generic_rpc_handlers((self._service.handler(),))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        return server

    def _bind_grpc(self, server: grpc.aio.Server) -> int:
        credentials = self._credentials()
        address = str(self._listen)
        self._try_to_bind()
        try:
            if credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise ListenError(
                "--listen", self._listen, "it is in use, or no address of this machine"
            )
        return int(port)

    def _try_to_bind(self) -> None:
        # gRPC does not say why it cannot bind, and its core writes a line of its own.
        if not self._listen.port or self._listen.host.startswith("unix:"):
            return
        from rankbook_server.http.web import WebServer

        try:
            WebServer.bind(self._listen.host, self._listen.port).close()
        except OSError as error:
            words = (error.strerror or str(error)).lower()
            raise ListenError("--listen", self._listen, words) from None

    def _credentials(self) -> grpc.ServerCredentials | None:
        settings = self._settings
        if settings.tls_cert is None or settings.tls_key is None:
            return None
        authorities = settings.tls_client_ca
        return grpc.ssl_server_credentials(
            [(_read("tls_key", settings.tls_key), _read("tls_cert", settings.tls_cert))],
            root_certificates=_read("tls_client_ca", authorities) if authorities else None,
            require_client_auth=authorities is not None,
        )

    def _write_ready(self, path: Path) -> None:
        content = {"grpc": self.grpc_address, "http": self.http_address, "pid": os.getpid()}
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_text(json.dumps(content) + "\n", encoding="utf-8")
        fresh.replace(path)

    def _remove_ready(self, path: Path) -> None:
        # A newer server may have written its own by now.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if json.loads(path.read_text(encoding="utf-8")).get("pid") == os.getpid():
                path.unlink()

    # ------------------------------------------------------------------ running

    @property
    def is_ready(self) -> bool:
        """Whether the book is loaded, its store reachable, and calls are taken."""
        return self._serving and self.registry.available

    async def failed(self) -> None:
        """Returns when a part that must run has ended; its error is logged."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            fault = None if task.cancelled() else task.exception()
            self._log.critical("a part of the server ended", part=task.get_name(), exc_info=fault)

    async def _tick_watches(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            self._hub.tick()

    def _tell_health(self, available: bool) -> None:
        if available and not self._said_serving and self._serving:
            try:
                self._say_serving()
            except BadRequest as error:
                self._log.error("the ready file was not written", error=error.message)
        self._hub.look()
        self._drains.wake()
        task = asyncio.get_running_loop().create_task(self._set_health(available=available))
        self._health_tasks.add(task)
        task.add_done_callback(self._health_tasks.discard)

    async def _set_health(self, *, available: bool) -> None:
        assert self._health is not None
        status = _SERVING if available and self._serving else _NOT_SERVING
        await self._health.set("", status)
        await self._health.set(READINESS, status)
        await self._health.set(LIVENESS, _SERVING)

    # -------------------------------------------------------------------- stop

    async def stop(self) -> None:
        """Says that it stops, ends what is open, and closes the store."""
        self._log.info("stopping")
        if self._settings.ready_file is not None:
            self._remove_ready(self._settings.ready_file)
        self._serving = False
        await self._set_health(available=False)
        self._hub.end(shutting_down())
        self._waiters.end(shutting_down())
        self._service.end()
        assert self._grpc is not None
        await self._grpc.stop(self._settings.drain_grace)
        await self._drains.close()
        await self.registry.close()
        if self._web_stop is not None:
            self._web_stop()
        for task in self._tasks:
            if task.get_name() != "web":
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._log.info("stopped", revision=self.registry.revision)


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadRequest(
            f"{name} {path} cannot be read: {error.strerror}",
            metadata={"field": name, "value": str(path)},
        ) from None
