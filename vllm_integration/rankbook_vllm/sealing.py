"""The engine core's side: it seals what it saw of its own engine.

`rankbook.Registration` makes the seal and keeps it, in a process of its own.
What is added here: the core's clock pair, for which the registry must answer
once, and words for a book that disagrees. One thread does both, so that the
engine core waits only where `required`.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence

import rankbook
from rankbook.errors import DeadlineExceeded, RankbookError, SealMismatch
from rankbook.model import Address, CoreRecord, Process, Requirement, SealedSlot
from rankbook_vllm.clocks import clock_pair
from rankbook_vllm.config import Settings, bare_host
from rankbook_vllm.publish import ChangeLog
from rankbook_vllm.seal import Whole, differences, sealed_slots, slots_of

__all__ = ["Sealer", "serving_addresses"]

_CALL_S = 2.0
_RETRY_S = 1.0
_CLOCK_REFRESH_S = 3600.0
"""The core's clock is published anew after this: 0.36 s of drift at most."""


def serving_addresses(setting: str) -> tuple[Address, ...]:
    """The address of a `serving_address` setting, HOST:PORT; none where it is empty."""
    if not setting:
        return ()
    host, _, port = setting.rpartition(":")
    if not host or not port.isdecimal():
        return (Address("http", bare_host(setting), 0, "serving"),)
    return (Address("http", bare_host(host), int(port), "serving"),)


