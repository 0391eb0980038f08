"""rankbook: who holds which layers and heads, and how to reach them.

    import rankbook

    with rankbook.Client("127.0.0.1:7420") as client:
        topology = client.get_topology("prefill-a-0", wait_s=30)

The error tree is drawn in `rankbook.errors`. Importing this package is quick:
gRPC is loaded by the first use of a client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module. Everything is loaded at its first use, so that a process that
# needs only a registration, or only the errors, does not pay for gRPC.
_HOMES = {
    **dict.fromkeys(("AsyncClient",), "rankbook._async"),
    **dict.fromkeys(("Client",), "rankbook._sync"),
    **dict.fromkeys(("Registration",), "rankbook._registration"),
    **dict.fromkeys(("TLS",), "rankbook._channel"),
    **dict.fromkeys(("RetryPolicy",), "rankbook._retry"),
    **dict.fromkeys(("TopologyView",), "rankbook._view"),
    **dict.fromkeys(("new_id",), "rankbook._ids"),
    **dict.fromkeys(("RegistrationChange", "RegistrationState"), "rankbook._change"),
    **dict.fromkeys(
        (
            "BadRecord",
            "BadRequest",
            "Cancelled",
            "Conflict",
            "DeadlineExceeded",
            "Denied",
            "Fenced",
            "Gone",
            "Incompatible",
            "Incomplete",
            "Internal",
            "LimitExceeded",
            "NotFound",
            "Overloaded",
            "RankbookError",
            "Reason",
            "Refused",
            "Retry",
            "SealMismatch",
            "TransferError",
            "Unavailable",
        ),
        "rankbook.errors",
    ),
    **dict.fromkeys(
        (
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
        ),
        "rankbook.model",
    ),
    **dict.fromkeys(
        (
            "ClockOffset",
            "Drained",
            "EngineList",
            "Evicted",
            "PlanReply",
            "RenewReply",
            "StalePeer",
            "Updated",
        ),
        "rankbook._replies",
    ),
}

if TYPE_CHECKING:
    from rankbook._async import AsyncClient
    from rankbook._change import RegistrationChange, RegistrationState
    from rankbook._channel import TLS
    from rankbook._ids import new_id
    from rankbook._registration import Registration
    from rankbook._replies import (
        ClockOffset,
        Drained,
        EngineList,
        Evicted,
        PlanReply,
        RenewReply,
        StalePeer,
        Updated,
    )
    from rankbook._retry import RetryPolicy
    from rankbook._sync import Client
    from rankbook._view import TopologyView
    from rankbook.errors import (
        BadRecord,
        BadRequest,
        Cancelled,
        Conflict,
        DeadlineExceeded,
        Denied,
        Fenced,
        Gone,
        Incompatible,
        Incomplete,
        Internal,
        LimitExceeded,
        NotFound,
        Overloaded,
        RankbookError,
        Reason,
        Refused,
        Retry,
        SealMismatch,
        TransferError,
        Unavailable,
    )
    from rankbook.model import (
        Address,
        ClockPair,
        Compat,
        CoreRecord,
        Drain,
        DrainOutcome,
        Engine,
        EngineFilter,
        EventType,
        ExtraLayer,
        Handshake,
        KvCache,
        LayerKind,
        Layers,
        Layout,
        Lease,
        LeaseState,
        LeaseStatus,
        Model,
        PeerConnection,
        Problem,
        Process,
        Registered,
        Requirement,
        Role,
        Seal,
        Sealed,
        SealedSlot,
        Severity,
        Slot,
        Stage,
        State,
        Status,
        Successor,
        Topology,
        WatchEvent,
        WorkerRecord,
        WorkerStatus,
    )

__all__ = [
    "TLS",
    "Address",
    "AsyncClient",
    "BadRecord",
    "BadRequest",
    "Cancelled",
    "Client",
    "ClockOffset",
    "ClockPair",
    "Compat",
    "Conflict",
    "CoreRecord",
    "DeadlineExceeded",
    "Denied",
    "Drain",
    "DrainOutcome",
    "Drained",
    "Engine",
    "EngineFilter",
    "EngineList",
    "EventType",
    "Evicted",
    "ExtraLayer",
    "Fenced",
    "Gone",
    "Handshake",
    "Incompatible",
    "Incomplete",
    "Internal",
    "KvCache",
    "LayerKind",
    "Layers",
    "Layout",
    "Lease",
    "LeaseState",
    "LeaseStatus",
    "LimitExceeded",
    "Model",
    "NotFound",
    "Overloaded",
    "PeerConnection",
    "PlanReply",
    "Problem",
    "Process",
    "RankbookError",
    "Reason",
    "Refused",
    "Registered",
    "Registration",
    "RegistrationChange",
    "RegistrationState",
    "RenewReply",
    "Requirement",
    "Retry",
    "RetryPolicy",
    "Role",
    "Seal",
    "SealMismatch",
    "Sealed",
    "SealedSlot",
    "Severity",
    "Slot",
    "Stage",
    "StalePeer",
    "State",
    "Status",
    "Successor",
    "Topology",
    "TopologyView",
    "TransferError",
    "Unavailable",
    "Updated",
    "WatchEvent",
    "WorkerRecord",
    "WorkerStatus",
    "__version__",
    "new_id",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rankbook' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
