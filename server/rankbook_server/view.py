"""What readers get, kept serialised.

An engine's head and each of its workers are kept as the bytes they have inside
a reply, so that an answer is a look-up and a join. Nothing is derived before
someone reads it; a change only marks its engine, and the next read renews the
pieces that differ.

In a `Topology` and in a `WatchEvent` the fields `workers` and `statuses` have
the numbers 2 and 3 and 3 and 4, so a worker is kept in both forms.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from rankbook import v1
from rankbook.limits import MAX_REPLY_BYTES
from rankbook_server.core.keys import SlotKey
from rankbook_server.core.slots import SlotState
from rankbook_server.registry import Registry
from rankbook_server.wire import Body, delimited, header, scalar

__all__ = ["EngineView", "View"]

# Room for what goes around an answer: request id, revision, book id.
_AROUND_BYTES = 1024
_PART_BYTES = MAX_REPLY_BYTES - _AROUND_BYTES
_MAX_EVENTS_KEPT = 64


def _encode(state: SlotState, record_field: int, *, bare: bool) -> bytes:
    """A record and its status as consecutive repeated fields."""
    record = state.stored.record
    if bare and record.handshake.payload:
        copy = v1.WorkerRecord()
        copy.CopyFrom(record)
        copy.handshake.ClearField("payload")
        record = copy
    return delimited(record_field, record.SerializeToString()) + delimited(
        record_field + 1, state.status().SerializeToString()
    )


class EngineView:
    """One engine's pieces. Read without an await in between."""

    def __init__(self, registry: Registry, namespace: str, engine_id: str) -> None:
        self._registry = registry
        self._namespace = namespace
        self._engine_id = engine_id
        # Three lists side by side, in slot order; `_bare` once someone asks for it.
        self._order: list[SlotKey] = []
        self._states: list[SlotState] = []
        self._full: list[bytes] = []
        self._bare: list[bytes] | None = None
        self._bodies: dict[bool, list[Body]] = {}
        self._events: dict[tuple[int, bool], list[bytes]] = {}
        self._workers_stale = True
        self.engine = v1.Engine()
        """The engine; never changed in place."""
        self.head = b""
        """`engine` serialised."""

    def refresh(self) -> bool:
        """Takes the engine's head anew; False when there is no such engine."""
        engine = self._registry.book(self._namespace).engine(self._engine_id)
        if engine is None:
            return False
        if engine is not self.engine:
            self.engine = engine
            self.head = engine.SerializeToString()
            self._bodies.clear()
            self._events.clear()
            self._workers_stale = True
        return True

    @property
    def revision(self) -> int:
        """Revision of the engine's last change."""
        return self.engine.revision

    def _renew(self) -> None:
        """Serialises the workers that changed. At thousands of workers a loop over
        all of them would be most of the work, so none is written in Python where
        no slot came or went."""
        if not self._workers_stale:
            return
        engine = self._registry.book(self._namespace).engines[self._engine_id]
        order = engine.order()
        states = list(map(engine.live.__getitem__, order))
        if order == self._order:
            same = list(map(operator.is_, states, self._states))
            index = -1
            for _ in range(same.count(False)):
                index = same.index(False, index + 1)
                self._full[index] = _encode(states[index], 2, bare=False)
                if self._bare is not None:
                    self._bare[index] = _encode(states[index], 2, bare=True)
        else:
            known = {id(state): full for state, full in zip(self._states, self._full, strict=True)}
            self._full = [known.get(id(state)) or _encode(state, 2, bare=False) for state in states]
            self._bare = None
            self._order = list(order)
        self._states = states
        self._workers_stale = False

    def _pieces(self, bare: bool) -> list[bytes]:
        """All live workers serialised, in slot order."""
        self._renew()
        if not bare:
            return self._full
        if self._bare is None:
            self._bare = [_encode(state, 2, bare=True) for state in self._states]
        return self._bare

    # ---------------------------------------------------------------- topology

    def topology(self, *, without_payload: bool, slots: Sequence[SlotKey] = ()) -> list[Body]:
        """The engine as `GetTopologyResponse.topologies`, in parts that each fit a reply.

        Args:
            without_payload: Leaves the payloads out.
            slots: Only these workers; empty means all.
        """
        if slots:
            wanted = set(slots)
            pieces = self._pieces(without_payload)
            chosen = [
                piece for slot, piece in zip(self._order, pieces, strict=True) if slot in wanted
            ]
            return self._parts(chosen)
        bodies = self._bodies.get(without_payload)
        if bodies is None:
            bodies = self._bodies[without_payload] = self._parts(self._pieces(without_payload))
        return bodies

    def _parts(self, workers: list[bytes]) -> list[Body]:
        bodies: list[Body] = []
        head = delimited(1, self.head)
        for run, size in _runs(workers, len(head)):
            front = header(1, size) if bodies else header(1, size + len(head)) + head
            bodies.append(Body([front, *run], len(front) + size))
        return bodies

    # ------------------------------------------------------------------ events

    def events(self, since: int, *, without_payload: bool) -> list[bytes]:
        """What changed, as `WatchResponse.events`, each fit for a message of its own.

        Serialised once, however many watchers ask.

        Args:
            since: Revision of what the watcher has; zero for a watcher that
                has nothing, below zero for one that may have anything.
            without_payload: Leaves the payloads out.
        """
        key = (since, without_payload)
        found = self._events.get(key)
        if found is None:
            found = self._encode_events(since, without_payload)
            if len(self._events) < _MAX_EVENTS_KEPT:
                self._events[key] = found
        return found

    def _encode_events(self, since: int, bare: bool) -> list[bytes]:
        self._renew()
        # An engine of which nothing is left that was there then may have been gone
        # meanwhile: its client has nothing that could be added to.
        whole = since < self.engine.start_revision or all(
            state.revision > since for state in self._states
        )
        workers = [
            _encode(state, 3, bare=bare)
            for state in self._states
            if whole or state.revision > since
        ]
        kind = v1.EVENT_TYPE_MODIFIED if since else v1.EVENT_TYPE_ADDED
        tail = scalar(6, 1) if since and whole else b""
        if not whole:
            book = self._registry.book(self._namespace)
            tail = b"".join(
                delimited(5, v1.Slot(pp_rank=s[0], pcp_rank=s[1], tp_rank=s[2]).SerializeToString())
                for s, revision in book.emptied(self._engine_id)
                if revision > since
            )
        events = []
        head = delimited(2, self.head)
        for run, size in _runs(workers, len(head) + len(tail)):
            front = scalar(1, kind) + head
            whole_size = len(front) + size + len(tail)
            events.append(b"".join((header(1, whole_size), front, *run, tail)))
            # What follows adds to the first part.
            kind, tail = v1.EVENT_TYPE_MODIFIED, b""
        return events

    def removed(self) -> bytes:
        """The engine's end, as `WatchResponse.events`."""
        return removed_event(self.head)


