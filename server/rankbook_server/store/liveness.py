"""Which leases live, kept in memory: the liveness of the embedded stores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

__all__ = ["LivenessTable"]

_MIN_SWEEP = 1024
# Below this many leases the dead ones are not worth looking for.


class LivenessTable:
    """Leases and when each ends. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Starts empty.

        Args:
            clock: Seconds on a clock that never goes back.
        """
        self._clock = clock
        self._ends: dict[str, float] = {}
        self._sweep_at = _MIN_SWEEP

    def touch(self, leases: Mapping[str, float]) -> frozenset[str]:
        """See `Liveness.touch`."""
        for lease_id, ttl_s in leases.items():
            if not 0 < ttl_s < math.inf:
                raise ValueError(f"lease {lease_id} cannot live for {ttl_s} s")
        now = self._clock()
        made = frozenset(name for name in leases if self._ends.get(name, now) <= now)
        for lease_id, ttl_s in leases.items():
            self._ends[lease_id] = now + ttl_s
        # Nobody need ever ask which ones live, so the dead go here too. At
        # twice what was left last time, each touch pays for at most one look.
        if len(self._ends) > self._sweep_at:
            self._sweep(now)
        return made

    def drop(self, lease_ids: Iterable[str]) -> None:
        """See `Liveness.drop`."""
        for lease_id in lease_ids:
            self._ends.pop(lease_id, None)

    def live(self) -> dict[str, float]:
        """See `Liveness.live`."""
        now = self._clock()
        self._sweep(now)
        return {lease_id: end - now for lease_id, end in self._ends.items()}

    def any_live(self, lease_ids: Iterable[str]) -> bool:
        """Whether one of these lives."""
        now = self._clock()
        return any(self._ends.get(lease_id, now) > now for lease_id in lease_ids)

    def clear(self) -> None:
        """Forgets every lease."""
        self._ends.clear()

    def __len__(self) -> int:
        """How many leases are held, those that ended and were not yet looked at too."""
        return len(self._ends)

    def _sweep(self, now: float) -> None:
        self._ends = {lease_id: end for lease_id, end in self._ends.items() if end > now}
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self._ends))
