"""Commands, and a wave of them: decided on one state of the books, kept together.

Theory of operation. The decisions of a wave all see what was committed before
it and nothing of each other, so a wave may only hold decisions that would have
come out the same one after another. Two of them get in each other's way where

    a key is written by both
    an engine is touched by both, unless each only fills or changes slots: that
        reads the engine's head and the one slot, and heads are not written
    one counts on a lease, or on a lease key, that the other writes
    one ends an engine and the other begins or ends one of that group and DP
        rank: a tombstone is told who took its place
    both make something new and there is no room for both

Whatever is in the way of something before it waits for the next wave, and so
does everything behind it on the same subject: commands on one engine are
decided in the order in which they came.

Nothing of a wave is in the books before it is committed. One that fails leaves
nothing to undo, and its commands can be decided again on a newer state.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rankbook import v1
from rankbook.errors import RankbookError
from rankbook.limits import MAX_ENGINE_BYTES
from rankbook_server.books import Books
from rankbook_server.core.book import Book
from rankbook_server.core.decision import Decision, Instant
from rankbook_server.core.ops import Delete, Op, Put, Txn

__all__ = ["Command", "Decide", "Outcome", "Step", "Wave"]

R = TypeVar("R")
Decide = Callable[[Book, Instant], "Decision[R]"]
"""Asks a book for a decision that someone waits for."""
Step = Callable[[Book, Instant], "Decision[None] | None"]
"""Asks a book for the next piece of its own upkeep; None when nothing is left."""

MOST_COMMANDS = 512
"""Commands of one wave."""
SLOT_WRITES = frozenset({"register_workers", "update_worker"})
"""Calls that fill or change slots, and look at nothing but them and their engine's head."""


@dataclass(slots=True)
class Command:
    """Something to decide, and who waits for it."""

    name: str
    """The call, or the kind of upkeep."""
    namespace: str
    """The book it is for."""
    future: asyncio.Future[Any]
    """Gets the reply, or a RankbookError."""
    decide: Decide[Any] | None = None
    """For a call."""
    step: Step | None = None
    """For upkeep: asked again until nothing is left."""
    notify: Callable[[], None] | None = None
    """Called at once when the future is done."""
    subject: str = ""
    """The engine or lease it is about; commands on one are decided in order."""
    since_s: float = 0.0
    """When it was queued, on the monotonic clock."""

    def resolve(self, value: Any) -> None:
        """Gives the reply."""
        if not self.future.done():
            self.future.set_result(value)
            if self.notify is not None:
                self.notify()

    def fail(self, error: BaseException) -> None:
        """Gives the error."""
        if not self.future.done():
            self.future.set_exception(error)
            # Whoever asked may have left; then nobody need hear of it.
            self.future.exception()
            if self.notify is not None:
                self.notify()


@dataclass(slots=True)
class Outcome:
    """A command and what was decided."""

    command: Command
    """The command."""
    book: Book
    """What it was decided on."""
    decision: Decision[Any] | None = None
    """None for a refusal, and where no upkeep is left."""
    error: RankbookError | None = None
    """The refusal."""
    revision: int = 0
    """What it was committed at; the one it was decided on where it writes nothing."""

    @property
    def txn(self) -> Txn | None:
        """What it writes, if anything."""
        return self.decision.txn if self.decision is not None else None

    @property
    def txn_to_keep(self) -> Txn:
        """The same, of one that is known to write."""
        assert self.txn is not None
        return self.txn

    def settle(self) -> None:
        """Tells whoever waits, once it is kept."""
        if self.error is not None:
            self.command.fail(self.error)
        elif self.command.step is None or self.decision is None:
            self.command.resolve(self.decision.reply(self.revision) if self.decision else None)


