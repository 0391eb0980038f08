"""Tells a machine that had no time for a test from a fault of what was tested."""

from __future__ import annotations

import os
import threading
import time

_NAP_S = 0.05
_LATE_S = 0.05


class StarvationWatch:
    """Naps in a thread and notes how much later than asked it woke.

    What is late is the time in which this process, and so the test, got no CPU.
    Safe to ask from any thread.
    """

    def __init__(self) -> None:
        """Starts watching."""
        self._lock = threading.Lock()
        self._late: list[tuple[float, float]] = []  # when it woke (time.time()), seconds too late
        self._lay_down = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="starvation", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(_NAP_S):
            with self._lock:
                self._late.extend(self._oversleeping())
                self._lay_down = time.monotonic()

    def _oversleeping(self) -> list[tuple[float, float]]:
        late = time.monotonic() - self._lay_down - _NAP_S
        return [(time.time(), late)] if late > _LATE_S else []

    def starved(self, begin: float, end: float) -> tuple[float, float]:
        """Seconds without CPU, in all and at the longest.

        Args:
            begin: Reading of `time.time()`.
            end: A later one. Of a starvation that goes on over either, the part
                between them counts.
        """
        with self._lock:
            known = [*self._late, *self._oversleeping()]
        parts = [
            min(woke, end) - max(woke - late, begin)
            for woke, late in known
            if woke > begin and woke - late < end
        ]
        return sum(parts), max(parts, default=0.0)

    def report(self, begin: float, end: float) -> str:
        """What a failed test says of the machine, in one line."""
        total, longest = self.starved(begin, end)
        return (
            f"the machine starved this test for {total:.1f} s of {end - begin:.1f} s "
            f"(longest {longest:.1f} s); load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )

    def stop(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join(10)
