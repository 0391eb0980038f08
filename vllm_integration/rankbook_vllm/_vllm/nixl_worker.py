"""A NIXL worker with the book before it.

The worker half carries out what its engine core ordered, keeps back what must
wait, and lets go of peers that are over. vLLM's tables are changed on its main
thread only.
"""

from __future__ import annotations

import importlib
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rankbook_vllm._vllm.base import logger
from rankbook_vllm._vllm.halves import Orders
from rankbook_vllm._vllm.nixl_socket import take_back
from rankbook_vllm._vllm.seams import NIXL
from rankbook_vllm.config import Settings
from rankbook_vllm.handshake import Pairs
from rankbook_vllm.lookup import Refuse
from rankbook_vllm.peers import PeerBook
from rankbook_vllm.requests import WAITED

__all__ = ["BookWorker", "WorkerHalf", "warming"]

_REMEMBERED = 4096
"""Freed requests remembered, to tell a late registration from an early one."""

_GIVEN_UP = math.inf
"""Deadline of an orphan that vLLM has been told about."""

warming = threading.local()
"""`on` in a thread that shakes hands in advance."""


@dataclass(slots=True)
class _Held:
    """A request that waits for an old pairing of its peer to be let go."""

    engine_id: str
    generation: str
    deadline_s: float
    receive: Any
    registration: Any


