"""Handshakes answered from the book: who may pair, with what, and until when.

Free of vLLM. `Gate` stands where vLLM has the executor of its handshakes: it
waits for the peer off the executor, so that one that never comes holds up
nobody, refuses a pair that cannot work before anything is touched, and hands
the rest to vLLM's own code with the peer's payloads at hand.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any

from rankbook.errors import (
    DeadlineExceeded,
    Incompatible,
    Incomplete,
    NotFound,
    RankbookError,
    Reason,
    TransferError,
    Unavailable,
)
from rankbook.model import Role, State, Topology, WorkerRecord
from rankbook.pairing import peer_side
from rankbook.transfer import compare_peers
from rankbook_vllm.config import Settings
from rankbook_vllm.peers import PeerBook
from rankbook_vllm.requests import transfer_tp_size

__all__ = [
    "Call",
    "Gate",
    "Pairing",
    "Pairs",
    "check_pair",
    "check_peers",
    "has_all_stages",
    "payloads_of",
    "workers_of",
]

_BOUND_UNSEEN = 1024
"""Engines that are used of one start though the book has never shown it, at most."""

Key = tuple[int, int]
"""(pp_rank, transfer rank), as NIXL asks for a payload."""


@dataclass(frozen=True, slots=True)
class Call:
    """A handshake as vLLM wants to make it."""

    engine_id: str
    tp_size: int
    dcp_size: int = 1
    pp_size: int = 1
    notif_only: bool = False
    """Whether only notices go to the peer: push, from the consumer's side."""
    has_address: bool = False
    """Whether the caller named a host that could be asked instead of the book."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """A peer as this worker shook hands with it."""

    generation: str
    """Its start; empty where the book did not know the peer, which was asked itself."""
    payloads: tuple[bytes, ...] = field(repr=False)
    """What it published: something else, and the peer's memory is another."""


def workers_of(topology: Topology, ranks: Sequence[int]) -> dict[Key, WorkerRecord]:
    """A peer's workers by (pp_rank, transfer rank), for every stage; each has a payload.

    Args:
        topology: The peer, whole.
        ranks: Transfer ranks of a stage that this worker asks.

    Raises:
        Incompatible: The peer's payloads are not NIXL's.
        Incomplete: A worker is missing, or has no payload.
    """
    layout = topology.engine.layout
    sharded = layout.pcp_size > 1 and layout.dcp_size > 1
    found: dict[Key, WorkerRecord] = {}
    for pp_rank in range(layout.pp_size):
        for rank in ranks:
            pcp_rank, tp_rank = divmod(rank, layout.tp_size) if sharded else (0, rank)
            record = topology.worker(pp_rank, tp_rank, pcp_rank)
            handshake = record.handshake if record is not None else None
            if record is None or handshake is None or not handshake.payload:
                raise Incomplete(
                    f"{topology.engine.engine_id} has no payload for pp{pp_rank} tp{tp_rank}",
                    metadata={
                        "engine_id": topology.engine.engine_id,
                        "missing": f"pp{pp_rank} tp{tp_rank}",
                    },
                )
            if handshake.format != "vllm.nixl":
                raise Incompatible(
                    f"{topology.engine.engine_id} publishes {handshake.format}, this engine "
                    "needs vllm.nixl: run the same connector on both sides",
                    metadata={"producer": handshake.format, "consumer": "vllm.nixl"},
                )
            found[pp_rank, rank] = record
    return found


def payloads_of(topology: Topology, ranks: Sequence[int]) -> dict[Key, bytes]:
    """The handshake payloads of these workers; raises as `workers_of`."""
    return {
        key: record.handshake.payload if record.handshake else b""
        for key, record in workers_of(topology, ranks).items()
    }


def pairing_of(topology: Topology) -> Pairing:
    """What a handshake with this topology is good for."""
    handshakes = (worker.handshake for worker in topology.workers)
    return Pairing(topology.engine.generation, tuple(h.payload if h else b"" for h in handshakes))


