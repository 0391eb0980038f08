"""Watches: state sync, not a log.

Theory of operation. A watcher remembers which engines its client has, each at
which revision, and which of them changed since (`dirty`); both are bounded by
the number of engines. When its client takes the next message, it is made from
the newest state of what is dirty, so a slow client skips what it would have
been late for, and waiting for the client is all the backpressure there is.

    start anew        every engine is dirty, none is known; `reset`
    start at R        engines above R are dirty and known at R; the others are
                      known as they are
    change            the engine becomes dirty
    message           dirty engines that the filter takes: ADDED or MODIFIED;
                      known ones that are GONE, dropped or filtered out: REMOVED

`dirty` is in the order in which engines changed, so all below the change of
its first entry was sent: that is the resume point. A start counts as done
(`synced`) once no engine of its beginning is left, and a message that ends
within an engine too large for one message is never a resume point.

Changes are handed to watchers at most every 2 ms, so that a burst costs a
watcher few messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol

from rankbook import v1
from rankbook.errors import BadRequest, Overloaded, RankbookError, Reason, Unavailable
from rankbook.limits import (
    MAX_LABELS,
    MAX_REPLY_BYTES,
    check_count,
    check_id,
    check_namespace,
    check_text,
)
from rankbook_server.registry import Registry
from rankbook_server.view import EngineView, View, removed_event
from rankbook_server.wire import delimited, scalar, span

__all__ = ["EngineTest", "Hub", "Turn", "Watcher"]

_COALESCE_S = 0.002
_MESSAGE_BYTES = MAX_REPLY_BYTES - 2048
# Known to the client in whichever state: below every revision.
_ANY = -1


class EngineTest:
    """A filter, read once: reading a message costs more than testing an engine."""

    def __init__(self, wanted: v1.EngineFilter) -> None:
        """Checks a filter.

        Raises:
            BadRequest: An id in it is no id, or a role or state is none.
            LimitExceeded: It has more labels or states than there may be, or
                a text in it is too long.
        """
        check_count("filter.labels", len(wanted.labels), MAX_LABELS, "labels")
        check_count("filter.states", len(wanted.states), len(v1.State.keys()), "states")
        check_text("filter.model", wanted.model)
        check_text("filter.compat_hash", wanted.compat_hash)
        for name in ("group", "engine_id"):
            if value := getattr(wanted, name):
                check_id(f"filter.{name}", value)
        for name, value, kind in (
            ("role", wanted.role, v1.Role),
            *(("states", state, v1.State) for state in wanted.states),
        ):
            if value not in kind.values():
                rule = f"one of {', '.join(kind.keys()[1:])}"
                raise BadRequest(
                    f"filter.{name} is {value}: {rule}",
                    metadata={"field": f"filter.{name}", "value": value, "rule": rule},
                )
        self._engine_id = wanted.engine_id
        self._group = wanted.group
        self._role = wanted.role
        self._model = wanted.model
        self._states = frozenset(wanted.states)
        self._compat_hash = wanted.compat_hash
        self._labels = tuple(wanted.labels.items())
        self.is_volatile = bool(self._states or self._labels or self._compat_hash or self._model)
        """Whether one start of an engine may begin or cease to match."""
        self._takes_all = not (self.is_volatile or self._engine_id or self._group or self._role)

    def names(self, engine_id: str) -> bool:
        """Whether an engine of this name can match."""
        return not self._engine_id or self._engine_id == engine_id

    def matches(self, engine: v1.Engine) -> bool:
        """Whether an engine matches."""
        if self._takes_all:
            return True
        return (
            (not self._engine_id or self._engine_id == engine.engine_id)
            and (not self._group or self._group == engine.group)
            and (not self._role or engine.role in (self._role, v1.ROLE_BOTH))
            and (not self._model or self._model == engine.model.name)
            and (not self._states or engine.state in self._states)
            and (not self._compat_hash or self._compat_hash in engine.compat_hashes)
            and all(engine.labels.get(key) == value for key, value in self._labels)
        )


class Turn(Protocol):
    """Decides when a watch may make its next message."""

    async def enter(self) -> None:
        """Waits for the turn; a second call before `leave` has no effect."""

    def leave(self) -> None:
        """Ends the turn; a second call has no effect."""


class Watcher:
    """One watch: what its client has, and what it must be sent.

    Made by `Hub.watch`; ended by `close`.
    """

    def __init__(self, hub: Hub, request: v1.WatchRequest) -> None:
        """Reads the request.

        Raises:
            BadRequest: An id in the request is no id.
        """
        self.namespace = check_namespace(request.namespace)
        self._hub = hub
        self._test = EngineTest(request.filter)
        self._request = request
        self._bare = request.without_payload
        self._book_id = hub.registry.book_id
        self._known: dict[str, int] = {}
        self._dirty: dict[str, int] = {}
        self._rest: deque[bytes] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._begun = False
        self._reset = False
        self._synced = False
        self._progress_due = False
        self._sent_lately = False
        self._told = 0

    def mark(self, engines: Mapping[str, int]) -> None:
        """Notes engines that changed, each not before the revision beside it."""
        for engine_id, since in engines.items():
            if self._test.names(engine_id):
                self._dirty.setdefault(engine_id, since)
        if self._dirty:
            self.wake()

    def wake(self) -> None:
        """Has `next` look again."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def speak(self) -> None:
        """Asks for a progress message."""
        self._progress_due = True
        self.wake()

    def tick(self) -> None:
        """Asks for a progress message if there was none of any kind since the last tick."""
        if not self._sent_lately:
            self._progress_due = True
            self.wake()
        self._sent_lately = False

    def close(self) -> None:
        """Ends the watch."""
        self._hub.forget(self)

    async def next(self, turn: Turn) -> bytes:
        """The next `WatchResponse`, serialised: made now, or once there is one.

        Args:
            turn: Entered before a message is made; the caller leaves it once
                the message is written.

        Raises:
            Unavailable: The server is shutting down, or the book cannot be read.
            Overloaded: The turn did not come in time.
        """
        hub = self._hub
        while True:
            await turn.enter()
            hub.check_open()
            self._check_book()
            if not self._begun:
                await self._catch_up()
                self._reset = self._begin()
                self._begun = True
            events = [self._rest.popleft()] if self._rest else self._collect()
            if self._rest:
                return self._message(events, 0, synced=False)
            # What was changed and not yet marked is newer than the marked revision.
            oldest = next(iter(self._dirty.values()), hub.marked_revision + 1)
            resume = oldest - 1
            was_synced = self._synced
            self._synced = was_synced or resume >= 0
            # What was handed out late may be older than what its client began with.
            self._told = max(self._told, resume)
            if events or self._reset or self._progress_due or self._synced != was_synced:
                return self._message(events, self._told, synced=self._synced)
            self._wake = asyncio.get_running_loop().create_future()
            turn.leave()
            await self._wake

    async def _catch_up(self) -> None:
        """Waits for what the client has from another server, which was ahead of this one.

        Raises:
            Unavailable: It does not come.
        """
        registry, since = self._hub.registry, self._request.from_revision
        if self._request.book_id != registry.book_id or registry.revision >= since:
            return
        if since > await registry.last_revision():
            # Nobody's; it is begun anew.
            return
        if not await registry.reach(since):
            raise Unavailable(
                f"the book is at revision {registry.revision} here and the watch is to go on from "
                f"{since}: try again, or at another server",
                reason=Reason.REVISION_NOT_REACHED,
                metadata={"min_revision": since, "book_revision": registry.revision},
            )
        self._hub.check_open()
        self._check_book()

    def _check_book(self) -> None:
        """Ends the watch of a book that is no longer there.

        Raises:
            Unavailable: Another book is in its place.
        """
        if self._book_id != self._hub.registry.book_id:
            raise Unavailable(
                f"book {self._hub.registry.book_id} is in the place of {self._book_id}: watch it "
                "from its beginning",
                reason=Reason.STORE_UNAVAILABLE,
                metadata={"book_id": self._hub.registry.book_id},
            )

    def _collect(self) -> list[bytes]:
        """Events of dirty engines, as many as fit a message; of one that is too
        large for that the first part, and `_rest` gets the others."""
        events: list[bytes] = []
        size = 0
        while self._dirty:
            engine_id = next(iter(self._dirty))
            view = self._hub.view.engine(self.namespace, engine_id)
            shown = view is not None and self._shows(view)
            parts = self._parts(engine_id, view, shown)
            if parts and events and (len(parts) > 1 or size + len(parts[0]) > _MESSAGE_BYTES):
                break
            del self._dirty[engine_id]
            if view is not None and shown:
                self._known[engine_id] = view.revision
            else:
                self._known.pop(engine_id, None)
            if not parts:
                continue
            events.append(parts[0])
            size += len(parts[0])
            if len(parts) > 1:
                self._rest.extend(parts[1:])
                break
        return events

    def _message(self, events: list[bytes], revision: int, *, synced: bool) -> bytes:
        reset, self._reset = self._reset, False
        self._progress_due = False
        self._sent_lately = True
        return b"".join(
            (
                *events,
                scalar(2, revision),
                self._hub.book_id_field,
                scalar(4, reset),
                scalar(5, synced),
                span(6, self._hub.registry.stale_s),
            )
        )

    def _begin(self) -> bool:
        """Fills what is dirty and known at the start; True when it starts anew."""
        registry, request = self._hub.registry, self._request
        book = registry.book(self.namespace)
        since = request.from_revision
        self._dirty.clear()
        anew = (
            since <= 0
            or request.book_id != registry.book_id
            or since < book.horizon_revision
            or since > registry.revision
        )
        for engine_id in book.engine_ids():
            if not self._test.names(engine_id):
                continue
            if anew:
                self._dirty[engine_id] = 0
                continue
            view = self._hub.view.engine(self.namespace, engine_id)
            if view is None:
                continue
            if view.revision > since:
                self._dirty[engine_id] = 0
                self._known[engine_id] = _ANY if self._test.is_volatile else since
                if view.engine.start_revision > since and view.engine.epoch <= book.epoch_floor + 1:
                    # Its first start, so the client cannot have it.
                    del self._known[engine_id]
            elif self._shows(view):
                self._known[engine_id] = view.revision
        if not anew:
            self._told = since
        return anew

    def _shows(self, view: EngineView) -> bool:
        return view.engine.state != v1.STATE_GONE and self._test.matches(view.engine)

    def _parts(self, engine_id: str, view: EngineView | None, shown: bool) -> list[bytes]:
        """Events that bring the client to an engine's newest state."""
        known = self._known.get(engine_id)
        if view is not None and shown:
            if known is not None and known >= view.revision:
                return []
            return view.events(known or 0, without_payload=self._bare)
        if known is None:
            return []
        if view is None:
            engine = v1.Engine(namespace=self.namespace, engine_id=engine_id, state=v1.STATE_GONE)
            return [removed_event(engine.SerializeToString())]
        return [view.removed()]


