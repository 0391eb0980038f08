"""What rankbook costs over etcd: ratios against etcd itself, in one interleaved run.

Run: `python tests/bench/bench_etcd.py [REPETITIONS]` (by default 7). It starts an
etcd and a rankbookd of its own. Each repetition measures every line once; ratios
are taken within a repetition, and their median is printed. No test: it judges
nothing.

    put         a bare put of 1 KiB on an etcd lease (the control)
    register    one 1 KiB record of an engine of its own, over the session stream
    slot        one 1 KiB record into an engine that is there, likewise
    burst       64 such registrations at once, per registration
    range       etcd's own range over the keys of a 64-worker engine (the control)
    query       rankbook's topology of that engine, a unary call
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.contract.etcd_server import EtcdNode

import rankbook
from rankbook import v1
from rankbook.model import Handshake, Layers, Layout, Process, Role, Slot, WorkerRecord
from rankbook.v1 import registry_pb2_grpc
from rankbook_server.etcd import etcd_pb2 as pb
from rankbook_server.etcd.client import EtcdClient

COUNT = 150
numbers = itertools.count(1)


def record(engine_id: str, tp_rank: int = 0, tp_size: int = 1) -> WorkerRecord:
    """A record with 1 KiB of payload."""
    return WorkerRecord(
        group=f"g-{engine_id}",
        engine_id=engine_id,
        generation="g1",
        role=Role.PRODUCER,
        layout=Layout(pp_size=1, tp_size=tp_size, num_layers=61),
        slot=Slot(0, 0, tp_rank),
        layers=Layers(0, 61),
        handshake=Handshake("bench", 1, os.urandom(1024)),
        process=Process(f"{engine_id}-{tp_rank}"),
    )


async def p50(call: Callable[[], Awaitable[object]], count: int = COUNT) -> float:
    """The median time of a call, in microseconds."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        taken.append((time.perf_counter() - began) * 1e6)
    return statistics.median(taken)


async def measure(
    etcd: EtcdClient, client: rankbook.AsyncClient, stub: Any, folder: str
) -> dict[str, float]:
    """One repetition."""
    lease = next(numbers)
    await etcd.grant(lease, 3600)

    async def put() -> None:
        key = f"bench/{next(numbers)}".encode()
        op = pb.RequestOp(put=pb.PutRequest(key=key, value=os.urandom(1100), lease=lease))
        await etcd.txn(pb.TxnRequest(success=[op]))

    async def register() -> None:
        one = record(f"e{next(numbers)}")
        await client.register_workers([one], lease_key=one.process.boot_id, sequence=1, ttl_s=300)

    grid = f"grid{next(numbers)}"
    slots = itertools.count()

    async def slot() -> None:
        one = record(grid, next(slots), 4 * COUNT)
        await client.register_workers([one], lease_key=one.process.boot_id, sequence=1, ttl_s=300)

    whole = f"whole{next(numbers)}"
    for first in range(0, 64, 32):
        part = [record(whole, tp, 64) for tp in range(first, first + 32)]
        await client.register_workers(part, lease_key=whole, sequence=1 + first, ttl_s=300)

    async def range_() -> None:
        key = f"{folder}/book/default/w/{whole}/".encode()
        await etcd.range(pb.RangeRequest(key=key, range_end=key[:-1] + b"0"))

    asked = v1.GetTopologyRequest(engine_id=whole, require=v1.REQUIREMENT_ANY)

    async def query() -> None:
        await stub.GetTopology(asked)

    found = {"put": await p50(put), "register": await p50(register), "slot": await p50(slot)}
    began = time.perf_counter()
    for _ in range(4):
        await asyncio.gather(*(register() for _ in range(64)))
    found["burst"] = (time.perf_counter() - began) * 1e6 / 256
    found["range"] = await p50(range_)
    found["query"] = await p50(query)
    return found


async def run(repetitions: int, node: EtcdNode, address: str) -> None:
    """Measures and prints."""
    etcd = EtcdClient(node.endpoints, clock=time.monotonic)
    rows = []
    async with (
        rankbook.AsyncClient(address) as client,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = registry_pb2_grpc.RegistryStub(channel)
        await measure(etcd, client, stub, "bench")
        for _ in range(repetitions):
            rows.append(await measure(etcd, client, stub, "bench"))
    await etcd.close()
    for name in rows[0]:
        values = sorted(row[name] for row in rows)
        control = "range" if name in ("range", "query") else "put"
        ratio = statistics.median(row[name] / row[control] for row in rows)
        middle = statistics.median(values)
        sys.stdout.write(
            f"{name:9} {middle:8.0f} us ({values[0]:.0f} to {values[-1]:.0f})  "
            f"{ratio:5.2f} x {control}\n"
        )


def main() -> None:
    """Starts what is measured."""
    with EtcdNode() as node, tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        command = [sys.executable, "-m", "rankbook_server.app", "--store", node.url("bench")]
        command += ["--listen", "127.0.0.1:0", "--http", "off", "--log-level", "error"]
        server = subprocess.Popen([*command, "--ready-file", str(ready)])
        try:
            while not ready.exists():
                time.sleep(0.05)
            address = json.loads(ready.read_text())["grpc"]
            asyncio.run(run(int(sys.argv[1]) if len(sys.argv) > 1 else 7, node, address))
        finally:
            server.terminate()
            server.wait()


main()
