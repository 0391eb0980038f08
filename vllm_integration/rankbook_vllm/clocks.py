"""How far a peer's clock is from this process's, by way of the registry's.

The performance counters of two processes have nothing in common. Each process
knows its own distance to the registry's clock, and a peer's engine core has
published its own; the difference is the distance between the two, with an error
that is the sum of both measurements' and of what the clocks may have drifted
since.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rankbook.errors import RankbookError
from rankbook.model import ClockPair

__all__ = ["DRIFT", "REFRESH_S", "PeerClocks", "PeerOffset", "clock_pair", "offset_between"]

DRIFT = 1e-4
"""Seconds a clock may go wrong in a second. Quartz is specified at 20 to 50 ppm a
side; 100 ppm covers two."""
REFRESH_S = 600.0
"""After this many seconds a measurement is made anew: 0.06 s of drift."""
_CALL_S = 2.0
_READINGS = 3


class _Teller(Protocol):
    """Who tells the registry's clock: `rankbook.Client`."""

    def status(self, *, timeout_s: float | None = None) -> _Told:
        """The registry's status."""
        ...


class _Told(Protocol):
    @property
    def server_time(self) -> dt.datetime | None:
        """The registry's clock."""
        ...


@dataclass(frozen=True, slots=True)
class PeerOffset:
    """A peer's clock minus this process's, in seconds."""

    offset_s: float
    error_s: float
    """Largest error of it."""


def clock_pair(client: _Teller, clock: Callable[[], float]) -> ClockPair | None:
    """One moment on this process's clock and the registry's, by the quickest of three
    answers. Waits at most six seconds; None where the registry tells no time.

    Raises:
        RankbookError: The registry did not answer.
    """
    best: ClockPair | None = None
    for _ in range(_READINGS):
        before = clock()
        told = client.status(timeout_s=_CALL_S).server_time
        after = clock()
        error_s = (after - before) / 2
        if told is not None and (best is None or error_s < best.error_s):
            best = ClockPair(before + error_s, told, error_s)
    return best


def offset_between(ours: ClockPair, theirs: ClockPair, now_s: float) -> PeerOffset | None:
    """A peer's clock minus ours.

    Args:
        ours: Our clock and the registry's at one moment.
        theirs: The peer's clock and the registry's at another.
        now_s: Our clock now.

    Returns:
        None where a pair has no time of the registry's.
    """
    if ours.registry_time is None or theirs.registry_time is None:
        return None
    between_s = (ours.registry_time - theirs.registry_time).total_seconds()
    offset_s = theirs.local_s + between_s - ours.local_s
    # The peer measured `between_s` before us: both clocks ran on since.
    age_s = max(0.0, now_s - ours.local_s)
    drifted_s = DRIFT * (2 * age_s + abs(between_s))
    return PeerOffset(offset_s, ours.error_s + theirs.error_s + drifted_s)


class PeerClocks:
    """Keeps this process's distance to the registry's clock. Safe to use from many threads."""

    def __init__(self, client: _Teller, clock: Callable[[], float]) -> None:
        """Takes note; asks nobody.

        Args:
            client: Who tells the registry's clock.
            clock: This process's clock, in seconds: the performance counter, which
                vLLM compares.
        """
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._pair: ClockPair | None = None
        self._asking = False

    def refresh(self) -> None:
        """Measures anew in the background where that is due; returns at once."""
        with self._lock:
            old = self._pair
            fresh = old is not None and self._clock() - old.local_s < REFRESH_S
            if self._asking or fresh:
                return
            self._asking = True
        threading.Thread(target=self._ask, name="rankbook-clock", daemon=True).start()

    def offset_to(self, theirs: ClockPair | None) -> PeerOffset | None:
        """A peer's clock minus ours; None before both were measured. Does not wait."""
        self.refresh()
        with self._lock:
            ours = self._pair
        if ours is None or theirs is None:
            return None
        return offset_between(ours, theirs, self._clock())

    def _ask(self) -> None:
        try:
            pair = clock_pair(self._client, self._clock)
        except RankbookError:
            pair = None  # the registry is away; the next use asks again
        with self._lock:
            self._asking = False
            if pair is not None:
                self._pair = pair
