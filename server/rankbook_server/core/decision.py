"""What a decision is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rankbook_server.core.ops import Op, Txn

__all__ = ["Decision", "Instant", "Note", "maintenance"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Instant:
    """Now, on two clocks: one that never jumps and one that people read."""

    mono_s: float
    unix_s: float


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth an audit line."""

    event: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision(Generic[R]):
    """What a command does.

    Attributes:
        txn: What to write; None changes nothing.
        reply: Gives the reply for the committed revision (for no `txn`, for
            the current one).
        notes: Audit lines to write once it is committed.
        leases: Leases that it counts on to live.
        expired: Leases that it takes for dead.
    """

    txn: Txn | None
    reply: Callable[[int], R]
    notes: tuple[Note, ...] = ()
    leases: tuple[str, ...] = ()
    expired: tuple[str, ...] = ()


def _no_reply(_: int) -> None:
    return None


def maintenance(
    ops: Iterable[Op], notes: Iterable[Note] = (), expired: Iterable[str] = ()
) -> Decision[None]:
    """A decision that nobody waits for."""
    return Decision(Txn(tuple(ops)), _no_reply, tuple(notes), expired=tuple(expired))
