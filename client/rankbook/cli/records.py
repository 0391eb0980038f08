"""Reading record files: one record, a list, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rankbook import convert, limits, v1
from rankbook.errors import BadRecord, BadRequest

__all__ = ["by_start", "read_records"]

_REQUIRED = (
    "group",
    "engine_id",
    "generation",
    "role",
    "layout.pp_size",
    "layout.tp_size",
    "layout.num_layers",
    "slot.pp_rank",
    "slot.tp_rank",
    "layers.start_layer",
    "layers.end_layer",
    "handshake",
)
"""What a record in a file states. On the wire a rank or a layer that is zero and
one that was forgotten look alike; in a file they do not."""


def read_records(text: str, *, name: str, namespace: str, boot_id: str) -> list[v1.WorkerRecord]:
    """Reads records and checks each whole.

    Args:
        text: Content of the file.
        name: Name of the file, for errors.
        namespace: Namespace of the call.
        boot_id: Fills a record's `process.boot_id` where it has none.

    Raises:
        BadRecord: The text is no JSON, a field is unknown, missing or there
            twice, a value breaks a rule, or two records are of two generations
            of one engine; the message names the record, the field, the value,
            the rule.
        LimitExceeded: A value is over its limit.
    """
    values = _values(text, name)
    if not values:
        raise BadRecord(
            f"{name} holds no record: give one record, a list of them, or one a line",
            metadata={"file": name, "field": "records", "value": 0, "rule": "1 or more"},
        )
    single = len(values) == 1
    records: list[v1.WorkerRecord] = []
    for number, value in enumerate(values):
        where = "" if single else f"records[{number}]"
        record = convert.from_json(value, v1.WorkerRecord, where)
        _check_stated(value, where, name)
        if not record.process.boot_id:
            record.process.boot_id = boot_id
        try:
            limits.check_record(record, namespace)
        except BadRequest as error:
            if single:
                raise
            raise type(error)(
                f"{where}: {error.message}",
                reason=error.reason,
                metadata={**error.metadata, "record": where},
            ) from None
        records.append(record)
    _check_starts(records, name)
    return records


def _check_stated(value: Mapping[str, Any], where: str, name: str) -> None:
    missing = []
    for path in _REQUIRED:
        part, _, field = path.partition(".")
        found = value.get(part)
        if found is not None and field:
            found = found.get(field)
        if found is None:
            missing.append(path)
    if missing:
        lead = f"{where} of {name}" if where else name
        raise BadRecord(
            f"{lead} does not state {', '.join(missing)}: a record states each, also a zero",
            metadata={"file": name, "record": where, "field": missing[0], "missing": missing},
        )


def _check_starts(records: Sequence[v1.WorkerRecord], name: str) -> None:
    generations: dict[str, str] = {}
    for record in records:
        first = generations.setdefault(record.engine_id, record.generation)
        if first != record.generation:
            raise BadRecord(
                f"{name} holds two generations of {record.engine_id}, {first} and "
                f"{record.generation}: one would retire the other; publish one start",
                metadata={
                    "file": name,
                    "field": "generation",
                    "engine_id": record.engine_id,
                    "value": record.generation,
                    "rule": f"{first}, as in the records before",
                },
            )


def _values(text: str, name: str) -> list[Any]:
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        return []
    try:
        value = _load(text)
    except json.JSONDecodeError as whole:
        if len(lines) < 2:
            raise _no_json(name, whole, whole.lineno) from None
        values = []
        for number, line in lines:
            try:
                values.append(_load(line))
            except json.JSONDecodeError as error:
                # An indented single record fails on its first line; its own error says more.
                if number == lines[0][0]:
                    raise _no_json(name, whole, whole.lineno) from None
                raise _no_json(name, error, number) from None
        return values
    return value if isinstance(value, list) else [value]


def _load(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise json.JSONDecodeError("nested too deep", text, 0) from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise BadRecord(
                f"{key} stands twice in one object: keep one",
                metadata={"field": key, "rule": "each field once"},
            )
        found[key] = value
    return found


def _no_json(name: str, error: json.JSONDecodeError, line: int) -> BadRecord:
    return BadRecord(
        f"{name} line {line} column {error.colno} is no JSON: {error.msg}",
        metadata={
            "file": name,
            "line": line,
            "column": error.colno,
            "rule": "one record, a list, or JSON lines",
        },
    )


def by_start(records: Sequence[v1.WorkerRecord]) -> list[list[v1.WorkerRecord]]:
    """The records grouped by engine and generation, in order of first appearance."""
    groups: dict[tuple[str, str], list[v1.WorkerRecord]] = {}
    for record in records:
        groups.setdefault((record.engine_id, record.generation), []).append(record)
    return list(groups.values())
