"""How long one commit of one record takes, by store.

Run: `python tests/bench/bench_store_commit.py [FOLDER]`. FOLDER is where the
books are made; by default a temporary one. No test: it prints, it judges nothing.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time

from rankbook_server.core.ops import Put, Txn
from rankbook_server.store.url import open_store

KEYS = 4_096


def at(sorted_s: list[float], share: float) -> float:
    """Returns a percentile in microseconds."""
    return sorted_s[int((len(sorted_s) - 1) * share)] * 1e6


async def measure(url: str, count: int, size: int) -> None:
    """Commits `count` records of `size` bytes, one at a time, and prints the times."""
    store = open_store(url, time.monotonic)
    await store.open()
    taken: list[float] = []
    for number in range(count):
        key = f"default/w/engine-{number * 7919 % KEYS:05}/0.0.0"
        txns = [Txn((Put(key, os.urandom(size)),))]
        start = time.perf_counter()
        await store.commit(txns)
        taken.append(time.perf_counter() - start)
        turned = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(turned.set_result, None)
        await turned
    start = time.perf_counter()
    entries = len((await store.snapshot()).entries)
    snapshot_ms = (time.perf_counter() - start) * 1e3
    await store.close()
    first, later = sorted(taken[:KEYS]), sorted(taken[KEYS:])
    name = url.split(":")[0] + ("?sync=full" if url.endswith("full") else "")
    line = f"{name:18} {size:7} B  new key p50 {at(first, 0.5):7.1f} us"
    if later:
        line += f"  again p50 {at(later, 0.5):6.1f}  p99 {at(later, 0.99):7.1f} us"
    line += f"  longest {max(taken) * 1e3:5.1f} ms"
    sys.stdout.write(f"{line}  snapshot of {entries} {snapshot_ms:.1f} ms\n")


def main() -> None:
    """Measures each store in turn."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        asyncio.run(measure("memory:", 20_000, 1_200))
        asyncio.run(measure(f"sqlite:{folder}/normal.db", 20_000, 1_200))
        asyncio.run(measure(f"sqlite:{folder}/full.db?sync=full", 500, 1_200))
        asyncio.run(measure(f"sqlite:{folder}/large.db", 300, 512 * 1024))


if __name__ == "__main__":
    main()
