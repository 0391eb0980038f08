"""Mooncake's two halves, with the book in place of its bootstrap server.

vLLM's producer posts each worker's address to an HTTP server in its first
worker, and the consumer asks that server once and keeps what it got for ever.
Here the addresses are published, and every pull is asked of the sealed topology
as it is now:

- the scheduler half resolves requests (`rankbook_vllm.mooncake`) before vLLM
  sees them, and binds each pull to the start of its producer;
- the worker half fills vLLM's tables of addresses for each pull alone, so that
  what a bootstrap server of a peer without rankbook says reaches nobody else,
  and fails the pulls of a producer that is gone: they would wait for minutes.

Read against vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankbook.errors import BadRecord, NotFound, RankbookError
from rankbook.model import Handshake, State, Topology
from rankbook_vllm._vllm.base import children, logger
from rankbook_vllm._vllm.halves import BookScheduler, SchedulerHalf, become
from rankbook_vllm.config import Settings
from rankbook_vllm.handshake import Call, check_pair
from rankbook_vllm.lookup import Use
from rankbook_vllm.mooncake import (
    Listener,
    MooncakeRequests,
    addresses_of,
    is_address,
    is_dead,
    names_transfer,
)
from rankbook_vllm.peers import Outcome, PeerBook
from rankbook_vllm.requests import transfer_tp_size

__all__ = [
    "extend_scheduler",
    "extend_worker",
    "listener_of",
    "missing_seams",
    "scheduler_of",
    "without_bootstrap",
    "worker_of",
]

_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
_CONNECTOR = "MooncakeConnector"
_DEFAULT_PROTOCOL = "rdma"  # vLLM's own
_SHUTDOWN_S = 2.0
_MAX_FOREIGN = 1024


def missing_seams() -> tuple[str, ...]:
    """What this vLLM lacks for Mooncake by the book; empty where all is there."""
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        return (str(error),)
    seams: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (
            module,
            (
                "MooncakeConnectorScheduler",
                "MooncakeConnectorWorker",
                "PullReqMeta",
                "should_launch_bootstrap_server",
            ),
        ),
        (
            getattr(module, "MooncakeConnectorScheduler", None),
            ("on_new_request", "build_connector_meta", "request_finished"),
        ),
        (
            getattr(module, "MooncakeConnectorWorker", None),
            (
                "register_worker_with_bootstrap",
                "start_load_kv",
                "_start_load_kv",
                "receive_kv",
                "receive_kv_from_single_worker",
                "_handle_failed_recv",
                "_connect_to_prefiller_bootstrap",
            ),
        ),
    )
    return tuple(
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, names in seams
        for name in names
        if not hasattr(owner, name)
    )


def _is_used(transfer: Any) -> bool:
    """Whether a connector, or a child of a MultiConnector, is Mooncake's."""
    listed = transfer.kv_connector_extra_config.get("connectors") or ()
    names = [one.get("kv_connector") for one in listed if isinstance(one, Mapping)]
    return _CONNECTOR in (transfer.kv_connector, *names)


@contextlib.contextmanager
def without_bootstrap(transfer: Any, settings: Settings) -> Iterator[None]:
    """While it lasts, a Mooncake worker that is made starts no bootstrap server.

    Args:
        transfer: vLLM's kv_transfer_config.
        settings: With `side_channel` on, or vLLM's own handshakes, nothing is changed.
    """
    if settings.side_channel or settings.handshake != "book" or not _is_used(transfer):
        yield
        return
    if missing_seams():  # told when the connector is extended; it then needs the server
        yield
        return
    module: Any = importlib.import_module(_MODULE)
    original = module.should_launch_bootstrap_server
    module.should_launch_bootstrap_server = lambda _: False
    try:
        yield
    finally:
        module.should_launch_bootstrap_server = original


def _protocol(worker: Any) -> str:
    extra = worker.vllm_config.kv_transfer_config.kv_connector_extra_config
    return str(extra.get("mooncake_protocol", _DEFAULT_PROTOCOL))


