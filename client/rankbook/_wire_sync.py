"""The blocking wire: one connection at a time, one thread that reads it.

A caller never touches the network. It hands its frame to the connection and
waits, with its deadline, at a queue of its own; connecting and reading happen
in one background thread, so that a registry that swallows everything costs a
caller exactly its deadline.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rankbook import _clock, _rpc, v1
from rankbook._attempts import Attempts
from rankbook._cache import WatchFold
from rankbook._calls import Answer, Call, Script, attempt_until, unary_method
from rankbook._channel import CONNECT_TIMEOUT_S, Endpoint, Settings, target
from rankbook._retry import backoff_s
from rankbook._rpc import Failure, Step
from rankbook._session import Broken, Outcome, Session
from rankbook.errors import RankbookError, Reason, Retry
from rankbook.model import WatchEvent

if TYPE_CHECKING:
    import grpc

__all__ = ["SyncWatch", "SyncWire"]

T = TypeVar("T")


def _open_channel(settings: Settings, endpoint: Endpoint) -> grpc.Channel:
    import grpc

    credentials = settings.credentials(endpoint)
    if credentials is None:
        return grpc.insecure_channel(target(endpoint), options=settings.options())
    return grpc.secure_channel(target(endpoint), credentials, options=settings.options())


class _Connection:
    """One channel with its session stream. Its fields are guarded by the wire's lock."""

    def __init__(self, endpoint: Endpoint, channel: grpc.Channel) -> None:
        self.endpoint = endpoint
        self.channel = channel
        self.session = Session()
        self.outbox: queue.SimpleQueue[v1.SessionRequest | None] = queue.SimpleQueue()
        self.boxes: dict[int, queue.SimpleQueue[Outcome | Broken | None]] = {}
        self.stream: Any = None
        self.unary = False
        self.error: RankbookError | None = None


