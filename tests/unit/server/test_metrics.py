"""What is counted, and under how many labels."""

from __future__ import annotations

import asyncio

from rankbook_server.metrics import Metrics

from .support import running


def lines(metrics: Metrics) -> list[str]:
    return metrics.exposition().decode().splitlines()


def test_calls_are_counted_by_reason_and_timed_only_where_they_did_not_wait() -> None:
    metrics = Metrics()
    metrics.answered("GetTopology", "OK", 0.0007)
    metrics.answered("GetTopology", "OK")
    metrics.answered("GetTopology", "ENGINE_GONE", 0.2)
    found = lines(metrics)
    assert 'rankbook_calls_total{method="GetTopology",reason="OK"} 2.0' in found
    assert 'rankbook_calls_total{method="GetTopology",reason="ENGINE_GONE"} 1.0' in found
    assert 'rankbook_call_seconds_count{method="GetTopology"} 2.0' in found
    assert 'rankbook_call_seconds_bucket{le="0.001",method="GetTopology"} 1.0' in found


def test_gauges_read_what_is_there_when_they_are_asked_for() -> None:
    async def run() -> None:
        async with running() as bench:
            metrics = Metrics()
            metrics.observe(bench.registry, lambda: 4, lambda: 5)
            assert "rankbook_revision 0.0" in lines(metrics)
            await bench.register()
            found = lines(metrics)
            assert 'rankbook_engines{namespace="n",state="FORMING"} 1.0' in found
            assert "rankbook_leases 1.0" in found
            assert "rankbook_watchers 4.0" in found
            assert "rankbook_sessions 5.0" in found

    asyncio.run(run())
