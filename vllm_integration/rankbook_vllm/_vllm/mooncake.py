"""Mooncake's two halves, with the book in place of its bootstrap server.

vLLM's producer posts each worker's address to an HTTP server in its first
worker, and the consumer asks that server once and keeps what it got for ever.
Here the addresses are published, and every pull is asked of the sealed topology
as it is now:

- the scheduler half resolves requests (`rankbook_vllm.mooncake`) before vLLM
  sees them, and binds each pull to the start of its producer;
- the worker half fills vLLM's tables of addresses, and fails the pulls of a
  producer that is gone: they would wait for minutes.

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

from rankbook.errors import RankbookError
from rankbook.model import Handshake, State, Topology
from rankbook_vllm._vllm.base import children, logger
from rankbook_vllm._vllm.halves import BookScheduler, SchedulerHalf, become
from rankbook_vllm.config import Settings
from rankbook_vllm.handshake import Call, check_pair
from rankbook_vllm.lookup import Use, Wait
from rankbook_vllm.mooncake import Listener, MooncakeRequests, addresses_of, is_dead
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
        """Names the transfer of a prefill that nobody named; else as for every connector."""
        params = request.kv_transfer_params
        if isinstance(params, dict) and params.get("do_remote_decode"):
            params["transfer_id"] = params.get("transfer_id") or str(request.request_id)
        super().on_new_request(request)

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


# -------------------------------------------------------------------- the worker


@dataclass(slots=True)
class _Pull:
    """A question to one worker of a producer, under way."""

    engine_id: str
    generation: str
    metas: Mapping[str, Any]


@dataclass(slots=True)
class WorkerHalf:
    """What the book adds to a Mooncake worker. For its receiver's loop only."""

    book: PeerBook
    settings: Settings
    known: dict[str, Topology] = field(default_factory=dict)
    """The topology that each producer's addresses were taken from."""
    pulls: dict[asyncio.Task[Any], _Pull] = field(default_factory=dict)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Kept so that they are not collected."""


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
            for generation, metas in _by_generation(pulls).items():
                await self._rankbook_pull(engine_id, generation, metas)

    async def _rankbook_pull(self, engine_id: str, generation: str, metas: dict[str, Any]) -> None:
        half = self.rankbook
        answer = half.book.judge(engine_id, generation)
        if isinstance(answer, Use) and half.known.get(engine_id) is answer.topology:
            _receive(self, answer.topology, metas)
            return
        if isinstance(answer, Wait) and half.settings.side_channel and _is_foreign(half, metas):
            await super()._start_load_kv({engine_id: metas})  # type: ignore[misc]
            return
        task = asyncio.create_task(_learn(self, engine_id, generation, metas))
        half.tasks.add(task)
        task.add_done_callback(half.tasks.discard)

    async def receive_kv_from_single_worker(
        self, worker_addr: str, pull_metas: Mapping[str, Any]
    ) -> None:
        """vLLM's question to one worker; ended when the worker is gone."""
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
        if loop is not None and loop.is_running():
            asyncio.run_coroutine_threadsafe(_end_pulls(self.rankbook), loop).result(_SHUTDOWN_S)
        super().shutdown()  # type: ignore[misc]


async def _end_pulls(half: WorkerHalf) -> None:
    tasks = (*half.tasks, *half.pulls)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _by_generation(pulls: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for request_id, meta in pulls.items():
        generation = getattr(meta, "rankbook_generation", "")
        found.setdefault(generation, {})[request_id] = meta
    return found


def _is_foreign(half: WorkerHalf, metas: Mapping[str, Any]) -> bool:
    first = next(iter(metas.values()))
    return bool(first.remote_bootstrap_addr) and half.book.get(first.remote_engine_id) is None


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
    except RankbookError as error:
        worker._handle_failed_recv(metas, list(metas), f"{error.reason}: {error}")
        return
    worker._remote_agents[engine_id] = addresses
    worker._tp_size[engine_id] = layout.tp_size
    half.known[engine_id] = peer
    logger.info(
        "rankbook: %s start %s (epoch %d): %d workers to ask",
        engine_id,
        peer.engine.generation,
        peer.engine.epoch,
        sum(len(stages) for stages in addresses.values()),
    )
    _receive(worker, peer, metas)


def _receive(worker: Any, peer: Topology, metas: dict[str, Any]) -> None:
    for meta in metas.values():
        meta.rankbook_asked = peer.engine.generation
    try:
        worker.receive_kv(peer.engine.engine_id, metas)
    except (AssertionError, LookupError) as error:
        # Nobody awaits this: the requests would wait for ever.
        worker._handle_failed_recv(metas, list(metas), f"{type(error).__name__}: {error}")


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
        or topology.engine.generation != known.engine.generation
        or topology.engine.state is State.GONE
    ):
        del half.known[engine_id]
        worker._remote_agents.pop(engine_id, None)
        worker._tp_size.pop(engine_id, None)
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
