"""Bytes are bounded, not only calls: many large requests or unread replies cost little."""

from __future__ import annotations

import contextlib
from typing import Any

import grpc

from rankbook import v1

from .support import SERVICE, Raw, failure_of, failure_of_rpc, record, span

_ROOM = 64 << 20
_LARGE = 1 << 20


def _rss_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))


def test_large_requests_that_wait_are_refused_over_the_bound_and_free_it_when_they_end(
    rankbookd: Any,
) -> None:
    server = rankbookd()
    large = v1.GetTopologyRequest(
        engine_id="later", wait=span(60), known_book_id="x" * (_LARGE - 200)
    )
    fits = _ROOM // large.ByteSize()
    with Raw(server.grpc) as raw:
        method = raw.channel.unary_unary(SERVICE + "GetTopology")
        calls = [method.future(large.SerializeToString(), timeout=60) for _ in range(fits + 1)]
        # Whichever comes last is refused; the others wait.
        ended: list[Any] = []
        while not ended:
            assert raw.call("GetStatus", v1.GetStatusRequest()).store_available
            ended = [call for call in calls if call.done()]
        (refused,) = ended
        assert failure_of_rpc(refused.exception()).reason == "TOO_MANY_CALLS"
        with raw.session() as session:
            number = session.send("get_topology", large)
            reply = session.take()
            assert reply.request_id == number
            error = failure_of(reply.status)
            assert (error.reason, error.metadata["bound"]) == ("TOO_MANY_CALLS", str(_ROOM))
            session.call("get_status", v1.GetStatusRequest())
            for call in calls:
                call.cancel()
            # Once the server has heard of it, the session's own may wait, and end.
            while True:
                number = session.send("get_topology", large)
                session.send("get_status", v1.GetStatusRequest())
                if session.take().WhichOneof("reply") == "get_status":
                    break
                session.take()
            session.cancel(number)
            assert failure_of(session.take().status).reason == "CANCELLED"


def test_streams_that_nobody_reads_hold_up_no_other_call(rankbookd: Any) -> None:
    server = rankbookd()
    payload = b"x" * (512 << 10)
    with Raw(server.grpc) as raw, contextlib.ExitStack() as stack:
        for tp in range(16):
            raw.register([record("big", tp=tp, tp_size=16, payload=payload)])
        before = _rss_kib(server.pid)
        wanted = v1.GetTopologyRequest(engine_id="big", require=v1.REQUIREMENT_ANY)
        other = stack.enter_context(Raw(server.grpc))
        unread = [other.stream("StreamTopology", wanted, 60.0) for _ in range(60)]
        unread += [other.stream("Watch", v1.WatchRequest(), 60.0) for _ in range(60)]
        for _ in range(100):
            assert raw.call("GetStatus", v1.GetStatusRequest(), 2.0).store_available
        # In their first parts alone they would take 720 MiB, sent and made.
        assert _rss_kib(server.pid) - before < 480 * 1024
        for stream in unread:
            stream.cancel()
        with contextlib.suppress(grpc.RpcError):
            next(unread[0])
        parts = raw.stream("StreamTopology", wanted)
        assert sum(len(part.topologies[0].workers) for part in parts) == 16
    assert "ExecuteBatchError" not in server.log, server.log[-6000:]
