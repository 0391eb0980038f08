"""The calls of one session stream: numbers, frames, and whose answer is whose. Pure.

Theory of operation. A session lives as long as its stream. Every call gets
the next number; a frame from the server names the number it answers. A call
is open until a frame without `more` or with a status comes for it, until its
caller gives it up, or until the stream breaks:

    open --part, more--> open          keeps the part
    open --part, last--> answered      its caller gets every part
    open --status------> failed        its caller gets the typed error
    open --give up-----> (forgotten)   a cancel frame goes out; a late answer is dropped
    open --break-------> broken        its caller is told whether it may have been sent

Numbers are never used again on a stream, so an answer that comes late cannot
be taken for another one's. What to do about a broken call is the retry
policy's to say; a session is never reused after its stream broke.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rankbook import v1
from rankbook._calls import METHODS, Call
from rankbook._status import error_of_status
from rankbook.errors import Internal, RankbookError

__all__ = ["Broken", "Outcome", "Session"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call came to: the parts of its answer, or the error the server gave."""

    request_id: int
    """The call."""
    parts: tuple[Any, ...] = ()
    """The parts of the answer, in order."""
    error: RankbookError | None = None
    """Why there is none."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A call that was open when the stream broke."""

    request_id: int
    """The call."""
    sent: bool
    """Whether its frame may have reached the server."""


@dataclass(slots=True)
class _Open:
    call: Call
    parts: list[Any] = field(default_factory=list)


class Session:
    """One stream's calls. Not thread-safe: its owner holds a lock, or one loop."""

    def __init__(self) -> None:
        """Begins with no call."""
        self._next = 1
        self._open: dict[int, _Open] = {}
        self._heard_s = 0.0
        self._silences = 0

    def heard(self, now_s: float) -> None:
        """Notes that the server was heard at `now_s`, monotonic, in seconds."""
        self._heard_s, self._silences = now_s, 0

    def is_silent(self, sent_s: float, *, endpoints: int) -> bool:
        """Whether to leave this stream after a call had no answer in time.

        Args:
            sent_s: When the call was sent, on the clock of `heard`.
            endpoints: How many there are to go to, this one included.
        """
        if self._heard_s >= sent_s:
            return False
        # Nothing at all came since the call went out. One such call may be bad
        # luck where there is nowhere else to go; a second one is not.
        self._silences += 1
        return self._silences >= 2 or endpoints > 1

    @property
    def open_calls(self) -> int:
        """Calls that have no outcome yet."""
        return len(self._open)

    def open(self, call: Call) -> v1.SessionRequest:
        """Takes a call and gives the frame to send; its `request_id` names the call."""
        frame = v1.SessionRequest(request_id=self._next)
        getattr(frame, METHODS[call.method].field).CopyFrom(call.request)
        self._open[self._next] = _Open(call)
        self._next += 1
        return frame

    def receive(self, response: v1.SessionResponse) -> Outcome | None:
        """Takes a frame from the server; the outcome, if it ended a call."""
        request_id = response.request_id
        entry = self._open.get(request_id)
        if entry is None:
            return None
        name = response.WhichOneof("reply")
        expected = METHODS[entry.call.method].field
        if name == expected:
            entry.parts.append(getattr(response, expected))
            if response.more:
                return None
            del self._open[request_id]
            return Outcome(request_id, parts=tuple(entry.parts))
        del self._open[request_id]
        if name == "status":
            return Outcome(request_id, error=error_of_status(response.status))
        return Outcome(
            request_id,
            error=Internal(
                f"the registry answered {entry.call.method} with {name or 'an unknown reply'}",
                metadata={"call": entry.call.method, "reply": name or ""},
            ),
        )

    def give_up(self, request_id: int) -> v1.SessionRequest | None:
        """Forgets a call; the frame that tells the server so, or None if it had ended."""
        if self._open.pop(request_id, None) is None:
            return None
        frame = v1.SessionRequest(request_id=self._next)
        frame.cancel.request_id = request_id
        self._next += 1
        return frame

    def broke(self, unsent: Iterable[int] = ()) -> tuple[Broken, ...]:
        """Ends the session: every open call, in order, and whether it may have been sent.

        Args:
            unsent: Calls whose frames are known never to have left this process.
        """
        kept = frozenset(unsent)
        broken = tuple(Broken(request_id, request_id not in kept) for request_id in self._open)
        self._open.clear()
        return broken
