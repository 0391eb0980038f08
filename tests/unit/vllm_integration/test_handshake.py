"""Handshakes are answered from the book: who may pair, with what, and until when."""

import dataclasses
import itertools
import logging
import threading
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor

import pytest
from tests.unit.vllm_integration.books import HandBook, engine

from rankbook.errors import (
    BadRequest,
    DeadlineExceeded,
    Gone,
    Incompatible,
    Incomplete,
    NotFound,
    Reason,
    TransferError,
)
from rankbook.model import Layout, Role, Slot, State
from rankbook_vllm.config import Settings
from rankbook_vllm.handshake import Call, Gate, Pairs, check_pair, check_peers, payloads_of

PRODUCER = "prefill-a-0"
OWN = "decode-a-0"
LEASE_S = 30.0
GRID = Layout(pp_size=2, tp_size=2, num_layers=4)
STAGES = Layout(pp_size=2, tp_size=1, num_layers=4)
ONE = Layout(pp_size=1, tp_size=1, num_layers=4)


def consumer(**changes):
    return engine(OWN, **({"role": Role.CONSUMER, "payload": b"decode"} | changes))


# ------------------------------------------------------------------------ payloads


def test_every_stage_gives_the_payload_of_every_rank_that_is_asked():
    assert payloads_of(engine(layout=GRID), [0, 1]) == {
        (pp, tp): b"agent pp%d tp%d" % (pp, tp) for pp in (0, 1) for tp in (0, 1)
    }


def test_only_the_ranks_that_are_asked_are_given():
    assert set(payloads_of(engine(layout=GRID), [1])) == {(0, 1), (1, 1)}


def test_ranks_of_dcp_over_pcp_are_found_by_both_numbers():
    layout = Layout(pp_size=1, tp_size=2, num_layers=4, pcp_size=2, dcp_size=4)
    whole = engine(layout=layout)
    slots = [Slot(0, pcp, tp) for pcp in (0, 1) for tp in (0, 1)]
    workers = tuple(
        dataclasses.replace(
            whole.workers[0],
            slot=slot,
            handshake=dataclasses.replace(
                whole.workers[0].handshake, payload=b"%d%d" % (slot.pcp_rank, slot.tp_rank)
            ),
        )
        for slot in slots
    )
    found = payloads_of(dataclasses.replace(whole, workers=workers), range(4))
    assert found == {(0, 0): b"00", (0, 1): b"01", (0, 2): b"10", (0, 3): b"11"}


def without_payload(topology, **changes):
    """The engine with its last worker's handshake changed; None where nothing is given."""
    *others, last = topology.workers
    handshake = dataclasses.replace(last.handshake, **changes) if changes else None
    changed = dataclasses.replace(last, handshake=handshake)
    return dataclasses.replace(topology, workers=(*others, changed))


@pytest.mark.parametrize(
    "peer",
    [
        engine(layout=STAGES, without=(1,)),
        without_payload(engine(layout=STAGES)),
        without_payload(engine(layout=STAGES), payload=b""),
    ],
    ids=["no worker", "no handshake", "withdrawn"],
)
def test_a_stage_that_is_not_there_is_never_left_out(peer):
    with pytest.raises(Incomplete) as caught:
        payloads_of(peer, [0])
    assert caught.value.metadata["missing"] == "pp1 tp0"


def test_another_connectors_payload_is_not_given_to_nixl():
    with pytest.raises(Incompatible) as caught:
        payloads_of(without_payload(engine(), format="vllm.mooncake"), [0])
    assert caught.value.metadata == {"producer": "vllm.mooncake", "consumer": "vllm.nixl"}


# --------------------------------------------------------------------- who may pair


def test_a_producer_of_two_stages_pushes_to_a_consumer_of_one():
    check_peers(engine(layout=STAGES), consumer())


def test_every_broken_rule_is_named_with_both_values():
    with pytest.raises(Incompatible) as caught:
        check_peers(
            engine(connector="NixlConnector", layout=STAGES),
            consumer(connector="NixlConnector", compat_hash="0ther"),
        )
    reasons = caught.value.metadata["reasons"].split(", ")
    assert {"PULL_PP_PRODUCER_UNSUPPORTED", "COMPAT_HASH_MISMATCH"} <= set(reasons)
    assert caught.value.metadata["producer"] == PRODUCER
    assert caught.value.metadata["consumer"] == OWN


