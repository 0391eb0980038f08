"""The lines of a run's journals, put together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.journal import Line

__all__ = ["Call", "History", "Shown", "Violation", "read_history"]

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that was broken, with the lines that show it."""

    rule: str
    text: str
    lines: tuple[Any, ...] = ()


@dataclass(slots=True)
class Call:
    """A call of a publisher and what it came to."""

    line: Line
    """As it was made."""
    done: Line | None = None
    """The reply."""
    failed: Line | None = None
    """The error."""

    @property
    def name(self) -> str:
        """Which call."""
        return str(self.line["call"])

    @property
    def began_s(self) -> float:
        """When it was made; whatever it did was not before."""
        return float(self.line["t"])

    @property
    def ended_s(self) -> float:
        """When its outcome was there; infinite where there is none."""
        outcome = self.done or self.failed
        return float(outcome["t"]) if outcome is not None else NEVER

    @property
    def is_acked(self) -> bool:
        """Whether the server said that it happened."""
        return self.done is not None

    @property
    def is_unsure(self) -> bool:
        """Whether it may have happened or not."""
        if self.failed is not None:
            return self.failed["reason"] in _UNSURE
        return self.done is None

    def __getitem__(self, name: str) -> Any:
        return self.line[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A fact of the call."""
        return self.line.get(name, default)

    @property
    def reply(self) -> Line:
        """The reply of a call that was acknowledged."""
        assert self.done is not None
        return self.done


_UNSURE = frozenset(
    ("UNREACHABLE", "TIMED_OUT", "STORE_UNAVAILABLE", "SHUTTING_DOWN", "CANCELLED", "INTERNAL")
)


@dataclass(slots=True)
class Shown:
    """A content of an engine at a revision, and who showed it first."""

    content: Line
    digest: str
    first_s: float
    """When anybody had it first."""
    by: str


@dataclass(slots=True)
class History:
    """A run."""

    calls: list[Call] = field(default_factory=list)
    """In the order in which they were made."""
    shown: dict[tuple[str, int, bool], list[Shown]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By engine, its revision, and whether payloads were left out; one entry a digest."""
    readers: dict[str, Line] = field(default_factory=dict)
    told: dict[str, list[Line]] = field(default_factory=lambda: defaultdict(list))
    """What each reader was told, in order: messages, events, revisions of views, answers."""
    ends: dict[str, Line] = field(default_factory=dict)
    """What each reader had at the end."""
    finals: list[Line] = field(default_factory=list)
    """What each publisher held at the end."""
    truths: dict[str, dict[str, Line]] = field(default_factory=lambda: defaultdict(dict))
    """By server and engine: what the book was at the end."""
    whole_truths: dict[str, Line] = field(default_factory=dict)
    others: list[Line] = field(default_factory=list)
    """Faults, and what went wrong beside the rules."""
    faults_end_s: float = NEVER

    def of_engine(self) -> dict[str, list[Shown]]:
        """Contents with payloads, by engine, in order of their revision."""
        found: dict[str, list[Shown]] = defaultdict(list)
        for (engine_id, _, bare), shown in self.shown.items():
            if not bare:
                found[engine_id].append(shown[0])
        for contents in found.values():
            contents.sort(key=lambda one: int(one.content["rev"]))
        return found

    def named(self, *names: str) -> list[Call]:
        """Calls of some names."""
        return [call for call in self.calls if call.name in names]


_TOLD = frozenset(("message", "told", "view", "answer"))


def read_history(lines: Iterable[Line]) -> History:
    """Puts the lines of all journals together."""
    history = History()
    calls: dict[tuple[str, int], Call] = {}
    for line in lines:
        kind = line["kind"]
        if kind == "call":
            calls[line["from"], line["id"]] = Call(line)
        elif kind == "done":
            calls[line["from"], line["id"]].done = line
        elif kind == "failed" and "id" in line:
            calls[line["from"], line["id"]].failed = line
        elif kind in ("content", "truth"):
            _take_content(history, line)
        elif kind in _TOLD:
            history.told[line["reader"]].append(line)
        elif kind == "reader":
            history.readers[line["reader"]] = line
        elif kind == "end":
            history.ends[line["reader"]] = line
        elif kind == "final":
            history.finals.append(line)
        elif kind == "whole truth":
            history.whole_truths[line["server"]] = line
        else:
            history.others.append(line)
            if kind == "faults end":
                history.faults_end_s = line["t"]
    history.calls = sorted(calls.values(), key=lambda call: call.began_s)
    return history


def _take_content(history: History, line: Line) -> None:
    if line["kind"] == "truth":
        history.truths[line["server"]][line["engine"]] = line
    contents = history.shown[line["engine"], line["rev"], line["bare"]]
    for known in contents:
        if known.digest == line["digest"]:
            if line["t"] < known.first_s:
                known.first_s, known.by = line["t"], line["from"]
            return
    contents.append(Shown(line, line["digest"], line["t"], line["from"]))
