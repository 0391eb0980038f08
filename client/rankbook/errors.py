"""Everything that can go wrong, by a stable reason.

One table (`TABLE`) maps each `Reason` to its gRPC status code, the exception
class raised for it, whether and how the call may be tried again, and the exit
code of the command line. The server raises these classes; the wire carries the
reason and the values; the client raises the same class with the same values.

    RankbookError
    +-- BadRequest (also ValueError)   the caller's words are wrong
    |   +-- BadRecord                  a record breaks a rule
    |   +-- LimitExceeded              a value is over a written limit
    |   +-- TransferError              no plan exists between these layouts
    +-- NotFound                       no such engine, worker or lease
    +-- Refused                        the book's state forbids it
    |   +-- Fenced                     a newer start took over; stop
    |   +-- Conflict                   another live holder has the slot
    |   +-- Incomplete                 ranks are missing; `missing` lists them
    |   +-- Gone                       the engine is dead; `successor` if known
    |   +-- SealMismatch               the core saw something else
    |   +-- Incompatible               these two engines may not pair
    +-- Denied                         not permitted
    +-- Unavailable                    the registry or its store is away
    |   +-- Overloaded                 the server is at a written bound
    +-- DeadlineExceeded (also TimeoutError)
    +-- Cancelled
    +-- Internal                       a fault of ours

What a caller writes:

    try:
        topology = client.get_topology("prefill-a-0")
    except rankbook.Incomplete as error:
        print("waiting for", error.metadata["missing"])
    except rankbook.Unavailable:
        ...  # use the last known topology
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "DOMAIN",
    "TABLE",
    "BadRecord",
    "BadRequest",
    "Cancelled",
    "Conflict",
    "DeadlineExceeded",
    "Denied",
    "Fenced",
    "Gone",
    "Incompatible",
    "Incomplete",
    "Internal",
    "LimitExceeded",
    "NotFound",
    "Overloaded",
    "RankbookError",
    "Reason",
    "Refused",
    "Retry",
    "Rule",
    "SealMismatch",
    "TransferError",
    "Unavailable",
    "error_for",
]

DOMAIN = "rankbook"
"""`domain` of every ErrorInfo."""


class Reason(enum.StrEnum):
    """Stable names of what can go wrong. Names are added, never changed."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last: list[str]) -> str:
        return name

    # The caller's words.
    INVALID_REQUEST = enum.auto()
    INVALID_RECORD = enum.auto()
    UNKNOWN_FIELD = enum.auto()
    NAMESPACE_MISMATCH = enum.auto()
    LIMIT_EXCEEDED = enum.auto()
    MALFORMED_MESSAGE = enum.auto()
    UNKNOWN_CALL = enum.auto()
    REPLY_TOO_LARGE = enum.auto()
    INVALID_EXPORT = enum.auto()
    NOT_INSTALLED = enum.auto()
    # What is not there.
    ENGINE_NOT_FOUND = enum.auto()
    GROUP_NOT_FOUND = enum.auto()
    WORKER_NOT_FOUND = enum.auto()
    LEASE_NOT_FOUND = enum.auto()
    BOOK_NOT_FOUND = enum.auto()
    # What the book's state or rules forbid.
    ENGINE_GONE = enum.auto()
    GENERATION_FENCED = enum.auto()
    EPOCH_FENCED = enum.auto()
    EVICTED = enum.auto()
    SLOT_HELD = enum.auto()
    LAYOUT_CONFLICT = enum.auto()
    IDENTITY_CONFLICT = enum.auto()
    SEQUENCE_STALE = enum.auto()
    SEQUENCE_REUSED = enum.auto()
    LEASE_ENDED = enum.auto()
    ENGINE_INCOMPLETE = enum.auto()
    ENGINE_INVALID = enum.auto()
    SEAL_MISMATCH = enum.auto()
    INCOMPATIBLE = enum.auto()
    BOOK_NOT_EMPTY = enum.auto()
    IMPORT_UNFINISHED = enum.auto()
    # Transfer rules; each names both sides' values.
    TP_NOT_DIVISIBLE = enum.auto()
    DCP_NOT_DIVISIBLE = enum.auto()
    BLOCK_SIZE_NOT_DIVISIBLE = enum.auto()
    LAYERS_NOT_COVERED = enum.auto()
    LAYER_SPLIT_INVALID = enum.auto()
    HEADS_UNKNOWN = enum.auto()
    LOCAL_ENGINE = enum.auto()
    ENGINE_INFO_CHANGED = enum.auto()
    TRANSFER_UNSUPPORTED = enum.auto()
    # Who may not.
    UNAUTHENTICATED = enum.auto()
    PERMISSION_DENIED = enum.auto()
    # Not now.
    UNREACHABLE = enum.auto()
    STORE_UNAVAILABLE = enum.auto()
    REVISION_NOT_REACHED = enum.auto()
    SHUTTING_DOWN = enum.auto()
    TOO_MANY_CALLS = enum.auto()
    TOO_MANY_SESSIONS = enum.auto()
    TOO_MANY_WATCHERS = enum.auto()
    TOO_MANY_WAITERS = enum.auto()
    TOO_MANY_LEASES = enum.auto()
    TOO_MANY_ENGINES = enum.auto()
    TIMED_OUT = enum.auto()
    CANCELLED = enum.auto()
    INTERNAL = enum.auto()


