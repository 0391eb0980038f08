"""What the core asks a store to write, and what a store gives back.

Plain values, shared by the core (which decides them) and the stores (which
keep them). Keys and values are opaque to a store; `storage.proto` says what
they hold.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "MAX_TXN_OPS",
    "UPKEEP_BYTES",
    "Commit",
    "Compare",
    "Delete",
    "Entry",
    "Op",
    "Put",
    "Txn",
]

MAX_TXN_OPS = 126
"""Most operations, and most compares, of one transaction.

etcd's default bound is 128 of each. The store on etcd adds two compares (which
book this is, and `Txn.base`) and one operation (the book's head).
"""


UPKEEP_BYTES = 768 * 1024
"""About as many bytes one transaction of upkeep may have, beside its first piece:
half of what etcd takes in a request by default."""


@dataclass(frozen=True, slots=True)
class Put:
    """Writes a key, whether or not it is there."""

    key: str
    """The key."""
    value: bytes
    """Its whole new value."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Removes a key; nothing happens where there is none."""

    key: str
    """The key."""


Op = Put | Delete
"""One operation of a transaction."""


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition on a key, checked before the transaction's own operations."""

    key: str
    """The key."""
    revision: int
    """Revision that last wrote it; zero means that it is absent."""


@dataclass(frozen=True, slots=True)
class Txn:
    """Operations that happen all at one revision, or not at all."""

    ops: tuple[Op, ...]
    """In order; at most `MAX_TXN_OPS`."""
    compares: tuple[Compare, ...] = ()
    """All must hold; with `away`, at most `MAX_TXN_OPS`."""
    away: tuple[str, ...] = ()
    """Leases that must not live, as the store's liveness has it."""
    base: int | None = None
    """Nothing may have been committed above this revision; None allows it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a snapshot."""

    key: str
    """The key."""
    value: bytes
    """Its value."""
    revision: int
    """Revision that last wrote it."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One committed transaction, as a watch yields it."""

    revision: int
    """Its revision."""
    ops: tuple[Op, ...]
    """Its operations, in order."""