def check_peers(producer: Topology, consumer: Topology) -> None:
    """Whether the one may give KV to the other.

    Raises:
        Incompatible: A rule is broken; every one is named with both values.
    """
    verdict = compare_peers(peer_side(producer), peer_side(consumer))
    if verdict.compatible:
        return
    told = "; ".join(f"{broken.reason}: {broken.message}" for broken in verdict.reasons)
    factors = ", ".join(
        f"{factor.name} {factor.producer!r} and {factor.consumer!r}" for factor in verdict.factors
    )
    raise Incompatible(
        f"{producer.engine.engine_id} cannot give KV to {consumer.engine.engine_id}: {told}"
        + (f" (they differ in {factors})" if factors else ""),
        metadata={
            "producer": producer.engine.engine_id,
            "consumer": consumer.engine.engine_id,
            "reasons": ", ".join(broken.reason for broken in verdict.reasons),
        },
    )


def check_pair(own: Topology, peer: Topology, call: Call) -> None:
    """Whether these two may exchange KV as vLLM is about to.

    Raises:
        Incompatible: A rule is broken; every one is named with both values.
        TransferError: The call's sizes are not those of the sealed topology.
    """
    ours, theirs = own.engine.role, peer.engine.role
    we_consume = (
        call.notif_only
        or ours is Role.CONSUMER
        or theirs is Role.PRODUCER
        # Where each does both, who reads is who calls; who writes is called first.
        or (ours is theirs is Role.BOTH and peer_side(own).mode == "pull")
    )
    check_peers(*((peer, own) if we_consume else (own, peer)))
    layout = peer.engine.layout
    sealed = {
        "tp_size": transfer_tp_size(peer),
        "dcp_size": layout.dcp_size,
        "pp_size": layout.pp_size,
    }
    # A consumer announces its sizes to the producer itself, without stages.
    asked = {"tp_size": call.tp_size, "dcp_size": call.dcp_size, "pp_size": call.pp_size}
    wrong = {name: (asked[name], sealed[name]) for name in sealed if asked[name] != sealed[name]}
    if wrong:
        told = ", ".join(f"{name} {said}, sealed {is_}" for name, (said, is_) in wrong.items())
        raise TransferError(
            f"the handshake with {peer.engine.engine_id} was asked for with other sizes: {told}",
            reason=Reason.ENGINE_INFO_CHANGED,
            metadata={name: f"{said} != {is_}" for name, (said, is_) in wrong.items()},
        )


