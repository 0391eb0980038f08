"""The gRPC service over raw bytes: unary calls, streams, sessions.

Messages are parsed here and not by gRPC, so that bytes which are no message
get a typed error, and replies that are kept serialised go out as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError, Message

from rankbook import v1
from rankbook.errors import (
    BadRequest,
    Overloaded,
    RankbookError,
    Reason,
    Unavailable,
)
from rankbook.limits import MAX_REPLY_BYTES
from rankbook_server.clock import Clock
from rankbook_server.metrics import Metrics
from rankbook_server.rpc.calls import Calls
from rankbook_server.rpc.methods import BY_FIELD, SERVICE, Method
from rankbook_server.rpc.room import SMALL_REPLY_BYTES, ReplyRoom, RequestRoom, Turn
from rankbook_server.rpc.session import Session
from rankbook_server.rpc.status import abort, boundary
from rankbook_server.watch import Watcher
from rankbook_server.wire import Body

__all__ = ["Service", "shutting_down"]

Send = Callable[[Body], Awaitable[None]]


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


@contextlib.contextmanager
def _departures() -> Iterator[None]:
    """Makes of a client that went away in the middle a cancelled call.

    It is nobody's fault, and gRPC would log each one as an error of ours.
    """
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError:
        raise asyncio.CancelledError from None


def shutting_down() -> Unavailable:
    """What every open call is told when the server stops."""
    return Unavailable(
        "the server is shutting down: go on at another one, or here once it is back",
        reason=Reason.SHUTTING_DOWN,
    )


class Service:
    """Every method of the service. For one event loop; bounded."""

    def __init__(
        self,
        calls: Calls,
        metrics: Metrics,
        clock: Clock,
        *,
        max_sessions: int,
        max_calls: int,
    ) -> None:
        """Serves nothing yet; `handler` goes into a gRPC server.

        Args:
            calls: What the calls do.
            metrics: Where they are counted.
            clock: Time and ids.
            max_sessions: Most sessions at a time.
            max_calls: Most unary calls at a time, those that wait included.
        """
        self._calls = calls
        self._metrics = metrics
        self._clock = clock
        self._max_sessions = max_sessions
        self._max_calls = max_calls
        self._sessions: set[Session] = set()
        self._in_flight = 0
        self._requests = RequestRoom()
        self._replies = ReplyRoom()
        self._closing = False

    @property
    def sessions(self) -> int:
        """Sessions open now."""
        return len(self._sessions)

    def end(self) -> None:
        """Ends every session once what it asked is answered; lets no call in."""
        self._closing = True
        for session in list(self._sessions):
            session.end()

    def handler(self) -> grpc.GenericRpcHandler:
        """The methods for a gRPC server."""
        handlers: dict[str, Any] = {
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
            "StreamTopology": grpc.unary_stream_rpc_method_handler(self._stream_topology),
        }
        for method in BY_FIELD.values():
            if method.field != "watch":
                handlers[method.name] = grpc.unary_unary_rpc_method_handler(self._unary(method))
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    # ------------------------------------------------------------------ unary

    def _unary(self, method: Method) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def serve(data: bytes, context: Any) -> bytes:
            reply = b""

            async def keep(body: Body) -> None:
                nonlocal reply
                if body.size > SMALL_REPLY_BYTES:
                    held = await self._replies.take(body.size, _this_task().cancel)
                    # gRPC sends it after this handler has returned.
                    context.add_done_callback(lambda _: self._replies.give(held))
                reply = body.join()

            with _departures():
                await self._serve(method, method.name, data, context, keep, whole=True)
            return reply

        return serve

    async def _write(self, context: Any, body: Body) -> None:
        """Writes a part of a stream, in its turn if it is large."""
        if body.size <= SMALL_REPLY_BYTES:
            await context.write(body.join())
            return
        held = await self._replies.take(body.size, _this_task().cancel)
        try:
            await context.write(body.join())
        finally:
            self._replies.give(held)

    async def _stream_topology(self, data: bytes, context: Any) -> None:
        method = BY_FIELD["get_topology"]

        async def send(body: Body) -> None:
            await self._write(context, body)

        with _departures():
            await self._serve(method, "StreamTopology", data, context, send, whole=False)

    async def _serve(
        self, method: Method, name: str, data: bytes, context: Any, send: Send, *, whole: bool
    ) -> None:
        started_s = self._clock.mono()
        failure: RankbookError | None = None
        self._in_flight += 1
        taken = 0
        try:
            with boundary(name, self._clock.new_id):
                self._check_open()
                self._requests.take(len(data))
                taken = len(data)
                request = self._parse(method, data)
                timed = not self._calls.may_wait(method.field, request)
                remaining_s = context.time_remaining()
                answer = await self._calls.answer(method.field, request, remaining_s)
            took_s = self._clock.mono() - started_s if timed else None
            if isinstance(answer, Message):
                whole_reply = answer.SerializeToString()
                await send(Body([whole_reply], len(whole_reply)))
            else:
                if whole:
                    self._check_whole(answer)
                for body in answer:
                    await send(body)
            self._metrics.answered(name, "OK", took_s)
        except RankbookError as error:
            failure = error
        finally:
            self._in_flight -= 1
            self._requests.give(taken)
        if failure is not None:
            self._metrics.answered(name, failure.reason.value)
            await abort(context, failure)

    def _check_open(self) -> None:
        if self._closing:
            raise shutting_down()
        if self._in_flight > self._max_calls:
            raise Overloaded(
                f"{self._max_calls} calls are in flight, the most this server takes: try again "
                "later",
                reason=Reason.TOO_MANY_CALLS,
                metadata={"limit": "calls in flight", "bound": self._max_calls},
            )

    @staticmethod
    def _parse(method: Method, data: bytes) -> Message:
        method.check_size(len(data))
        try:
            return method.parse(data)
        except DecodeError:
            kind = method.request.DESCRIPTOR.full_name
            raise BadRequest(
                f"the {len(data)} bytes sent to {method.name} are no {kind}",
                reason=Reason.MALFORMED_MESSAGE,
                metadata={"bytes": len(data), "message": kind, "call": method.name},
            ) from None

    @staticmethod
    def _check_whole(parts: list[Body]) -> None:
        size = sum(part.size for part in parts)
        if len(parts) > 1 or size > MAX_REPLY_BYTES:
            raise BadRequest(
                f"the reply is {size} bytes, over the limit of {MAX_REPLY_BYTES} bytes of one "
                "message: use StreamTopology or a session, leave the payloads out "
                "(without_payload), or choose slots",
                reason=Reason.REPLY_TOO_LARGE,
                metadata={"limit": "reply", "value": size, "bound": MAX_REPLY_BYTES},
            )

    # ---------------------------------------------------------------- streams

    async def _watch(self, data: bytes, context: Any) -> None:
        with _departures():
            await self._serve_watch(data, context)

    async def _serve_watch(self, data: bytes, context: Any) -> None:
        failure: RankbookError
        turn: Turn | None = None
        taken = 0
        try:
            with boundary("Watch", self._clock.new_id):
                self._check_open()
                request = cast(v1.WatchRequest, self._parse(BY_FIELD["watch"], data))
                self._requests.take(len(data))
                taken = len(data)
                opened = self._calls.hub.watch(request)
            turn = Turn(self._replies, _this_task().cancel)
            with contextlib.closing(opened) as watcher:
                while True:
                    await self._send_step(context, watcher, turn)
        except RankbookError as error:
            failure = error
        finally:
            self._requests.give(taken)
            if turn is not None:
                turn.leave()
        self._metrics.answered("Watch", failure.reason.value)
        await abort(context, failure)

    async def _send_step(self, context: Any, watcher: Watcher, turn: Turn) -> None:
        """Writes the next message of a watch, and forgets it before the one after."""
        with boundary("Watch", self._clock.new_id):
            message = await watcher.next(turn)
        await turn.fit(len(message))
        await context.write(message)
        turn.leave()

    async def _session(self, _: Any, context: Any) -> None:
        with _departures():
            await self._serve_session(context)

    async def _serve_session(self, context: Any) -> None:
        failure: RankbookError | None = None
        if self._closing:
            failure = shutting_down()
        elif len(self._sessions) >= self._max_sessions:
            failure = Overloaded(
                f"{self._max_sessions} sessions are open, the most this server takes: close one, "
                "or try again later",
                reason=Reason.TOO_MANY_SESSIONS,
                metadata={"limit": "sessions", "bound": self._max_sessions},
            )
        else:
            session = Session(
                context, self._calls, self._metrics, self._clock, self._requests, self._replies
            )
            self._sessions.add(session)
            try:
                if not await session.run():
                    failure = shutting_down()
            finally:
                self._sessions.discard(session)
        if failure is not None:
            self._metrics.answered("Session", failure.reason.value)
            await abort(context, failure)
