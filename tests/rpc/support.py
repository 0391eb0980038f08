"""What the tests of this room share: records, and calls without our client."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from rankbook import v1

SERVICE = "/rankbook.v1.Registry/"
TIMEOUT_S = 20.0


def record(
    engine_id: str = "prefill-a-0",
    *,
    pp: int = 0,
    tp: int = 0,
    pp_size: int = 1,
    tp_size: int = 2,
    num_layers: int = 4,
    generation: str = "g1",
    group: str = "prefill-a",
    payload: bytes = b"opaque",
    boot_id: str = "",
    **fields: Any,
) -> v1.WorkerRecord:
    """A valid record; layers are split evenly where `pp_size` divides them."""
    share = num_layers // pp_size
    end = num_layers if pp == pp_size - 1 else (pp + 1) * share
    values: dict[str, Any] = {
        "group": group,
        "engine_id": engine_id,
        "generation": generation,
        "role": v1.ROLE_PRODUCER,
        "layout": v1.Layout(pp_size=pp_size, tp_size=tp_size, num_layers=num_layers),
        "slot": v1.Slot(pp_rank=pp, tp_rank=tp),
        "layers": v1.Layers(start_layer=pp * share, end_layer=end),
        "handshake": v1.Handshake(format="test", version=1, payload=payload),
        "process": v1.Process(boot_id=boot_id or f"{engine_id}.{generation}.pp{pp}.tp{tp}"),
    }
    return v1.WorkerRecord(**{**values, **fields})


def grid(engine_id: str = "prefill-a-0", **fields: Any) -> list[v1.WorkerRecord]:
    """Records of every slot of an engine."""
    pp_size, tp_size = fields.get("pp_size", 1), fields.get("tp_size", 2)
    return [
        record(engine_id, pp=pp, tp=tp, **fields) for pp in range(pp_size) for tp in range(tp_size)
    ]


def registration(
    records: Sequence[v1.WorkerRecord],
    *,
    sequence: int = 1,
    lease_key: str = "",
    ttl_s: float = 60.0,
    epoch: int = 0,
    namespace: str = "",
) -> v1.RegisterWorkersRequest:
    """A registration under a lease of its own."""
    key = lease_key or f"lease.{records[0].process.boot_id}"
    return v1.RegisterWorkersRequest(
        namespace=namespace,
        records=records,
        lease=v1.LeaseRequest(lease_key=key, ttl=span(ttl_s)),
        sequence=sequence,
        epoch=epoch,
    )


def span(seconds: float) -> Duration:
    """A Duration."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def seal_request(
    records: Sequence[v1.WorkerRecord],
    digests: Sequence[bytes],
    *,
    sequence: int = 1,
    namespace: str = "",
) -> v1.SealEngineRequest:
    """A seal by a core that saw these records."""
    first = records[0]
    return v1.SealEngineRequest(
        namespace=namespace,
        engine_id=first.engine_id,
        generation=first.generation,
        slots=[
            v1.SealedSlot(slot=r.slot, boot_id=r.process.boot_id, record_digest=digest)
            for r, digest in zip(records, digests, strict=True)
        ],
        core=v1.CoreRecord(
            process=v1.Process(boot_id=f"core.{first.engine_id}.{first.generation}"),
            connector="TestConnector",
        ),
        lease=v1.LeaseRequest(lease_key=f"core.{first.engine_id}", ttl=span(60)),
        sequence=sequence,
    )


class Failure(Exception):
    """A typed error as it came over the wire."""

    def __init__(self, code: int, message: str, info: error_details_pb2.ErrorInfo) -> None:
        super().__init__(f"{info.reason}: {message}")
        self.code = code
        self.message = message
        self.reason = info.reason
        self.domain = info.domain
        self.metadata = dict(info.metadata)


def failure_of(status: status_pb2.Status) -> Failure:
    """The error a status carries."""
    info = error_details_pb2.ErrorInfo()
    assert status.details, status
    assert status.details[0].Unpack(info)
    return Failure(status.code, status.message, info)


