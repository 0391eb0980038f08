"""What readers may rely on: nothing goes back, nothing is missed, everybody converges."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from tests.chaos.journal import Line

from .history import History, Violation

__all__ = [
    "everybody_converges",
    "holders_are_in_the_book",
    "nothing_goes_back",
    "nothing_is_missed",
    "servers_end_alike",
]


_OUT = frozenset(("removed", "dropped", "absent"))


def nothing_goes_back(history: History) -> Iterator[Violation]:
    """Rule 9: no reader is shown an older book, or an older engine, than before."""
    for reader, lines in history.told.items():
        newest, book = 0, ""
        engines: dict[str, tuple[int, Line]] = {}
        for line in lines:
            if line.get("book", book) != book:
                newest, engines, book = 0, {}, line["book"]
            revision = line["rev"]
            if line["kind"] == "answer":
                if revision < line["min"]:
                    yield Violation(
                        "reads never go back",
                        f"{reader} asked for {line['min']} and got {revision}",
                        (line,),
                    )
                continue
            counts = line["kind"] == "view" or (line["kind"] == "message" and line["synced"])
            if counts and revision < newest:
                yield Violation(
                    "reads never go back", f"{reader} was at {newest} and is at {revision}", (line,)
                )
            newest = max(newest, revision if counts else 0)
            for engine_id, kind, engine_revision, _ in line.get("events", ()):
                known = engines.get(engine_id)
                if known is not None and kind != "dropped" and 0 < engine_revision < known[0]:
                    yield Violation(
                        "reads never go back",
                        f"{reader} had {engine_id} at {known[0]} and is told {kind} at "
                        f"{engine_revision}",
                        (known[1], line),
                    )
                engines[engine_id] = (max(engine_revision, known[0] if known else 0), line)


def nothing_is_missed(history: History) -> Iterator[Violation]:
    """Whoever is synced at a revision has everything up to it, deletions too."""
    timelines = {
        engine_id: (sorted(points), [points[revision] for revision in sorted(points)])
        for engine_id, points in _timelines(history).items()
    }
    groups = _groups(history)
    for reader, facts in history.readers.items():
        if facts["way"] != "raw" or facts["ready_only"]:
            continue
        wanted = {e for e in timelines if not facts["group"] or groups.get(e) == facts["group"]}
        yield from _follows(history.told[reader], reader, wanted, timelines)


def _timelines(history: History) -> dict[str, dict[int, bool]]:
    """By engine, the revisions at which anybody saw it change, and whether it was gone then."""
    found: dict[str, dict[int, bool]] = {}
    for engine_id, contents in history.of_engine().items():
        found[engine_id] = {
            int(shown.content["rev"]): shown.content["state"] == "GONE" for shown in contents
        }
    for reader, facts in history.readers.items():
        # With a filter REMOVED says no more than that it does not match.
        if facts["way"] != "raw" or facts["group"] or facts["ready_only"]:
            continue
        for line in history.told[reader]:
            for engine_id, kind, revision, _ in line["events"]:
                if kind in ("removed", "absent") and revision:
                    found.setdefault(engine_id, {})[revision] = True
    return found


def _follows(
    lines: list[Line],
    reader: str,
    wanted: set[str],
    timelines: dict[str, tuple[list[int], list[bool]]],
) -> Iterator[Violation]:
    has: dict[str, int] = {}
    # A message may be ahead of its resume point: an end that it tells of is newer.
    ended: dict[str, int] = {}
    said: set[tuple[str, int]] = set()
    for line in lines:
        for engine_id, kind, revision, _ in line["events"]:
            if kind in _OUT:
                has.pop(engine_id, None)
                ended[engine_id] = revision
            else:
                has[engine_id] = revision
        if not line["synced"]:
            continue
        for engine_id in wanted:
            revisions, gone = timelines[engine_id]
            index = bisect_right(revisions, line["rev"]) - 1
            if index < 0 or (engine_id, index) in said:
                continue
            shown = has.get(engine_id)
            if gone[index]:
                missed = shown is not None and shown < revisions[index]
                what = "has what is gone"
            else:
                newest = ended.get(engine_id, -1) if shown is None else shown
                missed = newest < revisions[index]
                what = "lacks"
            if missed:
                said.add((engine_id, index))
                yield Violation(
                    "missed deletions" if gone[index] else "missed changes",
                    f"{reader} is synced at {line['rev']}, has {engine_id} at {shown} and {what} "
                    f"at {revisions[index]}",
                    (line,),
                )


def _groups(history: History) -> dict[str, str]:
    """Each engine's group; by the cast, which numbers them in turn."""
    found = {}
    for engine_id in history.of_engine():
        _, _, number = engine_id.rpartition("-")
        found[engine_id] = f"group-{int(number) % 3}" if number.isdigit() else ""
    return found


