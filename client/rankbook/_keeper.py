"""What to do next to keep records in the book. Pure: time and numbers come in.

Theory of operation. A keeper holds what its owner wishes (records, seal, TTL)
and what the book last said (lease, epochs, digests). `next_step` compares the
two and names one thing to do; its shell does it and reports how it went, with
`registered_as`, `updated`, `sealed_as`, `renewed` or `failed`. Nothing else
decides.

    PENDING ----registered----> REGISTERED <---registered--- SUSPENDED
       |                            |  no answer, lease lost ----^
       |                            |
       +--- fenced / refused -------+---> FENCED / STOPPED (ends)

A write gets its sequence when it is first tried and keeps it while it is
retried, so that a lost reply changes nothing; a new wish, a lost lease or
another book gets a higher one. A lease that ended, that the book does not
know, or a new `book_id` make everything wished for undone again. A new
`boot_id` alone does not: a registry that restarted has kept the records, and
says so in the same reply by the state of the lease.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rankbook import v1
from rankbook._change import RegistrationState
from rankbook._replies import ClockOffset, RenewReply, Updated
from rankbook._retry import RetryPolicy, backoff_s
from rankbook._scripts import batches
from rankbook.errors import BadRequest, Fenced, RankbookError, Reason, Refused, Retry
from rankbook.model import Lease, LeaseState, Registered, Sealed, Slot

__all__ = ["HEARTBEAT_RETRY", "Keeper", "Seal", "Step", "StepKind", "record_key", "slot_of"]

HEARTBEAT_RETRY = RetryPolicy(
    attempts=1, initial_s=0.05, multiplier=2.0, max_s=0.6, jitter=0.3, budget_s=0.0
)
"""First retry at once, then at most 0.6 s apart: a registry that comes up has
everybody within a second. `attempts` is not used: it is tried for ever."""

_SLOW_RETRY_S = 5.0
"""Between tries of what only a person can change (a token that is refused)."""
_SEQUENCE_LEAP = 1_000_000
_SEQUENCE_REFUSALS = 5
_CLOCK_SAMPLES = 8


class StepKind(enum.Enum):
    """What the shell is to do."""

    REGISTER = "register"
    UPDATE = "update"
    SEAL = "seal"
    RENEW = "renew"
    WAIT = "wait"
    END = "end"


@dataclass(frozen=True, slots=True)
class Seal:
    """The seal that is wished for."""

    engine_id: str
    generation: str
    slots: tuple[v1.SealedSlot, ...]
    core: v1.CoreRecord
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do."""

    kind: StepKind
    sequence: int = 0
    """Number of the write."""
    epoch: int = 0
    """Epoch that the write carries."""
    records: tuple[v1.WorkerRecord, ...] = ()
    """REGISTER: the batch. UPDATE: the one record."""
    withdraw: bool = False
    """UPDATE: take only the payload out."""
    lease_id: str = ""
    """The lease the write or the renewal is for; empty: by lease key."""
    ttl_s: float = 0.0
    """TTL to ask for; zero keeps the granted one."""
    seal: Seal | None = None
    """SEAL: what to seal."""
    until_s: float = 0.0
    """WAIT: when to ask again, on the caller's clock."""
    marks: tuple[Any, ...] = ()
    """Which wishes this step answers; the keeper's own."""


@dataclass(slots=True)
class _Cell:
    """One slot's wish and how far it is."""

    record: v1.WorkerRecord
    withdrawn: bool = False
    version: int = 1
    written: int = 0
    entered: bool = False
    digest: bytes = b""


def slot_of(record: v1.WorkerRecord) -> Slot:
    """The record's slot."""
    return Slot(record.slot.pp_rank, record.slot.pcp_rank, record.slot.tp_rank)


def record_key(record: v1.WorkerRecord) -> tuple[str, str, Slot]:
    """What one registration has one record of: engine, generation and slot."""
    return (record.engine_id, record.generation, slot_of(record))


def _refused_for_good(error: RankbookError) -> bool:
    """Whether asking again is pointless; a refused token or a fault may be mended."""
    return (
        isinstance(error, BadRequest | Refused)
        and error.retry is Retry.NEVER
        and error.reason is not Reason.UNKNOWN_CALL
    )


