"""Over a written bound: a typed error, never growth; and the next good call is answered."""

from __future__ import annotations

import contextlib
from typing import Any

import grpc
import pytest

from rankbook import v1

from .support import SERVICE, Failure, Raw, failure_of, failure_of_rpc, grid, record, span


def test_sessions_over_the_bound_are_refused(rankbookd: Any) -> None:
    server = rankbookd("--max-sessions", "2")
    with Raw(server.grpc) as raw, raw.session() as one, raw.session() as two:
        one.call("get_status", v1.GetStatusRequest())
        assert two.call("get_status", v1.GetStatusRequest()).sessions == 2
        with raw.session() as three:
            three.send("get_status", v1.GetStatusRequest())
            with pytest.raises(grpc.RpcError) as caught:
                three.take()
            error = failure_of_rpc(caught.value)
            assert (error.reason, error.metadata["bound"]) == ("TOO_MANY_SESSIONS", "2")
        assert two.call("get_status", v1.GetStatusRequest()).store_available


def test_watchers_waiters_leases_engines_and_namespaces_are_bounded(rankbookd: Any) -> None:
    server = rankbookd(
        *("--max-watchers", "1", "--max-waiters", "1", "--max-leases", "3"),
        *("--max-engines", "2", "--max-namespaces", "1"),
    )
    with Raw(server.grpc) as raw, raw.session() as session:
        assert session.send("watch", v1.WatchRequest(namespace="default")) == 1
        assert session.take().watch.synced
        watch = raw.stream("Watch", v1.WatchRequest())
        with pytest.raises(grpc.RpcError) as caught:
            next(watch)
        assert failure_of_rpc(caught.value).reason == "TOO_MANY_WATCHERS"
        session.cancel(1)
        assert failure_of(session.take().status).reason == "CANCELLED"

        wait = v1.GetTopologyRequest(engine_id="later", wait=span(60))
        held = session.send("get_topology", wait)
        # Calls of a session are taken up in order, so the wait is on once this is answered.
        session.call("get_status", v1.GetStatusRequest())
        with pytest.raises(Failure, match="TOO_MANY_WAITERS"):
            raw.call("GetTopology", wait)
        session.cancel(held)
        assert failure_of(session.take().status).reason == "CANCELLED"

        raw.register(grid("e1"))
        raw.register(grid("e2"))
        with pytest.raises(Failure, match="TOO_MANY_ENGINES") as over:
            raw.register(grid("e3"))
        assert over.value.metadata["bound"] == "2"
        raw.register([record("e1", generation="g2")])
        with pytest.raises(Failure, match="TOO_MANY_LEASES"):
            raw.register([record("e1", tp=1, generation="g2")])
        with pytest.raises(Failure, match="TOO_MANY_ENGINES"):
            raw.call(
                "BeginGeneration",
                v1.BeginGenerationRequest(namespace="another", engine_id="e", generation="g"),
            )
        status = raw.call("GetStatus", v1.GetStatusRequest())
        assert (sum(status.engines.values()), status.leases) == (2, 3)
        assert status.watchers == 0


def test_a_client_that_takes_no_replies_stops_being_read_and_costs_little(rankbookd: Any) -> None:
    server = rankbookd()
    with Raw(server.grpc) as raw, raw.session() as greedy:
        raw.register([record(payload=b"x" * 500_000)])
        before = _rss_kib(server.pid)
        wanted = v1.GetTopologyRequest(engine_id="prefill-a-0", require=v1.REQUIREMENT_ANY)
        for _ in range(2000):
            greedy.send("get_topology", wanted)
        for _ in range(50):
            assert raw.call("GetStatus", v1.GetStatusRequest()).store_available
        # All replies together would be a gigabyte.
        assert _rss_kib(server.pid) - before < 64 * 1024


def _rss_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    raise AssertionError("no VmRSS")


def test_metric_labels_do_not_grow_with_namespaces(rankbookd: Any) -> None:
    server = rankbookd()
    with Raw(server.grpc) as raw:
        for number in range(50):
            raw.call(
                "BeginGeneration",
                v1.BeginGenerationRequest(namespace=f"n{number}", engine_id="e", generation="g"),
            )
    lines = [n for n in server.get("/metrics").splitlines() if n.startswith("rankbook_workers{")]
    assert len(lines) == 33


def test_a_long_plan_holds_up_no_other_call_and_one_without_bounds_is_refused(
    rankbookd: Any,
) -> None:
    server = rankbookd()
    with Raw(server.grpc) as raw, raw.session() as session:
        raw.register(grid("e", pp_size=4, model=v1.Model(total_num_kv_heads=8)))
        wide = v1.PlanTransferRequest(
            producer_engine_id="e", consumer_layout=v1.ConsumerLayout(tp_size=8192)
        )
        plan = session.send("plan_transfer", wide)
        status = session.send("get_status", v1.GetStatusRequest())
        assert [session.take().request_id for _ in range(2)] == [status, plan]
        for size in ({"tp_size": 2**32 - 1}, {"tp_size": 1, "pp_size": 2**32 - 1}):
            endless = v1.PlanTransferRequest(
                producer_engine_id="e", consumer_layout=v1.ConsumerLayout(**size)
            )
            with pytest.raises(Failure, match="LIMIT_EXCEEDED"):
                session.call("plan_transfer", endless)
        assert session.call("get_status", v1.GetStatusRequest()).store_available


def test_a_burst_of_new_calls_gets_an_answer_of_ours_for_every_one(rankbookd: Any) -> None:
    server = rankbookd()
    request = v1.GetTopologyRequest(engine_id="nobody", wait=span(1)).SerializeToString()
    with contextlib.ExitStack() as stack:
        raws = [stack.enter_context(Raw(server.grpc)) for _ in range(16)]
        for raw in raws:
            raw.call("GetStatus", v1.GetStatusRequest())
        methods = [raw.channel.unary_unary(SERVICE + "GetTopology") for raw in raws]
        calls = [methods[n % 16].future(request, timeout=60) for n in range(9000)]
        reasons = {failure_of_rpc(call.exception()).reason for call in calls}
    assert reasons == {"ENGINE_NOT_FOUND"}
