"""One engine: the fold of its head and slots, and what follows from them.

Everything that decides an engine's state is in this file. The state is the
first line of this table that holds:

    GONE      no slot of the current epoch is live, or the epoch was evicted
    INVALID   a problem of severity ERROR: layers differ inside a stage,
              overlap between stages, or leave a hole once every slot is filled
    DEGRADED  COMPLETE was reached in this epoch, and now a slot, a payload, or
              the core of a sealed engine is missing
    DRAINING  COMPLETE, and the drain flag is set
    READY     COMPLETE, the seal's digest is today's, the core is alive
    COMPLETE  every slot is live and awake, and the stages cover the layers
    FORMING   anything else

An engine that never was COMPLETE stays FORMING while the drain flag is set:
DRAINING may be used by existing peers, and half a grid may be used by nobody.

Sums over the workers are kept as they come and go, so that one change to an
engine of thousands of slots costs as little as one to a small one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from rankbook import v1
from rankbook.limits import grid_slots
from rankbook_server.core.keys import SlotKey, slot_message
from rankbook_server.core.problems import (
    asleep,
    core_lost,
    evicted,
    layer_problems,
    loopback,
    ranks_lost,
    seal_outdated,
    two_starts,
)
from rankbook_server.core.slots import SlotState, WorkerView, fold_slot, seal_digest

__all__ = [
    "MAX_MISSING_SHOWN",
    "EngineState",
]

MAX_MISSING_SHOWN = 1024
T = TypeVar("T")
_MAX_PROBLEMS = 64
_MAX_HASHES = 16


def _less(counts: Counter[T], key: T) -> None:
    """Takes one away; a key that is down to none is forgotten."""
    if counts[key] > 1:
        counts[key] -= 1
    else:
        del counts[key]


class EngineState:
    """Head, slots and sums of one engine."""

    def __init__(self, engine_id: str, namespace: str) -> None:
        self.engine_id = engine_id
        self.namespace = namespace
        self.head = v1.StoredEngine()
        self.head_revision = 0
        self.revision = 0
        self.declared = 0
        self.slots: dict[SlotKey, SlotState] = {}
        self.change_time = Timestamp()
        self._was_complete = False
        self._reset_sums()
        self.touch()

    def _reset_sums(self) -> None:
        self.live: dict[SlotKey, SlotState] = {}
        self.bytes = 0
        self.asleep: set[SlotKey] = set()
        self._unreachable: set[SlotKey] = set()
        self._ranges: dict[int, Counter[tuple[int, int]]] = {}
        self._hashes: Counter[str] = Counter()
        self._labels: Counter[tuple[str, str]] = Counter()
        self._order: list[SlotKey] | None = None

    # ------------------------------------------------------------------ fold

    def fold_head(self, head: v1.StoredEngine, revision: int) -> None:
        """Takes a stored head in."""
        fresh = head.epoch != self.head.epoch or head.evicted != self.head.evicted
        self.head = head
        self.head_revision = revision
        self.declared = grid_slots(head.layout)
        self._changed(head.change_revision or revision, head.change_time)
        if fresh:
            self._was_complete = head.was_complete
            self._reset_sums()
            if not head.evicted:
                # A snapshot may bring the slots before the head.
                for slot, state in self.slots.items():
                    if state.epoch == head.epoch:
                        self._changed(state.revision, state.stored.change_time)
                        if state.live:
                            self._count(slot, state)
        self._was_complete = self._was_complete or head.was_complete
        self.touch()

    def fold_worker(self, slot: SlotKey, stored: v1.StoredWorker, revision: int) -> SlotState:
        """Takes a stored slot in; returns it."""
        state = fold_slot(stored, revision, slot)
        counts = state.epoch == self.head.epoch and not self.head.evicted
        if slot in self.live:
            self._uncount(slot)
            if not (counts and state.live):
                del self.live[slot]
                self._order = None
        self.slots[slot] = state
        if counts:
            self._changed(state.revision, stored.change_time)
            if state.live:
                self._count(slot, state)
        self.touch()
        return state

    def drop_worker(self, slot: SlotKey) -> None:
        """Forgets a slot whose key was deleted."""
        if slot in self.live:
            self._uncount(slot)
            del self.live[slot]
            self._order = None
        self.slots.pop(slot, None)
        self.touch()

    def _changed(self, revision: int, time: Timestamp) -> None:
        if revision > self.revision:
            self.revision, self.change_time = revision, time

    def touch(self) -> None:
        """Makes the next read derive anew."""
        self._derived: v1.Engine | None = None
        self._errors: list[v1.Problem] | None = None
        self._digest: bytes | None = None

    def _count(self, slot: SlotKey, state: SlotState) -> None:
        if slot not in self.live:
            self._order = None
        self.live[slot] = state
        self.bytes += state.size
        record = state.stored.record
        stage = self._ranges.get(slot[0])
        if stage is None:
            stage = self._ranges[slot[0]] = Counter()
        stage[state.range] += 1
        if record.compat.hash:
            self._hashes[record.compat.hash] += 1
        for label in record.labels.items():
            self._labels[label] += 1
        if state.stored.asleep:
            self.asleep.add(slot)
        if not state.exposed:
            self._unreachable.add(slot)

    def _uncount(self, slot: SlotKey) -> None:
        """Takes a slot out of the sums and leaves it in `live`, in its place."""
        state = self.live[slot]
        self.bytes -= state.size
        record = state.stored.record
        stage = self._ranges[slot[0]]
        _less(stage, state.range)
        if not stage:
            del self._ranges[slot[0]]
        if record.compat.hash:
            _less(self._hashes, record.compat.hash)
        for label in record.labels.items():
            _less(self._labels, label)
        self.asleep.discard(slot)
        self._unreachable.discard(slot)

    # ------------------------------------------------------------------ read

    @property
    def visible(self) -> bool:
        """Whether readers may see it: a start that has had a worker."""
        return self.head.epoch > 0

    @property
    def was_complete(self) -> bool:
        """COMPLETE was reached in this epoch.

        Looked at by every decision on the engine, so between transactions and
        never inside one, and written by the first that takes it away.
        """
        if not self._was_complete and self.complete():
            self._was_complete = True
        return self._was_complete

    @property
    def unsaved(self) -> bool:
        """COMPLETE was reached, and the stored head does not say so yet."""
        return self.was_complete and not self.head.was_complete

    def order(self) -> list[SlotKey]:
        """Live slots in grid order."""
        if self._order is None:
            self._order = sorted(self.live)
        return self._order

    def digest(self) -> bytes:
        """Digest over what is present now."""
        if self._digest is None:
            live = self.live
            self._digest = seal_digest([live[slot].piece for slot in self.order()])
        return self._digest

    def missing(self) -> list[SlotKey]:
        """Slots that are not filled, in grid order; the first 1,024."""
        layout = self.head.layout
        found: list[SlotKey] = []
        if len(self.live) == self.declared:
            return found
        for pp in range(layout.pp_size):
            for pcp in range(layout.pcp_size or 1):
                for tp in range(layout.tp_size):
                    if (pp, pcp, tp) not in self.live:
                        found.append((pp, pcp, tp))
                        if len(found) == MAX_MISSING_SHOWN:
                            return found
        return found

    def complete(self) -> bool:
        """Every slot live and awake, layers proven."""
        return (
            self.visible
            and bool(self.live)
            and len(self.live) == self.declared
            and not self.asleep
            and not self.errors()
        )

    def sealed(self) -> bool:
        """The seal that stands is of what is present now."""
        return bool(self.head.seal.number) and self.head.seal.digest == self.digest()

    def workers(self) -> list[WorkerView]:
        """Live workers in slot order."""
        states = [(slot, self.live[slot]) for slot in self.order()]
        return [
            WorkerView(slot, state.revision, state.stored.record, state.status())
            for slot, state in states
        ]

    def emptied(self) -> list[tuple[SlotKey, int]]:
        """Slots of this epoch that were filled and are empty, with the revision."""
        epoch, evicted = self.head.epoch, self.head.evicted
        return [
            (slot, self.revision if state.live else state.revision)
            for slot, state in self.slots.items()
            if state.epoch == epoch and (evicted or not state.live)
        ]

    # -------------------------------------------------------------- problems

    def errors(self) -> list[v1.Problem]:
        """Problems of severity ERROR: what makes the engine INVALID."""
        if self._errors is None:
            full = len(self.live) == self.declared
            num_layers = self.head.layout.num_layers
            self._errors = layer_problems(self._ranges, num_layers, full=full) if self.live else []
        return self._errors

    def _warnings(self) -> list[v1.Problem]:
        head, seal = self.head, self.head.seal
        found = two_starts(self.engine_id, head)
        full = len(self.live) == self.declared
        if self.was_complete and not full:
            found.append(ranks_lost(self.missing(), len(self.live), self.declared))
        if self.asleep:
            found.append(asleep(sorted(self.asleep)))
        if seal.number and not head.core.live:
            found.append(core_lost(seal.boot_id))
        elif seal.number and full and not self.asleep and not self.sealed():
            found.append(seal_outdated(seal.number))
        if self._unreachable:
            found.append(loopback(sorted(self._unreachable)))
        return found

    # ----------------------------------------------------------------- state

    def state(self) -> v1.State.ValueType:
        """The state now."""
        head = self.head
        if not self.live:
            return v1.STATE_GONE
        if self.errors():
            return v1.STATE_INVALID
        complete = len(self.live) == self.declared and not self.asleep
        if self.was_complete and (not complete or (head.seal.number and not head.core.live)):
            return v1.STATE_DEGRADED
        if not complete:
            return v1.STATE_FORMING
        if head.HasField("drain"):
            return v1.STATE_DRAINING
        if head.core.live and self.sealed():
            return v1.STATE_READY
        return v1.STATE_COMPLETE

    def derive(self, neighbours: Callable[[EngineState], list[v1.Problem]]) -> v1.Engine:
        """The engine as readers see it; kept until the next change.

        Args:
            neighbours: Gives the problems that come from other engines.
        """
        if self._derived is not None:
            return self._derived
        head = self.head
        problems = [*self.errors(), *self._warnings(), *neighbours(self)] if self.live else []
        if head.HasField("eviction"):
            problems.append(evicted(head.eviction))
        engine = v1.Engine(
            namespace=self.namespace,
            engine_id=self.engine_id,
            group=head.group,
            replica=head.replica,
            dp_rank=head.dp_rank,
            role=head.role,
            state=self.state(),
            generation=head.generation,
            epoch=head.epoch,
            revision=self.revision,
            start_revision=head.start_revision or self.head_revision,
            layout=head.layout,
            present=len(self.live),
            declared=self.declared,
            missing=[slot_message(slot) for slot in self.missing()],
            stages=[
                v1.Stage(pp_rank=pp, start_layer=span[0], end_layer=span[1])
                for pp in sorted(self._ranges)
                for span in [min(self._ranges[pp])]
            ],
            problems=problems[:_MAX_PROBLEMS],
            compat_hashes=sorted(self._hashes)[:_MAX_HASHES],
            labels={k: v for (k, v), n in self._labels.items() if n == len(self.live)},
            start_time=head.start_time,
            change_time=self.change_time,
            asleep=[slot_message(slot) for slot in sorted(self.asleep)],
            lapsed=head.lapsed,
        )
        if head.HasField("seal"):
            engine.seal.CopyFrom(head.seal)
        if head.core.live:
            engine.core.CopyFrom(head.core.record)
        if head.HasField("drain"):
            engine.drain.CopyFrom(head.drain)
        if not self.live and head.HasField("successor"):
            engine.successor.CopyFrom(head.successor)
        if self.live:
            first = self.live[self.order()[0]].stored
            if first.record.HasField("model"):
                engine.model.CopyFrom(first.record.model)
        self._derived = engine
        return engine
