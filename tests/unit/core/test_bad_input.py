"""What bad input gets: a typed error that names the value and the rule, and a
book that is as it was (the desk checks that for every call)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.core.desk import Desk, record, registration

from rankbook import v1
from rankbook.convert import duration
from rankbook.errors import BadRecord, BadRequest, LimitExceeded, NotFound, RankbookError, Reason

LONG = "x" * 300


def twisted(twist: Callable[[v1.WorkerRecord], object]) -> v1.RegisterWorkersRequest:
    one = record(0, 0)
    twist(one)
    return registration(one)


def put(**values: Any) -> Callable[[v1.WorkerRecord], None]:
    """Sets fields given as `layout__pp_size=0`."""

    def twist(one: v1.WorkerRecord) -> None:
        for path, value in values.items():
            *parents, name = path.split("__")
            target: Any = one
            for parent in parents:
                target = getattr(target, parent)
            setattr(target, name, value)

    return twist


BAD_RECORDS = [
    ("an id that is empty", put(engine_id=""), "''", Reason.INVALID_RECORD),
    ("an id with a slash", put(engine_id="a/b"), "a/b", Reason.INVALID_RECORD),
    ("an id with a space", put(group="a b"), "a b", Reason.INVALID_RECORD),
    ("an id with a line end", put(generation="g\n"), "g\\n", Reason.INVALID_RECORD),
    ("an id of 300 characters", put(replica=LONG), "300 characters", Reason.INVALID_RECORD),
    ("a process without a name", put(process__boot_id=""), "boot_id", Reason.INVALID_RECORD),
    ("a role not stated", put(role=0), "role", Reason.INVALID_RECORD),
    ("a role nobody knows", put(role=9), "9", Reason.INVALID_RECORD),
    ("a stage outside the grid", put(slot__pp_rank=2), "pp_rank is 2", Reason.INVALID_RECORD),
    ("a rank outside the grid", put(slot__tp_rank=7), "tp_rank is 7", Reason.INVALID_RECORD),
    ("a pcp rank outside it", put(slot__pcp_rank=1), "pcp_rank is 1", Reason.INVALID_RECORD),
    ("no stages", put(layout__pp_size=0), "pp_size is 0", Reason.INVALID_RECORD),
    ("no layers", put(layout__num_layers=0), "num_layers is 0", Reason.INVALID_RECORD),
    (
        "a grid over the limit",
        put(layout__pp_size=257, layout__tp_size=256),
        "65536",
        Reason.LIMIT_EXCEEDED,
    ),
    ("an end before the start", put(layers__start_layer=40), "31", Reason.INVALID_RECORD),
    ("layers beyond the model", put(layers__end_layer=62), "62", Reason.INVALID_RECORD),
    (
        "an extra layer inside the model",
        lambda one: one.layers.extra.add(index=60, kind=v1.LAYER_KIND_MTP),
        "60",
        Reason.INVALID_RECORD,
    ),
    (
        "a payload over the limit",
        put(handshake__payload=bytes(512 * 1024 + 1)),
        "524289",
        Reason.LIMIT_EXCEEDED,
    ),
    ("a payload of no format", put(handshake__format=""), "format", Reason.INVALID_RECORD),
    ("no handshake", lambda one: one.ClearField("handshake"), "handshake", Reason.INVALID_RECORD),
    ("no slot", lambda one: one.ClearField("slot"), "slot", Reason.INVALID_RECORD),
    ("another namespace", put(namespace="prod"), "prod", Reason.NAMESPACE_MISMATCH),
    (
        "65 labels",
        lambda one: one.labels.update({f"l{n}": "" for n in range(65)}),
        "65",
        Reason.LIMIT_EXCEEDED,
    ),
    (
        "an address without a host",
        lambda one: one.addresses.add(port=1),
        "host",
        Reason.INVALID_RECORD,
    ),
    (
        "a port that is none",
        lambda one: one.addresses.add(host="h", port=70_000),
        "70000",
        Reason.INVALID_RECORD,
    ),
]


@pytest.mark.parametrize(
    ("twist", "value", "reason"), [bad[1:] for bad in BAD_RECORDS], ids=[b[0] for b in BAD_RECORDS]
)
def test_a_record_that_breaks_a_rule_is_named(
    twist: Callable[[v1.WorkerRecord], object], value: str, reason: Reason
) -> None:
    desk = Desk()

    with pytest.raises(BadRequest) as caught:
        desk.call("register", twisted(twist))

    assert caught.value.reason == reason
    assert value in caught.value.message
    assert caught.value.metadata
    assert desk.store == {}
    desk.register(record(0, 0))


@pytest.mark.parametrize(
    ("request_", "error", "word"),
    [
        pytest.param(v1.RegisterWorkersRequest(sequence=1), BadRequest, "empty", id="no record"),
        pytest.param(
            registration(*[record(0, 0)] * 65), LimitExceeded, "65", id="65 records in a batch"
        ),
        pytest.param(
            registration(record(0, 0), record(0, 0)), BadRecord, "twice", id="a slot twice"
        ),
        pytest.param(
            registration(record(0, 0), record(0, 1, generation="g2")),
            BadRecord,
            "g2",
            id="two generations in a batch",
        ),
        pytest.param(
            registration(record(0, 0), record(0, 1, engine_id="f")),
            BadRecord,
            "'f'",
            id="two engines in a batch",
        ),
        pytest.param(
            registration(*(record(0, tp, payload=bytes(512 * 1024)) for tp in range(2))),
            LimitExceeded,
            "1048576 bytes",
            id="over 1 MiB in a batch",
        ),
        pytest.param(registration(record(), sequence=0), BadRequest, "0", id="no sequence"),
        pytest.param(registration(record(), ttl_s=-1), BadRequest, "-1", id="a negative ttl"),
        pytest.param(registration(record(), key="a b"), BadRequest, "a b", id="a bad lease key"),
        pytest.param(
            registration(record(), lease_id="never"), NotFound, "never", id="a lease never granted"
        ),
        pytest.param(
            v1.RegisterWorkersRequest(records=[record()], sequence=1),
            BadRequest,
            "lease_key",
            id="no lease",
        ),
    ],
)
def test_a_registration_that_breaks_a_rule_is_named(
    request_: v1.RegisterWorkersRequest, error: type[RankbookError], word: str
) -> None:
    desk = Desk()

    with pytest.raises(error) as caught:
        desk.call("register", request_)

    assert word in caught.value.message
    assert desk.store == {}


def on_e(kind: Any, **fields: Any) -> Any:
    return kind(engine_id="e_dp0", **fields)


SLOTLESS = record(0, 0)
SLOTLESS.ClearField("slot")


@pytest.mark.parametrize(
    ("call", "request_", "reason", "word"),
    [
        ("begin_generation", on_e(v1.BeginGenerationRequest), Reason.INVALID_REQUEST, "generation"),
        (
            "begin_generation",
            v1.BeginGenerationRequest(engine_id="a/b", generation="g"),
            Reason.INVALID_REQUEST,
            "a/b",
        ),
        (
            "update",
            v1.UpdateWorkerRequest(record=SLOTLESS, withdraw_payload=True, sequence=2),
            Reason.INVALID_RECORD,
            "slot",
        ),
        (
            "update",
            v1.UpdateWorkerRequest(record=record(0, 0), sequence=0),
            Reason.INVALID_REQUEST,
            "sequence",
        ),
        (
            "update",
            v1.UpdateWorkerRequest(record=record(0, 0, boot_id="other"), sequence=2),
            Reason.WORKER_NOT_FOUND,
            "e_dp0.g1.0.0",
        ),
        (
            "update",
            v1.UpdateWorkerRequest(record=record(0, 0, engine_id="f"), sequence=2),
            Reason.ENGINE_NOT_FOUND,
            "f",
        ),
        (
            "deregister",
            on_e(v1.DeregisterRequest, generation="g1", boot_id="stranger", sequence=2),
            Reason.WORKER_NOT_FOUND,
            "stranger",
        ),
        (
            "deregister",
            on_e(v1.DeregisterRequest, generation="g1", boot_id="", sequence=2),
            Reason.INVALID_REQUEST,
            "boot_id",
        ),
        (
            "deregister",
            on_e(
                v1.DeregisterRequest,
                generation="g1",
                boot_id="e_dp0.g1.0.0",
                sequence=2,
                slots=[v1.Slot(tp_rank=9)],
            ),
            Reason.INVALID_RECORD,
            "9",
        ),
        (
            "seal",
            on_e(v1.SealEngineRequest, generation="g1", sequence=1),
            Reason.INVALID_RECORD,
            "boot_id",
        ),
        ("revoke_lease", v1.RevokeLeaseRequest(lease_id="x/y"), Reason.INVALID_REQUEST, "x/y"),
        ("revoke_lease", v1.RevokeLeaseRequest(lease_id="x"), Reason.LEASE_NOT_FOUND, "x"),
        ("drain", v1.DrainEngineRequest(engine_id="f"), Reason.ENGINE_NOT_FOUND, "f"),
        ("drain", v1.DrainEngineRequest(), Reason.INVALID_REQUEST, "engine_id"),
        ("drain", on_e(v1.DrainEngineRequest, reason="r" * 1025), Reason.LIMIT_EXCEEDED, "1025"),
        (
            "drain",
            on_e(v1.DrainEngineRequest, deadline=duration(-1)),
            Reason.INVALID_REQUEST,
            "-1",
        ),
        (
            "drain",
            on_e(v1.DrainEngineRequest, deadline=duration(2**62)),
            Reason.INVALID_REQUEST,
            "deadline",
        ),
        ("evict", v1.EvictEngineRequest(engine_id="f"), Reason.ENGINE_NOT_FOUND, "f"),
        ("evict", on_e(v1.EvictEngineRequest, epoch=7), Reason.EPOCH_FENCED, "7"),
        ("renew", v1.RenewLeasesRequest(), Reason.INVALID_REQUEST, "empty"),
        (
            "renew",
            v1.RenewLeasesRequest(leases=[v1.LeaseRenewal(lease_id="x")] * 1025),
            Reason.LIMIT_EXCEEDED,
            "1025",
        ),
        (
            "renew",
            v1.RenewLeasesRequest(leases=[v1.LeaseRenewal(lease_id="x", ttl=duration(-2))]),
            Reason.INVALID_REQUEST,
            "-2",
        ),
    ],
)
def test_a_call_that_breaks_a_rule_is_named(
    call: str, request_: Any, reason: Reason, word: str
) -> None:
    desk = Desk()
    desk.register(record(0, 0))
    before = desk.kept()

    with pytest.raises(RankbookError) as caught:
        getattr(desk.book, call)(request_, desk.now)

    assert caught.value.reason == reason
    assert word in caught.value.message
    assert desk.kept() == before
    desk.register(record(0, 1))


def seal_of_one(desk: Desk) -> v1.SealEngineRequest:
    desk.register(record(0, 0, pp_size=1, tp_size=1))
    return desk.seal_request()


def without_slot(request: v1.SealEngineRequest) -> None:
    request.slots[0].ClearField("slot")


def a_slot_twice(request: v1.SealEngineRequest) -> None:
    request.slots.add().CopyFrom(request.slots[0])


def outside(request: v1.SealEngineRequest) -> None:
    request.slots[0].slot.tp_rank = 5


def half_a_clock_pair(request: v1.SealEngineRequest) -> None:
    request.core.clock.local_s = 5.0


def a_clock_of_no_year(request: v1.SealEngineRequest) -> None:
    request.core.clock.registry_time.seconds = 2**60


def a_clock_error_below_zero(request: v1.SealEngineRequest) -> None:
    request.core.clock.registry_time.seconds = 1
    request.core.clock.error.nanos = -5


def a_clock_of_more_than_a_second_of_nanoseconds(request: v1.SealEngineRequest) -> None:
    request.core.clock.registry_time.nanos = 1_000_000_000


def a_clock_that_is_no_number(request: v1.SealEngineRequest) -> None:
    request.core.clock.registry_time.seconds = 1
    request.core.clock.local_s = float("nan")


@pytest.mark.parametrize(
    ("twist", "word"),
    [
        (without_slot, "absent"),
        (a_slot_twice, "twice"),
        (outside, "5"),
        (half_a_clock_pair, "registry_time"),
        (a_clock_of_no_year, "registry_time"),
        (a_clock_error_below_zero, "error"),
        (a_clock_of_more_than_a_second_of_nanoseconds, "registry_time"),
        (a_clock_that_is_no_number, "local_s"),
    ],
)
def test_a_seal_that_breaks_a_rule_is_named(
    twist: Callable[[v1.SealEngineRequest], None], word: str
) -> None:
    desk = Desk()
    request = seal_of_one(desk)
    twist(request)

    with pytest.raises(BadRequest) as caught:
        desk.call("seal", request)

    assert word in caught.value.message
    assert desk.state() == "COMPLETE"


def test_an_engine_over_64_mib_is_refused_and_one_that_shrinks_is_not() -> None:
    desk = Desk()
    half_mib = bytes(512 * 1024 - 400)
    many = {"pp_size": 1, "tp_size": 256}
    for tp in range(128):
        desk.quick("register", registration(record(0, tp, payload=half_mib, **many)))
    one_more = registration(record(0, 128, payload=half_mib, **many))

    with pytest.raises(LimitExceeded) as caught:
        desk.quick("register", one_more)

    assert caught.value.metadata["bound"] == str(64 * 1024 * 1024)
    desk.quick("register", registration(record(0, 0, payload=b"less", **many), sequence=2))
    desk.quick("register", one_more)
