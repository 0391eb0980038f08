"""NIXL's own handshake, on what a peer published.

`NixlBaseConnectorWorker._nixl_handshake` asks a peer's listener through one
socket. In a thread that has an answer, that socket is ours; the rest of the
method, its checks included, is vLLM's.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from rankbook.errors import Unavailable
from rankbook.model import Topology
from rankbook_vllm._vllm.base import logger
from rankbook_vllm._vllm.seams import NIXL
from rankbook_vllm.handshake import payloads_of

__all__ = ["answer_from_book", "shake", "take_back"]

_PER_ENGINE = (
    "kv_caches_base_addr",
    "dst_num_blocks",
    "dst_region_num_blocks",
    "dst_region_group_ids",
    "dst_uses_region_group_mapping",
    "dst_region_mem_types",
    "tp_mappings",
    "draft_tp_mappings",
)
"""vLLM's tables by engine that a handshake fills, beside agents and handles."""


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


def answer_from_book() -> None:
    """Puts the book before NIXL's socket, in threads that have an answer; once."""
    module: Any = importlib.import_module(f"{NIXL}.base_worker")
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


def shake(worker: Any, topology: Topology, make: Callable[[], Any]) -> Any:
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
        take_back(worker, topology.engine.engine_id, agents)
        raise
    finally:
        _local.socket = None
        worker.nixl_wrapper.add_remote_agent = add


def take_back(worker: Any, engine_id: str, agents: Iterable[str]) -> None:
    """Leaves nothing of a handshake in vLLM's tables: a later one must start clean. What
    NIXL does not give back is lost, since nobody holds it any more. Never raises."""
    release = worker.nixl_wrapper.release_dlist_handle
    remove = worker.nixl_wrapper.remove_remote_agent
    for handle in worker.dst_xfer_side_handles.pop(engine_id, {}).values():
        _try(release, handle)
    for name in _PER_ENGINE:
        table = getattr(worker, name, None)
        if table is not None:
            table.pop(engine_id, None)
    forget = getattr(worker.transfer_topo, "unregister_remote_engine", None)
    if forget is not None:
        _try(forget, engine_id)
    for agent in agents:
        _try(remove, agent)


def _try(give_back: Callable[[Any], Any], what: Any) -> None:
    try:
        give_back(what)
    except Exception as error:  # noqa: BLE001 - NIXL has errors of its own
        logger.warning("rankbook: NIXL did not give %r back: %s", what, error)
