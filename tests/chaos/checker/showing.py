"""What readers are shown: one content alone, and one engine's contents in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from .history import History, Shown, Violation

__all__ = ["contents_are_whole", "engines_move_forward", "nothing_is_made_up", "servers_agree"]

_FULL = frozenset(("READY", "COMPLETE", "DRAINING"))


def contents_are_whole(history: History) -> Iterator[Violation]:
    """Rules 1, 3 and the states: one generation, one worker a slot, READY is sealed."""
    for contents in history.shown.values():
        for shown in contents:
            yield from _is_whole(shown)


def _is_whole(shown: Shown) -> Iterator[Violation]:
    content = shown.content
    rows, state = content["workers"], content["state"]

    def broken(rule: str, text: str) -> Violation:
        return Violation(rule, f"{content['engine']} at {content['rev']}: {text}", (content,))

    generations = {row[3] for row in rows}
    if generations - {content["gen"]}:
        yield broken("mixed generations", f"{generations} in {content['gen']}")
    slots = [(row[0], row[1]) for row in rows]
    if len(set(slots)) != len(slots):
        yield broken("one holder a slot", "a slot is shown twice")
    if content["present"] != len(rows):
        yield broken("whole answers", f"{content['present']} present, {len(rows)} shown")
    if not content["bare"] and not all(row[6] for row in rows):
        yield broken("mixed generations", "a payload is of another record")
    if state == "GONE" and rows:
        yield broken("states", "GONE with workers")
    if state in _FULL and (content["present"] != content["declared"] or any(r[5] for r in rows)):
        yield broken("states", f"{state} with {content['present']}/{content['declared']}")
    # A reader that gets no payloads gets the digests of the whole records.
    if state == "READY" and not (content["core"] and content["seal_is_of_this"]):
        yield broken("states", "READY, and the seal is of something else")


def servers_agree(history: History) -> Iterator[Violation]:
    """One engine at one revision is one content, whoever shows it."""
    for (engine_id, revision, _), contents in history.shown.items():
        if len(contents) > 1:
            yield Violation(
                "same revision, same answer",
                f"{engine_id} at {revision} was shown in {len(contents)} ways",
                tuple(shown.content for shown in contents),
            )


def nothing_is_made_up(history: History) -> Iterator[Violation]:
    """What is shown was sent before by the process that it names."""
    sent: dict[tuple[str, str, int, int, int], float] = {}
    for call in history.named("register", "update"):
        for pp_rank, tp_rank in call["slots"]:
            key = (call["gen"], call["boot"], pp_rank, tp_rank, call["content"])
            sent.setdefault(key, call.began_s)
    for (_, _, bare), contents in history.shown.items():
        if bare:
            continue
        for shown in contents:
            for pp_rank, tp_rank, boot_id, generation, content, asleep, _ in shown.content[
                "workers"
            ]:
                began_s = sent.get((generation, boot_id, pp_rank, tp_rank, content))
                if not asleep and (began_s is None or began_s > shown.first_s):
                    yield Violation(
                        "nothing is made up",
                        f"{shown.content['engine']} at {shown.content['rev']} shows {boot_id} with "
                        f"content {content}, which was not sent by then",
                        (shown.content,),
                    )


def engines_move_forward(history: History) -> Iterator[Violation]:
    """Along its revisions an engine's epoch, seals and contents only rise."""
    for engine_id, contents in history.of_engine().items():
        epochs: dict[int, str] = {}
        last = 0
        seals: dict[int, int] = defaultdict(int)
        newest: dict[tuple[int, int, int, str], int] = {}
        for shown in contents:
            content = shown.content
            epoch = content["epoch"]
            where = f"{engine_id} at {content['rev']}"
            if epoch < last:
                yield Violation("fencing", f"{where}: epoch {epoch} after {last}", (content,))
            last = max(last, epoch)
            if epochs.setdefault(epoch, content["gen"]) != content["gen"]:
                yield Violation(
                    "fencing", f"{where}: epoch {epoch} is of two starts", (content, epochs[epoch])
                )
            if content["seal"] < seals[epoch]:
                yield Violation(
                    "states", f"{where}: seal {content['seal']} after {seals[epoch]}", (content,)
                )
            seals[epoch] = max(seals[epoch], content["seal"])
            for pp_rank, tp_rank, boot_id, _, number, asleep, _ in content["workers"]:
                key = (epoch, pp_rank, tp_rank, boot_id)
                if not asleep and number < newest.get(key, 0):
                    yield Violation(
                        "writes are ordered",
                        f"{where}: {boot_id} shows content {number} after {newest[key]}",
                        (content,),
                    )
                newest[key] = max(newest.get(key, 0), number)
