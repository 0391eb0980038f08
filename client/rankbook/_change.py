"""What a registration tells of itself."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from rankbook._notices import error_from_json, registered_from_json, sealed_from_json
from rankbook.errors import RankbookError
from rankbook.model import Registered, Sealed

__all__ = ["RegistrationChange", "RegistrationState", "change_of"]


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
    update_error: RankbookError | None = None
    """Why the last `update` was refused; the record before it stands."""
    book_id: str = ""
    """The book last written to."""
    boot_id: str = ""
    """The life of the server that answered last."""


def change_of(notice: dict[str, Any]) -> RegistrationChange:
    """The change that a notice of kind "state" tells of."""
    return RegistrationChange(
        state=RegistrationState(notice["state"]),
        registered=registered_from_json(notice.get("registered")),
        sealed=sealed_from_json(notice.get("sealed")),
        error=error_from_json(notice.get("error")),
        seal_error=error_from_json(notice.get("seal_error")),
        update_error=error_from_json(notice.get("update_error")),
        book_id=notice.get("book_id", ""),
        boot_id=notice.get("boot_id", ""),
    )