class Keeper:
    """The state of one registration. Not thread-safe; see the module's text."""

    def __init__(
        self,
        records: Sequence[v1.WorkerRecord],
        *,
        ttl_s: float,
        sequence: int,
        rng: Callable[[], float],
        retry: RetryPolicy = HEARTBEAT_RETRY,
    ) -> None:
        """Begins with every record undone.

        Args:
            records: What is to be in the book.
            ttl_s: TTL to ask for, in seconds.
            sequence: Where the holder's numbers begin, 1 or above.
            rng: Gives a number in [0, 1), for jitter.
            retry: How soon a failed step is tried again.
        """
        self._cells = {record_key(record): _Cell(record) for record in records}
        self._ttl_s = ttl_s
        self._ttl_asked = ttl_s
        self._sequence = sequence
        self._rng = rng
        self._retry = retry
        self._step: Step | None = None
        self._failures = 0
        self._not_before_s = 0.0
        self._renew_at_s = 0.0
        self._epochs: dict[tuple[str, str], int] = {}
        self._sequence_refusals = 0
        self._seal: Seal | None = None
        self._seal_done = True
        self._seal_given_up = False
        self._seal_not_before_s = 0.0
        self._seal_failures = 0
        self._clocks: list[ClockOffset] = []
        self.state = RegistrationState.PENDING
        self.lease: Lease | None = None
        self.registered: Registered | None = None
        self.sealed: Sealed | None = None
        self.error: RankbookError | None = None
        self.seal_error: RankbookError | None = None
        self.update_error: RankbookError | None = None
        self.book_id = ""
        self.boot_id = ""

    # ----------------------------------------------------------------- wishes

    def update(self, record: v1.WorkerRecord) -> None:
        """Wishes for another record in its slot."""
        self.update_error = None
        cell = self._cells.get(record_key(record))
        if cell is None:
            self._cells[record_key(record)] = _Cell(record)
        else:
            cell.record, cell.withdrawn = record, False
            cell.version += 1
        self._forget_step(StepKind.UPDATE)

    def withdraw(self, slot: Slot) -> None:
        """Wishes for the payload of a slot to be out of the book."""
        for (_, _, at), cell in self._cells.items():
            if at == slot:
                cell.withdrawn = True
                cell.version += 1
        self._forget_step(StepKind.UPDATE)

    def set_ttl(self, ttl_s: float) -> None:
        """Wishes for another TTL."""
        self._ttl_s = ttl_s
        self._renew_at_s = 0.0

    def wish_seal(self, seal: Seal) -> None:
        """Wishes for a seal, in place of an earlier one."""
        self._seal = seal
        self._seal_done = self._seal_given_up = False
        self._seal_not_before_s, self._seal_failures = 0.0, 0
        self.seal_error = None
        self._forget_step(StepKind.SEAL)

    def stop(self, error: RankbookError | None = None) -> None:
        """Ends the keeping, for a reason or because its owner wishes so."""
        if self.state is not RegistrationState.FENCED:
            self.state, self.error = RegistrationState.STOPPED, error

    def hurry(self) -> None:
        """The connection broke: look at once whether the lease still lives."""
        self._renew_at_s = self._not_before_s = 0.0

    def _forget_step(self, kind: StepKind) -> None:
        # A step that is not the newest wish any more must not be retried as it was.
        if self._step is not None and self._step.kind in (kind, StepKind.REGISTER):
            self._step = None

    # ------------------------------------------------------------------ state

    @property
    def ended(self) -> bool:
        """Whether nothing more is done."""
        return self.state in (RegistrationState.FENCED, RegistrationState.STOPPED)

    @property
    def settled(self) -> bool:
        """Whether every wish but the seal is in the book."""
        return all(cell.entered and cell.written == cell.version for cell in self._cells.values())

    @property
    def seal_settled(self) -> bool:
        """Whether the wished seal stands, or was refused for good."""
        return self._seal_done or self._seal_given_up

    @property
    def clock(self) -> ClockOffset | None:
        """The best of the newest readings of the registry's clock."""
        return min(self._clocks, key=lambda clock: clock.error_s, default=None)

    @property
    def lease_id(self) -> str:
        """The lease, or empty before the first one."""
        return self.lease.lease_id if self.lease is not None else ""

    # -------------------------------------------------------------- decisions

    def next_step(self, now: float) -> Step:
        """The one thing to do now; a write is the same one until it is answered."""
        if self.ended:
            return Step(StepKind.END)
        if now < self._not_before_s:
            return Step(StepKind.WAIT, until_s=self._not_before_s)
        # A renewal that is due goes before a write: the lease is what keeps the rest.
        if self.lease is not None and now >= self._renew_at_s:
            ttl = self._ttl_s if self._ttl_s != self._ttl_asked else 0.0
            return Step(StepKind.RENEW, lease_id=self.lease_id, ttl_s=ttl)
        if self._step is None:
            self._step = self._write(now)
        if self._step is not None:
            return self._step
        waits = [self._renew_at_s] if self.lease is not None else []
        if not self.seal_settled:
            waits.append(self._seal_not_before_s)
        return Step(StepKind.WAIT, until_s=min(waits, default=now + 3600.0))

    def _write(self, now: float) -> Step | None:
        undone = [cell for cell in self._cells.values() if not cell.entered]
        if undone:
            batch = next(batches([self._wished(cell) for cell in undone]))
            marks = tuple((record_key(r), self._cells[record_key(r)].version) for r in batch)
            return Step(
                StepKind.REGISTER,
                sequence=self._number(),
                epoch=self._epochs.get((batch[0].engine_id, batch[0].generation), 0),
                records=tuple(batch),
                lease_id=self.lease_id,
                ttl_s=self._ttl_s,
                marks=marks,
            )
        for key, cell in self._cells.items():
            if cell.written != cell.version:
                return Step(
                    StepKind.UPDATE,
                    sequence=self._number(),
                    epoch=self._epochs.get(key[:2], 0),
                    records=(cell.record,),
                    withdraw=cell.withdrawn,
                    marks=((key, cell.version),),
                )
        if self._seal is not None and not self.seal_settled and now >= self._seal_not_before_s:
            scope = (self._seal.engine_id, self._seal.generation)
            return Step(
                StepKind.SEAL,
                sequence=self._number(),
                epoch=self._epochs.get(scope, self._seal.epoch),
                lease_id=self.lease_id,
                ttl_s=self._ttl_s,
                seal=self._seal,
            )
        return None

    @staticmethod
    def _wished(cell: _Cell) -> v1.WorkerRecord:
        if not cell.withdrawn:
            return cell.record
        asleep = v1.WorkerRecord()
        asleep.CopyFrom(cell.record)
        asleep.handshake.payload = b""
        return asleep

    def _number(self) -> int:
        number = self._sequence
        self._sequence += 1
        return number

    # --------------------------------------------------------------- outcomes

    def registered_as(self, step: Step, reply: Registered, now: float) -> None:
        """A registration was accepted."""
        self._answered(now)
        if reply.boot_id:
            self._note_server(reply.boot_id, reply.book_id)
        self._take_lease(reply.lease, now)
        first = step.records[0]
        self._epochs[first.engine_id, first.generation] = reply.epoch
        for (key, version), digest in zip(step.marks, reply.record_digests, strict=True):
            cell = self._cells[key]
            cell.entered, cell.written, cell.digest = True, version, digest
            if cell.withdrawn:
                # The record is in with an empty payload; that it is asleep is said apart.
                cell.written = 0
        self._sequence_refusals = 0
        self._refresh(reply)
        if all(cell.entered for cell in self._cells.values()):
            self.state = RegistrationState.REGISTERED

    def updated(self, step: Step, reply: Updated, now: float) -> None:
        """An update was accepted."""
        self._answered(now)
        ((key, version),) = step.marks
        cell = self._cells[key]
        cell.written, cell.digest = version, reply.record_digest
        if self.registered is not None:
            self._refresh(
                dataclasses.replace(self.registered, epoch=reply.epoch, revision=reply.revision)
            )

    def sealed_as(self, step: Step, reply: Sealed, now: float) -> None:
        """A seal was accepted."""
        self._answered(now)
        self._take_lease(reply.lease, now)
        if step.seal is self._seal:
            self._seal_done, self._seal_failures, self.seal_error = True, 0, None
        if step.seal is not None:
            self._epochs[step.seal.engine_id, step.seal.generation] = reply.epoch
        self.sealed = reply
        if not self._cells:
            self.state = RegistrationState.REGISTERED

    def renewed(self, reply: RenewReply, now: float) -> None:
        """A renewal was answered: by what the book says of the lease."""
        self._answered(now)
        if reply.clock is not None:
            self._clocks = [*self._clocks[1 - _CLOCK_SAMPLES :], reply.clock]
        lost = self._note_server(reply.boot_id, reply.book_id)
        status = reply.statuses[0]
        if status.state is LeaseState.FENCED:
            self._fence(status.replaced_by)
        elif status.state is LeaseState.ALIVE and not lost:
            if self.lease is not None and status.ttl_s > 0:
                self.lease = dataclasses.replace(
                    self.lease, ttl_s=status.ttl_s, renew_interval_s=status.ttl_s / 3
                )
                if self.registered is not None:
                    self.registered = dataclasses.replace(self.registered, lease=self.lease)
            self._ttl_asked = self._ttl_s
            self._schedule_renewal(now)
            if all(cell.entered for cell in self._cells.values()):
                self.state = RegistrationState.REGISTERED
        else:
            self._lose_lease()

    def failed(self, step: Step, error: RankbookError, now: float) -> None:
        """A step came to an error."""
        self._failures += 1
        if isinstance(error, Fenced):
            self.state, self.error = RegistrationState.FENCED, error
            return
        if step.kind is StepKind.SEAL and error.retry is not Retry.BACKOFF:
            self._seal_failed(error, now)
            return
        wait = backoff_s(self._retry, self._failures, self._rng)
        if step.kind is StepKind.UPDATE and _refused_for_good(error):
            # The record that stands is good; only the change is dropped.
            ((key, version),) = step.marks
            self._cells[key].written = version
            self._step, self.update_error, self._failures = None, error, 0
            return
        self.error = error
        if error.retry is Retry.REREGISTER:
            self._lose_lease()
        elif error.reason in (Reason.SEQUENCE_STALE, Reason.SEQUENCE_REUSED):
            self._sequence_refusals += 1
            self._sequence += _SEQUENCE_LEAP * self._sequence_refusals
            self._step = None
            if self._sequence_refusals > _SEQUENCE_REFUSALS:
                self.state = RegistrationState.STOPPED
        elif error.retry is Retry.NEVER:
            if step.kind is not StepKind.RENEW and _refused_for_good(error):
                self.state = RegistrationState.STOPPED
            wait = min(_SLOW_RETRY_S, self._ttl_s / 4)
        if self.state is RegistrationState.REGISTERED:
            self.state = RegistrationState.SUSPENDED
        self._not_before_s = now + wait

    def _seal_failed(self, error: RankbookError, now: float) -> None:
        # Refusals of a seal say nothing of the lease; the records stay as they are.
        self._failures = 0
        self._step = None
        self.seal_error = error
        self._seal_failures += 1
        if error.retry is Retry.NEVER:
            self._seal_given_up = True
        elif error.retry is Retry.REREGISTER:
            self._lose_lease()
        self._seal_not_before_s = now + backoff_s(self._retry, self._seal_failures, self._rng)

    def _answered(self, now: float) -> None:
        self._failures = 0
        self._not_before_s = now
        self._step = None
        self.error = None

    def _take_lease(self, lease: Lease, now: float) -> None:
        self.lease = lease
        self._ttl_asked = self._ttl_s
        self._schedule_renewal(now)

    def _schedule_renewal(self, now: float) -> None:
        if self.lease is not None:
            interval = self.lease.renew_interval_s or self.lease.ttl_s / 3
            self._renew_at_s = now + interval * (1.0 - 0.1 * self._rng())

    def _note_server(self, boot_id: str, book_id: str) -> bool:
        """Takes who answered; True when the book is another one than before."""
        lost = bool(self.book_id and book_id and book_id != self.book_id)
        self.boot_id = boot_id or self.boot_id
        self.book_id = book_id or self.book_id
        if lost:
            self._epochs.clear()
        return lost

    def _lose_lease(self) -> None:
        self.lease = None
        self._step = None
        self._clocks.clear()
        for cell in self._cells.values():
            cell.entered = False
        if self._seal is not None and not self._seal_given_up:
            self._seal_done = False
        if self.state is RegistrationState.REGISTERED:
            self.state = RegistrationState.SUSPENDED

    def _fence(self, replaced_by: Any) -> None:
        self.state = RegistrationState.FENCED
        metadata = {}
        words = "the lease was fenced: a newer start of the engine took over, or it was evicted"
        if replaced_by is not None:
            metadata = {
                "current_engine_id": replaced_by.engine_id,
                "current_epoch": replaced_by.epoch,
                "current_generation": replaced_by.generation,
            }
            words += f" (now {replaced_by.engine_id} epoch {replaced_by.epoch})"
        self.error = Fenced(words, metadata=metadata)

    def _refresh(self, reply: Registered) -> None:
        lease = self.lease or reply.lease
        self.registered = dataclasses.replace(
            reply,
            lease=lease,
            book_id=self.book_id or reply.book_id,
            boot_id=self.boot_id or reply.boot_id,
            record_digests=tuple(cell.digest for cell in self._cells.values()),
            sequence=self._sequence - 1,
        )
