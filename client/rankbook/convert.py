"""Between the three forms of one thing: protobuf message, dataclass, JSON.

All three use the field names of proto/. JSON writes zero values, 64-bit
integers as numbers, enums by name without their prefix ("PRODUCER"), payloads
in base64, durations in seconds and instants as RFC 3339 text. Both directions
walk the message's descriptor, so a new field needs no line here. Pure and
thread-safe.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import datetime as dt
import enum
import json
import math
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp

from rankbook import model
from rankbook.errors import BadRecord, Reason

__all__ = [
    "duration",
    "from_json",
    "seconds",
    "timestamp",
    "to_json",
    "to_message",
    "to_model",
    "without_payload",
]

M = TypeVar("M", bound=Message)
T = TypeVar("T")
_F = FieldDescriptor
_MAX_DURATION_S = 315_576_000_000
"""Protobuf's own bound, 10,000 years."""
_INTEGERS = {_F.CPPTYPE_INT32, _F.CPPTYPE_INT64, _F.CPPTYPE_UINT32, _F.CPPTYPE_UINT64}
_BOUNDS = {
    _F.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _F.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _F.CPPTYPE_UINT32: (0, 2**32 - 1),
    _F.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def duration(seconds: float) -> Duration:
    """A Duration of so many seconds."""
    message = Duration()
    whole = math.floor(seconds)
    message.seconds, message.nanos = whole, round((seconds - whole) * 1e9)
    if message.nanos >= 10**9:
        message.seconds, message.nanos = whole + 1, 0
    if message.seconds < 0 and message.nanos:
        message.seconds, message.nanos = message.seconds + 1, message.nanos - 10**9
    return message


def seconds(message: Duration) -> float:
    """A Duration in seconds; negative when it is."""
    return message.seconds + message.nanos / 1e9


def timestamp(unix_s: float) -> Timestamp:
    """A Timestamp of so many seconds since 1970."""
    whole = math.floor(unix_s)
    return Timestamp(seconds=whole, nanos=min(int((unix_s - whole) * 1e9), 999_999_999))


def _timestamp_of(moment: dt.datetime) -> Timestamp:
    # Whole numbers all the way: a float of today's seconds is off by 100 ns.
    passed = moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    return Timestamp(
        seconds=passed.days * 86_400 + passed.seconds, nanos=passed.microseconds * 1000
    )


# ---------------------------------------------------------------- descriptors


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """What both directions need of one field, read once a message type."""

    name: str
    cpp_type: int
    is_bytes: bool
    repeated: bool
    is_map: bool
    has_presence: bool
    message_name: str
    new: Any
    enum_names: Mapping[int, str]
    enum_numbers: Mapping[str, int]


def _is_repeated(field: Any) -> bool:
    # `label` is deprecated from protobuf 6.31 on and `is_repeated` is missing before it.
    try:
        return bool(field.is_repeated)
    except AttributeError:
        return bool(field.label == _F.LABEL_REPEATED)


_known: dict[type[Message], tuple[_Field, ...]] = {}


def _fields(kind: type[Message]) -> tuple[_Field, ...]:
    if kind not in _known:
        _known[kind] = _read_fields(kind)
    return _known[kind]


def _read_fields(kind: type[Message]) -> tuple[_Field, ...]:
    found = []
    for field in kind.DESCRIPTOR.fields:
        child = field.message_type
        names: dict[int, str] = {}
        if field.enum_type is not None:
            zero = field.enum_type.values_by_number[0].name
            prefix = zero.removesuffix("UNSPECIFIED")
            names = {
                number: value.name.removeprefix(prefix)
                for number, value in field.enum_type.values_by_number.items()
            }
        found.append(
            _Field(
                name=field.name,
                cpp_type=field.cpp_type,
                is_bytes=field.type == _F.TYPE_BYTES,
                repeated=_is_repeated(field),
                is_map=child is not None and child.GetOptions().map_entry,
                has_presence=field.has_presence,
                message_name=child.full_name if child is not None else "",
                new=GetMessageClass(cast(Any, child)) if child is not None else None,
                enum_names=names,
                enum_numbers={name: number for number, name in names.items()},
            )
        )
    return tuple(found)


# ----------------------------------------------------------------------- JSON


def to_json(message: Message) -> dict[str, Any]:
    """The message as JSON values; message fields that are absent are left out."""
    out: dict[str, Any] = {}
    for field in _fields(type(message)):
        value = getattr(message, field.name)
        if field.is_map:
            out[field.name] = dict(value)
        elif field.repeated:
            out[field.name] = [_json_value(field, item) for item in value]
        elif field.has_presence and not message.HasField(field.name):
            continue
        else:
            out[field.name] = _json_value(field, value)
    return out


def _json_value(field: _Field, value: Any) -> Any:
    if field.message_name == "google.protobuf.Duration":
        return seconds(value)
    if field.message_name == "google.protobuf.Timestamp":
        return _instant(value).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if field.cpp_type == _F.CPPTYPE_MESSAGE:
        return to_json(value)
    if field.enum_names:
        return field.enum_names.get(value, value)
    if field.is_bytes:
        return base64.b64encode(value).decode("ascii")
    return value


def from_json(value: Any, kind: type[M], where: str = "") -> M:
    """Builds a message from JSON values.

    Args:
        value: What `json.loads` gave.
        kind: Class of the message.
        where: Path to `value`, for the error.

    Raises:
        BadRecord: A field is unknown (UNKNOWN_FIELD), or a value is not what
            its field takes (INVALID_RECORD).
    """
    if not isinstance(value, dict):
        raise _wrong(where or kind.DESCRIPTOR.name, value, "an object")
    known = {field.name: field for field in _fields(kind)}
    message = kind()
    for name, item in value.items():
        path = f"{where}.{name}" if where else str(name)
        if name not in known:
            raise BadRecord(
                f"{path} is no field of {kind.DESCRIPTOR.name}; known are "
                f"{', '.join(sorted(known))}",
                reason=Reason.UNKNOWN_FIELD,
                metadata={"field": path, "message": kind.DESCRIPTOR.name},
            )
        field = known[name]
        if item is None:
            continue
        if field.is_map:
            if not isinstance(item, dict):
                raise _wrong(path, item, "an object of strings")
            for key, text in item.items():
                getattr(message, name)[_text(key, path)] = _text(text, f"{path}.{key}")
        elif field.repeated:
            if not isinstance(item, list):
                raise _wrong(path, item, "a list")
            getattr(message, name).extend(
                _read(field, part, f"{path}[{index}]") for index, part in enumerate(item)
            )
        elif field.cpp_type == _F.CPPTYPE_MESSAGE:
            getattr(message, name).CopyFrom(_read(field, item, path))
        else:
            setattr(message, name, _read(field, item, path))
    return message


def _read(field: _Field, value: Any, path: str) -> Any:
    if field.message_name == "google.protobuf.Duration":
        if not _is_number(value) or not abs(value) <= _MAX_DURATION_S:
            raise _wrong(path, value, f"a number of seconds, at most {_MAX_DURATION_S}")
        return duration(value)
    if field.message_name == "google.protobuf.Timestamp":
        try:
            moment = dt.datetime.fromisoformat(value)
        except (TypeError, ValueError):
            moment = None
        # Without an offset it would be this machine's own time of day.
        if moment is None or moment.tzinfo is None:
            raise _wrong(path, value, "an RFC 3339 instant")
        return _timestamp_of(moment)
    if field.cpp_type == _F.CPPTYPE_MESSAGE:
        return from_json(value, field.new, path)
    if field.enum_names:
        number = field.enum_numbers.get(value) if isinstance(value, str) else None
        if number is None:
            named = sorted(name for name, one in field.enum_numbers.items() if one)
            raise _wrong(path, value, "one of " + ", ".join(named))
        return number
    if field.is_bytes:
        try:
            return base64.b64decode(value, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise _wrong(path, value, "base64 text") from None
    if field.cpp_type in _INTEGERS:
        low, high = _BOUNDS[field.cpp_type]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _wrong(path, value, f"a whole number from {low} to {high}")
        return value
    if field.cpp_type == _F.CPPTYPE_BOOL:
        if not isinstance(value, bool):
            raise _wrong(path, value, "true or false")
        return value
    if field.cpp_type in (_F.CPPTYPE_DOUBLE, _F.CPPTYPE_FLOAT):
        if not _is_number(value):
            raise _wrong(path, value, "a finite number")
        return float(value)
    return _text(value, path)


def _is_number(value: Any) -> bool:
    """A finite number that a double can hold; Python's own JSON reads others too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise _wrong(path, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(path, value, "a string of Unicode characters") from None
    return value


def _wrong(path: str, value: object, rule: str) -> BadRecord:
    # As it stands in the file: true and null, not True and None.
    shown = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    shown = shown if len(shown) <= 64 else f"{shown[:64]}... ({len(shown)} chars)"
    return BadRecord(
        f"{path} is {shown}: it takes {rule}",
        metadata={"field": path, "value": shown, "rule": rule},
    )


def without_payload(value: Any) -> Any:
    """JSON values with every handshake payload replaced by its size in bytes."""
    if isinstance(value, list):
        return [without_payload(item) for item in value]
    if not isinstance(value, dict):
        return value
    out = {key: without_payload(item) for key, item in value.items()}
    payload = out.get("payload")
    if isinstance(payload, str) and "format" in out:
        del out["payload"]
        out["payload_bytes"] = len(payload) * 3 // 4 - payload.count("=")
    return out


# ----------------------------------------------------------------- dataclasses


def _instant(message: Timestamp) -> dt.datetime:
    return dt.datetime.fromtimestamp(message.seconds, dt.UTC) + dt.timedelta(
        microseconds=message.nanos // 1000
    )


_hints_of: dict[type[Any], dict[str, Any]] = {}


def _hints(kind: type[Any]) -> dict[str, Any]:
    if kind not in _hints_of:
        _hints_of[kind] = typing.get_type_hints(kind, vars(model))
    return _hints_of[kind]


def _model_kind(hint: Any) -> Any:
    """The dataclass inside `X`, `X | None` or `tuple[X, ...]`."""
    for arg in typing.get_args(hint):
        if isinstance(arg, type) and arg is not type(None):
            return arg
    return hint


def to_model(message: Message, kind: type[T]) -> T:
    """Builds the dataclass `kind` from a message with the same field names.

    A Duration `x` becomes `x_s` in seconds, a Timestamp a UTC datetime, an
    absent message None.
    """
    hints = _hints(kind)
    values: dict[str, Any] = {}
    for field in _fields(type(message)):
        is_duration = field.message_name == "google.protobuf.Duration"
        name = f"{field.name}_s" if is_duration else field.name
        if name not in hints:
            continue
        raw = getattr(message, field.name)
        if field.is_map:
            values[name] = dict(raw)
        elif field.repeated:
            inner = _model_kind(hints[name])
            values[name] = tuple(_model_value(field, item, inner) for item in raw)
        elif field.cpp_type == _F.CPPTYPE_MESSAGE and not message.HasField(field.name):
            # An absent part is None where it may be, else the part's defaults.
            if type(None) not in typing.get_args(hints[name]):
                continue
            values[name] = None
        else:
            values[name] = _model_value(field, raw, _model_kind(hints[name]))
    return kind(**values)


def _model_value(field: _Field, value: Any, inner: Any) -> Any:
    if field.message_name == "google.protobuf.Duration":
        return seconds(value)
    if field.message_name == "google.protobuf.Timestamp":
        return _instant(value)
    if field.cpp_type == _F.CPPTYPE_MESSAGE:
        return to_model(value, inner)
    if field.enum_names and isinstance(inner, type) and issubclass(inner, enum.Enum):
        return inner(field.enum_names.get(value, "UNSPECIFIED"))
    return value


def to_message(value: Any, kind: type[M]) -> M:
    """Builds a message of class `kind` from a dataclass with the same names."""
    message = kind()
    for field in _fields(kind):
        is_duration = field.message_name == "google.protobuf.Duration"
        raw = getattr(value, f"{field.name}_s" if is_duration else field.name, None)
        if raw is None:
            continue
        if field.is_map:
            getattr(message, field.name).update(raw)
        elif field.repeated:
            getattr(message, field.name).extend(_message_value(field, item) for item in raw)
        elif field.cpp_type == _F.CPPTYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(_message_value(field, raw))
        else:
            setattr(message, field.name, _message_value(field, raw))
    return message


def _message_value(field: _Field, value: Any) -> Any:
    if field.message_name == "google.protobuf.Duration":
        return duration(value)
    if field.message_name == "google.protobuf.Timestamp":
        return _timestamp_of(cast(dt.datetime, value))
    if field.cpp_type == _F.CPPTYPE_MESSAGE:
        return to_message(value, field.new)
    if field.enum_names:
        return field.enum_numbers[str(value)]
    return value
