"""Who plays in a run: engines, publishers and watchers, and what each one is.

Everything follows from the numbers, so every process knows it without being
told.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rankbook import v1

__all__ = ["EnginePlan", "PublisherPlan", "Scale", "engines", "marker", "publishers", "record"]

_SHAPES: tuple[tuple[int, int, tuple[tuple[int, ...], ...]], ...] = (
    # pp_size, tp_size, and the slots of each holder by number.
    (2, 2, ((0,), (1,), (2,), (3,))),
    (1, 4, ((0, 1), (2,), (3,))),
    (2, 1, ((0,), (1,))),
    (1, 2, ((0, 1),)),
)
_TTLS_S = (2.0, 3.0, 3.0, 4.0)
NUM_LAYERS = 8


@dataclass(frozen=True, slots=True)
class Scale:
    """How many of each there are."""

    servers: int = 3
    etcd_nodes: int = 3
    publishers: int = 40
    publisher_processes: int = 4
    watchers: int = 20
    watcher_processes: int = 3


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """An engine and who holds it."""

    engine_id: str
    group: str
    pp_size: int
    tp_size: int
    holders: tuple[int, ...]
    """Numbers of its publishers; the first is rank 0 and the engine's core."""

    def slot(self, number: int) -> tuple[int, int]:
        """Stage and TP rank of a slot by number."""
        return divmod(number, self.tp_size)


@dataclass(frozen=True, slots=True)
class PublisherPlan:
    """A publisher: what it holds, and how long its lease lives."""

    number: int
    process: int
    engine: EnginePlan
    slots: tuple[tuple[int, int], ...]
    ttl_s: float

    @property
    def leads(self) -> bool:
        """Whether it makes the starts of its engine, and is its core."""
        return self.engine.holders[0] == self.number


def engines(scale: Scale) -> list[EnginePlan]:
    """The engines that it takes to give every publisher something to hold."""
    found: list[EnginePlan] = []
    first = 0
    while first < scale.publishers:
        pp_size, tp_size, parts = _SHAPES[len(found) % len(_SHAPES)]
        count = min(len(parts), scale.publishers - first)
        if count < len(parts):
            pp_size, tp_size = 1, count
        number = len(found)
        found.append(
            EnginePlan(
                f"engine-{number}",
                f"group-{number % 3}",
                pp_size,
                tp_size,
                tuple(range(first, first + count)),
            )
        )
        first += count
    return found


def publishers(scale: Scale) -> list[PublisherPlan]:
    """Every publisher, by number. The holders of an engine are in different processes."""
    found: list[PublisherPlan] = []
    for index, engine in enumerate(engines(scale)):
        _, _, parts = _SHAPES[index % len(_SHAPES)]
        if len(engine.holders) < len(parts):
            parts = tuple((n,) for n in range(len(engine.holders)))
        for number, part in zip(engine.holders, parts, strict=True):
            found.append(
                PublisherPlan(
                    number,
                    number % scale.publisher_processes,
                    engine,
                    tuple(engine.slot(n) for n in part),
                    random.Random(number).choice(_TTLS_S),
                )
            )
    return found


def marker(boot_id: str, sequence: int, engine_id: str, generation: str) -> bytes:
    """The payload of a record: who wrote it, and when in the order of its writes."""
    return f"{boot_id}|{sequence}|{engine_id}|{generation}".encode()


def record(
    engine: EnginePlan, slot: tuple[int, int], generation: str, boot_id: str, sequence: int
) -> v1.WorkerRecord:
    """What a publisher publishes in a slot."""
    pp_rank, tp_rank = slot
    share = NUM_LAYERS // engine.pp_size
    return v1.WorkerRecord(
        group=engine.group,
        engine_id=engine.engine_id,
        generation=generation,
        role=v1.ROLE_PRODUCER,
        layout=v1.Layout(pp_size=engine.pp_size, tp_size=engine.tp_size, num_layers=NUM_LAYERS),
        slot=v1.Slot(pp_rank=pp_rank, tp_rank=tp_rank),
        layers=v1.Layers(start_layer=pp_rank * share, end_layer=(pp_rank + 1) * share),
        handshake=v1.Handshake(
            format="chaos", payload=marker(boot_id, sequence, engine.engine_id, generation)
        ),
        process=v1.Process(boot_id=boot_id),
    )
