"""Shifts the wall clock of a Python process; loaded by its start.

CHAOS_CLOCK names a file of eight bytes: by how many seconds, as a double in the
machine's order. It is read at every look at the clock, so that the clock jumps
while the process runs. The monotonic clock is left alone: it does not jump in
real life either.
"""

import mmap
import os
import struct
import time

_FILE = os.environ.get("CHAOS_CLOCK")


def _shift(path: str) -> None:
    with open(path, "rb") as file:
        shared = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    real, real_ns = time.time, time.time_ns

    def offset_s() -> float:
        (seconds,) = struct.unpack_from("=d", shared)
        return float(seconds)

    time.time = lambda: real() + offset_s()
    time.time_ns = lambda: real_ns() + int(offset_s() * 1e9)


if _FILE:
    _shift(_FILE)