class WorkerHalf:
    """What the book adds to a NIXL worker."""

    def __init__(
        self,
        book: PeerBook,
        pairs: Pairs,
        settings: Settings,
        *,
        kept_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.book = book
        self.pairs = pairs
        self.settings = settings
        self.handshake_s = kept_s * WAITED
        """How long a request whose blocks are at its producer may wait for the handshake."""
        self.touching = threading.Lock()
        """Held by who uses a peer's tables off the main thread, and by who drops them."""
        self.held: dict[str, _Held] = {}
        self.parked: list[tuple[str, Any, dict[str, Any]]] = []
        """Pushes that wait for an old pairing of their consumer to be let go."""
        self.unsent: dict[str, dict[str, Any]] = {}
        """Registrations that wait for an old pairing of their producer to be let go."""
        self.orphans: dict[str, tuple[str, float]] = {}
        """Requests that wait for a start that is over: its engine, and until when."""
        self.pushes: dict[str, str] = {}
        """The consumer that each push under way goes to."""
        self.warmed: dict[str, str] = {}
        """The start of each peer that was last shaken hands with in advance."""
        self.warm: Callable[[str], None] = lambda _: None
        """Shakes hands with a peer in advance, where that is wanted."""
        self.freed: OrderedDict[str, str] = OrderedDict()
        """Requests whose blocks were freed: producer's id by the id both sides share."""
        self._asked: OrderedDict[str, float] = OrderedDict()
        self._clock = clock

    def waited(self, request_id: str, *, known: bool) -> float:
        """Seconds that a request has waited for the handshake with its producer.

        Args:
            request_id: Of a request whose turn it is.
            known: Whether the producer has been shaken hands with: then it need not wait,
                and this is the last time that it is asked about.
        """
        now = self._clock()
        asked_s = self._asked.pop(request_id, now)
        if not known:
            self._asked[request_id] = asked_s
            while len(self._asked) > _REMEMBERED:  # those that never had another turn
                self._asked.popitem(last=False)
        return now - asked_s


class BookWorker:
    """Goes before a NIXL worker class."""

    rankbook: WorkerHalf

    # --------------------------------------------------------- the step loop

    def start_load_kv(self, metadata: Any) -> None:
        """Carries out the engine core's orders, then vLLM's. Main thread; never waits."""
        half = self.rankbook
        orders = getattr(metadata, "rankbook", None) or Orders()
        for request_id, block_ids in orders.failed.items():
            _fail(self, request_id, block_ids)
        for request_id in metadata.reqs_in_batch:
            half.freed.pop(_shared_id(request_id), None)  # a client may use an id again
        _bind(self, metadata, orders.generations)
        _let_go(self)
        _hold(self, metadata)
        super().start_load_kv(metadata)  # type: ignore[misc]

    def get_transfer_results(self) -> Any:
        """vLLM's results; then lets go of peers that are over. Main thread."""
        results = super().get_transfer_results()  # type: ignore[misc]
        _note_freed(self, results.finished_sending)
        _let_go(self)
        return results

    def get_finished(self) -> Any:
        """The same in vLLM 0.28, which has no transfer results."""
        _forget_unknown_failures(self)
        finished = super().get_finished()  # type: ignore[misc]
        _note_freed(self, finished[0])
        _let_go(self)
        return finished

    def _evict_stale_engines(self) -> None:
        # Drops tables, which is the main thread's: a thread that warms up must not.
        if not getattr(warming, "on", False):
            super()._evict_stale_engines()  # type: ignore[misc]

    # ------------------------------------------------------------------ pull

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        """Reads from the start that the block ids are of, from no other. A handshake
        was waited for meanwhile."""
        half = self.rankbook
        engine_id = meta.remote.engine_id
        generation = getattr(meta, "rankbook_generation", "")
        if not _is_bound(half, engine_id, generation):
            _refuse(self, req_id, meta)
        elif engine_id in self._remote_agents and half.pairs.is_over(engine_id):  # type: ignore[attr-defined]
            half.held[req_id] = _held(half, engine_id, meta, None)
        elif half.waited(req_id, known=engine_id in self._remote_agents) > half.handshake_s:  # type: ignore[attr-defined]
            _say_late(half, req_id, engine_id)
            if _is_awaited(meta):
                _fail(self, req_id, meta.local_block_ids)
        else:
            try:
                super()._read_blocks_for_req(req_id, meta)  # type: ignore[misc]
            except Exception:  # noqa: BLE001 - a step loop that raises ends the worker
                logger.exception(
                    "rankbook: request %s fails: what it says of its blocks at %s does not fit; "
                    "send what the producer returned",
                    req_id,
                    engine_id,
                )
                if _is_awaited(meta):  # reads that have begun are waited for
                    _fail(self, req_id, meta.local_block_ids)

    # ------------------------------------------------------- push, its writer

    def _send_registration_to_p(self, req_id: str, reg_data: dict[str, Any]) -> None:
        half = self.rankbook
        engine_id = reg_data["remote_engine_id"]
        with half.touching:
            generation = str(reg_data.get("remote_generation") or "")
            if not _is_bound(half, engine_id, generation):
                _say_past(req_id, engine_id)
                _report(self, req_id)
                return
            known = engine_id in self._remote_agents  # type: ignore[attr-defined]
            if generation and half.waited(req_id, known=known) > half.handshake_s:
                _say_late(half, req_id, engine_id)
                _report(self, req_id)
                return
            if engine_id in self._remote_agents and half.pairs.is_over(engine_id):  # type: ignore[attr-defined]
                half.unsent[req_id] = reg_data
                return
            super()._send_registration_to_p(req_id, reg_data)  # type: ignore[misc]

    def _do_start_push_kv(
        self, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]
    ) -> None:
        half = self.rankbook
        with half.touching:
            if _must_wait(half, registration_data):
                half.parked.append((request_id, local_block_ids, registration_data))
                return
            engine_id = registration_data["decode_engine_id"]
            if _is_freed(self, request_id):
                # A handshake was waited for meanwhile; the blocks may be another request's.
                _say_waited(half, registration_data, request_id)
                return
            generation = str(registration_data.get("decode_generation") or "")
            if generation and engine_id not in self._remote_agents:  # type: ignore[attr-defined]
                # Who waits for the same handshake would be refused with it.
                answer = half.book.judge(engine_id, generation)
                if isinstance(answer, Refuse):
                    logger.error("rankbook: request %s is not sent: %s", request_id, answer.why)
                    return
            half.pushes[request_id] = engine_id
            super()._do_start_push_kv(  # type: ignore[misc]
                request_id, local_block_ids, registration_data
            )

    def _handle_push_reg_notif(self, notif: bytes) -> None:
        """Takes a registration; says so where its blocks were freed before it came.

        vLLM would keep it for ever, and its decode engine would wait as long.
        """
        pending: dict[str, Any] = self._pending_d_registrations  # type: ignore[attr-defined]
        before = set(pending)
        super()._handle_push_reg_notif(notif)  # type: ignore[misc]
        for request_id in set(pending) - before:
            ours = self.rankbook.freed.get(_shared_id(request_id))
            if ours is None:
                continue
            engine_id = pending.pop(request_id).get("decode_engine_id")
            _say_freed(self.rankbook, request_id, engine_id, ours)


