"""What both faces say to gRPC in the same words: method paths, and errors read back.

Nothing of gRPC's own gets past here: a caller sees `rankbook.errors` only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeVar

from rankbook import v1
from rankbook._cache import WatchFold
from rankbook._calls import METHODS, Answer, Call, Script
from rankbook._channel import Endpoint, shown
from rankbook._status import error_of_code, has_reason
from rankbook.convert import seconds
from rankbook.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    Internal,
    RankbookError,
    Reason,
    Unavailable,
)

__all__ = [
    "Failure",
    "Step",
    "advance",
    "closed",
    "deadline_passed",
    "failure_of",
    "forked",
    "is_unimplemented",
    "multicallable",
    "resumed",
    "unreachable",
    "why_no_registry",
]

T = TypeVar("T")
_DETAILS = "grpc-status-details-bin"


class Failure(Exception):
    """A send of a call that came to nothing; inside the client only."""

    def __init__(self, error: RankbookError, *, sent: bool) -> None:
        """Notes the error and whether the request may have reached a server."""
        super().__init__(error.message)
        self.error = error
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Step:
    """One message of a watch, folded; or the news that its stream broke."""

    events: tuple[Any, ...] = ()
    """What changed."""
    synced: bool = False
    """Whether everything up to now is in."""
    error: RankbookError | None = None
    """Why the stream broke; it is being resumed."""
    stale_s: float = 0.0
    """How long the server has been cut off from its store, in seconds."""


def folded(fold: WatchFold, response: v1.WatchResponse) -> Step:
    """One message of a watch, taken into its state."""
    return Step(fold.fold(response), fold.synced, stale_s=seconds(response.stale_for))


def advance(script: Script[T], answer: Answer | None) -> tuple[Call | None, T | None]:
    """Hands a script its answer; the next call to send, or what the script returns.

    Raises:
        Internal: The answer lacks what this version needs of it.
    """
    try:
        if answer is None:
            return next(script), None
        return script.send(answer), None
    except StopIteration as done:
        return None, done.value
    except RankbookError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as problem:
        if answer is None:
            raise  # the caller's own mistake
        raise Internal(
            f"the registry's answer cannot be read: {problem}", metadata={"cause": str(problem)}
        ) from problem


def multicallable(channel: Any, name: str, kind: str) -> Any:
    """The channel's callable of an rpc; `kind` is "unary_unary" and the like."""
    method = METHODS[name]
    return getattr(channel, kind)(
        f"/{_SERVICE}/{name}",
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.reply.FromString,
    )


_SERVICE = "rankbook.v1.Registry"
_LOOKUP = re.compile(r"lookup failed for \S+: ([^\]]+)")


def _code_and_details(problem: Any) -> tuple[str, str, bytes | None]:
    trailers = problem.trailing_metadata() or ()
    details = next((value for key, value in trailers if key == _DETAILS), None)
    return problem.code().name, problem.details() or "", details


def failure_of(problem: Any, endpoint: Endpoint) -> Failure:
    """What a failed rpc means. Transport troubles name the endpoint."""
    code, text, details = _code_and_details(problem)
    if has_reason(details):
        error = error_of_code(code, text, details)
        # A commit that failed may still have happened; any other answer is a no.
        return Failure(error, sent=error.reason is Reason.STORE_UNAVAILABLE)
    if code in ("UNAVAILABLE", "CANCELLED", "INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED"):
        cause = _plain(code, text)
        return Failure(
            Unavailable(
                f"the registry at {endpoint} does not answer: {cause}",
                metadata={"endpoint": str(endpoint), "cause": cause},
            ),
            sent=True,
        )
    return Failure(error_of_code(code, f"{endpoint}: {text}"), sent=False)


def why_no_registry(problem: Any) -> str | None:
    """Why what was asked for its status is no registry to use; None: it is one.

    Any word of a registry proves that it is there, also a refusal; what it
    says of itself is for the calls to find out. A web server, or a proxy with
    nothing behind it, answers too, but not in a registry's words.
    """
    code, text, details = _code_and_details(problem)
    if has_reason(details):
        error = error_of_code(code, text, details)
        return error.message if error.reason is Reason.SHUTTING_DOWN else None
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        return None
    return _plain(code, text)


def _plain(code: str, text: str) -> str:
    """gRPC's text without what only its authors need to know."""
    if "Failed parsing HTTP/2" in text or "http1.x" in text:
        return "what listens there speaks no gRPC: a web server, or rankbookd's own --http port"
    lookup = _LOOKUP.search(text)
    if lookup is not None:
        return f"the name cannot be looked up ({lookup[1]})"
    cause = text.rpartition("to remote host: ")[2].rpartition("last error: ")[2]
    cause = cause.removeprefix("UNKNOWN: ").removeprefix("connect: ")
    return cause if code == "UNAVAILABLE" and cause else f"{code}: {text}".removesuffix(": ")


def is_unimplemented(problem: Any) -> bool:
    """Whether the server has no such rpc."""
    code, _, details = _code_and_details(problem)
    return code == "UNIMPLEMENTED" and not has_reason(details)


def is_hidden(problem: Any) -> bool:
    """Whether grpc.aio kept the reason of a stream's end to itself."""
    code, message, _ = _code_and_details(problem)
    return code == "INTERNAL" and message == "Internal error from Core"


def unreachable(endpoints: tuple[Endpoint, ...], waited_s: float, cause: str) -> Unavailable:
    """No endpoint answered."""
    if len(endpoints) == 1:
        cause = cause.removeprefix(f"{endpoints[0]}: ")
    return Unavailable(
        f"no registry answers at {shown(endpoints)}"
        + (f": {cause}" if cause else "")
        + "; is rankbookd running, and is the address right?",
        metadata={"endpoint": shown(endpoints), "waited_s": f"{waited_s:.3g}", "cause": cause},
    )


def deadline_passed(call: Call, timeout_s: float) -> DeadlineExceeded:
    """The registry was reached and did not answer in time."""
    return DeadlineExceeded(
        f"{call.method} got no answer within {timeout_s:.3g} s; the registry may still do it",
        metadata={"call": call.method, "timeout_s": f"{timeout_s:.3g}"},
    )


def closed() -> Cancelled:
    """The client was closed."""
    return Cancelled("the client is closed", metadata={"cause": "closed"})


def forked(made: int, here: int) -> BadRequest:
    """The client is used in another process than it was first used in."""
    return BadRequest(
        f"this client is of process {made} and used in process {here}: gRPC does not live "
        "through a fork, make another client after it",
        metadata={"field": "pid", "value": here, "rule": f"process {made}"},
    )


def resumed(request: v1.WatchRequest, resume: tuple[int, str]) -> v1.WatchRequest:
    """The request that goes on where a watch is."""
    following = v1.WatchRequest()
    following.CopyFrom(request)
    following.from_revision, following.book_id = resume
    return following
