"""What a watch has told so far, folded into whole topologies. Pure.

Theory of operation. A watch is state sync: a message holds, for each engine it
names, what changed since what this watcher last got. The fold keeps what it
got and makes each change whole again. Three things can come between:

* `reset`: the full state follows. What was known is kept as *unconfirmed*
  until `synced`: an engine that comes again unchanged is no event, and one that
  does not come again is REMOVED then, so a deletion is never missed.
* A broken stream: the watch resumes at the last *synced* revision. Messages
  after it come again, which changes nothing, since each is applied whole.
* A change that does not fit what is known (a part of an engine never seen, or
  of another generation): nothing is made up. The engine waits, and once the
  message is synced the fold is `out_of_step`: its owner watches from nothing
  again, and the fold reports only what is news.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from rankbook import v1
from rankbook.convert import seconds, to_model
from rankbook.model import (
    Engine,
    EventType,
    Slot,
    State,
    Topology,
    WatchEvent,
    WorkerRecord,
    WorkerStatus,
)

__all__ = ["WatchFold"]


@dataclass(slots=True)
class _Known:
    head: Engine
    cells: dict[Slot, tuple[WorkerRecord, WorkerStatus]] = field(default_factory=dict)


@dataclass(slots=True)
class _Held:
    """An engine whose change is coming in."""

    before: _Known | None
    was_unconfirmed: bool
    changed: set[Slot] = field(default_factory=set)


class WatchFold:
    """The state of one watch. Not thread-safe; the topologies it gives are immutable."""

    def __init__(self, from_revision: int = 0, book_id: str = "") -> None:
        """Begins with nothing known.

        Args:
            from_revision: Only changes after this revision are events.
            book_id: The book that revision is of.
        """
        self._known: dict[str, _Known] = {}
        self._topologies: dict[str, Topology] = {}
        self._unconfirmed: set[str] = set()
        self._baseless: set[str] = set()
        self._held: dict[str, _Held] = {}
        self._floor = from_revision
        self._floor_book = book_id
        self._revision = from_revision
        self._book_id = book_id
        self._known_book = book_id
        self._synced = False
        self._out_of_step = False

    @property
    def resume(self) -> tuple[int, str]:
        """Revision and book to resume from."""
        return self._revision, self._book_id

    @property
    def synced(self) -> bool:
        """Whether everything up to the resume point is in."""
        return self._synced

    @property
    def out_of_step(self) -> bool:
        """Whether the watch has to start from nothing; see `restart`."""
        return self._out_of_step

    @property
    def topologies(self) -> Mapping[str, Topology]:
        """Every engine known now, by engine_id. A snapshot; later folds do not change it."""
        return dict(self._topologies)

    def restart(self) -> None:
        """Makes the next resume one from nothing, and keeps what is known to compare with."""
        self._revision, self._book_id = 0, ""
        self._out_of_step = False
        self._synced = False
        self._baseless.clear()

    def disconnected(self) -> None:
        """Notes that the stream broke: what comes next is not synced until it says so."""
        self._synced = False
        self._baseless.clear()

    def fold(self, response: v1.WatchResponse) -> tuple[WatchEvent, ...]:
        """Takes one message; what changed for whoever listens."""
        events: list[WatchEvent] = []
        if response.reset:
            self._unconfirmed = set(self._known)
            self._baseless.clear()
            self._revision, self._book_id = 0, ""
            self._synced = False
        if self._known_book and response.book_id != self._known_book:
            # Equal numbers of two books say nothing.
            self._floor = 0
        for event in response.events:
            self._take(event, response, events)
        if response.synced:
            for name in sorted(self._held):
                self._release(name, response, events)
            for name in sorted(self._unconfirmed):
                # That it is not there any more says nothing of how its workers ended.
                head = dataclasses.replace(
                    self._known[name].head, state=State.GONE, present=0, lapsed=True
                )
                self._remove(name, head, response.book_revision, response, events)
            self._unconfirmed.clear()
            self._synced = True
            if self._baseless:
                self._out_of_step = True
            else:
                self._revision = response.book_revision
                self._book_id = self._known_book = response.book_id
        return tuple(events)

    def _take(
        self, event: v1.WatchEvent, response: v1.WatchResponse, events: list[WatchEvent]
    ) -> None:
        name = event.engine.engine_id
        head = to_model(event.engine, Engine)
        known = self._known.get(name)
        if event.type == v1.EVENT_TYPE_REMOVED:
            self._baseless.discard(name)
            self._unconfirmed.discard(name)
            if known is not None or self._floor:
                self._remove(name, head, head.revision, response, events)
            return
        whole = event.type == v1.EVENT_TYPE_ADDED or event.replace
        if not whole and (known is None or known.head.generation != head.generation):
            self._baseless.add(name)
            return
        self._baseless.discard(name)
        if name not in self._held:
            self._held[name] = _Held(known, name in self._unconfirmed)
        self._unconfirmed.discard(name)
        held = self._held[name]
        cells = {} if whole or known is None else dict(known.cells)
        for worker, status in zip(event.workers, event.statuses, strict=True):
            record = to_model(worker, WorkerRecord)
            held.changed.add(record.slot)
            cells[record.slot] = (record, to_model(status, WorkerStatus))
        for gone in event.removed_slots:
            cells.pop(to_model(gone, Slot), None)
        self._known[name] = _Known(head, cells)
        # An engine too large for one message comes in several; none is told of
        # before it is whole.
        if response.synced or len(cells) >= head.present:
            self._release(name, response, events)

    def _release(self, name: str, response: v1.WatchResponse, events: list[WatchEvent]) -> None:
        held = self._held.pop(name)
        known = self._known[name]
        slots = sorted(known.cells)
        topology = Topology(
            engine=known.head,
            workers=tuple(known.cells[slot][0] for slot in slots),
            statuses=tuple(known.cells[slot][1] for slot in slots),
            book_id=response.book_id,
            book_revision=response.book_revision,
            stale_s=seconds(response.stale_for),
        )
        self._topologies[name] = topology
        before = held.before
        if held.was_unconfirmed and before is not None and before == known:
            return
        if (
            before is None
            and known.head.revision <= self._floor
            and (self._floor_book in ("", response.book_id))
        ):
            return
        events.append(
            WatchEvent(
                type=EventType.ADDED if before is None else EventType.MODIFIED,
                revision=known.head.revision,
                topology=topology,
                changed=tuple(sorted(held.changed & known.cells.keys())),
                removed=tuple(sorted(before.cells.keys() - known.cells.keys())) if before else (),
            )
        )

    def _remove(
        self,
        name: str,
        head: Engine,
        revision: int,
        response: v1.WatchResponse,
        events: list[WatchEvent],
    ) -> None:
        known = self._known.pop(name, None)
        self._topologies.pop(name, None)
        held = self._held.pop(name, None)
        if held is not None and held.before is None:
            return
        events.append(
            WatchEvent(
                type=EventType.REMOVED,
                revision=revision,
                topology=Topology(head, (), (), response.book_id, response.book_revision),
                removed=tuple(sorted(known.cells)) if known is not None else (),
            )
        )
