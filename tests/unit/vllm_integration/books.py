"""Engines as a local copy of the book has them, and a copy that the test writes by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.unit.vllm_integration.facts import facts

from rankbook.errors import DeadlineExceeded
from rankbook.model import (
    Address,
    Compat,
    CoreRecord,
    Engine,
    Layout,
    Process,
    Role,
    Stage,
    State,
    Topology,
    WorkerStatus,
)
from rankbook_vllm.config import Settings
from rankbook_vllm.lookup import Answer, Use, Wait, judge
from rankbook_vllm.record import Start, worker_record

_KV_ROLES = {Role.PRODUCER: "kv_producer", Role.CONSUMER: "kv_consumer", Role.BOTH: "kv_both"}


def engine(
    engine_id: str = "prefill-a-0",
    *,
    role: Role = Role.PRODUCER,
    state: State = State.READY,
    generation: str = "g1",
    epoch: int = 1,
    layout: Layout = Layout(pp_size=1, tp_size=1, num_layers=4),  # noqa: B008
    connector: str = "NixlPushConnector",
    payload: bytes = b"agent",
    compat_hash: str = "c0ffee",
    listens: tuple[str, int] | None = None,
    without: tuple[int, ...] = (),
    **changes: Any,
) -> Topology:
    """An engine with its workers; stages in `without` have none, nor has a GONE engine."""
    per_stage = layout.num_layers // layout.pp_size
    stages = {pp: (pp * per_stage, (pp + 1) * per_stage) for pp in range(layout.pp_size)}
    workers = tuple(
        worker_record(
            dataclasses.replace(
                facts(pp, tp_rank=tp, layout=layout, stage=stages[pp]),
                engine_id=engine_id,
                kv_role=_KV_ROLES[role],
                compat=Compat(compat_hash, {"connector": connector}),
            ),
            Start(generation, epoch),
            Settings(),
            f"boot-{pp}-{tp}",
        )
        for pp in range(layout.pp_size)
        for tp in range(layout.tp_size)
        if pp not in without and state is not State.GONE
    )
    workers = tuple(
        dataclasses.replace(
            worker,
            handshake=dataclasses.replace(
                worker.handshake,
                payload=payload + b" pp%d tp%d" % (worker.slot.pp_rank, worker.slot.tp_rank),
            ),
        )
        for worker in workers
    )
    address = (Address("zmq", *listens, "side-channel"),) if listens else ()
    whole = {
        "namespace": "default",
        "engine_id": engine_id,
        "group": "prefill-a",
        "replica": engine_id,
        "dp_rank": 0,
        "role": role,
        "state": state,
        "generation": generation,
        "epoch": epoch,
        "revision": 7,
        "start_revision": 5,
        "layout": layout,
        "present": len(workers),
        "declared": layout.pp_size * layout.tp_size,
        "missing": (),
        "stages": tuple(
            Stage(pp, *stages[pp])
            for pp in stages
            if any(worker.slot.pp_rank == pp for worker in workers)
        ),
        "core": CoreRecord(process=Process("core"), addresses=address, connector=connector),
        "compat_hashes": (compat_hash,),
    }
    statuses = tuple(WorkerStatus(b"\1" * 32, 6, "lease") for _ in workers)
    return Topology(Engine(**(whole | changes)), workers, statuses)


def consumer(engine_id: str = "decode-a-0", **changes: Any) -> Topology:
    """An engine that takes KV."""
    return engine(engine_id, **({"role": Role.CONSUMER, "payload": b"decode"} | changes))


class Clock:
    """Seconds that go on when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclasses.dataclass
class Waiting:
    """Who asked to be called."""

    engine_id: str
    generation: str
    timeout_s: float
    done: Callable[[Any], None]


class HandBook:
    """A `PeerBook` whose thread is the test: nobody is called before `serve`."""

    def __init__(self, *known: Topology) -> None:
        self.known = {one.engine.engine_id: one for one in known}
        self.current = True
        self.age_s = 0.0
        self.waiting: list[Waiting] = []
        self._on_change: list[Callable[[str, Topology | None], None]] = []

    def get(self, engine_id: str) -> Topology | None:
        return self.known.get(engine_id)

    def engines(self) -> tuple[Topology, ...]:
        return tuple(self.known[name] for name in sorted(self.known))

    def judge(self, engine_id: str, generation: str = "") -> Answer:
        return judge(
            self.known.get(engine_id), engine_id, generation=generation, current=self.current
        )

    def on_change(self, callback: Callable[[str, Topology | None], None]) -> None:
        self._on_change.append(callback)

    def when(
        self, engine_id: str, generation: str, timeout_s: float, done: Callable[[Any], None]
    ) -> None:
        self.waiting.append(Waiting(engine_id, generation, timeout_s, done))

    def put(self, *changed: Topology) -> None:
        """Engines are as given from now on."""
        for one in changed:
            self.known[one.engine.engine_id] = one
            self.tell(one.engine.engine_id)

    def forget(self, engine_id: str) -> None:
        """The engine is no longer in the copy."""
        del self.known[engine_id]
        self.tell(engine_id)

    def tell(self, engine_id: str, topology: Topology | None = None) -> None:
        """Calls back with an engine as it is, or as it was."""
        for callback in self._on_change:
            callback(engine_id, topology or self.known.get(engine_id))

    def serve(self) -> None:
        """Answers whoever can be answered, also those who ask because of it."""
        served = True
        while served:
            served = False
            for one in tuple(self.waiting):
                answer = self.judge(one.engine_id, one.generation)
                if not isinstance(answer, Wait):
                    self.waiting.remove(one)
                    one.done(answer.topology if isinstance(answer, Use) else answer.why)
                    served = True

    def time_out(self, engine_id: str) -> None:
        """The deadline of all who wait for an engine passes."""
        for one in tuple(self.waiting):
            if one.engine_id == engine_id:
                self.waiting.remove(one)
                one.done(DeadlineExceeded(f"waited {one.timeout_s:g} s for {engine_id}"))
