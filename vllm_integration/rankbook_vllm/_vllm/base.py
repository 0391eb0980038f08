"""What every connector needs of vLLM: the grid, the metadata, the facts of a worker."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip

import vllm
from rankbook.errors import BadRequest
from rankbook.model import Address, Compat, Handshake, KvCache, LayerKind, Layout, Model, Slot
from rankbook_vllm.config import bare_host
from rankbook_vllm.record import NO_METADATA, Facts, Start
from rankbook_vllm.seal import Note

__all__ = [
    "Carrier",
    "KVConnectorRole",
    "agree_on_start",
    "carrier",
    "connector_class",
    "dp_rank",
    "engine_layout",
    "gather_over_pcp",
    "handshake_of",
    "is_worker",
    "metadata_of",
    "passes_guard",
    "served",
    "side_channel",
    "slot",
    "takes_metadata",
    "unpack",
    "worker_facts",
]

T = TypeVar("T")

# vLLM configures the loggers below "vllm" only.
logger: logging.Logger = init_logger("vllm.rankbook")

_SEAMS: tuple[tuple[Any, str], ...] = (
    (KVConnectorFactory, "get_connector_class_by_name"),
    (KVConnectorBase_V1, "register_kv_caches"),
    (KVConnectorBase_V1, "get_handshake_metadata"),
    (KVConnectorBase_V1, "set_xfer_handshake_metadata"),
    (KVConnectorBase_V1, "set_xfer_handshake_metadata_pp_aware"),
    (KVConnectorBase_V1, "shutdown"),
    (parallel_state, "get_tp_group"),
    (parallel_state, "get_pp_group"),
    (parallel_state.GroupCoordinator, "broadcast_object"),
)


def _check_seams() -> None:
    missing = [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, name in _SEAMS
        if not hasattr(owner, name)
    ]
    if missing:
        raise ImportError(
            f"rankbook cannot work with vLLM {vllm.__version__}: it has no {', '.join(missing)}; "
            "take kv_connector_module_path out to run without the registry"
        )
    if not hasattr(parallel_state, "get_pcp_group"):
        logger.info("rankbook fallback: vLLM has no PCP groups, every worker has PCP rank 0")


_check_seams()


@dataclass
class Carrier(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A connector's handshake metadata with rankbook's notes beside it.

    Goes from the worker to the engine core by pickle; the engine core hands
    `inner` on, so no connector ever sees it.
    """

    inner: KVConnectorHandshakeMetadata | None
    notes: tuple[Note, ...]


def carrier(inner: KVConnectorHandshakeMetadata | None, notes: tuple[Note, ...]) -> Carrier | None:
    """What a worker sends its engine core; None where another PCP rank sends it.

    Replicated PCP ranks share a key, and the last answer under a key wins: a
    rank whose connector has nothing to say must not replace the one that has.
    """
    if inner is None and slot().pcp_rank > 0:
        return None
    return Carrier(inner, notes)


def unpack(
    metadata: Mapping[tuple[int, int], Any],
) -> tuple[dict[tuple[int, int], tuple[Note, ...]], dict[tuple[int, int], Any]]:
    """The notes, and the connector's own metadata, each by (pp_rank, tp_rank)."""
    notes: dict[tuple[int, int], tuple[Note, ...]] = {}
    inner: dict[tuple[int, int], Any] = {}
    for key, value in metadata.items():
        if isinstance(value, Carrier):
            notes[key] = value.notes
            value = value.inner
        if value is not None:
            inner[key] = value
    return notes, inner


def is_worker(role: Any) -> bool:
    """Whether a connector with this role lives in a worker."""
    return bool(role == KVConnectorRole.WORKER)


def connector_class(name: str) -> type[Any]:
    """The in-tree connector class of this name.

    Raises:
        ValueError: vLLM has none.
    """
    found: type[Any] = KVConnectorFactory.get_connector_class_by_name(name)
    return found