def test_factors_that_differ_are_named_with_both_values():
    peer = engine(connector="NixlConnector", compat_hash="0ther")
    with pytest.raises(Incompatible, match="'NixlConnector' and 'NixlPushConnector'"):
        check_peers(peer, consumer())


@pytest.mark.parametrize(
    ("own_role", "peer_role", "notif_only", "we_consume"),
    [
        (Role.CONSUMER, Role.PRODUCER, True, True),
        (Role.CONSUMER, Role.BOTH, False, True),
        (Role.BOTH, Role.PRODUCER, False, True),
        (Role.BOTH, Role.BOTH, True, True),
        (Role.PRODUCER, Role.CONSUMER, False, False),
        (Role.PRODUCER, Role.BOTH, False, False),
        (Role.BOTH, Role.CONSUMER, False, False),
        (Role.BOTH, Role.BOTH, False, False),
    ],
)
def test_in_push_it_is_known_who_writes(own_role, peer_role, notif_only, we_consume):
    """Two stages may push, and may not be pushed to."""
    # The stages are the producer's: what is allowed tells the direction.
    layouts = (ONE, STAGES) if we_consume else (STAGES, ONE)
    own = engine(OWN, role=own_role, layout=layouts[0])
    peer = engine(role=peer_role, layout=layouts[1])
    pp_size = layouts[1].pp_size
    check_pair(own, peer, Call(PRODUCER, 1, pp_size=pp_size, notif_only=notif_only))
    # And the other way round they may not.
    own, peer = (
        engine(OWN, role=own_role, layout=layouts[1]),
        engine(role=peer_role, layout=layouts[0]),
    )
    with pytest.raises(Incompatible):
        check_pair(own, peer, Call(PRODUCER, 1, pp_size=layouts[0].pp_size, notif_only=notif_only))


def test_in_pull_of_two_that_do_both_who_calls_reads():
    def both(name, **more):
        return engine(name, role=Role.BOTH, connector="NixlConnector", **more)

    with pytest.raises(Incompatible) as caught:
        check_pair(both(OWN), both(PRODUCER, layout=STAGES), Call(PRODUCER, 1, pp_size=2))
    assert "PULL_PP_PRODUCER_UNSUPPORTED" in caught.value.metadata["reasons"]
    assert caught.value.metadata["producer"] == PRODUCER
    check_pair(both(OWN), both(PRODUCER), Call(PRODUCER, 1))


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"tp_size": 4}, "tp_size"), ({"dcp_size": 2}, "dcp_size"), ({"pp_size": 1}, "pp_size")],
)
def test_a_call_of_other_sizes_than_sealed_is_refused(changes, name):
    call = dataclasses.replace(Call(PRODUCER, 2, pp_size=2, notif_only=True), **changes)
    own = consumer(layout=Layout(1, 2, 4))
    with pytest.raises(TransferError) as caught:
        check_pair(own, engine(layout=GRID), call)
    assert caught.value.reason is Reason.ENGINE_INFO_CHANGED
    assert set(caught.value.metadata) == {name}


# ---------------------------------------------------------------------------- pairs


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def book():
    return HandBook(engine(), consumer())


@pytest.fixture
def pairs(book, clock):
    return Pairs(book, logging.getLogger("rankbook"), lease_s=LEASE_S, clock=clock)


def paired(book, pairs, **changes):
    peer = engine(**changes)
    book.put(peer)
    pairs.made(peer)
    assert not pairs.is_over(PRODUCER)
    return peer


OVER = {
    "another start": {"generation": "g2", "epoch": 2},
    "gone": {"state": State.GONE},
    "asleep": {"state": State.DEGRADED, "asleep": (Slot(),)},
    "other memory": {"payload": b"moved"},
}
NOT_OVER = {
    "half": {"state": State.DEGRADED, "layout": STAGES, "without": (1,)},
    "draining": {"state": State.DRAINING},
    "not sealed yet, with other memory": {"state": State.COMPLETE, "payload": b"moved"},
    "a new label": {"labels": {"zone": "b"}, "revision": 99},
}


@pytest.mark.parametrize("changes", OVER.values(), ids=OVER)
def test_a_pairing_is_over_when_the_peer_is_another(book, pairs, changes):
    paired(book, pairs)
    book.put(engine(**changes))
    assert pairs.is_over(PRODUCER)
    assert set(pairs.over()) == {PRODUCER}


