"""Whether and when a failed call is repeated: data and pure functions.

A call is repeated only where nothing can happen twice by it. What may be
repeated is a property of the call (`_calls.METHODS`), whether the failure may
pass by itself is a property of the error (`errors.TABLE`), and how often and
how soon is the caller's `RetryPolicy`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from rankbook.errors import BadRequest, RankbookError, Retry

__all__ = ["Repeat", "RetryPolicy", "backoff_s", "next_delay_s"]


class Repeat(enum.Enum):
    """Which calls may be sent a second time."""

    ALWAYS = "always"
    """A second one changes nothing, or is a read."""
    IF_UNSENT = "if-unsent"
    """Only while the first one surely reached no server."""
    NEVER = "never"
    """Not by the client; a stream is resumed instead."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon a call is repeated. Immutable, safe to share."""

    attempts: int = 5
    """Sends of one call altogether, 1 or above; 1 repeats nothing."""
    initial_s: float = 0.05
    """Wait before the first repeat, in seconds."""
    multiplier: float = 2.0
    """Growth of the wait from one repeat to the next."""
    max_s: float = 1.0
    """Longest wait between two sends, in seconds."""
    jitter: float = 0.25
    """Part of a wait that is random, 0 to 1: 0.25 takes off up to a quarter."""
    budget_s: float = 10.0
    """Waits of one call altogether, in seconds. The call's deadline holds beside it."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            BadRequest: A value is outside its range.
        """
        for name, good in (
            ("attempts", self.attempts >= 1),
            ("initial_s", self.initial_s >= 0),
            ("multiplier", self.multiplier >= 1),
            ("max_s", self.max_s >= self.initial_s),
            ("jitter", 0 <= self.jitter <= 1),
            ("budget_s", self.budget_s >= 0),
        ):
            if not good:
                value = getattr(self, name)
                raise BadRequest(
                    f"RetryPolicy.{name} is {value}: out of range",
                    metadata={"field": name, "value": value, "rule": "see RetryPolicy"},
                )


def backoff_s(policy: RetryPolicy, attempt: int, rng: Callable[[], float]) -> float:
    """The wait after the `attempt`-th failed send.

    Args:
        policy: The policy.
        attempt: Sends so far, from 1.
        rng: Gives a number in [0, 1).
    """
    # The exponent is bounded so that a loop that never ends cannot overflow a float.
    grown = policy.initial_s * policy.multiplier ** min(attempt - 1, 64)
    wait = min(grown, policy.max_s)
    return wait * (1.0 - policy.jitter * rng())


def next_delay_s(
    policy: RetryPolicy,
    error: RankbookError,
    repeat: Repeat,
    *,
    sent: bool,
    attempt: int,
    waited_s: float,
    rng: Callable[[], float],
) -> float | None:
    """How long to wait before the call is sent again; None: give the error to the caller.

    Args:
        policy: The policy.
        error: What the last send came to.
        repeat: Whether the call may be sent twice.
        sent: Whether the last send may have reached a server that did not answer.
        attempt: Sends so far, from 1.
        waited_s: Waits of this call so far, in seconds.
        rng: Gives a number in [0, 1).
    """
    if error.retry is not Retry.BACKOFF or attempt >= policy.attempts:
        return None
    if repeat is Repeat.NEVER or (repeat is Repeat.IF_UNSENT and sent):
        return None
    delay = backoff_s(policy, attempt, rng)
    return delay if waited_s + delay <= policy.budget_s else None
