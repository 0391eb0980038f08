"""Waves: what is in each other's way, bounds, order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from tests.unit.core.desk import Desk, record
from tests.unit.server.pairs import (
    IN_THE_WAY,
    Pair,
    begin,
    deregister,
    desk_with,
    drain,
    evict,
    one,
    register,
    update,
)
from tests.unit.server.turns import Ask, Turns, at_once, content, copy, said, serially

from rankbook import v1
from rankbook.errors import Internal, Reason
from rankbook_server import wave as wave_module
from rankbook_server.core import records as records_module
from rankbook_server.core.book import BookLimits
from rankbook_server.wave import MOST_COMMANDS


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.mark.parametrize("pair", IN_THE_WAY, ids=lambda pair: pair.__name__)
def test_what_would_come_out_otherwise_together_is_in_two_waves(
    pair: Callable[[], Pair], loop: asyncio.AbstractEventLoop
) -> None:
    desk, first, second = pair()
    known = set(desk.book.leases)
    right, wrong, turns = copy(desk), copy(desk), Turns(desk, loop)
    expected = [said(result, known) for result in serially(right, [first, second])]
    careless = [said(result, known) for result in at_once(wrong, [first, second])]
    # Else the pair shows nothing.
    assert (careless, content(wrong.book, known)) != (expected, content(right.book, known))
    found = [said(result, known) for result in turns.run([first, second])]
    assert [outcome.command.name for outcome in turns.waves[0].writes] == [first.name]
    assert found == expected
    assert content(turns.book, known) == content(right.book, known)


def side_by_side() -> dict[str, tuple[Desk, list[Ask]]]:
    """What is in nobody's way."""
    two = desk_with(0, engine_id="f_dp0", desk=desk_with(0, 1))
    agent = Desk()
    for engine_id in ("e_dp0", "f_dp0"):
        agent.register(one(0, engine_id), key="agent")
    return {
        "slots of one engine": (desk_with(0), [update(0), register(one(1))]),
        "slots of one engine that is begun": (
            desk_with(0),
            [update(0), register(one(1)), begin("f_dp0")],
        ),
        "new engines": (Desk(), [register(one(0, f"e{n}_dp0")) for n in range(20)]),
        "one lease that stays": (
            agent,
            [register(one(1, e), key="agent") for e in ("e_dp0", "f_dp0")],
        ),
        "ends in two groups": (
            desk_with(0, desk=_of_group("f_dp0", "decode")),
            [deregister(), deregister(engine_id="f_dp0")],
        ),
        "an end and a begin in two groups": (
            desk_with(0),
            [deregister(), register(one(0, "f_dp0", group="decode"))],
        ),
        "an end and a begin of two DP ranks": (
            desk_with(0),
            [deregister(), register(one(0, "f_dp1", dp_rank=1))],
        ),
        "a drain and another engine's slot": (two, [drain(), register(one(1, "f_dp0"))]),
    }


def _of_group(engine_id: str, group: str) -> Desk:
    desk = Desk()
    desk.register(one(0, engine_id, group=group))
    return desk


@pytest.mark.parametrize("case", side_by_side())
def test_what_is_in_nobodys_way_is_one_wave(case: str, loop: asyncio.AbstractEventLoop) -> None:
    desk, asks = side_by_side()[case]
    known = set(desk.book.leases)
    turns, right = Turns(desk, loop), copy(desk)
    found = [said(result, known) for result in turns.run(asks)]
    assert len(turns.waves) == 1
    assert found == [said(result, known) for result in serially(right, asks)]
    assert content(turns.book, known) == content(right.book, known)


def test_a_refusal_that_something_under_way_may_change_waits(
    loop: asyncio.AbstractEventLoop,
) -> None:
    turns = Turns(desk_with(0), loop)
    # Refused before the drain is taken back, and not after it.
    desk = desk_with(0)
    sealing = Ask("seal_engine", desk.seal_request())
    last = register(one(1))
    filled, sealed = turns.ask(last), turns.ask(sealing)
    turns.turn()
    assert filled.done()
    assert not sealed.done()
    turns.turn()
    error = sealed.exception()
    # Whole by now, so what differs is told, and not what is missing.
    assert getattr(error, "reason", None) is Reason.SEAL_MISMATCH


