"""The public data types: what the book holds, as frozen dataclasses.

Field names, units, ranges and the meaning of zero are those of
`proto/rankbook/v1/`, which comments every element; durations end in `_s` and
are seconds, instants are UTC datetimes. All are immutable and safe to share
between threads.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "Address",
    "ClockPair",
    "Compat",
    "CoreRecord",
    "Drain",
    "DrainOutcome",
    "Engine",
    "EngineFilter",
    "EventType",
    "ExtraLayer",
    "Handshake",
    "KvCache",
    "LayerKind",
    "Layers",
    "Layout",
    "Lease",
    "LeaseState",
    "LeaseStatus",
    "Model",
    "PeerConnection",
    "Problem",
    "Process",
    "Registered",
    "Requirement",
    "Role",
    "Seal",
    "Sealed",
    "SealedSlot",
    "Severity",
    "Slot",
    "Stage",
    "State",
    "Status",
    "Successor",
    "Topology",
    "WatchEvent",
    "WorkerRecord",
    "WorkerStatus",
]


class _Name(enum.StrEnum):
    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last: list[str]) -> str:
        return name


class Role(_Name):
    """What an engine does with KV."""

    UNSPECIFIED = enum.auto()
    PRODUCER = enum.auto()
    CONSUMER = enum.auto()
    BOTH = enum.auto()


class LayerKind(_Name):
    """What a layer outside the model's own count is for."""

    UNSPECIFIED = enum.auto()
    DRAFT = enum.auto()
    MTP = enum.auto()
    OTHER = enum.auto()


class State(_Name):
    """Life of an engine; the README's list of words says what each may be used for."""

    UNSPECIFIED = enum.auto()
    GONE = enum.auto()
    INVALID = enum.auto()
    DEGRADED = enum.auto()
    DRAINING = enum.auto()
    READY = enum.auto()
    COMPLETE = enum.auto()
    FORMING = enum.auto()


class Severity(_Name):
    """How bad a problem is."""

    UNSPECIFIED = enum.auto()
    INFO = enum.auto()
    WARNING = enum.auto()
    ERROR = enum.auto()


class Requirement(_Name):
    """What an engine must be to be answered."""

    READY = enum.auto()
    COMPLETE = enum.auto()
    ANY = enum.auto()


class LeaseState(_Name):
    """Whether a lease lives."""

    UNSPECIFIED = enum.auto()
    ALIVE = enum.auto()
    ENDED = enum.auto()
    UNKNOWN = enum.auto()
    FENCED = enum.auto()


class EventType(_Name):
    """What happened to an engine, relative to what this watcher knew."""

    UNSPECIFIED = enum.auto()
    ADDED = enum.auto()
    MODIFIED = enum.auto()
    REMOVED = enum.auto()


class DrainOutcome(_Name):
    """Whether an engine is drained, and why."""

    UNSPECIFIED = enum.auto()
    WAITING = enum.auto()
    IDLE = enum.auto()
    DEADLINE = enum.auto()