def listener_of(connector: Any) -> Handshake | None:
    """The handshake of a Mooncake worker that sends KV, once its caches are registered.

    None for every other connector, and for a worker that only receives.
    """
    for part in children(connector):
        worker = worker_of(part)
        if worker is not None and worker.side_channel_port:
            host = worker.hostname
            host = f"[{host}]" if ":" in host else host
            return Listener(f"tcp://{host}:{worker.side_channel_port}", _protocol(worker)).encode()
    return None


# -------------------------------------------------------------- the engine core


class MooncakeScheduler(BookScheduler):
    """Goes before a Mooncake scheduler class. Everything runs on the engine core's thread."""

    def on_new_request(self, request: Any) -> None:
        """Names the transfer of a prefill that nobody named, and takes out what vLLM would
        end the engine core for; else as for every connector."""
        params = request.kv_transfer_params
        if isinstance(params, dict):
            self._fit(str(request.request_id), params)
        super().on_new_request(request)

    def _fit(self, request_id: str, params: dict[str, Any]) -> None:
        scheduler: Any = self
        for flag, unfit, role in (
            ("do_remote_prefill", scheduler.is_kv_producer, "kv_producer"),
            ("do_remote_decode", scheduler.is_kv_consumer, "kv_consumer"),
        ):
            if unfit and params.get(flag):
                _switch_off(request_id, params, flag, f"this engine is a {role}")
        if params.get("do_remote_prefill") and params.get("do_remote_decode"):
            # vLLM keeps the blocks of such a request, and tells its workers of none.
            _switch_off(request_id, params, "do_remote_decode", "says do_remote_prefill as well")
        if params.get("do_remote_decode"):
            if params.get("transfer_id") in (None, ""):
                params["transfer_id"] = request_id
            elif not names_transfer(params["transfer_id"]):
                # Under another name nobody would come for the blocks.
                why = f"transfer_id is {params['transfer_id']!r:.100}, it takes text"
                _switch_off(request_id, params, "do_remote_decode", why)

    def _generations(self, meta: Any) -> dict[str, str]:
        # Pulls are by engine here, and each is bound by itself.
        for pulls in meta.reqs_to_recv.values():
            for request_id, pull in pulls.items():
                pull.rankbook_generation = self.rankbook.requests.generation(request_id)
        return {}

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """vLLM's answer; where blocks are kept, with all that a consumer needs to get them."""
        delay, returned = super().request_finished(request, block_ids)
        if delay and returned is None:
            transfer = self.vllm_config.kv_transfer_config  # type: ignore[attr-defined]
            returned = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": request.kv_transfer_params["transfer_id"],
                "remote_engine_id": transfer.engine_id,
                "remote_generation": self.rankbook.generation,
            }
        return delay, returned


def _switch_off(request_id: str, params: dict[str, Any], flag: str, why: str) -> None:
    logger.warning(
        "rankbook: request %s says %s %.100r, but %s: served without; send a prefill to a producer "
        "and its decode, with what the producer returned, to a consumer",
        request_id,
        flag,
        params[flag],
        why,
    )
    params[flag] = False


# -------------------------------------------------------------------- the worker


@dataclass(slots=True)
class _Pull:
    """A question to one worker of a producer, under way."""

    engine_id: str
    generation: str
    metas: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Producer:
    """Where a producer's workers are, as vLLM's tables have it."""

    engine_id: str
    addresses: dict[int, dict[int, str]]
    tp_size: int
    topology: Topology | None = None
    """What it was taken from; None for a peer without rankbook."""


