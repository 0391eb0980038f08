"""NIXL's two halves, with the book before them.

vLLM makes a scheduler object in the engine core and a worker object in each
worker. `extend` turns each into a subclass of its own class, so that everything
not named here is vLLM's, this release's and the next one's:

- the scheduler half resolves requests (`rankbook_vllm.requests`) before vLLM
  sees them, and tells the workers which start each peer is used of;
- the worker half shakes hands through a `Gate` (`rankbook_vllm.handshake`). The
  handshake itself is vLLM's own method: only the socket it asks is ours, and
  answers from the book.

Read against vLLM 0.28 to 0.33, whose socket and method are the same.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rankbook.errors import RankbookError, Unavailable
from rankbook.model import Role, State, Topology
from rankbook_vllm._vllm.base import logger
from rankbook_vllm.config import Settings
from rankbook_vllm.handshake import Call, Gate, Pairs, check_pair, payloads_of
from rankbook_vllm.peers import PeerBook
from rankbook_vllm.requests import Requests, Verdict, address_of, transfer_tp_size

__all__ = [
    "Orders",
    "SchedulerHalf",
    "WorkerHalf",
    "become",
    "extend_scheduler",
    "extend_worker",
    "missing_seams",
    "scheduler_of",
    "worker_of",
]

_PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_REMEMBERED = 4096
"""Expired requests remembered, to tell a late registration from an early one."""
_PER_ENGINE = (
    "kv_caches_base_addr",
    "dst_num_blocks",
    "dst_region_num_blocks",
    "dst_region_group_ids",
    "dst_uses_region_group_mapping",
    "dst_region_mem_types",
    "tp_mappings",
)
"""vLLM's tables by engine that a handshake fills, beside agents and handles."""


@dataclass
class Orders:
    """What the engine core tells its workers beside NIXL's own metadata; pickled."""

    generations: dict[str, str] = field(default_factory=dict)
    """The start that each peer is used of."""
    failed: dict[str, Any] = field(default_factory=dict)
    """Local block ids of requests that cannot get their KV."""


def missing_seams() -> tuple[str, ...]:
    """What this vLLM lacks for handshakes from the book; empty where all is there."""
    try:
        worker = importlib.import_module(f"{_PACKAGE}.base_worker")
        scheduler = importlib.import_module(f"{_PACKAGE}.base_scheduler")
    except ImportError as error:
        return (str(error),)
    seams = (
        (worker, ("zmq_ctx", "NixlBaseConnectorWorker")),
        (scheduler, ("NixlBaseConnectorScheduler",)),
        (
            getattr(worker, "NixlBaseConnectorWorker", None),
            ("_nixl_handshake", "_ensure_handshake", "_cleanup_remote_engine", "shutdown"),
        ),
        (
            getattr(scheduler, "NixlBaseConnectorScheduler", None),
            ("on_new_request", "build_connector_meta", "set_xfer_handshake_metadata"),
        ),
    )
    lacking = [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, names in seams
        for name in names
        if not hasattr(owner, name)
    ]
    method = getattr(seams[2][0], "_nixl_handshake", None)
    if method is not None:
        known = {"host", "port", "remote_tp_size", "expected_engine_id"}
        lacking += sorted(known - set(inspect.signature(method).parameters))
    return tuple(lacking)


# ------------------------------------------------------------ vLLM's socket, ours

_local = threading.local()


class _BookSocket:
    """What a handshake asks instead of a peer's listener."""

    def __init__(self, payloads: Mapping[tuple[int, int], bytes], offset_s: float) -> None:
        self._payloads = payloads
        self._offset_s = offset_s
        self._asked: tuple[int, int] = (0, 0)

    def setsockopt(self, *_: Any) -> None:
        """Nothing to set: nothing is waited for."""

    def send(self, message: bytes) -> None:
        """Takes `(GET_META, pp_rank, tp_rank)`."""
        _, *ranks = msgspec.msgpack.decode(message)
        self._asked = (ranks[-2] if len(ranks) > 1 else 0, ranks[-1])

    def recv_multipart(self) -> list[bytes]:
        """The payload, and the peer's clock now."""
        clock_s = time.perf_counter() + self._offset_s
        return [self._payloads[self._asked], msgspec.msgpack.encode(clock_s)]


