"""Every rpc: its messages, and whether it may be repeated. Pure.

The table is data; what the calls of the API are made of is in `_scripts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from rankbook import model, v1
from rankbook._retry import Repeat
from rankbook.convert import duration

__all__ = [
    "METHODS",
    "Answer",
    "Call",
    "Method",
    "Record",
    "Script",
    "attempt_until",
    "shortened",
    "unary_method",
]

T = TypeVar("T")
Record = model.WorkerRecord | v1.WorkerRecord
"""A record in either form; the message saves a conversion."""


@dataclass(frozen=True, slots=True)
class Method:
    """One rpc of the service."""

    field: str
    """Its member of the session's oneofs; empty: it is never carried there."""
    request: type[Message]
    """Class of its request."""
    reply: type[Message]
    """Class of its reply, or of one part of it."""
    repeat: Repeat
    """Whether it may be sent twice."""


# Writes carry a sequence, a token or a lease key, so that a second one is the
# first one again. A drain or an eviction names an engine and nothing of the
# moment: sent twice, it may undo what somebody did in between.
METHODS: dict[str, Method] = {
    "Session": Method("", v1.SessionRequest, v1.SessionResponse, Repeat.NEVER),
    "BeginGeneration": Method(
        "begin_generation",
        v1.BeginGenerationRequest,
        v1.BeginGenerationResponse,
        Repeat.ALWAYS,
    ),
    "RegisterWorkers": Method(
        "register_workers",
        v1.RegisterWorkersRequest,
        v1.RegisterWorkersResponse,
        Repeat.ALWAYS,
    ),
    "RenewLeases": Method(
        "renew_leases", v1.RenewLeasesRequest, v1.RenewLeasesResponse, Repeat.ALWAYS
    ),
    "UpdateWorker": Method(
        "update_worker", v1.UpdateWorkerRequest, v1.UpdateWorkerResponse, Repeat.ALWAYS
    ),
    "Deregister": Method("deregister", v1.DeregisterRequest, v1.DeregisterResponse, Repeat.ALWAYS),
    "RevokeLease": Method(
        "revoke_lease", v1.RevokeLeaseRequest, v1.RevokeLeaseResponse, Repeat.ALWAYS
    ),
    "SealEngine": Method("seal_engine", v1.SealEngineRequest, v1.SealEngineResponse, Repeat.ALWAYS),
    "ReportPeers": Method(
        "report_peers", v1.ReportPeersRequest, v1.ReportPeersResponse, Repeat.ALWAYS
    ),
    "DrainEngine": Method(
        "drain_engine", v1.DrainEngineRequest, v1.DrainEngineResponse, Repeat.IF_UNSENT
    ),
    "EvictEngine": Method(
        "evict_engine", v1.EvictEngineRequest, v1.EvictEngineResponse, Repeat.IF_UNSENT
    ),
    "GetTopology": Method(
        "get_topology", v1.GetTopologyRequest, v1.GetTopologyResponse, Repeat.ALWAYS
    ),
    "StreamTopology": Method("", v1.GetTopologyRequest, v1.GetTopologyResponse, Repeat.ALWAYS),
    "ListEngines": Method(
        "list_engines", v1.ListEnginesRequest, v1.ListEnginesResponse, Repeat.ALWAYS
    ),
    "Watch": Method("watch", v1.WatchRequest, v1.WatchResponse, Repeat.NEVER),
    "PlanTransfer": Method(
        "plan_transfer", v1.PlanTransferRequest, v1.PlanTransferResponse, Repeat.ALWAYS
    ),
    "ComparePeers": Method(
        "compare_peers", v1.ComparePeersRequest, v1.ComparePeersResponse, Repeat.ALWAYS
    ),
    "GetStatus": Method("get_status", v1.GetStatusRequest, v1.GetStatusResponse, Repeat.ALWAYS),
}


@dataclass(frozen=True, slots=True)
class Call:
    """One request to send."""

    method: str
    """Name of the rpc."""
    request: Message
    """The request; never changed after it was yielded."""
    wait_s: float = 0.0
    """How long the server may take on purpose, beside the call's own timeout."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one `Call`."""

    parts: tuple[Any, ...]
    """The reply, in one part or several."""
    sent_s: float
    """Performance counter when the request that was answered went out."""
    received_s: float
    """Performance counter when the answer was whole."""

    @property
    def reply(self) -> Any:
        """The reply of a call that is answered in one part."""
        return self.parts[0]


Script = Generator[Call, Answer, T]
"""A call of the API: yields what to send, is sent the answers, returns the result."""


def shortened(call: Call, left_s: float) -> Call:
    """The same call for a repeat when `left_s` seconds of its long poll are left."""
    if not call.wait_s or left_s >= call.wait_s:
        return call
    request = type(call.request)()
    request.CopyFrom(call.request)
    request.wait.CopyFrom(duration(max(left_s, 0.0)))  # type: ignore[attr-defined]
    return dataclasses.replace(call, request=request)


def attempt_until(call: Call, now_s: float, until_s: float, *, endpoints: int) -> float:
    """When to give one send of a call up that has until `until_s`.

    With another endpoint to go to, half the time is for the first one; not so
    for a call that waits on purpose, or must not be sent twice.
    """
    if endpoints == 1 or call.wait_s or METHODS[call.method].repeat is not Repeat.ALWAYS:
        return until_s
    return now_s + (until_s - now_s) / 2


def unary_method(call: Call) -> str:
    """The rpc that carries the call where no session is to be had.

    A topology may be larger than one unary reply, so it is streamed.
    """
    return "StreamTopology" if call.method == "GetTopology" else call.method