@dataclass(slots=True)
class WorkerHalf:
    """What the book adds to a Mooncake worker. For its receiver's loop only."""

    book: PeerBook
    settings: Settings
    known: dict[str, _Producer] = field(default_factory=dict)
    """The producers of the book."""
    foreign: dict[tuple[str, str], _Producer] = field(default_factory=dict)
    """Those without rankbook, each by the bootstrap server that named it: what one says
    is for the requests that name it."""
    asking: dict[str, asyncio.Task[_Desk]] = field(default_factory=dict)
    """Bootstrap servers that are being asked."""
    pulls: dict[asyncio.Task[Any], _Pull] = field(default_factory=dict)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Kept so that they are not collected."""


class _Desk:
    """Stands for a worker while vLLM asks a bootstrap server for it: the answer stays here."""

    def __init__(self, worker: Any, server: str) -> None:
        self._rankbook_worker = worker
        self._pending_bootstrap_queries = {server: asyncio.Event()}
        self._remote_agents: dict[str, dict[int, dict[int, str]]] = {}
        self._tp_size: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rankbook_worker, name)

    async def ask(self, server: str) -> _Desk:
        await type(self._rankbook_worker)._connect_to_prefiller_bootstrap(self, server)
        return self

    def found(self, engine_id: str) -> _Producer | None:
        if engine_id not in self._remote_agents:
            return None
        addresses = self._remote_agents[engine_id]
        for address in (one for stages in addresses.values() for one in stages.values()):
            if not is_address(address):  # vLLM leaves a socket behind, and cannot shut down
                raise BadRecord(
                    f"{engine_id} listens at {address!r:.100} by its bootstrap server: it takes "
                    "tcp://HOST:PORT",
                    metadata={"engine_id": engine_id, "value": f"{address!r:.100}"},
                )
        return _Producer(engine_id, addresses, self._tp_size[engine_id])


class MooncakeWorker:
    """Goes before a Mooncake worker class."""

    rankbook: WorkerHalf

    # ------------------------------------------------------------ as a producer

    async def register_worker_with_bootstrap(self) -> None:
        """Tells vLLM's server too, where peers without rankbook are to find it."""
        if self.rankbook.settings.side_channel:
            await super().register_worker_with_bootstrap()  # type: ignore[misc]

    # ------------------------------------------------------------ as a consumer

    def start_load_kv(self, metadata: Any) -> None:
        """Fails what the engine core says cannot be served, then vLLM's. Never waits."""
        worker: Any = self
        orders = getattr(metadata, "rankbook", None)
        if orders is not None and orders.failed and not worker.is_kv_producer:
            worker.receiver_loop.call_soon_threadsafe(_fail, worker, orders.failed)
        super().start_load_kv(metadata)  # type: ignore[misc]

    async def _start_load_kv(self, reqs_to_recv: Mapping[str, Mapping[str, Any]]) -> None:
        for engine_id, pulls in reqs_to_recv.items():
            for (generation, server), metas in _together(pulls).items():
                try:
                    self._rankbook_pull(engine_id, generation, server, metas)
                except Exception as error:  # noqa: BLE001 - nobody awaits this
                    _hand_back(self, metas, error)

    def _rankbook_pull(
        self, engine_id: str, generation: str, server: str, metas: dict[str, Any]
    ) -> None:
        half = self.rankbook
        answer = half.book.judge(engine_id, generation)
        known = half.known.get(engine_id)
        if isinstance(answer, Use) and known is not None and known.topology is answer.topology:
            _receive(self, known, metas)
            return
        if server and half.settings.side_channel and half.book.get(engine_id) is None:
            learning = _look_up(self, engine_id, server, metas)
        else:
            learning = _learn(self, engine_id, generation, metas)
        task = asyncio.create_task(learning)
        half.tasks.add(task)
        task.add_done_callback(half.tasks.discard)

    async def receive_kv_from_single_worker(
        self, worker_addr: str, pull_metas: Mapping[str, Any]
    ) -> None:
        """vLLM's question to one worker; ended when the worker is gone."""
        try:
            await self._rankbook_ask(worker_addr, pull_metas)
        except Exception as error:  # noqa: BLE001 - nobody awaits this
            _hand_back(self, pull_metas, error)

    async def _rankbook_ask(self, worker_addr: str, pull_metas: Mapping[str, Any]) -> None:
        half = self.rankbook
        first = next(iter(pull_metas.values()))
        asked = getattr(first, "rankbook_asked", "")
        task = asyncio.current_task()
        if not asked or task is None:  # a peer without rankbook
            await super().receive_kv_from_single_worker(worker_addr, pull_metas)  # type: ignore[misc]
            return
        pull = half.pulls[task] = _Pull(first.remote_engine_id, asked, pull_metas)
        try:
            # The book may have said so before there was a pull to end.
            if is_dead(asked, half.book.get(pull.engine_id)):
                _give_up(self, pull)
                return
            await super().receive_kv_from_single_worker(worker_addr, pull_metas)  # type: ignore[misc]
        finally:
            half.pulls.pop(task, None)

    def shutdown(self) -> None:
        """Ends questions under way, for whose answers vLLM's shutdown would wait."""
        loop: asyncio.AbstractEventLoop | None = getattr(self, "receiver_loop", None)
        try:
            if loop is not None and loop.is_running():
                ended = asyncio.run_coroutine_threadsafe(_end_pulls(self.rankbook), loop)
                ended.result(_SHUTDOWN_S)
        except Exception as error:  # noqa: BLE001 - vLLM's own shutdown must follow
            logger.warning(
                "rankbook: Mooncake's questions under way were not ended within %g s (%s)",
                _SHUTDOWN_S,
                type(error).__name__,
            )
        finally:
            super().shutdown()  # type: ignore[misc]


