"""Mooncake's workers in the book: where each listens, and who may ask them.

Mooncake's consumer asks the producer's workers itself, each at its own address,
and they write. vLLM gives it the addresses by an HTTP server in the producer's
first worker, which knows whoever has registered so far; here they come out of a
sealed topology, so all of them or none. Pure, and free of vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any

from rankbook.errors import BadRecord, Incompatible, Incomplete
from rankbook.model import Handshake, Slot, State, Topology, WorkerRecord
from rankbook_vllm.requests import Requests, is_text, unreadable
from rankbook_vllm.seal import slot_name

__all__ = [
    "FORMAT",
    "VERSION",
    "Listener",
    "MooncakeRequests",
    "addresses_of",
    "is_address",
    "is_dead",
    "names_transfer",
]

FORMAT = "vllm.mooncake"
"""Handshake format of a worker that sends KV over Mooncake."""
VERSION = 1
"""Of the payload: a JSON object with the fields of `Listener`."""
_ADDRESS = re.compile(
    r"tcp://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]):(\d{1,5})"
)


@dataclass(frozen=True, slots=True)
class Listener:
    """Where a producer's worker takes requests for KV."""

    address: str
    """As ZeroMQ takes it, tcp only: "tcp://10.0.0.5:34567", "tcp://[fd00::5]:34567"."""
    protocol: str
    """How Mooncake moves bytes: "tcp", "rdma"; both sides need the same."""

    def encode(self) -> Handshake:
        """The handshake of a worker's record."""
        return Handshake(FORMAT, VERSION, json.dumps(asdict(self), sort_keys=True).encode())

    @classmethod
    def decode(cls, record: WorkerRecord) -> Listener:
        """What a worker's record says.

        Fields that a later release added are left out.

        Raises:
            Incomplete: The worker withdrew its payload.
            Incompatible: It is of another connector, or of a version that is not known here.
            BadRecord: The payload is not what its format says, or no address of a host.
        """
        handshake = record.handshake
        who = f"{record.engine_id} {slot_name(record.slot)}"
        if handshake is None or (handshake.format == FORMAT and not handshake.payload):
            raise Incomplete(
                f"{who} has no payload in the book: it sleeps, or still starts",
                metadata={"engine_id": record.engine_id, "missing": slot_name(record.slot)},
            )
        spoken = (handshake.format, handshake.version)
        if spoken != (FORMAT, VERSION):
            raise Incompatible(
                f"{who} publishes {spoken[0]} version {spoken[1]}, this engine needs {FORMAT} "
                f"version {VERSION}: run MooncakeConnector and the same rankbook on both sides",
                metadata={
                    "producer": f"{spoken[0]} {spoken[1]}",
                    "consumer": f"{FORMAT} {VERSION}",
                },
            )
        try:
            said = json.loads(handshake.payload)
            address, protocol = said["address"], said["protocol"]
        except (ValueError, LookupError, TypeError, RecursionError):  # the last: "[[[[..."
            address = protocol = None
        if not isinstance(address, str) or not isinstance(protocol, str) or not address:
            raise BadRecord(
                f"{who} publishes a {FORMAT} payload without address and protocol",
                metadata={"field": "handshake.payload", "value": repr(handshake.payload[:100])},
            )
        if not is_address(address):
            raise BadRecord(
                f"{who} publishes the address {address!r:.100}: it takes tcp://HOST:PORT, with "
                "PORT 1 to 65535",
                metadata={
                    "field": "handshake.payload",
                    "value": f"{address!r:.100}",
                    "rule": "tcp://HOST:PORT",
                },
            )
        return cls(address, protocol)


def is_address(value: object) -> bool:
    """Whether a worker may be asked there: tcp://HOST:PORT, PORT 1 to 65535.

    ZeroMQ takes more: a socket file, or a port that nobody can listen on, for which a
    pull would wait in silence.
    """
    if not isinstance(value, str) or not value.isascii():
        return False
    found = _ADDRESS.fullmatch(value)
    return found is not None and 1 <= int(found[1]) <= 65_535