class Sealer:
    """Seals one engine. `seal` and `stop` are for the engine core's thread."""

    def __init__(
        self,
        settings: Settings,
        log: logging.Logger,
        *,
        engine_id: str,
        connector: str,
        addresses: Sequence[Address],
        clock: Callable[[], float],
    ) -> None:
        """Takes note; opens nothing.

        Args:
            settings: Where the registry is and what to say.
            log: Where to say what happens.
            engine_id: The engine.
            connector: Class name of its connector.
            addresses: Where the core serves handshakes itself.
            clock: The clock that peers extrapolate, in seconds: the performance
                counter of this process.
        """
        self._settings = settings
        self._log = log
        self._engine_id = engine_id
        self._connector = connector
        self._addresses = (
            *serving_addresses(settings.serving_address),
            *addresses,
        )
        self._clock = clock
        self._boot_id = rankbook.new_id()
        self._say = ChangeLog(log, f"{engine_id} engine core")
        self._registration: rankbook.Registration | None = None
        self._stop = threading.Event()
        self._over = threading.Event()
        """Set when the seal under way is not wanted any more."""
        self._asked = threading.Event()
        self._whole: Whole | None = None
        self._core: CoreRecord | None = None
        self._error: RankbookError | None = None
        self._refused: RankbookError | None = None
        self._explained = ""

    def cannot(self, why: str) -> None:
        """Says that this engine is not sealed.

        Raises:
            SealMismatch: Where `required`.
        """
        self._log.error("rankbook: %s is not sealed: %s", self._engine_id, why)
        if self._settings.required:
            raise SealMismatch(
                f"{self._engine_id} is not sealed: {why}", metadata={"engine_id": self._engine_id}
            )

    def seal(self, whole: Whole) -> None:
        """Seals in the background what the core saw; again, when called again.

        Raises:
            RankbookError: Where `required`: the seal was not accepted within
                `seal_timeout_s`, or a worker could not publish.
        """
        if whole.problems:
            self.cannot("; ".join(whole.problems))
            return
        self._whole = whole
        self._refused = None
        self._asked.clear()
        if self._registration is None:
            self._registration = rankbook.Registration(
                endpoints=self._settings.endpoints,
                namespace=self._settings.namespace,
                ttl_s=self._settings.ttl_s,
                token=self._settings.token or None,
                on_change=self._changed,
            )
            self._registration.start()
        self._over.set()
        self._over = threading.Event()
        self._in_background(self._ask, self._registration, whole, self._over)
        if self._settings.required:
            self._wait(self._registration)

    def _wait(self, registration: rankbook.Registration) -> None:
        deadline = self._clock() + self._settings.seal_timeout_s
        if not self._asked.wait(self._settings.seal_timeout_s):
            raise self._error or DeadlineExceeded(
                f"{self._engine_id} was not sealed within {self._settings.seal_timeout_s:g} s",
                metadata={"engine_id": self._engine_id},
            )
        if self._refused is not None:
            raise self._refused
        sealed = registration.wait_sealed(max(0.0, deadline - self._clock()))
        self._log.info(
            "rankbook: %s was sealed before start (epoch %d)", self._engine_id, sealed.epoch
        )

    def stop(self) -> None:
        """Takes the core's record out at once, and with it the seal. May be called again."""
        self._stop.set()
        self._over.set()
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.stop()

    def _in_background(self, work: Callable[..., None], *args: object) -> None:
        threading.Thread(target=work, args=args, name="rankbook-seal", daemon=True).start()

    def _client(self) -> rankbook.Client:
        return rankbook.Client(
            self._settings.endpoints,
            namespace=self._settings.namespace,
            token=self._settings.token or None,
            timeout_s=_CALL_S,
        )

    def _ask(
        self, registration: rankbook.Registration, whole: Whole, over: threading.Event
    ) -> None:
        """Waits for the registry's clock, then seals. The registration does the rest."""
        wait_s = 0.0
        while not over.wait(wait_s):
            try:
                with self._client() as client:
                    clock = clock_pair(client, self._clock)
            except RankbookError as error:
                wait_s = _RETRY_S
                if self._error is None and self._core is None:
                    self._log.warning("rankbook: %s is not sealed yet: %s", self._engine_id, error)
                self._error = error
                continue
            if over.is_set():
                return  # a newer call took over meanwhile
            self._core = CoreRecord(
                process=Process(self._boot_id, socket.gethostname(), os.getpid()),
                addresses=self._addresses,
                connector=self._connector,
                clock=clock,
            )
            self._seal(registration, whole, slots_of(whole))
            self._asked.set()
            # Clocks drift apart, and peers extrapolate ours for as long as we run.
            wait_s = _CLOCK_REFRESH_S

    def _seal(
        self, registration: rankbook.Registration, whole: Whole, slots: Sequence[SealedSlot]
    ) -> None:
        assert self._core is not None
        try:
            registration.seal(
                slots,
                self._core,
                engine_id=self._engine_id,
                generation=whole.start.generation,
                epoch=whole.start.epoch,
            )
        except RankbookError as error:
            # On a thread of our own nobody else would hear of it.
            self._refused = error
            if not self._stop.is_set():
                self._log.error("rankbook: %s cannot be sealed: %s", self._engine_id, error)

    def _changed(self, change: rankbook.RegistrationChange) -> None:
        self._say(change)
        wrong = change.seal_error
        if isinstance(wrong, SealMismatch) and str(wrong) != self._explained:
            self._explained = str(wrong)
            self._in_background(self._explain, wrong)

    def _explain(self, mismatch: SealMismatch) -> None:
        """Says which fields differ; seals by the book where none does.

        The book may keep a default that this version does not write; its
        digests then differ from ours over equal records.
        """
        whole, registration = self._whole, self._registration
        if whole is None or registration is None:
            return
        try:
            with self._client() as client:
                topology = client.get_topology(
                    self._engine_id,
                    require=Requirement.COMPLETE,
                    generation=whole.start.generation,
                )
        except RankbookError:
            topology = None
        found = differences(whole, topology) if topology is not None else (str(mismatch),)
        if found or topology is None:
            self._log.error(
                "rankbook: %s is not sealed, the book has something else than its workers told "
                "(tried again when it changes): %s",
                self._engine_id,
                "; ".join(found),
            )
            return
        self._seal(registration, whole, sealed_slots(topology))