def _answer_from_book() -> None:
    """Puts the book before NIXL's socket, in threads that have an answer; once."""
    module: Any = importlib.import_module(f"{_PACKAGE}.base_worker")
    original = module.zmq_ctx
    if getattr(original, "rankbook", False):
        return

    @contextlib.contextmanager
    def zmq_ctx(kind: Any, address: str) -> Iterator[Any]:
        socket = getattr(_local, "socket", None)
        if socket is not None:
            yield socket
            return
        with original(kind, address) as real:
            yield real

    zmq_ctx.rankbook = True  # type: ignore[attr-defined]
    module.zmq_ctx = zmq_ctx


# -------------------------------------------------------------- the engine core


class SchedulerHalf:
    """What the book adds to a NIXL scheduler."""

    def __init__(self, requests: Requests, settings: Settings, generation: str = "") -> None:
        self.requests = requests
        self.settings = settings
        self.generation = generation
        """This engine's own start; set when its workers told it."""
        self.failed: dict[str, Any] = {}


class BookScheduler:
    """Goes before a NIXL scheduler class. Everything here runs on the engine core's thread."""

    rankbook: SchedulerHalf

    def on_new_request(self, request: Any) -> None:
        """Resolves the request at once where its producer is known."""
        if _takes(request):
            if self.rankbook.requests.ask(_id(request), request.kv_transfer_params) is Verdict.GO:
                super().on_new_request(request)  # type: ignore[misc]
            return
        super().on_new_request(request)  # type: ignore[misc]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """vLLM's answer; "ask me again" while the producer is not there yet."""
        half = self.rankbook
        if _takes(request):
            known = half.requests.went_on(_id(request))
            verdict = half.requests.ask(_id(request), request.kv_transfer_params)
            if verdict is Verdict.LATER:
                return None, False
            if verdict is Verdict.GO and not known:
                super().on_new_request(request)  # type: ignore[misc]
        return super().get_num_new_matched_tokens(  # type: ignore[misc]
            request, num_computed_tokens
        )

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> Any:
        """vLLM's bookkeeping; a request that cannot be served goes to the workers to be failed."""
        half = self.rankbook
        if _takes(request) and half.requests.error(_id(request)) is not None:
            request.kv_transfer_params["do_remote_prefill"] = False
            if num_external_tokens > 0:
                half.failed[_id(request)] = blocks.get_unhashed_block_ids_all_groups()
            return None
        return super().update_state_after_alloc(  # type: ignore[misc]
            request, blocks, num_external_tokens
        )

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """vLLM's metadata with our orders beside it."""
        half = self.rankbook
        meta = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        failed, half.failed = half.failed, {}
        generations = {
            receive.remote.engine_id: half.requests.generation(request_id)
            for request_id, receive in meta.reqs_to_recv.items()
        }
        meta.rankbook = Orders(generations, failed)
        for registration in getattr(meta, "push_registrations", {}).values():
            registration["decode_generation"] = half.generation
        return meta

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """vLLM's answer, with this start's generation for whoever reads the blocks."""
        half = self.rankbook
        params = request.kv_transfer_params
        took = _takes(request)
        went_on = half.requests.forget(_id(request))
        if took and not went_on:
            # vLLM would tell the producer that nobody comes for its blocks; the
            # request never learned which producer. Its lease frees them.
            params["do_remote_prefill"] = False
            return False, None
        delay, returned = super().request_finished(request, block_ids)  # type: ignore[misc]
        if returned is not None and half.generation:
            returned["remote_generation"] = half.generation
            if not half.settings.side_channel:
                returned["remote_host"] = returned["remote_port"] = None
        return delay, returned

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Starts vLLM's listener, unless it is not wanted."""
        if self.rankbook.settings.side_channel:
            super().set_xfer_handshake_metadata(metadata)  # type: ignore[misc]


