"""Commands for tests of waves, and pairs of them that are in each other's way.

Of each pair the second comes out otherwise where it does not see what the first did.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.core.desk import Desk, record, registration
from tests.unit.server.turns import Ask

from rankbook import v1
from rankbook_server.core.book import BookLimits

# ------------------------------------------------------------------ what is asked


def register(
    *records: v1.WorkerRecord, key: str = "", lease_id: str = "", sequence: int = 1
) -> Ask:
    request = registration(*records, key=key, lease_id=lease_id, sequence=sequence)
    return Ask("register_workers", request)


def one(tp: int = 0, engine_id: str = "e_dp0", **kind: object) -> v1.WorkerRecord:
    """A record of an engine of two workers."""
    return record(0, tp, engine_id=engine_id, pp_size=1, **kind)  # type: ignore[arg-type]


def update(tp: int = 0, payload: bytes = b"other", sequence: int = 2, **kind: object) -> Ask:
    changed = one(tp, payload=payload, **kind)
    return Ask("update_worker", v1.UpdateWorkerRequest(record=changed, sequence=sequence))


def begin(engine_id: str, generation: str = "g9") -> Ask:
    request = v1.BeginGenerationRequest(engine_id=engine_id, generation=generation)
    return Ask("begin_generation", request)


def deregister(tp: int = 0, engine_id: str = "e_dp0", sequence: int = 9) -> Ask:
    request = v1.DeregisterRequest(
        engine_id=engine_id,
        generation="g1",
        boot_id=one(tp, engine_id).process.boot_id,
        sequence=sequence,
    )
    return Ask("deregister", request)


def revoke(desk: Desk, key: str) -> Ask:
    return Ask("revoke_lease", v1.RevokeLeaseRequest(lease_id=desk.book.lease_of_key[key]))


def drain(engine_id: str = "e_dp0") -> Ask:
    return Ask("drain_engine", v1.DrainEngineRequest(engine_id=engine_id))


def evict(engine_id: str = "e_dp0") -> Ask:
    return Ask("evict_engine", v1.EvictEngineRequest(engine_id=engine_id))


def seal(desk: Desk, engine_id: str = "e_dp0") -> Ask:
    return Ask("seal_engine", desk.seal_request(engine_id))


def desk_with(*tps: int, engine_id: str = "e_dp0", desk: Desk | None = None) -> Desk:
    """A desk where some workers of an engine of two have signed in."""
    desk = desk or Desk()
    for tp in tps:
        desk.register(one(tp, engine_id))
    return desk


# -------------------------------------------------- what is in each other's way

Pair = tuple[Desk, Ask, Ask]


def two_holders_of_one_slot() -> Pair:
    desk = desk_with(1)
    return desk, register(one(0)), register(one(0, boot_id="rival"))


def a_slot_and_the_end_of_the_only_other() -> Pair:
    desk = desk_with(0)
    return desk, revoke(desk, "e_dp0.g1.0.0"), register(one(1))


def the_end_of_the_only_other_and_a_slot() -> Pair:
    desk, end, slot = a_slot_and_the_end_of_the_only_other()
    return desk, slot, end


def a_slot_and_a_seal_without_it() -> Pair:
    desk = desk_with(0, 1)
    return desk, update(0), seal(desk)


def a_seal_and_the_lease_that_keeps_a_rank() -> Pair:
    desk = desk_with(0, 1)
    return desk, revoke(desk, "e_dp0.g1.0.1"), seal(desk)


def a_drain_and_the_end_of_the_last_rank() -> Pair:
    desk = desk_with(0)
    return desk, revoke(desk, "e_dp0.g1.0.0"), drain()


def a_drain_and_an_eviction() -> Pair:
    return desk_with(0), drain(), evict()


def an_eviction_and_the_end_of_a_lease_that_keeps_one_rank() -> Pair:
    desk = desk_with(0, 1)
    # From here on the end of one rank writes no head.
    desk.seal()
    return desk, evict(), revoke(desk, "e_dp0.g1.0.1")


def the_end_of_a_lease_that_keeps_one_rank_and_an_eviction() -> Pair:
    desk, gone, end = an_eviction_and_the_end_of_a_lease_that_keeps_one_rank()
    return desk, end, gone


def a_lease_that_ends_and_a_record_that_comes_under_it() -> Pair:
    desk = desk_with(0, 1)
    desk.call("deregister", deregister(0).request)
    lease_id = desk.book.lease_of_key["e_dp0.g1.0.0"]
    again = register(one(0), lease_id=lease_id, sequence=10)
    return desk, revoke(desk, "e_dp0.g1.0.0"), again


def a_record_that_comes_under_a_lease_and_its_end() -> Pair:
    desk, end, again = a_lease_that_ends_and_a_record_that_comes_under_it()
    return desk, again, end


def two_new_leases_of_one_key() -> Pair:
    return desk_with(1), register(one(0), key="k"), register(one(0, "f_dp0"), key="k")


def an_old_lease_of_a_key_that_two_come_back_under() -> Pair:
    desk = desk_with(0, 1)
    desk.register(one(0, "f_dp0"))
    desk.mono_s += 20
    key = "e_dp0.g1.0.0"
    first, second = one(0, boot_id="first"), one(0, "f_dp0", boot_id="second")
    return desk, register(first, key=key), register(second, key=key)


def two_engines_of_one_lease() -> Pair:
    desk = desk_with(0)
    key = "e_dp0.g1.0.0"
    return desk, register(one(0, "f_dp0"), key=key), register(one(0, "g_dp0"), key=key)


def an_engine_that_ends_and_one_that_takes_its_place() -> Pair:
    desk = desk_with(0)
    return desk, revoke(desk, "e_dp0.g1.0.0"), register(one(0, "f_dp0", replica="e"))


def an_engine_that_takes_a_place_and_the_end_of_who_had_it() -> Pair:
    desk, end, heir = an_engine_that_ends_and_one_that_takes_its_place()
    return desk, heir, end


def a_new_start_that_takes_a_place_and_the_end_of_who_had_it() -> Pair:
    desk = desk_with(0, engine_id="f_dp0", desk=desk_with(0))
    heir = register(one(0, "f_dp0", generation="g2", replica="e"))
    return desk, heir, revoke(desk, "e_dp0.g1.0.0")


def two_that_had_one_place_and_end() -> Pair:
    desk = desk_with(0)
    desk.register(one(0, "f_dp0", replica="e"))
    return desk, revoke(desk, "e_dp0.g1.0.0"), revoke(desk, "f_dp0.g1.0.0")


def an_eviction_and_an_engine_that_takes_the_place() -> Pair:
    return desk_with(0), evict(), register(one(0, "f_dp0", replica="e"))


def two_that_take_the_place_of_one() -> Pair:
    desk = desk_with(0)
    desk.call("deregister", deregister().request)
    return desk, register(one(0, "f_dp0")), register(one(0, "g_dp0"))


def two_engines_at_the_bound() -> Pair:
    desk = Desk(BookLimits(max_engines=3))
    desk_with(0, engine_id="d_dp0", desk=desk_with(0, desk=desk))
    return desk, begin("f_dp0"), begin("g_dp0")


def two_leases_at_the_bound() -> Pair:
    desk = Desk(BookLimits(max_leases=2))
    desk_with(0, desk=desk)
    return desk, register(one(0, "f_dp0")), register(one(0, "g_dp0"))


def a_new_start_and_a_change_of_the_old_one() -> Pair:
    return desk_with(1), register(one(0, generation="g2")), update(1)


def a_sweep_and_the_return_of_what_it_drops() -> Pair:
    desk = Desk(BookLimits(tombstone_ttl_s=30.0))
    desk_with(0, desk=desk)
    desk.call("deregister", deregister().request)
    desk.mono_s += 40
    return desk, Ask("sweep"), register(one(0), sequence=10)


def a_new_holder_of_the_slot_and_an_expiry() -> Pair:
    desk = desk_with(0, 1)
    desk.mono_s += 20
    return desk, register(one(0, boot_id="heir")), Ask("expire")


IN_THE_WAY: list[Callable[[], Pair]] = [
    two_holders_of_one_slot,
    a_slot_and_the_end_of_the_only_other,
    the_end_of_the_only_other_and_a_slot,
    a_slot_and_a_seal_without_it,
    a_seal_and_the_lease_that_keeps_a_rank,
    a_drain_and_the_end_of_the_last_rank,
    a_drain_and_an_eviction,
    an_eviction_and_the_end_of_a_lease_that_keeps_one_rank,
    the_end_of_a_lease_that_keeps_one_rank_and_an_eviction,
    a_lease_that_ends_and_a_record_that_comes_under_it,
    a_record_that_comes_under_a_lease_and_its_end,
    two_new_leases_of_one_key,
    an_old_lease_of_a_key_that_two_come_back_under,
    two_engines_of_one_lease,
    an_engine_that_ends_and_one_that_takes_its_place,
    an_engine_that_takes_a_place_and_the_end_of_who_had_it,
    a_new_start_that_takes_a_place_and_the_end_of_who_had_it,
    two_that_had_one_place_and_end,
    an_eviction_and_an_engine_that_takes_the_place,
    two_that_take_the_place_of_one,
    two_engines_at_the_bound,
    two_leases_at_the_bound,
    a_new_start_and_a_change_of_the_old_one,
    a_sweep_and_the_return_of_what_it_drops,
    a_new_holder_of_the_slot_and_an_expiry,
]
