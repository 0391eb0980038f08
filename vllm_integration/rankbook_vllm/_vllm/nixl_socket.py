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
from dataclasses import dataclass
from typing import Any

import msgspec

from rankbook.errors import BadRecord, LimitExceeded, Unavailable
from rankbook.model import KvCache, Topology
from rankbook_vllm._vllm.base import logger
from rankbook_vllm._vllm.seams import NIXL
from rankbook_vllm.handshake import payloads_of, workers_of

__all__ = ["MOST_BLOCKS", "answer_from_book", "check_blocks", "dial", "shake", "take_back"]

MOST_BLOCKS = 1 << 25
"""Blocks of all regions of a peer's worker together, for each of which vLLM makes a
descriptor of some 50 bytes as soon as it shakes hands: 1.7 GB in all. A device of 288 GB
has fewer in blocks of 9 KiB, which 16 tokens of a compressed (MLA) layer take in 8 bits."""

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
"""In a handshake: `socket`, the book's; or `dialled`, the engine asked itself."""


@dataclass(slots=True)
class _Payload:
    """The part of vLLM's NixlHandshakePayload that is looked at, in every version."""

    agent_metadata_bytes: bytes


@dataclass(slots=True)
class _Blocks:
    """The part of vLLM's NixlAgentMetadata that says how much there is to take note of."""

    num_blocks: int
    kv_caches_base_addr: list[int]
    physical_blocks_per_logical_kv_block: int = 1
    region_num_blocks: list[int] | None = None
    """Not in vLLM 0.28."""


def check_blocks(worker: str, payload: bytes, kv: KvCache | None) -> None:
    """Whether vLLM may take note of as many blocks as a payload says; it believes any number.

    What cannot be read is left to vLLM, which names it.

    Args:
        worker: Whose payload it is, for the message.
        payload: As vLLM serves it.
        kv: The worker's own record of its cache; None where there is none.

    Raises:
        BadRecord: It contradicts the record, or itself.
        LimitExceeded: More than `MOST_BLOCKS`.
    """
    try:
        outer = msgspec.msgpack.decode(payload, type=_Payload)
        said = msgspec.msgpack.decode(outer.agent_metadata_bytes, type=_Blocks)
    except msgspec.MsgspecError:
        return
    regions = len(said.kv_caches_base_addr)
    counts = said.region_num_blocks or [said.num_blocks] * regions
    physical = max(1, said.physical_blocks_per_logical_kv_block)
    if len(counts) != regions or min(counts, default=0) < 0:
        raise BadRecord(
            f"the handshake payload of {worker} has block counts {counts!r:.100} for {regions} "
            "regions: it takes one for each; the engine's vLLM is not as published",
            metadata={
                "field": "region_num_blocks",
                "value": f"{counts!r:.100}",
                "rule": f"{regions} counts",
            },
        )
    # The record counts the cache's own blocks where NIXL's geometry was not there to read.
    published = kv.num_blocks if kv is not None else 0
    if published and said.num_blocks not in (published, published * physical):
        raise BadRecord(
            f"the handshake payload of {worker} has {said.num_blocks} blocks, its record "
            f"{published}: one of the two is not this engine's; restart it",
            metadata={
                "field": "num_blocks",
                "value": said.num_blocks,
                "rule": f"the record's {published}",
            },
        )
    taken = max(sum(counts), said.num_blocks // physical * regions)
    if taken > MOST_BLOCKS:
        raise LimitExceeded(
            f"the handshake payload of {worker} has {taken} blocks in {regions} regions, the most "
            f"taken note of are {MOST_BLOCKS}: give that engine larger or fewer blocks "
            "(--block-size, --num-gpu-blocks-override)",
            metadata={"limit": "MOST_BLOCKS", "value": taken, "bound": MOST_BLOCKS},
        )


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


class _Checked:
    """A socket to a peer that the book does not know: what it says is looked at."""

    def __init__(self, real: Any, engine_id: str) -> None:
        self._real = real
        self._engine_id = engine_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def recv_multipart(self) -> list[bytes]:
        """The payload, and the peer's clock."""
        parts: list[bytes] = self._real.recv_multipart()
        check_blocks(self._engine_id, parts[0], None)
        return parts


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
        dialled = getattr(_local, "dialled", "")
        with original(kind, address) as real:
            yield _Checked(real, dialled) if dialled else real

    zmq_ctx.rankbook = True  # type: ignore[attr-defined]
    module.zmq_ctx = zmq_ctx


def shake(worker: Any, topology: Topology, make: Callable[[], Any]) -> Any:
    """Runs vLLM's handshake with a peer's payloads; takes back what it did if it fails."""
    layout = topology.engine.layout
    book = worker.rankbook.book
    if not book.current:
        logger.warning(
            "rankbook: shakes hands with %s as it was %.0f s ago: the registry is away",
            topology.engine.engine_id,
            book.age_s,
        )
    ranks = worker.transfer_topo.handshake_target_ranks(
        max(layout.tp_size, layout.dcp_size),
        *((layout.dcp_size,) if layout.dcp_size > 1 else ()),
    )
    engine_id = topology.engine.engine_id
    for (pp_rank, rank), record in workers_of(topology, ranks).items():
        if record.handshake is not None:
            name = f"{engine_id} pp{pp_rank} tp{rank}"
            check_blocks(name, record.handshake.payload, record.kv)
    payloads = payloads_of(topology, ranks)
    clock = book.clock_of(topology)
    if clock is None and getattr(worker, "_bidirectional_kv_xfer_enabled", False):
        raise Unavailable(
            f"the clock of {engine_id} is not known yet, and bidirectional KV "
            "needs it to tell blocks that are still there; tried again with the next request",
            metadata={"engine_id": engine_id},
        )
    _local.socket = _BookSocket(payloads, clock.offset_s if clock is not None else 0.0)
    try:
        return _whole_or_not(worker, engine_id, make)
    finally:
        _local.socket = None


def dial(worker: Any, engine_id: str, make: Callable[[], Any]) -> Any:
    """Runs vLLM's handshake with a peer that the book does not know, over vLLM's own socket;
    takes back what it did if it fails."""
    _local.dialled = engine_id
    try:
        return _whole_or_not(worker, engine_id, make)
    finally:
        _local.dialled = ""


def _whole_or_not(worker: Any, engine_id: str, make: Callable[[], Any]) -> Any:
    agents: list[str] = []
    add = worker.nixl_wrapper.add_remote_agent

    def adding(*args: Any, **kwargs: Any) -> Any:
        agents.append(add(*args, **kwargs))
        return agents[-1]

    # Only this thread, vLLM's single handshake thread, adds agents.
    worker.nixl_wrapper.add_remote_agent = adding
    try:
        return make()
    except BaseException:
        take_back(worker, engine_id, agents)
        raise
    finally:
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
