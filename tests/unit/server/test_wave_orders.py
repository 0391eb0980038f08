"""Whatever is decided in waves comes out as it would have one after another.

The order may be another than the one in which the commands came, except on one
engine or lease: what waits for the next wave is overtaken by what does not.
RANKBOOK_EXAMPLES=5000 looks for longer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, event, given, settings
from tests.unit.core.desk import Desk, record, registration
from tests.unit.server.turns import Ask, Turns, content, copy, said, serially

from rankbook import v1
from rankbook_server.core.book import BookLimits

TOMBSTONE_S = 30.0
ENGINES = ("a_dp0", "b_dp0", "c_dp0", "d_dp0", "e_dp0", "f_dp1")
BOOTS = ("p", "q", "agent")
KEYS = tuple(f"k{number}" for number in range(8))
GRIDS = {"g1": (1, 2), "g2": (2, 1), "g3": (1, 1)}
MOST_PERMUTED = 6


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


engines = st.sampled_from(ENGINES)
generations = st.sampled_from(("g1",) * 8 + ("g2", "g3"))
slots = st.sampled_from(((0, 0), (0, 0), (0, 1), (1, 0)))


@st.composite
def asks(draw: st.DrawFn, desk: Desk, number: int) -> Ask:
    """Something to do to a desk as it is now.

    A registration that repeats a part of an earlier one reads slots that it does
    not write, and a wave does not know of that. None is made here: it takes a
    process that writes its slots under two numbers at once.
    """
    name, generation = draw(engines), draw(generations)
    engine = desk.book.engines.get(name)
    if engine is not None and engine.head.generation and draw(st.integers(0, 3)):
        generation = engine.head.generation
    pp_size, tp_size = GRIDS[generation]
    sequence = draw(st.integers(1, 4)) if not draw(st.integers(0, 3)) else 5 + len(desk.store)
    slot = draw(slots)
    boot = f"{BOOTS[slot[1]]}-{name}" if draw(st.integers(0, 4)) else draw(st.sampled_from(BOOTS))

    def sent(pp: int, tp: int) -> v1.WorkerRecord:
        return record(
            pp % pp_size,
            tp % tp_size,
            engine_id=name,
            generation=generation,
            boot_id=boot,
            pp_size=pp_size,
            tp_size=tp_size,
            payload=draw(st.sampled_from((b"x", b"x", b"y"))),
            replica=draw(st.sampled_from(("same", "same", name))),
            dp_rank=int(name[-1]),
        )

    kind = draw(st.sampled_from(KINDS))
    lease_ids = sorted([*desk.book.leases, *desk.book.ended, "never"])
    if kind == "register_workers":
        whole = not draw(st.integers(0, 2))
        request = registration(
            *(grid_of(sent, generation) if whole else [sent(*slot)]),
            sequence=100 + number if whole else sequence,
            key=draw(st.sampled_from((*KEYS, f"key-{boot}"))),
            lease_id="" if draw(st.integers(0, 5)) else draw(st.sampled_from(lease_ids)),
            ttl_s=10.0,
        )
        return Ask(kind, request)
    if kind == "update_worker":
        return Ask(
            kind,
            v1.UpdateWorkerRequest(
                record=sent(*slot), withdraw_payload=draw(st.booleans()), sequence=sequence
            ),
        )
    if kind == "deregister":
        return Ask(
            kind,
            v1.DeregisterRequest(
                engine_id=name,
                generation=generation,
                boot_id=boot,
                slots=draw(
                    st.sampled_from(
                        ([], [v1.Slot(pp_rank=slot[0] % pp_size, tp_rank=slot[1] % tp_size)])
                    )
                ),
                sequence=sequence + 2,
            ),
        )
    if kind == "seal_engine" and engine is not None and engine.head.generation:
        request = desk.seal_request(name, core=draw(st.sampled_from(("core", "p"))))
        request.sequence = sequence
        if draw(st.booleans()):
            request.lease.lease_key = draw(st.sampled_from(KEYS))
        else:
            request.ClearField("lease")
        return Ask(kind, request)
    if kind == "revoke_lease":
        return Ask(kind, v1.RevokeLeaseRequest(lease_id=draw(st.sampled_from(lease_ids))))
    if kind == "evict_engine":
        return Ask(kind, v1.EvictEngineRequest(engine_id=name))
    if kind == "drain_engine":
        return Ask(kind, v1.DrainEngineRequest(engine_id=name, undo=draw(st.booleans())))
    if kind in ("expire", "sweep"):
        return Ask(kind)
    return Ask("begin_generation", v1.BeginGenerationRequest(engine_id=name, generation=generation))


KINDS = (
    *("register_workers",) * 9,
    *("update_worker",) * 5,
    *("deregister", "revoke_lease") * 2,
    *("seal_engine", "evict_engine", "drain_engine", "begin_generation", "expire", "sweep"),
)


def grid_of(sent: Any, generation: str) -> list[v1.WorkerRecord]:
    pp_size, tp_size = GRIDS[generation]
    records = [sent(pp, tp) for pp in range(pp_size) for tp in range(tp_size)]
    for other in records[1:]:
        other.replica = records[0].replica
    return records


def settled(desk: Desk, order: list[Ask], known: set[str]) -> tuple[list[str], dict[str, Any]]:
    return [said(r, known) for r in serially(desk, order)], content(desk.book, known)


@settings(
    max_examples=int(os.environ.get("RANKBOOK_EXAMPLES", "150")),
    derandomize="RANKBOOK_EXAMPLES" not in os.environ,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_waves_come_out_as_one_after_another(
    data: st.DataObject, loop: asyncio.AbstractEventLoop
) -> None:
    limits = BookLimits(tombstone_ttl_s=TOMBSTONE_S)
    if data.draw(st.booleans(), label="near the bounds"):
        limits = BookLimits(tombstone_ttl_s=TOMBSTONE_S, max_engines=4, max_leases=5)
    desk = Desk(limits)
    for number in range(data.draw(st.integers(0, 12), label="before")):
        serially(desk, [data.draw(asks(desk, number))])
        desk.mono_s += data.draw(st.sampled_from((0.0,) * 8 + (4.0, 11.0, 31.0)))
    known = set(desk.book.leases)
    count = data.draw(st.integers(2, 7), label="batch")
    batch = [data.draw(asks(desk, 100 + number)) for number in range(count)]
    merged = data.draw(st.booleans(), label="a wave is one transaction")
    turns = Turns(desk, loop, merged=merged, most_ops=126 if merged else 65_536)
    for ask in batch:
        turns.ask(ask)
    right = copy(desk)
    decided: list[Ask] = []
    while turns.queue:
        wave = turns.turn()
        taken = turns.order(wave)
        decided += [ask for ask, _ in taken]
        # What writes nothing was said of the state before the wave.
        silent = [pair for pair in taken if pair[1].txn is None]
        writes = [pair for pair in taken if pair[1].txn is not None]
        event(f"{min(len(writes), 4)} writes in a wave")
        found = content(turns.book, known)
        assert turns.desk.kept(turns.desk.rebuilt()) == turns.desk.kept(turns.book)
        order = silent + writes
        attempts = permutations(writes[:MOST_PERMUTED])
        for number, attempt in enumerate(attempts):
            order = [*silent, *attempt, *writes[MOST_PERMUTED:]]
            other = copy(right)
            words, kept = settled(other, [ask for ask, _ in order], known)
            said_so = [_answer(outcome, known) for _, outcome in order]
            if (words, kept) == (said_so, found):
                event("in the order of the wave" if not number else "in another order")
                right = other
                break
        else:
            raise AssertionError(f"no order gives this: {[ask for ask, _ in taken]}")
    # Nobody is overtaken on one engine or lease.
    for subject in {ask.subject for ask in batch if ask.subject}:
        came = [id(ask) for ask in batch if ask.subject == subject]
        assert [id(ask) for ask in decided if ask.subject == subject] == came


def _answer(outcome: Any, known: set[str]) -> str:
    if outcome.error is not None:
        return said(outcome.error, known)
    decision = outcome.decision
    return said(decision.reply(outcome.revision) if decision is not None else None, known)