def _takes(request: Any) -> bool:
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get("do_remote_prefill"))


def _id(request: Any) -> str:
    return str(request.request_id)


# -------------------------------------------------------------------- the worker


@dataclass(slots=True)
class _Held:
    """A request that waits for an old pairing of its peer to be let go."""

    engine_id: str
    deadline_s: float
    receive: Any
    registration: Any


class WorkerHalf:
    """What the book adds to a NIXL worker."""

    def __init__(self, book: PeerBook, pairs: Pairs, settings: Settings) -> None:
        self.book = book
        self.pairs = pairs
        self.settings = settings
        self.touching = threading.Lock()
        """Held by who uses a peer's tables off the main thread, and by who drops them."""
        self.held: dict[str, _Held] = {}
        self.parked: list[tuple[str, Any, dict[str, Any]]] = []
        """Pushes that wait for an old pairing of their consumer to be let go."""
        self.orphans: dict[str, tuple[str, float]] = {}
        """Requests that wait for a start that is over: its engine, and until when."""
        self.pushes: dict[str, str] = {}
        """The consumer that each push under way goes to."""
        self.warmed: set[tuple[str, str]] = set()
        """Peers that were shaken hands with in advance, by start."""
        self.expired: OrderedDict[str, str] = OrderedDict()
        """Requests whose blocks were freed unread: producer's id by the id both share."""


class BookWorker:
    """Goes before a NIXL worker class."""

    rankbook: WorkerHalf

    # --------------------------------------------------------- the step loop

    def start_load_kv(self, metadata: Any) -> None:
        """Carries out the engine core's orders, then vLLM's. Main thread; never waits."""
        half = self.rankbook
        orders = getattr(metadata, "rankbook", None) or Orders()
        for engine_id, generation in orders.generations.items():
            half.pairs.bind(engine_id, generation)
        for request_id, block_ids in orders.failed.items():
            _fail(self, request_id, block_ids)
        _let_go(self)
        _hold(self, metadata)
        super().start_load_kv(metadata)  # type: ignore[misc]

    def get_transfer_results(self) -> Any:
        """vLLM's results; then lets go of peers that are over. Main thread."""
        results = super().get_transfer_results()  # type: ignore[misc]
        _let_go(self)
        return results

    def _evict_stale_engines(self) -> None:
        # Drops tables, which is the main thread's: a thread that warms up must not.
        if not getattr(_local, "warming", False):
            super()._evict_stale_engines()  # type: ignore[misc]

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        before = set(done_sending)
        super()._reap_expired_send_leases(done_sending)  # type: ignore[misc]
        for request_id in done_sending - before:
            self.rankbook.expired[_shared_id(request_id)] = request_id
        while len(self.rankbook.expired) > _REMEMBERED:
            self.rankbook.expired.popitem(last=False)

    # ------------------------------------------------------- push, its writer

    def _send_registration_to_p(self, req_id: str, reg_data: dict[str, Any]) -> None:
        with self.rankbook.touching:
            super()._send_registration_to_p(req_id, reg_data)  # type: ignore[misc]

    def _do_start_push_kv(
        self, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]
    ) -> None:
        half = self.rankbook
        engine_id = registration_data["decode_engine_id"]
        half.pairs.bind(engine_id, str(registration_data.get("decode_generation") or ""))
        with half.touching:
            if half.pairs.is_over(engine_id):
                half.parked.append((request_id, local_block_ids, registration_data))
                return
            half.pushes[request_id] = engine_id
            super()._do_start_push_kv(  # type: ignore[misc]
                request_id, local_block_ids, registration_data
            )

    def _handle_push_reg_notif(self, notif: bytes) -> None:
        """Takes a registration; says so where its blocks were freed before it came."""
        pending: dict[str, Any] = self._pending_d_registrations  # type: ignore[attr-defined]
        before = set(pending)
        super()._handle_push_reg_notif(notif)  # type: ignore[misc]
        for request_id in set(pending) - before:
            ours = self.rankbook.expired.get(_shared_id(request_id))
            if ours is None:
                continue
            del pending[request_id]
            counts = self.rankbook.pairs.counts
            counts["late"] += 1
            logger.error(
                "rankbook: request %s of %s came for the blocks of request %s after they had "
                "expired: its KV can never come, abort it there (%d so far). Raise "
                "kv_lease_duration if decode engines are slow to ask",
                request_id,
                "a decode engine",
                ours,
                counts["late"],
            )


