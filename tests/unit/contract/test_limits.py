"""Limits are written once, hold at the bound, and name what broke them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankbook import limits, v1
from rankbook.errors import BadRecord, BadRequest, LimitExceeded


def whole(**layout: int) -> v1.WorkerRecord:
    return v1.WorkerRecord(
        group="g",
        engine_id="e",
        generation="t",
        role=v1.ROLE_BOTH,
        layout=v1.Layout(**{"pp_size": 1, "tp_size": 1, "num_layers": 4, **layout}),
        slot=v1.Slot(),
        layers=v1.Layers(end_layer=4),
        handshake=v1.Handshake(format="f"),
        process=v1.Process(boot_id="b"),
    )


def test_the_numbers_are_those_of_the_contract() -> None:
    assert limits.MAX_PAYLOAD_BYTES == 524_288
    assert limits.MAX_ID_CHARS == 253
    assert limits.MAX_LABELS == 64
    assert (limits.MAX_BATCH_RECORDS, limits.MAX_BATCH_BYTES) == (64, 1_048_576)
    assert limits.MAX_GRID_SLOTS == 65_536
    assert limits.MAX_ENGINE_BYTES == 67_108_864
    assert (limits.MIN_TTL_S, limits.DEFAULT_TTL_S, limits.MAX_TTL_S) == (2, 10, 300)


@pytest.mark.parametrize("value", ["a", "A.b_c-9", "x" * 253, ".", "-"])
def test_an_id_of_the_allowed_characters_is_given_back(value: str) -> None:
    assert limits.check_id("engine_id", value) == value


@pytest.mark.parametrize(
    "value", ["", "x" * 254, "a/b", "a b", "a\n", "\n", "é", "a\0", "a:b", "\u202e", "\uff41"]
)
def test_any_other_id_is_refused_by_field_value_and_rule(value: str) -> None:
    with pytest.raises(BadRequest) as caught:
        limits.check_id("engine_id", value)

    assert caught.value.metadata["field"] == "engine_id"
    assert "253" in caught.value.metadata["rule"]
    assert len(caught.value.message) < 300


@given(value=st.text(max_size=300))
def test_what_passes_as_an_id_is_safe_in_a_key(value: str) -> None:
    try:
        limits.check_id("x", value)
    except BadRequest:
        return
    assert value.isascii()
    assert value.isprintable()
    assert not set(value) & set("/ ")


def test_an_empty_namespace_is_the_default_one() -> None:
    assert limits.check_namespace("") == "default"
    assert limits.check_namespace("prod") == "prod"


def payload(size: int) -> v1.WorkerRecord:
    record = whole()
    record.handshake.payload = bytes(size)
    return record


def labels(count: int) -> v1.WorkerRecord:
    record = whole()
    record.labels.update({f"l{n}": "v" for n in range(count)})
    return record


def addresses(count: int) -> v1.WorkerRecord:
    record = whole()
    for _ in range(count):
        record.addresses.add(host="h")
    return record


def names(count: int) -> v1.WorkerRecord:
    record = whole()
    record.layers.names.extend(["n"] * count)
    return record


def extra(count: int) -> v1.WorkerRecord:
    record = whole()
    for _ in range(count):
        record.layers.extra.add(index=4, kind=v1.LAYER_KIND_DRAFT)
    return record


def factors(count: int) -> v1.WorkerRecord:
    record = whole()
    record.compat.factors.update({f"f{n}": "v" for n in range(count)})
    return record


@pytest.mark.parametrize(
    ("make", "bound"),
    [
        (payload, 524_288),
        (labels, 64),
        (addresses, 16),
        (names, 4096),
        (extra, 256),
        (factors, 64),
    ],
)
def test_a_value_at_the_bound_passes_and_one_more_is_refused_with_both(
    make: Callable[[int], Any], bound: int
) -> None:
    limits.check_record(make(bound), "default")

    with pytest.raises(LimitExceeded) as caught:
        limits.check_record(make(bound + 1), "default")

    assert caught.value.metadata["bound"] == str(bound)
    assert caught.value.metadata["value"] == str(bound + 1)


def test_a_grid_at_the_bound_passes_and_one_over_it_is_refused() -> None:
    limits.check_record(whole(pp_size=256, tp_size=256), "default")
    limits.check_record(whole(pp_size=65_536), "default")

    for sizes in ({"pp_size": 65_537}, {"pp_size": 256, "tp_size": 257}, {"pcp_size": 65_537}):
        with pytest.raises(BadRequest) as caught:
            limits.check_record(whole(**sizes), "default")
        assert "65536" in caught.value.message


def test_context_parallel_sizes_of_zero_mean_one() -> None:
    assert limits.grid_slots(v1.Layout(pp_size=2, tp_size=3)) == 6
    assert limits.grid_slots(v1.Layout(pp_size=2, tp_size=3, pcp_size=4, dcp_size=3)) == 24


@given(
    slot=st.builds(
        v1.Slot, pp_rank=st.integers(0, 5), pcp_rank=st.integers(0, 5), tp_rank=st.integers(0, 5)
    ),
    layout=st.builds(
        v1.Layout, pp_size=st.integers(1, 5), pcp_size=st.integers(0, 5), tp_size=st.integers(1, 5)
    ),
)
def test_a_slot_passes_just_when_it_is_inside_the_grid(slot: v1.Slot, layout: v1.Layout) -> None:
    inside = (
        slot.pp_rank < layout.pp_size
        and slot.pcp_rank < max(layout.pcp_size, 1)
        and slot.tp_rank < layout.tp_size
    )
    try:
        limits.check_slot(slot, layout)
    except BadRequest:
        assert not inside
    else:
        assert inside


def test_a_check_never_changes_what_it_checks() -> None:
    record = whole()
    before = record.SerializeToString(deterministic=True)
    limits.check_batch([record], "default")

    assert record.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    ("spelled", "form"),
    [
        ("node-7", "node-7"),
        ("Node-7.Example.ORG", "node-7.example.org"),
        ("10.0.0.5", "10.0.0.5"),
        ("[2001:DB8:0::1]", "2001:db8::1"),
        ("::FFFF:10.0.0.5", "::ffff:10.0.0.5"),
        ("::ffff:a00:5", "::ffff:10.0.0.5"),
        ("fe80::1%Eth0", "fe80::1%Eth0"),
    ],
)
def test_a_host_has_one_form(spelled: str, form: str) -> None:
    assert limits.check_host("host", spelled) == form
    assert limits.check_host("host", form) == form


@pytest.mark.parametrize(
    "spelled",
    [
        "",
        "[]",
        "[node]",
        "a b",
        "a\n",
        "a:1",
        "[::1]:1",
        "tcp://a",
        "a/b",
        "a@b",
        "::1%",
        "1::2::3",
    ],
)
def test_what_is_no_host_is_refused_by_field_value_and_rule(spelled: str) -> None:
    with pytest.raises(BadRecord) as caught:
        limits.check_host("addresses.host", spelled)
    assert caught.value.metadata["field"] == "addresses.host"
    assert caught.value.metadata["value"] == repr(spelled)
    assert "a name or an IP literal" in caught.value.metadata["rule"]
