"""A registry in this process, with time and a store in the test's hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from rankbook import v1
from rankbook_server.core.book import Book
from rankbook_server.core.decision import Instant
from rankbook_server.core.fold import BookLimits
from rankbook_server.registry import Registry, RegistryLimits
from rankbook_server.rpc.status import boundary
from rankbook_server.store import MemoryStore


class FakeClock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.ids = 0

    def mono(self) -> float:
        return self.seconds

    def unix(self) -> float:
        return 1_700_000_000.0 + self.seconds

    def now(self) -> Instant:
        return Instant(self.mono(), self.unix())

    def new_id(self) -> str:
        self.ids += 1
        return f"id-{self.ids}"


def registration(
    engine_id: str = "e", *, tp: int = 0, tp_size: int = 2, generation: str = "g", **fields: Any
) -> v1.RegisterWorkersRequest:
    boot_id = f"{engine_id}.{generation}.{tp}"
    record = v1.WorkerRecord(
        group="a",
        engine_id=engine_id,
        generation=generation,
        role=v1.ROLE_PRODUCER,
        layout=v1.Layout(pp_size=1, tp_size=tp_size, num_layers=2),
        slot=v1.Slot(tp_rank=tp),
        layers=v1.Layers(end_layer=2),
        handshake=v1.Handshake(format="test", payload=b"payload"),
        process=v1.Process(boot_id=boot_id),
    )
    values: dict[str, Any] = {"records": [record], "sequence": 1, **fields}
    values.setdefault("lease", v1.LeaseRequest(lease_key=boot_id))
    return v1.RegisterWorkersRequest(**values)


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, frozenset[str], int]] = []

    def changed(self, namespace: str, engine_ids: Any, since: int) -> None:
        self.changes.append((namespace, frozenset(engine_ids), since))


class Bench:
    """A registry and what it stands on."""

    def __init__(self, **limits: Any) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock.mono, self.clock.new_id)
        values: dict[str, Any] = {"book": BookLimits(), "tick_s": 0.001, **limits}
        self.registry = Registry(
            self.store,
            self.clock,
            RegistryLimits(**values),
            contain=lambda call: boundary(call, self.clock.new_id),
        )

    def register(
        self, engine_id: str = "e", namespace: str = "n", **fields: Any
    ) -> asyncio.Future[Any]:
        """Queues a registration at once."""
        request = registration(engine_id, **fields)
        return self.registry.submit(
            "register", namespace, lambda book, now: Book.register(book, request, now)
        )

    async def pass_time(self, seconds: float) -> None:
        """Lets time pass, and the registry's timer see that it did."""
        self.clock.seconds += seconds
        await until(lambda: self.registry._last_tick_s == self.clock.seconds)
        # What the timer queued is decided in the turns that follow.
        for _ in range(3):
            await asyncio.sleep(0)


async def until(holds: Callable[[], bool]) -> None:
    """Lets the loop turn until something holds; the test's own time limit ends it."""
    while not holds():  # noqa: ASYNC110 - what is waited for has no event of its own
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def running(**limits: Any) -> AsyncIterator[Bench]:
    """A registry that runs."""
    bench = Bench(**limits)
    await bench.registry.open()
    bench.registry.start()
    try:
        yield bench
    finally:
        await bench.registry.close()
