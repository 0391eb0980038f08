"""What writes are answered: fencing, epochs, sequences, one holder a slot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from .history import Call, History, Violation
from .living import Leases

__all__ = [
    "epochs_are_given_once",
    "old_starts_are_fenced",
    "slots_have_one_holder",
    "writes_are_ordered",
]

_WRITES = ("register", "update", "seal")


def _by_engine(calls: list[Call]) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        found[call["engine"]].append(call)
    return found


def old_starts_are_fenced(history: History) -> Iterator[Violation]:
    """Rule 2: nothing of an older start is taken after a newer one was, nor of an evicted one."""
    acked = [call for call in history.named(*_WRITES) if call.is_acked]
    evicted = [call for call in history.named("evict") if call.is_acked and call["epoch"]]
    for writes in _by_engine(acked).values():
        # By the moment at which each was surely taken.
        taken = sorted(writes, key=lambda call: call.ended_s)
        newest: Call | None = None
        index = 0
        for write in writes:
            while index < len(taken) and taken[index].ended_s < write.began_s:
                if newest is None or taken[index].reply["epoch"] > newest.reply["epoch"]:
                    newest = taken[index]
                index += 1
            if newest is not None and write.reply["epoch"] < newest.reply["epoch"]:
                yield Violation(
                    "fencing",
                    f"a write of epoch {write.reply['epoch']} was taken after one of "
                    f"{newest.reply['epoch']}",
                    _lines(newest, write),
                )
    for end in evicted:
        for write in acked:
            if (
                write["engine"] == end["engine"]
                and write.reply["epoch"] == end["epoch"]
                and write.began_s > end.ended_s
            ):
                yield Violation(
                    "fencing", "a write of an evicted start was taken", _lines(end, write)
                )


def epochs_are_given_once(history: History) -> Iterator[Violation]:
    """Rule 2: one epoch a start, one start an epoch, and a later start has a higher one."""
    told = [call for call in history.named("begin", *_WRITES) if call.is_acked]
    attempts: dict[tuple[str, str], float] = {}
    for call in history.named("begin", *_WRITES):
        attempts.setdefault((call["engine"], call["gen"]), call.began_s)
    for engine_id, calls in _by_engine(told).items():
        of_start: dict[str, Call] = {}
        of_epoch: dict[int, Call] = {}
        for call in calls:
            first = of_start.setdefault(call["gen"], call)
            if first.reply["epoch"] != call.reply["epoch"]:
                yield Violation("fencing", "a start has two epochs", _lines(first, call))
            first = of_epoch.setdefault(call.reply["epoch"], call)
            if first["gen"] != call["gen"]:
                yield Violation("fencing", "an epoch was given twice", _lines(first, call))
        for call in of_start.values():
            began_s = attempts[engine_id, call["gen"]]
            for earlier in calls:
                if earlier.ended_s < began_s and earlier.reply["epoch"] >= call.reply["epoch"]:
                    yield Violation("fencing", "an epoch went back", _lines(earlier, call))
                    break


def writes_are_ordered(history: History) -> Iterator[Violation]:
    """Rule 6: equal repeats the first reply, lower is refused, higher has a later revision."""
    by_holder: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in history.named("register", "update", "deregister"):
        if call.is_acked:
            by_holder[call["gen"], call["boot"]].append(call)
    for calls in by_holder.values():
        for number, later in enumerate(calls):
            for earlier in calls[:number]:
                if earlier.ended_s >= later.began_s or not _share_slots(earlier, later):
                    continue
                yield from _in_order(earlier, later)


def _share_slots(one: Call, other: Call) -> bool:
    if "deregister" in (one.name, other.name):
        return True
    return bool({tuple(s) for s in one["slots"]} & {tuple(s) for s in other["slots"]})


def _in_order(earlier: Call, later: Call) -> Iterator[Violation]:
    rule = "writes are ordered"
    if later["seq"] < earlier["seq"] and later.name != "deregister":
        yield Violation(
            rule,
            f"sequence {later['seq']} was taken after {earlier['seq']}",
            _lines(earlier, later),
        )
    if later["seq"] == earlier["seq"] and later.name != "deregister":
        if earlier.name == "deregister":
            yield Violation(
                rule, "a write was taken that its holder had closed", _lines(earlier, later)
            )
        elif earlier.name == later.name and earlier.reply["rev"] != later.reply["rev"]:
            yield Violation(rule, "a repeat has another revision", _lines(earlier, later))
    if (
        later["seq"] > earlier["seq"]
        and "deregister" not in (earlier.name, later.name)
        and later.reply["rev"] < earlier.reply["rev"]
    ):
        yield Violation(rule, "a later write has an earlier revision", _lines(earlier, later))


def slots_have_one_holder(history: History) -> Iterator[Violation]:
    """Rule 5: no slot is given to a second process while the first one's lease lives."""
    leases = Leases(history)
    by_slot: dict[tuple[str, int, int], list[Call]] = defaultdict(list)
    for call in history.named("register"):
        if call.is_acked:
            for pp_rank, tp_rank in call["slots"]:
                by_slot[call["gen"], pp_rank, tp_rank].append(call)
    for calls in by_slot.values():
        for number, later in enumerate(calls):
            # The last of each other holder is the one that says most.
            last: dict[str, Call] = {}
            for earlier in calls[:number]:
                if earlier["boot"] != later["boot"] and earlier.ended_s < later.began_s:
                    last[earlier["boot"]] = earlier
            for earlier in last.values():
                if later.ended_s < leases.holds_until_s(earlier, later.ended_s):
                    yield Violation(
                        "one holder a slot",
                        f"{later['boot']} got what {earlier['boot']} held",
                        _lines(earlier, later),
                    )


def _lines(*calls: Call) -> tuple[object, ...]:
    return tuple(line for call in calls for line in (call.line, call.done))