async def _end_pulls(half: WorkerHalf) -> None:
    tasks = (*half.tasks, *half.pulls, *half.asking.values())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _together(pulls: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Pulls by the start that they are bound to, else by the bootstrap server they name:
    those are answered alike."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for request_id, meta in pulls.items():
        generation = getattr(meta, "rankbook_generation", "")
        server = "" if generation else str(meta.remote_bootstrap_addr or "")
        found.setdefault((generation, server), {})[request_id] = meta
    return found


def _hand_back(worker: Any, metas: Mapping[str, Any], error: Exception) -> None:
    """Gives requests back to the engine core, with their blocks."""
    what = error.reason if isinstance(error, RankbookError) else type(error).__name__
    worker._handle_failed_recv(metas, list(metas), f"{what}: {error}")


async def _look_up(worker: Any, engine_id: str, server: str, metas: dict[str, Any]) -> None:
    """Asks a bootstrap server, as vLLM does, for a producer without rankbook."""
    half: WorkerHalf = worker.rankbook
    try:
        found = half.foreign.get((engine_id, server))
        if found is None:
            asking = half.asking.get(server)
            if asking is None:
                asking = asyncio.create_task(_Desk(worker, server).ask(server))
                half.asking[server] = asking
                asking.add_done_callback(lambda _: half.asking.pop(server, None))
            found = (await asyncio.shield(asking)).found(engine_id)
            if found is None:
                raise NotFound(
                    f"engine {engine_id} is neither in the book nor named by the bootstrap "
                    f"server {server}",
                    metadata={"engine_id": engine_id, "remote_bootstrap_addr": server},
                )
            if len(half.foreign) >= _MAX_FOREIGN:
                half.foreign.clear()
            half.foreign[engine_id, server] = found
    except Exception as error:  # noqa: BLE001 - nobody awaits this
        _hand_back(worker, metas, error)
        return
    if half.book.get(engine_id) is not None:  # by now; then the book's word goes
        await _learn(worker, engine_id, "", metas)
        return
    _receive(worker, found, metas)


async def _learn(worker: Any, engine_id: str, generation: str, metas: dict[str, Any]) -> None:
    """Waits for this engine itself, as pairs are compared as published, then for the producer."""
    half: WorkerHalf = worker.rankbook
    try:
        own = half.book.get(worker.engine_id)
        if own is None or not own.workers:
            own = await _when(half, worker.engine_id, "")
        peer = await _when(half, engine_id, generation)
        layout = peer.engine.layout
        check_pair(
            own,
            peer,
            Call(engine_id, transfer_tp_size(peer), layout.dcp_size, layout.pp_size),
        )
        addresses = addresses_of(peer, _protocol(worker))
    except Exception as error:  # noqa: BLE001 - nobody awaits this
        _hand_back(worker, metas, error)
        return
    known = half.known[engine_id] = _Producer(engine_id, addresses, layout.tp_size, peer)
    logger.info(
        "rankbook: %s start %s (epoch %d): %d workers to ask",
        engine_id,
        peer.engine.generation,
        peer.engine.epoch,
        sum(len(stages) for stages in addresses.values()),
    )
    _receive(worker, known, metas)


def _receive(worker: Any, producer: _Producer, metas: dict[str, Any]) -> None:
    if producer.topology is not None:
        for meta in metas.values():
            meta.rankbook_asked = producer.topology.engine.generation
    engine_id = producer.engine_id
    # vLLM reads its tables before it returns, so they are this producer's for so long.
    tables = worker._remote_agents, worker._tp_size
    worker._remote_agents = {engine_id: producer.addresses}
    worker._tp_size = {engine_id: producer.tp_size}
    try:
        worker.receive_kv(engine_id, metas)
        if not all(meta.pull_tasks_count for meta in metas.values()):
            raise LookupError(f"{engine_id} has no worker to ask")
    except Exception as error:  # noqa: BLE001 - nobody awaits this
        _hand_back(worker, metas, error)
    finally:
        worker._remote_agents, worker._tp_size = tables


async def _when(half: WorkerHalf, engine_id: str, generation: str) -> Topology:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Outcome] = loop.create_future()

    def settle(outcome: Outcome) -> None:
        if not future.done():
            future.set_result(outcome)

    def done(outcome: Outcome) -> None:
        loop.call_soon_threadsafe(settle, outcome)

    half.book.when(engine_id, generation, half.settings.peer_timeout_s, done)
    outcome = await future
    if isinstance(outcome, RankbookError):
        raise outcome
    return outcome