@pytest.mark.parametrize("changes", NOT_OVER.values(), ids=NOT_OVER)
def test_a_pairing_outlasts_what_leaves_the_memory_where_it_is(book, pairs, changes):
    paired(book, pairs, **({"layout": changes["layout"]} if "layout" in changes else {}))
    book.put(engine(**changes))
    assert not pairs.is_over(PRODUCER)
    assert pairs.over() == {}


def test_a_book_that_was_lost_is_no_proof_that_a_peer_ended(book, pairs):
    paired(book, pairs)
    book.forget(PRODUCER)
    assert not pairs.is_over(PRODUCER)
    book.put(engine())
    assert not pairs.is_over(PRODUCER)
    book.forget(PRODUCER)
    book.put(engine(generation="g2", epoch=1))
    assert pairs.is_over(PRODUCER)


@pytest.mark.parametrize("changes", [{"state": State.GONE}, OVER["asleep"]], ids=["gone", "asleep"])
def test_a_peer_that_returns_unchanged_before_it_was_dropped_is_paired_still(book, pairs, changes):
    paired(book, pairs)
    book.put(engine(**changes))
    book.put(engine())
    assert not pairs.is_over(PRODUCER)


def test_nobody_is_over_whom_nobody_shook_hands_with(book, pairs):
    for changes in OVER.values():
        book.put(engine(**changes))
    book.forget(PRODUCER)
    assert pairs.over() == {}


def test_a_peer_that_changed_during_the_handshake_is_over_at_once(book, pairs):
    old = engine()
    book.put(engine(generation="g2", epoch=2))
    pairs.made(old)
    assert pairs.is_over(PRODUCER)


def test_an_old_word_that_arrives_late_ends_no_new_pairing(book, pairs):
    old = engine(state=State.GONE)
    paired(book, pairs, generation="g2", epoch=2)
    book.tell(PRODUCER, old)
    assert not pairs.is_over(PRODUCER)


def test_a_request_of_a_newer_start_ends_the_pairing_before_the_book_shows_it(book, pairs):
    paired(book, pairs)
    pairs.bind(PRODUCER, "g2")
    assert pairs.is_over(PRODUCER)
    # The copy is behind: that it still has the old start says nothing.
    book.put(engine(labels={"zone": "b"}))
    assert pairs.is_over(PRODUCER)


def test_a_request_of_a_newer_start_during_the_handshake_ends_it_too(book, pairs):
    pairs.bind(PRODUCER, "g2")
    pairs.made(engine())
    assert pairs.is_over(PRODUCER)


def test_a_request_of_the_paired_start_changes_nothing(book, pairs):
    paired(book, pairs)
    pairs.bind(PRODUCER, "g1")
    pairs.bind(PRODUCER, "")
    assert not pairs.is_over(PRODUCER)
    assert pairs.bound(PRODUCER) == "g1"


def test_any_start_will_do_until_a_request_names_one(pairs):
    assert pairs.bound(PRODUCER) == ""


def test_what_was_dropped_is_shaken_anew(book, pairs):
    paired(book, pairs)
    newer = engine(generation="g2", epoch=2)
    book.put(newer)
    pairs.dropped(PRODUCER)
    assert pairs.over() == {}
    pairs.bind(PRODUCER, "g2")
    pairs.made(newer)
    assert not pairs.is_over(PRODUCER)
    assert (pairs.counts["shaken"], pairs.counts["dropped"]) == (2, 1)


def test_from_workers_that_ended_nothing_comes_any_more(book, pairs, clock):
    paired(book, pairs)
    book.put(engine(state=State.GONE))
    clock.now_s += 5
    assert pairs.over()[PRODUCER] <= clock.now_s - 5


@pytest.mark.parametrize(
    "changes",
    [
        {"state": State.GONE, "lapsed": True},
        OVER["another start"],
        OVER["asleep"],
        OVER["other memory"],
        {"state": State.GONE, "generation": "g2", "epoch": 2},
    ],
    ids=["lapsed", "another start", "asleep", "other memory", "another start that died"],
)
def test_from_workers_that_may_run_still_something_may_come_for_as_long_as_a_lease(
    book, pairs, clock, changes
):
    paired(book, pairs)
    over_s = clock.now_s
    book.put(engine(**changes))
    clock.now_s += 5
    # Further news of the same end does not put it off.
    book.put(engine(**changes, labels={"zone": "b"}))
    assert pairs.over()[PRODUCER] == over_s + LEASE_S