class Hub:
    """All watches, and the handing out of changes. For one event loop; bounded."""

    def __init__(self, registry: Registry, view: View, max_watchers: int) -> None:
        """Starts nothing."""
        self.registry = registry
        self.view = view
        self._max = max_watchers
        self._watchers: dict[str, set[Watcher]] = {}
        self._count = 0
        self._pending: dict[str, dict[str, int]] = {}
        self._pending_since: int | None = None
        self._cooling = False
        self._end: RankbookError | None = None
        self._book_id = ""
        self.book_id_field = b""
        """`WatchResponse.book_id`, serialised."""

    def __len__(self) -> int:
        """Watches open now."""
        return self._count

    def watch(self, request: v1.WatchRequest) -> Watcher:
        """Begins a watch, which counts until it is closed.

        Raises:
            BadRequest: An id in the request is no id.
            Overloaded: As many watches as the server may hold are open.
            Unavailable: The server is shutting down, or has not read the book.
        """
        self.check_open()
        self.registry.check_readable()
        watcher = Watcher(self, request)
        if self._count >= self._max:
            raise Overloaded(
                f"{self._max} watches are open, the most this server holds: try again later or "
                "watch elsewhere",
                reason=Reason.TOO_MANY_WATCHERS,
                metadata={"limit": "watchers", "bound": self._max},
            )
        if self._book_id != self.registry.book_id:
            self._book_id = self.registry.book_id
            self.book_id_field = delimited(3, self._book_id.encode())
        self._count += 1
        self._watchers.setdefault(watcher.namespace, set()).add(watcher)
        return watcher

    def forget(self, watcher: Watcher) -> None:
        """Hears no more of a watcher; a second call has no effect."""
        watchers = self._watchers.get(watcher.namespace, set())
        if watcher in watchers:
            watchers.discard(watcher)
            self._count -= 1
            if not watchers:
                del self._watchers[watcher.namespace]

    @property
    def marked_revision(self) -> int:
        """All watchers were told of every change up to this revision."""
        if self._pending_since is None:
            return self.registry.revision
        return self._pending_since - 1

    def changed(self, namespace: str, engine_ids: Iterable[str], since: int) -> None:
        """Hands changes out, now or within 2 ms; see `registry.Listener`."""
        if namespace not in self._watchers:
            return
        pending = self._pending.setdefault(namespace, {})
        for engine_id in engine_ids:
            pending.setdefault(engine_id, since)
        if self._pending_since is None:
            self._pending_since = since
        if not self._cooling:
            self._hand_out()

    def _hand_out(self) -> None:
        pending, self._pending = self._pending, {}
        self._pending_since = None
        for namespace, engines in pending.items():
            for watcher in self._watchers.get(namespace, ()):
                watcher.mark(engines)
        self._cooling = True
        asyncio.get_running_loop().call_later(_COALESCE_S, self._cooled)

    def _cooled(self) -> None:
        self._cooling = False
        if self._pending:
            self._hand_out()

    def tick(self) -> None:
        """Has idle watches say how far they are; called every ten seconds or so."""
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.tick()

    def check_open(self) -> None:
        """Raises what `end` was given, once it was called."""
        if self._end is not None:
            raise self._end

    def look(self) -> None:
        """Has every watch look at the book again, and say how it is."""
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.speak()

    def end(self, error: RankbookError) -> None:
        """Ends every watch, and every later one, with an error."""
        self._end = error
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.wake()