def servers_end_alike(history: History) -> Iterator[Violation]:
    """At the end every server gives the same answers."""
    for line in history.others:
        if line["kind"] == "no truth":
            yield Violation("servers end alike", f"{line['server']} does not answer", (line,))
    if not history.truths:
        yield Violation("servers end alike", "no server was asked")
        return
    first, *others = sorted(history.truths)
    for other in others:
        one, two = history.truths[first], history.truths[other]
        for engine_id in sorted(one.keys() | two.keys()):
            a, b = one.get(engine_id), two.get(engine_id)
            if a is None or b is None or a["digest"] != b["digest"]:
                yield Violation(
                    "servers end alike", f"{first} and {other} differ in {engine_id}", (a, b)
                )


def _truth(history: History) -> dict[str, Line]:
    return next(iter(history.truths.values()), {})


def holders_are_in_the_book(history: History) -> Iterator[Violation]:
    """Rule 10 at the end: who holds is in the book as it was acknowledged, nobody else is."""
    truth = _truth(history)
    rows = {
        (engine_id, row[0], row[1]): (content, row)
        for engine_id, content in truth.items()
        for row in content["workers"]
    }
    held: set[tuple[str, int, int, str]] = set()
    for final in history.finals:
        if not final["holds"]:
            yield Violation("publishers come back", f"publisher {final['pub']} is out", (final,))
            continue
        for pp_rank, tp_rank in final["slots"]:
            held.add((final["engine"], pp_rank, tp_rank, final["boot"]))
            content, row = rows.get((final["engine"], pp_rank, tp_rank), (None, None))
            expected = [final["boot"], final["gen"], final["content"], False]
            if row is None or row[2:6] != expected:
                yield Violation(
                    "acknowledged and lost",
                    f"{final['boot']} holds {pp_rank}.{tp_rank} of {final['engine']} with content "
                    f"{final['content']}; the book has {row}",
                    (final, content),
                )
    for (engine_id, pp_rank, tp_rank), (content, row) in rows.items():
        if (engine_id, pp_rank, tp_rank, row[2]) not in held:
            yield Violation(
                "the dead are out",
                f"{row[2]} is in {pp_rank}.{tp_rank} of {engine_id} and holds nothing",
                (content,),
            )
    for engine_id, content in truth.items():
        if content["state"] != "READY":
            yield Violation(
                "engines come back", f"{engine_id} ends as {content['state']}", (content,)
            )


def everybody_converges(history: History, within_s: float) -> Iterator[Violation]:
    """Every reader has at the end what the servers have, since `within_s` after the faults."""
    truth = {e: c for e, c in _truth(history).items() if c["state"] != "GONE"}
    groups = _groups(history)
    last_life: dict[str, str] = {}
    for reader in history.readers:
        number, _, life = reader.partition(".")
        if int(life) >= int(last_life.get(number, "0.0").partition(".")[2] or 0):
            last_life[number] = reader
    for reader in last_life.values():
        facts = history.readers[reader]
        if facts["way"] == "query":
            continue
        end = history.ends.get(reader)
        if end is None:
            yield Violation("everybody converges", f"{reader} has no last word", (facts,))
            continue
        wanted = {
            e: c
            for e, c in truth.items()
            if (not facts["group"] or groups[e] == facts["group"])
            and (not facts["ready_only"] or c["state"] == "READY")
        }
        for engine_id in sorted(wanted.keys() | end["engines"].keys()):
            content, has = wanted.get(engine_id), end["engines"].get(engine_id)
            same = content is not None and has is not None and content["rev"] == has[0]
            if not same or (not facts["bare"] and content and has and content["digest"] != has[1]):
                yield Violation(
                    "everybody converges",
                    f"{reader} has {engine_id} as {has}, the book has "
                    f"{content and (content['rev'], content['digest'])}",
                    (end, content),
                )
        late_s = converged_s(history, reader)
        if late_s > within_s:
            yield Violation(
                "everybody converges",
                f"{reader} changed until {late_s:.2f} s after the last fault",
                (history.told[reader][-1],),
            )


def converged_s(history: History, reader: str) -> float:
    """How long after the last fault a reader was told of its last change."""
    changes = [
        line["t"]
        for line in history.told[reader]
        if any(event[1] != "absent" for event in line.get("events", ()))
    ]
    return max(0.0, max(changes, default=0.0) - history.faults_end_s)