@dataclass(frozen=True, slots=True)
class _Over:
    """Why a pairing is over."""

    why: str
    since_s: float
    dead: bool = False
    """Whether every worker of that start has ended for sure."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """The start that an engine is used of."""

    generation: str
    seen: bool
    """Whether the book here has shown it: what it shows next came after."""


class Pairs:
    """Whom this worker has shaken hands with, and which of these are over.

    Safe to use from many threads. Nothing is dropped here: vLLM's tables belong
    to its main thread, which asks `over` at each step.
    """

    def __init__(
        self,
        book: PeerBook,
        log: logging.Logger,
        *,
        lease_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Follows the book from now on.

        Args:
            book: The local copy of the book.
            log: Where to say what happens.
            lease_s: How long a producer keeps blocks that nobody came for: vLLM's
                `kv_lease_duration`.
            clock: Seconds that never go back.
        """
        self._book = book
        self._log = log
        self._lease_s = lease_s
        self._clock = clock
        self._lock = threading.Lock()
        self._made: dict[str, Pairing] = {}
        self._over: dict[str, _Over] = {}
        self._bound: dict[str, _Bound] = {}
        self._broken: dict[str, float] = {}
        """Since when a part of an engine is missing."""
        self.counts: Counter[str] = Counter()
        """What happened how often: shaken, refused, dropped, late. Read `counted`."""
        book.on_change(self._changed)

    def bind(self, engine_id: str, generation: str) -> None:
        """From now on this engine is used of this start only; an older pairing is over."""
        if not generation:
            return
        with self._lock:
            bound = self._bound.get(engine_id)
            if bound is None or bound.generation != generation:
                seen = _has(self._book.get(engine_id), generation)
                self._bound.pop(engine_id, None)
                self._bound[engine_id] = _Bound(generation, seen)
                self._thin_out()
                self._look(engine_id)

    def bound(self, engine_id: str) -> str:
        """The start that the engine is used of; empty where any will do."""
        with self._lock:
            bound = self._bound.get(engine_id)
            return bound.generation if bound is not None else ""

    def follow(self, engine_id: str) -> str:
        """Takes the book's newest word on the engine; the start that it is used of then."""
        self._changed(engine_id, None)
        return self.bound(engine_id)

    def refused(self, engine_id: str) -> None:
        """A handshake was refused. A start that the book does not have is used no longer: it
        is over, or nobody's, and whoever comes next would be refused with it."""
        with self._lock:
            self.counts["refused"] += 1
            self._forget(engine_id)

    def made(self, topology: Topology) -> None:
        """A handshake with this topology was made."""
        engine_id = topology.engine.engine_id
        with self._lock:
            self._made[engine_id] = pairing_of(topology)
            self._over.pop(engine_id, None)
            self.counts["shaken"] += 1
            # The book, or a request, may have moved on while it was made.
            self._look(engine_id)

    def dialled(self, engine_id: str) -> None:
        """A handshake was made in vLLM's own way. It is good until the book knows the engine:
        who answered may have been another start of it, or somebody else."""
        with self._lock:
            self._made[engine_id] = Pairing("", ())
            self._over.pop(engine_id, None)
            self._look(engine_id)

    def evicted(self, engine_id: str) -> None:
        """vLLM let go of an engine by itself; of one that was dialled no word may ever come."""
        with self._lock:
            made = self._made.get(engine_id)
            if made is not None and not made.generation and engine_id not in self._over:
                del self._made[engine_id]

    def count(self, what: str) -> int:
        """Counts one more; returns how many there are."""
        with self._lock:
            self.counts[what] += 1
            return self.counts[what]

    def counted(self) -> dict[str, int]:
        """What happened how often so far."""
        with self._lock:
            return dict(self.counts)

    def over(self) -> Mapping[str, float]:
        """Engines whose pairing is over, and when nothing more comes of it, by the clock.

        That is at once where all workers of that start have ended for sure. One
        whose lease ran out, or whose place was taken, may be frozen or cut off and
        still write into this worker's memory: it is given as long as it keeps
        blocks itself.
        """
        with self._lock:
            return {
                engine_id: over.since_s + (0.0 if over.dead else self._lease_s)
                for engine_id, over in self._over.items()
            }

    def lost(self) -> Mapping[str, float]:
        """Engines that lack a part for longer than a lease, and when that was up, by the
        clock. The pairing may serve yet, but who waits for KV of one waits in vain: of
        an engine that lost a stage no request ends. Nobody while the registry is away.
        """
        with self._lock:
            if not self._broken or not self._book.current:
                return {}
            now_s = self._clock()
            return {
                engine_id: since_s + self._lease_s
                for engine_id, since_s in self._broken.items()
                if now_s >= since_s + self._lease_s
                and _is_broken(self._made.get(engine_id), self._book.get(engine_id))
            }

    def is_over(self, engine_id: str) -> bool:
        """Whether the engine's pairing is over and still held."""
        with self._lock:
            return engine_id in self._over

    def dropped(self, engine_id: str) -> None:
        """What was held of the engine is gone; the next use shakes hands anew."""
        with self._lock:
            over = self._over.pop(engine_id, None)
            self._made.pop(engine_id, None)
            self._broken.pop(engine_id, None)
            self._forget(engine_id)
            self.counts["dropped"] += 1
        self._log.info("rankbook: let go of %s: %s", engine_id, over.why if over else "asked to")

    def _changed(self, engine_id: str, _: Topology | None) -> None:
        with self._lock:
            topology = self._book.get(engine_id)
            bound = self._bound.get(engine_id)
            if topology is None or topology.engine.state is State.GONE:
                self._bound.pop(engine_id, None)  # most never come back under this name
            elif bound is not None and (bound.seen or _has(topology, bound.generation)):
                # One that it has never shown may be newer: this copy is late.
                self._bound[engine_id] = _Bound(topology.engine.generation, True)
            self._look(engine_id)

    def _forget(self, engine_id: str) -> None:
        """Lets go of a bound start that the book does not have, or not any more. Most
        engines of such a start never come. Holds the lock."""
        bound = self._bound.get(engine_id)
        topology = self._book.get(engine_id)
        gone = topology is not None and topology.engine.state is State.GONE
        if bound is not None and (gone or not _has(topology, bound.generation)):
            del self._bound[engine_id]

    def _thin_out(self) -> None:
        """Forgets the starts bound first of those that the book has never shown: notices may
        name any engine. Holds the lock."""
        if len(self._bound) <= _BOUND_UNSEEN:
            return
        unseen = [one for one, bound in self._bound.items() if not bound.seen]
        for engine_id in unseen[: max(0, len(unseen) - _BOUND_UNSEEN)]:
            del self._bound[engine_id]

    def _look(self, engine_id: str) -> None:
        """Compares a pairing with the book and with what requests need. Holds the lock, so
        that the newest word of the book is the last one taken."""
        made = self._made.get(engine_id)
        if made is None:
            return
        topology = self._book.get(engine_id)
        bound = self._bound.get(engine_id)
        needed = bound.generation if bound is not None else made.generation
        if _is_broken(made, topology):
            self._broken.setdefault(engine_id, self._clock())
        else:
            self._broken.pop(engine_id, None)
        why = _why_over(made, topology)
        if not why and needed != made.generation:
            why = f"it is of start {made.generation}, needed is {needed}"
        if why:
            over = self._over.get(engine_id) or _Over(why, self._clock())
            self._over[engine_id] = replace(over, dead=over.dead or _is_dead(made, topology))
        else:
            self._over.pop(engine_id, None)