def takes_metadata(base: type[Any]) -> bool:
    """Whether a connector's scheduler side takes handshake metadata."""
    default = KVConnectorBase_V1
    return not (
        base.set_xfer_handshake_metadata is default.set_xfer_handshake_metadata
        and base.set_xfer_handshake_metadata_pp_aware
        is default.set_xfer_handshake_metadata_pp_aware
    )


def passes_guard(base: type[Any], keys: Iterable[tuple[int, int]]) -> bool:
    """Whether a connector class may be given metadata under these keys.

    vLLM's default refuses every stage but the first. That is right for a
    connector that consumes the metadata and would drop the other stages, and
    needless for one that neither gives nor takes any.

    Args:
        base: vLLM's class.
        keys: (pp_rank, tp_rank) of the metadata.

    Returns:
        False where the call must be left out: vLLM's guard would refuse it, and
        the connector discards metadata anyway.

    Raises:
        BadRequest: The connector would drop every stage but the first.
    """
    default = KVConnectorBase_V1
    stages = 1 + max((pp_rank for pp_rank, _ in keys), default=0)
    if (
        stages == 1
        or base.set_xfer_handshake_metadata_pp_aware
        is not default.set_xfer_handshake_metadata_pp_aware
    ):
        return True
    if (
        base.set_xfer_handshake_metadata is default.set_xfer_handshake_metadata
        and base.get_handshake_metadata is default.get_handshake_metadata
    ):
        return False
    raise BadRequest(
        f"{base.__name__} needs its peers' handshake metadata and knows no pipeline stages: of "
        f"{stages} it would keep the first, and peers would get part of the KV. Set "
        "pipeline_parallel_size to 1, or take a connector that knows stages, as "
        "NixlPushConnector does (set_xfer_handshake_metadata_pp_aware)",
        metadata={
            "field": "pipeline_parallel_size",
            "value": stages,
            "rule": f"1 with {base.__name__}",
        },
    )


# ------------------------------------------------------------------- the grid


def _pcp_group() -> Any:
    get = getattr(parallel_state, "get_pcp_group", None)
    return get() if get is not None else None


def slot() -> Slot:
    """This worker's place in its engine's grid, by its parallel groups."""
    pcp = _pcp_group()
    return Slot(
        pp_rank=parallel_state.get_pp_group().rank_in_group,
        pcp_rank=pcp.rank_in_group if pcp is not None else 0,
        tp_rank=parallel_state.get_tp_group().rank_in_group,
    )


def agree_on_start(begin: Callable[[], Start]) -> Start:
    """One start for all workers of an engine: rank 0 makes it, the others get it.

    A collective: every worker of the engine must call it, in the same order
    with its other collectives.

    Args:
        begin: Called on rank 0 only; the others wait for it, so it must be
            bounded in time.
    """
    start = begin() if slot() == Slot() else None
    for group in (parallel_state.get_tp_group(), _pcp_group(), parallel_state.get_pp_group()):
        if group is not None:
            start = group.broadcast_object(start, src=0)
    if not isinstance(start, Start):
        raise RuntimeError(f"rank 0 announced {start!r} instead of a start")
    return start


def gather_over_pcp(note: Note) -> tuple[Note, ...]:
    """The notes of all PCP ranks of this worker's (pp_rank, tp_rank), in order.

    vLLM files metadata by (pp_rank, tp_rank) only, so the PCP ranks of one key
    must travel together. A collective over the PCP group.
    """
    group = _pcp_group()
    if group is None or group.world_size == 1:
        return (note,)
    import torch.distributed

    notes: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(notes, note, group=group.cpu_group)
    return tuple(notes)


def engine_layout(vllm_config: Any) -> Layout:
    """The engine's sizes by its configuration."""
    parallel = vllm_config.parallel_config
    return Layout(
        pp_size=parallel.pipeline_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        num_layers=vllm_config.model_config.get_total_num_hidden_layers(),
        pcp_size=getattr(parallel, "prefill_context_parallel_size", 1),
        dcp_size=getattr(parallel, "decode_context_parallel_size", 1),
    )


