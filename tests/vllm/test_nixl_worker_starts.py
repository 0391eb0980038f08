"""NIXL\'s workers with the book: each request reaches its own start of its peer.

See `nixl_desk` for what is real in these tests.
"""

import importlib.util
import threading
import time
import warnings
from concurrent.futures import Future

import pytest

from rankbook.model import State

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    from tests.vllm.nixl_desk import (
        BLOCKS,
        PEER,
        Pull,
        Push,
        both,
        consumer,
        log,
        paired,
        producer,
        reached,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        HeartbeatInfo,
        NixlConnectorMetadata,
    )


# ------------------------------------------------------------------- orders to fail


@both
def test_an_order_to_fail_is_reported_by_vllm_with_the_blocks(consumer, kind):
    desk = consumer(kind)
    desk.step(failed=["r1"])
    results, invalid = desk.results()
    assert (results.failed_recving, results.finished_recving) == ({"r1"}, {"r1"})
    assert invalid == {7, 8}
    assert desk.worker._recving_metadata == {}
    assert desk.failed() == set()  # once


# ------------------------------------------------------------- one start after another


@both
def test_a_request_reaches_the_start_that_it_is_of(consumer, kind):
    desk = consumer(kind)
    desk.book.put(desk.peer("g1"))
    desk.step(r1="g1")
    desk.settle()
    desk.step()
    assert reached(desk) == {"r1": "g1"}


@both
def test_a_pairing_that_is_over_is_dropped_by_a_step_and_by_no_other_thread(consumer, kind):
    desk = paired(consumer(kind))
    other = threading.Thread(target=desk.book.put, args=(desk.peer("g2"),))
    other.start()
    other.join()
    desk.settle()
    assert desk.worker.cleaned == []
    desk.step()
    assert desk.worker.cleaned == [(PEER, threading.current_thread())]
    assert desk.empty()
    assert not desk.pairs.is_over(PEER)


@both
def test_the_next_start_is_shaken_hands_with_after_the_drop(consumer, kind):
    desk = paired(consumer(kind))
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.settle()
    desk.step()
    assert reached(desk) == {"r2": "g2"}
    assert len(desk.nixl.agents) == 1


def test_a_read_under_way_keeps_the_old_pairing_and_holds_the_next_request(consumer):
    desk = paired(consumer(Pull))
    desk.step(r1="g1")
    (handle,) = desk.worker._recving_transfers["r1"]
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.settle()
    assert desk.worker.cleaned == []
    assert set(desk.half.held) == {"r2"}
    assert reached(desk) == {"r1": "g1"}
    desk.nixl.transfers[handle] = "DONE"
    desk.results()
    assert len(desk.worker.cleaned) == 1
    desk.step()
    desk.settle()
    desk.step()
    assert desk.half.held == {}
    assert reached(desk) == {"r1": "g1", "r2": "g2"}


def test_a_request_that_is_held_too_long_fails(consumer, log):
    desk = paired(consumer(Pull, peer_timeout_s=0.0))
    desk.step(r1="g1")
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.step()
    assert desk.failed() == {"r2"}
    assert desk.half.held == {}
    assert "request r2 fails: transfers of the last start of peer-0" in log.text


def test_a_notice_that_nobody_waits_for_is_never_reported_though_held_too_long(consumer):
    desk = paired(consumer(Pull, peer_timeout_s=0.0))
    desk.step(r1="g1")
    desk.book.put(desk.peer("g2"))
    desk.step()
    meta = NixlConnectorMetadata()
    desk.receive(meta, "aborted", "", blocks=[])
    desk.worker.start_load_kv(meta)
    assert set(desk.half.held) == {"aborted"}
    desk.step()
    assert desk.half.held == {}
    assert desk.failed() == set()
    assert "aborted" not in desk.worker._recving_metadata


@both
def test_a_handshake_under_way_keeps_the_pairing(consumer, kind):
    desk = paired(consumer(kind))
    desk.book.put(desk.peer("g2"))
    desk.worker._handshake_futures[PEER] = Future()
    desk.step()
    assert desk.worker.cleaned == []
    del desk.worker._handshake_futures[PEER]
    desk.step()
    assert len(desk.worker.cleaned) == 1


def test_what_the_writer_holds_is_not_dropped_and_not_waited_for(consumer):
    desk = paired(consumer(Push))
    desk.book.put(desk.peer("g2"))
    with desk.half.touching:
        desk.step()
        assert desk.worker.cleaned == []
    desk.step()
    assert len(desk.worker.cleaned) == 1


