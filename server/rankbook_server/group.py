"""Commands, and a group of them: decided one after another, kept together or not at all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from rankbook.errors import RankbookError
from rankbook_server.books import Books
from rankbook_server.core.book import Book
from rankbook_server.core.decision import Decision, Instant, Note
from rankbook_server.core.ops import Op, Txn

__all__ = ["Command", "Decide", "Group", "Step"]

R = TypeVar("R")
Decide = Callable[[Book, Instant], "Decision[R]"]
"""Asks a book for a decision that someone waits for."""
Step = Callable[[Book, Instant], "Decision[None] | None"]
"""Asks a book for the next piece of its own upkeep; None when nothing is left."""

_MAX_COMMANDS = 512
_MAX_TXNS = 1024
_STEPS_A_TURN = 64


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
class _Outcome:
    command: Command
    decision: Decision[Any] | None
    error: RankbookError | None
    revision: int


class Group:
    """What one turn of the writer decides."""

    def __init__(
        self,
        books: Books,
        now: Instant,
        revision: int,
        contain: Callable[[str], AbstractContextManager[None]],
        folded: Callable[[Book, Op], None],
    ) -> None:
        """Begins empty.

        Args:
            books: What is decided on, and folded into at once.
            now: The instant of all decisions.
            revision: The last one that is committed.
            contain: Turns a fault inside a decision into a RankbookError.
            folded: Told of each operation after it was folded in.
        """
        self._books = books
        self._now = now
        self._contain = contain
        self._folded = folded
        self._outcomes: list[_Outcome] = []
        self.first_revision = revision + 1
        """Revision of the first transaction, if there is one."""
        self.revision = revision
        """Revision of the last transaction."""
        self.txns: list[Txn] = []
        """What is to be committed."""
        self.notes: list[tuple[str, Note]] = []
        """Audit lines, with their namespaces."""
        self.namespaces: set[str] = set()
        """Books that hold what is not committed yet."""

    def take(self, queue: deque[Command]) -> None:
        """Decides commands off a queue, as many as one group may have."""
        taken = 0
        while queue and taken < _MAX_COMMANDS and len(self.txns) < _MAX_TXNS:
            command = queue.popleft()
            taken += 1
            if not command.future.done() and not self._run(command):
                # The rest takes its turn behind the calls that wait.
                queue.append(command)

    def _run(self, command: Command) -> bool:
        """Decides a command; False when it has more to do."""
        book = self._books.get(command.namespace)
        for _ in range(_STEPS_A_TURN if command.step is not None else 1):
            try:
                with self._contain(command.name):
                    decision = self._decide(command, book)
                    if decision is not None and decision.txn is not None:
                        self._books.admit(book)
            except RankbookError as error:
                self._outcomes.append(_Outcome(command, None, error, self.revision))
                return True
            if decision is not None and decision.txn is not None:
                self._fold(book, decision.txn, decision.notes)
            if command.step is None or decision is None:
                self._outcomes.append(_Outcome(command, decision, None, self.revision))
                return True
        return False

    def _decide(self, command: Command, book: Book) -> Decision[Any] | None:
        if command.step is not None:
            return command.step(book, self._now)
        assert command.decide is not None
        return command.decide(book, self._now)

    def _fold(self, book: Book, txn: Txn, notes: tuple[Note, ...]) -> None:
        self.revision += 1
        self.txns.append(txn)
        self.namespaces.add(book.namespace)
        self.notes.extend((book.namespace, note) for note in notes)
        for op in txn.ops:
            book.apply(op, self.revision)
            self._folded(book, op)

    def resolve(self) -> None:
        """Tells everyone what was decided, once it is kept."""
        for outcome in self._outcomes:
            if outcome.error is not None:
                outcome.command.fail(outcome.error)
            else:
                decision = outcome.decision
                outcome.command.resolve(decision.reply(outcome.revision) if decision else None)

    def fail(self, error: RankbookError) -> None:
        """Tells everyone that nothing was kept, those who were refused too: what
        they were refused for may be undone."""
        for outcome in self._outcomes:
            outcome.command.fail(error)
