"""What readers get, kept serialised.

An engine's head and each of its workers are kept as the bytes they have inside
a reply, so that an answer is a look-up and a join. Nothing is derived before
someone reads it; a change only marks its engine, and the next read renews the
pieces that differ.

In a `Topology` and in a `WatchEvent` the fields `workers` and `statuses` have
the numbers 2 and 3 and 3 and 4, so a worker is kept in both forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankbook import v1
from rankbook.limits import MAX_REPLY_BYTES
from rankbook_server.core.engine import SlotState
from rankbook_server.core.keys import SlotKey
from rankbook_server.registry import Registry
from rankbook_server.wire import Body, delimited, header, scalar

__all__ = ["EngineView", "View"]

# Room for what goes around an answer: request id, revision, book id.
_AROUND_BYTES = 1024
_PART_BYTES = MAX_REPLY_BYTES - _AROUND_BYTES
_MAX_EVENTS_KEPT = 64


@dataclass(slots=True)
class _Piece:
    """One worker, serialised as it stands in a Topology."""

    state: SlotState
    full: bytes
    bare: bytes | None = None


def _encode(state: SlotState, record_field: int, *, bare: bool) -> bytes:
    """A record and its status as consecutive repeated fields."""
    record = state.stored.record
    if bare and record.handshake.payload:
        copy = v1.WorkerRecord()
        copy.CopyFrom(record)
        copy.handshake.ClearField("payload")
        record = copy
    status = v1.WorkerStatus(
        record_digest=state.stored.record_digest,
        revision=state.revision,
        lease_id=state.stored.lease_id,
        asleep=state.stored.asleep,
    )
    return delimited(record_field, record.SerializeToString()) + delimited(
        record_field + 1, status.SerializeToString()
    )


class EngineView:
    """One engine's pieces. Read between `Registry.settle` and the next await."""

    def __init__(self, registry: Registry, namespace: str, engine_id: str) -> None:
        self._registry = registry
        self._namespace = namespace
        self._engine_id = engine_id
        self._pieces: dict[SlotKey, _Piece] = {}
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

    def _workers(self) -> dict[SlotKey, _Piece]:
        """Pieces of all live workers, in slot order."""
        if self._workers_stale:
            state = self._registry.book(self._namespace).engines[self._engine_id]
            old, fresh = self._pieces, {}
            for slot in state.order():
                live = state.live[slot]
                piece = old.get(slot)
                if piece is None or piece.state is not live:
                    piece = _Piece(live, _encode(live, 2, bare=False))
                fresh[slot] = piece
            self._pieces = fresh
            self._workers_stale = False
        return self._pieces

    def _bytes_of(self, piece: _Piece, bare: bool) -> bytes:
        if not bare:
            return piece.full
        if piece.bare is None:
            piece.bare = _encode(piece.state, 2, bare=True)
        return piece.bare

    # ---------------------------------------------------------------- topology

    def topology(self, *, without_payload: bool, slots: Sequence[SlotKey] = ()) -> list[Body]:
        """The engine as `GetTopologyResponse.topologies`, in parts that each fit a reply.

        Args:
            without_payload: Leaves the payloads out.
            slots: Only these workers; empty means all.
        """
        if slots:
            found = self._workers()
            chosen = [found[slot] for slot in sorted(set(slots)) if slot in found]
            return self._parts([self._bytes_of(piece, without_payload) for piece in chosen])
        bodies = self._bodies.get(without_payload)
        if bodies is None:
            pieces = [self._bytes_of(piece, without_payload) for piece in self._workers().values()]
            bodies = self._bodies[without_payload] = self._parts(pieces)
        return bodies

    def _parts(self, workers: list[bytes]) -> list[Body]:
        bodies: list[Body] = []
        head = delimited(1, self.head)
        for run in _runs(workers, len(head)):
            pieces = [head, *run] if not bodies else run
            size = sum(map(len, pieces))
            front = header(1, size)
            bodies.append(Body([front, *pieces], len(front) + size))
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
        whole = since < self.engine.start_revision
        workers = [
            _encode(piece.state, 3, bare=bare)
            for piece in self._workers().values()
            if whole or piece.state.revision > since
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
        for run in _runs(workers, len(head) + len(tail)):
            pieces = [scalar(1, kind), head, *run, tail]
            events.append(header(1, sum(map(len, pieces))) + b"".join(pieces))
            # What follows adds to the first part.
            kind, tail = v1.EVENT_TYPE_MODIFIED, b""
        return events

    def removed(self) -> bytes:
        """The engine's end, as `WatchResponse.events`."""
        return removed_event(self.head)


def removed_event(head: bytes) -> bytes:
    """An event of type REMOVED for an engine's serialised head."""
    return delimited(1, scalar(1, v1.EVENT_TYPE_REMOVED) + delimited(2, head))


def _runs(pieces: list[bytes], first_bytes: int) -> Iterable[list[bytes]]:
    """Cuts pieces into runs that fit a part; there is always a first run."""
    total = first_bytes + sum(map(len, pieces))
    if total <= _PART_BYTES:
        yield pieces
        return
    run: list[bytes] = []
    size = first_bytes
    for piece in pieces:
        if run and size + len(piece) > _PART_BYTES:
            yield run
            run, size = [], first_bytes
        run.append(piece)
        size += len(piece)
    yield run


class View:
    """Every engine's pieces, by namespace and name. Bounded by the books."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._engines: dict[tuple[str, str], EngineView] = {}
        self._stale: set[tuple[str, str]] = set()

    def changed(self, namespace: str, engine_ids: Iterable[str], since: int) -> None:
        """Marks engines; see `registry.Listener`."""
        for engine_id in engine_ids:
            key = (namespace, engine_id)
            if key in self._engines:
                self._stale.add(key)

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
