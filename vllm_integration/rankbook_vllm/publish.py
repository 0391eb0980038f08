"""A worker's side: it signs in and stays alive until it is told to stop.

A separate process keeps the lease (`rankbook.Registration`), so nothing here
waits for the registry but rank 0's bounded question for its epoch and, where
`required`, the first registration.
"""

from __future__ import annotations

import logging

import rankbook
from rankbook.errors import RankbookError
from rankbook.model import Slot
from rankbook_vllm.config import Settings
from rankbook_vllm.record import Facts, Start, worker_record
from rankbook_vllm.seal import Note, note_of, slot_name

__all__ = ["ChangeLog", "Publisher"]

_LEVELS = {
    rankbook.RegistrationState.PENDING: (logging.WARNING, "not signed in yet, going on trying"),
    rankbook.RegistrationState.REGISTERED: (logging.INFO, "signed in"),
    rankbook.RegistrationState.SUSPENDED: (logging.WARNING, "lost the registry, going on trying"),
    rankbook.RegistrationState.FENCED: (logging.ERROR, "a newer start took over, signed out"),
    rankbook.RegistrationState.STOPPED: (logging.INFO, "signed out"),
}
_PENDING = rankbook.RegistrationState.PENDING


class ChangeLog:
    """Says in the log how a registration does; each thing once."""

    def __init__(self, log: logging.Logger, who: str) -> None:
        """`who` begins every line."""
        self._log = log
        self._who = who
        self._said: object = None
        self._state: rankbook.RegistrationState | None = None
        self._sealed = 0

    def __call__(self, change: rankbook.RegistrationChange) -> None:
        """Takes what `Registration` tells its `on_change`."""
        if change.sealed is not None and change.sealed.revision != self._sealed:
            self._sealed = change.sealed.revision
            self._log.info(
                "rankbook: %s: sealed (epoch %d, seal %d)",
                self._who,
                change.sealed.epoch,
                change.sealed.seal.number,
            )
        reason = change.error.reason if change.error is not None else None
        if (change.state, reason) == self._said:
            return
        if change.error is None and change.state in (self._state, _PENDING):
            return
        self._state = change.state
        self._said = (change.state, reason)
        level, words = _LEVELS[change.state]
        if change.error is not None:
            self._log.log(
                max(level, logging.WARNING), "rankbook: %s: %s: %s", self._who, words, change.error
            )
        elif change.registered is not None:
            epoch = change.registered.epoch
            self._log.log(level, "rankbook: %s: %s (epoch %d)", self._who, words, epoch)
        else:
            self._log.log(level, "rankbook: %s: %s", self._who, words)


class Publisher:
    """Publishes one worker. Used by one thread; opens nothing before `begin` or `publish`."""

    def __init__(self, settings: Settings, log: logging.Logger) -> None:
        """Takes note; opens nothing.

        Args:
            settings: Where the registry is and what to say.
            log: Where to say what happens.
        """
        self._settings = settings
        self._log = log
        self._boot_id = rankbook.new_id()
        self._registration: rankbook.Registration | None = None
        self.start: Start | None = None
        """The start all workers agreed on; set before `publish`."""
        self.facts: Facts | None = None
        """What was published last."""

    def begin(self, engine_id: str) -> Start:
        """Makes this start's token and asks the registry for its epoch.

        Waits at most `begin_timeout_s`; without an answer the epoch is 0, and
        the first worker to sign in reserves it.
        """
        generation = rankbook.new_id()
        wait_s = self._settings.begin_timeout_s
        try:
            with rankbook.Client(
                self._settings.endpoints,
                namespace=self._settings.namespace,
                token=self._settings.token or None,
                timeout_s=wait_s,
            ) as client:
                epoch = client.begin_generation(engine_id, generation, timeout_s=wait_s)
        except RankbookError as error:
            self._log.warning(
                "rankbook: no epoch for this start of %s yet, going on without: %s",
                engine_id,
                error,
            )
            return Start(generation)
        self._log.info("rankbook: %s starts as epoch %d (%s)", engine_id, epoch, generation)
        return Start(generation, epoch)

    def publish(self, facts: Facts) -> Note:
        """Publishes the worker, or what changed of it.

        Returns:
            What to tell the engine core.

        Raises:
            RankbookError: A fact breaks a rule; or, where `required`, the
                worker was not signed in within `register_timeout_s`.
        """
        if self.start is None:
            raise RuntimeError("publish before the workers agreed on a start")
        record = worker_record(facts, self.start, self._settings, self._boot_id)
        self.facts = facts
        if self._registration is not None:
            self._registration.update(record)
        else:
            self._registration = self._register(record)
        if self._settings.required:
            self._registration.wait_registered(self._settings.register_timeout_s)
        return note_of(record, facts.worker_rank, self.start)

    def _register(self, record: rankbook.WorkerRecord) -> rankbook.Registration:
        settings = self._settings
        registration = rankbook.Registration(
            [record],
            endpoints=settings.endpoints,
            namespace=settings.namespace,
            ttl_s=settings.ttl_s,
            token=settings.token or None,
            on_change=ChangeLog(self._log, f"{record.engine_id} {slot_name(record.slot)}"),
        )
        registration.start()
        return registration

    def failed(self, slot: Slot, worker_rank: int, error: Exception) -> Note:
        """What to tell the engine core when publishing failed.

        Raises:
            Exception: `error`, where `required`.
        """
        self._log.error("rankbook: this worker cannot be published: %s", error)
        if self._settings.required:
            raise error
        return Note(slot, worker_rank, self.start or Start(""), problem=str(error))

    def withdraw(self) -> None:
        """Takes the payload out of the book; the worker stays signed in."""
        if self._registration is not None and self.facts is not None:
            self._registration.withdraw(self.facts.slot)

    def stop(self) -> None:
        """Signs out at once. May be called again."""
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.stop()