def _fail(worker: Any, failed: Mapping[str, Any]) -> None:
    module: Any = importlib.import_module(_MODULE)
    for request_id, block_ids in failed.items():
        meta = module.PullReqMeta(
            d_req_id=request_id,
            transfer_id="",
            local_block_ids=[list(group) for group in block_ids],
            remote_engine_id="",
            remote_bootstrap_addr="",
        )
        worker._handle_failed_recv(
            {request_id: meta}, [request_id], "refused; the engine core said why"
        )


def _changed(worker: Any, engine_id: str, topology: Topology | None) -> None:
    """Ends what can bring nothing more. On the receiver's loop."""
    half: WorkerHalf = worker.rankbook
    known = half.known.get(engine_id)
    if known is not None and (
        topology is None
        or known.topology is None
        or topology.engine.generation != known.topology.engine.generation
        or topology.engine.state is State.GONE
    ):
        del half.known[engine_id]
    for task, pull in tuple(half.pulls.items()):
        if pull.engine_id == engine_id and is_dead(pull.generation, topology):
            _give_up(worker, pull)
            task.cancel()


def _give_up(worker: Any, pull: _Pull) -> None:
    worker._handle_failed_recv(
        pull.metas,
        list(pull.metas),
        f"the workers of start {pull.generation} of {pull.engine_id}, which was asked for it, "
        "have ended",
    )


# --------------------------------------------------------------------- extending


def extend_scheduler(scheduler: Any, settings: Settings, book: PeerBook) -> SchedulerHalf:
    """Puts the book before a Mooncake scheduler that was made and not yet used."""
    requests = MooncakeRequests(book, settings, logger, time.monotonic, needs_block_ids=False)
    half: SchedulerHalf = SchedulerHalf(requests, settings)
    scheduler.rankbook = half
    become(scheduler, MooncakeScheduler)
    return half


def extend_worker(worker: Any, settings: Settings, book: PeerBook) -> None:
    """Puts the book before a Mooncake worker that was made and not yet used."""
    worker.rankbook = WorkerHalf(book, settings)
    become(worker, MooncakeWorker)
    loop = getattr(worker, "receiver_loop", None)
    if loop is None:
        return  # a producer asks nobody

    def changed(engine_id: str, topology: Topology | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(_changed, worker, engine_id, topology)

    book.on_change(changed)


def scheduler_of(part: Any) -> Any:
    """The Mooncake scheduler of a connector; None where it has none."""
    return _part(part, "connector_scheduler", "MooncakeConnectorScheduler")


def worker_of(part: Any) -> Any:
    """The Mooncake worker of a connector; None where it has none."""
    return _part(part, "connector_worker", "MooncakeConnectorWorker")


def _part(part: Any, name: str, kind: str) -> Any:
    found = getattr(part, name, None)
    names = {(base.__module__, base.__name__) for base in type(found).__mro__}
    return found if (_MODULE, kind) in names else None
