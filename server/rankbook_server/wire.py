"""Protobuf framing by hand, for bytes that are kept serialised.

A message whose parts are cached is put together by joining bytes: a field of
length-delimited type is its tag, its length and its bytes, and a repeated
field is just more of them.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Body", "delimited", "header", "scalar", "span", "top_level", "varint"]

_MAX_TOP_LEVEL = 64
_SMALL = tuple(bytes((n,)) for n in range(128))


class Body(NamedTuple):
    """A serialised message in pieces, joined once with whatever goes around it."""

    pieces: list[bytes]
    """In order."""
    size: int
    """Bytes of all pieces together."""

    def join(self) -> bytes:
        """The message's bytes."""
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)


def varint(value: int) -> bytes:
    """A number, zero or above, in base 128."""
    if value < 128:
        return _SMALL[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def header(field: int, size: int) -> bytes:
    """What precedes a length-delimited field's bytes."""
    return varint(field << 3 | 2) + varint(size)


def delimited(field: int, data: bytes) -> bytes:
    """A whole length-delimited field."""
    return header(field, len(data)) + data


def scalar(field: int, value: int) -> bytes:
    """A whole number field; nothing where it is zero, as proto3 has it."""
    return varint(field << 3) + varint(value) if value else b""


def span(field: int, seconds: float) -> bytes:
    """A whole Duration field; nothing where it is zero."""
    if not seconds:
        return b""
    whole = int(seconds)
    inner = scalar(1, whole) + scalar(2, int((seconds - whole) * 1e9))
    return delimited(field, inner)


def top_level(data: bytes) -> list[tuple[int, int]]:
    """The fields of a serialised message, without reading into them.

    Returns:
        Each field's number, in order, with its value where that is a varint
        and its size in bytes where it is length-delimited.

    Raises:
        ValueError: The bytes are no message.
    """
    found = []
    at, end = 0, len(data)
    while at < end:
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _read_varint(data, at)
        elif kind == 2:
            value, at = _read_varint(data, at)
            at += value
        elif kind in (1, 5):
            value = 0
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind} is none of a message's")
        if at > end or tag >> 3 == 0:
            raise ValueError("the message ends within a field")
        found.append((tag >> 3, value))
        if len(found) > _MAX_TOP_LEVEL:
            raise ValueError(f"more than {_MAX_TOP_LEVEL} fields")
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64 and at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("a number does not end")
