"""A worker's record out of plain facts, before anything of vLLM is touched.

`Facts` is what vLLM's objects say about one worker; `worker_record` turns them
into the record that is published. Pure, and free of vLLM and torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rankbook import v1
from rankbook.convert import to_message
from rankbook.errors import BadRecord
from rankbook.limits import check_record
from rankbook.model import (
    Address,
    Compat,
    ExtraLayer,
    Handshake,
    KvCache,
    LayerKind,
    Layers,
    Layout,
    Model,
    Process,
    Role,
    Slot,
    WorkerRecord,
)
from rankbook_vllm.config import Settings, bare_host

__all__ = [
    "NO_METADATA",
    "Facts",
    "Start",
    "addresses_of",
    "base_name",
    "layer_index",
    "layer_index_in",
    "layers_of",
    "role_of",
    "worker_record",
]

NO_METADATA = "vllm.none"
"""Handshake format of a connector whose peers need no metadata."""

_DRAFT_PREFIX = "draft_model."
_DP_ENDING = re.compile(r"_dp\d+\Z")
_ROLES = {"kv_producer": Role.PRODUCER, "kv_consumer": Role.CONSUMER, "kv_both": Role.BOTH}


@dataclass(frozen=True, slots=True)
class Start:
    """One start of an engine, as rank 0 announced it to all its workers."""

    generation: str
    """Token of the start."""
    epoch: int = 0
    """Number the book gave it; zero when the registry did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What vLLM says about one worker."""

    engine_id: str
    dp_rank: int
    kv_role: str
    """vLLM's name: kv_producer, kv_consumer or kv_both."""
    layout: Layout
    slot: Slot
    stage_layers: tuple[int, int]
    """The stage's range of the model's layers, end exclusive, by vLLM's own split."""
    layer_names: tuple[str, ...]
    """Names of the KV caches, in the order in which they were registered."""
    extra_kind: LayerKind = LayerKind.OTHER
    """What a layer beyond the model's own count is for."""
    model: Model = field(default_factory=Model)
    kv: KvCache = field(default_factory=KvCache)
    compat: Compat = field(default_factory=Compat)
    handshake: Handshake = field(default_factory=lambda: Handshake(NO_METADATA))
    node_host: str = ""
    """Address of this worker's own node."""
    advertised_host: str = ""
    """Address that the connector's side channel was told to advertise on this node;
    empty where none was set."""
    hostname: str = ""
    pid: int = 0
    device: str = ""
    worker_rank: int = 0
    """The worker's rank in the engine, as the executor counts."""


def role_of(kv_role: str) -> Role:
    """The role of an engine by vLLM's name for it.

    Raises:
        BadRecord: vLLM has a role that is not known here.
    """
    if kv_role not in _ROLES:
        raise BadRecord(
            f"kv_role is {kv_role!r}: known are {', '.join(_ROLES)}",
            metadata={"field": "kv_role", "value": kv_role},
        )
    return _ROLES[kv_role]


def base_name(engine_id: str) -> str:
    """The engine_id without the ending vLLM gives it under data parallelism."""
    return _DP_ENDING.sub("", engine_id)


def layer_index(name: str) -> int | None:
    """Global index in a layer's name: its first number that stands alone.

    "model.layers.31.self_attn.attn" is 31; None where there is no number.
    """
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def layer_index_in(name: str, num_layers: int) -> int | None:
    """Global index of a KV cache's layer in a model of so many layers, draft layers after them.

    None where there is no number in the name.
    """
    index = layer_index(name)
    if index is not None and name.startswith(_DRAFT_PREFIX):
        return index + num_layers  # a draft model of its own counts its layers from zero
    return index


def layers_of(
    names: Iterable[str], stage: tuple[int, int], num_layers: int, extra_kind: LayerKind
) -> Layers:
    """The layers of a worker.

    The range is vLLM's split, not the span of the names: a layer without a KV
    cache has no name, and an empty stage has none at all. The names prove it.

    Args:
        names: Names of the KV caches in order.
        stage: The stage's range, end exclusive.
        num_layers: Layers of the model, without draft layers.
        extra_kind: Kind of the layers at `num_layers` and above.

    Raises:
        BadRecord: A name is of a layer that another stage owns.
    """
    names = tuple(names)
    start, end = stage
    extra: dict[int, ExtraLayer] = {}
    for name in names:
        index = layer_index_in(name, num_layers)
        if index is None:
            continue
        if index >= num_layers:
            extra[index] = ExtraLayer(index, extra_kind)
        elif not start <= index < end:
            raise BadRecord(
                f"KV cache {name!r} is of layer {index}, outside the stage's layers "
                f"[{start}, {end}): the connector was given another stage's cache",
                metadata={"field": "layers.names", "value": name, "stage": f"[{start}, {end})"},
            )
    return Layers(start, end, names, tuple(extra[index] for index in sorted(extra)))


def addresses_of(
    configured: Iterable[Address], node_host: str, advertised_host: str
) -> tuple[Address, ...]:
    """Addresses of a worker's node, most preferred first, each once.

    Ports are zero: a worker listens nowhere until its connector does; what the
    engine core listens on is in the core's record.
    """
    found = dict.fromkeys(configured)
    for host, label in ((node_host, "node"), (advertised_host, "advertised")):
        host = bare_host(host)
        if host and host not in {address.host for address in found}:
            found[Address("tcp", host, 0, label)] = None
    return tuple(found)


def worker_record(facts: Facts, start: Start, settings: Settings, boot_id: str) -> WorkerRecord:
    """The record that a worker publishes, checked against every limit.

    Raises:
        BadRecord: A fact breaks a rule of the record; names field and value.
        LimitExceeded: A value is over its limit.
    """
    record = WorkerRecord(
        namespace=settings.namespace,
        group=settings.group or base_name(facts.engine_id),
        replica=settings.replica or base_name(facts.engine_id),
        engine_id=facts.engine_id,
        generation=start.generation,
        dp_rank=facts.dp_rank,
        role=role_of(facts.kv_role),
        layout=facts.layout,
        slot=facts.slot,
        layers=layers_of(
            facts.layer_names, facts.stage_layers, facts.layout.num_layers, facts.extra_kind
        ),
        model=facts.model,
        kv=facts.kv,
        compat=facts.compat,
        addresses=addresses_of(
            settings.addresses, settings.host or facts.node_host, facts.advertised_host
        ),
        handshake=facts.handshake,
        process=Process(boot_id, facts.hostname, facts.pid, facts.device),
        labels=_sorted(settings.labels),
    )
    check_record(to_message(record, v1.WorkerRecord), settings.namespace)
    return record


def _sorted(values: Mapping[str, str]) -> dict[str, str]:
    return {key: values[key] for key in sorted(values)}