class Retry(enum.Enum):
    """What may be done about a failed call without a person."""

    NEVER = "never"
    """The same call fails again."""
    BACKOFF = "backoff"
    """The same call may pass later: repeat with backoff."""
    WAIT = "wait"
    """The state must change first: watch or wait, then repeat."""
    REREGISTER = "reregister"
    """Publish again under a higher sequence."""


class RankbookError(Exception):
    """Base of every error.

    Attributes:
        reason: Stable name of what went wrong.
        message: What happened, with the values, which rule, and what to do.
        metadata: Every value of the message, as text.
    """

    default_reason = Reason.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        reason: Reason | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata: dict[str, str] = {k: str(v) for k, v in (metadata or {}).items()}

    @property
    def code(self) -> str:
        """Name of the gRPC status code, for example "NOT_FOUND"."""
        return TABLE[self.reason].code

    @property
    def retry(self) -> Retry:
        """What may be done about it without a person."""
        return TABLE[self.reason].retry

    @property
    def exit_code(self) -> int:
        """Exit code of the command line."""
        return TABLE[self.reason].exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return (error_for, (self.reason, self.message, self.metadata))


class BadRequest(RankbookError, ValueError):
    """The caller's words are wrong; the same call never passes."""

    default_reason = Reason.INVALID_REQUEST


class BadRecord(BadRequest):
    """A record breaks a rule. `metadata` has `field`, `value` and `rule`."""

    default_reason = Reason.INVALID_RECORD


class LimitExceeded(BadRequest):
    """A value is over a limit. `metadata` has `limit`, `value` and `bound`."""

    default_reason = Reason.LIMIT_EXCEEDED


class TransferError(BadRequest):
    """No plan exists between two layouts. `metadata` has both values."""

    default_reason = Reason.TRANSFER_UNSUPPORTED


class NotFound(RankbookError):
    """No such engine, worker or lease."""

    default_reason = Reason.ENGINE_NOT_FOUND


class Refused(RankbookError):
    """The book's state or a rule forbids it."""

    default_reason = Reason.SEQUENCE_STALE


class Fenced(Refused):
    """A newer start of the engine took over, or it was evicted. Stop.

    `metadata` has `engine_id`, `generation`, and where known `current_epoch`
    and `current_generation`.
    """

    default_reason = Reason.GENERATION_FENCED


class Conflict(Refused):
    """Something else that lives is in the way; `metadata` names both."""

    default_reason = Reason.SLOT_HELD


class Incomplete(Refused):
    """The engine is not what was asked for; `metadata["missing"]` lists slots."""

    default_reason = Reason.ENGINE_INCOMPLETE


class Gone(Refused):
    """The engine, or the generation asked for, is dead.

    `metadata` has `successor_engine_id`, `successor_epoch` and
    `successor_generation` where known.
    """

    default_reason = Reason.ENGINE_GONE


