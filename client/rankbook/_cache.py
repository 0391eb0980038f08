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
from rankbook.convert import to_model
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
        same_book = not self._known_book or response.book_id == self._known_book
        for event in response.events:
            self._take(event, response, same_book, events)
        if response.synced:
            for name in sorted(self._unconfirmed):
                self._forget(name, response, events)
            self._unconfirmed.clear()
            self._synced = True
            if self._baseless:
                self._out_of_step = True
            else:
                self._revision = response.book_revision
                self._book_id = self._known_book = response.book_id
        return tuple(events)

    def _take(
        self,
        event: v1.WatchEvent,
        response: v1.WatchResponse,
        same_book: bool,
        events: list[WatchEvent],
    ) -> None:
        name = event.engine.engine_id
        known = self._known.get(name)
        confirmed = name not in self._unconfirmed
        self._unconfirmed.discard(name)
        if event.type == v1.EVENT_TYPE_REMOVED:
            self._baseless.discard(name)
            if known is None and not self._floor:
                return
            head = to_model(event.engine, Engine)
            self._known.pop(name, None)
            self._topologies.pop(name, None)
            removed = tuple(sorted(known.cells)) if known is not None else ()
            topology = Topology(head, (), (), response.book_id, response.book_revision)
            events.append(
                WatchEvent(
                    EventType.REMOVED, head.revision, topology, removed=tuple(sorted(removed))
                )
            )
            return
        head = to_model(event.engine, Engine)
        whole = event.type == v1.EVENT_TYPE_ADDED or event.replace
        if not whole and (known is None or known.head.generation != head.generation):
            self._baseless.add(name)
            return
        self._baseless.discard(name)
        cells = {} if whole or known is None else dict(known.cells)
        before = known.cells if known is not None else {}
        changed = []
        for worker, status in zip(event.workers, event.statuses, strict=True):
            record = to_model(worker, WorkerRecord)
            changed.append(record.slot)
            cells[record.slot] = (record, to_model(status, WorkerStatus))
        for gone in event.removed_slots:
            cells.pop(to_model(gone, Slot), None)
        slots = sorted(cells)
        topology = Topology(
            engine=head,
            workers=tuple(cells[slot][0] for slot in slots),
            statuses=tuple(cells[slot][1] for slot in slots),
            book_id=response.book_id,
            book_revision=response.book_revision,
        )
        news = known is None or not same_book or head != known.head or cells != known.cells
        self._known[name] = _Known(head, cells)
        self._topologies[name] = topology
        if not news and not confirmed:
            return
        if (
            known is None
            and self._floor
            and head.revision <= self._floor
            and (not self._floor_book or self._floor_book == response.book_id)
        ):
            return
        events.append(
            WatchEvent(
                type=EventType.ADDED if known is None else EventType.MODIFIED,
                revision=head.revision,
                topology=topology,
                changed=tuple(sorted(changed)),
                removed=tuple(sorted(set(before) - set(cells))),
            )
        )

    def _forget(self, name: str, response: v1.WatchResponse, events: list[WatchEvent]) -> None:
        known = self._known.pop(name)
        del self._topologies[name]
        head = dataclasses.replace(known.head, state=State.GONE, present=0)
        events.append(
            WatchEvent(
                type=EventType.REMOVED,
                revision=response.book_revision,
                topology=Topology(head, (), (), response.book_id, response.book_revision),
                removed=tuple(sorted(known.cells)),
            )
        )