def test_a_refusal_of_another_subject_does_not_wait(loop: asyncio.AbstractEventLoop) -> None:
    turns = Turns(desk_with(0), loop)
    filled, refused = turns.ask(register(one(1))), turns.ask(drain("nobody"))
    turns.turn()
    assert filled.done()
    assert getattr(refused.exception(), "reason", None) is Reason.ENGINE_NOT_FOUND


# ------------------------------------------------------------------------- order


def test_commands_on_one_engine_are_decided_as_they_came(loop: asyncio.AbstractEventLoop) -> None:
    """Each by another way of being held up; none is overtaken by a later one."""
    turns = Turns(desk_with(0, 1), loop)
    names: list[str] = []
    asks = [
        update(0, b"a", 2),
        update(0, b"b", 3),
        update(1, b"c", 2),
        drain(),
        update(1, b"d", 3),
        evict(),
        update(0, b"e", 4),
    ]
    for number, ask in enumerate(asks):
        turns.ask(ask).add_done_callback(lambda _, number=number: names.append(str(number)))
    while turns.queue:
        turns.turn()
    loop.run_until_complete(asyncio.sleep(0))
    assert names == [str(number) for number in range(len(asks))]


def test_what_waits_goes_before_what_came_later(loop: asyncio.AbstractEventLoop) -> None:
    turns = Turns(desk_with(0), loop)
    rivals = [turns.ask(register(one(1, boot_id=name))) for name in ("p", "q", "r")]
    other = turns.ask(register(one(0, "f_dp0")))
    turns.turn()
    assert rivals[0].done()
    assert other.done()
    later = turns.ask(register(one(1, boot_id="s")))
    assert [c.future for c in turns.queue] == [rivals[1], rivals[2], later]
    turns.turn()
    assert all(future.done() for future in (*rivals, later))


def test_what_is_left_when_a_wave_is_full_keeps_its_order(
    loop: asyncio.AbstractEventLoop,
) -> None:
    turns = Turns(desk_with(0), loop, most_ops=2)
    asks = [register(one(1)), register(one(1, boot_id="q")), begin("f_dp0"), begin("g_dp0")]
    futures = [turns.ask(ask) for ask in asks]
    wave = turns.take()
    assert len(wave.outcomes) == 1
    assert [command.future for command in turns.queue] == futures[1:]


def test_a_command_behind_one_that_waits_is_not_even_asked(
    loop: asyncio.AbstractEventLoop,
) -> None:
    turns = Turns(desk_with(0, 1), loop)
    for ask in (drain(), evict(), update(1)):
        turns.ask(ask)
    asked: list[str] = []
    for command in list(turns.queue)[1:]:
        command.decide = lambda *_, name=command.name: asked.append(name)  # type: ignore[misc]
    wave = turns.take()
    assert asked == []
    assert [outcome.command.name for outcome in wave.outcomes] == ["drain_engine"]
    assert [command.name for command in turns.queue] == ["evict_engine", "update_worker"]


def test_a_wave_that_is_given_back_is_as_if_it_had_not_been(
    loop: asyncio.AbstractEventLoop,
) -> None:
    turns = Turns(desk_with(0), loop)
    for ask in (register(one(1)), register(one(0, "f_dp0")), register(one(1, boot_id="q"))):
        turns.ask(ask)
    queued, kept = list(turns.queue), turns.desk.kept(turns.book)
    wave = turns.take()
    assert len(wave.outcomes) == 2
    wave.give_back(turns.queue)
    # Those that were decided come first, as they came; then what waited.
    assert list(turns.queue) == [*queued]
    assert turns.desk.kept(turns.book) == kept


# ------------------------------------------------------------------------ bounds


@pytest.mark.parametrize("bound", ["engines", "leases"])
@pytest.mark.parametrize("room", [0, 1, 7, 300])
def test_the_bound_is_exact_when_very_many_come_at_once(
    bound: str, room: int, loop: asyncio.AbstractEventLoop
) -> None:
    limits = BookLimits(**{f"max_{bound}": 5 + room})
    desk = Desk(limits)
    for number in range(5):
        desk.quick("register", register(one(0, f"d{number}_dp0")).request)
    turns = Turns(desk, loop)
    count = 600
    results = turns.run(register(one(0, f"e{n}_dp0")) for n in range(count))
    passed = [r for r in results if isinstance(r, v1.RegisterWorkersResponse)]
    assert len(passed) == min(room, count)
    assert len(getattr(turns.book, bound)) == 5 + room
    reason = Reason.TOO_MANY_ENGINES if bound == "engines" else Reason.TOO_MANY_LEASES
    assert {r.reason for r in results if r not in passed} == {reason}


