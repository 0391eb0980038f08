"""Signing in and staying alive (being written; the signatures are final)."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rankbook.errors import RankbookError
from rankbook.model import CoreRecord, Registered, Sealed, SealedSlot, Slot

if TYPE_CHECKING:
    from rankbook._calls import Record
    from rankbook._channel import TLS
    from rankbook._replies import ClockOffset

__all__ = ["Registration", "RegistrationChange", "RegistrationState"]


class RegistrationState(enum.StrEnum):
    """What a holder may believe of its own records."""

    PENDING = "PENDING"
    """Not in the book yet; it is tried for ever."""
    REGISTERED = "REGISTERED"
    """In the book and renewed in time."""
    SUSPENDED = "SUSPENDED"
    """Was registered; the registry is away, or lost the lease. Records may be
    seen or not; they are put back as soon as it answers."""
    FENCED = "FENCED"
    """A newer start took over, or the engine was evicted. Ended; stop serving."""
    STOPPED = "STOPPED"
    """Ended by `stop()`, or refused for good: `error` says why."""


@dataclass(frozen=True, slots=True)
class RegistrationChange:
    """What `on_change` is called with: all of it as it is now."""

    state: RegistrationState
    """What may be believed."""
    registered: Registered | None = None
    """The last registration's reply; digests in the order of the records."""
    sealed: Sealed | None = None
    """The seal that was accepted last."""
    error: RankbookError | None = None
    """Why it is not as wished, while it is not."""
    seal_error: RankbookError | None = None
    """Why the seal is not accepted, while it is not."""
    book_id: str = ""
    """The book last written to."""
    boot_id: str = ""
    """The life of the server that answered last."""


class Registration:
    """Records in the book, kept alive until `stop()` or the death of this process.

    In mode "process" a small process of its own renews and re-registers, so
    that a blocked interpreter costs no lease; it takes the records out at once
    when this process dies in whatever way. Safe to use from many threads.
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

        An empty `process.boot_id` of a record is filled in. `timeout_s` is the
        longest wait of one call, by default a quarter of the TTL, 2.5 s at
        most; TTL/2 or more raises `BadRequest`.
        """
        raise NotImplementedError

    def start(self) -> None:
        """Begins to publish in the background; returns at once."""
        raise NotImplementedError

    def __enter__(self) -> Registration:
        """Starts."""
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        """Stops."""
        raise NotImplementedError

    @property
    def state(self) -> RegistrationState:
        """What may be believed now."""
        raise NotImplementedError

    @property
    def current(self) -> RegistrationChange:
        """Everything `on_change` would be told now."""
        raise NotImplementedError

    @property
    def clock_offset(self) -> ClockOffset | None:
        """The registry's clock against `time.perf_counter()`; None before the first renewal."""
        raise NotImplementedError

    def wait_registered(self, timeout_s: float) -> Registered | None:
        """Waits until every change asked for so far is in the book.

        Returns None for a registration without records.

        Raises:
            Fenced: A newer start took over.
            RankbookError: Refused for good, or the last error at the deadline.
            DeadlineExceeded: The deadline passed and nothing is known to be wrong.
        """
        raise NotImplementedError

    def update(self, record: Record) -> None:
        """Replaces the record of its slot, in the background."""
        raise NotImplementedError

    def withdraw(self, slot: Slot) -> None:
        """Takes the payload of a slot out, in the background; `update` brings one back."""
        raise NotImplementedError

    def set_ttl(self, ttl_s: float) -> None:
        """Changes the TTL with the next renewal."""
        raise NotImplementedError

    def seal(
        self,
        slots: Sequence[SealedSlot],
        core: CoreRecord,
        *,
        engine_id: str = "",
        generation: str = "",
        epoch: int = 0,
    ) -> None:
        """Seals in the background and keeps the seal: it is made anew when it was lost.

        `engine_id` and `generation` default to those of the records; a
        registration without records needs them. Tried again while the book may
        still come to agree; `wait_sealed` tells.
        """
        raise NotImplementedError

    def wait_sealed(self, timeout_s: float) -> Sealed:
        """Waits until the last `seal` is accepted.

        Raises:
            SealMismatch, Incomplete: The book has something else, at the deadline.
            RankbookError: Refused for good, or the last error at the deadline.
            DeadlineExceeded: The deadline passed and nothing is known to be wrong.
        """
        raise NotImplementedError

    def stop(self, timeout_s: float = 1.0) -> None:
        """Takes the records out and ends. Twice is fine."""
        raise NotImplementedError