def test_one_that_lapsed_and_is_known_to_have_ended_later_is_dead_from_then_on(book, pairs, clock):
    paired(book, pairs)
    book.put(engine(state=State.GONE, lapsed=True))
    book.put(engine(state=State.GONE))
    assert pairs.over()[PRODUCER] == clock.now_s


def test_workers_that_ended_stay_so_when_another_start_takes_their_place(book, pairs, clock):
    paired(book, pairs)
    ended_s = clock.now_s
    book.put(engine(state=State.GONE))
    clock.now_s += 5
    book.put(engine(generation="g2", epoch=2))
    assert pairs.over()[PRODUCER] == ended_s


def test_the_end_of_one_pairing_is_not_that_of_the_next(book, pairs, clock):
    paired(book, pairs)
    book.put(engine(state=State.GONE))
    clock.now_s += 5
    book.put(engine(generation="g3", epoch=3))
    pairs.made(engine(generation="g2", epoch=2))
    assert pairs.over()[PRODUCER] == clock.now_s + LEASE_S


def test_many_engines_that_come_and_go_leave_nothing(book, pairs):
    def held():
        return sum(len(value) for value in vars(pairs).values() if isinstance(value, dict))

    before = held()
    for number in range(50):
        name = f"prefill-{number}"
        for generation in ("g1", "g2"):
            peer = engine(name, generation=generation)
            book.put(peer)
            pairs.bind(name, generation)
            pairs.made(peer)
        book.put(engine(name, generation="g2", state=State.GONE))
        for gone in pairs.over():
            pairs.dropped(gone)
        book.forget(name)
    assert held() - before <= len(pairs.counts)


# ----------------------------------------------------------------------------- gate


class Spy(Executor):
    """vLLM's executor as the test runs it: what was handed to it is kept."""

    def __init__(self):
        self.handed = []
        self.shut = []

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        self.handed.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self):
        for future, make in self.handed:
            try:
                future.set_result(make())
            except Exception as error:  # noqa: BLE001 - as an executor does
                future.set_exception(error)
        self.handed.clear()

    def shutdown(self, wait=True, *, cancel_futures=False):
        self.shut.append((wait, cancel_futures))


@pytest.fixture
def spy():
    return Spy()


@pytest.fixture
def gate_of(book, pairs, spy):
    def make(*, read=None, shake=None, **settings):
        return Gate(
            spy,
            book,
            pairs,
            Settings(peer_timeout_s=30.0, **settings),
            OWN,
            read=read or (lambda fn, engine_id, **more: Call(engine_id, 1, **more)),
            shake=shake or (lambda topology, make: (topology.engine.generation, make())),
        )

    return make


def shake(engine_id, **_):
    return f"agents of {engine_id}"


def test_a_peer_that_is_ready_is_shaken_with_its_topology(book, pairs, spy, gate_of):
    future = gate_of().submit(shake, PRODUCER)
    book.serve()
    assert not future.done()
    spy.run()
    assert future.result(0) == ("g1", "agents of prefill-a-0")
    assert pairs.counts == {"shaken": 1}
    book.put(engine(generation="g2", epoch=2))
    assert pairs.is_over(PRODUCER)


def test_submitting_decides_nothing_itself(book, spy, gate_of):
    """The caller holds vLLM's lock: what becomes of it is another thread's to say."""
    gate = gate_of()
    book.put(engine("odd", layout=GRID), engine("dead", state=State.GONE))
    futures = [gate.submit(shake, name) for name in (PRODUCER, "odd", "dead", "nobody")]
    assert not any(future.done() for future in futures)
    assert not spy.handed


def test_a_pair_that_cannot_work_is_refused_before_vllm_is_touched(book, pairs, spy, gate_of):
    book.put(engine(connector="NixlConnector", layout=STAGES), consumer(connector="NixlConnector"))
    future = gate_of().submit(shake, PRODUCER, pp_size=2)
    book.serve()
    with pytest.raises(Incompatible, match="PULL_PP_PRODUCER_UNSUPPORTED"):
        future.result(0)
    assert not spy.handed
    assert pairs.counts == {"refused": 1}
    assert pairs.over() == {}