def _is_freed(worker: Any, request_id: str) -> bool:
    """Whether vLLM keeps no blocks of a producer's request any more."""
    return request_id not in worker._reqs_to_process and request_id not in worker._reqs_to_send


def _say_waited(half: WorkerHalf, registration: Mapping[str, Any], ours: str) -> None:
    """Says and counts that blocks were freed while they waited to be sent."""
    engine_id = registration["decode_engine_id"]
    _say_freed(half, registration["request_id"], engine_id, ours, "waited for", "until")


def _say_freed(
    half: WorkerHalf,
    request_id: str,
    engine_id: object,
    ours: str,
    did: str = "came for",
    when: str = "after",
) -> None:
    """Says and counts that KV cannot come, since its blocks were freed."""
    logger.error(
        "rankbook: request %s of %s %s the blocks of request %s %s they were "
        "freed: its KV can never come, abort it there (%d so far). Raise "
        "kv_lease_duration if decode engines are slow to ask",
        request_id,
        engine_id,
        did,
        ours,
        when,
        half.pairs.count("late"),
    )


def _shared_id(request_id: str) -> str:
    """The part of a request id that both sides share: vLLM ends each with its own "-<8 hex>"."""
    head, dash, tail = request_id.rpartition("-")
    random = len(tail) == 8 and all(c in "0123456789abcdefABCDEF" for c in tail)
    return head if dash and random else request_id


def _note_freed(worker: Any, request_ids: Iterable[str]) -> None:
    half: WorkerHalf = worker.rankbook
    freed = half.freed
    for request_id in request_ids:
        if request_id not in half.pushes:  # one that was sent is missed by nobody
            freed[_shared_id(request_id)] = request_id
    while len(freed) > _REMEMBERED:
        freed.popitem(last=False)


def _fail(worker: Any, request_id: str, block_ids: Any) -> None:
    """Hands a request back as one whose KV did not come: kv_load_failure_policy decides."""
    metadata = importlib.import_module(f"{NIXL}.metadata")
    entry = metadata.ReqMeta(
        local_block_ids=block_ids, local_physical_block_ids=block_ids, tp_size=1
    )
    if hasattr(entry, "awaiting_kvs"):
        entry.awaiting_kvs = True
    worker._recving_metadata.setdefault(request_id, entry)
    _report(worker, request_id)


def _report(worker: Any, request_id: str) -> None:
    """Tells vLLM that the KV of a request which it expects does not come."""
    if hasattr(worker, "_recv_failures"):
        worker._failed_recv_reqs.put(request_id)
    else:
        # vLLM 0.28: what is only in the queue counts as received, garbage and all.
        worker._handle_failed_transfer(request_id, None)


def _forget_unknown_failures(worker: Any) -> None:
    """vLLM 0.28 ends a worker for a failure of a request that it has already reported."""
    if hasattr(worker, "_recv_failures"):
        return
    inbox: queue.Queue[str] = worker._failed_recv_reqs
    for _ in range(inbox.qsize()):
        request_id = inbox.get_nowait()  # nobody else takes any
        if request_id in worker._recving_metadata:
            inbox.put(request_id)


def _is_awaited(receive: Any) -> bool:
    """Whether the engine core waits for it. It dies of hearing about another: one that
    has all its KV, or was aborted, is here only so that its producer is told."""
    return bool(getattr(receive, "awaiting_kvs", False)) or any(receive.local_block_ids)


def _refuse(worker: Any, request_id: str, receive: Any) -> None:
    """Fails a request of a start that is over."""
    _say_past(request_id, receive.remote.engine_id)
    if _is_awaited(receive):
        _fail(worker, request_id, receive.local_block_ids)


def _say_late(half: WorkerHalf, request_id: str, engine_id: str) -> None:
    logger.error(
        "rankbook: request %s fails: the handshake with %s took longer than %g s, and its blocks "
        "there are kept no longer than kv_lease_duration; prefill again",
        request_id,
        engine_id,
        half.handshake_s,
    )