def test_a_fleet_that_starts_anew_is_let_go_one_at_a_step(producer):
    desk = producer()
    peers = [f"peer-{number}" for number in range(4)]
    desk.book.put(*(desk.peer("g1", engine_id=one) for one in peers))
    for one in peers:
        desk.worker._ensure_handshake(one, one, 0, 1)
    desk.settle()
    desk.book.put(*(desk.peer("g2", engine_id=one) for one in peers))
    for steps in range(1, 5):
        desk.step()
        assert len(desk.worker.cleaned) == steps
    assert desk.empty()


@both
@pytest.mark.parametrize("refused", ["remove", "release"])
def test_a_nixl_that_gives_nothing_back_ends_no_step_loop(consumer, log, kind, refused):
    desk = paired(consumer(kind))
    # Only what is read and written is prepared: a push's consumer has no handle.
    desk.worker.dst_xfer_side_handles.setdefault(PEER, {})[9] = desk.nixl.prepare()
    desk.nixl.refuses = (refused,)
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.nixl.refuses = ()
    desk.settle()
    desk.step()
    assert reached(desk) == {"r2": "g2"}
    assert "could not let go of peer-0" in log.text


@both
def test_two_starts_in_one_step_reach_no_start_but_their_own(consumer, kind):
    desk = paired(consumer(kind))
    desk.book.put(desk.peer("g2"))
    desk.step(old="g1", new="g2")
    desk.settle()
    assert desk.failed() == {"old"}
    desk.step()
    assert reached(desk) == {"new": "g2"}


def test_a_read_that_waited_for_its_handshake_reads_from_no_later_start(consumer):
    desk = consumer(Pull)
    desk.book.put(desk.peer("g1"))
    desk.step(r1="g1")
    desk.settle()  # shaken hands with the first start; the read is next
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.settle()
    assert desk.failed() == {"r1"}
    desk.step()
    assert reached(desk) == {"r2": "g2"}


def test_a_registration_that_waited_for_its_handshake_goes_to_no_later_start(consumer):
    desk = consumer(Push)
    desk.book.put(desk.peer("g1"))
    desk.step(r1="g1")
    desk.worker.write()
    desk.book.serve()
    desk.thread.run()  # the registration is next
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.settle()
    assert reached(desk) == {"r2": "g2"}
    assert desk.failed() == {"r1"}


def test_a_request_held_for_a_start_that_is_over_meanwhile_fails(consumer):
    desk = paired(consumer(Pull))
    desk.step(r1="g1")
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.book.put(desk.peer("g3"))
    desk.step(r3="g3")
    assert desk.failed() == {"r2"}
    assert set(desk.half.held) == {"r3"}


def test_a_registration_that_shared_an_older_starts_handshake_waits_for_its_own(consumer):
    desk = consumer(Push)
    desk.book.put(desk.peer("g1"))
    desk.step(r1="g1")
    desk.worker.write()
    desk.book.serve()  # the handshake with the first start is about to be made
    desk.book.put(desk.peer("g2"))
    desk.step(r2="g2")
    desk.settle()
    assert set(desk.half.unsent) == {"r2"}
    desk.step()
    desk.settle()
    assert desk.failed() == {"r1"}
    assert reached(desk) == {"r2": "g2"}
    assert desk.half.unsent == {}
    assert desk.half.orphans == {}


def test_a_dead_consumers_push_takes_nobody_with_it(producer, log):
    desk = producer()
    desk.book.put(desk.peer("g2"))
    desk.worker._reqs_to_process.add("p1")
    desk.worker._do_start_push_kv("p1", BLOCKS, desk.registration("p1-there", "g1"))
    assert desk.worker._handshake_futures == {}
    assert "request p1 is not sent" in log.text
    desk.push("p2", "g2")
    assert reached(desk) == {"p2": "g2"}


@both
def test_a_handshake_that_has_just_been_made_is_not_forgotten(consumer, kind):
    """vLLM takes the future away and puts the agents down under its lock."""
    desk = paired(consumer(kind))
    agents = desk.worker._remote_agents.pop(PEER)  # between the two
    desk.book.put(desk.peer("g2"))
    entered, done = threading.Event(), threading.Event()

    def callback():
        with desk.worker._handshake_lock:
            entered.set()
            done.wait(5)
            desk.worker._remote_agents[PEER] = agents

    thread = threading.Thread(target=callback)
    thread.start()
    entered.wait(5)
    threading.Timer(0.1, done.set).start()
    desk.step()
    thread.join()
    assert desk.pairs.is_over(PEER) or PEER not in desk.worker._remote_agents