@pytest.mark.parametrize(
    ("peer", "error"),
    [
        (engine(state=State.GONE), Gone),
        (engine(state=State.DEGRADED, missing=(Slot(),)), Incomplete),
        (engine(layout=Layout(1, 2, 4)), TransferError),
    ],
    ids=["dead", "half", "other sizes"],
)
def test_what_the_book_forbids_never_reaches_vllm(book, spy, gate_of, peer, error):
    book.put(peer)
    future = gate_of().submit(shake, PRODUCER)
    book.serve()
    with pytest.raises(error):
        future.result(0)
    assert not spy.handed


def test_a_start_that_a_request_is_bound_to_is_the_only_one_shaken(book, pairs, spy, gate_of):
    pairs.bind(PRODUCER, "g0")
    future = gate_of().submit(shake, PRODUCER)
    book.serve()
    with pytest.raises(Gone, match="g0"):
        future.result(0)
    assert not spy.handed


def test_a_peer_that_still_starts_is_shaken_when_it_seals(book, spy, gate_of):
    book.put(engine(state=State.FORMING))
    future = gate_of().submit(shake, PRODUCER)
    book.serve()
    assert not future.done()
    assert not spy.handed
    book.put(engine())
    book.serve()
    spy.run()
    assert future.result(0)[0] == "g1"


def test_a_peer_that_never_comes_delays_nobody(book, spy, gate_of):
    gate = gate_of()
    never = gate.submit(shake, "nobody")
    others = [gate.submit(shake, PRODUCER) for _ in range(3)]
    book.serve()
    spy.run()
    assert all(other.done() for other in others)
    assert not never.done()
    book.time_out("nobody")
    with pytest.raises(DeadlineExceeded, match="30 s for nobody"):
        never.result(0)


@pytest.mark.parametrize("own", [None, consumer(layout=STAGES, without=(1,), state=State.FORMING)])
def test_a_worker_whose_own_engine_is_not_known_whole_waits_for_it(book, spy, gate_of, own):
    book.forget(OWN)
    if own is not None:
        book.put(own)
    future = gate_of().submit(shake, PRODUCER)
    book.serve()
    assert not future.done()
    assert not spy.handed
    book.put(consumer())
    book.serve()
    spy.run()
    assert future.result(0)[0] == "g1"


def test_the_peer_is_looked_at_after_this_engine_is_known(book, spy, gate_of):
    book.forget(OWN)
    future = gate_of().submit(shake, PRODUCER)
    book.serve()
    book.put(engine(generation="g2", epoch=2))
    book.put(consumer())
    book.serve()
    spy.run()
    assert future.result(0)[0] == "g2"


def test_a_worker_whose_own_engine_never_comes_says_which(book, spy, gate_of):
    book.forget(OWN)
    future = gate_of().submit(shake, PRODUCER)
    book.time_out(OWN)
    with pytest.raises(DeadlineExceeded, match=OWN):
        future.result(0)
    assert not spy.handed


def test_a_worker_whose_own_engine_was_forgotten_says_so(book, spy, gate_of):
    future = gate_of().submit(shake, PRODUCER)
    book.forget(OWN)
    book.serve()
    with pytest.raises(NotFound, match=OWN):
        future.result(0)
    assert not spy.handed


def test_a_handshake_that_fails_fails_with_vllms_error_and_pairs_nobody(book, pairs, spy, gate_of):
    def fails(engine_id):
        raise ConnectionError("no route")

    future = gate_of().submit(fails, PRODUCER)
    book.serve()
    spy.run()
    with pytest.raises(ConnectionError, match="no route"):
        future.result(0)
    assert pairs.counts["shaken"] == 0


def test_a_fault_in_the_comparison_is_an_answer_too(book, spy, gate_of):
    broken = engine()
    workers = (dataclasses.replace(broken.workers[0], layers=None),)
    book.put(dataclasses.replace(broken, workers=workers))
    future = gate_of().submit(shake, PRODUCER)
    book.serve()
    assert future.exception(0) is not None
    assert not spy.handed


def test_arguments_that_cannot_be_read_raise_nothing_in_the_step_loop(spy, gate_of):
    def unreadable(*args, **kwargs):
        raise TypeError("a release that calls it otherwise")

    future = gate_of(read=unreadable).submit(shake, PRODUCER)
    assert isinstance(future.exception(0), TypeError)
    assert not spy.handed


def test_nobody_takes_back_what_another_thread_will_answer(book, spy, gate_of):
    future = gate_of().submit(shake, PRODUCER)
    assert not future.cancel()
    book.serve()
    spy.run()
    assert future.result(0)


# Peers without rankbook.