def _why_over(made: Pairing, topology: Topology | None) -> str:
    if topology is None:
        return ""  # a book that was lost knows nobody: no proof that a peer ended
    engine = topology.engine
    if not made.generation:
        return "the book knows it by now, it was asked itself"
    if engine.generation != made.generation:
        return f"start {engine.generation} (epoch {engine.epoch}) took over"
    if engine.state is State.GONE:
        return "it is gone"
    if engine.asleep:
        return "it is asleep"
    if engine.state is State.READY and pairing_of(topology) != made:
        return "it published other metadata"
    return ""


def _has(topology: Topology | None, generation: str) -> bool:
    return topology is not None and topology.engine.generation == generation


def _is_broken(made: Pairing | None, topology: Topology | None) -> bool:
    """Whether a part of the start that was shaken hands with is missing, or contradicts
    another."""
    return (
        made is not None
        and topology is not None
        and topology.engine.generation == made.generation
        and topology.engine.state in (State.DEGRADED, State.INVALID)
    )


def _is_dead(made: Pairing, topology: Topology | None) -> bool:
    return (
        topology is not None
        and topology.engine.state is State.GONE
        and topology.engine.generation == made.generation
        and not topology.engine.lapsed
    )


class Gate(Executor):
    """vLLM's handshake executor with the book before it."""

    def __init__(
        self,
        inner: Executor,
        book: PeerBook,
        pairs: Pairs,
        settings: Settings,
        own_engine_id: str,
        *,
        read: Callable[..., Call],
        shake: Callable[[Topology, Callable[[], Any]], Any],
        dial: Callable[[str, Callable[[], Any]], Any],
    ) -> None:
        """Takes vLLM's place.

        Args:
            inner: vLLM's own executor; shut down with this one.
            book: The local copy of the book.
            pairs: Takes note of what was shaken.
            settings: How long to wait.
            own_engine_id: The engine of this worker.
            read: Reads vLLM's arguments of a handshake.
            shake: Runs vLLM's handshake with a topology's payloads; on `inner`.
            dial: Runs it with an engine that the book does not know; on `inner`.
        """
        self._inner = inner
        self._book = book
        self._pairs = pairs
        self._settings = settings
        self._own = own_engine_id
        self._read = read
        self._shake = shake
        self._dial = dial

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Makes a handshake when its peer is there. Never waits and never raises; what
        is to be refused is refused on the book's thread, since the caller holds locks."""
        outer: Future[Any] = Future()
        outer.set_running_or_notify_cancel()  # whoever waits for it cannot take it back

        def make() -> Any:
            return fn(*args, **kwargs)

        try:
            call = self._read(fn, *args, **kwargs)
            if self._is_foreign(call):
                return self._inner.submit(self._dialled, call.engine_id, make)
        except Exception as error:  # noqa: BLE001 - a step loop that raises ends the worker
            self._pairs.count("refused")
            outer.set_exception(error)
            return outer
        # This engine first: pairs are compared as published, and the peer's word is
        # not to grow old meanwhile.
        if has_all_stages(self._book.get(self._own)):
            self._when(call, make, outer)
        else:
            self._book.when(
                self._own,
                "",
                self._settings.peer_timeout_s,
                lambda mine: (
                    self._refuse(call, outer, mine)
                    if isinstance(mine, RankbookError)
                    else self._when(call, make, outer)
                ),
            )
        return outer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shuts vLLM's executor down."""
        self._inner.shutdown(wait, cancel_futures=cancel_futures)

    def _is_foreign(self, call: Call) -> bool:
        return (
            self._settings.side_channel
            and call.has_address
            and self._book.get(call.engine_id) is None
            # A start that a request was bound to is in the book, if not yet in this copy.
            and not self._pairs.bound(call.engine_id)
        )

    def _when(self, call: Call, make: Callable[[], Any], outer: Future[Any]) -> None:
        generation = self._pairs.bound(call.engine_id)

        def done(found: Topology | RankbookError) -> None:
            if not isinstance(found, RankbookError):
                self._go(call, make, outer, found)
            elif not isinstance(found, Unavailable | DeadlineExceeded) and self._pairs.follow(
                call.engine_id
            ) not in ("", generation):
                # Meanwhile it is used of another start, and who needs that one waits for
                # this same handshake. What is of the old start is refused one by one.
                self._when(call, make, outer)
            else:
                self._refuse(call, outer, found)

        self._book.when(call.engine_id, generation, self._settings.peer_timeout_s, done)

    def _go(self, call: Call, make: Callable[[], Any], outer: Future[Any], peer: Topology) -> None:
        try:
            own = self._book.get(self._own)
            if own is None:
                raise NotFound(
                    f"this engine, {self._own}, is no longer in the book: it signs in again by "
                    "itself",
                    metadata={"engine_id": self._own},
                )
            check_pair(own, peer, call)
            inner = self._inner.submit(self._made, peer, make)
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits for an answer
            self._refuse(call, outer, error)
            return
        inner.add_done_callback(lambda done: _pass_on(done, outer))

    def _made(self, peer: Topology, make: Callable[[], Any]) -> Any:
        result = self._shake(peer, make)
        self._pairs.made(peer)
        return result

    def _dialled(self, engine_id: str, make: Callable[[], Any]) -> Any:
        result = self._dial(engine_id, make)
        self._pairs.dialled(engine_id)
        return result

    def _refuse(self, call: Call, outer: Future[Any], error: Exception) -> None:
        self._pairs.refused(call.engine_id)
        outer.set_exception(error)


def has_all_stages(own: Topology | None) -> bool:
    """Whether an engine has published enough to be compared: a layer range for each stage."""
    return own is not None and len(own.engine.stages) == own.engine.layout.pp_size


def _pass_on(inner: Future[Any], outer: Future[Any]) -> None:
    if inner.cancelled():
        outer.set_exception(CancelledError())
        return
    error = inner.exception()
    if error is not None:
        outer.set_exception(error)
    else:
        outer.set_result(inner.result())