def _say_past(request_id: str, engine_id: str) -> None:
    logger.error(
        "rankbook: request %s fails: its blocks went with the last start of %s; prefill again",
        request_id,
        engine_id,
    )


def _bind(worker: Any, metadata: Any, generations: Mapping[str, str]) -> None:
    """Binds each request to its producer's start. The engine core asked the book just now:
    the last request of a producer names its newest start."""
    half: WorkerHalf = worker.rankbook
    for request_id, generation in generations.items():
        receive = metadata.reqs_to_recv[request_id]
        receive.rankbook_generation = generation
        half.pairs.bind(receive.remote.engine_id, generation)
    for request_id, generation in generations.items():
        receive = metadata.reqs_to_recv[request_id]
        if not _is_bound(half, receive.remote.engine_id, generation):
            del metadata.reqs_to_recv[request_id]
            getattr(metadata, "push_registrations", {}).pop(request_id, None)
            _refuse(worker, request_id, receive)


def _is_bound(half: WorkerHalf, engine_id: str, generation: str) -> bool:
    """Whether the engine is used of this start; False where a later request named another:
    this one must not read from there."""
    bound = half.pairs.bound(engine_id)
    if not bound:
        half.pairs.bind(engine_id, generation)  # the book had lost the engine
    return not bound or not generation or bound == generation


def _must_wait(half: WorkerHalf, registration: Mapping[str, Any]) -> bool:
    """Whether a push must wait for what is held of its consumer's other start to go. Binds
    the consumer to the start that asks, unless the book still has the other: then either
    the book here is late, or who asks is dead."""
    engine_id = registration["decode_engine_id"]
    generation = str(registration.get("decode_generation") or "")
    bound = half.pairs.bound(engine_id)
    if generation and bound and bound != generation:
        known = half.book.get(engine_id)
        if known is not None and known.engine.generation == bound:
            return True
    half.pairs.bind(engine_id, generation)
    return half.pairs.is_over(engine_id)


def _busy(worker: Any, engine_id: str) -> bool:
    """Whether a transfer, or vLLM itself, still uses what is held of a peer."""
    if engine_id in worker._handshake_futures:
        return True
    for request_id in worker._recving_transfers:
        meta = worker._recving_metadata.get(request_id)
        if meta is not None and meta.remote is not None and meta.remote.engine_id == engine_id:
            return True
    pushes = worker.rankbook.pushes
    sending = getattr(worker, "_sending_transfers", ())
    return any(pushes.get(request_id) == engine_id for request_id in tuple(sending))


def _let_go(worker: Any) -> None:
    """Drops pairings that are over and unused. Main thread; what the writer holds now
    waits for the next step."""
    half: WorkerHalf = worker.rankbook
    over = half.pairs.over()
    if half.orphans:
        _give_up(worker)
    lost = half.pairs.lost()
    if over or lost:
        _orphan(worker, {**lost, **over})
    waiting = over or half.parked or half.unsent or half.pushes
    if not waiting or not half.touching.acquire(blocking=False):
        return
    try:
        # One at a step: NIXL takes its time, and a whole fleet may start anew at once.
        dropped = next((engine_id for engine_id in over if _drop(worker, engine_id)), "")
        again = _unpark(worker)
        for request_id, registration in tuple(half.unsent.items()):
            if not half.pairs.is_over(registration["remote_engine_id"]):
                worker._reg_send_inbox.put((request_id, half.unsent.pop(request_id)))
                worker._push_writer_wake.set()
        for request_id in tuple(half.pushes):
            if (
                request_id not in worker._reqs_to_send
                and request_id not in worker._sending_transfers
            ):
                del half.pushes[request_id]
    finally:
        half.touching.release()
    for push in again:
        worker._deferred_push_inbox.put(push)
    if again:
        worker._push_writer_wake.set()
    if dropped:
        try:
            half.warm(dropped)
        except Exception:  # noqa: BLE001 - a step loop that raises ends the worker
            logger.exception("rankbook: no handshake in advance with %s", dropped)