class SyncWire:
    """Sends calls and watches for `Client`. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        """Takes note of the settings; opens nothing."""
        self._settings = settings
        self._cond = threading.Condition()
        self._closed = threading.Event()
        self._connection: _Connection | None = None
        self._connecting = False
        self._failed_rounds = 0
        self._connect_error: RankbookError | None = None
        self._first = 0
        self._pid = 0
        self._watches: set[SyncWatch] = set()
        self.on_break: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------ calls

    def run(self, script: Script[T], timeout_s: float | None) -> T:
        """Sends what a script yields until it returns; each request has the whole timeout."""
        limit = self._settings.timeout_s if timeout_s is None else timeout_s
        call, result = _rpc.advance(script, None)
        while call is not None:
            answer = self._call(call, limit + call.wait_s)
            call, result = _rpc.advance(script, answer)
        return cast(T, result)

    def _call(self, call: Call, timeout_s: float) -> Answer:
        attempts = Attempts(self._settings.retry, call, now_s=_clock.mono_s(), timeout_s=timeout_s)
        while True:
            call = attempts.next_call(_clock.mono_s())
            try:
                return self._attempt(call, attempts.until_s, timeout_s)
            except Failure as failure:
                error, sent = failure.error, failure.sent
            delay_s = attempts.delay_s(error, sent=sent, now_s=_clock.mono_s(), rng=random.random)
            if self._closed.wait(delay_s):
                raise _rpc.closed()

    def _attempt(self, call: Call, until: float, timeout_s: float) -> Answer:
        connection = self._connected(until, timeout_s)
        if connection.unary:
            return self._unary(connection, call, until)
        box: queue.SimpleQueue[Outcome | Broken | None] = queue.SimpleQueue()
        with self._cond:
            if connection is not self._connection:
                raise Failure(_rpc.unreachable((connection.endpoint,), 0, "it hung up"), sent=False)
            frame = connection.session.open(call)
            request_id = frame.request_id
            connection.boxes[request_id] = box
            sent_s, sent_mono = _clock.perf_s(), _clock.mono_s()
            connection.outbox.put(frame)
        limit = attempt_until(call, sent_mono, until, endpoints=len(self._settings.endpoints))
        try:
            outcome = box.get(timeout=max(limit - sent_mono, 0.0))
        except queue.Empty:
            self._give_up(connection, request_id, sent_mono)
            raise Failure(_rpc.deadline_passed(call, timeout_s), sent=True) from None
        except BaseException:  # an interrupt of the caller: the call goes, the error stays
            self._give_up(connection, request_id, None)
            raise
        if isinstance(outcome, Outcome):
            if outcome.error is not None:
                raise Failure(outcome.error, sent=outcome.error.reason is Reason.STORE_UNAVAILABLE)
            return Answer(outcome.parts, sent_s, _clock.perf_s())
        if outcome is None or connection.error is None:
            raise _rpc.closed()
        if connection.unary:
            # That no session is carried is no failure of this call: it has not left yet.
            return self._unary(connection, call, until)
        raise Failure(connection.error, sent=outcome.sent)

    def _give_up(
        self, connection: _Connection, request_id: int, silent_since: float | None
    ) -> None:
        with self._cond:
            connection.boxes.pop(request_id, None)
            frame = connection.session.give_up(request_id)
            if frame is not None:
                connection.outbox.put(frame)
            count = len(self._settings.endpoints)
            if silent_since is None or not connection.session.is_silent(
                silent_since, endpoints=count
            ):
                return
            self._first = (self._first + 1) % count
            stream = connection.stream
        if stream is not None:
            stream.cancel()

    def _unary(self, connection: _Connection, call: Call, until: float) -> Answer:
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
            parts = tuple(reply) if streamed else (reply,)
        except grpc.RpcError as problem:
            if problem.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                error: RankbookError = _rpc.deadline_passed(call, _clock.perf_s() - sent_s)
                raise Failure(error, sent=True) from None
            failure = _rpc.failure_of(problem, connection.endpoint)
            if failure.error.reason is Reason.UNREACHABLE:
                self._drop(connection, failure.error)
            raise failure from None
        return Answer(parts, sent_s, _clock.perf_s())

    # ------------------------------------------------------------- connection

    def _check_usable(self) -> None:
        here = os.getpid()
        if self._pid and self._pid != here:
            raise _rpc.forked(self._pid, here)
        self._pid = here
        if self._closed.is_set():
            raise _rpc.closed()

    def _connected(self, until: float, timeout_s: float) -> _Connection:
        """The open connection, or the one that comes of the round of attempts now begun."""
        self._check_usable()
        with self._cond:
            round_ = self._failed_rounds
            while self._connection is None:
                if self._closed.is_set():
                    raise _rpc.closed()
                if self._failed_rounds != round_ and self._connect_error is not None:
                    raise Failure(self._connect_error, sent=False)
                if not self._connecting:
                    self._connecting = True
                    threading.Thread(
                        target=self._serve, name="rankbook-session", daemon=True
                    ).start()
                left = until - _clock.mono_s()
                if left <= 0:
                    cause = (
                        "it takes no connection"
                        if self._connect_error is None
                        else (self._connect_error.metadata.get("cause", ""))
                    )
                    raise _rpc.unreachable(self._settings.endpoints, timeout_s, cause)
                self._cond.wait(left)
            return self._connection

    def _serve(self) -> None:
        """The background thread: one round of attempts, then reading until the stream ends."""
        started = _clock.mono_s()
        connection: _Connection | None = None
        causes: list[str] = []
        try:
            connection, causes = self._connect_round()
        finally:
            # Also where the round itself broke: the next call begins another one.
            with self._cond:
                self._connecting = False
                if connection is None:
                    self._failed_rounds += 1
                    self._connect_error = _rpc.unreachable(
                        self._settings.endpoints, _clock.mono_s() - started, "; ".join(causes)
                    )
                elif not self._closed.is_set():
                    self._connect_error = None
                    self._connection = connection
                    self._start_stream(connection)
                self._cond.notify_all()
        if connection is None:
            return
        if self._closed.is_set():
            connection.channel.close()
            return
        self._read(connection)

    def _connect_round(self) -> tuple[_Connection | None, list[str]]:
        import grpc

        causes: list[str] = []
        count = len(self._settings.endpoints)
        first = self._first
        for offset in range(count):
            if self._closed.is_set():
                break
            index = (first + offset) % count
            endpoint = self._settings.endpoints[index]
            try:
                channel = _open_channel(self._settings, endpoint)
            except RankbookError as problem:
                causes.append(problem.message)
                continue
            try:
                _rpc.multicallable(channel, "GetStatus", "unary_unary")(
                    v1.GetStatusRequest(namespace=self._settings.namespace),
                    timeout=CONNECT_TIMEOUT_S,
                    metadata=self._settings.metadata,
                )
            except grpc.RpcError as problem:
                cause = _rpc.why_no_registry(problem)
                if cause is not None:
                    causes.append(f"{endpoint}: {cause}")
                    channel.close()
                    continue
            except ValueError:  # the channel was closed under us by close()
                break
            self._first = index
            return _Connection(endpoint, channel), causes
        return None, causes

    def _start_stream(self, connection: _Connection) -> None:
        connection.session.heard(_clock.mono_s())
        connection.stream = _rpc.multicallable(connection.channel, "Session", "stream_stream")(
            iter(connection.outbox.get, None), metadata=self._settings.metadata
        )

    def _read(self, connection: _Connection) -> None:
        import grpc

        error: RankbookError = _rpc.unreachable((connection.endpoint,), 0, "it hung up")
        fell_back = False
        try:
            for response in connection.stream:
                with self._cond:
                    connection.session.heard(_clock.mono_s())
                    outcome = connection.session.receive(response)
                    box = (
                        connection.boxes.pop(outcome.request_id, None)
                        if outcome is not None
                        else None
                    )
                if box is not None:
                    box.put(outcome)
        except grpc.RpcError as problem:
            fell_back = _rpc.is_unimplemented(problem)
            if fell_back:
                self._fall_back(connection)
            else:
                error = _rpc.failure_of(problem, connection.endpoint).error
        finally:
            # Whatever ended the reading: who waits for an answer must hear of it.
            if not fell_back:
                self._drop(connection, error)

    def _fall_back(self, connection: _Connection) -> None:
        """Something on the way carries no session: the same channel, one rpc a call."""
        with self._cond:
            connection.unary = True
            connection.stream = None
            connection.error = _rpc.unreachable((connection.endpoint,), 0, "no session stream")
            broken = connection.session.broke()
            boxes = [(b, connection.boxes.pop(b.request_id, None)) for b in broken]
        for one, box in boxes:
            if box is not None:
                box.put(Broken(one.request_id, sent=False))
        connection.outbox.put(None)

    def _drop(self, connection: _Connection, error: RankbookError) -> None:
        with self._cond:
            if self._connection is connection:
                self._connection = None
            unsent = []
            with contextlib.suppress(queue.Empty):
                while True:
                    frame = connection.outbox.get_nowait()
                    if frame is not None:
                        unsent.append(frame.request_id)
            connection.error = error
            broken = connection.session.broke(unsent)
            boxes = [(b, connection.boxes.pop(b.request_id, None)) for b in broken]
            is_closed = self._closed.is_set()
        connection.outbox.put(None)
        connection.channel.close()
        for one, box in boxes:
            if box is not None:
                box.put(None if is_closed else one)
        if not is_closed:
            self.on_break()

    # ---------------------------------------------------------------- watches

    def new_watch(self, request: v1.WatchRequest, fold: WatchFold) -> SyncWatch:
        """A watch that is not begun yet."""
        return SyncWatch(self, request, fold)

    def watch(
        self, request: v1.WatchRequest, from_revision: int, book_id: str
    ) -> Iterator[WatchEvent]:
        """Events for ever; see `Client.watch`."""
        watch = SyncWatch(self, request, WatchFold(from_revision, book_id))
        with contextlib.closing(watch):
            for step in watch.steps(patient=False):
                yield from step.events

    def close(self) -> None:
        """Ends everything."""
        if self._pid and self._pid != os.getpid():
            return
        self._closed.set()
        with self._cond:
            connection = self._connection
            watches = tuple(self._watches)
            self._cond.notify_all()
        for watch in watches:
            watch.close()
        if connection is not None:
            self._drop(connection, _rpc.closed())


class SyncWatch:
    """One watch: a stream of its own, so that its reader's pace is the registry's to see."""

    def __init__(self, wire: SyncWire, request: v1.WatchRequest, fold: WatchFold) -> None:
        """Takes note of what to watch; opens nothing."""
        self._wire = wire
        self._request = request
        self._stop = threading.Event()
        self._stream: Any = None
        self.fold = fold

    def close(self) -> None:
        """Ends the watch, from any thread. Twice is fine."""
        self._stop.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()

    def steps(self, *, patient: bool) -> Iterator[Step]:
        """Every message folded, for ever; breaks are steps too.

        Args:
            patient: Also the first connection is tried for ever.

        Raises:
            RankbookError: The registry refuses the watch, or, when not
                patient, the first connection was not made in time.
        """
        import grpc

        wire, policy = self._wire, self._wire._settings.retry
        failures = 0
        with wire._cond:
            wire._watches.add(self)
        try:
            while not (self._stop.is_set() or wire._closed.is_set()):
                try:
                    timeout = wire._settings.timeout_s
                    connection = wire._connected(_clock.mono_s() + timeout, timeout)
                    self._stream = _rpc.multicallable(connection.channel, "Watch", "unary_stream")(
                        _rpc.resumed(self._request, self.fold.resume),
                        metadata=wire._settings.metadata,
                    )
                    if self._stop.is_set():
                        self._stream.cancel()
                    for response in self._stream:
                        failures, patient = 0, True
                        yield _rpc.folded(self.fold, response)
                        if self.fold.out_of_step:
                            break
                    error: RankbookError = _rpc.unreachable(
                        (connection.endpoint,), 0, "the watch ended"
                    )
                    self._stream.cancel()
                except grpc.RpcError as problem:
                    error = _rpc.failure_of(problem, connection.endpoint).error
                except ValueError:  # the channel was closed between getting and using it
                    error = _rpc.unreachable(wire._settings.endpoints, 0, "the channel was closed")
                except Failure as failure:
                    error = failure.error
                except RankbookError as problem:
                    error = problem
                if self._stop.is_set() or wire._closed.is_set():
                    return
                if error.retry is not Retry.BACKOFF:
                    raise error from None
                failures += 1
                if not patient and failures >= policy.attempts:
                    raise error from None
                if self.fold.out_of_step:
                    self.fold.restart()
                self.fold.disconnected()
                yield Step(synced=False, error=error)
                self._stop.wait(backoff_s(policy, failures, random.random))
        finally:
            with wire._cond:
                wire._watches.discard(self)
            if self._stream is not None:
                self._stream.cancel()
