from __future__ import annotations

import json
from typing import Any

import pytest

from rankbook.cli.records import by_start, read_records
from rankbook.errors import BadRecord, LimitExceeded, Reason


def record(**changes: Any) -> dict[str, Any]:
    return {
        "group": "g",
        "engine_id": "e",
        "generation": "t1",
        "role": "PRODUCER",
        "layout": {"pp_size": 2, "tp_size": 1, "num_layers": 4},
        "slot": {"pp_rank": 0, "tp_rank": 0},
        "layers": {"start_layer": 0, "end_layer": 2},
        "handshake": {"format": "f", "version": 1, "payload": "aGk="},
        **changes,
    }


def read(text: str) -> list[Any]:
    return list(read_records(text, name="r.json", namespace="default", boot_id="boot-0"))


def test_one_record_a_list_and_json_lines_read_alike() -> None:
    first = record()
    second = record(slot={"pp_rank": 1, "tp_rank": 0}, layers={"start_layer": 2, "end_layer": 4})
    lines = f"{json.dumps(first)}\n\n{json.dumps(second)}\n"
    assert read(json.dumps([first, second])) == read(lines)
    assert read(json.dumps(first, indent=2)) == read(lines)[:1]
    assert read(json.dumps(first)) == read(lines)[:1]


def test_a_boot_id_is_filled_in_only_where_there_is_none() -> None:
    own = record(process={"boot_id": "mine"})
    both = read(json.dumps([record(), own]))
    assert [one.process.boot_id for one in both] == ["boot-0", "mine"]


def test_an_unknown_field_is_named_with_its_path() -> None:
    bad = record(layers={"start_layer": 0, "end_layer": 2, "lenght": 3})
    with pytest.raises(BadRecord, match=r"records\[1\]\.layers\.lenght is no field") as caught:
        read(json.dumps([record(), bad]))
    assert caught.value.reason is Reason.UNKNOWN_FIELD
    assert caught.value.metadata["field"] == "records[1].layers.lenght"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slot": {"pp_rank": 2, "tp_rank": 0}}, "inside the grid"),
        ({"engine_id": ""}, "1 to 253 characters"),
        ({"engine_id": "a/b"}, "1 to 253 characters"),
        ({"engine_id": "x" * 300}, "1 to 253 characters"),
        ({"layers": {"start_layer": 3, "end_layer": 2}}, "not below start_layer"),
        ({"namespace": "other"}, "namespace of the record"),
        ({"role": "PREFILL"}, "it takes one of"),
        ({"handshake": {"format": "f", "payload": "not base64!"}}, "base64"),
    ],
)
def test_a_value_that_breaks_a_rule_is_refused_before_anything_is_sent(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadRecord, match=words):
        read(json.dumps(record(**changes)))


def test_a_payload_over_the_limit_is_refused() -> None:
    payload = "A" * (4 * (512 * 1024 // 3 + 2))
    with pytest.raises(LimitExceeded, match="524288"):
        read(json.dumps(record(handshake={"format": "f", "payload": payload})))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no record"),
        (" \n\n", "holds no record"),
        ("[]", "holds no record"),
        ('{"group": "g",\n "engine_id": }', "line 2 column 15 is no JSON"),
        (f"{json.dumps(record())}\n{{oops\n", "line 2 column 2 is no JSON"),
        ("[" * 100_000, "nested too deep"),
        ("3", "it takes an object"),
    ],
)
def test_what_is_no_record_file_is_refused_with_the_line(text: str, words: str) -> None:
    with pytest.raises(BadRecord, match=words):
        read(text)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ("group", ""),
        ("engine_id", ""),
        ("generation", ""),
        ("role", ""),
        ("handshake", ""),
        ("layout", "pp_size"),
        ("layout", "num_layers"),
        ("slot", "pp_rank"),
        ("slot", "tp_rank"),
        ("layers", "start_layer"),
        ("layers", "end_layer"),
    ],
)
@pytest.mark.parametrize("left_out", [True, False])
def test_a_rank_or_a_layer_that_a_file_forgets_is_never_taken_for_zero(
    part: str, field: str, left_out: bool
) -> None:
    bad = record()
    inside, key = (bad[part], field) if field else (bad, part)
    del inside[key]
    if not left_out:
        inside[key] = None
    path = f"{part}.{field}" if field else part
    with pytest.raises(BadRecord, match=f"does not state {path}") as caught:
        read(json.dumps([record(), bad]))
    assert caught.value.metadata["record"] == "records[1]"
    assert caught.value.metadata["field"] == path


def test_a_record_of_a_list_that_breaks_a_rule_is_named() -> None:
    with pytest.raises(BadRecord, match=r"records\[1\]: layers.end_layer is 9"):
        read(json.dumps([record(), record(layers={"start_layer": 2, "end_layer": 9})]))


def test_a_field_that_stands_twice_is_refused() -> None:
    with pytest.raises(BadRecord, match="pp_rank stands twice"):
        read(json.dumps(record()).replace('"pp_rank": 0', '"pp_rank": 0, "pp_rank": 1'))


def test_two_generations_of_one_engine_in_one_file_are_refused() -> None:
    with pytest.raises(BadRecord, match="two generations of e, t1 and t2"):
        read(json.dumps([record(), record(generation="t2")]))


def test_values_are_shown_as_the_file_writes_them() -> None:
    with pytest.raises(BadRecord, match="pp_rank is true: it takes a whole number"):
        read(json.dumps(record(slot={"pp_rank": True, "tp_rank": 0})))
    with pytest.raises(BadRecord, match=r"it takes one of BOTH, CONSUMER, PRODUCER$"):
        read(json.dumps(record(role="producer")))


def test_records_are_grouped_by_start_in_order() -> None:
    second = record(slot={"pp_rank": 1, "tp_rank": 0})
    groups = by_start(read(json.dumps([record(), record(engine_id="f"), second])))
    assert [(g[0].engine_id, len(g)) for g in groups] == [("e", 2), ("f", 1)]
