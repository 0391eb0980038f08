"""The asyncio wire: one connection at a time, one task that reads it.

As the blocking one, with tasks for threads. A caller's cancellation ends its
own call only: writing and reading are done by tasks of the connection, since
grpc.aio ends a whole stream when a task is cancelled in one of its writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rankbook import _clock, _rpc, v1
from rankbook._attempts import Attempts
from rankbook._cache import WatchFold
from rankbook._calls import Answer, Call, Script, attempt_until, unary_method
from rankbook._channel import CONNECT_TIMEOUT_S, Endpoint, Settings, target
from rankbook._retry import backoff_s
from rankbook._rpc import Failure, Step
from rankbook._session import Broken, Outcome, Session
from rankbook.errors import BadRequest, RankbookError, Reason, Retry
from rankbook.model import WatchEvent

if TYPE_CHECKING:
    import grpc.aio

__all__ = ["AsyncWire"]

T = TypeVar("T")


def _open_channel(settings: Settings, endpoint: Endpoint) -> grpc.aio.Channel:
    import grpc.aio

    credentials = settings.credentials(endpoint)
    if credentials is None:
        return grpc.aio.insecure_channel(target(endpoint), options=settings.options())
    return grpc.aio.secure_channel(target(endpoint), credentials, options=settings.options())


class _Connection:
    """One channel with its session stream."""

    def __init__(self, endpoint: Endpoint, channel: grpc.aio.Channel) -> None:
        self.endpoint = endpoint
        self.channel = channel
        self.session = Session()
        self.outbox: asyncio.Queue[v1.SessionRequest] = asyncio.Queue()
        self.boxes: dict[int, asyncio.Future[Outcome | Broken]] = {}
        self.stream: Any = None
        self.writer: asyncio.Task[None] | None = None
        self.unary = False
        self.error: RankbookError | None = None


class AsyncWire:
    """Sends calls and watches for `AsyncClient`, on one event loop."""

    def __init__(self, settings: Settings) -> None:
        """Takes note of the settings; opens nothing."""
        self._settings = settings
        self._connection: _Connection | None = None
        self._round: asyncio.Future[_Connection] | None = None
        self._server: asyncio.Task[None] | None = None
        self._servers: set[asyncio.Task[None]] = set()
        self._first = 0
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._watches: set[Any] = set()

    # ------------------------------------------------------------------ calls

    async def run(self, script: Script[T], timeout_s: float | None) -> T:
        """Sends what a script yields until it returns; each request has the whole timeout."""
        limit = self._settings.timeout_s if timeout_s is None else timeout_s
        call, result = _rpc.advance(script, None)
        while call is not None:
            answer = await self._call(call, limit + call.wait_s)
            call, result = _rpc.advance(script, answer)
        return cast(T, result)

    async def _call(self, call: Call, timeout_s: float) -> Answer:
        attempts = Attempts(self._settings.retry, call, now_s=_clock.mono_s(), timeout_s=timeout_s)
        while True:
            call = attempts.next_call(_clock.mono_s())
            try:
                return await self._attempt(call, attempts.until_s, timeout_s)
            except Failure as failure:
                error, sent = failure.error, failure.sent
            delay_s = attempts.delay_s(error, sent=sent, now_s=_clock.mono_s(), rng=random.random)
            await asyncio.sleep(delay_s)

    async def _attempt(self, call: Call, until: float, timeout_s: float) -> Answer:
        connection = await self._connected(until, timeout_s)
        if connection.unary:
            return await self._unary(connection, call, until)
        frame = connection.session.open(call)
        box: asyncio.Future[Outcome | Broken] = asyncio.get_running_loop().create_future()
        connection.boxes[frame.request_id] = box
        sent_s, sent_mono = _clock.perf_s(), _clock.mono_s()
        connection.outbox.put_nowait(frame)
        limit = attempt_until(call, sent_mono, until, endpoints=len(self._settings.endpoints))
        try:
            async with asyncio.timeout(max(limit - sent_mono, 0.0)):
                outcome = await box
        except TimeoutError:
            self._give_up(connection, frame.request_id, sent_mono)
            raise Failure(_rpc.deadline_passed(call, timeout_s), sent=True) from None
        except asyncio.CancelledError:
            self._give_up(connection, frame.request_id, None)
            raise
        if isinstance(outcome, Outcome):
            if outcome.error is not None:
                raise Failure(outcome.error, sent=outcome.error.reason is Reason.STORE_UNAVAILABLE)
            return Answer(outcome.parts, sent_s, _clock.perf_s())
        if self._closed or connection.error is None:
            raise _rpc.closed()
        if connection.unary and not outcome.sent:
            # That no session is carried is no failure of this call: it has not left yet.
            return await self._unary(connection, call, until)
        raise Failure(connection.error, sent=outcome.sent)

    def _give_up(
        self, connection: _Connection, request_id: int, silent_since: float | None
    ) -> None:
        connection.boxes.pop(request_id, None)
        frame = connection.session.give_up(request_id)
        if frame is not None:
            connection.outbox.put_nowait(frame)
        count = len(self._settings.endpoints)
        if silent_since is None or not connection.session.is_silent(silent_since, endpoints=count):
            return
        self._first = (self._first + 1) % count
        if connection.stream is not None:
            connection.stream.cancel()

    async def _unary(self, connection: _Connection, call: Call, until: float) -> Answer:
        import grpc

        name = unary_method(call)
        streamed = name == "StreamTopology"
        send = _rpc.multicallable(
            connection.channel, name, "unary_stream" if streamed else "unary_unary"
        )
        sent_s = _clock.perf_s()
        try:
            reply = send(
                call.request,
                timeout=max(until - _clock.mono_s(), 0.001),
                metadata=self._settings.metadata,
            )
            parts = tuple([part async for part in reply]) if streamed else (await reply,)
        except grpc.RpcError as problem:
            if problem.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                error: RankbookError = _rpc.deadline_passed(call, _clock.perf_s() - sent_s)
                raise Failure(error, sent=True) from None
            failure = _rpc.failure_of(problem, connection.endpoint)
            if failure.error.reason is Reason.UNREACHABLE:
                await self._drop(connection, failure.error)
            raise failure from None
        return Answer(parts, sent_s, _clock.perf_s())

    # ------------------------------------------------------------- connection

    def _check_usable(self) -> None:
        here, loop = os.getpid(), asyncio.get_running_loop()
        if self._pid and self._pid != here:
            raise _rpc.forked(self._pid, here)
        if self._loop is not None and self._loop is not loop:
            raise BadRequest(
                "this client belongs to another event loop: make one for each loop",
                metadata={"field": "loop", "value": "another", "rule": "one loop a client"},
            )
        self._pid, self._loop = here, loop
        if self._closed:
            raise _rpc.closed()

    async def _connected(self, until: float, timeout_s: float) -> _Connection:
        """The open connection, or the one that comes of the round of attempts now begun."""
        self._check_usable()
        if self._connection is not None:
            return self._connection
        if self._round is None or self._round.done():
            self._round = asyncio.get_running_loop().create_future()
            # A round nobody waits for any more may fail unseen.
            self._round.add_done_callback(lambda done: done.cancelled() or done.exception())
            task = asyncio.create_task(self._serve(self._round), name="rankbook-session")
            self._servers.add(task)
            task.add_done_callback(self._servers.discard)
        try:
            async with asyncio.timeout(max(until - _clock.mono_s(), 0.0)):
                return await asyncio.shield(self._round)
        except TimeoutError:
            raise _rpc.unreachable(
                self._settings.endpoints, timeout_s, "it takes no connection"
            ) from None

    async def _serve(self, round_: asyncio.Future[_Connection]) -> None:
        """The background task: one round of attempts, then reading until the stream ends."""
        started = _clock.mono_s()
        connection: _Connection | None = None
        try:
            connection, causes = await self._connect_round()
            if connection is None:
                failure = _rpc.unreachable(
                    self._settings.endpoints, _clock.mono_s() - started, "; ".join(causes)
                )
                round_.set_exception(Failure(failure, sent=False))
                return
            connection.session.heard(_clock.mono_s())
            connection.stream = _rpc.multicallable(connection.channel, "Session", "stream_stream")(
                metadata=self._settings.metadata
            )
            connection.writer = asyncio.create_task(self._write(connection))
            self._connection = connection
            round_.set_result(connection)
            await self._read(connection)
        finally:
            if not round_.done():
                round_.set_exception(_rpc.closed())
            if connection is not None and not connection.unary:
                await self._drop(connection, _rpc.closed())

    async def _connect_round(self) -> tuple[_Connection | None, list[str]]:
        import grpc

        causes: list[str] = []
        count = len(self._settings.endpoints)
        first = self._first
        for offset in range(count):
            index = (first + offset) % count
            endpoint = self._settings.endpoints[index]
            try:
                channel = _open_channel(self._settings, endpoint)
            except RankbookError as problem:
                causes.append(problem.message)
                continue
            try:
                await _rpc.multicallable(channel, "GetStatus", "unary_unary")(
                    v1.GetStatusRequest(namespace=self._settings.namespace),
                    timeout=CONNECT_TIMEOUT_S,
                    metadata=self._settings.metadata,
                )
            except grpc.RpcError as problem:
                cause = _rpc.why_no_registry(problem)
                if cause is not None:
                    causes.append(f"{endpoint}: {cause}")
                    await channel.close()
                    continue
            except asyncio.CancelledError:
                await channel.close()
                raise
            self._first = index
            return _Connection(endpoint, channel), causes
        return None, causes

    async def _write(self, connection: _Connection) -> None:
        import grpc

        try:
            while True:
                frame = await connection.outbox.get()
                await connection.stream.write(frame)
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the reader sees the same break, and the reason for it

    async def _read(self, connection: _Connection) -> None:
        import grpc
        import grpc.aio

        error: RankbookError = _rpc.unreachable((connection.endpoint,), 0, "it hung up")
        heard = False
        try:
            while True:
                response = await connection.stream.read()
                if response is grpc.aio.EOF:
                    break
                heard = True
                connection.session.heard(_clock.mono_s())
                outcome = connection.session.receive(response)
                if outcome is not None:
                    box = connection.boxes.pop(outcome.request_id, None)
                    if box is not None and not box.done():
                        box.set_result(outcome)
            code = await connection.stream.code()
            if code is grpc.StatusCode.UNIMPLEMENTED:
                self._fall_back(connection)
                return
        except grpc.RpcError as problem:
            # grpc.aio hides why a stream was refused where a write comes first; a call
            # of its own is told.
            hidden = not heard and _rpc.is_hidden(problem)
            if hidden or _rpc.is_unimplemented(problem):
                self._fall_back(connection, sent=hidden)
                return
            error = _rpc.failure_of(problem, connection.endpoint).error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        await self._drop(connection, error)

    def _fall_back(self, connection: _Connection, *, sent: bool = False) -> None:
        """Something on the way carries no session: the same channel, one rpc a call.

        Args:
            connection: The connection.
            sent: Its open calls may have reached a server all the same.
        """
        connection.unary = True
        connection.stream = None
        connection.error = _rpc.unreachable((connection.endpoint,), 0, "no session stream")
        if connection.writer is not None:
            connection.writer.cancel()
        for one in connection.session.broke():
            self._tell(connection, Broken(one.request_id, sent=sent and one.sent))

    def _tell(self, connection: _Connection, one: Broken) -> None:
        box = connection.boxes.pop(one.request_id, None)
        if box is not None and not box.done():
            box.set_result(one)

    async def _drop(self, connection: _Connection, error: RankbookError) -> None:
        if self._connection is connection:
            self._connection = None
        if connection.error is None:
            connection.error = error
        unsent = []
        while not connection.outbox.empty():
            unsent.append(connection.outbox.get_nowait().request_id)
        for one in connection.session.broke(unsent):
            self._tell(connection, one)
        if connection.writer is not None:
            connection.writer.cancel()
        await connection.channel.close()

    # ---------------------------------------------------------------- watches

    async def watch(
        self, request: v1.WatchRequest, from_revision: int, book_id: str
    ) -> AsyncIterator[WatchEvent]:
        """Events for ever; see `AsyncClient.watch`."""
        steps = self.watch_steps(request, WatchFold(from_revision, book_id), patient=False)
        async with contextlib.aclosing(steps):
            async for step in steps:
                for event in step.events:
                    yield event

    async def watch_steps(
        self, request: v1.WatchRequest, fold: WatchFold, *, patient: bool
    ) -> AsyncGenerator[Step, None]:
        """Every message folded, for ever; breaks are steps too.

        Args:
            request: What to watch.
            fold: What is known.
            patient: Also the first connection is tried for ever.

        Raises:
            RankbookError: The registry refuses the watch, or, when not
                patient, the first connection was not made in time.
        """
        import grpc

        failures, stream = 0, None
        try:
            while not self._closed:
                try:
                    timeout = self._settings.timeout_s
                    connection = await self._connected(_clock.mono_s() + timeout, timeout)
                    stream = _rpc.multicallable(connection.channel, "Watch", "unary_stream")(
                        _rpc.resumed(request, fold.resume), metadata=self._settings.metadata
                    )
                    self._watches.add(stream)
                    async for response in stream:
                        failures, patient = 0, True
                        yield _rpc.folded(fold, response)
                        if fold.out_of_step:
                            break
                    error: RankbookError = _rpc.unreachable(
                        (connection.endpoint,), 0, "the watch ended"
                    )
                except grpc.RpcError as problem:
                    error = _rpc.failure_of(problem, connection.endpoint).error
                except asyncio.CancelledError:
                    # Ours, or the stream's, which grpc.aio tells in the same way.
                    task = asyncio.current_task()
                    if task is not None and task.cancelling():
                        raise
                    error = _rpc.unreachable(self._settings.endpoints, 0, "the stream was cut")
                except Failure as failure:
                    error = failure.error
                except RankbookError as problem:
                    error = problem
                finally:
                    if stream is not None:
                        self._watches.discard(stream)
                        stream.cancel()
                if self._closed:
                    return
                if error.retry is not Retry.BACKOFF:
                    raise error from None
                failures += 1
                if not patient and failures >= self._settings.retry.attempts:
                    raise error from None
                if fold.out_of_step:
                    fold.restart()
                fold.disconnected()
                yield Step(synced=False, error=error)
                await asyncio.sleep(backoff_s(self._settings.retry, failures, random.random))
        finally:
            if stream is not None:
                stream.cancel()

    async def close(self) -> None:
        """Ends everything."""
        if self._closed or (self._pid and self._pid != os.getpid()):
            return
        self._closed = True
        for stream in tuple(self._watches):
            stream.cancel()
        for task in tuple(self._servers):
            task.cancel()
        await asyncio.gather(*self._servers, return_exceptions=True)
        connection = self._connection
        if connection is not None:
            await self._drop(connection, _rpc.closed())
