"""A process's own copy of the book: who the peers are, without asking anybody.

One watch keeps the copy (`rankbook.TopologyView`). Look-ups take no lock and do
no I/O, so a step loop may make them; the copy goes on answering while the
registry is away. Who can wait gives a deadline and is called back.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import rankbook
from rankbook.errors import DeadlineExceeded, RankbookError, Reason, Unavailable
from rankbook.model import EventType, State, Topology, WatchEvent
from rankbook_vllm.clocks import PeerClocks, PeerOffset
from rankbook_vllm.config import Settings
from rankbook_vllm.lookup import Answer, Refuse, Use, Wait, judge

__all__ = ["PeerBook"]

Outcome = Topology | RankbookError
_GONE_KEPT = 1024
"""Dead engines remembered; the oldest is forgotten first."""
OnChange = Callable[[str, Topology | None], None]


@dataclass(slots=True)
class _Waiter:
    engine_id: str
    generation: str
    deadline_s: float
    timeout_s: float
    done: Callable[[Outcome], None]


class PeerBook:
    """The engines of a namespace as this process knows them. Safe to use from many threads.

    Opens nothing before `start`, so that it may be made before a fork.
    """

    def __init__(
        self,
        settings: Settings,
        log: logging.Logger,
        *,
        without_payload: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes note; opens nothing.

        Args:
            settings: Where the registry is.
            log: Where to say what happens.
            without_payload: Leaves the handshake payloads out of the copy.
            clock: Seconds that never go back, for deadlines.
        """
        self._log = log
        self._clock = clock
        self._client = rankbook.Client(
            settings.endpoints,
            namespace=settings.namespace,
            token=settings.token or None,
        )
        self._clocks = PeerClocks(self._client, time.perf_counter)
        self._view = rankbook.TopologyView(self._client, without_payload=without_payload)
        self._cond = threading.Condition()
        self._waiters: list[_Waiter] = []
        self._changed: set[str] = set()
        self._on_change: list[OnChange] = []
        self._gone: OrderedDict[str, Topology] = OrderedDict()
        self._turned = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to follow the book in the background; returns at once. Twice is fine."""
        with self._cond:
            if self._thread is not None or self._closed:
                return
            self._thread = threading.Thread(target=self._run, name="rankbook-peers", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the copy's upkeep within two seconds; waiters get an error. Twice is fine."""
        with self._cond:
            self._closed = True
            self._cond.notify_all()
            thread = self._thread
        if thread is None:
            self._end()
        elif thread is not threading.current_thread():
            thread.join(2.0)

    # ---------------------------------------------------------------- reading

    def get(self, engine_id: str) -> Topology | None:
        """The engine as last seen, in whatever state, GONE too; None where it is not
        known. No waiting.
        """
        return self._view.get(engine_id) or self._gone.get(engine_id)

    def engines(self) -> tuple[Topology, ...]:
        """Every engine as last seen. No waiting."""
        return self._view.engines()

    @property
    def current(self) -> bool:
        """Whether the copy is whole and follows the book now."""
        return self._view.connected

    @property
    def age_s(self) -> float:
        """Seconds since the registry last said anything; infinite before its first word."""
        return self._view.age_s

    def clock_of(self, topology: Topology) -> PeerOffset | None:
        """How far the performance counter of the peer's engine core is from this
        process's; None where one of the two was not measured yet. No waiting.
        """
        core = topology.engine.core
        return self._clocks.offset_to(core.clock) if core is not None else None

    def judge(self, engine_id: str, generation: str = "") -> Answer:
        """Whether the engine may be used now, may be waited for, or neither. No waiting.

        Args:
            engine_id: The peer.
            generation: Start that the use is bound to; empty where any will do.
        """
        return judge(self.get(engine_id), engine_id, generation=generation, current=self.current)

    # ---------------------------------------------------------------- waiting

    def when(
        self, engine_id: str, generation: str, timeout_s: float, done: Callable[[Outcome], None]
    ) -> None:
        """Calls `done` once, on this book's thread: with the topology as soon as it may
        be used, else with the reason why not. Returns at once. After `close` the answer
        comes on the caller's thread, before this returns.

        Args:
            engine_id: The peer.
            generation: Start that the use is bound to; empty where any will do.
            timeout_s: How long an engine that is not there yet is waited for.
            done: What to call; must not wait.
        """
        with self._cond:
            if not self._closed:
                waiter = _Waiter(engine_id, generation, self._clock() + timeout_s, timeout_s, done)
                self._waiters.append(waiter)
                self._turned = True
                self._cond.notify_all()
                return
        done(_closed(engine_id))

    def wait(self, engine_id: str, generation: str = "", *, timeout_s: float) -> Topology:
        """Waits until the engine may be used, at most `timeout_s` seconds.

        Raises:
            Gone: It, or the start asked for, is dead.
            Incomplete: It is not whole; `missing` in the metadata.
            DeadlineExceeded: It did not come in time; says what was missing.
            RankbookError: Another reason why it cannot be used.
        """
        found: list[Outcome] = []
        over = threading.Event()

        def done(outcome: Outcome) -> None:
            found.append(outcome)
            over.set()

        self.when(engine_id, generation, timeout_s, done)
        # The thread answers at the deadline; the second more is for a stalled process.
        if not over.wait(timeout_s + 1.0):
            raise _too_late(engine_id, timeout_s, None)
        if isinstance(found[0], RankbookError):
            raise found[0]
        return found[0]

    def on_change(self, callback: OnChange) -> None:
        """Calls back with (engine_id, topology) after every change of an engine, and
        once for each that is there; None for one that was forgotten.

        Runs on this book's thread and must not wait. Several changes of one
        engine may arrive as one.
        """
        with self._cond:
            self._on_change.append(callback)
            self._changed.update(topology.engine.engine_id for topology in self._view.engines())
            self._cond.notify_all()

    # ---------------------------------------------------------------- keeping

    def _noticed(self, event: WatchEvent) -> None:
        engine = event.topology.engine
        with self._cond:
            # A view has the living only; who asks for a dead engine wants to be told so.
            self._gone.pop(engine.engine_id, None)
            # A book begun anew has no word on it: then the change is the book's, not its own.
            told = event.revision == engine.revision
            if event.type is EventType.REMOVED and engine.state is State.GONE and told:
                self._gone[engine.engine_id] = event.topology
                while len(self._gone) > _GONE_KEPT:
                    self._gone.popitem(last=False)
            self._changed.add(engine.engine_id)
            self._cond.notify_all()

    def _connection(self, connected: bool) -> None:
        # What arrived in parts is whole from now on, and waiters judge by whether it is.
        with self._cond:
            self._turned = True
            self._changed.update(topology.engine.engine_id for topology in self._view.engines())
            self._cond.notify_all()
        if connected:
            self._clocks.refresh()
            self._log.info("rankbook: %d engines are known", len(self._view.engines()))
        elif self._view.error is not None:  # else the rest of a large change is on its way
            self._log.warning(
                "rankbook: lost the registry (%s); going on with what is known", self._view.error
            )

    def _run(self) -> None:
        ends = (self._view.subscribe(self._noticed), self._view.on_connection(self._connection))
        self._view.start()
        try:
            while True:
                with self._cond:
                    while not (self._changed or self._turned or self._closed):
                        if not self._cond.wait(self._next_wait()):
                            break
                    self._turned = False
                    if self._closed:
                        break
                    changed, self._changed = self._changed, set()
                    callbacks = tuple(self._on_change)
                for engine_id in changed:
                    for callback in callbacks:
                        self._call(callback, engine_id, self.get(engine_id))
                self._serve()
        finally:
            for end in ends:
                end()
            self._end()

    def _end(self) -> None:
        with self._cond:
            self._closed = True
            waiters, self._waiters = self._waiters, []
        # Before the connection, which may take its time: who waits holds up a request.
        for waiter in waiters:
            self._call(waiter.done, _closed(waiter.engine_id))
        self._view.close()
        self._client.close()

    def _next_wait(self) -> float | None:
        if not self._waiters:
            return None
        return max(0.0, min(waiter.deadline_s for waiter in self._waiters) - self._clock())

    def _serve(self) -> None:
        """Answers the waiters whose answer is known or whose time is over."""
        with self._cond:
            waiters = tuple(self._waiters)
        now = self._clock()
        for waiter in waiters:
            answer = self.judge(waiter.engine_id, waiter.generation)
            outcome: Outcome
            if isinstance(answer, Use):
                outcome = answer.topology
            elif isinstance(answer, Refuse):
                outcome = answer.why
            elif now >= waiter.deadline_s:
                away_s = None if self.current else self.age_s
                outcome = _too_late(waiter.engine_id, waiter.timeout_s, answer, away_s)
            else:
                continue
            with self._cond:
                self._waiters.remove(waiter)
            self._call(waiter.done, outcome)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        try:
            callback(*args)
        except Exception:  # noqa: BLE001 - one caller's fault must not end the others' waiting
            self._log.exception("rankbook: a callback of the peer book raised")


def _too_late(
    engine_id: str, timeout_s: float, answer: Wait | None, away_s: float | None = None
) -> DeadlineExceeded:
    why = f": {answer.why.message}" if answer else ""
    about: dict[str, object] = {"engine_id": engine_id, "timeout_s": timeout_s}
    if away_s is not None:
        ago = f"for {away_s:.0f} s" if math.isfinite(away_s) else "yet"
        why = f"{why}; the registry has said nothing {ago}"
        about["registry_age_s"] = away_s
    if answer is not None:
        about |= answer.why.metadata | {"why": answer.why.reason}
    return DeadlineExceeded(f"waited {timeout_s:g} s for {engine_id}{why}", metadata=about)


def _closed(engine_id: str) -> RankbookError:
    return Unavailable(
        f"this process is shutting down and looks for {engine_id} no more",
        reason=Reason.SHUTTING_DOWN,
        metadata={"engine_id": engine_id},
    )
