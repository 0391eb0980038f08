"""The session stream: every call of a process over one stream.

Theory of operation. One reader takes frames in order. A read is answered
before the next frame is taken; a write is queued, and its reply goes out when
its group is committed; a call that waits and a watch are tasks. All replies
are written one at a time.

What bounds memory: the reader stops taking frames while the client takes no
replies, writes and waits in flight are counted, with their bytes, and a watch
makes its next message only once the last one was taken.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from rankbook import v1
from rankbook.errors import (
    BadRequest,
    Cancelled,
    Overloaded,
    RankbookError,
    Reason,
)
from rankbook.limits import MAX_SMALL_CALL_BYTES
from rankbook_server.clock import Clock
from rankbook_server.metrics import Metrics
from rankbook_server.rpc.calls import WRITES, Answer, Calls
from rankbook_server.rpc.methods import BY_FIELD, BY_NUMBER, Method
from rankbook_server.rpc.room import SMALL_REPLY_BYTES, ReplyRoom, RequestRoom, Turn
from rankbook_server.rpc.status import boundary, to_status
from rankbook_server.watch import Watcher
from rankbook_server.wire import Body, header, scalar, top_level

__all__ = ["MAX_IN_FLIGHT", "MAX_WATCHES", "Session"]

MAX_IN_FLIGHT = 256
"""Most calls of one session that have no reply yet."""
MAX_WATCHES = 64
"""Most watches of one session."""

_STATUS_FIELD = 3


@dataclass(slots=True)
class _Open:
    """A call without its last reply."""

    request_id: int
    method: Method
    request: Any
    started_s: float
    size: int
    work: asyncio.Future[Any] | None = None
    is_task: bool = False
    sending: bool = False
    cancelled: bool = False


def _malformed(size: int) -> BadRequest:
    return BadRequest(
        f"a frame of {size} bytes is no rankbook.v1.SessionRequest: the stream goes on with the "
        "next frame",
        reason=Reason.MALFORMED_MESSAGE,
        metadata={"bytes": size, "message": "rankbook.v1.SessionRequest"},
    )


def _check_large(frame: bytes) -> tuple[int, RankbookError | None]:
    """Whether a large frame is too large for its call, before it is read.

    Returns:
        The frame's request_id, and the error to refuse it with.
    """
    try:
        fields = top_level(frame)
    except ValueError:
        return 0, _malformed(len(frame))
    request_id = next((value for number, value in reversed(fields) if number == 1), 0)
    sizes: dict[int, int] = {}
    for number, size in fields:
        if number != 1:
            # The parts of a field that comes twice are merged.
            sizes[number] = sizes.get(number, 0) + size
    try:
        for number, size in sizes.items():
            if number in BY_NUMBER:
                BY_NUMBER[number].check_size(size)
            elif size > MAX_SMALL_CALL_BYTES:
                return request_id, _malformed(len(frame))
    except RankbookError as error:
        return request_id, error
    return request_id, None


def _cancelled(request_id: int) -> Cancelled:
    return Cancelled(
        f"call {request_id} was cancelled by its caller", metadata={"request_id": request_id}
    )


class Session:
    """One stream. `run` serves it to its end."""

    def __init__(
        self,
        context: Any,
        calls: Calls,
        metrics: Metrics,
        clock: Clock,
        requests: RequestRoom,
        replies: ReplyRoom,
    ) -> None:
        self._context = context
        self._requests = requests
        self._replies = replies
        self._calls = calls
        self._metrics = metrics
        self._clock = clock
        self._open: dict[int, _Open] = {}
        self._watches = 0
        self._lock = asyncio.Lock()
        self._outbox: deque[_Open] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._emptied: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[Any] | None = None

    async def run(self) -> bool:
        """Serves the stream; True when the client closed it, False after `end`."""
        self._task = asyncio.current_task()
        sender = asyncio.create_task(self._send_written(), name="session-sender")
        reader = asyncio.create_task(self._read(), name="session-reader")
        try:
            await asyncio.wait((reader, self._ended), return_when=asyncio.FIRST_COMPLETED)
            closed = reader.done()
            if closed:
                reader.result()
            await self._finish(watches=not closed)
            return closed
        finally:
            tasks: list[asyncio.Future[Any]] = [sender, reader]
            for task in tasks:
                task.cancel()
            for entry in list(self._open.values()):
                if entry.work is not None:
                    entry.work.cancel()
                    if entry.is_task:
                        tasks.append(entry.work)
            await asyncio.gather(*tasks, return_exceptions=True)
            for entry in list(self._open.values()):
                self._close_call(entry)

    def end(self) -> None:
        """Stops reading; what is open is answered first."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def _finish(self, *, watches: bool) -> None:
        """Lets what was asked be answered; watches only where they end by themselves."""
        if not watches:
            for entry in list(self._open.values()):
                if entry.method.field == "watch":
                    self._cancel(entry.request_id)
        while self._open:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied

    def _close_call(self, entry: _Open) -> None:
        if self._open.get(entry.request_id) is entry:
            del self._open[entry.request_id]
            self._requests.give(entry.size)
            if entry.method.field == "watch":
                self._watches -= 1
        if not self._open and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    # ---------------------------------------------------------------- reading

    async def _read(self) -> None:
        while True:
            frame = await self._context.read()
            if frame is grpc.aio.EOF:
                return
            await self._take(frame)

    async def _take(self, frame: bytes) -> None:
        if len(frame) > MAX_SMALL_CALL_BYTES:
            large_id, too_large = _check_large(frame)
            if too_large is not None:
                await self._refuse(large_id, "Session", too_large)
                return
        try:
            request = v1.SessionRequest.FromString(frame)
        except DecodeError:
            await self._refuse(0, "Session", _malformed(len(frame)))
            return
        request_id, field = request.request_id, request.WhichOneof("call")
        if field == "cancel":
            self._cancel(request.cancel.request_id)
            return
        method = BY_FIELD.get(field or "")
        try:
            if method is None:
                raise BadRequest(
                    f"request {request_id} carries no call this server knows: set one of "
                    f"{', '.join(BY_FIELD)}",
                    reason=Reason.UNKNOWN_CALL,
                    metadata={"request_id": request_id},
                )
            self._admit(request_id, field or "", len(frame))
        except RankbookError as error:
            await self._refuse(request_id, method.name if method else "Session", error)
            return
        entry = _Open(
            request_id,
            method,
            getattr(request, method.field),
            self._clock.mono(),
            len(frame),
        )
        self._open[request_id] = entry
        if method.field == "watch":
            self._start(entry, self._watch(entry))
        elif self._calls.may_wait(method.field, entry.request):
            self._start(entry, self._answer(entry, timed=False))
        elif method.field in WRITES:
            await self._write(entry)
        else:
            await self._answer(entry, timed=True)

    def _admit(self, request_id: int, field: str, size: int) -> None:
        if request_id == 0:
            raise BadRequest(
                "request_id is 0: number the calls of a session from 1",
                metadata={"field": "request_id", "value": 0, "rule": "1 or above"},
            )
        if request_id in self._open:
            raise BadRequest(
                f"request_id {request_id} is in use on this session: give each call its own",
                metadata={
                    "field": "request_id",
                    "value": request_id,
                    "rule": "not in use on this session",
                },
            )
        if field == "watch" and self._watches >= MAX_WATCHES:
            raise Overloaded(
                f"{MAX_WATCHES} watches are open on this session, the most it may have: watch "
                "with a wider filter, or over another session",
                reason=Reason.TOO_MANY_WATCHERS,
                metadata={"limit": "watches of a session", "bound": MAX_WATCHES},
            )
        if len(self._open) - self._watches >= MAX_IN_FLIGHT:
            raise Overloaded(
                f"{MAX_IN_FLIGHT} calls of this session have no reply yet, the most it may have: "
                "wait for some",
                reason=Reason.TOO_MANY_CALLS,
                metadata={"limit": "calls in flight on a session", "bound": MAX_IN_FLIGHT},
            )
        self._requests.take(size)

    def _start(self, entry: _Open, work: Any) -> None:
        entry.is_task = True
        if entry.method.field == "watch":
            self._watches += 1
        task = asyncio.create_task(work, name=f"session-{entry.method.field}")
        task.add_done_callback(lambda _: self._close_call(entry))
        entry.work = task

    def _cancel(self, request_id: int) -> None:
        entry = self._open.get(request_id)
        if entry is None or entry.work is None:
            return
        entry.cancelled = True
        # A frame that is being written must be written whole: a write that was
        # given up half-way would keep the stream from ever being written again.
        if not entry.sending and entry.work.cancel() and not entry.is_task:
            self._written(entry)

    # ---------------------------------------------------------------- writing

    async def _send(self, data: bytes) -> None:
        async with self._lock:
            await self._context.write(data)

    async def _send_part(self, entry: _Open, body: Body, *, more: bool) -> None:
        front = scalar(1, entry.request_id) + scalar(2, more)
        pieces = (front, header(entry.method.reply_number, body.size), *body.pieces)
        if body.size <= SMALL_REPLY_BYTES:
            entry.sending = True
            await self._send(b"".join(pieces))
        else:
            await self._send_large(entry, pieces, body.size)
        entry.sending = False
        if entry.cancelled and more:
            raise _cancelled(entry.request_id)

    async def _send_large(self, entry: _Open, pieces: Sequence[bytes], size: int) -> None:
        assert self._task is not None
        # The lock first: what waits behind another frame of this stream needs no room.
        async with self._lock:
            held = await self._replies.take(size, self._task.cancel)
            try:
                entry.sending = True
                await self._context.write(b"".join(pieces))
            finally:
                self._replies.give(held)

    async def _refuse(self, request_id: int, name: str, error: RankbookError) -> None:
        self._metrics.answered(name, error.reason.value)
        await self._send(self._status(request_id, error))

    @staticmethod
    def _status(request_id: int, error: RankbookError) -> bytes:
        status = to_status(error).SerializeToString()
        return b"".join((scalar(1, request_id), header(_STATUS_FIELD, len(status)), status))

    async def _reply(self, entry: _Open, answer: Answer) -> None:
        if isinstance(answer, Message):
            data = answer.SerializeToString()
            await self._send_part(entry, Body([data], len(data)), more=False)
            return
        for index, body in enumerate(answer):
            await self._send_part(entry, body, more=index + 1 < len(answer))

    async def _fail(self, entry: _Open, error: RankbookError, took_s: float | None) -> None:
        self._metrics.answered(entry.method.name, error.reason.value, took_s)
        entry.sending = True
        await self._send(self._status(entry.request_id, error))

    # ------------------------------------------------------------------- calls

    async def _write(self, entry: _Open) -> None:
        try:
            future = self._calls.submit(
                entry.method.field, entry.request, lambda: self._written(entry)
            )
        except RankbookError as error:
            try:
                await self._fail(entry, error, self._clock.mono() - entry.started_s)
            finally:
                self._close_call(entry)
            return
        entry.work = future

    def _written(self, entry: _Open) -> None:
        self._outbox.append(entry)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _send_written(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._outbox:
                await self._answer(self._outbox.popleft(), timed=True)
            self._wake = loop.create_future()
            await self._wake

    async def _answer(self, entry: _Open, *, timed: bool) -> None:
        """Brings a call to its end; nothing but the end of the stream stops it."""
        name = entry.method.name
        try:
            with boundary(name, self._clock.new_id):
                answer = await self._answer_of(entry)
            took_s = self._clock.mono() - entry.started_s if timed else None
            await self._reply(entry, answer)
            self._metrics.answered(name, "OK", took_s)
        except RankbookError as error:
            await self._fail(entry, error, None)
        except asyncio.CancelledError:
            if not entry.cancelled:
                raise
            await self._fail(entry, _cancelled(entry.request_id), None)
        except grpc.aio.BaseError:
            # The stream broke; its reader ends the session.
            return
        finally:
            self._close_call(entry)

    async def _answer_of(self, entry: _Open) -> Answer:
        field = entry.method.field
        if entry.work is None or entry.is_task:
            return await self._calls.answer(field, entry.request, None)
        if entry.work.cancelled():
            raise _cancelled(entry.request_id)
        return self._calls.finish(field, entry.request, entry.work.result())

    async def _send_step(self, entry: _Open, watcher: Watcher, turn: Turn) -> None:
        """Writes the next message of a watch, and forgets it before the one after."""
        with boundary("Watch", self._clock.new_id):
            message = await watcher.next(turn)
        await turn.fit(len(message))
        front = scalar(1, entry.request_id) + scalar(2, True)
        entry.sending = True
        await self._context.write(
            b"".join((front, header(entry.method.reply_number, len(message)), message))
        )
        entry.sending = False
        turn.leave()
        if entry.cancelled:
            raise _cancelled(entry.request_id)

    async def _watch(self, entry: _Open) -> None:
        assert self._task is not None
        turn = Turn(self._replies, self._task.cancel, self._lock)
        try:
            await self._step_watch(entry, turn)
        except RankbookError as error:
            turn.leave()
            await self._fail(entry, error, None)
        except asyncio.CancelledError:
            turn.leave()
            if not entry.cancelled:
                raise
            await self._fail(entry, _cancelled(entry.request_id), None)
        except grpc.aio.BaseError:
            return
        finally:
            turn.leave()

    async def _step_watch(self, entry: _Open, turn: Turn) -> None:
        with boundary("Watch", self._clock.new_id):
            opened = self._calls.hub.watch(entry.request)
        with contextlib.closing(opened) as watcher:
            while True:
                await self._send_step(entry, watcher, turn)
