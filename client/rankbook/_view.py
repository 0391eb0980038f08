"""A local copy of the book, kept by a watch."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from rankbook import _clock, _scripts
from rankbook._cache import WatchFold
from rankbook.errors import BadRequest, DeadlineExceeded, RankbookError
from rankbook.model import EngineFilter, EventType, Topology, WatchEvent

if TYPE_CHECKING:
    from rankbook._sync import Client
    from rankbook._wire_sync import SyncWatch

__all__ = ["TopologyView"]

_log = logging.getLogger("rankbook")
_NOTHING: Mapping[str, Topology] = MappingProxyType({})

Callback = Callable[[WatchEvent], None]
T = TypeVar("T")


class TopologyView:
    """A copy of the engines that a filter matches, kept by a watch in a thread.

    Look-ups take no lock, do no I/O, and answer while the registry is away, so
    they are made from an event loop as well; `wait_synced` and `close` wait, and
    are not. Every snapshot is of one moment of the book. Safe to use from many
    threads.
    """

    def __init__(
        self,
        client: Client,
        filter: EngineFilter = EngineFilter(),  # noqa: B008
        *,
        without_payload: bool = False,
    ) -> None:
        """Takes note of what to watch; starts nothing. `client` stays the caller's to close.

        Args:
            client: Where to watch.
            filter: Which engines.
            without_payload: Leaves the payloads out.
        """
        self._client = client
        self._request = _scripts.watch_request(
            client.namespace, filter, without_payload=without_payload
        )
        # Replaced as a whole and never changed: readers need no lock.
        self._snapshot: Mapping[str, Topology] = _NOTHING
        self._heard_s = -math.inf
        self._connected = False
        self._revision = 0
        self._cond = threading.Condition()
        self._synced_once = False
        self._error: RankbookError | None = None
        self._over = False
        self._subscribers: dict[int, Callback] = {}
        self._listeners: dict[int, Callable[[bool], None]] = {}
        # What subscribers were told, which may be ahead of the last whole snapshot.
        self._told: dict[str, Topology] = {}
        self._next_subscriber = 0
        self._watch: SyncWatch | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to watch in the background; returns at once. Twice is fine."""
        with self._cond:
            if self._thread is not None:
                return
            self._watch = self._client._wire.new_watch(self._request, WatchFold())
            self._thread = threading.Thread(target=self._run, name="rankbook-view", daemon=True)
            self._thread.start()

    def __enter__(self) -> Self:
        """Starts."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes."""
        self.close()

    def close(self) -> None:
        """Ends the watch, within a second; look-ups go on answering from the last copy.

        Twice is fine.
        """
        with self._cond:
            watch, thread = self._watch, self._thread
        if watch is not None:
            watch.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def wait_synced(self, timeout_s: float) -> None:
        """Waits until the view has had the whole state once, at most `timeout_s` seconds.

        Raises:
            Unavailable: No registry was reached by the deadline.
            DeadlineExceeded: The deadline passed.
            BadRequest: The view was closed.
            RankbookError: The registry refuses the watch.
        """
        with self._cond:
            self._cond.wait_for(lambda: self._synced_once or self._over, timeout_s)
            if self._synced_once:
                return
            if self._error is not None:
                raise self._error
            if self._over:
                raise BadRequest(
                    "the view was closed before it was synced: make another one",
                    metadata={"field": "view", "value": "closed", "rule": "open"},
                )
            raise DeadlineExceeded(
                f"the view is not synced within {timeout_s:g} s; it goes on in the background",
                metadata={"timeout_s": timeout_s},
            )

    # ---------------------------------------------------------------- reading

    def get(self, engine_id: str) -> Topology | None:
        """The engine as last seen, or None where there is none."""
        return self._snapshot.get(engine_id)

    def engines(self) -> tuple[Topology, ...]:
        """Every engine as last seen, by engine_id, all of one moment."""
        snapshot = self._snapshot
        return tuple(snapshot[name] for name in sorted(snapshot))

    @property
    def age_s(self) -> float:
        """Seconds since the registry last said anything; infinite before its first word.

        A registry has nothing to say while nothing changes: read it with
        `connected`.
        """
        return _clock.mono_s() - self._heard_s

    @property
    def connected(self) -> bool:
        """Whether the view is whole and follows every change now.

        False also while its server is cut off from a store that it shares.
        """
        return self._connected

    @property
    def revision(self) -> int:
        """The book's revision that the view was last whole at."""
        return self._revision

    @property
    def error(self) -> RankbookError | None:
        """Why the watch is broken, while it is."""
        return self._error

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Calls back with every change, on the view's thread; returns what ends it.

        Begins with an ADDED for each engine that is there, on the caller's
        thread. What a callback raises is logged.
        """
        with self._cond:
            self._next_subscriber += 1
            number = self._next_subscriber
            for topology in tuple(self._told.values()):
                event = WatchEvent(EventType.ADDED, topology.engine.revision, topology)
                self._call_back(callback, event)
            self._subscribers[number] = callback

        def end() -> None:
            with self._cond:
                self._subscribers.pop(number, None)

        return end

    def on_connection(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        """Calls back whenever `connected` changes, on the view's thread; returns what ends it.

        With True the look-ups already give the state that was missed. What a
        callback raises is logged.
        """
        with self._cond:
            self._next_subscriber += 1
            number = self._next_subscriber
            self._listeners[number] = callback

        def end() -> None:
            with self._cond:
                self._listeners.pop(number, None)

        return end

    # ---------------------------------------------------------------- keeping

    def _run(self) -> None:
        watch = self._watch
        assert watch is not None
        try:
            for step in watch.steps(patient=True):
                if step.error is None:
                    self._heard_s = _clock.mono_s()
                with self._cond:
                    # A state that is only half told is not shown.
                    if step.synced:
                        self._snapshot = watch.fold.topologies
                        self._revision = watch.fold.resume[0]
                        self._synced_once = True
                    connected = step.synced and not step.stale_s
                    turned = self._connected is not connected
                    self._connected = connected
                    self._error = step.error
                    listeners = tuple(self._listeners.values()) if turned else ()
                    subscribers = tuple(self._subscribers.values())
                    for event in step.events:
                        name = event.topology.engine.engine_id
                        if event.type is EventType.REMOVED:
                            self._told.pop(name, None)
                        else:
                            self._told[name] = event.topology
                    self._cond.notify_all()
                for event in step.events:
                    for callback in subscribers:
                        self._call_back(callback, event)
                for listener in listeners:
                    self._call_back(listener, connected)
        except RankbookError as error:
            _log.warning("the watch of a topology view ended: %s", error.message)
            with self._cond:
                self._error = error
        finally:
            with self._cond:
                self._over = True
                listeners = tuple(self._listeners.values()) if self._connected else ()
                self._connected = False
                self._cond.notify_all()
            for listener in listeners:
                self._call_back(listener, False)

    @staticmethod
    def _call_back(callback: Callable[[T], None], told: T) -> None:
        try:
            callback(told)
        except Exception:  # noqa: BLE001 - a fault of the caller's must not end the watch
            _log.exception("a subscriber of a topology view raised")