def _drop(worker: Any, engine_id: str) -> bool:
    """Drops what is held of a peer, if nothing uses it."""
    half: WorkerHalf = worker.rankbook
    with worker._handshake_lock:  # one that has just been made is in neither table
        known = engine_id in worker._remote_agents
        if not known and engine_id not in worker._handshake_futures:
            half.pairs.dropped(engine_id)
            return True
    if not known or _busy(worker, engine_id):
        return False
    agents = tuple(worker._remote_agents[engine_id].values())
    try:
        worker._cleanup_remote_engine(engine_id)
    except Exception:  # noqa: BLE001 - a step loop that raises ends the worker
        logger.exception("rankbook: vLLM could not let go of %s", engine_id)
        with worker._handshake_lock:
            for name in ("_remote_agents", "_engine_last_active", "_engine_clock_offset"):
                getattr(worker, name).pop(engine_id, None)
        take_back(worker, engine_id, agents)
    half.pairs.dropped(engine_id)
    return True


def _unpark(worker: Any) -> list[tuple[str, Any, dict[str, Any]]]:
    """The pushes that need not wait any more; those whose blocks were freed are over: the
    blocks may be another request's by now."""
    half: WorkerHalf = worker.rankbook
    parked, half.parked = half.parked, []
    again = []
    for push in parked:
        request_id, _, registration = push
        if _is_freed(worker, request_id):
            _say_waited(half, registration, request_id)
        elif _must_wait(half, registration):
            half.parked.append(push)
        else:
            again.append(push)
    return again


def _orphan(worker: Any, over: Mapping[str, float]) -> None:
    """Takes note of the requests that wait for a push of a start that is over, or that
    lacks a part for good."""
    if not hasattr(worker, "_push_writer_wake"):
        return  # a read fails by itself
    half: WorkerHalf = worker.rankbook
    for request_id, meta in worker._recving_metadata.items():
        engine_id = meta.remote.engine_id if meta.remote is not None else ""
        if request_id in half.unsent or request_id in worker._recving_transfers:
            continue
        if engine_id in over and _is_awaited(meta):
            _, at_s = half.orphans.get(request_id, (engine_id, over[engine_id]))
            if at_s != _GIVEN_UP:
                half.orphans[request_id] = (engine_id, over[engine_id])
    _give_up(worker)


def _give_up(worker: Any) -> None:
    """Fails the orphans for whom nothing can come any more."""
    half: WorkerHalf = worker.rankbook
    now = time.monotonic()
    for request_id, (engine_id, at_s) in tuple(half.orphans.items()):
        if request_id not in worker._recving_metadata:
            del half.orphans[request_id]
        elif now >= at_s and request_id not in worker._recving_transfers:
            half.orphans[request_id] = (engine_id, _GIVEN_UP)
            logger.error(
                "rankbook: request %s fails: %s ended before it sent its KV", request_id, engine_id
            )
            _report(worker, request_id)


def _held(half: WorkerHalf, engine_id: str, receive: Any, registration: Any) -> _Held:
    return _Held(
        engine_id,
        getattr(receive, "rankbook_generation", ""),
        time.monotonic() + half.settings.peer_timeout_s,
        receive,
        registration,
    )


def _hold(worker: Any, metadata: Any) -> None:
    """Keeps requests back while an old pairing of their peer is still in use."""
    half: WorkerHalf = worker.rankbook
    now = time.monotonic()
    registrations = getattr(metadata, "push_registrations", {})
    for request_id, meta in tuple(metadata.reqs_to_recv.items()):
        engine_id = meta.remote.engine_id if meta.remote is not None else ""
        if engine_id and half.pairs.is_over(engine_id):
            del metadata.reqs_to_recv[request_id]
            registration = registrations.pop(request_id, None)
            half.held[request_id] = _held(half, engine_id, meta, registration)
    for request_id, held in tuple(half.held.items()):
        if not _is_bound(half, held.engine_id, held.generation):
            del half.held[request_id]
            _refuse(worker, request_id, held.receive)
        elif not half.pairs.is_over(held.engine_id):
            del half.held[request_id]
            metadata.reqs_to_recv[request_id] = held.receive
            if held.registration is not None:
                registrations[request_id] = held.registration
        elif now >= held.deadline_s:
            del half.held[request_id]
            logger.error(
                "rankbook: request %s fails: transfers of the last start of %s did not end "
                "within %g s",
                request_id,
                held.engine_id,
                half.settings.peer_timeout_s,
            )
            if _is_awaited(held.receive):
                _fail(worker, request_id, held.receive.local_block_ids)
