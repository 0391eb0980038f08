"""Any message of the contract, drawn from its descriptor."""

from __future__ import annotations

from typing import Any, TypeVar

import hypothesis.strategies as st
from google.protobuf.descriptor import FieldDescriptor as F
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

M = TypeVar("M", bound=Message)
_TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
_BOUNDS = {
    F.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    F.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    F.CPPTYPE_UINT32: (0, 2**32 - 1),
    F.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def messages(kind: type[M], required: frozenset[str] = frozenset()) -> st.SearchStrategy[M]:
    """Any value of a message; the named parts are always there."""
    return _drawn(kind, required)


@st.composite
def _drawn(draw: st.DrawFn, kind: Any, required: frozenset[str]) -> Any:
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if field.name not in required and not draw(st.booleans()):
            continue
        child = field.message_type
        if child is not None and child.GetOptions().map_entry:
            getattr(message, field.name).update(draw(st.dictionaries(_TEXT, _TEXT, max_size=3)))
        elif _is_list(field):
            getattr(message, field.name).extend(draw(st.lists(_value(field), max_size=3)))
        elif child is not None:
            getattr(message, field.name).CopyFrom(draw(_value(field)))
        else:
            setattr(message, field.name, draw(_value(field)))
    return message


def _is_list(field: Any) -> bool:
    try:
        return bool(field.is_repeated)
    except AttributeError:
        return bool(field.label == F.LABEL_REPEATED)


def _value(field: Any) -> st.SearchStrategy[Any]:
    child = field.message_type
    if child is not None:
        kind = GetMessageClass(child)
        if child.full_name == "google.protobuf.Duration":
            # JSON has seconds as a number: as exact as a float is.
            return st.integers(-(10**7), 10**7).map(lambda ms: _parts(kind, ms))
        if child.full_name == "google.protobuf.Timestamp":
            # JSON has milliseconds.
            return st.integers(0, 4 * 10**12).map(
                lambda ms: kind(seconds=ms // 1000, nanos=ms % 1000 * 10**6)
            )
        return _drawn(kind, frozenset())
    if field.enum_type is not None:
        return st.sampled_from(sorted(field.enum_type.values_by_number))
    if field.cpp_type in _BOUNDS:
        return st.integers(*_BOUNDS[field.cpp_type])
    if field.cpp_type == F.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type == F.CPPTYPE_DOUBLE:
        return st.floats(allow_nan=False, allow_infinity=False)
    return st.binary(max_size=16) if field.type == F.TYPE_BYTES else _TEXT


def _parts(kind: Any, millis: int) -> Any:
    sign = -1 if millis < 0 else 1
    whole, rest = divmod(abs(millis), 1000)
    return kind(seconds=sign * whole, nanos=sign * rest * 10**6)
