"""The fold of one namespace: engines, leases, the indexes over them, and what
readers ask of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rankbook import v1
from rankbook.limits import DEFAULT_NAMESPACE
from rankbook_server.core.engine import EngineState, WorkerView
from rankbook_server.core.keys import (
    SlotKey,
    engine_key,
    lease_key,
    namespace_key,
    parse_key,
    worker_key,
)
from rankbook_server.core.ops import Op, Put

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
    """A lease as the book holds it; the deadline is in memory only."""

    lease_id: str
    stored: v1.StoredLease
    ttl_s: float
    deadline: float
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
        self.lease_of_key: dict[str, str] = {}
        self.ended: OrderedDict[str, None] = OrderedDict()
        self.facts = v1.StoredNamespace(version=1)
        self.groups: dict[str, set[str]] = {}
        self.tombstones: set[str] = set()
        self.unused: set[str] = set()
        self.stale: set[str] = set()
        self._places: dict[tuple[str, str, int], set[str]] = {}
        self._place_of: dict[str, tuple[str, str, int]] = {}
        self._addresses: dict[tuple[str, int], set[tuple[str, SlotKey]]] = {}
        self._touched: set[str] = set()
        self.worker_count = 0
        self.clock_s = 0.0
        self.earliest = float("inf")

    # ------------------------------------------------------------------ fold

    def apply(self, op: Op, revision: int) -> str | None:
        """Folds one stored operation in; returns the engine it changed.

        Raises:
            ValueError: The key is not of this layout or of another namespace.
        """
        key = parse_key(op.key)
        if key.namespace != self.namespace:
            raise ValueError(f"{op.key!r} is not of namespace {self.namespace!r}")
        value = op.value if isinstance(op, Put) else None
        if key.kind == "n":
            if value is not None:
                self.facts = v1.StoredNamespace.FromString(value)
            return None
        if key.kind == "l":
            self._fold_lease(key.name, value)
            return None
        engine = self.engines.get(key.name)
        if engine is None:
            if value is None:
                return None
            engine = self.engines[key.name] = EngineState(key.name, self.namespace)
        before = len(engine.live)
        if key.kind == "e":
            self._fold_head(engine, value, revision)
        elif key.slot is not None:
            self._fold_worker(engine, key.slot, value, revision)
        self.worker_count += len(engine.live) - before
        self._file(engine)
        self._touched.add(key.name)
        return key.name

    def take_touched(self) -> set[str]:
        """Engines whose answer may have changed since the last call, those that
        only got a problem from a neighbour included."""
        touched, self._touched = self._touched, set()
        return touched

    def _fold_head(self, engine: EngineState, value: bytes | None, revision: int) -> None:
        self._unhold(engine.engine_id, CORE, engine.head.core.lease_id)
        head = v1.StoredEngine.FromString(value) if value is not None else v1.StoredEngine()
        relist = head.epoch != engine.head.epoch or head.evicted != engine.head.evicted
        if relist:
            for slot in list(engine.live):
                self._unlist(engine, slot)
        if value is None:
            self.engines.pop(engine.engine_id, None)
            self._forget(engine)
        engine.fold_head(head, revision)
        if value is None:
            return
        if relist:
            for slot in engine.live:
                self._list(engine, slot)
        if engine.head.core.live:
            self._hold(engine.engine_id, CORE, engine.head.core.lease_id)
        if any(s.epoch != engine.head.epoch or engine.head.evicted for s in engine.slots.values()):
            self.stale.add(engine.engine_id)

    def _fold_worker(
        self, engine: EngineState, slot: SlotKey, value: bytes | None, revision: int
    ) -> None:
        if slot in engine.live:
            self._unlist(engine, slot)
        if value is None:
            engine.drop_worker(slot)
            return
        engine.fold_worker(slot, v1.StoredWorker.FromString(value), revision)
        if slot in engine.live:
            self._list(engine, slot)

    def _fold_lease(self, lease_id: str, value: bytes | None) -> None:
        if value is None:
            entry = self.leases.pop(lease_id, None)
            if entry is not None:
                if self.lease_of_key.get(entry.stored.lease_key) == lease_id:
                    del self.lease_of_key[entry.stored.lease_key]
                self.ended[lease_id] = None
                while len(self.ended) > _ENDED_KEPT:
                    self.ended.popitem(last=False)
            return
        stored = v1.StoredLease.FromString(value)
        entry = self.leases.get(lease_id)
        if entry is None:
            ttl_s = stored.ttl_millis / 1000
            entry = LeaseEntry(lease_id, stored, ttl_s, self.clock_s + ttl_s)
            # A snapshot may bring the records before their lease.
            self.leases[lease_id] = entry
            self.earliest = min(self.earliest, entry.deadline)
        entry.stored = stored
        if stored.ended:
            entry.deadline = self.earliest = float("-inf")
        if stored.lease_key:
            self.lease_of_key[stored.lease_key] = lease_id

    def link_leases(self) -> None:
        """Ties records to leases after a snapshot, whose keys come in any order."""
        for entry in self.leases.values():
            entry.holds.clear()
        for engine in self.engines.values():
            for slot, state in engine.live.items():
                self._hold(engine.engine_id, slot, state.stored.lease_id)
            if engine.head.core.live:
                self._hold(engine.engine_id, CORE, engine.head.core.lease_id)

    def _hold(self, engine_id: str, slot: SlotKey, lease_id: str) -> None:
        entry = self.leases.get(lease_id)
        if entry is not None:
            entry.holds.add((engine_id, slot))

    def _unhold(self, engine_id: str, slot: SlotKey, lease_id: str) -> None:
        entry = self.leases.get(lease_id)
        if entry is not None:
            entry.holds.discard((engine_id, slot))

    # --------------------------------------------------------------- indexes

    def _list(self, engine: EngineState, slot: SlotKey) -> None:
        state = engine.live[slot]
        self._hold(engine.engine_id, slot, state.stored.lease_id)
        for pair in state.addresses:
            owners = self._addresses.setdefault(pair, set())
            owners.add((engine.engine_id, slot))
            if len(owners) > 1:
                self._stir({owner for owner, _ in owners})

    def _unlist(self, engine: EngineState, slot: SlotKey) -> None:
        state = engine.live[slot]
        self._unhold(engine.engine_id, slot, state.stored.lease_id)
        for pair in state.addresses:
            owners = self._addresses.get(pair, set())
            if len(owners) > 1:
                self._stir({owner for owner, _ in owners})
            owners.discard((engine.engine_id, slot))
            if not owners:
                self._addresses.pop(pair, None)

    def _file(self, engine: EngineState) -> None:
        """Keeps the indexes by group, by place, and of tombstones."""
        head, engine_id = engine.head, engine.engine_id
        if engine_id not in self.engines:
            return
        if engine.visible and not engine.live:
            self.tombstones.add(engine_id)
        else:
            self.tombstones.discard(engine_id)
        if engine.visible:
            self.unused.discard(engine_id)
        else:
            self.unused.add(engine_id)
        place = (head.group, head.replica, head.dp_rank) if engine.live else None
        old = self._place_of.get(engine_id)
        if place != old:
            if old is not None:
                self._leave(engine_id, old)
            if place is not None:
                members = self._places.setdefault(place, set())
                members.add(engine_id)
                self._place_of[engine_id] = place
                self._stir(members)
        if engine.visible:
            self.groups.setdefault(head.group, set()).add(engine_id)
        if len(engine.live) < engine.declared and len(self.groups.get(head.group, ())) > 1:
            self._stir(self._forming_peers(engine))

    def _leave(self, engine_id: str, place: tuple[str, str, int]) -> None:
        members = self._places.get(place, set())
        members.discard(engine_id)
        self._place_of.pop(engine_id, None)
        self._stir(members)
        if not members:
            self._places.pop(place, None)

    def _forget(self, engine: EngineState) -> None:
        engine_id = engine.engine_id
        self.tombstones.discard(engine_id)
        self.unused.discard(engine_id)
        self.stale.discard(engine_id)
        place = self._place_of.get(engine_id)
        if place is not None:
            self._leave(engine_id, place)
        members = self.groups.get(engine.head.group)
        if members is not None:
            members.discard(engine_id)
            if not members:
                del self.groups[engine.head.group]

    def _stir(self, engine_ids: Iterable[str]) -> None:
        for engine_id in engine_ids:
            other = self.engines.get(engine_id)
            if other is not None:
                other.touch()
                self._touched.add(engine_id)

    def _forming_peers(self, engine: EngineState) -> list[str]:
        """Engines of the same group, layout and DP rank that lack what this has."""
        head, found = engine.head, []
        for other_id in self.groups.get(head.group, ()):
            other = self.engines[other_id]
            if (
                other_id != engine.engine_id
                and 0 < len(other.live) < other.declared
                and other.head.layout == head.layout
                and other.head.dp_rank == head.dp_rank
                and other.live.keys().isdisjoint(engine.live)
            ):
                found.append(other_id)
        return found

    def _neighbour_problems(self, engine: EngineState) -> list[v1.Problem]:
        problems = []
        warning = v1.SEVERITY_WARNING
        head = engine.head
        others = self.rivals(engine.engine_id)
        if others:
            problems.append(
                v1.Problem(
                    reason="PLACE_TAKEN_TWICE",
                    severity=warning,
                    message=f"{', '.join(others[:8])} also claim to be replica {head.replica} of "
                    f"group {head.group}, DP rank {head.dp_rank}: give each replica its own name",
                    metadata={
                        "engines": ",".join(others[:8]),
                        "group": head.group,
                        "replica": head.replica,
                        "dp_rank": str(head.dp_rank),
                    },
                )
            )
        if 0 < len(engine.live) < engine.declared:
            halves = sorted(self._forming_peers(engine))
            if halves:
                problems.append(
                    v1.Problem(
                        reason="SPLIT_ENGINE",
                        severity=warning,
                        message=f"two engine ids claim one group: {engine.engine_id} and "
                        f"{', '.join(halves[:8])} of group {head.group} each hold a part of the "
                        "same grid; give all nodes of one engine the same engine_id",
                        metadata={"engines": ",".join(halves[:8]), "group": head.group},
                    )
                )
        shared = [
            (pair, sorted(owners - {(engine.engine_id, slot)}))
            for pair, slot in engine.shared_addresses().items()
            for owners in [self._addresses.get(pair, set())]
            if len(owners) > 1
        ]
        for (host, port), owners in shared[:8]:
            other_id, other_slot = owners[0]
            problems.append(
                v1.Problem(
                    reason="DUPLICATE_ADDRESS",
                    severity=warning,
                    message=f"{host}:{port} is also advertised by {other_id} "
                    f"pp{other_slot[0]} tp{other_slot[2]}: two workers cannot listen on one port",
                    metadata={"host": host, "port": str(port), "other_engine": other_id},
                )
            )
        return problems

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
        return engine.derive(self._neighbour_problems(engine) if engine.live else [])

    def state(self, engine_id: str) -> v1.State.ValueType:
        """State of an engine; UNSPECIFIED for one that never had a worker."""
        engine = self.engine(engine_id)
        return engine.state if engine is not None else v1.STATE_UNSPECIFIED

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

    def rivals(self, engine_id: str) -> list[str]:
        """Other live engines that claim an engine's place, by name."""
        place = self._place_of.get(engine_id)
        return sorted(self._places.get(place, set()) - {engine_id}) if place else []

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
