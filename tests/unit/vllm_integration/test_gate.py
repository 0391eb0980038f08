"""What stands where vLLM has the executor of its handshakes: it asks the book first."""

import dataclasses
import logging
import threading
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor

import pytest
from tests.unit.vllm_integration.books import HandBook, consumer, engine

from rankbook.errors import (
    DeadlineExceeded,
    Gone,
    Incompatible,
    Incomplete,
    NotFound,
    TransferError,
)
from rankbook.model import Layout, Slot, State
from rankbook_vllm.config import Settings
from rankbook_vllm.handshake import Call, Gate, Pairs

PRODUCER = "prefill-a-0"
OWN = "decode-a-0"
GRID = Layout(pp_size=2, tp_size=2, num_layers=4)
STAGES = Layout(pp_size=2, tp_size=1, num_layers=4)


@pytest.fixture
def book():
    return HandBook(engine(), consumer())


@pytest.fixture
def pairs(book):
    return Pairs(book, logging.getLogger("rankbook"))


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
            dial=lambda engine_id, make: make(),
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


def test_a_start_that_is_over_makes_room_for_the_one_that_took_its_place(book, pairs, spy, gate_of):
    """Who needs the new start waits for the same handshake."""
    pairs.bind(PRODUCER, "g1")
    book.put(engine(generation="g2", epoch=2))
    future = gate_of().submit(shake, PRODUCER)
    book.serve()
    spy.run()
    assert future.result(0)[0] == "g2"
    assert not pairs.is_over(PRODUCER)


@pytest.mark.parametrize("news", ["g2", ""], ids=["a request", "the book"])
def test_a_start_that_ends_while_it_is_waited_for_makes_room_too(book, pairs, spy, gate_of, news):
    book.put(engine(state=State.FORMING))
    pairs.bind(PRODUCER, "g1")
    future = gate_of().submit(shake, PRODUCER)
    book.serve()
    if news:
        pairs.bind(PRODUCER, news)
    book.known[PRODUCER] = engine(generation="g2", epoch=2)  # and nobody has been told yet
    book.serve()
    spy.run()
    assert future.result(0)[0] == "g2"


def test_a_start_that_was_refused_is_not_asked_for_again(book, pairs, spy, gate_of):
    pairs.bind(PRODUCER, "g0")  # neither the book's, nor one that it has shown
    gate = gate_of()
    first = gate.submit(shake, PRODUCER)
    book.serve()
    with pytest.raises(Gone, match="g0"):
        first.result(0)
    second = gate.submit(shake, PRODUCER)
    book.serve()
    spy.run()
    assert second.result(0)[0] == "g1"
    assert pairs.counted() == {"refused": 1, "shaken": 1}


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
    assert not pairs.is_over("nobody")


def test_a_peer_that_was_dialled_is_over_when_the_book_knows_it(book, pairs, spy, gate_of):
    gate_of().submit(shake, "prefill-b-0", has_address=True)
    spy.run()
    book.put(engine("prefill-b-0"))
    assert pairs.is_over("prefill-b-0")


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
        dial=lambda engine_id, make: make(),
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