def addresses_of(topology: Topology, protocol: str) -> dict[int, dict[int, str]]:
    """Where every worker of a producer listens, by tp_rank and pp_rank.

    Args:
        topology: The producer, sealed.
        protocol: How this engine's Mooncake moves bytes.

    Raises:
        Incomplete: A worker is missing or has no payload: never a part of them.
        Incompatible: It is no Mooncake producer, uses another protocol, or has
            context-parallel ranks, which Mooncake does not tell apart.
        BadRecord: A payload cannot be read.
    """
    engine, layout = topology.engine, topology.engine.layout
    if layout.pcp_size > 1 or layout.dcp_size > 1:
        raise Incompatible(
            f"{engine.engine_id} has pcp_size {layout.pcp_size} and dcp_size {layout.dcp_size}: "
            "Mooncake tells workers apart by pp_rank and tp_rank only; start it without context "
            "parallelism",
            metadata={"producer": f"pcp {layout.pcp_size}, dcp {layout.dcp_size}"},
        )
    found: dict[int, dict[int, str]] = {}
    for tp_rank in range(layout.tp_size):
        for pp_rank in range(layout.pp_size):
            record = topology.worker(pp_rank, tp_rank)
            if record is None:
                missing = slot_name(Slot(pp_rank, 0, tp_rank))
                raise Incomplete(
                    f"{engine.engine_id} has no worker {missing}",
                    metadata={"engine_id": engine.engine_id, "missing": missing},
                )
            listener = Listener.decode(record)
            if listener.protocol != protocol:
                raise Incompatible(
                    f"{engine.engine_id} {slot_name(record.slot)} moves KV over "
                    f"{listener.protocol:.100}, this engine over {protocol}: give both the "
                    "same mooncake_protocol",
                    metadata={"producer": listener.protocol[:100], "consumer": protocol},
                )
            found.setdefault(tp_rank, {})[pp_rank] = listener.address
    return found


def is_dead(generation: str, topology: Topology | None) -> bool:
    """Whether nothing more can come from a start of a producer.

    Only where its workers have ended for sure: one that lapsed, or that another
    start replaced, may be frozen or cut off and still write. Its transfers are
    left to vLLM's own deadline.

    Args:
        generation: The start.
        topology: The producer as the book has it now; None where it has none.
    """
    return (
        topology is not None
        and topology.engine.generation == generation
        and topology.engine.state is State.GONE
        and not topology.engine.lapsed
    )


def names_transfer(value: object) -> bool:
    """Whether a value can be a transfer_id: text of 1 to 512 characters that can be sent.

    vLLM looks it up, and sends those of all pulls of a step in one message: one that
    cannot be hashed or encoded takes the others with it.
    """
    return bool(value) and is_text(value)


class MooncakeRequests(Requests):
    """`Requests` for Mooncake, which names a transfer instead of blocks."""

    def _check(self, params: MutableMapping[str, Any]) -> None:
        transfer_id = params.get("transfer_id")
        if not names_transfer(transfer_id):
            raise unreadable(
                "transfer_id", transfer_id, "the text that the producer was given or returned"
            )
        server = params.get("remote_bootstrap_addr")
        if server is not None and not is_text(server):
            raise unreadable(
                "remote_bootstrap_addr", server, "the address of a bootstrap server, or nothing"
            )
        super()._check(params)

    def _is_foreign(self, params: Mapping[str, Any]) -> bool:
        """Whether the peer is one without rankbook, to be looked up at the bootstrap server
        that the request names. One that names its start has it."""
        engine_id = params.get("remote_engine_id")
        return (
            self._settings.side_channel
            and not params.get("remote_generation")
            and isinstance(engine_id, str)
            and self._book.get(engine_id) is None
            and bool(params.get("remote_bootstrap_addr"))
        )

    def _fill(self, request_id: str, params: MutableMapping[str, Any], topology: Topology) -> None:
        params["remote_generation"] = topology.engine.generation
        # vLLM wants it to be there; whom the book knows is never asked for at a server.
        params["remote_bootstrap_addr"] = ""
