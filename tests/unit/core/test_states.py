"""The table of states, line by line and where two lines hold at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.core.desk import Desk, record

from rankbook import v1


def drain(desk: Desk, *, undo: bool = False) -> None:
    desk.call("drain", v1.DrainEngineRequest(engine_id="e_dp0", undo=undo))


def lose_a_rank(desk: Desk) -> None:
    desk.call(
        "deregister",
        v1.DeregisterRequest(
            engine_id="e_dp0", generation="g1", boot_id="e_dp0.g1.1.1", sequence=50
        ),
    )


def lose_every_rank(desk: Desk) -> None:
    desk.mono_s += 11
    desk.expire()


def lose_the_core(desk: Desk) -> None:
    lease_id = desk.book.engines["e_dp0"].head.core.lease_id
    desk.call("revoke_lease", v1.RevokeLeaseRequest(lease_id=lease_id))


def overlap(desk: Desk) -> None:
    desk.register(record(1, 1, layers=(30, 61)), sequence=40)


def sleep(desk: Desk) -> None:
    desk.call(
        "update",
        v1.UpdateWorkerRequest(record=record(0, 0), withdraw_payload=True, sequence=41),
    )


def change(desk: Desk) -> None:
    desk.register(record(0, 1, payload=b"another"), sequence=42)


def evict(desk: Desk) -> None:
    desk.call("evict", v1.EvictEngineRequest(engine_id="e_dp0"))


def half(desk: Desk) -> None:
    desk.register(record(0, 0))


Steps = list[Callable[[Desk], object]]


@pytest.mark.parametrize(
    ("steps", "state"),
    [
        pytest.param([half], "FORMING", id="some slots are filled"),
        pytest.param([Desk.fill], "COMPLETE", id="every slot is filled"),
        pytest.param([Desk.ready], "READY", id="sealed"),
        pytest.param([Desk.ready, change], "COMPLETE", id="another content than sealed"),
        pytest.param([Desk.ready, drain], "DRAINING", id="drain comes before ready"),
        pytest.param([Desk.fill, drain], "DRAINING", id="drain comes before complete"),
        pytest.param([half, drain], "FORMING", id="half a grid has no peers to go on"),
        pytest.param([Desk.ready, lose_a_rank], "DEGRADED", id="a slot is lost"),
        pytest.param([Desk.ready, sleep], "DEGRADED", id="a payload is withdrawn"),
        pytest.param([Desk.ready, lose_the_core], "DEGRADED", id="the core is lost"),
        pytest.param([Desk.fill, lose_a_rank], "DEGRADED", id="was complete, was never sealed"),
        pytest.param([Desk.ready, drain, lose_a_rank], "DEGRADED", id="degraded before draining"),
        pytest.param([Desk.ready, change, lose_the_core], "DEGRADED", id="old seal, no core"),
        pytest.param([Desk.ready, overlap], "INVALID", id="layers overlap"),
        pytest.param([Desk.ready, overlap, lose_the_core], "INVALID", id="invalid before degraded"),
        pytest.param([Desk.ready, overlap, drain], "INVALID", id="invalid before draining"),
        pytest.param([Desk.ready, lose_every_rank], "GONE", id="no live worker"),
        pytest.param([Desk.ready, overlap, lose_every_rank], "GONE", id="gone before invalid"),
        pytest.param([Desk.ready, drain, lose_every_rank], "GONE", id="gone before draining"),
        pytest.param([Desk.ready, evict], "GONE", id="evicted"),
    ],
)
def test_the_first_line_of_the_table_that_holds_is_the_state(steps: Steps, state: str) -> None:
    desk = Desk()
    for step in steps:
        step(desk)

    assert desk.state() == state
    assert desk.engine().state == desk.book.state("e_dp0")
    desk.restart(seed=1)
    assert desk.state() == state


def test_clearing_the_drain_flag_gives_the_state_back() -> None:
    desk = Desk()
    desk.ready()
    drain(desk)
    drain(desk, undo=True)

    assert desk.state() == "READY"


def test_a_holder_that_returns_unchanged_restores_ready() -> None:
    desk = Desk()
    desk.ready()
    lose_a_rank(desk)

    desk.register(record(1, 1), sequence=51)

    assert desk.state() == "READY"
    assert desk.engine().seal.number == 1


def test_a_holder_that_returns_with_other_content_waits_for_a_second_seal() -> None:
    desk = Desk()
    desk.ready()
    lose_a_rank(desk)

    desk.register(record(1, 1, payload=b"another"), sequence=51)

    assert desk.state() == "COMPLETE"
    assert "SEAL_OUTDATED" in desk.problems()
    desk.seal(core="core-of-e_dp0", sequence=2)
    assert desk.state() == "READY"
    assert desk.engine().seal.number == 2


def test_a_sleeping_worker_says_so_and_wakes_with_a_new_payload_and_seal() -> None:
    desk = Desk()
    desk.ready()
    sleep(desk)

    assert desk.problems() == ["ASLEEP"]
    assert [slot.pp_rank for slot in desk.engine().asleep] == [0]
    assert desk.book.workers("e_dp0")[0].record.handshake.payload == b""
    desk.call("update", v1.UpdateWorkerRequest(record=record(0, 0, payload=b"awake"), sequence=42))
    assert desk.state() == "COMPLETE"
    desk.seal(core="core-of-e_dp0", sequence=2)
    assert desk.state() == "READY"


def test_a_worker_that_never_had_a_payload_sleeps_and_wakes_to_ready() -> None:
    desk = Desk()
    desk.ready(payload=b"")
    sleep(desk)
    assert desk.state() == "DEGRADED"

    desk.call("update", v1.UpdateWorkerRequest(record=record(0, 0, payload=b""), sequence=42))

    assert desk.state() == "READY"


def test_the_core_that_comes_back_as_it_was_restores_ready_with_the_same_seal() -> None:
    desk = Desk()
    desk.ready()
    lose_the_core(desk)
    assert desk.problems() == ["CORE_LOST"]

    desk.seal(core="core-of-e_dp0", sequence=2)

    assert desk.state() == "READY"
    assert desk.engine().seal.number == 1


@pytest.mark.parametrize("change_it", [overlap, sleep])
def test_that_it_was_complete_survives_a_restart_in_between(
    change_it: Callable[[Desk], None],
) -> None:
    """What the fold alone knew is written by the change that would hide it."""
    desk = Desk()
    desk.fill()
    change_it(desk)
    desk.restart(seed=2)
    lose_a_rank(desk)

    assert desk.state() == "DEGRADED"


def test_a_batch_is_complete_only_as_a_whole() -> None:
    """Between two records of one transaction the layers fit by chance; readers,
    and a restart, never see that."""
    desk = Desk()
    desk.register(record(0, 0, tp_size=1, layers=(0, 31)), record(1, 0, tp_size=1, layers=(30, 61)))
    assert desk.state() == "INVALID"
    desk.register(
        record(0, 0, tp_size=1, layers=(0, 30)),
        record(1, 0, tp_size=1, layers=(31, 61)),
        sequence=2,
    )
    assert desk.state() == "INVALID"

    desk.call(
        "deregister",
        v1.DeregisterRequest(
            engine_id="e_dp0", generation="g1", boot_id="e_dp0.g1.1.0", sequence=3
        ),
    )

    assert desk.state() == "FORMING"


def test_extra_layers_are_counted_apart() -> None:
    desk = Desk()
    last = record(1, 0, tp_size=1)
    last.layers.extra.add(index=61, kind=v1.LAYER_KIND_DRAFT)
    desk.register(record(0, 0, tp_size=1))
    desk.register(last)

    assert desk.state() == "COMPLETE"
    assert [(s.start_layer, s.end_layer) for s in desk.engine().stages] == [(0, 31), (31, 61)]


def test_an_empty_stage_is_legal() -> None:
    desk = Desk()
    desk.register(record(0, 0, tp_size=1, layers=(0, 61)))
    desk.register(record(1, 0, tp_size=1, layers=(61, 61)))

    assert desk.state() == "COMPLETE"


@pytest.mark.parametrize("split", [(15, 30, 46), (16, 31, 46)])
def test_both_published_splits_of_61_layers_over_4_stages_are_whole(
    split: tuple[int, int, int],
) -> None:
    desk = Desk()
    for pp, (start, end) in enumerate(zip((0, *split), (*split, 61), strict=True)):
        desk.register(record(pp, 0, pp_size=4, tp_size=1, layers=(start, end)))

    assert desk.state() == "COMPLETE"
    ends = [stage.end_layer for stage in desk.engine().stages]
    assert ends == [*split, 61]


@pytest.mark.parametrize(
    ("ranges", "reason"),
    [
        ([(0, 31), (31, 60)], "LAYERS_HOLE"),
        ([(1, 31), (31, 61)], "LAYERS_HOLE"),
        ([(0, 30), (31, 61)], "LAYERS_HOLE"),
        ([(0, 31), (30, 61)], "LAYERS_OVERLAP"),
        ([(0, 61), (0, 61)], "LAYERS_OVERLAP"),
        ([(0, 61), (10, 20)], "LAYERS_OVERLAP"),
    ],
)
def test_layers_that_contradict_each_other_are_named(
    ranges: list[tuple[int, int]], reason: str
) -> None:
    desk = Desk()
    for pp, span in enumerate(ranges):
        desk.register(record(pp, 0, tp_size=1, layers=span))

    assert desk.state() == "INVALID"
    (problem,) = desk.engine().problems
    assert problem.reason == reason
    assert problem.severity == v1.SEVERITY_ERROR
    assert problem.message
    assert all(value in problem.message for value in problem.metadata.values())


def test_workers_of_one_stage_with_other_layers_are_named_before_the_grid_is_full() -> None:
    desk = Desk()
    desk.register(record(0, 0))
    desk.register(record(0, 1, layers=(0, 30)))

    assert desk.state() == "INVALID"
    assert desk.problems() == ["LAYERS_DIFFER"]