class SealMismatch(Refused):
    """The core saw something else than the book has; `metadata` lists it."""

    default_reason = Reason.SEAL_MISMATCH


class Incompatible(Refused):
    """These two engines may not pair."""

    default_reason = Reason.INCOMPATIBLE


class Denied(RankbookError):
    """Not permitted."""

    default_reason = Reason.PERMISSION_DENIED


class Unavailable(RankbookError):
    """The registry, or its store, is away. What was read before may be used."""

    default_reason = Reason.UNREACHABLE


class Overloaded(Unavailable):
    """The server is at a written bound. `metadata` has `limit` and `bound`."""

    default_reason = Reason.TOO_MANY_CALLS


class DeadlineExceeded(RankbookError, TimeoutError):
    """The caller's deadline passed. A write may or may not have happened."""

    default_reason = Reason.TIMED_OUT


class Cancelled(RankbookError):
    """The call was cancelled by its caller."""

    default_reason = Reason.CANCELLED


class Internal(RankbookError):
    """A fault of rankbook's own; please report it."""

    default_reason = Reason.INTERNAL


@dataclass(frozen=True, slots=True)
class Rule:
    """What a reason means on every surface."""

    code: str
    """Name of the gRPC status code."""
    error: type[RankbookError]
    """Class raised on both ends."""
    retry: Retry
    """What may be done about it."""
    exit_code: int
    """Exit code of the command line."""