def test_a_book_over_a_bound_that_was_lowered_still_takes_what_is_not_bounded_by_it(
    loop: asyncio.AbstractEventLoop,
) -> None:
    desk = desk_with(0, engine_id="f_dp0", desk=desk_with(0))
    for limits, ask in (
        (BookLimits(max_leases=1), begin("g_dp0")),
        (BookLimits(max_engines=1), register(one(1))),
    ):
        desk.limits = limits
        (reply,) = Turns(desk, loop).run([ask])
        assert reply.epoch == 1


def test_far_from_a_bound_very_many_are_one_wave(loop: asyncio.AbstractEventLoop) -> None:
    turns = Turns(Desk(BookLimits(max_engines=MOST_COMMANDS, max_leases=MOST_COMMANDS)), loop)
    turns.run(register(one(0, f"e{n}_dp0")) for n in range(100))
    assert len(turns.waves) == 1


def test_an_engine_never_grows_over_its_bound_within_a_wave(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 4_000
    monkeypatch.setattr(wave_module, "MAX_ENGINE_BYTES", bound)
    monkeypatch.setattr(records_module, "MAX_ENGINE_BYTES", bound)
    desk = Desk()
    kind = {"pp_size": 1, "tp_size": 8}
    desk.register(record(0, 0, **kind))  # type: ignore[arg-type]
    asks = [register(record(0, tp, payload=bytes(900), **kind)) for tp in range(1, 8)]  # type: ignore[arg-type]
    turns, right = Turns(desk, loop), copy(desk)
    known = set(desk.book.leases)
    found = [said(result, known) for result in turns.run(asks)]
    assert found == [said(result, known) for result in serially(right, asks)]
    assert "refused: LIMIT_EXCEEDED" in found
    assert turns.book.engines["e_dp0"].bytes <= bound
    # The first ones are no reason to wait.
    assert len(turns.waves[0].outcomes) > 1


def test_a_wave_has_as_many_operations_as_it_may(loop: asyncio.AbstractEventLoop) -> None:
    desk = desk_with(0, engine_id="f_dp0", desk=desk_with(0))
    # Each writes one slot and one lease.
    asks = [register(one(1)), register(one(1, "f_dp0")), begin("g_dp0"), begin("h_dp0")]
    for most, sizes in ((6, [4]), (5, [3, 1]), (4, [2, 2]), (3, [1, 2, 1])):
        turns = Turns(desk, loop, most_ops=most)
        turns.run(asks)
        assert [len(wave.outcomes) for wave in turns.waves] == sizes
        for wave in turns.waves:
            assert sum(len(o.txn_to_keep.ops) for o in wave.writes) <= most


def test_a_wave_has_as_many_bytes_as_it_may(loop: asyncio.AbstractEventLoop) -> None:
    desk = desk_with(0, engine_id="f_dp0", desk=desk_with(0))
    asks = [update(0, bytes(1000)), update(0, bytes(1000), engine_id="f_dp0")]
    turns = Turns(desk, loop)
    turns.run(asks)
    (wave,) = turns.waves
    sizes = [
        sum(len(op.key) + len(getattr(op, "value", b"")) for op in o.txn_to_keep.ops)
        for o in wave.writes
    ]
    for most, waves in ((sum(sizes), 1), (sum(sizes) - 1, 2)):
        turns = Turns(desk, loop, most_bytes=most)
        turns.run(asks)
        assert len(turns.waves) == waves


def test_leases_that_the_store_is_asked_about_count_as_bytes(
    loop: asyncio.AbstractEventLoop,
) -> None:
    desk = desk_with(0, 1)
    desk.mono_s += 20
    asks = [Ask("expire"), register(one(0, "f_dp0", group="decode"))]
    turns = Turns(desk, loop)
    for ask in asks:
        turns.ask(ask)
    wave = turns.take()
    assert len(wave.writes) == 2
    keys = [op.key for o in wave.writes for op in o.txn_to_keep.ops]
    values = [getattr(op, "value", b"") for o in wave.writes for op in o.txn_to_keep.ops]
    asked = [lease_id for o in wave.writes if o.decision for lease_id in o.decision.expired]
    assert len(asked) == 2
    most = sum(map(len, [*keys, *values, *asked]))
    for bound, count in ((most, 2), (most - 1, 1)):
        turns = Turns(desk, loop, most_bytes=bound)
        for ask in asks:
            turns.ask(ask)
        assert len(turns.take().writes) == count


def test_one_decision_over_a_bound_is_a_wave_of_its_own(loop: asyncio.AbstractEventLoop) -> None:
    desk = desk_with(0, 1)
    for bound in ({"most_ops": 1}, {"most_bytes": 10}):
        turns = Turns(desk, loop, **bound)  # type: ignore[arg-type]
        turns.run([register(one(0, "f_dp0")), register(one(0, "g_dp0"))])
        assert [len(wave.outcomes) for wave in turns.waves] == [1, 1]


def test_a_wave_takes_no_more_commands_than_its_bound(loop: asyncio.AbstractEventLoop) -> None:
    turns = Turns(Desk(), loop)
    for number in range(MOST_COMMANDS + 1):
        turns.ask(begin(f"e{number}_dp0"))
    assert len(turns.take().outcomes) == MOST_COMMANDS
    assert len(turns.queue) == 1


# --------------------------------------------------------------- nothing is left


def test_what_writes_nothing_leaves_nothing(loop: asyncio.AbstractEventLoop) -> None:
    turns = Turns(Desk(), loop, namespace="empty")
    refused, idle = turns.ask(drain("nobody")), turns.ask(Ask("expire"))
    wave = turns.turn()
    assert idle.done()
    assert getattr(refused.exception(), "reason", None) is Reason.ENGINE_NOT_FOUND
    assert wave.writes == []
    assert [book.namespace for book in turns.books.all()] == []


def test_a_decision_changes_nothing_before_it_is_committed(
    loop: asyncio.AbstractEventLoop,
) -> None:
    turns = Turns(desk_with(0), loop)
    before = turns.desk.kept(turns.book)
    futures = [turns.ask(register(one(1))), turns.ask(evict()), turns.ask(drain("nobody"))]
    wave = turns.take()
    assert len(wave.outcomes) == 2
    assert turns.desk.kept(turns.book) == before
    assert not any(future.done() for future in futures)


def test_what_writes_nothing_is_answered_at_the_revision_it_was_decided_on(
    loop: asyncio.AbstractEventLoop,
) -> None:
    desk = desk_with(0)
    desk.call("begin_generation", begin("e_dp0").request)
    desk.register(one(1))
    turns = Turns(desk, loop)
    (reply,) = turns.run([begin("e_dp0")])
    assert (reply.epoch, reply.revision) == (2, 3)


def test_a_fault_in_one_decision_is_that_ones_alone(loop: asyncio.AbstractEventLoop) -> None:
    turns = Turns(desk_with(0), loop)
    broken, good = turns.ask(update(0)), turns.ask(register(one(0, "f_dp0")))

    def fault(*_: object) -> None:
        raise ZeroDivisionError

    turns.queue[0].decide = fault  # type: ignore[assignment]
    turns.turn()
    assert isinstance(broken.exception(), Internal)
    assert good.result().epoch == 1


def test_what_nobody_waits_for_any_more_is_not_decided(loop: asyncio.AbstractEventLoop) -> None:
    turns = Turns(desk_with(0), loop)
    left, other = turns.ask(register(one(1))), turns.ask(begin("f_dp0"))
    left.cancel()
    wave = turns.turn()
    assert [outcome.command.future for outcome in wave.outcomes] == [other]
    assert not turns.queue
    assert sorted(turns.book.engines["e_dp0"].live) == [(0, 0, 0)]


def test_upkeep_that_has_nothing_left_is_done(loop: asyncio.AbstractEventLoop) -> None:
    turns = Turns(desk_with(0), loop)
    done = turns.ask(Ask("expire"))
    turns.turn()
    assert done.result() is None
