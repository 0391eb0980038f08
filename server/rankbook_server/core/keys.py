"""The key layout of `proto/rankbook/v1/storage.proto`. Ids never hold a slash,
so a prefix that ends in one never matches a longer name."""

from __future__ import annotations

from typing import NamedTuple

from rankbook import v1

__all__ = [
    "IMPORT_KEY",
    "STORED_VERSION",
    "Key",
    "SlotKey",
    "Unreadable",
    "engine_key",
    "lease_key",
    "namespace_key",
    "parse_key",
    "slot_key",
    "slot_message",
    "slot_text",
    "worker_key",
]

IMPORT_KEY = "import"
"""There while an import is under way. It has no slash, so it is no namespace's."""

SlotKey = tuple[int, int, int]
"""(pp_rank, pcp_rank, tp_rank): sorts as the grid does."""


STORED_VERSION = 1
"""Version of the values that this server writes, and the newest it reads."""


class Unreadable(ValueError):
    """A stored key or value that this server cannot read; the message says which."""


class Key(NamedTuple):
    """A parsed key: `kind` is one of "n", "e", "w", "l"."""

    namespace: str
    kind: str
    name: str
    slot: SlotKey | None


def slot_key(slot: v1.Slot) -> SlotKey:
    """A slot message as a key."""
    return (slot.pp_rank, slot.pcp_rank, slot.tp_rank)


def slot_message(slot: SlotKey) -> v1.Slot:
    """A slot as a message."""
    return v1.Slot(pp_rank=slot[0], pcp_rank=slot[1], tp_rank=slot[2])


def slot_text(slot: SlotKey) -> str:
    """A slot in words."""
    return f"pp{slot[0]} pcp{slot[1]} tp{slot[2]}" if slot[1] else f"pp{slot[0]} tp{slot[2]}"


def namespace_key(namespace: str) -> str:
    """Key of a namespace's own facts."""
    return f"{namespace}/n"


def engine_key(namespace: str, engine_id: str) -> str:
    """Key of an engine's head."""
    return f"{namespace}/e/{engine_id}"


def worker_key(namespace: str, engine_id: str, slot: SlotKey) -> str:
    """Key of a slot."""
    return f"{namespace}/w/{engine_id}/{slot[0]}.{slot[1]}.{slot[2]}"


def lease_key(namespace: str, lease_id: str) -> str:
    """Key of a lease."""
    return f"{namespace}/l/{lease_id}"


def parse_key(key: str) -> Key:
    """Takes a key apart.

    Raises:
        Unreadable: It is no key of this layout.
    """
    namespace, _, tail = key.partition("/")
    kind, *rest = tail.split("/")
    if kind == "n" and not rest:
        return Key(namespace, kind, "", None)
    if kind in ("e", "l") and len(rest) == 1:
        return Key(namespace, kind, rest[0], None)
    if kind == "w" and len(rest) == 2:
        ranks = rest[1].split(".")
        if len(ranks) == 3 and all(rank.isascii() and rank.isdigit() for rank in ranks):
            return Key(namespace, kind, rest[0], (int(ranks[0]), int(ranks[1]), int(ranks[2])))
    raise Unreadable(f"the key {key!r} is none that this rankbookd knows")