@dataclass(slots=True)
class _Touched:
    """What the decisions of a wave have touched in one namespace."""

    book: Book
    keys: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    """Engines of which the head, or all slots, were looked at or written."""
    slots: dict[str, int] = field(default_factory=dict)
    """Engines of which only slots were written."""
    leases: set[str] = field(default_factory=set)
    """Keys of leases that are counted on."""
    places: set[tuple[str, ...]] = field(default_factory=set)
    """Lease keys; groups in which an engine begins or ends."""
    new: Counter[str] = field(default_factory=Counter)
    """How many engines and leases are new."""
    waiting: set[str] = field(default_factory=set)
    """Subjects of commands that were left for the next wave."""

    def has(self, subject: str) -> bool:
        """Whether something was done to a subject."""
        return subject in self.whole or subject in self.slots


class Wave:
    """What one turn of the writer decides."""

    def __init__(
        self,
        books: Books,
        now: Instant,
        contain: Callable[[str], AbstractContextManager[None]],
        *,
        revision: int,
        most_ops: int,
        most_bytes: int,
    ) -> None:
        """Begins empty.

        Args:
            books: What is decided on. Namespaces that will have something in
                them get their place here; nothing else is changed.
            now: The instant of all decisions.
            contain: Turns a fault inside a decision into a RankbookError.
            revision: What is committed.
            most_ops: Operations it may have, unless one decision has more.
            most_bytes: Bytes of keys and values it may have, likewise.
        """
        self._books = books
        self._now = now
        self._contain = contain
        self._revision = revision
        self._room = most_ops
        self._bytes = most_bytes
        self._touched: dict[str, _Touched] = {}
        self._full = False
        self.outcomes: list[Outcome] = []
        """What was decided, in order."""

    def take(self, queue: deque[Command]) -> None:
        """Decides commands off a queue; what must wait stays, in its order."""
        later: list[Command] = []
        taken = 0
        while queue and taken < MOST_COMMANDS and not self._full:
            command = queue.popleft()
            taken += 1
            if not command.future.done() and not self._run(command):
                later.append(command)
        queue.extendleft(reversed(later))

    @property
    def writes(self) -> list[Outcome]:
        """Outcomes that write something."""
        return [outcome for outcome in self.outcomes if outcome.txn is not None]

    def give_back(self, queue: deque[Command]) -> None:
        """Puts every command back where it was, to be decided anew."""
        queue.extendleft(outcome.command for outcome in reversed(self.outcomes))

    def _run(self, command: Command) -> bool:
        """Decides a command; False when it must wait for the next wave."""
        touched = self._touched.get(command.namespace)
        if touched is None:
            touched = _Touched(self._books.get(command.namespace))
            self._touched[command.namespace] = touched
        subject = command.subject
        if subject and (subject in touched.waiting or subject in touched.whole):
            touched.waiting.add(subject)
            return False
        outcome = self._decide(command, touched.book)
        if outcome.txn is None:
            # What is under way may change the answer.
            fits = not (subject and touched.has(subject))
        else:
            fits = self._fits(outcome, touched)
        if fits:
            self.outcomes.append(outcome)
        elif subject:
            touched.waiting.add(subject)
        return fits

    def _decide(self, command: Command, book: Book) -> Outcome:
        outcome = Outcome(command, book, revision=self._revision)
        try:
            with self._contain(command.name):
                if command.step is not None:
                    outcome.decision = command.step(book, self._now)
                else:
                    assert command.decide is not None
                    outcome.decision = command.decide(book, self._now)
                if outcome.txn is not None:
                    self._books.admit(book)
        except RankbookError as error:
            outcome.decision, outcome.error = None, error
        return outcome

    def _fits(self, outcome: Outcome, touched: _Touched) -> bool:
        """Whether a decision is in nobody's way; then it is noted."""
        decision = outcome.decision
        assert decision is not None
        assert decision.txn is not None
        ops = decision.txn.ops
        size = sum(len(op.key) + (len(op.value) if isinstance(op, Put) else 0) for op in ops)
        # The store is asked about these, and takes them for keys.
        size += sum(map(len, decision.expired))
        if self.outcomes and (len(ops) > self._room or size > self._bytes):
            self._full = True
            return False
        keys = {op.key for op in ops}
        namespace = outcome.command.namespace
        leases = {f"{namespace}/l/{lease_id}" for lease_id in decision.leases}
        engines, whole = _engines(ops)
        places = set(self._places(ops, touched.book))
        new = _new(ops, touched.book)
        only_slots = not whole and outcome.command.name in SLOT_WRITES
        in_the_way = (
            not keys.isdisjoint(touched.keys)
            or not keys.isdisjoint(touched.leases)
            or not leases.isdisjoint(touched.keys)
            or any(_is_taken(place, touched.places) for place in places)
            or not engines.isdisjoint(touched.whole)
            or not (only_slots or engines.isdisjoint(touched.slots))
            or (only_slots and any(self._is_large(touched, name, size) for name in engines))
            or (bool(new) and self._is_crowded(touched, new))
        )
        if in_the_way:
            return False
        self._room -= len(ops)
        self._bytes -= size
        touched.keys |= keys
        touched.leases |= leases
        touched.places |= places
        touched.new += new
        if only_slots:
            for name in engines:
                touched.slots[name] = touched.slots.get(name, 0) + size
        else:
            touched.whole |= engines
        return True

    @staticmethod
    def _is_large(touched: _Touched, engine_id: str, size: int) -> bool:
        """Whether an engine may come over its bound by what this wave adds to it."""
        added = touched.slots.get(engine_id)
        if added is None:
            return False
        return touched.book.engines[engine_id].bytes + added + size > MAX_ENGINE_BYTES

    @staticmethod
    def _is_crowded(touched: _Touched, new: Counter[str]) -> bool:
        """Whether what is new comes over a bound with what this wave makes already."""
        book, made = touched.book, touched.new
        engines, leases = len(book.engines) + made["e"], len(book.leases) + made["l"]
        return bool(
            (made["e"] and engines + new["e"] > book.limits.max_engines)
            or (made["l"] and leases + new["l"] > book.limits.max_leases)
        )

    @staticmethod
    def _places(ops: tuple[Op, ...], book: Book) -> Iterator[tuple[str, ...]]:
        for op in ops:
            kind, _, name = op.key.partition("/")[2].partition("/")
            if isinstance(op, Delete):
                continue
            if kind == "l" and name not in book.leases:
                yield ("lease key", v1.StoredLease.FromString(op.value).lease_key)
            elif kind == "e":
                head = v1.StoredEngine.FromString(op.value)
                engine = book.engines.get(name)
                place = (head.group, str(head.dp_rank))
                if head.HasField("gone_time"):
                    yield ("end", *place)
                elif engine is None or head.epoch != engine.head.epoch:
                    yield ("begin", *place)


def _is_taken(place: tuple[str, ...], places: set[tuple[str, ...]]) -> bool:
    if place[0] == "begin":
        return ("end", *place[1:]) in places
    return place in places or (place[0] == "end" and ("begin", *place[1:]) in places)


def _new(ops: tuple[Op, ...], book: Book) -> Counter[str]:
    """How many engines ("e") and leases ("l") operations make that are not there."""
    new: Counter[str] = Counter()
    for op in ops:
        kind, _, name = op.key.partition("/")[2].partition("/")
        if isinstance(op, Put) and (
            (kind == "e" and name not in book.engines) or (kind == "l" and name not in book.leases)
        ):
            new[kind] += 1
    return new


def _engines(ops: tuple[Op, ...]) -> tuple[set[str], bool]:
    """Engines that operations are about, and whether a head or a namespace's own
    facts are among them."""
    engines: set[str] = set()
    whole = False
    for op in ops:
        _, kind, *rest = op.key.split("/")
        if kind in ("e", "w"):
            engines.add(rest[0])
        whole = whole or kind in ("e", "n")
    return engines, whole