def dp_rank(vllm_config: Any) -> int:
    """Global data-parallel index; `data_parallel_rank` is 0 for every dense engine."""
    parallel = vllm_config.parallel_config
    return int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))


# ------------------------------------------------------------------ the worker


def children(connector: Any) -> Iterator[Any]:
    """A connector and all its children, parents first."""
    yield connector
    for child in getattr(connector, "sub_connectors", ()):
        yield from children(child)


def _nixl_worker(connector: Any) -> Any:
    """NIXL's worker object in a connector or its children; None without NIXL."""
    for part in children(connector):
        worker = getattr(part, "connector_worker", None)
        if hasattr(worker, "xfer_handshake_metadata") and hasattr(worker, "compat_hash"):
            return worker
    return None


def handshake_of(metadata: KVConnectorHandshakeMetadata | None) -> Handshake:
    """Metadata as its connector puts it on the wire.

    NIXL serves `msgspec.msgpack` of its payload; the same bytes are published,
    so that a peer cannot tell where it got them.

    Raises:
        TypeError: The metadata cannot be encoded without running code to read it.
    """
    if metadata is None:
        return Handshake(NO_METADATA)
    payload = msgspec.msgpack.Encoder().encode(metadata)
    if type(metadata).__name__ == "NixlHandshakePayload":
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata as nixl

        return Handshake("vllm.nixl", getattr(nixl, "NIXL_CONNECTOR_VERSION", 0), payload)
    return Handshake(f"vllm.{type(metadata).__name__}", 0, payload)


