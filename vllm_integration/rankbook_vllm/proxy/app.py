"""The proxy's HTTP side. NOT for production."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import rankbook
from rankbook.errors import DeadlineExceeded, RankbookError
from rankbook.model import Engine, EventType, Role, WatchEvent
from rankbook_vllm.proxy import bodies
from rankbook_vllm.proxy.refusal import Refusal
from rankbook_vllm.proxy.routing import Rota, Side, Target, serving_url, standing
from rankbook_vllm.proxy.upstream import Unreachable, Upstream

__all__ = ["MAX_BODY", "Proxy"]

MAX_BODY = 16 * 1024 * 1024
"""Largest request body, in bytes."""

_MAX_ID = 128
_CHAT = "/v1/chat/completions"
_PATHS = ("/v1/completions", _CHAT)

_log = logging.getLogger("rankbook.proxy")


class Proxy:
    """Routes requests by a view of the book. For one event loop; the view's thread only logs."""

    def __init__(
        self,
        view: rankbook.TopologyView,
        *,
        prefill_group: str = "",
        decode_group: str = "",
        timeout_s: float = 300.0,
        all_params: bool = False,
    ) -> None:
        """Subscribes to the view; opens nothing.

        Args:
            view: Of the whole namespace; the caller starts and closes it.
            prefill_group: Producers of this group; empty takes every one.
            decode_group: Consumers of this group; empty takes every one.
            timeout_s: Longest silence of an engine, and longest wait for a client
                to send its request or to take a part of the answer, in seconds.
            all_params: Passes on all that the producer returned.
        """
        self._view = view
        self._producers = Side("producer", Role.PRODUCER, prefill_group)
        self._consumers = Side("consumer", Role.CONSUMER, decode_group)
        self._prefill_rota, self._decode_rota = Rota(), Rota()
        self._upstream = Upstream(timeout_s)
        self.timeout_s = timeout_s
        self._all_params = all_params
        self._said: dict[str, str] = {}
        view.subscribe(self._tell)

    def app(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                *(Route(path, _Endpoint(self, path), methods=["POST"]) for path in _PATHS),
                Route("/health", self._health),
                Route("/engines", self._engines),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await self._upstream.close()

    # ------------------------------------------------------------------- the book

    def _not_synced(self) -> Refusal | None:
        try:
            self._view.wait_synced(0)  # no wait: only whether it was
        except DeadlineExceeded:
            return Refusal(503, "NOT_SYNCED", "the book has not been read yet")
        except RankbookError as error:
            return Refusal(503, "NOT_SYNCED", f"the book has not been read yet: {error.message}")
        return None

    def _tell(self, event: WatchEvent) -> None:
        """Says once what became of an engine."""
        engine = event.topology.engine
        if not any(side.holds(engine) for side in (self._producers, self._consumers)):
            return
        if event.type is EventType.REMOVED:
            self._said.pop(engine.engine_id, None)
            _log.info("%s is gone", engine.engine_id)
            return
        words = standing(engine)
        if self._said.get(engine.engine_id) != words:
            self._said[engine.engine_id] = words
            _log.info("%s", words)

    async def _health(self, _: Request) -> Response:
        refusal = self._not_synced()
        if refusal is not None:
            return JSONResponse(refusal.body(), refusal.status)
        return JSONResponse({"status": "ok"})

    async def _engines(self, _: Request) -> Response:
        topologies = self._view.engines()
        age_s, error = self._view.age_s, self._view.error

        def side(side: Side) -> dict[str, object]:
            takes = {target.engine_id for target in side.targets(topologies)}
            return {
                "group": side.group,
                "engines": [
                    {**_shown(engine), "takes_requests": engine.engine_id in takes}
                    for engine in side.engines(topologies)
                ],
            }

        return JSONResponse(
            {
                "view": {
                    "synced": self._not_synced() is None,
                    "connected": self._view.connected,
                    "age_s": round(age_s, 3) if math.isfinite(age_s) else None,
                    "revision": self._view.revision,
                    "error": error.message if error is not None else None,
                },
                "prefill": side(self._producers),
                "decode": side(self._consumers),
            }
        )

    # ---------------------------------------------------------------- one request

    async def serve(self, path: str, raw: bytes, headers: Mapping[str, str], send: Send) -> None:
        """Answers one request.

        Raises:
            Refusal: There is nobody to answer it, or an engine failed, before
                anything was sent.
        """
        body = bodies.read(raw)
        request_id = headers["x-request-id"]
        transfer_id = f"transfer-{request_id}"
        refusal = self._not_synced()
        if refusal is not None:
            raise refusal
        producer, reply = await self._prefill(path, body, transfer_id, headers)
        if isinstance(reply, Response):
            _log.warning(
                "request %s: the prefill by %s ended with status %d, which is passed on",
                *(request_id, producer.engine_id, reply.status_code),
            )
            await _send(send, reply, {"x-rankbook-prefill": producer.engine_id, **_echo(headers)})
            return
        params = bodies.handover(reply, producer, transfer_id, all_params=self._all_params)
        if params is None:
            _log.warning(
                "request %s: %s kept no KV, so the consumer does the prefill as well",
                request_id,
                producer.engine_id,
            )
        consumer = self._consumer(producer)
        shown = {
            "x-rankbook-prefill": producer.engine_id,
            "x-rankbook-decode": consumer.engine_id,
            "x-rankbook-kv": "local" if params is None else "remote",
            **_echo(headers),
        }
        status = await self._decode(
            consumer, path, bodies.decode_body(body, params), headers, shown, send
        )
        _log.info(
            "request %s: prefill %s, decode %s, KV %s, status %d",
            *(request_id, producer.engine_id, consumer.engine_id, shown["x-rankbook-kv"], status),
        )

    async def _prefill(
        self, path: str, body: Mapping[str, Any], transfer_id: str, headers: Mapping[str, str]
    ) -> tuple[Target, Response | dict[str, Any]]:
        """The producer and its answer: what it computed, or its error to be passed on.

        Who takes no connection has begun nothing, so another one is tried, once.
        """
        failed: Unreachable | None = None
        tried: list[str] = []
        while len(tried) < 2:
            topologies = self._view.engines()
            producer = self._prefill_rota.next(self._producers.targets(topologies), tried)
            if producer is None:
                raise failed or self._producers.nobody(topologies)
            others = self._consumers.targets(topologies)
            if not any(one.engine_id != producer.engine_id for one in others):
                # Known before a prefill that nobody would fetch.
                raise self._consumers.nobody(topologies, producer.engine_id if others else "")
            asked = bodies.prefill_body(body, producer, transfer_id, chat=path == _CHAT)
            try:
                async with self._upstream.post(producer, path, asked, headers) as reply:
                    data = await reply.aread()
            except Unreachable as error:
                failed = error
                tried.append(producer.engine_id)
                continue
            if reply.status_code != 200:
                return producer, Response(
                    data, reply.status_code, media_type=reply.headers.get("content-type")
                )
            return producer, _object(producer, data)
        assert failed is not None
        raise failed

    def _consumer(self, producer: Target) -> Target:
        topologies = self._view.engines()
        targets = self._consumers.targets(topologies)
        consumer = self._decode_rota.next(targets, (producer.engine_id,))
        if consumer is None:
            raise self._consumers.nobody(topologies, producer.engine_id if targets else "")
        return consumer

    async def _decode(
        self,
        consumer: Target,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        shown: Mapping[str, str],
        send: Send,
    ) -> int:
        """Passes the consumer's answer on as it comes; returns its status."""
        begun = False
        try:
            async with self._upstream.post(consumer, path, body, headers) as reply:
                kind = reply.headers.get("content-type", "application/json")
                if not kind.startswith("text/event-stream"):
                    whole = Response(await reply.aread(), reply.status_code, media_type=kind)
                    begun = True
                    await _send(send, whole, shown)
                    return reply.status_code
                head = Response(status_code=reply.status_code, headers=dict(shown), media_type=kind)
                del head.headers["content-length"]
                begun = True
                await send(_start(head))
                async for chunk in reply.aiter_raw():
                    await send(_part(chunk, more=True))
        except Refusal as refusal:
            if not begun:
                raise
            # The status is sent; the stream says what happened and ends without [DONE].
            _log.warning("%s", refusal.message)
            await send(_part(f"data: {json.dumps(refusal.body())}\n\n".encode(), more=True))
        await send(_part(b"", more=False))
        return reply.status_code


class _Endpoint:
    """One path, as an ASGI application: it hears that a client leaves at any moment."""

    def __init__(self, proxy: Proxy, path: str) -> None:
        self._proxy = proxy
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        request = Request(scope, receive)
        send = _bounded(send, self._proxy.timeout_s)
        headers: dict[str, str] = {}
        try:
            headers = _passed_on(request)
            raw = await _read(request, self._proxy.timeout_s)
            await _unless_gone(receive, self._proxy.serve(self._path, raw, headers, send))
        except ClientDisconnect:
            _log.info("request %s: the client left", headers["x-request-id"])
        except Refusal as refusal:
            _log.warning("%s: %s", refusal.reason, refusal.message)
            reply = JSONResponse(refusal.body(), refusal.status)
            # What of the body was not read would be taken for the next request.
            close = {"connection": "close"} if refusal.status in (408, 413) else {}
            await _send(send, reply, {**_echo(headers), **close})


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work; cancels it when the client leaves before it is done.

    Raises:
        ClientDisconnect: The client left.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


def _bounded(send: Send, timeout_s: float) -> Send:
    """A `send` that does not wait for ever for a client that does not read.

    Raises:
        ClientDisconnect: It took nothing for so long.
    """

    async def bounded(message: Any) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await send(message)
        except TimeoutError:
            raise ClientDisconnect from None

    return bounded


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(request: Request, timeout_s: float) -> bytes:
    """The body.

    Raises:
        Refusal: It is too large, or did not come in time.
        ClientDisconnect: The client left.
    """
    large = Refusal(
        413, "BODY_TOO_LARGE", f"the body has more than {MAX_BODY} bytes", {"limit": MAX_BODY}
    )
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > MAX_BODY:
        raise large
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(timeout_s):
            size = 0
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY:
                    raise large
                parts.append(part)
    except TimeoutError:
        raise Refusal(
            408, "BODY_TOO_SLOW", f"the body did not come within {timeout_s:g} s"
        ) from None
    return b"".join(parts)


def _passed_on(request: Request) -> dict[str, str]:
    """Headers that both engines get: one request id, and who the client says it is.

    Raises:
        Refusal: The request id cannot be one.
    """
    given = request.headers.get("x-request-id") or str(uuid.uuid4())
    if len(given) > _MAX_ID or not (given.isascii() and given.isprintable()):
        raise Refusal(
            400, "BAD_REQUEST_ID", f"X-Request-Id takes 1 to {_MAX_ID} printable ASCII characters"
        )
    passed = {"x-request-id": given}
    if "authorization" in request.headers:
        passed["authorization"] = request.headers["authorization"]
    return passed


def _echo(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name == "x-request-id"}


def _object(producer: Target, data: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        raise Refusal(
            502,
            "BAD_REPLY",
            f"{producer.engine_id} at {producer.url} answered the prefill with no JSON object",
            {"engine_id": producer.engine_id},
        )
    return reply


def _shown(engine: Engine) -> dict[str, object]:
    return {
        "engine_id": engine.engine_id,
        "group": engine.group,
        "role": str(engine.role),
        "state": str(engine.state),
        "generation": engine.generation,
        "epoch": engine.epoch,
        "address": serving_url(engine) or None,
    }


def _start(head: Response) -> dict[str, Any]:
    return {"type": "http.response.start", "status": head.status_code, "headers": head.raw_headers}


def _part(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _send(send: Send, response: Response, headers: Mapping[str, str]) -> None:
    response.headers.update(headers)
    await send(_start(response))
    await send(_part(bytes(response.body), more=False))
