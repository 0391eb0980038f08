"""NIXL\'s workers with the book: what becomes of who waits when a peer ends.

See `nixl_desk` for what is real in these tests.
"""

import importlib.util
import time
import warnings

import pytest

from rankbook.model import Slot, State

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    from tests.vllm.nixl_desk import (
        LEASE_S,
        PEER,
        STAGES,
        consumer,
        log,
        producer,
        reached,
        said,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        NixlConnectorMetadata,
    )

    from rankbook_vllm._vllm import nixl_worker


# ---------------------------------------------------------------- waiting for a push


def waiting(desk):
    """A consumer whose request waits for a push of the first start."""
    desk.book.put(desk.peer("g1"))
    desk.step(r1="g1")
    desk.settle()
    assert reached(desk) == {"r1": "g1"}
    return desk


def test_who_waits_for_a_producer_that_surely_ended_fails_at_once_and_once(consumer, log):
    desk = waiting(consumer())
    desk.book.put(desk.peer("g1", state=State.GONE))
    desk.now_s = time.monotonic() - 1  # deadlines are on the process's clock
    desk.book.tell(PEER)
    desk.step()
    assert desk.failed() == {"r1"}
    desk.step()
    assert desk.failed() == set()
    assert desk.half.orphans == {}
    assert said(log, "request r1 fails") == 1


def test_who_waits_for_a_producer_that_may_still_write_waits_out_its_lease(consumer):
    desk = consumer()
    start_s = time.monotonic()
    desk.now_s = start_s
    waiting(desk)
    desk.book.put(desk.peer("g2"))
    desk.step()
    assert desk.failed() == set()
    ((engine_id, until_s),) = desk.half.orphans.values()
    assert (engine_id, until_s) == (PEER, start_s + LEASE_S)
    desk.half.orphans["r1"] = (PEER, start_s)  # the lease is over
    desk.step()
    assert desk.failed() == {"r1"}


def test_kv_that_comes_within_the_lease_is_taken(consumer):
    desk = consumer()
    desk.now_s = time.monotonic()
    waiting(desk)
    desk.book.put(desk.peer("g2"))
    desk.step()
    desk.worker._pending_completion_notifs.put(b"r1:1")
    results, _ = desk.results()
    assert (results.finished_recving, results.failed_recving) == ({"r1"}, set())
    desk.step()
    assert desk.half.orphans == {}


def test_one_that_waits_for_nothing_is_no_orphan(consumer):
    """vLLM keeps a push request that was aborted, or whose tokens were all here, for ever;
    an engine core that hears of it again dies."""
    desk = waiting(consumer())
    meta = NixlConnectorMetadata()
    desk.receive(meta, "aborted", "", blocks=[])
    meta.push_registrations.clear()
    desk.worker.start_load_kv(meta)
    assert "aborted" in desk.worker._recving_metadata
    desk.now_s = time.monotonic() - 1
    desk.book.put(desk.peer("g1", state=State.GONE))
    desk.step()
    assert desk.failed() == {"r1"}


DEGRADED = {"state": State.DEGRADED, "layout": STAGES, "without": (1,), "missing": (Slot(1),)}


def waiting_for_stages(desk):
    """A consumer whose request waits for a push of two stages, of which one has come."""
    desk.now_s = time.monotonic()
    desk.book.put(desk.peer("g1", layout=STAGES))
    meta = NixlConnectorMetadata()
    desk.receive(meta, "r1", "g1")
    meta.push_registrations["r1"]["remote_pp_size"] = meta.reqs_to_recv["r1"].pp_size = 2
    desk.worker.start_load_kv(meta)
    desk.settle()
    assert len(desk.nixl.sent) == 2
    return desk


def test_who_waits_for_a_producer_that_lost_a_stage_fails_when_a_lease_is_over(consumer, log):
    """Such an engine is not GONE, and no token will ever come from it."""
    desk = waiting_for_stages(consumer())
    desk.now_s -= 2 * LEASE_S
    desk.book.put(desk.peer("g1", **DEGRADED))
    desk.now_s += LEASE_S - 1
    desk.step()
    assert desk.failed() == set()
    assert desk.half.orphans == {}
    desk.now_s += 2
    desk.step()
    assert desk.failed() == {"r1"}
    desk.step()
    assert desk.failed() == set()
    assert said(log, "request r1 fails") == 1


def test_a_stage_that_returns_in_time_fails_nobody(consumer):
    desk = waiting_for_stages(consumer())
    desk.now_s -= 2 * LEASE_S
    desk.book.put(desk.peer("g1", **DEGRADED))
    desk.now_s += LEASE_S - 1
    desk.step()
    desk.book.put(desk.peer("g1", layout=STAGES))
    desk.now_s += LEASE_S
    desk.step()
    desk.book.put(desk.peer("g1", **DEGRADED))  # from now on, not from then
    desk.step()
    assert desk.failed() == set()
    assert desk.half.orphans == {}


# ------------------------------------------------------------------------- pushing


