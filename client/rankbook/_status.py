"""From the wire's statuses to the errors of `rankbook.errors`. Pure.

An error is known by the `reason` of its ErrorInfo, never by its text. A reason
this version does not know, from a newer server, gets the class of its status
code; `metadata["server_reason"]` then has the server's own word.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from rankbook.errors import DOMAIN, RankbookError, Reason, error_for

__all__ = ["CODES", "error_of_code", "error_of_status", "has_reason"]

CODES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
"""Names of gRPC's status codes, by number."""

# What stands in for a reason this version does not know. Of the reasons with
# the code, the one whose class and retry class claim the least.
_NEAREST = {
    "CANCELLED": Reason.CANCELLED,
    "INVALID_ARGUMENT": Reason.INVALID_REQUEST,
    "DEADLINE_EXCEEDED": Reason.TIMED_OUT,
    "NOT_FOUND": Reason.ENGINE_NOT_FOUND,
    "ALREADY_EXISTS": Reason.SLOT_HELD,
    "PERMISSION_DENIED": Reason.PERMISSION_DENIED,
    "RESOURCE_EXHAUSTED": Reason.TOO_MANY_CALLS,
    "FAILED_PRECONDITION": Reason.ENGINE_INVALID,
    "ABORTED": Reason.SEQUENCE_STALE,
    "OUT_OF_RANGE": Reason.REPLY_TOO_LARGE,
    "UNIMPLEMENTED": Reason.UNKNOWN_CALL,
    "UNAVAILABLE": Reason.UNREACHABLE,
    "UNAUTHENTICATED": Reason.UNAUTHENTICATED,
}


def _info(status: status_pb2.Status) -> error_details_pb2.ErrorInfo | None:
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == DOMAIN:
                return info
    return None


def error_of_status(status: status_pb2.Status) -> RankbookError:
    """The error that a google.rpc.Status tells of."""
    info = _info(status)
    code = CODES[status.code] if 0 <= status.code < len(CODES) else "UNKNOWN"
    if info is None:
        return _by_code(code, status.message, {})
    metadata = dict(info.metadata)
    if info.reason in Reason.__members__:
        return error_for(Reason(info.reason), status.message, metadata)
    return _by_code(code, status.message, {**metadata, "server_reason": info.reason})


def _by_code(code: str, message: str, metadata: dict[str, str]) -> RankbookError:
    reason = _NEAREST.get(code, Reason.INTERNAL)
    return error_for(reason, message or code, {**metadata, "server_code": code})


def _decoded(details: bytes | None) -> status_pb2.Status | None:
    if not details:
        return None
    try:
        return status_pb2.Status.FromString(details)
    except DecodeError:
        return None


def has_reason(details: bytes | None) -> bool:
    """Whether an rpc's status details come from a registry, and not from the transport."""
    status = _decoded(details)
    return status is not None and _info(status) is not None


def error_of_code(code: str, message: str, details: bytes | None = None) -> RankbookError:
    """The error of a failed rpc.

    Args:
        code: Name of its status code.
        message: Its text.
        details: Its `grpc-status-details-bin`, where there is one.
    """
    status = _decoded(details)
    if status is not None and _info(status) is not None:
        return error_of_status(status)
    return _by_code(code, message, {})