def _shared_id(request_id: str) -> str:
    """The part of a request id that both sides share: vLLM ends each with its own "-<8 hex>"."""
    head, dash, tail = request_id.rpartition("-")
    random = len(tail) == 8 and all(c in "0123456789abcdefABCDEF" for c in tail)
    return head if dash and random else request_id


def _fail(worker: Any, request_id: str, block_ids: Any) -> None:
    """Hands a request back as one whose KV did not come: kv_load_failure_policy decides."""
    metadata = importlib.import_module(f"{_PACKAGE}.metadata")
    entry = metadata.ReqMeta(
        local_block_ids=block_ids, local_physical_block_ids=block_ids, tp_size=1
    )
    if hasattr(entry, "awaiting_kvs"):
        entry.awaiting_kvs = True
    worker._recving_metadata.setdefault(request_id, entry)
    worker._failed_recv_reqs.put(request_id)


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
    """Drops pairings that are over and unused. Main thread."""
    half: WorkerHalf = worker.rankbook
    over = half.pairs.over()
    if half.orphans:
        _give_up(worker)
    if over:
        _orphan(worker, over)
        if half.touching.acquire(blocking=False):
            try:
                for engine_id in over:
                    if engine_id not in worker._remote_agents:
                        if engine_id not in worker._handshake_futures:
                            half.pairs.dropped(engine_id)
                    elif not _busy(worker, engine_id):
                        worker._cleanup_remote_engine(engine_id)
                        half.pairs.dropped(engine_id)
            finally:
                half.touching.release()
    if (half.parked or half.pushes) and half.touching.acquire(blocking=False):
        try:
            parked, half.parked = half.parked, []
            for request_id in tuple(half.pushes):
                if (
                    request_id not in worker._reqs_to_send
                    and request_id not in worker._sending_transfers
                ):
                    del half.pushes[request_id]
        finally:
            half.touching.release()
        for push in parked:
            worker._deferred_push_inbox.put(push)
        if parked:
            worker._push_writer_wake.set()


def _orphan(worker: Any, over: Mapping[str, float]) -> None:
    """Takes note of the requests that wait for a push of a start that is over."""
    if not hasattr(worker, "_push_writer_wake"):
        return  # a read fails by itself
    half: WorkerHalf = worker.rankbook
    for request_id, meta in worker._recving_metadata.items():
        engine_id = meta.remote.engine_id if meta.remote is not None else ""
        if engine_id in over and request_id not in worker._recving_transfers:
            known = half.orphans.get(request_id, (engine_id, over[engine_id]))
            half.orphans[request_id] = (engine_id, min(known[1], over[engine_id]))
    _give_up(worker)


def _give_up(worker: Any) -> None:
    """Fails the orphans for whom nothing can come any more."""
    half: WorkerHalf = worker.rankbook
    now = time.monotonic()
    for request_id, (engine_id, at_s) in tuple(half.orphans.items()):
        if request_id not in worker._recving_metadata:
            del half.orphans[request_id]
        elif now >= at_s and request_id not in worker._recving_transfers:
            del half.orphans[request_id]
            logger.error(
                "rankbook: request %s fails: %s ended before it sent its KV", request_id, engine_id
            )
            worker._failed_recv_reqs.put(request_id)