def _rules() -> dict[Reason, Rule]:
    never, backoff, wait, rereg = Retry.NEVER, Retry.BACKOFF, Retry.WAIT, Retry.REREGISTER
    r = Reason
    return {
        r.INVALID_REQUEST: Rule("INVALID_ARGUMENT", BadRequest, never, 2),
        r.INVALID_RECORD: Rule("INVALID_ARGUMENT", BadRecord, never, 5),
        r.UNKNOWN_FIELD: Rule("INVALID_ARGUMENT", BadRecord, never, 5),
        r.NAMESPACE_MISMATCH: Rule("INVALID_ARGUMENT", BadRecord, never, 5),
        r.LIMIT_EXCEEDED: Rule("INVALID_ARGUMENT", LimitExceeded, never, 5),
        r.MALFORMED_MESSAGE: Rule("INVALID_ARGUMENT", BadRequest, never, 5),
        r.UNKNOWN_CALL: Rule("UNIMPLEMENTED", BadRequest, never, 1),
        r.REPLY_TOO_LARGE: Rule("OUT_OF_RANGE", BadRequest, never, 1),
        r.INVALID_EXPORT: Rule("INVALID_ARGUMENT", BadRequest, never, 5),
        r.NOT_INSTALLED: Rule("UNIMPLEMENTED", BadRequest, never, 1),
        r.ENGINE_NOT_FOUND: Rule("NOT_FOUND", NotFound, wait, 3),
        r.GROUP_NOT_FOUND: Rule("NOT_FOUND", NotFound, wait, 3),
        r.WORKER_NOT_FOUND: Rule("NOT_FOUND", NotFound, rereg, 3),
        r.LEASE_NOT_FOUND: Rule("NOT_FOUND", NotFound, rereg, 3),
        r.BOOK_NOT_FOUND: Rule("NOT_FOUND", NotFound, never, 3),
        r.ENGINE_GONE: Rule("FAILED_PRECONDITION", Gone, never, 5),
        r.GENERATION_FENCED: Rule("FAILED_PRECONDITION", Fenced, never, 5),
        r.EPOCH_FENCED: Rule("FAILED_PRECONDITION", Fenced, never, 5),
        r.EVICTED: Rule("FAILED_PRECONDITION", Fenced, never, 5),
        r.SLOT_HELD: Rule("ALREADY_EXISTS", Conflict, wait, 5),
        r.LAYOUT_CONFLICT: Rule("FAILED_PRECONDITION", Conflict, never, 5),
        r.IDENTITY_CONFLICT: Rule("FAILED_PRECONDITION", Conflict, never, 5),
        r.SEQUENCE_STALE: Rule("ABORTED", Refused, never, 5),
        r.SEQUENCE_REUSED: Rule("ABORTED", Refused, never, 5),
        r.LEASE_ENDED: Rule("FAILED_PRECONDITION", Refused, rereg, 5),
        r.ENGINE_INCOMPLETE: Rule("FAILED_PRECONDITION", Incomplete, wait, 5),
        r.ENGINE_INVALID: Rule("FAILED_PRECONDITION", Refused, never, 5),
        r.SEAL_MISMATCH: Rule("FAILED_PRECONDITION", SealMismatch, wait, 5),
        r.INCOMPATIBLE: Rule("FAILED_PRECONDITION", Incompatible, never, 5),
        r.BOOK_NOT_EMPTY: Rule("FAILED_PRECONDITION", Refused, never, 5),
        r.IMPORT_UNFINISHED: Rule("FAILED_PRECONDITION", Refused, never, 5),
        r.TP_NOT_DIVISIBLE: Rule("FAILED_PRECONDITION", TransferError, never, 5),
        r.DCP_NOT_DIVISIBLE: Rule("FAILED_PRECONDITION", TransferError, never, 5),
        r.BLOCK_SIZE_NOT_DIVISIBLE: Rule("FAILED_PRECONDITION", TransferError, never, 5),
        r.LAYERS_NOT_COVERED: Rule("FAILED_PRECONDITION", TransferError, never, 5),
        r.LAYER_SPLIT_INVALID: Rule("FAILED_PRECONDITION", TransferError, never, 5),
        r.HEADS_UNKNOWN: Rule("FAILED_PRECONDITION", TransferError, never, 5),
        r.LOCAL_ENGINE: Rule("FAILED_PRECONDITION", TransferError, never, 5),
        r.ENGINE_INFO_CHANGED: Rule("FAILED_PRECONDITION", TransferError, never, 5),
        r.TRANSFER_UNSUPPORTED: Rule("FAILED_PRECONDITION", TransferError, never, 5),
        r.UNAUTHENTICATED: Rule("UNAUTHENTICATED", Denied, never, 6),
        r.PERMISSION_DENIED: Rule("PERMISSION_DENIED", Denied, never, 6),
        r.UNREACHABLE: Rule("UNAVAILABLE", Unavailable, backoff, 4),
        r.STORE_UNAVAILABLE: Rule("UNAVAILABLE", Unavailable, backoff, 4),
        r.REVISION_NOT_REACHED: Rule("UNAVAILABLE", Unavailable, backoff, 4),
        r.SHUTTING_DOWN: Rule("UNAVAILABLE", Unavailable, backoff, 4),
        r.TOO_MANY_CALLS: Rule("RESOURCE_EXHAUSTED", Overloaded, backoff, 1),
        r.TOO_MANY_SESSIONS: Rule("RESOURCE_EXHAUSTED", Overloaded, backoff, 1),
        r.TOO_MANY_WATCHERS: Rule("RESOURCE_EXHAUSTED", Overloaded, backoff, 1),
        r.TOO_MANY_WAITERS: Rule("RESOURCE_EXHAUSTED", Overloaded, backoff, 1),
        r.TOO_MANY_LEASES: Rule("RESOURCE_EXHAUSTED", Overloaded, backoff, 1),
        r.TOO_MANY_ENGINES: Rule("RESOURCE_EXHAUSTED", Overloaded, backoff, 1),
        r.TIMED_OUT: Rule("DEADLINE_EXCEEDED", DeadlineExceeded, backoff, 1),
        r.CANCELLED: Rule("CANCELLED", Cancelled, never, 130),
        r.INTERNAL: Rule("INTERNAL", Internal, never, 1),
    }


TABLE: Mapping[Reason, Rule] = _rules()
"""Total over `Reason`."""


def error_for(
    reason: Reason, message: str, metadata: Mapping[str, object] | None = None
) -> RankbookError:
    """Builds the error of a reason, of the class that `TABLE` names."""
    return TABLE[reason].error(message, reason=reason, metadata=metadata)