def test_a_push_reaches_the_start_that_asked(producer):
    desk = producer()
    desk.book.put(desk.peer("g1"))
    desk.push("p1")
    assert reached(desk) == {"p1": "g1"}


def test_a_push_under_way_keeps_the_pairing_and_parks_the_next_start(producer):
    desk = producer()
    desk.book.put(desk.peer("g1"))
    desk.push("p1")
    desk.book.put(desk.peer("g2"))
    desk.push("p2", "g2")
    assert [one[0] for one in desk.half.parked] == ["p2"]
    assert desk.worker.cleaned == []
    (handle,) = desk.worker._sending_transfers["p1"]
    desk.nixl.transfers[handle] = "DONE"
    desk.results()
    assert len(desk.worker.cleaned) == 1
    desk.step()
    desk.settle()
    assert reached(desk) == {"p1": "g1", "p2": "g2"}
    assert desk.half.parked == []


def test_a_push_that_is_parked_until_its_blocks_are_freed_never_goes(producer, log):
    desk = producer()
    desk.book.put(desk.peer("g1"))
    desk.push("p1")
    desk.book.put(desk.peer("g2"))
    desk.push("p2", "g2")
    desk.worker._reqs_to_send["p2"] = 0.0  # its lease is over
    (handle,) = desk.worker._sending_transfers["p1"]
    desk.nixl.transfers[handle] = "DONE"
    assert "p2" in desk.results()[0].finished_sending
    desk.step()
    desk.settle()
    assert reached(desk) == {"p1": "g1"}
    assert desk.half.parked == []
    assert (
        "p2-there of peer-0 waited for the blocks of request p2 until they were freed" in log.text
    )
    assert desk.pairs.counted()["late"] == 1


def test_a_consumer_that_died_after_it_asked_takes_nothing_from_the_next_start(producer):
    desk = producer()
    desk.book.put(desk.peer("g2"))
    desk.push("p2", "g2")
    desk.push("p1", "g1")  # the notice had come before the restart
    desk.step()
    assert not desk.pairs.is_over(PEER)
    desk.push("p3", "g2")
    assert reached(desk) == {"p2": "g2", "p3": "g2"}
    assert [one[0] for one in desk.half.parked] == ["p1"]


def test_a_consumer_that_this_book_does_not_know_yet_is_waited_for(producer):
    desk = producer()
    desk.book.put(desk.peer("g1"))
    desk.push("p1")
    (handle,) = desk.worker._sending_transfers["p1"]
    desk.nixl.transfers[handle] = "DONE"
    desk.results()
    desk.push("p2", "g2")  # the book is late
    desk.step()
    desk.settle()
    assert reached(desk) == {"p1": "g1"}
    desk.book.put(desk.peer("g2"))
    for _ in range(2):
        desk.step()
        desk.settle()
    assert reached(desk) == {"p1": "g1", "p2": "g2"}


def test_pushes_that_are_over_are_not_remembered(producer):
    desk = producer()
    desk.book.put(desk.peer("g1"))
    for number in range(20):
        desk.push(f"p{number}")
        (handle,) = desk.worker._sending_transfers[f"p{number}"]
        desk.nixl.transfers[handle] = "DONE"
        desk.results()
    assert desk.half.pushes == {}


# ------------------------------------------------------------------ late registrations

SHARED = "cmpl-1-0"
OURS, THEIRS = f"{SHARED}-0a1b2c3d", f"{SHARED}-99887766"


def freed(desk, request_id=OURS):
    """A request whose blocks were freed before anybody asked."""
    desk.worker._reqs_to_process.add(request_id)
    desk.step(finished=[request_id])
    desk.worker._reqs_to_send[request_id] = 0.0
    assert desk.results()[0].finished_sending == {request_id}
    return desk


def test_a_registration_that_comes_too_late_is_said_counted_and_not_kept(producer, log):
    desk = freed(producer())
    desk.say(THEIRS)
    assert desk.worker._pending_d_registrations == {}
    assert desk.pairs.counts["late"] == 1
    assert OURS in log.text
    assert THEIRS in log.text
    assert PEER in log.text


def test_a_registration_that_comes_early_stays(producer):
    desk = freed(producer())
    desk.say("cmpl-2-0-99887766")
    assert set(desk.worker._pending_d_registrations) == {"cmpl-2-0-99887766"}
    assert desk.pairs.counts["late"] == 0


def test_an_id_that_a_client_uses_again_is_not_late(producer):
    desk = freed(producer())
    desk.step(in_batch=[f"{SHARED}-11111111"])
    desk.say(THEIRS)
    assert set(desk.worker._pending_d_registrations) == {THEIRS}


def test_no_more_than_a_few_thousand_freed_requests_are_remembered(producer):
    desk = producer()
    nixl_worker._note_freed(desk.worker, (f"r{number}" for number in range(5000)))
    assert len(desk.half.freed) == 4096
    assert "r4999" in desk.half.freed
    assert "r0" not in desk.half.freed
