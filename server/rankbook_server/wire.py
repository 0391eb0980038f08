"""Protobuf framing by hand, for bytes that are kept serialised.

A message whose parts are cached is put together by joining bytes: a field of
length-delimited type is its tag, its length and its bytes, and a repeated
field is just more of them.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Body", "delimited", "header", "scalar", "varint"]

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
