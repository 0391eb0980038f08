"""What the tests against a real server are made of."""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.etcd_server import EtcdNode

import rankbook
from rankbook import convert, v1
from rankbook.model import (
    CoreRecord,
    Handshake,
    Layers,
    Layout,
    Process,
    Role,
    SealedSlot,
    Slot,
    Topology,
    WorkerRecord,
)

_numbers = itertools.count(1)


def make_record(
    engine_id: str,
    pp_rank: int = 0,
    tp_rank: int = 0,
    *,
    generation: str = "g1",
    pp_size: int = 1,
    tp_size: int = 1,
    num_layers: int = 8,
    boot_id: str | None = None,
    payload: bytes = b"agent",
) -> WorkerRecord:
    """A record in a grid whose layers are split evenly over the stages."""
    per_stage = num_layers // pp_size
    return WorkerRecord(
        group="prefill-a",
        engine_id=engine_id,
        generation=generation,
        role=Role.PRODUCER,
        layout=Layout(pp_size=pp_size, tp_size=tp_size, num_layers=num_layers),
        slot=Slot(pp_rank, 0, tp_rank),
        layers=Layers(pp_rank * per_stage, (pp_rank + 1) * per_stage),
        handshake=Handshake("test", 1, payload),
        process=Process(boot_id if boot_id is not None else f"{engine_id}-{pp_rank}-{tp_rank}"),
    )


def make_grid(
    engine_id: str, *, pp_size: int = 2, tp_size: int = 2, generation: str = "g1"
) -> list[WorkerRecord]:
    """Every record of an engine."""
    return [
        make_record(engine_id, pp, tp, pp_size=pp_size, tp_size=tp_size, generation=generation)
        for pp in range(pp_size)
        for tp in range(tp_size)
    ]


def seal_slots(topology: Topology) -> list[SealedSlot]:
    """What an engine core that saw the whole topology seals."""
    return [
        SealedSlot(worker.slot, worker.process.boot_id, status.record_digest)
        for worker, status in zip(topology.workers, topology.statuses, strict=True)
    ]


def make_core(boot_id: str) -> CoreRecord:
    """An engine core's own record."""
    return CoreRecord(process=Process(boot_id), connector="TestConnector")


def eventually(claim: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Waits for another process to make a claim true; returns the seconds it took."""
    started = time.monotonic()
    pause = threading.Event()
    while not claim():
        if time.monotonic() - started > timeout_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        pause.wait(0.01)
    return time.monotonic() - started


def is_running(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="session", params=["rankbookd", "etcd"])
def book(request: pytest.FixtureRequest) -> str:
    """What a client is given: a server, or etcd itself, where its own server is
    over etcd."""
    if request.param == "rankbookd":
        address: str = request.getfixturevalue("shared_rankbookd").grpc
        return address
    node: EtcdNode = request.getfixturevalue("etcd_node")
    return node.url("direct")


@pytest.fixture(scope="session", params=["memory", "etcd"])
def either_rankbookd(request: pytest.FixtureRequest) -> Any:
    """The shared server, over either kind of store."""
    name = "shared_rankbookd" if request.param == "memory" else "etcd_rankbookd"
    return request.getfixturevalue(name)


@pytest.fixture(params=["sqlite", "etcd"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a store of the test's own that outlives its server."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path}/book.db"
    node: EtcdNode = request.getfixturevalue("etcd_node")
    return node.url(f"own-{os.getpid()}-{next(_numbers)}")


@pytest.fixture
def engine_id() -> str:
    """An engine name that no other test uses."""
    return f"engine-{os.getpid()}-{next(_numbers)}"


class Program:
    """A Python program in a process of its own that speaks line by line."""

    def __init__(self, text: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", text, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def line(self) -> str:
        """The next line it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the program ended with {self.process.wait(10)}"
        return line.strip()

    def say(self, line: str = "") -> None:
        """Gives it a line to read."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Ends it with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends it and lets go of its pipes."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    """Starts programs: `program(text, *arguments)`; they are ended with the test."""
    started: list[Program] = []

    def start(text: str, *arguments: str) -> Program:
        started.append(Program(text, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


WORKER = """
import base64, sys, threading
import rankbook
from rankbook import v1
address, mode = sys.argv[1:3]
records = [v1.WorkerRecord.FromString(base64.b64decode(text)) for text in sys.argv[3:]]
changes = []
registration = rankbook.Registration(
    records, endpoints=address, ttl_s=2.0, mode=mode, on_change=changes.append
)
registration.start()
registration.wait_registered(20)
print(registration.heartbeat_pid, flush=True)
"""


@pytest.fixture
def worker(program: Callable[..., Program]) -> Callable[..., Program]:
    """Starts a worker as a process of its own, signed in when this returns.

    `worker(address, *records, mode="process", then="...")`: the TTL is 2 s;
    `then` is what the program goes on with, by default to stay until a line comes.
    """

    def start(
        address: str,
        *records: WorkerRecord,
        mode: str = "process",
        then: str = "sys.stdin.readline()\n",
    ) -> Program:
        sent = [convert.to_message(record, v1.WorkerRecord) for record in records]
        texts = [base64.b64encode(one.SerializeToString()).decode() for one in sent]
        one = program(WORKER + then, address, mode, *texts)
        one.line()
        return one

    return start


@pytest.fixture
def registration() -> Iterator[Callable[..., rankbook.Registration]]:
    """Makes registrations with a TTL of 2 s that end with the test."""
    made_ones: list[rankbook.Registration] = []

    def make(*args: Any, **options: Any) -> rankbook.Registration:
        made_ones.append(rankbook.Registration(*args, **{"ttl_s": 2.0, **options}))
        return made_ones[-1]

    yield make
    for one in made_ones:
        one.stop()


@pytest.fixture
def made() -> type:
    """The makers above, for tests that cannot import this file."""

    class Made:
        record = staticmethod(make_record)
        grid = staticmethod(make_grid)
        core = staticmethod(make_core)
        seal_slots = staticmethod(seal_slots)
        eventually = staticmethod(eventually)
        is_running = staticmethod(is_running)

    return Made
