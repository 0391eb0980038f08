"""What the proxy answers where it does not pass an engine's answer on."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Refusal"]


class Refusal(Exception):
    """An answer of the proxy's own.

    Attributes:
        status: HTTP status.
        reason: Stable name, UPPER_SNAKE.
        message: What happened, with values.
        details: More members of the answer's `error`.
    """

    def __init__(
        self, status: int, reason: str, message: str, details: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.details = dict(details or {})

    def body(self) -> dict[str, object]:
        """The answer, to be written as JSON."""
        return {"error": {"message": self.message, "reason": self.reason, **self.details}}
