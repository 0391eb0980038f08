"""NIXL's two halves, with the book before them.

- the scheduler half resolves requests (`rankbook_vllm.requests`) before vLLM
  sees them, and tells the workers which start each peer is used of;
- the worker half shakes hands through a `Gate` (`rankbook_vllm.handshake`). The
  handshake itself is vLLM's own method (`nixl_socket`).

Read against vLLM 0.28 to 0.33, whose socket and method are the same.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable
from typing import Any

from rankbook.errors import RankbookError
from rankbook.model import Role, State
from rankbook_vllm._vllm.base import logger
from rankbook_vllm._vllm.halves import BookScheduler, SchedulerHalf, become
from rankbook_vllm._vllm.nixl_socket import answer_from_book, dial, shake
from rankbook_vllm._vllm.nixl_worker import BookWorker, WorkerHalf, warming
from rankbook_vllm._vllm.seams import NIXL, missing_seams
from rankbook_vllm.config import Settings
from rankbook_vllm.handshake import Call, Gate, Pairs, check_pair, has_all_stages
from rankbook_vllm.lookup import Refuse
from rankbook_vllm.peers import PeerBook
from rankbook_vllm.requests import Requests, transfer_tp_size

__all__ = [
    "extend_scheduler",
    "extend_worker",
    "missing_seams",
    "scheduler_of",
    "worker_of",
]


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


class _Worker(BookWorker):
    """What vLLM's worker does by itself, with the book."""

    def _cleanup_remote_engine(self, engine_id: str, **options: Any) -> None:
        super()._cleanup_remote_engine(engine_id, **options)  # type: ignore[misc]
        self.rankbook.pairs.evicted(engine_id)

    def _send_heartbeats(self, metadata: Any) -> None:
        # To a peer that the book refuses no handshake is tried: each would be one more error,
        # and who waits for that peer is told when its KV is asked for.
        half = self.rankbook
        metadata.heartbeat_by_engine = {
            engine_id: beat
            for engine_id, beat in metadata.heartbeat_by_engine.items()
            if engine_id in self._remote_agents or not _is_refused(half.book, engine_id)  # type: ignore[attr-defined]
        }
        super()._send_heartbeats(metadata)  # type: ignore[misc]


def _is_refused(book: PeerBook, engine_id: str) -> bool:
    known = book.get(engine_id)
    generation = known.engine.generation if known is not None else ""
    return isinstance(book.judge(engine_id, generation), Refuse)


def extend_scheduler(scheduler: Any, settings: Settings, book: PeerBook) -> SchedulerHalf:
    """Puts the book before a NIXL scheduler that was made and not yet used."""
    mode = getattr(scheduler, "_TRANSFER_MODE", "pull")
    requests = Requests(
        book,
        settings,
        logger,
        time.monotonic,
        needs_block_ids=mode == "pull",
        kept_s=_kept_s(scheduler.vllm_config.kv_transfer_config),
    )
    half = scheduler.rankbook = SchedulerHalf(requests, settings)
    become(scheduler, BookScheduler)
    return half


def extend_worker(worker: Any, settings: Settings, book: PeerBook) -> WorkerHalf:
    """Puts the book before a NIXL worker that was made and not yet used."""
    answer_from_book()
    kept_s = _kept_s(worker.kv_transfer_config)
    pairs = Pairs(book, logger, lease_s=kept_s)
    half = worker.rankbook = WorkerHalf(book, pairs, settings, kept_s=kept_s)
    worker._handshake_initiation_executor = Gate(
        worker._handshake_initiation_executor,
        book,
        pairs,
        settings,
        worker.engine_id,
        read=_read_call,
        shake=lambda topology, make: shake(worker, topology, make),
        dial=lambda engine_id, make: dial(worker, engine_id, make),
    )
    become(worker, _Worker)
    if settings.prewarm:
        half.warm = lambda engine_id: _warm(worker, engine_id)
        book.on_change(lambda engine_id, _: half.warm(engine_id))
    return half


def _kept_s(transfer: Any) -> float:
    """How long a producer keeps blocks that nobody came for, in seconds: its own setting, of
    which this side's is the best guess."""
    return float(transfer.get_from_extra_config("kv_lease_duration", 30))


def scheduler_of(part: Any) -> Any:
    """The NIXL scheduler of a connector; None where it has none."""
    found = getattr(part, "connector_scheduler", None)
    return found if _is_nixl(found, "base_scheduler", "NixlBaseConnectorScheduler") else None


def worker_of(part: Any) -> Any:
    """The NIXL worker of a connector; None where it has none."""
    found = getattr(part, "connector_worker", None)
    return found if _is_nixl(found, "base_worker", "NixlBaseConnectorWorker") else None


def _is_nixl(part: Any, module: str, name: str) -> bool:
    if part is None or not type(part).__module__.startswith(NIXL):
        return False
    return isinstance(part, getattr(importlib.import_module(f"{NIXL}.{module}"), name))


def _warm(worker: Any, engine_id: str) -> None:
    """Shakes hands with a peer that has become READY, before a request asks.

    Runs on the book's thread, and on the main one when an old pairing was dropped. When
    this engine itself becomes known, with all.
    """
    half: WorkerHalf = worker.rankbook
    own = half.book.get(worker.engine_id)
    if own is None or not has_all_stages(own) or own.engine.asleep:
        return
    if engine_id == worker.engine_id:
        for topology in half.book.engines():
            if topology.engine.engine_id != engine_id:
                _warm(worker, topology.engine.engine_id)
        return
    peer = half.book.get(engine_id)
    if peer is None or peer.engine.state is State.GONE:
        half.warmed.pop(engine_id, None)
        return
    if peer.engine.state is not State.READY or engine_id in worker._remote_agents:
        return
    push = worker._TRANSFER_MODE == "push"
    consumes = own.engine.role is not Role.PRODUCER and peer.engine.role is not Role.CONSUMER
    produces = own.engine.role is not Role.CONSUMER and peer.engine.role is not Role.PRODUCER
    if not consumes and not (push and produces):
        return
    if half.warmed.get(engine_id) == peer.engine.generation:
        return
    half.warmed[engine_id] = peer.engine.generation
    call = Call(
        engine_id,
        transfer_tp_size(peer),
        peer.engine.layout.dcp_size,
        peer.engine.layout.pp_size,
        push and not produces,  # what is written needs more than notices
    )
    try:
        check_pair(own, peer, call)
    except RankbookError as error:
        logger.warning("rankbook: no handshake in advance: %s", error)
        return
    said = {
        "engine_id": engine_id,
        "host": engine_id,  # which is not dialled; as in a request (`rankbook_vllm.requests`)
        "port": 0,
        "tp_size": call.tp_size,
        "dcp_size": call.dcp_size,
        "pp_size": call.pp_size,
        "notif_agents_only": call.notif_only,
    }
    known = inspect.signature(worker._ensure_handshake).parameters
    warming.on = True
    try:
        worker._ensure_handshake(**{name: said[name] for name in said if name in known})
    finally:
        warming.on = False
