"""Signing in and staying alive.

The worker's side: it spawns the heartbeat process (`_heartbeat`), hands it the
encoded records, and listens. It loads no gRPC in this process, so that a
worker may fork after it has signed in.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from rankbook import _clock, _ids, limits, v1
from rankbook._change import RegistrationChange, RegistrationState, change_of
from rankbook._channel import Settings
from rankbook._heartbeat import TERMINATED
from rankbook._keeper import record_key, slot_of
from rankbook._notices import error_to_json
from rankbook._pipe import LineReader, encode_bytes, encode_line
from rankbook._replies import ClockOffset
from rankbook._rpc import forked
from rankbook._scripts import core_message, record_message, sealed_slot
from rankbook._spawn import close_pipes, send, spawn
from rankbook.errors import BadRequest, Cancelled, DeadlineExceeded, Internal, RankbookError
from rankbook.model import CoreRecord, Registered, Sealed, SealedSlot, Slot

if TYPE_CHECKING:
    from rankbook._calls import Record
    from rankbook._channel import TLS
    from rankbook._keeping import Keeping

__all__ = ["Registration", "RegistrationChange", "RegistrationState"]


_log = logging.getLogger("rankbook")

_ENDED = (RegistrationState.FENCED, RegistrationState.STOPPED)
_LONGEST_CALL_S = 2.5
_RESPAWN_S = (0.05, 5.0)
_FIRST_BEAT_S = 60.0
"""A heartbeat process that is being started may be silent for so long."""
_SILENCE_S = 3.0
"""One that runs may be silent for half the TTL, and for so long at least."""


def _call_timeout_s(ttl_s: float, timeout_s: float | None) -> float:
    if not limits.MIN_TTL_S <= ttl_s <= limits.MAX_TTL_S:
        raise BadRequest(
            f"ttl_s is {ttl_s}: {limits.MIN_TTL_S:g} to {limits.MAX_TTL_S:g} s",
            metadata={"field": "ttl_s", "value": ttl_s, "rule": "2 to 300 s"},
        )
    if timeout_s is None:
        return min(ttl_s / 4, _LONGEST_CALL_S)
    if not 0 < timeout_s < ttl_s / 2:
        raise BadRequest(
            f"timeout_s is {timeout_s} with a TTL of {ttl_s} s: a call that may take TTL/2 or "
            "more lets the lease run out when one of them is lost",
            metadata={"field": "timeout_s", "value": timeout_s, "rule": f"below {ttl_s / 2:g} s"},
        )
    return timeout_s


class Registration:
    """Records in the book, kept alive until `stop()` or the death of this process.

    In mode "process" a small process of its own renews and re-registers, so
    that a blocked interpreter costs no lease; it takes the records out at once
    when this process dies in whatever way. Where no process can be started it
    falls back to a thread and logs so. Safe to use from many threads. In a
    forked child only reading is allowed; it stays the parent's registration.
    """

    def __init__(
        self,
        records: Sequence[Record] = (),
        *,
        endpoints: str | Sequence[str] | None = None,
        namespace: str | None = None,
        ttl_s: float = 10.0,
        timeout_s: float | None = None,
        tls: TLS | None = None,
        token: str | None = None,
        lease_key: str | None = None,
        mode: Literal["process", "thread"] = "process",
        on_change: Callable[[RegistrationChange], None] | None = None,
    ) -> None:
        """Takes note of what to publish; starts nothing (see `start`).

        Args:
            records: What to publish; none for an engine core, which only seals.
                An empty `process.boot_id` is filled in, with host name and pid.
            endpoints: As in `Client`.
            namespace: As in `Client`.
            ttl_s: How long the records outlive this host, 2 to 300 s. May be
                long at first and shortened with `set_ttl`.
            timeout_s: Longest wait of one call, below TTL/2. Default: a quarter
                of the TTL, 2.5 s at most.
            tls: As in `Client`.
            token: As in `Client`.
            lease_key: Name of the lease. Default: a new one.
            mode: "process", or "thread" to stay in this process.
            on_change: Called with every change, on a thread of the
                registration's own; what it raises is logged.

        Raises:
            BadRequest: An argument is out of range, or `timeout_s` is TTL/2 or more.
            BadRecord: A record breaks a rule.
        """
        if mode not in ("process", "thread"):
            raise BadRequest(
                f"mode is {mode!r}: process or thread",
                metadata={"field": "mode", "value": mode, "rule": "process or thread"},
            )
        self._settings = Settings.make(
            endpoints,
            namespace=namespace,
            timeout_s=_call_timeout_s(ttl_s, timeout_s),
            tls=tls,
            token=token,
            retry=None,
        )
        self._ttl_s = ttl_s
        self._lease_key = limits.check_id("lease_key", lease_key or _ids.new_id())
        self._mode = mode
        self._on_change = on_change
        self._boot_id = _ids.new_id()
        # Guards everything below; never held while waiting for another process.
        self._cond = threading.Condition()
        self._records = {}
        for record in records:
            message = self._checked(record)
            self._records[record_key(message)] = message
        if len(self._records) != len(records):
            raise BadRequest(
                "records fill one slot twice",
                metadata={"field": "records", "value": len(records), "rule": "each slot once"},
            )
        self._withdrawn: set[Slot] = set()
        self._seal: dict[str, Any] | None = None
        self._submitted = 0
        self._seal_submitted = 0
        self._notice: dict[str, Any] = {}
        self._current = RegistrationChange(RegistrationState.PENDING)
        self._clock: ClockOffset | None = None
        self._pid = 0
        self._stopping = False
        self._process: subprocess.Popen[bytes] | None = None
        self._keeping: Keeping | None = None
        self._thread: threading.Thread | None = None
        self._write_lock = threading.Lock()

    def _checked(self, record: Record) -> v1.WorkerRecord:
        message = v1.WorkerRecord()
        message.CopyFrom(record_message(record))
        if not message.process.boot_id:
            message.process.boot_id = self._boot_id
            message.process.pid = message.process.pid or os.getpid()
            message.process.hostname = message.process.hostname or socket.gethostname()
        limits.check_record(message, self._settings.namespace)
        return message

    # --------------------------------------------------------------- lifetime

    def start(self) -> None:
        """Begins to publish in the background; returns at once. Twice is fine.

        Raises:
            BadRequest: It was stopped, or belongs to another process.
        """
        with self._cond:
            self._check_process()
            if self._stopping:
                raise BadRequest("a registration that was stopped cannot start again")
            if self._thread is not None:
                return
            self._pid = os.getpid()
            target = self._keep_in_process if self._mode == "process" else self._keep_here
            self._thread = threading.Thread(
                target=target, name="rankbook-registration", daemon=True
            )
            self._thread.start()
        atexit.register(self.stop)

    def stop(self, timeout_s: float = 1.5) -> None:
        """Takes the records out and ends, within `timeout_s` seconds. Twice is fine.

        Does nothing in a forked child.
        """
        if self._pid and self._pid != os.getpid():
            return
        with self._cond:
            self._stopping = True
            process, keeping, thread = self._process, self._keeping, self._thread
            self._cond.notify_all()
        until = _clock.mono_s() + timeout_s
        if process is not None:
            self._end_process(process, until)
        if keeping is not None:
            keeping.end(timeout_s)
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(until - _clock.mono_s(), 0.1))
        atexit.unregister(self.stop)
        self._finish()

    def _end_process(self, process: subprocess.Popen[bytes], until: float) -> None:
        """Tells the heartbeat process to end, and ends it where it does not in time."""
        if self._write_lock.acquire(timeout=max(until - _clock.mono_s(), 0.0)):
            try:
                self._send(process, {"op": "stop"}, max(until - _clock.mono_s(), 0.0))
            finally:
                self._write_lock.release()
        try:
            process.wait(max(until - _clock.mono_s(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()

    def __enter__(self) -> Self:
        """Starts."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops."""
        self.stop()

    def _check_process(self) -> None:
        if self._pid and self._pid != os.getpid():
            raise forked(self._pid, os.getpid())

    # ----------------------------------------------------------------- wishes

    def update(self, record: Record) -> None:
        """Replaces the record of its slot, in the background; see `wait_registered`.

        Raises:
            BadRecord: It breaks a rule.
        """
        message = self._checked(record)

        def note() -> None:
            self._records[record_key(message)] = message
            self._withdrawn.discard(slot_of(message))

        self._submit({"op": "update", "record": encode_bytes(message.SerializeToString())}, note)

    def withdraw(self, slot: Slot) -> None:
        """Takes the payload of a slot out, in the background; `update` brings one back.

        Raises:
            BadRequest: This registration has no record in the slot.
        """
        with self._cond:
            if all(slot_of(record) != slot for record in self._records.values()):
                raise BadRequest(
                    f"{slot} is none of this registration's slots",
                    metadata={"field": "slot", "value": str(slot), "rule": "a published slot"},
                )
        place = [slot.pp_rank, slot.pcp_rank, slot.tp_rank]
        self._submit({"op": "withdraw", "slot": place}, lambda: self._withdrawn.add(slot))

    def set_ttl(self, ttl_s: float) -> None:
        """Changes the TTL, in the background.

        Raises:
            BadRequest: Out of range, or the calls' timeout is TTL/2 or more.
        """
        _call_timeout_s(ttl_s, self._settings.timeout_s)

        def note() -> None:
            self._ttl_s = ttl_s

        self._submit({"op": "ttl", "ttl_s": ttl_s}, note)

    def seal(
        self,
        slots: Sequence[SealedSlot | v1.SealedSlot],
        core: CoreRecord | v1.CoreRecord,
        *,
        engine_id: str = "",
        generation: str = "",
        epoch: int = 0,
    ) -> None:
        """Seals in the background and keeps the seal: it is made anew when it was lost.

        `engine_id` and `generation` default to those of the records; a
        registration without records needs them. Tried again while the book may
        still come to agree; `wait_sealed` tells.

        Raises:
            BadRequest: It is not said which engine, or an id is malformed.
        """
        with self._cond:
            first = next(iter(self._records.values()), None)
        if first is not None:
            engine_id = engine_id or first.engine_id
            generation = generation or first.generation
        message = v1.CoreRecord()
        message.CopyFrom(core_message(core))
        if not message.process.boot_id:
            message.process.boot_id = self._boot_id
        limits.check_core(message)
        seal = {
            "engine_id": limits.check_id("engine_id", engine_id),
            "generation": limits.check_id("generation", generation),
            "epoch": epoch,
            "slots": [encode_bytes(sealed_slot(slot).SerializeToString()) for slot in slots],
            "core": encode_bytes(message.SerializeToString()),
        }

        def note() -> None:
            self._seal = seal
            self._seal_submitted = self._submitted

        self._submit({"op": "seal", "seal": seal}, note)

    def _submit(self, command: dict[str, Any], note: Callable[[], None]) -> None:
        self._check_process()
        # One lock around it all: wishes are numbered, noted and sent in one order.
        with self._write_lock:
            with self._cond:
                self._submitted += 1
                command["n"] = self._submitted
                note()
                process, keeping = self._process, self._keeping
            # Without either, the start command will carry the wish.
            if process is not None:
                self._send(process, command, self._silence_s())
            elif keeping is not None:
                keeping.submit(command)

    # ---------------------------------------------------------------- reading

    @property
    def state(self) -> RegistrationState:
        """What may be believed now."""
        return self._current.state

    @property
    def current(self) -> RegistrationChange:
        """Everything `on_change` would be told now."""
        return self._current

    @property
    def clock_offset(self) -> ClockOffset | None:
        """The registry's clock against `time.perf_counter()`; None before the first renewal."""
        return self._clock

    @property
    def heartbeat_pid(self) -> int | None:
        """Process id of the heartbeat process; None while there is none."""
        process = self._process
        return process.pid if process is not None else None

    @property
    def boot_id(self) -> str:
        """The boot_id that is filled into records that have none."""
        return self._boot_id

    def wait_registered(self, timeout_s: float) -> Registered | None:
        """Waits until every change asked for so far is in the book.

        Returns None for a registration without records.

        Raises:
            Fenced: A newer start took over.
            RankbookError: Refused for good, or the last error at the deadline.
            DeadlineExceeded: The deadline passed and nothing is known to be wrong.
        """
        with self._cond:
            wanted = self._submitted
            if not self._records:
                return None

            def done() -> bool:
                notice = self._notice
                good = notice.get("applied", -1) >= wanted and notice.get("settled", False)
                return self._over() or (good and self.state is RegistrationState.REGISTERED)

            self._cond.wait_for(done, timeout_s)
            if self._over():
                raise self._why_over()
            if not done():
                raise self._current.error or self._too_late("registered", timeout_s)
            if self._current.update_error is not None:
                raise self._current.update_error
            return self._current.registered

    def wait_sealed(self, timeout_s: float) -> Sealed:
        """Waits until the last `seal` is accepted.

        Raises:
            SealMismatch: The book has something else, at the deadline.
            Incomplete: Slots are missing, at the deadline.
            RankbookError: Refused for good, or the last error at the deadline.
            DeadlineExceeded: The deadline passed and nothing is known to be wrong.
        """
        with self._cond:
            wanted = self._seal_submitted

            def done() -> bool:
                notice = self._notice
                good = notice.get("applied", -1) >= wanted and notice.get("seal_settled", False)
                return self._over() or (good and wanted > 0)

            self._cond.wait_for(done, timeout_s)
            current = self._current
            if done() and not self._over() and current.seal_error is None and current.sealed:
                return current.sealed
            if current.seal_error is not None:
                raise current.seal_error
            if self._over():
                raise self._why_over()
            raise current.error or self._too_late("sealed", timeout_s)

    def _over(self) -> bool:
        return self._stopping or self.state in _ENDED

    def _why_over(self) -> RankbookError:
        return self._current.error or BadRequest("the registration was stopped")

    @staticmethod
    def _too_late(what: str, timeout_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"not {what} within {timeout_s:g} s; it goes on in the background",
            metadata={"timeout_s": timeout_s},
        )

    # ----------------------------------------------------------- the other end

    def _start_command(self) -> dict[str, Any]:
        settings, tls = self._settings, self._settings.tls
        return {
            "op": "start",
            "n": self._submitted,
            "endpoints": [str(endpoint) for endpoint in settings.endpoints],
            "namespace": settings.namespace,
            "timeout_s": settings.timeout_s,
            "ttl_s": self._ttl_s,
            "lease_key": self._lease_key,
            "token": settings.token,
            "tls": None
            if tls is None
            else {
                name: None if value is None else str(value)
                for name, value in (
                    ("ca_file", tls.ca_file),
                    ("cert_file", tls.cert_file),
                    ("key_file", tls.key_file),
                    ("server_name", tls.server_name),
                )
            },
            "records": [encode_bytes(r.SerializeToString()) for r in self._records.values()],
            "withdrawn": [[s.pp_rank, s.pcp_rank, s.tp_rank] for s in sorted(self._withdrawn)],
            "seal": self._seal,
        }

    def _keep_in_process(self) -> None:
        """This side's thread: reads the notices, and starts another process if one dies."""
        wait = _RESPAWN_S[0]
        while True:
            try:
                process = spawn()
            except OSError as problem:
                _log.warning("no heartbeat process (%s): keeping the lease in a thread", problem)
                self._keep_here()
                return
            # The start goes first: a wish of another thread waits for the lock.
            with self._write_lock:
                with self._cond:
                    command = self._start_command()
                    self._process = process
                    stopping = self._stopping
                self._send(process, command, _FIRST_BEAT_S)
                if stopping:
                    self._send(process, {"op": "stop"}, self._silence_s())
            started = _clock.mono_s()
            self._read_notices(process)
            process.wait()
            close_pipes(process)
            with self._cond:
                self._process = None
                if self._over():
                    return
            if process.returncode == TERMINATED:
                self._finish(Cancelled("the heartbeat process was told to end by SIGTERM"))
                return
            # It was killed, or failed. The lease may still live, so nothing is lost
            # if the next one comes soon.
            _log.warning(
                "the heartbeat process ended with %s; starting another", process.returncode
            )
            ended = Internal(
                f"the heartbeat process ended with {process.returncode}; another is being started",
                metadata={"code": process.returncode},
            )
            state = self._state_without_process()
            self._take("state", {**self._notice, "state": state, "error": error_to_json(ended)})
            if _clock.mono_s() - started > _RESPAWN_S[1]:
                wait = _RESPAWN_S[0]
            with self._cond:
                if self._cond.wait_for(lambda: self._stopping, wait):
                    return
            wait = min(wait * 2, _RESPAWN_S[1])

    def _state_without_process(self) -> str:
        registered = self.state is RegistrationState.REGISTERED
        return (RegistrationState.SUSPENDED if registered else self.state).value

    def _read_notices(self, process: subprocess.Popen[bytes]) -> None:
        """Takes notices to the end of the pipe; a process that is silent is ended first."""
        reader = LineReader()
        assert process.stdout is not None
        fd = process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        limit_s, silences = _FIRST_BEAT_S, 0
        while True:
            # In two halves: if this process did not run either, the other one gets
            # the second half to be heard in.
            if not poll.poll(limit_s * 1000 / 2):
                silences += 1
                if silences >= 2 and not self._stopping:
                    _log.warning("the heartbeat process said nothing for %.3g s", limit_s)
                    process.kill()
                    return
                continue
            data = os.read(fd, 1 << 16)
            if not data:
                return
            limit_s, silences = self._silence_s(), 0
            for notice in reader.feed(data):
                self._take(notice.pop("kind"), notice)

    def _keep_here(self) -> None:
        """Keeps in this very thread."""
        from rankbook._keeping import Keeping

        with self._cond:
            if self._stopping:
                return
            keeping = self._keeping = Keeping(self._start_command(), self._take)
        keeping.run()

    def _silence_s(self) -> float:
        """How long a heartbeat process may neither say nor take anything, in seconds."""
        return max(self._ttl_s / 2, _SILENCE_S)

    @staticmethod
    def _send(process: subprocess.Popen[bytes], command: dict[str, Any], limit_s: float) -> None:
        if not send(process, encode_line(command), limit_s):
            # The next one is told everything with its start.
            _log.warning("the heartbeat process took nothing for %.3g s", limit_s)
            process.kill()

    def _take(self, kind: str, value: dict[str, Any]) -> None:
        if kind == "beat":
            return
        if kind == "clock":
            self._clock = ClockOffset(value["offset_s"], value["error_s"], value["measured_s"])
            return
        change = change_of(value)
        with self._cond:
            self._notice = value
            before, self._current = self._current, change
            self._cond.notify_all()
        if change != before:
            self._call_back(change)

    def _finish(self, error: RankbookError | None = None) -> None:
        with self._cond:
            if self.state in _ENDED:
                return
            self._current = change = RegistrationChange(RegistrationState.STOPPED, error=error)
            self._cond.notify_all()
        self._call_back(change)

    def _call_back(self, change: RegistrationChange) -> None:
        if self._on_change is None:
            return
        try:
            self._on_change(change)
        except Exception:  # noqa: BLE001 - a fault of the caller's must not end the keepalive
            _log.exception("on_change of a registration raised")
