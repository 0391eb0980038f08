"""The server's one reader of clocks and maker of ids.

Everything else takes time and ids by argument, so that tests decide both.
"""

from __future__ import annotations

import secrets
import time
from typing import Protocol

from rankbook_server.core.decision import Instant

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Where the server takes time and ids from. Safe from any thread."""

    def mono(self) -> float:
        """Seconds on a clock that never goes back; its zero means nothing."""

    def unix(self) -> float:
        """Seconds since 1970."""

    def now(self) -> Instant:
        """Both readings of one moment."""

    def new_id(self) -> str:
        """A token that no one made before; sorts by the time it was made."""


class SystemClock:
    """The machine's clocks. Safe from any thread."""

    def mono(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def unix(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def now(self) -> Instant:
        """Both readings of one moment."""
        return Instant(mono_s=time.monotonic(), unix_s=time.time())

    def new_id(self) -> str:
        """Twelve hexadecimal digits of milliseconds, then sixteen of chance."""
        return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(8)}"
