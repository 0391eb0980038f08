"""The fold of one namespace: engines, leases, the indexes over them, and what
readers ask of them."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rankbook import v1
from rankbook.limits import DEFAULT_NAMESPACE, DEFAULT_TTL_S
from rankbook_server.core.decision import Instant
from rankbook_server.core.engine import EngineState
from rankbook_server.core.keys import (
    SlotKey,
    engine_key,
    lease_key,
    namespace_key,
    parse_key,
    worker_key,
)
from rankbook_server.core.neighbours import Neighbours
from rankbook_server.core.ops import Op, Put
from rankbook_server.core.slots import WorkerView
from rankbook_server.core.stored import read

__all__ = ["CORE", "BookFold", "BookLimits", "LeaseEntry"]

CORE: SlotKey = (-1, -1, -1)
"""Stands for the engine core's own record where slots are listed."""
_ENDED_KEPT = 65_536


@dataclass(frozen=True, slots=True)
class BookLimits:
    """Bounds and periods of one namespace."""

    max_engines: int = 65_536
    max_leases: int = 262_144
    tombstone_ttl_s: float = 3600.0
    max_tombstones: int = 10_000


@dataclass(slots=True)
class LeaseEntry:
    """A lease as the book holds it; all but `stored` is in memory only.

    `due` is when it is looked at next, at or before the deadline: a renewal
    moves the deadline alone. Where several servers share a book, a lease that
    another one hears of is `kept`: it lives, whatever the deadline here says.
    """

    lease_id: str
    stored: v1.StoredLease
    ttl_s: float
    deadline: float
    due: float = float("inf")
    kept: bool = False
    heard_s: float = float("-inf")
    holds: set[tuple[str, SlotKey]] = field(default_factory=set)

    def lives(self, now_s: float) -> bool:
        """Whether it has not ended."""
        return self.kept or self.deadline > now_s

    def left_s(self, now_s: float) -> float:
        """How long it lives without another sign of its holder; an upper bound."""
        left_s = self.deadline - now_s
        return left_s if left_s > 0 or not self.kept else self.ttl_s


@dataclass(slots=True)
class Orphans:
    """Live records under a lease that is not in the book."""

    since_s: float
    holds: set[tuple[str, SlotKey]] = field(default_factory=set)


