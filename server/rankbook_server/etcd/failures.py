"""What went wrong at etcd: what it means, and whether it is safe to ask again."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from rankbook.errors import Reason, Unavailable

__all__ = [
    "EtcdError",
    "What",
    "closed",
    "explain",
    "explain_cancel",
    "no_answer",
    "no_connection",
    "stream_ended",
]


class What(enum.Enum):
    """Kinds of failures that a caller may have to tell apart."""

    UNREACHABLE = enum.auto()
    """There was no connection, or it broke."""
    ENDED = enum.auto()
    """A stream ended, and gRPC does not tell why."""
    NO_ANSWER = enum.auto()
    """The deadline passed."""
    NO_LEADER = enum.auto()
    """The member knows no leader."""
    TLS = enum.auto()
    """The two ends do not trust each other."""
    TOKEN = enum.auto()
    """The token is no longer valid: log in anew."""
    DENIED = enum.auto()
    """The user is unknown, or may not do this."""
    NO_SPACE = enum.auto()
    """etcd's quota is used up."""
    TOO_LARGE = enum.auto()
    """The request is over etcd's bound."""
    COMPACTED = enum.auto()
    """The revision asked for is forgotten."""
    LEASE_EXISTS = enum.auto()
    """There is a lease of this number."""
    LEASE_MISSING = enum.auto()
    """There is no lease of this number."""
    CLOSED = enum.auto()
    """Our own client was closed."""
    OTHER = enum.auto()
    """Anything else."""


class EtcdError(Unavailable):
    """A request to etcd failed.

    Attributes:
        what: The kind.
        unknown: A write may have happened all the same.
        elsewhere: Another member may do better.
        compact_revision: With COMPACTED of a watch: what is forgotten.
    """

    default_reason = Reason.STORE_UNAVAILABLE

    def __init__(
        self,
        what: What,
        message: str,
        *,
        endpoint: str,
        said: str = "",
        unknown: bool = False,
        elsewhere: bool = False,
        compact_revision: int = 0,
    ) -> None:
        super().__init__(
            message,
            reason=Reason.STORE_UNAVAILABLE,
            metadata={
                "endpoint": endpoint,
                "cause": said,
                "outcome": "unknown" if unknown else "nothing was written",
            },
        )
        self.what = what
        self.unknown = unknown
        self.elsewhere = elsewhere
        self.compact_revision = compact_revision


@dataclass(frozen=True, slots=True)
class _Row:
    words: Sequence[str]
    """Any of these in what was said."""
    what: What
    happened: str
    then: str
    unknown: bool = False
    elsewhere: bool = False


_LOOK = "look at etcd and the network; the server goes on by itself once it is back"
_QUORUM = (
    "most of its members must run and reach each other; the server goes on by itself once they do"
)
_LOGIN = "check user= and the password that the store's URL names"
_GRANT = "grant the user's role READWRITE on all keys below the store's prefix and a slash"
_ROOM = "compact and defragment it, then `etcdctl alarm disarm`; nothing can be written until then"
_CERTIFICATES = (
    "check that etcd serves TLS, ca=, cert= and key= of the store's URL, and the names in etcd's "
    "certificate"
)
_BOUND = "raise etcd's --max-request-bytes to its default of 1572864 at least"

