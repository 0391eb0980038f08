"""The sends of one call, decided in one place for both faces. Pure: time and
randomness come in.

A wire asks for the call to send, sends it, and tells what a failed send came
to; it is told how long to wait before the next one, or given the error for the
caller.
"""

from __future__ import annotations

from collections.abc import Callable

from rankbook._calls import METHODS, Call, shortened
from rankbook._retry import RetryPolicy, next_delay_s
from rankbook.errors import DeadlineExceeded, RankbookError, Reason

__all__ = ["Attempts"]


class Attempts:
    """One call's sends. For one caller; not thread-safe."""

    def __init__(self, policy: RetryPolicy, call: Call, *, now_s: float, timeout_s: float) -> None:
        """Begins with nothing sent.

        Args:
            policy: How often and how soon to repeat.
            call: The call.
            now_s: Now, monotonic, in seconds.
            timeout_s: What the caller has, the call's own long poll included.
        """
        self._policy = policy
        self._call = call
        self._spare_s = timeout_s - call.wait_s
        self._count = 0
        self._waited_s = 0.0
        self._said: RankbookError | None = None
        self.until_s = now_s + timeout_s
        """When the caller's time is over."""

    def next_call(self, now_s: float) -> Call:
        """The call to send now; a repeat waits only for what is left of its long poll."""
        self._count += 1
        if self._count > 1:
            self._call = shortened(self._call, self.until_s - now_s - self._spare_s)
        return self._call

    def delay_s(
        self, error: RankbookError, *, sent: bool, now_s: float, rng: Callable[[], float]
    ) -> float:
        """How long to wait before the next send, in seconds.

        Args:
            error: What the last send came to.
            sent: Whether it may have reached a server that did not answer.
            now_s: Now, monotonic, in seconds.
            rng: Gives a number in [0, 1).

        Raises:
            RankbookError: There is no next send; this is what the caller gets.
        """
        delay = next_delay_s(
            self._policy,
            error,
            METHODS[self._call.method].repeat,
            sent=sent,
            attempt=self._count,
            waited_s=self._waited_s,
            rng=rng,
        )
        if delay is None or now_s + delay >= self.until_s:
            raise self._to_caller(error)
        self._said = error
        self._waited_s += delay
        return delay

    def _to_caller(self, error: RankbookError) -> RankbookError:
        # A deadline that cuts a wait short says nothing; what was waited for does.
        # Only reads wait for a revision, so nothing can have happened meanwhile.
        said = self._said
        if said is None or said.reason is not Reason.REVISION_NOT_REACHED:
            return error
        return said if isinstance(error, DeadlineExceeded) else error
