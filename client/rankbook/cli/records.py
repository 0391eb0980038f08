"""Reading record files: one record, a list, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rankbook import convert, limits, v1
from rankbook.errors import BadRecord

__all__ = ["by_start", "read_records"]


def read_records(text: str, *, name: str, namespace: str, boot_id: str) -> list[v1.WorkerRecord]:
    """Reads records and checks each whole.

    Args:
        text: Content of the file.
        name: Name of the file, for errors.
        namespace: Namespace of the call.
        boot_id: Fills a record's `process.boot_id` where it has none.

    Raises:
        BadRecord: The text is no JSON, a field is unknown, or a value breaks a
            rule; the message names the record, the field, the value, the rule.
        LimitExceeded: A value is over its limit.
    """
    values = _values(text, name)
    if not values:
        raise BadRecord(
            f"{name} holds no record: give one record, a list of them, or one a line",
            metadata={"file": name, "field": "records", "value": 0, "rule": "1 or more"},
        )
    single = len(values) == 1
    records = []
    for number, value in enumerate(values):
        record = convert.from_json(value, v1.WorkerRecord, "" if single else f"records[{number}]")
        if not record.process.boot_id:
            record.process.boot_id = boot_id
        limits.check_record(record, namespace)
        records.append(record)
    return records


def _values(text: str, name: str) -> list[Any]:
    try:
        value = json.loads(text)
    except ValueError as whole:
        lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        if len(lines) < 2:
            raise _no_json(name, whole, getattr(whole, "lineno", 1)) from None
        values = []
        for number, line in lines:
            try:
                values.append(json.loads(line))
            except ValueError as error:
                # An indented single record fails on its first line; its own error says more.
                first = whole if number == lines[0][0] else error
                raise _no_json(
                    name, first, getattr(first, "lineno", 1) if first is whole else number
                ) from None
        return values
    return value if isinstance(value, list) else [value]


def _no_json(name: str, error: ValueError, line: int) -> BadRecord:
    return BadRecord(
        f"{name} line {line} is no JSON: {error}",
        metadata={"file": name, "line": line, "rule": "one record, a list, or JSON lines"},
    )


def by_start(records: Sequence[v1.WorkerRecord]) -> list[list[v1.WorkerRecord]]:
    """The records grouped by engine and generation, in order of first appearance."""
    groups: dict[tuple[str, str], list[v1.WorkerRecord]] = {}
    for record in records:
        groups.setdefault((record.engine_id, record.generation), []).append(record)
    return list(groups.values())
