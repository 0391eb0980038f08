"""All rules over one history, and the figures of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from . import living, reading, showing, writing
from .history import History, Violation

__all__ = ["RULES", "figures", "violations"]

RULES = (
    "mixed generations",
    "fencing",
    "states",
    "whole answers",
    "nothing is made up",
    "one holder a slot",
    "writes are ordered",
    "same revision, same answer",
    "leases live",
    "acknowledged and lost",
    "the dead are out",
    "reads never go back",
    "missed deletions",
    "missed changes",
    "servers end alike",
    "everybody converges",
    "publishers come back",
    "engines come back",
    "no process fails",
)
"""Every rule that a violation may name."""

_FAILURES = frozenset(("ended by itself", "did not stop", "failed"))


def violations(history: History, *, converge_s: float) -> Iterator[Violation]:
    """Every rule that was broken, with its evidence."""
    yield from no_process_fails(history)
    yield from showing.contents_are_whole(history)
    yield from showing.servers_agree(history)
    yield from showing.nothing_is_made_up(history)
    yield from showing.engines_move_forward(history)
    yield from writing.old_starts_are_fenced(history)
    yield from writing.epochs_are_given_once(history)
    yield from writing.writes_are_ordered(history)
    yield from writing.slots_have_one_holder(history)
    yield from living.leases_live(history)
    yield from living.acknowledged_is_kept(history)
    yield from reading.nothing_goes_back(history)
    yield from reading.nothing_is_missed(history)
    yield from reading.servers_end_alike(history)
    yield from reading.holders_are_in_the_book(history)
    yield from reading.everybody_converges(history, converge_s)


def no_process_fails(history: History) -> Iterator[Violation]:
    """No process ends by itself, no call fails by a fault of ours, no message is baseless."""
    for line in history.others:
        if line["kind"] in _FAILURES:
            yield Violation("no process fails", f"{line['node']}: {line['kind']}", (line,))
        elif line["kind"] == "baseless":
            yield Violation(
                "missed changes", f"{line['reader']} was told a part of what it never had", (line,)
            )
    for call in history.calls:
        if call.failed is not None and call.failed["reason"] == "INTERNAL":
            yield Violation(
                "no process fails", f"{call.name} is INTERNAL", (call.line, call.failed)
            )


def figures(history: History) -> dict[str, object]:
    """What happened in a run, counted."""
    calls: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    unsure = 0
    for call in history.calls:
        if call.is_acked:
            calls[call.name] += 1
        elif call.is_unsure:
            unsure += 1
        if call.failed is not None:
            refused[call.failed["reason"]] += 1
    faults: Counter[str] = Counter(
        line["name"] for line in history.others if line["kind"] == "fault"
    )
    told = [line for lines in history.told.values() for line in lines]
    ended = sum(
        state in ("ENDED", "UNKNOWN")
        for call in history.named("renew")
        if call.is_acked
        for state in call.reply["states"]
    )
    late = {
        reader: reading.converged_s(history, reader)
        for reader in history.ends
        if history.told[reader]
    }
    return {
        "acknowledged": dict(sorted(calls.items())),
        "writes acknowledged": sum(n for name, n in calls.items() if name != "renew"),
        "outcome unknown": unsure,
        "refused": dict(sorted(refused.items())),
        "leases that ended": ended,
        "faults": dict(sorted(faults.items())),
        "engine revisions shown": len(history.shown),
        "messages": sum(line["kind"] in ("message", "told") for line in told),
        "resets": sum(bool(line.get("reset")) for line in told),
        "answers": sum(line["kind"] == "answer" for line in told),
        "reads refused": sum(line["kind"] == "refused" for line in history.others),
        "watches broken": sum(line["kind"] == "broken" for line in history.others),
        "slowest to converge, s": round(max(late.values(), default=0.0), 2),
    }
