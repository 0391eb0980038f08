"""Leases that must live, and records that must be there.

A lease that was answered as alive lives for its time from the moment at which
that call was made, at least: the server cannot have heard of it earlier. An
ended lease never lives again, so one answer speaks for all the time before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from .history import Call, History, Shown, Violation

__all__ = ["Leases", "acknowledged_is_kept", "leases_live"]


class Leases:
    """How long each lease lives at least, and what may have ended it or its records."""

    def __init__(self, history: History) -> None:
        """Reads the calls of a run."""
        self.until_s: dict[str, float] = defaultdict(float)
        """By lease: it lives at least so long."""
        self.why: dict[str, Call] = {}
        """By lease: the call that says so."""
        self._revoked: dict[str, float] = {}
        self._left: dict[tuple[str, str], list[Call]] = defaultdict(list)
        self._registers: dict[tuple[str, str], list[Call]] = defaultdict(list)
        self._evicted: dict[str, list[float]] = defaultdict(list)
        self._starts: dict[str, dict[str, float]] = defaultdict(dict)
        for call in history.calls:
            self._read(call)

    def _read(self, call: Call) -> None:
        if call.name in ("register", "seal"):
            if call.is_acked:
                self._lives(call.reply["lease"], call, call.reply["ttl"])
            self._starts[call["engine"]].setdefault(call["gen"], call.began_s)
        if call.name == "register":
            self._registers[call["gen"], call["boot"]].append(call)
        elif call.name == "renew" and call.is_acked:
            reply = call.reply
            for lease, state, ttl in zip(
                call["leases"], reply["states"], reply["ttls"], strict=True
            ):
                if state == "ALIVE":
                    self._lives(lease, call, ttl)
        elif call.name == "revoke":
            self._revoked.setdefault(call["lease"], call.began_s)
        elif call.name == "deregister":
            self._left[call["gen"], call["boot"]].append(call)
        elif call.name == "evict":
            self._evicted[call["engine"]].append(call.began_s)

    def _lives(self, lease: str, call: Call, ttl_s: float) -> None:
        if call.began_s + ttl_s > self.until_s[lease]:
            self.until_s[lease] = call.began_s + ttl_s
            self.why[lease] = call

    def revoked_by(self, lease: str, at_s: float) -> bool:
        """Whether a lease may have been given up by then."""
        return self._revoked.get(lease, at_s + 1) <= at_s

    def fenced_by(self, engine_id: str, generation: str, at_s: float) -> bool:
        """Whether a start may have been replaced or evicted by then."""
        newer = any(
            began_s <= at_s
            for other, began_s in self._starts[engine_id].items()
            if other != generation
        )
        return newer or any(began_s <= at_s for began_s in self._evicted[engine_id])

    def evicted_by(self, engine_id: str, at_s: float, since_s: float) -> bool:
        """Whether an engine may have been evicted between two moments."""
        return any(
            began_s <= at_s for began_s in self._evicted[engine_id] if began_s >= since_s - 60
        )

    def holds_until_s(self, register: Call, at_s: float) -> float:
        """Until when a registration's records must be there, as far as is known at a moment.

        Zero where they may have gone otherwise than by the end of the lease.
        """
        lease = register.reply["lease"]
        if self.revoked_by(lease, at_s):
            return 0.0
        key = (register["gen"], register["boot"])
        if any(c.began_s <= at_s and c["seq"] > register["seq"] for c in self._left[key]):
            return 0.0
        for later in self._registers[key]:
            if (
                later["seq"] > register["seq"]
                and later.began_s <= at_s
                and (later["key"] != register["key"] or self.until_s[lease] < later.ended_s)
            ):
                # It may be under another lease now, of which nothing is known here.
                return 0.0
        if self.evicted_by(register["engine"], at_s, register.began_s):
            return 0.0
        return self.until_s[lease]


def leases_live(history: History) -> Iterator[Violation]:
    """Rule 8: no lease ends before its time, and none is fenced without a cause."""
    leases = Leases(history)
    engine_of: dict[str, Call] = {}
    for call in history.named("register", "seal"):
        if call.is_acked:
            engine_of.setdefault(call.reply["lease"], call)
    for call in history.named("renew"):
        if not call.is_acked:
            continue
        for lease, state in zip(call["leases"], call.reply["states"], strict=True):
            if state == "ALIVE":
                continue
            if state == "FENCED":
                of = engine_of.get(lease)
                if of is not None and not leases.fenced_by(of["engine"], of["gen"], call.ended_s):
                    yield Violation(
                        "fencing",
                        f"lease {lease} is fenced and nothing took its place",
                        (of.line, of.done, call.line, call.done),
                    )
            elif call.ended_s < leases.until_s[lease] and not leases.revoked_by(
                lease, call.ended_s
            ):
                why = leases.why[lease]
                yield Violation(
                    "leases live",
                    f"lease {lease} is {state} {leases.until_s[lease] - call.ended_s:.2f} s "
                    "before its time",
                    (why.line, why.done, call.line, call.done),
                )


def acknowledged_is_kept(history: History) -> Iterator[Violation]:
    """Rules 5, 8 and 10: what was acknowledged is shown for as long as its lease must live."""
    leases = Leases(history)
    writes: dict[str, list[Call]] = defaultdict(list)
    for call in history.named("register", "update"):
        if call.is_acked:
            writes[call["engine"]].append(call)
    for engine_id, contents in history.of_engine().items():
        claims = sorted(writes[engine_id], key=lambda call: int(call.reply["rev"]))
        index = 0
        # By generation, slot and holder: the last write, and the last that named a lease.
        last: dict[tuple[str, int, int, str], tuple[Call, Call | None]] = {}
        for shown in contents:
            revision = shown.content["rev"]
            while index < len(claims) and claims[index].reply["rev"] <= revision:
                _take(claims[index], last)
                index += 1
            for (generation, pp_rank, tp_rank, boot_id), (write, named) in last.items():
                if generation == shown.content["gen"]:
                    yield from _is_kept(leases, shown, (pp_rank, tp_rank), boot_id, write, named)


def _take(call: Call, last: dict[tuple[str, int, int, str], tuple[Call, Call | None]]) -> None:
    for pp_rank, tp_rank in call["slots"]:
        key = (call["gen"], pp_rank, tp_rank, call["boot"])
        known = last.get(key)
        if known is not None and known[0]["seq"] > call["seq"]:
            continue
        named = call if call.name == "register" else (known[1] if known else None)
        last[key] = (call, named)


def _is_kept(
    leases: Leases,
    shown: Shown,
    slot: tuple[int, int],
    boot_id: str,
    write: Call,
    named: Call | None,
) -> Iterator[Violation]:
    content = shown.content
    rows = {(row[0], row[1]): row for row in content["workers"]}
    row = rows.get(slot)
    where = f"{content['engine']} at {content['rev']}"
    if row is not None and row[2] == boot_id:
        if not row[5] and row[4] < write["content"]:
            yield Violation(
                "acknowledged and lost",
                f"{where} shows content {row[4]} of {boot_id}, {write['content']} was acknowledged",
                (write.line, write.done, content),
            )
        elif not row[5] and write.get("asleep") and row[4] <= write["seq"]:
            yield Violation(
                "acknowledged and lost",
                f"{where} shows a payload of {boot_id} that was withdrawn",
                (write.line, write.done, content),
            )
        return
    if named is None:
        return
    until_s = leases.holds_until_s(named, shown.first_s)
    if shown.first_s < until_s:
        held = "nobody" if row is None else row[2]
        why = leases.why[named.reply["lease"]]
        yield Violation(
            "acknowledged and lost" if row is None else "one holder a slot",
            f"{where} shows {held} in {slot}, which {boot_id} holds for "
            f"{until_s - shown.first_s:.2f} s more",
            (named.line, named.done, why.line, why.done, content),
        )
