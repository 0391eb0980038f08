"""Made-up topologies for the command line's tests."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence

import pytest

from rankbook.model import (
    Address,
    Engine,
    Handshake,
    Layers,
    Layout,
    Problem,
    Process,
    Role,
    Slot,
    Stage,
    State,
    Topology,
    WorkerRecord,
    WorkerStatus,
)

NOW = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)


def build(
    split: Sequence[int],
    tp_size: int,
    state: State = State.READY,
    *,
    engine_id: str = "prefill-a-0",
    gone: Sequence[Slot] = (),
    asleep: Sequence[Slot] = (),
    odd: Sequence[Slot] = (),
    pcp_size: int = 1,
    problems: Sequence[Problem] = (),
    ranks_per_host: int = 8,
    hosts: str = "node",
    addresses: Sequence[Address] = (),
    **engine: object,
) -> Topology:
    """An engine whose stages hold `split` layers, with some slots gone, asleep or odd."""
    layout = Layout(len(split), tp_size, sum(split), pcp_size)
    starts = [sum(split[:stage]) for stage in range(len(split))]
    workers = []
    number = 0
    for stage, count in enumerate(split):
        for pcp_rank in range(pcp_size):
            for tp_rank in range(tp_size):
                slot = Slot(stage, pcp_rank, tp_rank)
                host = f"{hosts}-{number // ranks_per_host}"
                number += 1
                if slot in gone:
                    continue
                start = starts[stage] + (1 if slot in odd else 0)
                workers.append(
                    WorkerRecord(
                        group="prefill-a",
                        engine_id=engine_id,
                        generation="01JD0",
                        role=Role.PRODUCER,
                        layout=layout,
                        slot=slot,
                        layers=Layers(start, starts[stage] + count),
                        handshake=Handshake("vllm.nixl", 14, b"secret"),
                        process=Process(f"boot-{number}", hostname=host, pid=4711),
                        addresses=tuple(addresses),
                    )
                )
    whole = Engine(
        namespace="default",
        engine_id=engine_id,
        group="prefill-a",
        replica="prefill-a-0",
        dp_rank=0,
        role=Role.PRODUCER,
        state=state,
        generation="01JD0",
        epoch=3,
        revision=17,
        start_revision=9,
        layout=layout,
        present=len(workers),
        declared=len(split) * pcp_size * tp_size,
        missing=tuple(gone),
        stages=tuple(
            Stage(stage, starts[stage], starts[stage] + count)
            for stage, count in enumerate(split)
            if any(worker.slot.pp_rank == stage for worker in workers)
        ),
        problems=tuple(problems),
        asleep=tuple(asleep),
        start_time=NOW - dt.timedelta(minutes=3),
        change_time=NOW - dt.timedelta(seconds=12),
        **engine,  # type: ignore[arg-type]
    )
    statuses = tuple(
        WorkerStatus(b"\xab" * 32, 17, f"lease-{number}", worker.slot in asleep)
        for number, worker in enumerate(workers)
    )
    return Topology(whole, tuple(workers), statuses, "book-1", 20)


@pytest.fixture
def now() -> dt.datetime:
    return NOW


@pytest.fixture
def make_topology() -> Callable[..., Topology]:
    return build