def removed_event(head: bytes) -> bytes:
    """An event of type REMOVED for an engine's serialised head."""
    return delimited(1, scalar(1, v1.EVENT_TYPE_REMOVED) + delimited(2, head))


def _runs(pieces: list[bytes], around: int) -> Iterable[tuple[list[bytes], int]]:
    """Cuts pieces into runs that fit a part with `around` more bytes, each with
    its size; there is always a first run."""
    ends = list(accumulate(map(len, pieces)))
    start, base = 0, 0
    while True:
        stop = max(bisect_right(ends, base + _PART_BYTES - around), start + 1)
        run = pieces[start:stop]
        reached = ends[min(stop, len(ends)) - 1] if run else base
        yield run, reached - base
        start, base = stop, reached
        if start >= len(pieces):
            return


class View:
    """Every engine's pieces, by namespace and name. Bounded by the books."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._engines: dict[tuple[str, str], EngineView] = {}
        self._stale: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        """Engines whose pieces are kept."""
        return len(self._engines)

    def changed(self, namespace: str, engine_ids: Iterable[str], since: int) -> None:
        """Marks engines; see `registry.Listener`."""
        engines = self._registry.book(namespace).engines
        for engine_id in engine_ids:
            key = (namespace, engine_id)
            if key not in self._engines:
                continue
            engine = engines.get(engine_id)
            if engine is not None and engine.live:
                self._stale.add(key)
            else:
                # Perhaps nobody reads it again: its payloads must not stay for that.
                del self._engines[key]
                self._stale.discard(key)

    def engine(self, namespace: str, engine_id: str) -> EngineView | None:
        """An engine that readers may see, tombstones included; None for another."""
        key = (namespace, engine_id)
        found = self._engines.get(key)
        if found is not None and key not in self._stale:
            return found
        fresh = found or EngineView(self._registry, namespace, engine_id)
        self._stale.discard(key)
        if not fresh.refresh():
            self._engines.pop(key, None)
            return None
        self._engines[key] = fresh
        return fresh
