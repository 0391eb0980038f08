"""The only reader of clocks in the client; everything else takes the time by argument."""

from __future__ import annotations

import time

__all__ = ["mono_s", "perf_s", "unix_s"]


def mono_s() -> float:
    """Seconds of a clock that never goes back; for deadlines and ages."""
    return time.monotonic()


def perf_s() -> float:
    """Seconds of the performance counter, the clock that peers extrapolate."""
    return time.perf_counter()


def unix_s() -> float:
    """Seconds since 1970, by this host's wall clock."""
    return time.time()
