"""The only place that turns an error into a google.rpc.Status."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, NoReturn

import grpc
import structlog
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from rankbook.errors import DOMAIN, Internal, RankbookError

__all__ = ["abort", "boundary", "to_status"]

_MAX_MESSAGE_CHARS = 1500
# Trailing metadata is refused by many clients above 8 KiB, and base64 and
# percent-encoding make it a third longer.
_MAX_METADATA_CHARS = 3000

_CODES = {code.name: code for code in grpc.StatusCode}
_DETAILS_KEY = "grpc-status-details-bin"


def _shorten(text: str, bound: int) -> str:
    return text if len(text) <= bound else f"{text[: max(bound - 3, 0)]}..."


def to_status(error: RankbookError) -> status_pb2.Status:
    """The status of an error, with its ErrorInfo.

    Long texts are cut so that a status always fits into gRPC's trailers.
    """
    left = _MAX_METADATA_CHARS
    metadata = {}
    for name, value in error.metadata.items():
        metadata[name] = _shorten(value, max(left - len(name), 16))
        left -= len(name) + len(metadata[name])
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=metadata)
    packed = AnyMessage()
    packed.Pack(info)
    return status_pb2.Status(
        code=_CODES[error.code].value[0],
        message=_shorten(error.message, _MAX_MESSAGE_CHARS),
        details=[packed],
    )


async def abort(context: Any, error: RankbookError) -> NoReturn:
    """Ends a gRPC call with an error; the status rides in the trailers."""
    status = to_status(error)
    await context.abort(
        _CODES[error.code],
        status.message,
        ((_DETAILS_KEY, status.SerializeToString()),),
    )
    raise AssertionError("abort returned")


class boundary:  # noqa: N801 - reads as the statement it is
    """Keeps a fault of ours from being more than one failed call.

    A context manager: a RankbookError passes, anything else becomes an
    `Internal` whose incident the log explains.
    """

    __slots__ = ("_call", "_new_id")

    def __init__(self, call: str, new_id: Callable[[], str]) -> None:
        """Does nothing yet.

        Args:
            call: Name of the call, for the log.
            new_id: Makes the incident's name, which the caller is told.
        """
        self._call = call
        self._new_id = new_id

    def __enter__(self) -> None:
        """Begins."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        """Ends.

        Raises:
            Internal: For a fault; the log has the rest.
        """
        if fault is None or isinstance(fault, RankbookError) or not isinstance(fault, Exception):
            return False
        incident = self._new_id()
        structlog.get_logger().error(
            "internal error", call=self._call, incident=incident, exc_info=fault
        )
        raise Internal(
            f"{self._call} failed inside the registry; its log has incident {incident}: please "
            "report it",
            metadata={"call": self._call, "incident": incident},
        ) from fault