# Searched from the top. `unknown` is False only where etcd, or gRPC, says so
# before it hands anything to Raft.
_ROWS = (
    _Row(
        # gRPC names its own parts where a peer breaks off: TSI is its TLS.
        ("handshake", "tsi_", "certificate"),
        What.TLS,
        "does not agree with us on TLS",
        _CERTIFICATES,
        elsewhere=True,
    ),
    _Row(
        ("failed to connect to all addresses", "dns resolution failed"),
        What.UNREACHABLE,
        "cannot be reached",
        _LOOK,
        elsewhere=True,
    ),
    _Row(
        # A write on a stream that the other side ended hides how it did.
        ("internal error from core", "the stream ended"),
        What.ENDED,
        "broke off",
        _LOOK,
        unknown=True,
        elsewhere=True,
    ),
    _Row(("etcdserver: no leader",), What.NO_LEADER, "has no leader", _QUORUM, elsewhere=True),
    _Row(
        ("not supported for learner", "not capable", "unhealthy cluster"),
        What.OTHER,
        "cannot serve us",
        _LOOK,
        elsewhere=True,
    ),
    _Row(
        ("leader changed", "request timed out", "server stopped", "raft proposal dropped"),
        What.NO_ANSWER,
        "did not come to an end with it",
        _QUORUM,
        unknown=True,
        elsewhere=True,
    ),
    _Row(
        ("invalid auth token", "revision of auth store is old"),
        What.TOKEN,
        "does not take our token",
        _LOGIN,
    ),
    _Row(
        ("invalid user id or password",),
        What.DENIED,
        "refuses the user or the password",
        _LOGIN,
    ),
    _Row(
        ("user name is empty",),
        What.DENIED,
        "wants a user",
        "name one in the store's URL: ?user=NAME&password_file=FILE",
    ),
    _Row(
        ("authentication is not enabled",),
        What.DENIED,
        "knows no users",
        "turn its authentication on, or leave user= out of the store's URL",
    ),
    _Row(("permission denied",), What.DENIED, "does not permit it", _GRANT),
    _Row(("database space exceeded",), What.NO_SPACE, "has used up its quota", _ROOM),
    _Row(
        ("request is too large", "larger than max", "too many operations"),
        What.TOO_LARGE,
        "refuses a request this large",
        _BOUND,
    ),
    _Row(("has been compacted",), What.COMPACTED, "no longer keeps that revision", "read anew"),
    _Row(("lease already exists",), What.LEASE_EXISTS, "has that lease", "keep it alive"),
    _Row(("lease not found",), What.LEASE_MISSING, "has no such lease", "grant it"),
    _Row(("corrupt cluster",), What.OTHER, "is damaged", "restore it; see etcd's own manual"),
    _Row(
        ("too many requests",),
        What.OTHER,
        "is overloaded",
        "give it a faster disk, or fewer clients; it is asked again",
    ),
)


def explain(
    code: grpc.StatusCode, said: str, endpoint: str, *, timeout_s: float = 0.0
) -> EtcdError:
    """Says what an answer of etcd, or of gRPC, means.

    Args:
        code: Its status.
        said: Its words.
        endpoint: HOST:PORT that was asked.
        timeout_s: How long it was waited for.
    """
    # gRPC puts the cause at the end, after each address it tried.
    cause = said.rpartition("last error: ")[2].strip() or code.name
    lower = said.lower()
    for row in _ROWS:
        if any(word in lower for word in row.words):
            then = row.then
            if row.what is What.UNREACHABLE and "socket closed" in lower:
                then = f"it may want TLS, which ca= or tls=on in the store's URL turns on; {then}"
            return EtcdError(
                row.what,
                f"etcd at {endpoint} {row.happened} ({cause}): {then}",
                endpoint=endpoint,
                said=cause,
                unknown=row.unknown,
                elsewhere=row.elsewhere,
            )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return no_answer(endpoint, timeout_s)
    broke = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return EtcdError(
        What.UNREACHABLE if broke else What.OTHER,
        f"etcd at {endpoint} {'was lost' if broke else 'failed'} ({cause}): {_LOOK}",
        endpoint=endpoint,
        said=cause,
        unknown=True,
        elsewhere=broke,
    )


def explain_cancel(said: str, compact_revision: int, endpoint: str) -> EtcdError:
    """Says why etcd ended a watch."""
    if compact_revision:
        return EtcdError(
            What.COMPACTED,
            f"etcd at {endpoint} keeps no history up to revision {compact_revision}: read anew",
            endpoint=endpoint,
            said=said,
            compact_revision=compact_revision,
        )
    return explain(grpc.StatusCode.UNKNOWN, said or "the watch was cancelled", endpoint)


def stream_ended(endpoint: str) -> EtcdError:
    """Builds the error of a stream that etcd ended without a word."""
    return explain(grpc.StatusCode.UNAVAILABLE, "the stream ended", endpoint)


def no_answer(endpoint: str, timeout_s: float) -> EtcdError:
    """Builds the error of a deadline that passed."""
    return EtcdError(
        What.NO_ANSWER,
        f"etcd at {endpoint} did not answer within {timeout_s:g} s: {_QUORUM}",
        endpoint=endpoint,
        said="deadline exceeded",
        unknown=True,
        elsewhere=True,
    )


def no_connection(endpoint: str, timeout_s: float) -> EtcdError:
    """Builds the error of an address that neither takes nor refuses a connection."""
    return EtcdError(
        What.UNREACHABLE,
        f"etcd at {endpoint} cannot be reached (no connection within {timeout_s:g} s): {_LOOK}",
        endpoint=endpoint,
        said="no connection in time",
        elsewhere=True,
    )


def closed(endpoint: str) -> EtcdError:
    """Builds the error of a request that ran while our client was closed."""
    return EtcdError(
        What.CLOSED,
        f"the connection to etcd at {endpoint} was closed by this server while it was in use",
        endpoint=endpoint,
        said="closed",
        unknown=True,
    )
