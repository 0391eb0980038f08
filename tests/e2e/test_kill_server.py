"""What a write acknowledged survives kill -9 of the server, at any moment, every time.

Each round starts a server on the same book, loads it from several threads, and
kills it at a random moment. What was acknowledged before is then looked for in
what the next server shows.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from rankbook import v1
from rankbook.v1 import registry_pb2_grpc

ROUNDS = 200
ENGINES = 6
SLOTS = 4
THREADS = 3


def record(engine_id: str, generation: str, tp: int, content: int) -> v1.WorkerRecord:
    return v1.WorkerRecord(
        group="kill",
        engine_id=engine_id,
        generation=generation,
        role=v1.ROLE_PRODUCER,
        layout=v1.Layout(pp_size=1, tp_size=SLOTS, num_layers=4),
        slot=v1.Slot(tp_rank=tp),
        layers=v1.Layers(end_layer=4),
        handshake=v1.Handshake(
            format="test", payload=b"%s/%s/%d" % (engine_id.encode(), generation.encode(), content)
        ),
        process=v1.Process(boot_id=f"{engine_id}.{generation}"),
    )


@dataclass
class Engine:
    """What one thread knows of an engine that only it writes."""

    engine_id: str
    start: int = 0
    sequence: int = 0
    epoch: int = 0
    acked: dict[int, int] = field(default_factory=dict)
    """Content of each slot, as acknowledged."""
    maybe: dict[int, int] = field(default_factory=dict)
    """Content of slots whose last write got no answer."""
    maybe_start: int = 0
    """A start whose first write got no answer; zero for none."""
    revision: int = 0
    book_revision: int = 0

    @property
    def generation(self) -> str:
        return f"g{self.start}"


class Writer(threading.Thread):
    """Writes to its own engines until the server is gone."""

    def __init__(self, address: str, engines: list[Engine], seed: int) -> None:
        super().__init__()
        self._address = address
        self._engines = engines
        self._rng = random.Random(seed)
        self.writes = 0
        self.fault: BaseException | None = None

    def run(self) -> None:
        try:
            with grpc.insecure_channel(
                self._address, options=(("grpc.use_local_subchannel_pool", 1),)
            ) as channel:
                stub = registry_pb2_grpc.RegistryStub(channel)
                while self._write(stub, self._rng.choice(self._engines)):
                    self.writes += 1
        except BaseException as fault:
            self.fault = fault
            raise

    def _write(self, stub: Any, engine: Engine) -> bool:
        if engine.maybe_start or not engine.start or self._rng.random() < 0.1:
            engine.maybe_start = max(engine.start, engine.maybe_start) + 1
            start, slots, epoch = engine.maybe_start, list(range(self._rng.randint(1, SLOTS))), 0
        else:
            start, epoch = engine.start, engine.epoch
            slots = self._rng.sample(range(SLOTS), self._rng.randint(1, SLOTS))
        engine.sequence += 1
        content = engine.sequence
        if start == engine.start:
            engine.maybe |= dict.fromkeys(slots, content)
        request = v1.RegisterWorkersRequest(
            records=[record(engine.engine_id, f"g{start}", tp, content) for tp in slots],
            lease=v1.LeaseRequest(lease_key=f"{engine.engine_id}.g{start}"),
            sequence=engine.sequence,
            epoch=epoch,
        )
        request.lease.ttl.seconds = 300
        try:
            reply = stub.RegisterWorkers(request, timeout=20)
        except grpc.RpcError as error:
            if _is_typed(error):
                raise
            return False
        assert reply.revision > engine.revision, "a revision went back"
        engine.revision = engine.book_revision = reply.revision
        assert reply.epoch >= engine.epoch
        if start != engine.start:
            assert reply.epoch > engine.epoch, "an epoch was given twice"
            engine.start, engine.epoch, engine.maybe_start = start, reply.epoch, 0
            engine.acked, engine.maybe = {}, {}
        for slot in slots:
            engine.acked[slot] = content
            engine.maybe.pop(slot, None)
        return True


def _is_typed(error: Any) -> bool:
    """Whether the server itself refused; a killed one says nothing."""
    return any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())


def check(stub: Any, engine: Engine) -> None:
    """Nothing acknowledged is lost, nothing is mixed, no revision went back."""
    if not engine.start and not engine.maybe_start:
        return
    try:
        reply = stub.GetTopology(
            v1.GetTopologyRequest(engine_id=engine.engine_id, require=v1.REQUIREMENT_ANY),
            timeout=20,
        )
    except grpc.RpcError as error:
        if not _is_typed(error) or engine.start:
            raise AssertionError(f"{engine.engine_id} was acknowledged and is lost") from error
        engine.maybe_start = 0
        return
    assert reply.book_revision >= engine.book_revision, "the book went back"
    (topology,) = reply.topologies
    found = topology.engine
    assert {w.generation for w in topology.workers} == {found.generation}, "generations are mixed"
    shown = {}
    for worker in topology.workers:
        name, generation, content = worker.handshake.payload.decode().split("/")
        assert (name, generation) == (engine.engine_id, found.generation), "records are mixed"
        shown[worker.slot.tp_rank] = int(content)
    if engine.maybe_start and found.generation == f"g{engine.maybe_start}":
        # The write that got no answer happened, and whole.
        assert found.epoch > engine.epoch
        assert len(set(shown.values())) == 1
        engine.start, engine.epoch, engine.maybe_start = engine.maybe_start, found.epoch, 0
        engine.acked = shown
    else:
        assert (found.generation, found.epoch) == (engine.generation, engine.epoch)
        happened = set()
        for slot in range(SLOTS):
            if shown.get(slot) != engine.acked.get(slot):
                assert shown.get(slot) == engine.maybe.get(slot), (
                    f"slot {slot} of {engine.engine_id} was acknowledged as "
                    f"{engine.acked.get(slot)} and is {shown.get(slot)}"
                )
                happened.add(slot)
        assert happened in (set(), set(engine.maybe)), "half of a write happened"
        engine.acked, engine.maybe_start = shown, 0
    engine.maybe = {}
    assert found.revision >= engine.revision, "an engine went back"
    engine.revision, engine.book_revision = found.revision, reply.book_revision


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_acknowledged_is_lost_over_hundreds_of_kills(
    rankbookd: Any, tmp_path: Path
) -> None:
    rng = random.Random(20251129)
    engines = [Engine(f"engine-{n}") for n in range(ENGINES)]
    server = rankbookd(store=f"sqlite:{tmp_path / 'book.db'}", http="off")
    writes = 0
    for number in range(ROUNDS):
        if number:
            server.start_again()
            with grpc.insecure_channel(server.grpc) as channel:
                stub = registry_pb2_grpc.RegistryStub(channel)
                for engine in engines:
                    check(stub, engine)
        share = ENGINES // THREADS
        writers = [
            Writer(server.grpc, engines[n * share : (n + 1) * share], rng.randrange(1 << 30))
            for n in range(THREADS)
        ]
        for writer in writers:
            writer.start()
        # The moment is chosen by chance, from before the first write to well into them.
        writers[0].join(rng.uniform(0.0, 0.12))
        server.kill()
        for writer in writers:
            writer.join()
            assert writer.fault is None
        writes += sum(writer.writes for writer in writers)
    assert writes > ROUNDS * 3
