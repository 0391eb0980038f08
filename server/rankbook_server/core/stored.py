"""Reading what a store keeps: each value says which version wrote it."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError

from rankbook import v1
from rankbook_server.core.keys import STORED_VERSION, Unreadable, parse_key
from rankbook_server.core.ops import Op, Put

__all__ = ["check", "read"]

Stored = TypeVar("Stored", v1.StoredNamespace, v1.StoredEngine, v1.StoredWorker, v1.StoredLease)


def read(kind: type[Stored], key: str, value: bytes) -> Stored:
    """A stored value.

    Raises:
        Unreadable: It is damaged, or of a newer version than this one reads.
    """
    try:
        stored = kind.FromString(value)
    except DecodeError:
        raise Unreadable(f"the value of {key!r} is damaged, or nobody's of rankbook") from None
    if stored.version > STORED_VERSION:
        raise Unreadable(
            f"the value of {key!r} is of version {stored.version} and this rankbookd reads up to "
            f"{STORED_VERSION}"
        )
    return stored


_KINDS = {
    "n": v1.StoredNamespace,
    "e": v1.StoredEngine,
    "w": v1.StoredWorker,
    "l": v1.StoredLease,
}


def check(op: Op) -> None:
    """Sees whether an operation can be folded in.

    Raises:
        Unreadable: Its key or its value is none that this version knows.
    """
    key = parse_key(op.key)
    if isinstance(op, Put):
        read(_KINDS[key.kind], op.key, op.value)
