"""The clock of a peer's engine core, by way of a real registry, on shifted clocks.

Both ends of a test run on one machine, whose performance counter they share; so
the peer's is shifted by a known distance, which must come out.
"""

from __future__ import annotations

import dataclasses
import logging
import time

import pytest

import rankbook
from rankbook_vllm.clocks import clock_pair
from rankbook_vllm.config import Settings
from rankbook_vllm.peers import PeerBook


@pytest.fixture
def book(shared_rankbookd):
    made = PeerBook(Settings(endpoints=(shared_rankbookd.grpc,)), logging.getLogger("rankbook"))
    made.start()
    yield made
    made.close()


@pytest.mark.parametrize("shift_s", [123_456.789, -98_765.4321])
def test_a_shifted_clock_is_known_within_its_error(
    shared_rankbookd, book, engine_id, made, shift_s
):
    with rankbook.Client(shared_rankbookd.grpc) as client:
        client.register_workers(
            [made.record(engine_id)], sequence=1, lease_key=engine_id, ttl_s=300
        )
        topology = client.get_topology(engine_id, require=rankbook.Requirement.COMPLETE)
        pair = clock_pair(client, lambda: time.perf_counter() + shift_s)
        core = dataclasses.replace(made.core("core"), clock=pair)
        client.seal_engine(
            engine_id, "g1", made.seal_slots(topology), core, lease_key=f"{engine_id}-core"
        )
    peer = book.wait(engine_id, timeout_s=10)
    # Its own distance to the registry is measured in the background.
    made.eventually(lambda: book.clock_of(peer) is not None, 10, "the clock is measured")
    found = book.clock_of(peer)
    assert abs(found.offset_s - shift_s) <= found.error_s
    # Loopback: the bound is worth something. NIXL's own margin is 5 s.
    assert found.error_s < 1.0
