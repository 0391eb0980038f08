"""What each call does, whichever way it came in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from google.protobuf.message import Message

from rankbook import v1
from rankbook.convert import duration, seconds, timestamp
from rankbook.errors import BadRequest, LimitExceeded
from rankbook.limits import (
    DEFAULT_NAMESPACE,
    MAX_DRAIN_WAIT_S,
    MAX_PAGE_ENGINES,
    MAX_REPLY_BYTES,
    MAX_WAIT_S,
    check_id,
    check_namespace,
)
from rankbook_server.clock import Clock
from rankbook_server.core.book import Book
from rankbook_server.core.decision import Instant
from rankbook_server.drains import LOOK_S, Drains, Words
from rankbook_server.pairing import compare, prepare_plan
from rankbook_server.peers import drain_outcome
from rankbook_server.registry import Registry
from rankbook_server.rpc.topology import TopologyReader, require_usable
from rankbook_server.view import View
from rankbook_server.waiters import Waiters
from rankbook_server.watch import EngineTest, Hub
from rankbook_server.wire import Body, delimited, scalar, span

__all__ = ["WRITES", "Answer", "Calls", "check_wait"]

Answer = Message | list[Body]
"""A reply: a message, or the parts of one that is kept serialised."""

WRITES: dict[str, Callable[..., Any]] = {
    "begin_generation": Book.begin_generation,
    "register_workers": Book.register,
    "update_worker": Book.update,
    "deregister": Book.deregister,
    "revoke_lease": Book.revoke_lease,
    "seal_engine": Book.seal,
    "drain_engine": Book.drain,
    "evict_engine": Book.evict,
}
"""Calls that change a book."""

_DEFAULT_PAGE = 100
# A read that asks for a revision this server has not seen yet waits so long
# where it names no wait of its own: a replica is milliseconds behind, not more.
_MIN_REVISION_WAIT_S = 1.0
# A plan of more pairs of a consumer rank and a producer stage takes over 10 ms:
# it is made in a thread, one at a time, and the loop goes on meanwhile.
_MAX_INLINE_PLAN = 1024


def _subject(field: str, request: Any) -> str:
    """The engine or lease a write is about."""
    if field == "register_workers":
        return request.records[0].engine_id if request.records else ""
    if field == "update_worker":
        return str(request.record.engine_id)
    return str(request.lease_id if field == "revoke_lease" else request.engine_id)


def _alive(statuses: Iterable[v1.LeaseStatus]) -> dict[str, float]:
    """The leases that live, each with its time to live in seconds."""
    return {
        status.lease_id: seconds(status.ttl)
        for status in statuses
        if status.state == v1.LEASE_STATE_ALIVE
    }


def check_wait(field: str, wait_s: float, bound_s: float) -> float:
    """Returns a wait that a call may ask for, in seconds.

    Raises:
        BadRequest: It is negative.
        LimitExceeded: It is longer than the bound.
    """
    if wait_s < 0:
        raise BadRequest(
            f"{field} is {wait_s:g} s: a wait is zero or above, zero answers at once",
            metadata={"field": field, "value": wait_s, "rule": "zero or above"},
        )
    if wait_s > bound_s:
        raise LimitExceeded(
            f"{field} is {wait_s:g} s, over the limit of {bound_s:g} s: wait again after it",
            metadata={"limit": field, "value": wait_s, "bound": bound_s, "unit": "seconds"},
        )
    return wait_s


class Calls:
    """All calls but Session itself. For one event loop."""

    def __init__(
        self,
        registry: Registry,
        view: View,
        waiters: Waiters,
        hub: Hub,
        drains: Drains,
        clock: Clock,
        version: str,
    ) -> None:
        self.registry = registry
        self.hub = hub
        """Where watches are opened."""
        self.sessions: Callable[[], int] = lambda: 0
        """Counts the sessions that are open."""
        self._view = view
        self._waiters = waiters
        self._drains = drains
        self._clock = clock
        self._version = version
        self._topology = TopologyReader(registry, view, waiters, clock)
        self._planning = asyncio.Lock()
        self._reads: dict[str, Callable[[Any, float | None], Any]] = {
            "renew_leases": self._renew_leases,
            "report_peers": self._report_peers,
            "get_topology": self._get_topology,
            "list_engines": self._list_engines,
            "plan_transfer": self._plan_transfer,
            "compare_peers": self._compare_peers,
            "get_status": self._get_status,
        }

    # ----------------------------------------------------------------- writes

    def submit(
        self, field: str, request: Any, notify: Callable[[], None] | None = None
    ) -> asyncio.Future[Any]:
        """Queues a call of `WRITES`; `finish` completes its reply.

        Raises:
            BadRequest: The namespace is no id.
        """
        decide = WRITES[field]
        namespace = check_namespace(request.namespace)
        return self.registry.submit(
            field,
            namespace,
            lambda book, now: decide(book, request, now),
            notify,
            _subject(field, request),
        )

    def finish(self, field: str, request: Any, reply: Any) -> Message:
        """Fills in what the core cannot know."""
        if field in ("begin_generation", "register_workers"):
            reply.book_id = self.registry.book_id
        if field == "register_workers":
            reply.boot_id = self.registry.boot_id
        if field == "drain_engine":
            # What other servers know comes in `_await_drain`.
            words: Words | None = None if self.registry.is_shared else {}
            self._fill_drain(check_namespace(request.namespace), request.engine_id, words, reply)
        return cast(Message, reply)

    def may_wait(self, field: str, request: Any) -> bool:
        """Whether a call may take longer than a read from memory does."""
        if field == "drain_engine":
            return self.registry.is_shared or bool(request.HasField("wait"))
        if field == "report_peers":
            return not self._drains.is_heard(request, request.namespace or DEFAULT_NAMESPACE)
        if field == "get_topology" and request.HasField("wait"):
            return True
        if field in ("get_topology", "list_engines"):
            return bool(request.min_revision > self.registry.revision)
        if field == "renew_leases":
            return self.registry.is_shared
        return field == "plan_transfer" and self._is_long(request)

    async def answer(self, field: str, request: Any, remaining_s: float | None) -> Answer:
        """Does any call but a watch.

        Args:
            field: The call's field in SessionRequest.
            request: Its request.
            remaining_s: Seconds its caller still waits; None without end.

        Raises:
            RankbookError: The call's own error.
        """
        if field == "drain_engine":
            check_wait("wait", seconds(request.wait), MAX_DRAIN_WAIT_S)
        if field in WRITES:
            reply = self.finish(field, request, await self.submit(field, request))
            if field == "drain_engine":
                await self._await_drain(request, cast(v1.DrainEngineResponse, reply), remaining_s)
            return reply
        # Status is asked for most when the store is away, and says that it is.
        if field != "get_status":
            self.registry.check_readable()
        return cast(Answer, await self._reads[field](request, remaining_s))

    # ------------------------------------------------------------------ drain

    def _fill_drain(
        self, namespace: str, engine_id: str, words: Words | None, reply: v1.DrainEngineResponse
    ) -> None:
        view = self._view.engine(namespace, engine_id)
        if view is None:
            return
        engine = view.engine
        flying, complete = self._drains.count(namespace, engine, words)
        reply.state, reply.revision = engine.state, engine.revision
        reply.transfers_in_flight = flying
        reply.outcome = drain_outcome(
            engine, flying, reports_complete=complete, unix_s=self._clock.unix()
        )

    async def _await_drain(
        self, request: v1.DrainEngineRequest, reply: v1.DrainEngineResponse, left_s: float | None
    ) -> None:
        """Hears what the other servers know, and waits as long as is asked for."""
        namespace, engine_id = check_namespace(request.namespace), request.engine_id
        shared = self.registry.is_shared
        wait_s = seconds(request.wait)
        since_s = self._clock.mono()
        until_s = since_s + (wait_s if left_s is None else min(wait_s, left_s))
        while reply.outcome == v1.DRAIN_OUTCOME_WAITING:
            if shared:
                words = await self._drains.listen(since_s)
                self._fill_drain(namespace, engine_id, words, reply)
                if reply.outcome != v1.DRAIN_OUTCOME_WAITING:
                    return
            left = until_s - self._clock.mono()
            if left <= 0:
                return
            # Reports run out and deadlines pass without a word, so look again.
            await self._waiters.engine(namespace, engine_id, min(left, LOOK_S if shared else 1.0))
            if not shared:
                self._fill_drain(namespace, engine_id, {}, reply)
            # Calls that wait side by side share a look.
            since_s = max(since_s, self._clock.mono() - LOOK_S)

    # ------------------------------------------------------------------ leases

    async def _renew_leases(
        self, request: v1.RenewLeasesRequest, remaining_s: float | None
    ) -> v1.RenewLeasesResponse:
        registry = self.registry
        namespace = check_namespace(request.namespace)
        now = registry.now()
        statuses = registry.book(namespace).renew(request, now)
        if registry.is_shared:
            statuses, now = await self._renew_shared(request, namespace, statuses)
        else:
            registry.note_renewed(_alive(statuses))
        return v1.RenewLeasesResponse(
            leases=statuses,
            boot_id=registry.boot_id,
            book_id=registry.book_id,
            book_revision=registry.revision,
            server_time=timestamp(now.unix_s),
        )

    async def _renew_shared(
        self,
        request: v1.RenewLeasesRequest,
        namespace: str,
        statuses: tuple[v1.LeaseStatus, ...],
    ) -> tuple[tuple[v1.LeaseStatus, ...], Instant]:
        """What a renewal is answered where other servers write too: ALIVE is said once
        the store has it, since this server may be cut off in the next moment."""
        registry = self.registry
        if any(status.state != v1.LEASE_STATE_ALIVE for status in statuses):
            # It may have been granted at another server a moment ago.
            await registry.catch_up()
            statuses = registry.book(namespace).renew(request, registry.now())
        made = await registry.confirm_alive(_alive(statuses))
        if made:
            # The store held some for dead; another server may have ended them.
            await registry.catch_up()
            statuses = registry.book(namespace).renew(request, registry.now())
            registry.note_ended(
                status.lease_id
                for status in statuses
                if status.lease_id in made
                and status.state in (v1.LEASE_STATE_ENDED, v1.LEASE_STATE_UNKNOWN)
            )
        return statuses, registry.now()

    async def _report_peers(
        self, request: v1.ReportPeersRequest, remaining_s: float | None
    ) -> v1.ReportPeersResponse:
        namespace = check_namespace(request.namespace)
        for engine_id in self._drains.report(request, namespace):
            self._waiters.stir(namespace, engine_id)
        await self._drains.vouch(request, namespace)
        reply = v1.ReportPeersResponse()
        for peer in request.peers:
            view = self._view.engine(namespace, peer.engine_id)
            engine = view.engine if view is not None else None
            if (
                engine is not None
                and engine.generation == peer.generation
                and engine.state != v1.STATE_GONE
            ):
                continue
            stale = reply.stale.add(engine_id=peer.engine_id, generation=peer.generation)
            if engine is None:
                continue
            if engine.HasField("successor"):
                stale.successor.CopyFrom(engine.successor)
            elif engine.generation != peer.generation:
                stale.successor.engine_id = engine.engine_id
                stale.successor.epoch = engine.epoch
                stale.successor.generation = engine.generation
        return reply

    # ------------------------------------------------------------------- reads

    async def _reach(self, request: Any, wait_s: float, remaining_s: float | None) -> None:
        """Sees to `min_revision`."""
        if request.min_revision <= self.registry.revision:
            return
        wait_s = max(wait_s, _MIN_REVISION_WAIT_S)
        if remaining_s is not None:
            wait_s = min(wait_s, remaining_s)
        await self._waiters.revision(request.min_revision, wait_s)

    async def _get_topology(
        self, request: v1.GetTopologyRequest, remaining_s: float | None
    ) -> list[Body]:
        wait_s = check_wait("wait", seconds(request.wait), MAX_WAIT_S)
        started_s = self._clock.mono()
        await self._reach(request, wait_s, remaining_s)
        spent_s = self._clock.mono() - started_s
        left_s = None if remaining_s is None else remaining_s - spent_s
        return await self._topology.read(request, wait_s - spent_s, left_s)

    async def _list_engines(
        self, request: v1.ListEnginesRequest, remaining_s: float | None
    ) -> list[Body]:
        namespace = check_namespace(request.namespace)
        test = EngineTest(request.filter)
        if request.page_size > MAX_PAGE_ENGINES:
            raise LimitExceeded(
                f"page_size is {request.page_size} engines, over the limit of {MAX_PAGE_ENGINES}",
                metadata={
                    "limit": "page_size",
                    "value": request.page_size,
                    "bound": MAX_PAGE_ENGINES,
                },
            )
        if request.page_token:
            check_id("page_token", request.page_token)
        await self._reach(request, 0.0, remaining_s)
        bound = request.page_size or _DEFAULT_PAGE
        pieces: list[bytes] = []
        size = 0
        last = token = ""
        for engine_id in self.registry.book(namespace).engine_ids():
            if engine_id <= request.page_token or not test.names(engine_id):
                continue
            view = self._view.engine(namespace, engine_id)
            if view is None or not test.matches(view.engine):
                continue
            piece = delimited(1, view.head)
            if len(pieces) == bound or (pieces and size + len(piece) > MAX_REPLY_BYTES - 4096):
                token = last
                break
            pieces.append(piece)
            size += len(piece)
            last = engine_id
        if token:
            pieces.append(delimited(2, token.encode()))
        pieces.append(scalar(3, self.registry.revision))
        pieces.append(delimited(4, self.registry.book_id.encode()))
        pieces.append(span(5, self.registry.stale_s))
        return [Body(pieces, sum(map(len, pieces)))]

    def _usable(self, namespace: str, field: str, engine_id: str) -> v1.Engine:
        check_id(field, engine_id)
        return require_usable(self._view.engine(namespace, engine_id), namespace, engine_id)

    def _records(self, namespace: str, engine_id: str) -> Sequence[v1.WorkerRecord]:
        state = self.registry.book(namespace).engines[engine_id]
        return [state.live[slot].stored.record for slot in state.order()]

    async def _plan_transfer(
        self, request: v1.PlanTransferRequest, remaining_s: float | None
    ) -> v1.PlanTransferResponse:
        namespace = check_namespace(request.namespace)
        if request.mode not in v1.TransferMode.values():
            raise BadRequest(
                f"mode is {request.mode}: PULL, PUSH, or none for what the producer states",
                metadata={"field": "mode", "value": request.mode, "rule": "a known value"},
            )
        producer_id = request.producer_engine_id
        producer = self._usable(namespace, "producer_engine_id", producer_id)
        records = self._records(namespace, producer_id)
        which = request.WhichOneof("consumer")
        if which is None:
            raise BadRequest(
                "consumer is not set: name an engine (consumer_engine_id) or give sizes "
                "(consumer_layout)",
                metadata={"field": "consumer", "value": "", "rule": "required"},
            )
        if which == "consumer_layout":
            make = prepare_plan(producer, records, request.consumer_layout, (), request.mode)
        else:
            consumer_id = request.consumer_engine_id
            consumer = self._usable(namespace, "consumer_engine_id", consumer_id)
            others = self._records(namespace, consumer_id)
            make = prepare_plan(producer, records, consumer, others, request.mode)
        if not self._is_long(request):
            return make()
        async with self._planning:
            return await asyncio.to_thread(make)

    def _is_long(self, request: v1.PlanTransferRequest) -> bool:
        """Whether a plan is too long to be made on the loop."""
        namespace = request.namespace or DEFAULT_NAMESPACE
        producer = self._view.engine(namespace, request.producer_engine_id)
        if producer is None:
            return False
        layout: v1.ConsumerLayout | v1.Layout = request.consumer_layout
        stages = request.consumer_layout.pp_size or len(request.consumer_layout.layers) or 1
        if request.WhichOneof("consumer") == "consumer_engine_id":
            consumer = self._view.engine(namespace, request.consumer_engine_id)
            if consumer is None:
                return False
            layout, stages = consumer.engine.layout, consumer.engine.layout.pp_size
        pairs = layout.tp_size * stages * producer.engine.layout.pp_size
        return bool(pairs > _MAX_INLINE_PLAN)

    async def _compare_peers(
        self, request: v1.ComparePeersRequest, remaining_s: float | None
    ) -> v1.ComparePeersResponse:
        namespace = check_namespace(request.namespace)
        producer_id, consumer_id = request.producer_engine_id, request.consumer_engine_id
        producer = self._usable(namespace, "producer_engine_id", producer_id)
        consumer = self._usable(namespace, "consumer_engine_id", consumer_id)
        return compare(
            producer,
            self._records(namespace, producer_id),
            consumer,
            self._records(namespace, consumer_id),
        )

    async def _get_status(
        self, request: v1.GetStatusRequest, remaining_s: float | None
    ) -> v1.GetStatusResponse:
        registry = self.registry
        book = registry.book(check_namespace(request.namespace))
        engines: dict[str, int] = {}
        for engine_id in book.engine_ids():
            name = v1.State.Name(book.state(engine_id)).removeprefix("STATE_")
            engines[name] = engines.get(name, 0) + 1
        return v1.GetStatusResponse(
            version=self._version,
            boot_id=registry.boot_id,
            book_id=registry.book_id,
            store=registry.store_description,
            book_revision=registry.revision,
            engines=engines,
            workers=book.worker_count,
            leases=registry.leases_alive,
            watchers=len(self.hub),
            sessions=self.sessions(),
            start_time=timestamp(registry.started_s),
            server_time=timestamp(self._clock.unix()),
            store_available=registry.available,
            epoch_floor=book.epoch_floor,
            horizon_revision=book.horizon_revision,
            stale_for=duration(registry.stale_s) if registry.stale_s else None,
        )