@dataclass(frozen=True, slots=True)
class Layout:
    """Declared sizes of an engine's grid."""

    pp_size: int
    tp_size: int
    num_layers: int
    pcp_size: int = 1
    dcp_size: int = 1


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A place in the grid; sorts by stage, then PCP rank, then TP rank."""

    pp_rank: int = 0
    pcp_rank: int = 0
    tp_rank: int = 0


@dataclass(frozen=True, slots=True)
class ExtraLayer:
    """A draft or MTP layer: global index at or above num_layers."""

    index: int
    kind: LayerKind


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers a worker holds; `end_layer` is exclusive."""

    start_layer: int
    end_layer: int
    names: tuple[str, ...] = ()
    extra: tuple[ExtraLayer, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """Facts of the served model; zero and empty mean not stated."""

    name: str = ""
    dtype: str = ""
    kv_cache_dtype: str = ""
    total_num_kv_heads: int = 0
    head_size: int = 0
    is_mla: bool = False


@dataclass(frozen=True, slots=True)
class KvCache:
    """Geometry of one worker's KV cache; zero and empty mean not stated."""

    block_size: int = 0
    block_len_bytes: int = 0
    physical_blocks_per_logical: int = 1
    num_blocks: int = 0
    layout: str = ""
    attention_backend: str = ""


@dataclass(frozen=True, slots=True)
class Compat:
    """What a connector says about whom it can pair with."""

    hash: str = ""
    factors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Address:
    """Where something listens, as advertised. `host` has no brackets."""

    scheme: str
    host: str
    port: int = 0
    label: str = ""


@dataclass(frozen=True, slots=True)
class Handshake:
    """The connector's opaque metadata."""

    format: str
    version: int = 0
    payload: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Process:
    """The process that holds a record."""

    boot_id: str
    hostname: str = ""
    pid: int = 0
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """What a worker publishes."""

    group: str
    engine_id: str
    generation: str
    role: Role
    layout: Layout
    slot: Slot
    layers: Layers
    handshake: Handshake | None
    process: Process
    namespace: str = ""
    replica: str = ""
    dp_rank: int = 0
    model: Model | None = None
    kv: KvCache | None = None
    compat: Compat | None = None
    addresses: tuple[Address, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClockPair:
    """One moment on two clocks: `local_s` of the process, the registry's time."""

    local_s: float
    registry_time: dt.datetime
    error_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRecord:
    """The engine core's own record."""

    process: Process
    addresses: tuple[Address, ...] = ()
    connector: str = ""
    clock: ClockPair | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """Layer range of one stage, as published."""

    pp_rank: int
    start_layer: int
    end_layer: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong or odd, in words and in values."""

    reason: str
    severity: Severity
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seal:
    """The engine core's word that it saw the same engine."""

    number: int
    digest: bytes
    time: dt.datetime | None = None
    boot_id: str = ""


@dataclass(frozen=True, slots=True)
class Drain:
    """The wish that an engine takes no new peers."""

    reason: str = ""
    requested_by: str = ""
    start_time: dt.datetime | None = None
    deadline: dt.datetime | None = None


@dataclass(frozen=True, slots=True)
class Successor:
    """What took a dead engine's place."""

    engine_id: str
    epoch: int
    generation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine without its workers' records.

    `lapsed`: a worker of this generation was taken out without its word (its
    lease ran out, or the engine was evicted), so its process may still run and
    write. False: every worker that is gone was signed out, by itself or by its
    heartbeat process that saw it end. False in a new generation, whatever became
    of the one before.
    """

    namespace: str
    engine_id: str
    group: str
    replica: str
    dp_rank: int
    role: Role
    state: State
    generation: str
    epoch: int
    revision: int
    start_revision: int
    layout: Layout
    present: int
    declared: int
    missing: tuple[Slot, ...] = ()
    stages: tuple[Stage, ...] = ()
    problems: tuple[Problem, ...] = ()
    seal: Seal | None = None
    core: CoreRecord | None = None
    drain: Drain | None = None
    successor: Successor | None = None
    model: Model | None = None
    compat_hashes: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    start_time: dt.datetime | None = None
    change_time: dt.datetime | None = None
    asleep: tuple[Slot, ...] = ()
    lapsed: bool = False


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What the book knows about a worker beside the record."""

    record_digest: bytes
    revision: int
    lease_id: str
    asleep: bool = False


@dataclass(frozen=True, slots=True)
class Topology:
    """An engine with all its workers, of exactly one generation, in slot order.

    `stale_s` is how long the server that said it had been cut off from its store,
    in seconds: what others wrote since is not in here. Zero is up to date.
    """

    engine: Engine
    workers: tuple[WorkerRecord, ...]
    statuses: tuple[WorkerStatus, ...]
    book_id: str = ""
    book_revision: int = 0
    stale_s: float = 0.0

    def worker(self, pp_rank: int, tp_rank: int, pcp_rank: int = 0) -> WorkerRecord | None:
        """The worker in a slot, or None where the slot is empty."""
        wanted = Slot(pp_rank, pcp_rank, tp_rank)
        return next((w for w in self.workers if w.slot == wanted), None)


@dataclass(frozen=True, slots=True)
class EngineFilter:
    """Which engines; every condition that is set must hold."""

    group: str = ""
    role: Role = Role.UNSPECIFIED
    model: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    states: tuple[State, ...] = ()
    compat_hash: str = ""
    engine_id: str = ""


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A change of one engine.

    Attributes:
        type: Relative to what this watch gave before.
        revision: The engine's revision.
        topology: The engine as it is now, with every worker it has now.
        changed: Slots whose worker is new or changed.
        removed: Slots that became empty.
    """

    type: EventType
    revision: int
    topology: Topology
    changed: tuple[Slot, ...] = ()
    removed: tuple[Slot, ...] = ()


@dataclass(frozen=True, slots=True)
class Lease:
    """What keeps a process's records alive."""

    lease_id: str
    ttl_s: float
    renew_interval_s: float


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """What became of a lease that was to be renewed."""

    lease_id: str
    state: LeaseState
    ttl_s: float = 0.0
    replaced_by: Successor | None = None


@dataclass(frozen=True, slots=True)
class Registered:
    """What a registration got.

    `sequence` is the last number used: a registration that was cut into
    several took one for each, and the next write needs a higher one.
    """

    lease: Lease
    epoch: int
    revision: int
    record_digests: tuple[bytes, ...]
    book_id: str = ""
    boot_id: str = ""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class SealedSlot:
    """One slot as the engine core saw it."""

    slot: Slot
    boot_id: str
    record_digest: bytes


@dataclass(frozen=True, slots=True)
class Sealed:
    """The seal that now stands."""

    seal: Seal
    epoch: int
    revision: int
    lease: Lease


@dataclass(frozen=True, slots=True)
class PeerConnection:
    """One connection of this process to an engine."""

    engine_id: str
    generation: str
    transfers_in_flight: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a server does."""

    version: str
    boot_id: str
    book_id: str
    store: str
    book_revision: int
    engines: Mapping[str, int]
    workers: int
    leases: int
    watchers: int
    sessions: int
    start_time: dt.datetime | None
    server_time: dt.datetime | None
    store_available: bool
    epoch_floor: int = 0
    horizon_revision: int = 0
    stale_for_s: float = 0.0
