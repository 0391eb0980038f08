"""Message, dataclass and JSON are one thing in three forms."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.contract.messages import messages

from rankbook import model, v1
from rankbook.convert import (
    duration,
    from_json,
    seconds,
    timestamp,
    to_json,
    to_message,
    to_model,
    without_payload,
)
from rankbook.errors import BadRecord, Reason

RECORD_PARTS = frozenset({"layout", "slot", "layers", "process"})
FEW = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize(
    "kind", [v1.WorkerRecord, v1.CoreRecord, v1.Engine, v1.Topology, v1.Plan, v1.WatchEvent]
)
@FEW
@given(data=st.data())
def test_json_gives_back_the_message_it_was_made_from(kind: Any, data: st.DataObject) -> None:
    message = data.draw(messages(kind))

    text = json.dumps(to_json(message))

    assert from_json(json.loads(text), kind) == message


@FEW
@given(message=messages(v1.WorkerRecord, RECORD_PARTS))
def test_a_record_survives_the_way_through_its_dataclass(message: v1.WorkerRecord) -> None:
    record = to_model(message, model.WorkerRecord)

    assert to_message(record, v1.WorkerRecord) == message
    assert to_model(to_message(record, v1.WorkerRecord), model.WorkerRecord) == record


@FEW
@given(message=messages(v1.Engine, frozenset({"layout"})))
def test_an_engine_survives_the_way_through_its_dataclass(message: v1.Engine) -> None:
    if message.HasField("core"):
        # The book keeps no core without these.
        message.core.process.SetInParent()
        if message.core.HasField("clock"):
            message.core.clock.registry_time.SetInParent()

    engine = to_model(message, model.Engine)

    assert to_model(to_message(engine, v1.Engine), model.Engine) == engine


def test_json_writes_zero_values_names_of_enums_and_base64() -> None:
    record = v1.WorkerRecord(
        engine_id="e",
        role=v1.ROLE_PRODUCER,
        slot=v1.Slot(),
        kv=v1.KvCache(num_blocks=2**63),
        handshake=v1.Handshake(format="f", payload=b"\x00\xff"),
    )

    out = to_json(record)

    assert out["role"] == "PRODUCER"
    assert out["dp_rank"] == 0
    assert out["slot"] == {"pp_rank": 0, "pcp_rank": 0, "tp_rank": 0}
    assert out["kv"]["num_blocks"] == 2**63
    assert out["handshake"] == {"format": "f", "version": 0, "payload": "AP8="}
    assert out["labels"] == {}
    assert "model" not in out


def test_an_enum_value_of_a_later_version_is_shown_by_number() -> None:
    assert to_json(v1.WorkerRecord(role=77))["role"] == 77  # type: ignore[arg-type]


def test_a_payload_can_be_shown_by_its_size() -> None:
    for size in range(7):
        topology = v1.Topology(
            workers=[v1.WorkerRecord(handshake=v1.Handshake(format="f", payload=bytes(size)))]
        )
        (worker,) = without_payload(to_json(topology))["workers"]
        assert worker["handshake"] == {"format": "f", "version": 0, "payload_bytes": size}


BAD = [
    ({"engine": "e"}, "engine", "known are"),
    ({"slot": {"pp": 1}}, "slot.pp", "known are"),
    ({"layers": {"extra": [{"index": 1}, {"kin": 1}]}}, "layers.extra[1].kin", "known are"),
    ({"engine_id": 7}, "engine_id", "a string"),
    ({"dp_rank": "1"}, "dp_rank", "a whole number from 0 to 4294967295"),
    ({"dp_rank": 1.5}, "dp_rank", "a whole number"),
    ({"dp_rank": True}, "dp_rank", "a whole number"),
    ({"dp_rank": -1}, "dp_rank", "a whole number from 0"),
    ({"dp_rank": 2**32}, "dp_rank", "to 4294967295"),
    ({"kv": {"num_blocks": 2**64}}, "kv.num_blocks", "to 18446744073709551615"),
    ({"role": "PREFILL"}, "role", "BOTH, CONSUMER, PRODUCER"),
    ({"role": 1}, "role", "one of"),
    ({"role": ["PRODUCER"]}, "role", "one of"),
    ({"model": {"is_mla": 1}}, "model.is_mla", "true or false"),
    ({"model": []}, "model", "an object"),
    ({"labels": []}, "labels", "an object of strings"),
    ({"labels": {"a": 1}}, "labels.a", "a string"),
    ({"addresses": {}}, "addresses", "a list"),
    ({"addresses": [1]}, "addresses[0]", "an object"),
    ({"addresses": [None]}, "addresses[0]", "an object"),
    ({"layers": {"names": [1]}}, "layers.names[0]", "a string"),
    ({"layers": {"names": [None]}}, "layers.names[0]", "a string"),
    ({"handshake": {"payload": "?"}}, "handshake.payload", "base64"),
    ({"handshake": {"payload": "é"}}, "handshake.payload", "base64"),
    ({"handshake": {"payload": 5}}, "handshake.payload", "base64"),
    ({"engine_id": "\ud800"}, "engine_id", "a string"),
    ({"labels": {"\ud800": "x"}}, "labels", "a string"),
    ({"labels": {"x": "\ud800"}}, "labels.x", "a string"),
    ("text", "WorkerRecord", "an object"),
    (None, "WorkerRecord", "an object"),
]


@pytest.mark.parametrize(
    ("value", "path", "rule"), BAD, ids=[f"{b[1]}-{n}" for n, b in enumerate(BAD)]
)
def test_a_value_that_is_not_what_its_field_takes_is_named(
    value: Any, path: str, rule: str
) -> None:
    with pytest.raises(BadRecord) as caught:
        from_json(value, v1.WorkerRecord)

    assert caught.value.message.startswith(path)
    assert rule in caught.value.message
    expected = Reason.UNKNOWN_FIELD if "known are" in rule else Reason.INVALID_RECORD
    assert caught.value.reason == expected
    assert caught.value.metadata["field"].startswith(path)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"clock": {"registry_time": "yesterday"}}, "clock.registry_time"),
        ({"clock": {"registry_time": 5}}, "clock.registry_time"),
        ({"clock": {"error": "1s"}}, "clock.error"),
        ({"clock": {"error": 1e300}}, "clock.error"),
        ({"clock": {"error": float("nan")}}, "clock.error"),
        ({"clock": {"error": float("inf")}}, "clock.error"),
        ({"clock": {"local_s": "5"}}, "clock.local_s"),
        ({"clock": {"local_s": 10**400}}, "clock.local_s"),
        ({"clock": {"local_s": float("nan")}}, "clock.local_s"),
    ],
)
def test_a_time_that_is_none_is_named(value: Any, path: str) -> None:
    with pytest.raises(BadRecord) as caught:
        from_json(value, v1.CoreRecord)

    assert caught.value.metadata["field"] == path


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([f.name for f in v1.WorkerRecord.DESCRIPTOR.fields] + ["x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(value=JSON)
def test_any_json_is_a_record_or_a_typed_error(value: Any) -> None:
    try:
        message = from_json(value, v1.WorkerRecord)
    except BadRecord:
        return
    assert from_json(to_json(message), v1.WorkerRecord) == message


@given(millis=st.integers(-(10**12), 10**12))
def test_a_duration_is_its_seconds_both_ways(millis: int) -> None:
    message = duration(millis / 1000)

    assert seconds(message) == pytest.approx(millis / 1000, abs=1e-6)
    assert message.seconds * message.nanos >= 0
    assert abs(message.nanos) < 10**9


@given(moment=st.datetimes(dt.datetime(1970, 1, 1), dt.datetime(9999, 1, 1)))
def test_an_instant_is_itself_to_the_microsecond(moment: dt.datetime) -> None:
    unix_s = moment.replace(tzinfo=dt.UTC).timestamp()

    message = timestamp(unix_s)

    assert message.seconds + message.nanos / 1e9 == pytest.approx(unix_s, abs=1e-5)
    assert 0 <= message.nanos < 10**9