def failure_of_rpc(error: Any) -> Failure:
    """The error a gRPC call ended with."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
            assert status.code == error.code().value[0]
            return failure_of(status)
    raise AssertionError(f"no typed error in {error}")


class Raw:
    """Calls without our client, over one channel."""

    def __init__(self, address: str, namespace: str = "") -> None:
        """Opens a channel.

        Args:
            address: HOST:PORT of a server.
            namespace: What requests without one are sent for.
        """
        self.address = address
        self.namespace = namespace
        self.channel = grpc.insecure_channel(
            address, options=(("grpc.max_receive_message_length", 16 << 20),)
        )

    def __enter__(self) -> Raw:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.channel.close()

    def bytes(self, name: str, data: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
        """A unary call of bytes."""
        call = self.channel.unary_unary(SERVICE + name)
        try:
            reply: bytes = call(data, timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            raise failure_of_rpc(error) from None
        return reply

    def call(self, name: str, request: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """A unary call of the contract, by name."""
        kind = getattr(v1, f"{name}Response")
        request.namespace = request.namespace or self.namespace
        return kind.FromString(self.bytes(name, request.SerializeToString(), timeout_s))

    def stream(self, name: str, request: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """A server stream of the contract; iterate it for messages."""
        kind = v1.WatchResponse if name == "Watch" else v1.GetTopologyResponse
        request.namespace = request.namespace or self.namespace
        call = self.channel.unary_stream(
            SERVICE + name,
            request_serializer=type(request).SerializeToString,
            response_deserializer=kind.FromString,
        )
        return call(request, timeout=timeout_s, wait_for_ready=True)

    def register(self, records: Sequence[v1.WorkerRecord], **fields: Any) -> Any:
        """Signs records in."""
        return self.call("RegisterWorkers", registration(records, **fields))

    def ready(self, records: Sequence[v1.WorkerRecord]) -> Any:
        """Signs an engine's records in and seals it."""
        digests = self.register(records).record_digests
        return self.call("SealEngine", seal_request(records, digests))

    def topology(self, engine_id: str = "prefill-a-0", **fields: Any) -> v1.Topology:
        """An engine as it is, whichever its state."""
        fields.setdefault("require", v1.REQUIREMENT_ANY)
        reply = self.call("GetTopology", v1.GetTopologyRequest(engine_id=engine_id, **fields))
        (topology,) = reply.topologies
        return topology

    def session(self) -> RawSession:
        """A session stream of bytes."""
        return RawSession(self.channel, self.namespace)


class RawSession:
    """A session that sends and takes frames as they are."""

    def __init__(self, channel: grpc.Channel, namespace: str = "") -> None:
        self.namespace = namespace
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method = channel.stream_stream(SERVICE + "Session")
        self.stream: Any = method(iter(self._frames.get, None), wait_for_ready=True)
        self._next_id = 1

    def __enter__(self) -> RawSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        self.stream.cancel()

    def close(self) -> None:
        """Says that no more frames come."""
        self._frames.put(None)

    def send_bytes(self, frame: bytes) -> None:
        """Sends a frame."""
        self._frames.put(frame)

    def send(self, field: str, request: Any, request_id: int = 0) -> int:
        """Sends a call; returns its number."""
        request_id = request_id or self._next_id
        self._next_id = max(self._next_id, request_id) + 1
        frame = v1.SessionRequest(request_id=request_id)
        request.namespace = request.namespace or self.namespace
        getattr(frame, field).CopyFrom(request)
        self.send_bytes(frame.SerializeToString())
        return request_id

    def cancel(self, request_id: int) -> None:
        """Cancels a call."""
        frame = v1.SessionRequest(request_id=1 << 40)
        frame.cancel.request_id = request_id
        self.send_bytes(frame.SerializeToString())

    def take(self) -> v1.SessionResponse:
        """The next frame from the server."""
        return v1.SessionResponse.FromString(next(self.stream))

    def replies(self) -> Iterator[v1.SessionResponse]:
        """Frames from the server, to the end of the stream."""
        return map(v1.SessionResponse.FromString, self.stream)

    def call(self, field: str, request: Any) -> Any:
        """Sends a call and takes its reply, which must come next."""
        request_id = self.send(field, request)
        reply = self.take()
        assert reply.request_id == request_id, reply
        if reply.WhichOneof("reply") == "status":
            raise failure_of(reply.status)
        return getattr(reply, field)
