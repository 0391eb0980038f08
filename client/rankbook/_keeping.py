"""The loop that does what a `Keeper` decides, over the blocking client.

Runs in the heartbeat process, or in a thread of the worker where there is no
such process. Takes commands and gives notices, both as plain JSON values, so
that the two places differ only in what lies between.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Callable
from typing import Any

from rankbook import _clock, v1
from rankbook._change import RegistrationState
from rankbook._channel import TLS
from rankbook._keeper import Keeper, Seal, Step, StepKind
from rankbook._notices import error_from_json, error_to_json, registered_to_json, sealed_to_json
from rankbook._pipe import decode_bytes
from rankbook._replies import ClockOffset
from rankbook._retry import RetryPolicy
from rankbook._sync import Client
from rankbook.errors import Internal, NotFound, RankbookError
from rankbook.model import Slot

__all__ = ["BEAT_S", "Keeping"]

BEAT_S = 1.0
"""A loop that does its work gives a notice at least so often, in seconds, calls aside."""

_log = logging.getLogger("rankbook")
# The keeper decides about repeats; the client sends once.
_ONCE = RetryPolicy(attempts=1)

Json = dict[str, Any]


def _seal_of(value: Json) -> Seal:
    return Seal(
        engine_id=value["engine_id"],
        generation=value["generation"],
        slots=tuple(v1.SealedSlot.FromString(decode_bytes(slot)) for slot in value["slots"]),
        core=v1.CoreRecord.FromString(decode_bytes(value["core"])),
        epoch=value["epoch"],
    )


class Keeping:
    """One registration being kept. `run` is the loop; the rest is safe from any thread."""

    def __init__(self, start: Json, notify: Callable[[str, Json], None]) -> None:
        """Takes what to keep; opens nothing.

        Args:
            start: The "start" command.
            notify: Called with the kind and the values of each notice, on the
                loop's thread; must not block.
        """
        self._client = Client(
            start["endpoints"],
            namespace=start["namespace"],
            timeout_s=start["timeout_s"],
            tls=TLS(**start["tls"]) if start["tls"] is not None else None,
            token=start["token"],
            retry=_ONCE,
        )
        self._lease_key: str = start["lease_key"]
        self._timeout_s: float = start["timeout_s"]
        self._keeper = Keeper(
            [v1.WorkerRecord.FromString(decode_bytes(record)) for record in start["records"]],
            ttl_s=start["ttl_s"],
            # A holder that comes again with the same boot_id goes on above its last life.
            sequence=max(int(_clock.unix_s() * 1000), 1),
            rng=random.random,
        )
        for slot in start["withdrawn"]:
            self._keeper.withdraw(Slot(*slot))
        if start["seal"] is not None:
            self._keeper.wish_seal(_seal_of(start["seal"]))
        self._applied: int = start["n"]
        self._notify = notify
        self._commands: queue.SimpleQueue[Json] = queue.SimpleQueue()
        self._last: Json = {}
        self._clock: ClockOffset | None = None
        self.finished = threading.Event()
        self._client._wire.on_break = lambda: self._commands.put({"op": "hurry"})

    def submit(self, command: Json) -> None:
        """Hands a command to the loop."""
        self._commands.put(command)

    def run(self) -> None:
        """Keeps until it is stopped, fenced or refused for good."""
        try:
            self._tell()
            while True:
                self._take_commands()
                now = _clock.mono_s()
                step = self._keeper.next_step(now)
                if step.kind is StepKind.END:
                    return
                self._notify("beat", {})
                if step.kind is StepKind.WAIT:
                    self._tell()
                    self._wait(min(step.until_s - now, BEAT_S))
                    continue
                self._do(step)
                self._tell()
        finally:
            self._tell()
            self.finished.set()

    def _take_commands(self) -> None:
        while not self._commands.empty():
            self._apply(self._commands.get())

    def _wait(self, seconds: float) -> None:
        try:
            command = self._commands.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return
        self._apply(command)

    def _apply(self, command: Json) -> None:
        keeper = self._keeper
        match command["op"]:
            case "update":
                keeper.update(v1.WorkerRecord.FromString(decode_bytes(command["record"])))
            case "withdraw":
                keeper.withdraw(Slot(*command["slot"]))
            case "ttl":
                keeper.set_ttl(command["ttl_s"])
            case "seal":
                keeper.wish_seal(_seal_of(command["seal"]))
            case "hurry":
                keeper.hurry()
            case "stop":
                keeper.stop(error_from_json(command.get("error")))
        self._applied = command.get("n", self._applied)

    def _do(self, step: Step) -> None:
        keeper, client = self._keeper, self._client
        lease_key = None if step.lease_id else self._lease_key
        lease_id = step.lease_id or None
        try:
            match step.kind:
                case StepKind.REGISTER:
                    registered = client.register_workers(
                        step.records,
                        sequence=step.sequence,
                        ttl_s=step.ttl_s,
                        epoch=step.epoch,
                        lease_key=lease_key,
                        lease_id=lease_id,
                    )
                    keeper.registered_as(step, registered, _clock.mono_s())
                case StepKind.UPDATE:
                    updated = client.update_worker(
                        step.records[0],
                        sequence=step.sequence,
                        epoch=step.epoch,
                        withdraw_payload=step.withdraw,
                    )
                    keeper.updated(step, updated, _clock.mono_s())
                case StepKind.SEAL if step.seal is not None:
                    sealed = client.seal_engine(
                        step.seal.engine_id,
                        step.seal.generation,
                        step.seal.slots,
                        step.seal.core,
                        sequence=step.sequence,
                        epoch=step.epoch,
                        ttl_s=step.ttl_s,
                        lease_key=lease_key,
                        lease_id=lease_id,
                    )
                    keeper.sealed_as(step, sealed, _clock.mono_s())
                case _:
                    reply = client.renew_leases([step.lease_id], ttl_s=step.ttl_s or None)
                    keeper.renewed(reply, _clock.mono_s())
        except RankbookError as error:
            keeper.failed(step, error, _clock.mono_s())
        except Exception as error:  # noqa: BLE001 - a keepalive that dies of a bug loses an engine
            _log.exception("a step of the registration failed")
            keeper.failed(step, Internal(f"{type(error).__name__}: {error}"), _clock.mono_s())

    def _tell(self) -> None:
        keeper = self._keeper
        state: Json = {
            "state": keeper.state.value,
            "applied": self._applied,
            "settled": keeper.settled,
            "seal_settled": keeper.seal_settled,
            "registered": registered_to_json(keeper.registered),
            "sealed": sealed_to_json(keeper.sealed),
            "error": error_to_json(keeper.error),
            "update_error": error_to_json(keeper.update_error),
            "seal_error": error_to_json(keeper.seal_error),
            "book_id": keeper.book_id,
            "boot_id": keeper.boot_id,
        }
        if state != self._last:
            self._last = state
            self._notify("state", state)
        clock = keeper.clock
        if clock is not None and clock is not self._clock:
            self._clock = clock
            self._notify(
                "clock",
                {
                    "offset_s": clock.offset_s,
                    "error_s": clock.error_s,
                    "measured_s": clock.measured_s,
                },
            )

    def end(self, timeout_s: float, error: RankbookError | None = None) -> None:
        """Stops the loop and takes the records out, within `timeout_s` seconds."""
        until = _clock.mono_s() + timeout_s
        # First the stop: a renewal that finds the lease ended must not sign in again.
        self.submit({"op": "stop", "error": error_to_json(error)})
        revoked = self._revoke("", until)
        self.finished.wait(max(until - _clock.mono_s(), 0.0))
        # A registration that was on its way when the stop came may have got a lease.
        self._revoke(revoked, until)
        self._client.close()

    def _revoke(self, known: str, until: float) -> str:
        lease_id = self._keeper.lease_id
        left = until - _clock.mono_s()
        fenced = self._keeper.state is RegistrationState.FENCED
        if not lease_id or lease_id == known or left <= 0 or fenced:
            return lease_id
        try:
            self._client.revoke_lease(lease_id, timeout_s=left)
        except NotFound:
            pass  # it ended before: what was wanted is so
        except RankbookError as error:
            _log.warning("the lease is left to run out: %s", error.message)
        return lease_id