# ------------------------------------------------------------------------- heartbeats


def beat(desk):
    """A step in which a request of the peer still waits in the scheduler's queue."""
    meta = NixlConnectorMetadata()
    meta.heartbeat_by_engine = {
        PEER: HeartbeatInfo(req_ids={"queued"}, host=PEER, port=0, tp_size=1)
    }
    desk.worker.start_load_kv(meta)
    return meta


def started_anew(desk, **changes):
    """A consumer that has let go of the first start, of which its last request was."""
    desk = paired(desk)
    desk.book.put(desk.peer("g2", **changes))
    desk.step()
    assert PEER not in desk.worker._remote_agents
    return desk


@both
def test_a_request_shares_the_handshake_of_a_heartbeat_to_its_start(consumer, kind):
    desk = started_anew(consumer(kind))
    beat(desk)
    desk.step(second="g2")  # the heartbeat's handshake has not been made yet
    desk.settle()
    desk.step()
    desk.settle()
    assert desk.failed() == set()
    assert reached(desk) == {"second": "g2"}


@both
def test_a_heartbeat_that_waits_for_a_start_does_not_fail_the_request_of_the_next(consumer, kind):
    desk = started_anew(consumer(kind), state=State.FORMING)
    beat(desk)
    desk.settle()
    assert PEER in desk.worker._handshake_futures
    desk.book.put(desk.peer("g3"))
    desk.step(third="g3")
    desk.settle()
    desk.step()
    desk.settle()
    assert desk.failed() == set()
    assert reached(desk) == {"third": "g3"}


@both
def test_a_heartbeat_reaches_the_next_start_and_says_no_error(consumer, log, kind):
    desk = started_anew(consumer(kind))
    for _ in range(3):
        beat(desk)
        desk.settle()
    assert [notice for _, notice in desk.nixl.sent] == [b"HB:queued"] * 2  # the first shook hands
    assert desk.pairs.counted().get("refused", 0) == 0
    assert desk.worker.xfer_stats.is_empty()
    assert "of start g1" not in log.text


@both
@pytest.mark.parametrize("state", [State.GONE, State.DEGRADED], ids=str)
def test_a_heartbeat_to_a_peer_that_the_book_refuses_is_not_tried(consumer, kind, state):
    desk = started_anew(consumer(kind), state=state)
    for _ in range(3):
        meta = beat(desk)
        desk.settle()
    assert meta.heartbeat_by_engine == {}
    assert desk.pairs.counted().get("refused", 0) == 0
    assert desk.worker.xfer_stats.is_empty()


@both
def test_a_request_of_the_old_start_is_refused_whatever_a_heartbeat_reached(consumer, kind):
    desk = started_anew(consumer(kind))
    beat(desk)
    desk.settle()
    desk.step(old="g1")
    desk.settle()
    desk.step()
    desk.settle()
    assert desk.failed() == {"old"}
    assert reached(desk) == {}


# ---------------------------------------------------------------------- what is kept


@both
def test_a_start_that_is_bound_after_the_engine_is_gone_is_not_kept(consumer, kind):
    """The engine core heard of its end later."""
    desk = consumer(kind)
    desk.book.put(desk.peer("g1", state=State.GONE))
    desk.step(late="g1")
    desk.settle()
    assert desk.failed() == {"late"}
    assert desk.pairs.bound(PEER) == ""


def test_an_engine_that_a_notice_names_and_nobody_knows_is_not_kept(producer):
    desk = producer()
    desk.push("p1")
    assert desk.pairs.bound(PEER) == "g1"
    desk.book.time_out(PEER)
    assert desk.pairs.bound(PEER) == ""


@both
def test_nothing_is_remembered_of_an_engine_that_came_and_went(consumer, kind):
    desk = paired(consumer(kind))
    desk.now_s = time.monotonic()
    desk.book.put(desk.peer("g1", state=State.GONE))
    desk.step()
    assert desk.empty()
    assert desk.pairs.bound(PEER) == ""
    assert not desk.pairs.over()
    kept = [value for value in vars(desk.half).values() if isinstance(value, dict | list)]
    assert kept
    assert not any(kept)
