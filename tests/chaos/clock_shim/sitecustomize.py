"""Shifts the wall clock that rankbook reads in a Python process; loaded by its start.

CHAOS_CLOCK names a file of eight bytes: by how many seconds, as a double in the
machine's order. It is read at every look at the clock, so that the clock jumps
while the process runs.

The monotonic clock is left alone: it does not jump in real life either. So are
other modules: gRPC's Python part makes deadlines of the wall clock that its C
part compares with the real one, and a clock that only one of them sees jump is
no fault that there is.
"""

import mmap
import os
import struct
import sys
import time

_FILE = os.environ.get("CHAOS_CLOCK")


def _shift(path: str) -> None:
    with open(path, "rb") as file:
        shared = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    real, real_ns = time.time, time.time_ns

    def offset_s() -> float:
        if not sys._getframe(2).f_globals.get("__name__", "").startswith("rankbook"):
            return 0.0
        (seconds,) = struct.unpack_from("=d", shared)
        return float(seconds)

    def shifted() -> float:
        return real() + offset_s()

    def shifted_ns() -> int:
        return real_ns() + int(offset_s() * 1e9)

    time.time, time.time_ns = shifted, shifted_ns


if _FILE:
    _shift(_FILE)