def _hold(worker: Any, metadata: Any) -> None:
    """Keeps requests back while an old pairing of their peer is still in use."""
    half: WorkerHalf = worker.rankbook
    now = time.monotonic()
    registrations = getattr(metadata, "push_registrations", {})
    for request_id, meta in tuple(metadata.reqs_to_recv.items()):
        engine_id = meta.remote.engine_id if meta.remote is not None else ""
        if engine_id and half.pairs.is_over(engine_id):
            half.held[request_id] = _Held(
                engine_id,
                now + half.settings.peer_timeout_s,
                metadata.reqs_to_recv.pop(request_id),
                registrations.pop(request_id, None),
            )
    for request_id, held in tuple(half.held.items()):
        if not half.pairs.is_over(held.engine_id):
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
            _fail(worker, request_id, held.receive.local_block_ids)


# --------------------------------------------------------------------- extending


def _read_call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """vLLM's arguments by name: their order changed between releases."""
    bound = inspect.signature(fn).bind(*args, **kwargs)
    bound.apply_defaults()
    said = bound.arguments
    host = said.get("host")
    return Call(
        engine_id=said["expected_engine_id"],
        tp_size=said["remote_tp_size"],
        dcp_size=said.get("remote_dcp_size", 1),
        pp_size=said.get("remote_pp_size", 1),
        notif_only=bool(said.get("notif_agents_only", False)),
        has_address=bool(host) and bool(said.get("port")),
    )


def _shake(worker: Any, topology: Topology, make: Callable[[], Any]) -> Any:
    """Runs vLLM's handshake with a peer's payloads; takes back what it did if it fails."""
    layout = topology.engine.layout
    ranks = worker.transfer_topo.handshake_target_ranks(
        max(layout.tp_size, layout.dcp_size),
        *((layout.dcp_size,) if layout.dcp_size > 1 else ()),
    )
    payloads = payloads_of(topology, ranks)
    agents: list[str] = []
    add = worker.nixl_wrapper.add_remote_agent

    def adding(*args: Any, **kwargs: Any) -> Any:
        agents.append(add(*args, **kwargs))
        return agents[-1]

    clock = worker.rankbook.book.clock_of(topology)
    if clock is None and getattr(worker, "_bidirectional_kv_xfer_enabled", False):
        raise Unavailable(
            f"the clock of {topology.engine.engine_id} is not known yet, and bidirectional KV "
            "needs it to tell blocks that are still there; tried again with the next request",
            metadata={"engine_id": topology.engine.engine_id},
        )
    # Only this thread, vLLM's single handshake thread, adds agents.
    worker.nixl_wrapper.add_remote_agent = adding
    _local.socket = _BookSocket(payloads, clock.offset_s if clock is not None else 0.0)
    try:
        return make()
    except BaseException:
        _take_back(worker, topology.engine.engine_id, agents)
        raise
    finally:
        _local.socket = None
        worker.nixl_wrapper.add_remote_agent = add


def _take_back(worker: Any, engine_id: str, agents: list[str]) -> None:
    """Leaves nothing of a failed handshake in vLLM's tables: a later one must start clean."""
    for handle in worker.dst_xfer_side_handles.pop(engine_id, {}).values():
        worker.nixl_wrapper.release_dlist_handle(handle)
    for name in _PER_ENGINE:
        table = getattr(worker, name, None)
        if table is not None:
            table.pop(engine_id, None)
    forget = getattr(worker.transfer_topo, "unregister_remote_engine", None)
    if forget is not None:
        forget(engine_id)
    for agent in agents:
        with contextlib.suppress(Exception):
            worker.nixl_wrapper.remove_remote_agent(agent)


_extended: dict[tuple[type, type], type] = {}


def become(part: Any, before: type) -> None:
    """Makes an object one of a subclass of its own class."""
    base = type(part)
    key = (before, base)
    if key not in _extended:
        _extended[key] = type(base.__name__, (before, base), {"__module__": __name__})
    part.__class__ = _extended[key]


