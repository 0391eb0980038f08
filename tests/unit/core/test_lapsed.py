"""How a worker left: by its own word, or without one, so that it may still run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.core.desk import Desk, record

from rankbook import v1


def revoke(desk: Desk, boot_id: str) -> None:
    lease_id = desk.book.lease_of_key[boot_id]
    desk.call("revoke_lease", v1.RevokeLeaseRequest(lease_id=lease_id))


def deregister(desk: Desk, boot_id: str) -> None:
    request = v1.DeregisterRequest(engine_id="e_dp0", generation="g1", boot_id=boot_id, sequence=9)
    desk.call("deregister", request)


def run_out(desk: Desk, *but: str) -> None:
    """Every lease runs out but those of the processes named."""
    for _ in range(2):
        desk.mono_s += 6
        for boot_id in but:
            desk.renew(desk.book.lease_of_key[boot_id])
    desk.expire()


def evict(desk: Desk) -> None:
    desk.call("evict", v1.EvictEngineRequest(engine_id="e_dp0"))


def two(desk: Desk, **kind: str) -> None:
    """Both ranks of an engine, held by the processes `a` and `b`."""
    for tp, boot_id in enumerate("ab"):
        desk.register(record(0, tp, boot_id=boot_id, pp_size=1, **kind), sequence=1)


@pytest.mark.parametrize(
    ("how", "lapsed"),
    [
        pytest.param(lambda desk: revoke(desk, "a"), False, id="revoke"),
        pytest.param(lambda desk: deregister(desk, "a"), False, id="deregister"),
        pytest.param(lambda desk: run_out(desk, "b"), True, id="expire"),
        pytest.param(run_out, True, id="expire, all"),
        pytest.param(evict, True, id="evict"),
    ],
)
def test_only_a_worker_that_gave_no_word_makes_the_engine_lapsed(
    how: Callable[[Desk], None], lapsed: bool
) -> None:
    desk = Desk()
    two(desk)
    assert not desk.engine().lapsed
    how(desk)

    assert desk.engine().lapsed == lapsed
    desk.restart(seed=7)
    assert desk.engine().lapsed == lapsed


def test_it_is_set_at_the_revision_of_the_removal() -> None:
    desk = Desk()
    two(desk)
    before = desk.revision
    run_out(desk, "b")

    assert desk.engine().revision == desk.revision == before + 1
    assert (desk.engine().present, desk.engine().lapsed) == (1, True)


def test_it_is_set_also_where_nothing_else_of_the_engine_changes() -> None:
    """One of two workers of an engine that never was complete."""
    desk = Desk()
    for tp, boot_id in enumerate("ab"):
        desk.register(record(0, tp, boot_id=boot_id))
    run_out(desk, "b")

    assert desk.state() == "FORMING"
    assert desk.engine().lapsed


def test_the_worker_that_comes_back_and_the_others_that_leave_do_not_clear_it() -> None:
    desk = Desk()
    two(desk)
    run_out(desk, "b")
    desk.register(record(0, 0, boot_id="a", pp_size=1), sequence=2)
    assert desk.state() == "COMPLETE"
    assert desk.engine().lapsed
    revoke(desk, "a")
    revoke(desk, "b")

    assert desk.state() == "GONE"
    assert desk.engine().lapsed


@pytest.mark.parametrize("before", [run_out, evict], ids=["expired", "evicted"])
def test_a_new_generation_starts_without_it(before: Callable[[Desk], None]) -> None:
    desk = Desk()
    two(desk)
    before(desk)
    two(desk, generation="g2")

    assert not desk.engine().lapsed


def test_a_generation_retired_alive_leaves_nothing_on_the_new_one_also_when_its_leases_end() -> (
    None
):
    desk = Desk()
    two(desk)
    desk.register(record(0, 0, boot_id="c", pp_size=1, generation="g2"))
    run_out(desk, "c")

    assert not desk.engine().lapsed


def test_the_cores_own_lease_does_not_count() -> None:
    desk = Desk()
    two(desk)
    desk.seal(core="core")
    run_out(desk, "a", "b")

    assert desk.state() == "DEGRADED"
    assert not desk.engine().lapsed


def test_a_slot_taken_over_from_a_process_whose_lease_ran_out_counts() -> None:
    """The lease is past its time and not swept: the next holder takes its slot out."""
    desk = Desk()
    two(desk)
    desk.mono_s += 11
    desk.register(record(0, 0, boot_id="c", pp_size=1))

    assert desk.engine().present == 2
    assert desk.engine().lapsed
    assert desk.engine().revision == desk.revision


def test_a_process_that_returns_before_the_sweep_was_never_gone() -> None:
    desk = Desk()
    two(desk)
    desk.mono_s += 11
    for tp, boot_id in enumerate("ab"):
        desk.register(record(0, tp, boot_id=boot_id, pp_size=1), sequence=2)
    desk.expire()

    assert not desk.engine().lapsed


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("revoked", [True, False])
def test_a_lease_that_ends_in_pieces_ends_in_one_way(revoked: bool, restart: bool) -> None:
    desk = Desk()
    kind = {"pp_size": 1, "tp_size": 256, "boot_id": "n"}
    for part in range(4):
        records = [record(0, tp, **kind) for tp in range(64 * part, 64 * part + 64)]
        desk.register(*records, sequence=part + 1, key="node")
    if revoked:
        revoke(desk, "node")
    else:
        desk.mono_s += 11
        decision = desk.book.expire(desk.now)
        assert decision is not None
        desk.commit(decision)
    assert 0 < desk.engine().present < 256
    if restart:
        desk.restart(seed=2)
    # Whoever takes a slot that waits for its removal is told the same.
    desk.register(record(0, 255, pp_size=1, tp_size=256, boot_id="other"))
    assert desk.engine().lapsed != revoked
    desk.expire()

    assert desk.engine().present == 1
    assert desk.engine().lapsed != revoked


def test_a_head_that_was_stored_before_the_field_was_there_reads_false() -> None:
    desk = Desk()
    two(desk)
    key = "default/e/e_dp0"
    old = v1.StoredEngine.FromString(desk.store[key][0])
    assert not {"lapsed", "eviction"} & {field.name for field, _ in old.ListFields()}
    desk.restart()

    assert not desk.engine().lapsed