class BookFold:
    """One namespace of a book. Not thread-safe: one writer owns it."""

    def __init__(
        self,
        namespace: str = DEFAULT_NAMESPACE,
        *,
        new_id: Callable[[], str],
        limits: BookLimits | None = None,
    ) -> None:
        self.namespace = namespace
        self.limits = limits or BookLimits()
        self.new_id = new_id
        self.engines: dict[str, EngineState] = {}
        self.leases: dict[str, LeaseEntry] = {}
        self.orphans: dict[str, Orphans] = {}
        self.lease_of_key: dict[str, str] = {}
        self.ended: OrderedDict[str, None] = OrderedDict()
        self.facts = v1.StoredNamespace(version=1)
        self.groups: dict[str, set[str]] = {}
        self.tombstones: set[str] = set()
        self.unused: set[str] = set()
        self.stale: set[str] = set()
        self.unsaved: set[str] = set()
        self.neighbours = Neighbours(self.engines, self._stir)
        self._group_of: dict[str, str] = {}
        self._due: list[tuple[float, str]] = []
        self._touched: set[str] = set()
        self.worker_count = 0
        self.clock_s = 0.0

    # ------------------------------------------------------------------ fold

    def apply(self, op: Op, revision: int) -> str | None:
        """Folds one stored operation in; returns the engine it changed.

        Raises:
            Unreadable: The key or the value is none that this version knows.
            ValueError: The key is of another namespace.
        """
        key = parse_key(op.key)
        if key.namespace != self.namespace:
            raise ValueError(f"{op.key!r} is not of namespace {self.namespace!r}")
        value = op.value if isinstance(op, Put) else None
        if key.kind == "n":
            if value is not None:
                self.facts = read(v1.StoredNamespace, op.key, value)
            return None
        if key.kind == "l":
            self._fold_lease(key.name, value, op.key)
            return None
        engine = self.engines.get(key.name)
        if engine is None:
            if value is None:
                return None
            engine = self.engines[key.name] = EngineState(key.name, self.namespace)
        before = len(engine.live)
        if key.slot is not None:
            self._fold_worker(engine, key.slot, value, revision, op.key)
        elif value is not None:
            self._fold_head(engine, read(v1.StoredEngine, op.key, value), revision)
        else:
            self._drop_engine(engine)
        if key.name in self.engines:
            self.worker_count += len(engine.live) - before
            self._file(engine)
        self._touched.add(key.name)
        return key.name

    def take_touched(self) -> set[str]:
        """Engines whose answer may have changed since the last call, those that
        only got a problem from a neighbour included."""
        touched, self._touched = self._touched, set()
        return touched

    def _fold_head(self, engine: EngineState, head: v1.StoredEngine, revision: int) -> None:
        self._unhold(engine.engine_id, CORE, engine.head.core.lease_id)
        relist = head.epoch != engine.head.epoch or head.evicted != engine.head.evicted
        if relist:
            for slot in engine.live:
                self._unlist(engine, slot)
        engine.fold_head(head, revision)
        if relist:
            for slot in engine.live:
                self._list(engine, slot)
            if len(engine.slots) > len(engine.live):
                self.stale.add(engine.engine_id)
        if head.core.live:
            self._hold(engine.engine_id, CORE, head.core.lease_id)

    def _drop_engine(self, engine: EngineState) -> None:
        self._unhold(engine.engine_id, CORE, engine.head.core.lease_id)
        for slot in engine.live:
            self._unlist(engine, slot)
        self.worker_count -= len(engine.live)
        self._forget(engine.engine_id)

    def _fold_worker(
        self, engine: EngineState, slot: SlotKey, value: bytes | None, revision: int, key: str
    ) -> None:
        stored = read(v1.StoredWorker, key, value) if value is not None else None
        if slot in engine.live:
            self._unlist(engine, slot)
        if stored is None:
            engine.drop_worker(slot)
            return
        state = engine.fold_worker(slot, stored, revision)
        if slot in engine.live:
            self._list(engine, slot)
        elif state.live or state.epoch != engine.head.epoch:
            self.stale.add(engine.engine_id)

    def _fold_lease(self, lease_id: str, value: bytes | None, key: str) -> None:
        entry = self.leases.get(lease_id)
        if value is None:
            self.unsaved.discard(lease_id)
            if entry is None:
                return
            del self.leases[lease_id]
            self._free_key(entry)
            for engine_id, slot in entry.holds:
                self._hold(engine_id, slot, lease_id)
            self.ended[lease_id] = None
            while len(self.ended) > _ENDED_KEPT:
                self.ended.popitem(last=False)
            return
        stored = read(v1.StoredLease, key, value)
        ttl_s = stored.ttl_millis / 1000
        if entry is None:
            entry = LeaseEntry(lease_id, stored, ttl_s, self.clock_s + ttl_s)
            self.leases[lease_id] = entry
            if (orphans := self.orphans.pop(lease_id, None)) is not None:
                entry.holds = orphans.holds
        entry.stored = stored
        if lease_id not in self.unsaved or round(entry.ttl_s * 1000) == stored.ttl_millis:
            entry.ttl_s = ttl_s
            self.unsaved.discard(lease_id)
        if stored.ended:
            entry.deadline, entry.kept = float("-inf"), False
            self._free_key(entry)
        elif stored.lease_key:
            self.lease_of_key[stored.lease_key] = lease_id
        self.schedule(entry)

    def _free_key(self, entry: LeaseEntry) -> None:
        key = entry.stored.lease_key
        if self.lease_of_key.get(key) == entry.lease_id:
            del self.lease_of_key[key]

    def link_leases(self) -> None:
        """Ties records to leases after a snapshot, whose keys come in any order."""
        self.orphans.clear()
        for entry in self.leases.values():
            entry.holds.clear()
        for engine in self.engines.values():
            for slot, state in engine.live.items():
                self._hold(engine.engine_id, slot, state.stored.lease_id)
            if engine.head.core.live:
                self._hold(engine.engine_id, CORE, engine.head.core.lease_id)

    # ---------------------------------------------------------------- leases

    def schedule(self, entry: LeaseEntry) -> None:
        """Has a lease looked at when its deadline comes, or sooner."""
        if entry.deadline < entry.due:
            entry.due = entry.deadline
            heapq.heappush(self._due, (entry.due, entry.lease_id))

    def due_leases(self, now_s: float, most: int) -> list[LeaseEntry]:
        """Leases whose deadline has come, oldest first; they stay due."""
        found: list[LeaseEntry] = []
        while self._due and self._due[0][0] <= now_s and len(found) < most:
            at, lease_id = heapq.heappop(self._due)
            entry = self.leases.get(lease_id)
            if entry is None or entry.due != at:
                continue
            if not entry.lives(now_s):
                found.append(entry)
                continue
            entry.due = float("inf")
            if not entry.kept:
                self.schedule(entry)
        for entry in found:
            heapq.heappush(self._due, (entry.due, entry.lease_id))
        return found

    def grant_grace(self, now: Instant) -> None:
        """Gives every lease a full time to live from now (rule 8)."""
        self.clock_s = now.mono_s
        for entry in self.leases.values():
            if not entry.stored.ended:
                entry.deadline = now.mono_s + entry.ttl_s
            entry.due = entry.deadline
        for orphans in self.orphans.values():
            orphans.since_s = now.mono_s
        self._due = [(entry.due, entry.lease_id) for entry in self.leases.values()]
        heapq.heapify(self._due)

    def next_deadline(self) -> float | None:
        """Nothing is to do for `expire` before this monotonic instant; None
        without leases."""
        if self.unsaved:
            return float("-inf")
        first = [orphans.since_s + DEFAULT_TTL_S for orphans in self.orphans.values()]
        if self._due:
            first.append(self._due[0][0])
        return min(first, default=None)

    # --------------------------------------------------------------- indexes

    def _hold(self, engine_id: str, slot: SlotKey, lease_id: str) -> None:
        entry = self.leases.get(lease_id)
        if entry is not None:
            entry.holds.add((engine_id, slot))
            return
        # Whoever writes to a shared store may do so in another order, or not at all.
        orphans = self.orphans.setdefault(lease_id, Orphans(self.clock_s))
        orphans.holds.add((engine_id, slot))

    def _unhold(self, engine_id: str, slot: SlotKey, lease_id: str) -> None:
        entry = self.leases.get(lease_id)
        if entry is not None:
            entry.holds.discard((engine_id, slot))
        elif (orphans := self.orphans.get(lease_id)) is not None:
            orphans.holds.discard((engine_id, slot))
            if not orphans.holds:
                del self.orphans[lease_id]

    def _list(self, engine: EngineState, slot: SlotKey) -> None:
        state = engine.live[slot]
        self._hold(engine.engine_id, slot, state.stored.lease_id)
        if state.addresses:
            self.neighbours.enlist(engine.engine_id, slot, state.addresses)

    def _unlist(self, engine: EngineState, slot: SlotKey) -> None:
        state = engine.live[slot]
        self._unhold(engine.engine_id, slot, state.stored.lease_id)
        if state.addresses:
            self.neighbours.delist(engine.engine_id, slot, state.addresses)

    def _file(self, engine: EngineState) -> None:
        """Keeps the indexes of tombstones, groups and neighbours."""
        engine_id = engine.engine_id
        if not engine.visible:
            self.unused.add(engine_id)
            return
        self.unused.discard(engine_id)
        if engine.live:
            self.tombstones.discard(engine_id)
        else:
            self.tombstones.add(engine_id)
        group = engine.head.group
        old = self._group_of.get(engine_id)
        if group != old:
            self._leave_group(engine_id)
            self._group_of[engine_id] = group
            self.groups.setdefault(group, set()).add(engine_id)
        self.neighbours.file(engine)

    def _leave_group(self, engine_id: str) -> None:
        group = self._group_of.pop(engine_id, None)
        if group is not None:
            members = self.groups[group]
            members.discard(engine_id)
            if not members:
                del self.groups[group]

    def _forget(self, engine_id: str) -> None:
        self.engines.pop(engine_id, None)
        self.tombstones.discard(engine_id)
        self.unused.discard(engine_id)
        self.stale.discard(engine_id)
        self._leave_group(engine_id)
        self.neighbours.forget(engine_id)

    def _stir(self, engine_ids: Iterable[str]) -> None:
        for engine_id in engine_ids:
            other = self.engines.get(engine_id)
            if other is not None:
                other.touch()
                self._touched.add(engine_id)

    # ------------------------------------------------------------------ read

    def engine_ids(self) -> Iterable[str]:
        """Engines that readers may see, tombstones included, by name."""
        return sorted(name for name, engine in self.engines.items() if engine.visible)

    def engine(self, engine_id: str) -> v1.Engine | None:
        """The engine as readers see it; kept until its next change, so do not
        change it. None for one that never had a worker."""
        engine = self.engines.get(engine_id)
        if engine is None or not engine.visible:
            return None
        return engine.derive(self.neighbours.problems)

    def state(self, engine_id: str) -> v1.State.ValueType:
        """State of an engine; UNSPECIFIED for one that never had a worker."""
        engine = self.engines.get(engine_id)
        if engine is None or not engine.visible:
            return v1.STATE_UNSPECIFIED
        return engine.state()

    def workers(self, engine_id: str) -> Sequence[WorkerView]:
        """Live workers in slot order."""
        engine = self.engines.get(engine_id)
        return engine.workers() if engine is not None else ()

    def emptied(self, engine_id: str) -> Sequence[tuple[SlotKey, int]]:
        """Slots that were filled in this epoch and are empty, with the revision."""
        engine = self.engines.get(engine_id)
        return engine.emptied() if engine is not None else ()

    def group(self, group: str) -> Iterable[str]:
        """Engines of a group, tombstones included, by name."""
        return sorted(self.groups.get(group, ()))

    @property
    def leases_alive(self) -> int:
        """Leases granted and not ended."""
        return len(self.leases)

    @property
    def epoch_floor(self) -> int:
        """An engine unknown to the book starts above this epoch."""
        return self.facts.epoch_floor

    @property
    def horizon_revision(self) -> int:
        """Tombstones at or below this revision may be gone."""
        return self.facts.horizon_revision

    # ------------------------------------------------------------------ keys

    def head_put(self, engine_id: str, head: v1.StoredEngine) -> Put:
        """The operation that writes an engine's head."""
        return Put(engine_key(self.namespace, engine_id), head.SerializeToString())

    def worker_put(self, engine_id: str, slot: SlotKey, stored: v1.StoredWorker) -> Put:
        """The operation that writes a slot."""
        key = worker_key(self.namespace, engine_id, slot)
        return Put(key, stored.SerializeToString())

    def lease_put(self, lease_id: str, stored: v1.StoredLease) -> Put:
        """The operation that writes a lease."""
        return Put(lease_key(self.namespace, lease_id), stored.SerializeToString())

    def facts_put(self, facts: v1.StoredNamespace) -> Put:
        """The operation that writes the namespace's own facts."""
        return Put(namespace_key(self.namespace), facts.SerializeToString())