def test_a_peer_that_is_not_in_the_book_is_asked_in_vllms_own_way(pairs, spy, gate_of):
    future = gate_of().submit(shake, "nobody", has_address=True)
    spy.run()
    assert future.result(0) == "agents of nobody"
    assert pairs.counts["shaken"] == 0


@pytest.mark.parametrize(
    ("settings", "has_address"), [({"side_channel": False}, True), ({}, False)]
)
def test_a_peer_that_cannot_be_asked_is_waited_for(book, spy, gate_of, settings, has_address):
    gate_of(**settings).submit(shake, "nobody", has_address=has_address)
    assert not spy.handed
    assert [one.engine_id for one in book.waiting] == ["nobody"]


def test_a_peer_of_the_book_is_never_asked_in_vllms_own_way(book, spy, gate_of):
    book.put(engine(state=State.FORMING))
    gate_of().submit(shake, PRODUCER, has_address=True)
    assert not spy.handed


def test_a_peer_that_only_the_engine_core_has_seen_yet_is_waited_for(book, pairs, spy, gate_of):
    """This worker's copy is behind; the pairing would be made unseen by the book."""
    pairs.bind("prefill-b-0", "g1")
    future = gate_of().submit(shake, "prefill-b-0", has_address=True)
    assert not spy.handed
    book.put(engine("prefill-b-0"))
    book.serve()
    spy.run()
    assert future.result(0) == ("g1", "agents of prefill-b-0")
    assert pairs.counts["shaken"] == 1


# The executor.


def test_shutting_down_shuts_vllms_executor_down_as_asked(spy, gate_of):
    gate = gate_of()
    gate.shutdown(wait=False, cancel_futures=True)
    gate.shutdown()
    assert spy.shut == [(False, True), (True, False)]


def test_an_executor_that_was_shut_down_meanwhile_is_an_answer(book, pairs):
    inner = ThreadPoolExecutor(1)
    gate = Gate(
        inner,
        book,
        pairs,
        Settings(),
        OWN,
        read=lambda fn, engine_id: Call(engine_id, 1),
        shake=lambda topology, make: make(),
    )
    future = gate.submit(shake, PRODUCER)
    gate.shutdown()
    book.serve()
    with pytest.raises(RuntimeError):
        future.result(0)
    foreign = gate.submit(shake, PRODUCER)
    book.serve()
    assert isinstance(foreign.exception(0), RuntimeError)


def test_a_handshake_that_was_cancelled_in_the_queue_is_answered(book, pairs, spy, gate_of):
    future = gate_of().submit(shake, PRODUCER)
    book.serve()
    ((inner, _),) = spy.handed
    inner.cancel()
    inner.set_running_or_notify_cancel()
    with pytest.raises(CancelledError):
        future.result(0)


def test_vllms_own_bookkeeping_comes_out_right_whatever_the_order(book, spy, gate_of):
    """As `_ensure_handshake` does it: under its lock it submits, enters the future in a
    table, then adds the callback that takes it out."""
    lock, table, results = threading.RLock(), {}, []
    gate = gate_of()

    def ensure(engine_id):
        with lock:
            future = gate.submit(shake, engine_id)
            table[engine_id] = future

            def done(future):
                with lock:
                    del table[engine_id]
                    results.append((engine_id, future.exception()))

            future.add_done_callback(done)

    book.put(engine("dead", state=State.GONE))
    for name in (PRODUCER, "dead"):
        ensure(name)
    served = threading.Thread(target=book.serve)
    with lock:
        served.start()
        # The book's thread has an answer, and waits for the lock to give it.
        served.join(0.05)
        assert served.is_alive()
    served.join(5)
    spy.run()
    assert table == {}
    assert [name for name, _ in results] == ["dead", PRODUCER]


def test_counts_name_what_happened(book, pairs, spy, gate_of):
    gate = gate_of()
    for name in (PRODUCER, "dead"):
        book.put(engine(name, state=State.GONE if name == "dead" else State.READY))
        gate.submit(shake, name)
    book.serve()
    spy.run()
    assert pairs.counts == {"shaken": 1, "refused": 1}


def test_errors_can_be_told_apart_by_class():
    classes = (Gone, Incomplete, Incompatible, NotFound, TransferError, DeadlineExceeded)
    for one, other in itertools.permutations(classes, 2):
        assert not issubclass(one, other)
    assert issubclass(TransferError, BadRequest)