def metadata_of(handshake: Handshake | None, kind: type[T]) -> T:
    """What `handshake_of` encoded, as the dataclass that it was.

    Raises:
        ValueError: It is of another class, or does not fit this one.
    """
    expected = f"vllm.{kind.__name__}"
    if handshake is None or handshake.format != expected:
        raise ValueError(f"the format is {handshake.format if handshake else ''!r}")
    try:
        found: T = msgspec.msgpack.decode(handshake.payload, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    return found


def served(metadata: Mapping[tuple[int, int], Any]) -> dict[tuple[int, int], bytes]:
    """What the connector serves its peers, by key; without what cannot be encoded.

    Its worker could not encode that either, and said so in its note.
    """
    found = {}
    for key, value in metadata.items():
        with contextlib.suppress(TypeError):
            found[key] = handshake_of(value).payload
    return found


def _extra_kind(vllm_config: Any) -> LayerKind:
    speculative = vllm_config.speculative_config
    if speculative is None:
        return LayerKind.OTHER
    return LayerKind.MTP if "mtp" in str(speculative.method) else LayerKind.DRAFT


_NIXL_GEOMETRY = (
    "block_len_per_layer",
    "block_size",
    "_physical_blocks_per_logical_kv_block",
    "num_blocks",
    "backend_name",
)


def _kv_cache(vllm_config: Any, kv_cache_config: Any, nixl: Any) -> KvCache:
    cache = vllm_config.cache_config
    layout = str(getattr(cache, "kv_cache_layout", None) or "")
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or ()
    spec = groups[0].kv_cache_spec if groups else None
    unreadable = [name for name in _NIXL_GEOMETRY if nixl is not None and not hasattr(nixl, name)]
    if unreadable:
        logger.info(
            "rankbook fallback: NIXL's %s are not there, the cache's own geometry is published",
            ", ".join(unreadable),
        )
    elif nixl is not None and nixl.block_len_per_layer:
        # NIXL transfers kernel blocks, which may be smaller than the cache's own.
        return KvCache(
            block_size=nixl.block_size,
            block_len_bytes=nixl.block_len_per_layer[0],
            physical_blocks_per_logical=nixl._physical_blocks_per_logical_kv_block,
            num_blocks=nixl.num_blocks,
            layout=layout,
            attention_backend=nixl.backend_name,
        )
    return KvCache(
        block_size=int(getattr(spec, "block_size", None) or cache.block_size or 0),
        block_len_bytes=int(getattr(spec, "page_size_bytes", 0)),
        num_blocks=int(getattr(kv_cache_config, "num_blocks", 0)),
        layout=layout,
    )


def _compat(vllm_config: Any, model: Model, layout: Layout, connector: str, nixl: Any) -> Compat:
    factors = {
        "vllm_version": vllm.__version__,
        "connector": connector,
        "model": model.name,
        "dtype": model.dtype,
        "cache_dtype": model.kv_cache_dtype,
        "num_hidden_layers": str(layout.num_layers),
        "head_size": str(model.head_size),
    }
    if nixl is None:
        return Compat("", factors)
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata as nixl_metadata

    scheduler = vllm_config.scheduler_config
    speculative = vllm_config.speculative_config
    factors |= {
        "nixl_connector_version": str(getattr(nixl_metadata, "NIXL_CONNECTOR_VERSION", "")),
        "num_kv_heads": str(vllm_config.model_config.get_total_num_kv_heads()),
        "attn_backend_name": str(getattr(nixl, "backend_name", "")),
        "is_hma_enabled": str(not scheduler.disable_hybrid_kv_cache_manager),
        "speculative_method": str(speculative.method) if speculative is not None else "",
        "transfer_mode": str(getattr(nixl, "_TRANSFER_MODE", "")),
    }
    return Compat(nixl.compat_hash or "", factors)


def _device(kv_caches: Mapping[str, Any]) -> str:
    """Name of the accelerator that holds the caches; empty on a CPU."""
    first = next(iter(kv_caches.values()), None)
    while isinstance(first, list | tuple) and first:
        first = first[0]
    device = getattr(first, "device", None)
    if device is None or device.type == "cpu":
        return ""
    if device.type == "cuda":
        import torch

        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        return f"GPU-{uuid}" if uuid else str(device)
    return str(device)


def worker_facts(
    connector: Any,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    handshake: Handshake,
) -> Facts:
    """What a worker and its connector, after `register_kv_caches`, say about themselves.

    Args:
        connector: The connector.
        vllm_config: The configuration it was made with.
        kv_cache_config: The worker's cache configuration; may be None.
        kv_caches: What was registered: caches by layer name.
        handshake: What its peers need of it.
    """
    model_config = vllm_config.model_config
    transfer = vllm_config.kv_transfer_config
    layout = engine_layout(vllm_config)
    place = slot()
    nixl = _nixl_worker(connector)
    model = Model(
        name=str(model_config.model),
        dtype=str(model_config.dtype).removeprefix("torch."),
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        total_num_kv_heads=1 if model_config.use_mla else model_config.get_total_num_kv_heads(),
        head_size=model_config.get_head_size(),
        is_mla=bool(model_config.use_mla),
    )
    return Facts(
        engine_id=transfer.engine_id,
        dp_rank=dp_rank(vllm_config),
        kv_role=transfer.kv_role,
        layout=layout,
        slot=place,
        # Not ModelConfig.get_layers_start_end_indices: it forgets the PCP ranks.
        stage_layers=get_pp_indices(layout.num_layers, place.pp_rank, layout.pp_size),
        layer_names=tuple(kv_caches),
        extra_kind=_extra_kind(vllm_config),
        model=model,
        kv=_kv_cache(vllm_config, kv_cache_config, nixl),
        compat=_compat(vllm_config, model, layout, type(connector).__name__, nixl),
        handshake=handshake,
        node_host=get_ip(),
        # vLLM's default is "localhost", which nobody chose.
        advertised_host=os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "") if nixl else "",
        hostname=socket.gethostname(),
        pid=os.getpid(),
        device=_device(kv_caches),
        worker_rank=vllm_config.parallel_config.rank,
    )


# ------------------------------------------------------------- the engine core


def side_channel(connector: Any) -> tuple[Address, ...]:
    """Where the engine core's connector serves handshakes itself; empty if nowhere."""
    for part in children(connector):
        scheduler = getattr(part, "connector_scheduler", None)
        host = getattr(scheduler, "side_channel_host", "")
        port = getattr(scheduler, "side_channel_port", 0)
        if host and port:
            return (Address("zmq", bare_host(host), port, "side-channel"),)
    return ()
