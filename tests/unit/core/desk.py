"""A book on a desk: what the server does around the core, without a server.

`Desk` decides, folds and keeps as the registry does, and checks on the way
what must hold for every decision: it is pure, it fits a transaction, and a
refused one changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from google.protobuf.message import Message

from rankbook import v1
from rankbook.convert import duration
from rankbook.errors import RankbookError
from rankbook_server.core.book import Book, BookLimits, Decision, Instant, Note
from rankbook_server.core.ops import MAX_TXN_OPS, Delete, Put

EPOCH_S = 1_700_000_000.0
SPLITS = {
    (1, 61): [(0, 61)],
    (2, 61): [(0, 31), (31, 61)],
    (4, 61): [(0, 15), (15, 30), (30, 46), (46, 61)],
}


class Ids:
    """Names that can be taken again, to decide the same thing twice."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> str:
        self.count += 1
        return f"lease-{self.count}"


class Desk:
    """One namespace's book over a dictionary."""

    def __init__(self, limits: BookLimits | None = None) -> None:
        self.ids = Ids()
        self.limits = limits or BookLimits()
        self.store: dict[str, tuple[bytes, int]] = {}
        self.revision = 0
        self.mono_s = 100.0
        self.notes: list[Note] = []
        self.book = self.new_book()

    def new_book(self) -> Book:
        book = Book("default", new_id=self.ids, limits=self.limits)
        book.clock_s = self.mono_s
        return book

    @property
    def now(self) -> Instant:
        return Instant(self.mono_s, EPOCH_S + self.mono_s)

    def call(self, name: str, request: Message) -> Any:
        """Decides, commits and answers; checks that the decision is pure."""
        before, sent, ids = (
            self.kept(),
            request.SerializeToString(deterministic=True),
            (self.ids.count),
        )
        decide = getattr(self.book, name)
        try:
            decision = decide(request, self.now)
        except RankbookError:
            assert self.kept() == before, "a refused call changed the book"
            raise
        finally:
            assert request.SerializeToString(deterministic=True) == sent, "the request was changed"
        assert self.kept() == before, "deciding changed the book"
        self.ids.count = ids
        again = decide(request, self.now)
        assert again.txn == decision.txn, "deciding twice gave two answers"
        return self.commit(again)

    def quick(self, name: str, request: Message) -> Any:
        """As `call`, without the checks that cost the size of the book."""
        return self.commit(getattr(self.book, name)(request, self.now))

    def commit(self, decision: Decision[Any]) -> Any:
        if decision.txn is None:
            return decision.reply(self.revision)
        assert 0 < len(decision.txn.ops) <= MAX_TXN_OPS
        self.revision += 1
        for op in decision.txn.ops:
            self.book.apply(op, self.revision)
            if isinstance(op, Put):
                self.store[op.key] = (op.value, self.revision)
            else:
                assert isinstance(op, Delete)
                self.store.pop(op.key, None)
        self.notes.extend(decision.notes)
        return decision.reply(self.revision)

    def expire(self) -> int:
        """Ends what ran out; returns in how many transactions."""
        return self._until_none(self.book.expire)

    def sweep(self) -> int:
        """Forgets what may be forgotten; returns in how many transactions."""
        return self._until_none(self.book.sweep)

    def _until_none(self, step: Callable[[Instant], Decision[None] | None]) -> int:
        count = 0
        while True:
            first, again = step(self.now), step(self.now)
            assert (first and first.txn) == (again and again.txn)
            if again is None:
                return count
            count += 1
            self.commit(again)

    def renew(self, *lease_ids: str, ttl_s: float = 0.0) -> tuple[v1.LeaseStatus, ...]:
        leases = [
            v1.LeaseRenewal(lease_id=name, ttl=duration(ttl_s) if ttl_s else None)
            for name in lease_ids
        ]
        return self.book.renew(v1.RenewLeasesRequest(leases=leases), self.now)

    def rebuilt(self, seed: int | None = None) -> Book:
        """A book read anew from what was kept, in any order."""
        keys = sorted(self.store)
        if seed is not None:
            random.Random(seed).shuffle(keys)
        book = self.new_book()
        for key in keys:
            value, revision = self.store[key]
            book.apply(Put(key, value), revision)
        book.link_leases()
        book.grant_grace(self.now)
        return book

    def restart(self, seed: int | None = None) -> None:
        self.book = self.rebuilt(seed)

    def kept(self, book: Book | None = None) -> dict[str, Any]:
        """Everything a book holds that outlives the process."""
        book = book or self.book
        engines = {
            name: (
                engine.head.SerializeToString(deterministic=True),
                engine.head_revision,
                engine.revision,
                {
                    slot: (state.stored.SerializeToString(deterministic=True), state.write_revision)
                    for slot, state in engine.slots.items()
                },
            )
            for name, engine in book.engines.items()
        }
        leases = {
            name: (entry.stored.SerializeToString(deterministic=True), sorted(entry.holds))
            for name, entry in book.leases.items()
        }
        return {
            "engines": engines,
            "leases": leases,
            "facts": book.facts.SerializeToString(deterministic=True),
        }

    # ------------------------------------------------------------ short hands

    def state(self, engine_id: str = "e_dp0") -> str:
        return v1.State.Name(self.book.state(engine_id)).removeprefix("STATE_")

    def engine(self, engine_id: str = "e_dp0") -> v1.Engine:
        engine = self.book.engine(engine_id)
        assert engine is not None
        return engine

    def problems(self, engine_id: str = "e_dp0") -> list[str]:
        return [problem.reason for problem in self.engine(engine_id).problems]

    def register(
        self, *records: v1.WorkerRecord, sequence: int = 1, **lease: Any
    ) -> v1.RegisterWorkersResponse:
        reply = self.call("register", registration(*records, sequence=sequence, **lease))
        assert isinstance(reply, v1.RegisterWorkersResponse)
        return reply

    def fill(self, engine_id: str = "e_dp0", **kind: Any) -> dict[str, v1.RegisterWorkersResponse]:
        """Registers every rank of an engine, each its own process; replies by boot_id."""
        return {record.process.boot_id: self.register(record) for record in grid(engine_id, **kind)}

    def seal(self, engine_id: str = "e_dp0", **kind: Any) -> v1.SealEngineResponse:
        reply = self.call("seal", self.seal_request(engine_id, **kind))
        assert isinstance(reply, v1.SealEngineResponse)
        return reply

    def seal_request(
        self,
        engine_id: str = "e_dp0",
        *,
        core: str = "core",
        sequence: int = 1,
        own_lease: bool = True,
        address: str = "",
    ) -> v1.SealEngineRequest:
        """A seal of what the book has."""
        engine = self.book.engines[engine_id]
        lease = v1.LeaseRequest(lease_key=f"{core}-{sequence}") if own_lease else None
        return v1.SealEngineRequest(
            engine_id=engine_id,
            generation=engine.head.generation,
            slots=[
                v1.SealedSlot(
                    slot=view.record.slot,
                    boot_id=view.record.process.boot_id,
                    record_digest=view.status.record_digest,
                )
                for view in self.book.workers(engine_id)
            ],
            core=v1.CoreRecord(
                process=v1.Process(boot_id=core),
                addresses=[v1.Address(host=address)] if address else [],
            ),
            lease=lease,
            sequence=sequence,
        )

    def ready(self, engine_id: str = "e_dp0", **kind: Any) -> dict[str, v1.RegisterWorkersResponse]:
        """A sealed engine; the workers' replies by boot_id."""
        replies = self.fill(engine_id, **kind)
        self.seal(engine_id, core=f"core-of-{engine_id}")
        assert self.state(engine_id) == "READY"
        return replies