def extend_scheduler(scheduler: Any, settings: Settings, book: PeerBook) -> SchedulerHalf:
    """Puts the book before a NIXL scheduler that was made and not yet used."""
    mode = getattr(scheduler, "_TRANSFER_MODE", "pull")
    requests = Requests(book, settings, logger, time.monotonic, needs_block_ids=mode == "pull")
    half = scheduler.rankbook = SchedulerHalf(requests, settings)
    become(scheduler, BookScheduler)
    return half


def extend_worker(worker: Any, settings: Settings, book: PeerBook) -> WorkerHalf:
    """Puts the book before a NIXL worker that was made and not yet used."""
    _answer_from_book()
    # The producer's own, of which this side's is the best guess.
    lease_s = float(worker.kv_transfer_config.get_from_extra_config("kv_lease_duration", 30))
    pairs = Pairs(book, logger, lease_s=lease_s)
    half = worker.rankbook = WorkerHalf(book, pairs, settings)
    worker._handshake_initiation_executor = Gate(
        worker._handshake_initiation_executor,
        book,
        pairs,
        settings,
        worker.engine_id,
        read=_read_call,
        shake=lambda topology, make: _shake(worker, topology, make),
    )
    become(worker, BookWorker)
    if settings.prewarm:
        book.on_change(lambda engine_id, _: _warm(worker, engine_id))
    return half


def scheduler_of(part: Any) -> Any:
    """The NIXL scheduler of a connector; None where it has none."""
    found = getattr(part, "connector_scheduler", None)
    return found if _is_nixl(found, "base_scheduler", "NixlBaseConnectorScheduler") else None


def worker_of(part: Any) -> Any:
    """The NIXL worker of a connector; None where it has none."""
    found = getattr(part, "connector_worker", None)
    return found if _is_nixl(found, "base_worker", "NixlBaseConnectorWorker") else None


def _is_nixl(part: Any, module: str, name: str) -> bool:
    if part is None or not type(part).__module__.startswith(_PACKAGE):
        return False
    return isinstance(part, getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name))


# ---------------------------------------------------------------------- prewarming


def _warm(worker: Any, engine_id: str) -> None:
    """Shakes hands with a peer that has become READY, before a request asks.

    Runs on the book's thread. When this engine itself becomes known, with all.
    """
    half: WorkerHalf = worker.rankbook
    own = half.book.get(worker.engine_id)
    if own is None or not own.workers:
        return
    if engine_id == worker.engine_id:
        for topology in half.book.engines():
            if topology.engine.engine_id != engine_id:
                _warm(worker, topology.engine.engine_id)
        return
    peer = half.book.get(engine_id)
    if peer is None or peer.engine.state is not State.READY or engine_id in worker._remote_agents:
        return
    push = worker._TRANSFER_MODE == "push"
    consumes = own.engine.role is not Role.PRODUCER and peer.engine.role is not Role.CONSUMER
    if not consumes and not (push and peer.engine.role is not Role.PRODUCER):
        return
    key = (engine_id, peer.engine.generation)
    if key in half.warmed:
        return
    half.warmed.add(key)
    call = Call(
        engine_id,
        transfer_tp_size(peer),
        peer.engine.layout.dcp_size,
        peer.engine.layout.pp_size,
        push and consumes,
    )
    try:
        check_pair(own, peer, call)
    except RankbookError as error:
        logger.warning("rankbook: no handshake in advance: %s", error)
        return
    listens = address_of(peer)
    said = {
        "engine_id": engine_id,
        "host": listens.host if listens else engine_id,
        "port": listens.port if listens else 0,
        "tp_size": call.tp_size,
        "dcp_size": call.dcp_size,
        "pp_size": call.pp_size,
        "notif_agents_only": call.notif_only,
    }
    known = inspect.signature(worker._ensure_handshake).parameters
    _local.warming = True
    try:
        worker._ensure_handshake(**{name: said[name] for name in said if name in known})
    finally:
        _local.warming = False
