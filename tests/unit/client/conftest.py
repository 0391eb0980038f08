"""Records and messages that the client's tests are made of."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from rankbook import v1
from rankbook.model import Handshake, Layers, Layout, Process, Role, Slot, WorkerRecord


def record(
    pp_rank: int = 0,
    tp_rank: int = 0,
    *,
    engine_id: str = "prefill-a-0",
    generation: str = "g1",
    pp_size: int = 2,
    tp_size: int = 2,
    num_layers: int = 8,
    boot_id: str | None = None,
    payload: bytes = b"agent",
    group: str = "prefill-a",
) -> WorkerRecord:
    """A record in a grid whose layers are split evenly over the stages."""
    per_stage = num_layers // pp_size
    return WorkerRecord(
        group=group,
        engine_id=engine_id,
        generation=generation,
        role=Role.PRODUCER,
        layout=Layout(pp_size=pp_size, tp_size=tp_size, num_layers=num_layers),
        slot=Slot(pp_rank, 0, tp_rank),
        layers=Layers(pp_rank * per_stage, (pp_rank + 1) * per_stage),
        handshake=Handshake("test", 1, payload),
        process=Process(boot_id if boot_id is not None else f"boot-{pp_rank}-{tp_rank}"),
    )


def grid(*, pp_size: int = 2, tp_size: int = 2, **also: object) -> list[WorkerRecord]:
    """Every record of an engine."""
    return [
        record(pp, tp, pp_size=pp_size, tp_size=tp_size, **also)  # type: ignore[arg-type]
        for pp in range(pp_size)
        for tp in range(tp_size)
    ]


def engine(
    name: str = "prefill-a-0",
    *,
    revision: int = 1,
    generation: str = "g1",
    epoch: int = 1,
    present: int = 0,
    state: v1.State = v1.STATE_FORMING,
) -> v1.Engine:
    """An engine's head."""
    return v1.Engine(
        namespace="default",
        engine_id=name,
        group="prefill-a",
        replica=name,
        role=v1.ROLE_PRODUCER,
        state=state,
        generation=generation,
        epoch=epoch,
        revision=revision,
        start_revision=1,
        layout=v1.Layout(pp_size=2, tp_size=2, num_layers=8, pcp_size=1, dcp_size=1),
        present=present,
        declared=4,
    )


def worker(name: str, tp_rank: int, payload: bytes, generation: str = "g1") -> v1.WorkerRecord:
    """A worker's record as a watch carries it."""
    return v1.WorkerRecord(
        group="prefill-a",
        engine_id=name,
        generation=generation,
        role=v1.ROLE_PRODUCER,
        layout=v1.Layout(pp_size=1, tp_size=4, num_layers=8),
        slot=v1.Slot(tp_rank=tp_rank),
        layers=v1.Layers(end_layer=8),
        handshake=v1.Handshake(format="test", payload=payload),
        process=v1.Process(boot_id=f"boot-{tp_rank}"),
    )


def statuses(revisions: Iterable[int]) -> list[v1.WorkerStatus]:
    """Statuses of workers that changed at these revisions."""
    return [v1.WorkerStatus(revision=revision, lease_id="l") for revision in revisions]


@pytest.fixture
def made() -> SimpleNamespace:
    """The makers above, for tests that cannot import this file."""
    return SimpleNamespace(
        record=record, grid=grid, engine=engine, worker=worker, statuses=statuses
    )