def record(
    pp: int = 0,
    tp: int = 0,
    *,
    engine_id: str = "e_dp0",
    generation: str = "g1",
    group: str = "prefill",
    boot_id: str = "",
    pp_size: int = 2,
    tp_size: int = 2,
    num_layers: int = 61,
    layers: tuple[int, int] | None = None,
    payload: bytes = b"payload",
    host: str = "",
    port: int = 0,
    dp_rank: int = 0,
    replica: str = "",
) -> v1.WorkerRecord:
    """A whole record of one rank."""
    start, end = layers or SPLITS[pp_size, num_layers][pp]
    return v1.WorkerRecord(
        namespace="default",
        group=group,
        replica=replica or engine_id.partition("_dp")[0],
        engine_id=engine_id,
        generation=generation,
        dp_rank=dp_rank,
        role=v1.ROLE_PRODUCER,
        layout=v1.Layout(
            pp_size=pp_size, tp_size=tp_size, pcp_size=1, dcp_size=1, num_layers=num_layers
        ),
        slot=v1.Slot(pp_rank=pp, tp_rank=tp),
        layers=v1.Layers(start_layer=start, end_layer=end),
        handshake=v1.Handshake(format="test", payload=payload),
        process=v1.Process(boot_id=boot_id or f"{engine_id}.{generation}.{pp}.{tp}"),
        addresses=[v1.Address(scheme="zmq", host=host, port=port)] if host else [],
    )


def grid(engine_id: str = "e_dp0", **kind: Any) -> list[v1.WorkerRecord]:
    """A record of every rank of an engine."""
    pp_size, tp_size = kind.get("pp_size", 2), kind.get("tp_size", 2)
    return [
        record(pp, tp, engine_id=engine_id, **kind)
        for pp in range(pp_size)
        for tp in range(tp_size)
    ]


def registration(
    *records: v1.WorkerRecord,
    sequence: int = 1,
    key: str = "",
    lease_id: str = "",
    ttl_s: float = 10.0,
    epoch: int = 0,
) -> v1.RegisterWorkersRequest:
    """A request that registers records under the lease of the first one's process."""
    wish = v1.LeaseRequest(ttl=duration(ttl_s))
    if lease_id:
        wish.lease_id = lease_id
    else:
        wish.lease_key = key or records[0].process.boot_id
    return v1.RegisterWorkersRequest(records=records, sequence=sequence, epoch=epoch, lease=wish)


def slots_of(views: Iterable[Any]) -> Sequence[tuple[int, int, int]]:
    """Slots of workers, as they come."""
    return [view.slot for view in views]
