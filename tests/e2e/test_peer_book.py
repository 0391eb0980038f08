"""A process's own copy of the book against a real registry: who waits for whom."""

from __future__ import annotations

import logging
import queue
import threading
import time

import pytest

import rankbook
from rankbook.errors import (
    DeadlineExceeded,
    Gone,
    Incomplete,
    NotFound,
    Reason,
    Unavailable,
)
from rankbook.model import State
from rankbook_vllm.config import Settings
from rankbook_vllm.lookup import Refuse, Use, Wait
from rankbook_vllm.peers import PeerBook

LOG = logging.getLogger("rankbook")


@pytest.fixture
def peer_book():
    """Makes copies of the book that end with the test."""
    started = []

    def make(server, *, start=True, **options):
        address = server if isinstance(server, str) else server.grpc
        book = PeerBook(Settings(endpoints=(address,)), LOG, **options)
        started.append(book)
        if start:
            book.start()
        return book

    yield make
    for book in started:
        book.close()


@pytest.fixture
def client(shared_rankbookd):
    with rankbook.Client(shared_rankbookd.grpc) as one:
        yield one


def sign_in(client, made, engine_id, generation="g1", *, ranks=(0, 1), ttl_s=300):
    """Some workers of an engine of two stages; returns their leases by rank."""
    return {
        rank: client.register_workers(
            [made.record(engine_id, rank, pp_size=2, generation=generation)],
            sequence=1,
            lease_key=f"{engine_id}-{generation}-{rank}",
            ttl_s=ttl_s,
        ).lease.lease_id
        for rank in ranks
    }


def seal(client, made, engine_id, generation="g1"):
    topology = client.get_topology(engine_id, require=rankbook.Requirement.COMPLETE)
    client.seal_engine(
        engine_id,
        generation,
        made.seal_slots(topology),
        made.core("core"),
        lease_key=f"{engine_id}-{generation}-core",
    )


def publish(client, made, engine_id, generation="g1"):
    leases = sign_in(client, made, engine_id, generation)
    seal(client, made, engine_id, generation)
    return leases


class Outcomes:
    """Where a wait's answers come, with the thread that brought them."""

    def __init__(self):
        self._got = queue.Queue()

    def __call__(self, outcome):
        self._got.put((outcome, threading.current_thread().name))

    def next(self, timeout_s=10.0):
        return self._got.get(timeout=timeout_s)[0]

    def thread(self, timeout_s=10.0):
        return self._got.get(timeout=timeout_s)[1]

    @property
    def empty(self):
        return self._got.empty()


def follows(made, book):
    made.eventually(lambda: book.current, 10, "the copy follows the book")
    return book


# ----------------------------------------------------------------------- start order


def test_a_copy_that_starts_after_the_engine_has_it(
    peer_book, client, made, engine_id, shared_rankbookd
):
    publish(client, made, engine_id)
    topology = peer_book(shared_rankbookd).wait(engine_id, "g1", timeout_s=10)
    assert topology.engine.state is State.READY
    assert len(topology.workers) == 2


def test_an_engine_that_starts_after_the_wait_is_given_as_soon_as_it_is_sealed(
    peer_book, client, made, engine_id, shared_rankbookd
):
    book, outcomes = follows(made, peer_book(shared_rankbookd)), Outcomes()
    book.when(engine_id, "g1", 30, outcomes)
    sign_in(client, made, engine_id, ranks=(0,))
    made.eventually(lambda: book.get(engine_id) is not None, 5, "the first worker is seen")
    assert isinstance(book.judge(engine_id), Wait)
    sign_in(client, made, engine_id, ranks=(1,))
    made.eventually(
        lambda: book.get(engine_id).engine.state is State.COMPLETE, 5, "both workers are seen"
    )
    assert outcomes.empty
    seal(client, made, engine_id)
    assert outcomes.next().engine.state is State.READY
    assert isinstance(book.judge(engine_id), Use)


def test_a_registry_that_starts_last_answers_those_who_waited(peer_book, rankbookd, made, tmp_path):
    # A server takes a port and gives it back, so that another can be told to take it.
    first = rankbookd()
    first.stop()
    book, outcomes = peer_book(first.grpc), Outcomes()
    book.when("e", "", 60, outcomes)
    assert not book.current
    assert isinstance(book.judge("e").why, Unavailable)
    first.start_again(same_port=True)
    with rankbook.Client(first.grpc) as client:
        publish(client, made, "e")
    assert outcomes.next(30).engine.engine_id == "e"


def test_a_wait_that_begins_before_the_start_is_answered_after_it(
    peer_book, client, made, engine_id, shared_rankbookd
):
    publish(client, made, engine_id)
    book, outcomes = peer_book(shared_rankbookd, start=False), Outcomes()
    book.when(engine_id, "", 30, outcomes)
    assert outcomes.empty
    book.start()
    book.start()
    assert outcomes.next().engine.engine_id == engine_id


# ------------------------------------------------------------------- waits, deadlines


def test_a_deadline_says_what_was_missing(peer_book, client, made, engine_id, shared_rankbookd):
    sign_in(client, made, engine_id, ranks=(0,))
    book = follows(made, peer_book(shared_rankbookd))
    made.eventually(lambda: book.get(engine_id) is not None, 5, "the first worker is seen")
    before = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="pp1 tp0") as caught:
        book.wait(engine_id, timeout_s=0.3)
    assert 0.3 <= time.monotonic() - before < 2
    assert caught.value.metadata["missing"] == "pp1 tp0"
    assert caught.value.metadata["why"] == Reason.ENGINE_INCOMPLETE


def test_a_deadline_of_an_engine_nobody_saw_says_so(peer_book, made, shared_rankbookd):
    book = follows(made, peer_book(shared_rankbookd))
    with pytest.raises(DeadlineExceeded) as caught:
        book.wait("nobody", timeout_s=0.1)
    assert caught.value.metadata["why"] == Reason.ENGINE_NOT_FOUND


def test_a_deadline_with_the_registry_away_says_so(peer_book, rankbookd):
    server = rankbookd()
    server.stop()
    with pytest.raises(DeadlineExceeded) as caught:
        peer_book(server.grpc).wait("e", timeout_s=0.2)
    assert caught.value.metadata["why"] == Reason.UNREACHABLE
    assert "the registry has said nothing yet" in str(caught.value)


def test_a_deadline_says_for_how_long_the_registry_has_been_away(peer_book, made, rankbookd):
    server = rankbookd()
    book = follows(made, peer_book(server.grpc))
    server.stop()
    made.eventually(lambda: not book.current, 5, "the registry is missed")
    with pytest.raises(DeadlineExceeded) as caught:
        book.wait("nobody", timeout_s=1.2)
    assert "the registry has said nothing for" in str(caught.value)
    assert float(caught.value.metadata["registry_age_s"]) >= 1.2


def test_a_dead_peer_does_not_delay_anothers_wait(
    peer_book, client, made, engine_id, shared_rankbookd
):
    book = follows(made, peer_book(shared_rankbookd))
    never = [Outcomes() for _ in range(5)]
    for number, outcomes in enumerate(never):
        book.when(f"{engine_id}-never-{number}", "", 60, outcomes)
    publish(client, made, engine_id)
    before = time.monotonic()
    assert book.wait(engine_id, timeout_s=30).engine.engine_id == engine_id
    assert time.monotonic() - before < 2
    assert all(outcomes.empty for outcomes in never)


def test_waits_end_in_the_order_of_their_deadlines(peer_book, made, shared_rankbookd):
    book = follows(made, peer_book(shared_rankbookd))
    ended = queue.Queue()
    for name, timeout_s in (("c", 0.6), ("a", 0.1), ("b", 0.3)):
        book.when(name, "", timeout_s, ended.put)
    names = [ended.get(timeout=5).metadata["engine_id"] for _ in range(3)]
    assert names == ["a", "b", "c"]


def test_answers_come_on_the_books_own_thread_and_one_each(
    peer_book, client, made, engine_id, shared_rankbookd
):
    publish(client, made, engine_id)
    book, outcomes = follows(made, peer_book(shared_rankbookd)), Outcomes()
    book.wait(engine_id, timeout_s=10)
    book.when(engine_id, "g1", 10, outcomes)
    book.when(engine_id, "g0", 10, outcomes)
    assert {outcomes.thread(), outcomes.thread()} == {"rankbook-peers"}
    client.drain_engine(engine_id, reason="test")
    made.eventually(
        lambda: book.get(engine_id).engine.state is State.DRAINING, 5, "the drain is seen"
    )
    assert outcomes.empty


def test_a_callback_that_raises_takes_nothing_from_the_others(
    peer_book, client, made, engine_id, shared_rankbookd
):
    def raises(*_):
        raise ValueError("a fault of the caller's")

    book, outcomes = follows(made, peer_book(shared_rankbookd)), Outcomes()
    book.on_change(raises)
    book.when(engine_id, "", 30, raises)
    book.when(engine_id, "", 30, outcomes)
    publish(client, made, engine_id)
    assert outcomes.next().engine.engine_id == engine_id


# ------------------------------------------------------------------- restart and death


def test_another_start_is_told_at_once(peer_book, client, made, engine_id, shared_rankbookd):
    publish(client, made, engine_id, "g1")
    book = peer_book(shared_rankbookd)
    book.wait(engine_id, "g1", timeout_s=10)
    publish(client, made, engine_id, "g2")
    assert book.wait(engine_id, timeout_s=10)
    made.eventually(lambda: book.get(engine_id).engine.generation == "g2", 5, "the new start")
    before = time.monotonic()
    with pytest.raises(Gone) as caught:
        book.wait(engine_id, "g1", timeout_s=30)
    assert time.monotonic() - before < 2
    assert caught.value.metadata["successor_generation"] == "g2"
    assert caught.value.metadata["successor_epoch"] == "2"


def test_a_dead_engine_is_told_to_those_who_wait_and_to_those_who_ask_later(
    peer_book, client, made, engine_id, shared_rankbookd
):
    (lease,) = sign_in(client, made, engine_id, ranks=(0,)).values()
    book, outcomes = follows(made, peer_book(shared_rankbookd)), Outcomes()
    made.eventually(lambda: book.get(engine_id) is not None, 5, "the worker is seen")
    book.when(engine_id, "g1", 60, outcomes)
    client.revoke_lease(lease)
    assert isinstance(outcomes.next(5), Gone)
    answer = book.judge(engine_id)
    assert isinstance(answer, Refuse)
    assert isinstance(answer.why, Gone)
    assert book.get(engine_id).engine.state is State.GONE
    assert engine_id not in {topology.engine.engine_id for topology in book.engines()}
    publish(client, made, engine_id, "g2")
    assert book.wait(engine_id, timeout_s=10).engine.generation == "g2"


def test_one_lost_stage_is_told_and_named(peer_book, client, made, engine_id, shared_rankbookd):
    leases = publish(client, made, engine_id)
    book = peer_book(shared_rankbookd)
    book.wait(engine_id, timeout_s=10)
    client.revoke_lease(leases[1])
    made.eventually(lambda: isinstance(book.judge(engine_id), Refuse), 5, "the loss is seen")
    with pytest.raises(Incomplete) as caught:
        book.wait(engine_id, "g1", timeout_s=30)
    assert caught.value.metadata["missing"] == "pp1 tp0"


# ---------------------------------------------------------------- the registry is away


def test_look_ups_go_on_while_the_registry_is_away_and_waits_after_it_is_back(
    peer_book, rankbookd, made, tmp_path
):
    server = rankbookd(store=f"sqlite:{tmp_path}/book.db")
    with rankbook.Client(server.grpc) as client:
        publish(client, made, "old")
    book = peer_book(server)
    book.wait("old", timeout_s=10)
    server.kill()
    made.eventually(lambda: not book.current, 10, "the break is noticed")
    assert isinstance(book.judge("old", "g1"), Use)
    assert book.wait("old", "g1", timeout_s=5).engine.engine_id == "old"
    assert isinstance(book.judge("old", "g2"), Wait)
    took = sorted(_seconds(lambda: book.judge("old", "g1")) for _ in range(1000))
    # A step loop must not be held up; a busy machine may take the processor away now and then.
    assert took[990] < 0.01
    outcomes, newer = Outcomes(), Outcomes()
    book.when("new", "", 60, outcomes)
    book.when("old", "g2", 60, newer)
    server.start_again(same_port=True)
    with rankbook.Client(server.grpc) as client:
        publish(client, made, "new")
    assert outcomes.next(20).engine.engine_id == "new"
    # The copy is whole again, so it is a proof again.
    assert isinstance(newer.next(20), Gone)


def test_a_book_that_was_lost_leaves_its_engines_unknown_and_not_dead(peer_book, rankbookd, made):
    server = rankbookd()
    with rankbook.Client(server.grpc) as client:
        publish(client, made, "e")
        sign_in(client, made, "other")
    book = peer_book(server)
    book.wait("e", timeout_s=10)
    changes = queue.Queue()
    book.on_change(lambda engine_id, topology: changes.put((engine_id, topology)))
    assert {changes.get(timeout=5)[0] for _ in range(2)} == {"e", "other"}
    server.kill()
    made.eventually(lambda: not book.current, 10, "the break is noticed")
    server.start_again(same_port=True)
    made.eventually(lambda: book.current, 20, "it follows the new book")
    made.eventually(lambda: book.get("e") is None, 5, "the engine is not known any more")
    answer = book.judge("e", "g1")
    assert isinstance(answer, Wait)
    assert isinstance(answer.why, NotFound)
    outcomes = Outcomes()
    book.when("e", "g1", 60, outcomes)
    with rankbook.Client(server.grpc) as client:
        publish(client, made, "e")
    assert outcomes.next().engine.generation == "g1"
    while True:
        engine_id, topology = changes.get(timeout=5)
        assert topology is None or topology.engine.state is not State.GONE
        if engine_id == "e" and topology is not None and topology.engine.state is State.READY:
            break


def _seconds(call):
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


# --------------------------------------------------------------------------- changes


def test_changes_are_told_and_begin_with_what_is_there(
    peer_book, client, made, engine_id, shared_rankbookd
):
    publish(client, made, engine_id)
    book = peer_book(shared_rankbookd)
    book.wait(engine_id, timeout_s=10)
    seen = queue.Queue()

    def note(name, topology):
        if name == engine_id:
            seen.put(topology)

    book.on_change(note)
    assert seen.get(timeout=5).engine.state is State.READY
    client.drain_engine(engine_id, reason="test")
    while seen.get(timeout=5).engine.state is not State.DRAINING:
        pass


def test_who_waits_is_no_change_of_an_engine(peer_book, client, made, engine_id, shared_rankbookd):
    publish(client, made, engine_id)
    book = peer_book(shared_rankbookd)
    book.wait(engine_id, timeout_s=10)
    told = queue.Queue()
    book.on_change(lambda name, topology: told.put(name))
    while told.get(timeout=5) != engine_id:
        pass
    for _ in range(5):
        book.wait(engine_id, timeout_s=10)
    while not told.empty():
        assert told.get() != engine_id


def test_payloads_are_left_out_where_they_are_not_needed(
    peer_book, client, made, engine_id, shared_rankbookd
):
    publish(client, made, engine_id)
    with_them = peer_book(shared_rankbookd).wait(engine_id, timeout_s=10)
    without = peer_book(shared_rankbookd, without_payload=True).wait(engine_id, timeout_s=10)
    assert {worker.handshake.payload for worker in with_them.workers} == {b"agent"}
    assert {worker.handshake.payload for worker in without.workers} == {b""}


# -------------------------------------------------------------------------- shut down


def ours():
    return {thread for thread in threading.enumerate() if thread.name.startswith("rankbook")}


@pytest.mark.parametrize("away", [False, True], ids=["followed", "away"])
def test_closing_answers_waiters_and_leaves_no_thread(peer_book, rankbookd, made, away):
    before = ours()
    server = rankbookd()
    book = peer_book(server)
    if away:
        follows(made, book)
        server.kill()
        made.eventually(lambda: not book.current, 10, "the break is noticed")
    outcomes = [Outcomes() for _ in range(3)]
    for one in outcomes:
        book.when("nobody", "", 60, one)
    started = time.monotonic()
    book.close()
    assert time.monotonic() - started < 2
    for one in outcomes:
        error = one.next(1)
        assert (type(error), error.reason) == (Unavailable, Reason.SHUTTING_DOWN)
    made.eventually(lambda: ours() <= before, 5, "no thread is left behind")
    book.close()


def test_everyone_is_answered_once_though_the_copy_closes_meanwhile(
    peer_book, client, made, engine_id, shared_rankbookd
):
    publish(client, made, engine_id)
    book, answers = follows(made, peer_book(shared_rankbookd)), queue.Queue()
    asked, begun = 50, threading.Barrier(5)

    def ask(who):
        begun.wait(10)
        for number in range(asked):
            name = engine_id if number % 2 else "nobody"
            book.when(name, "", 60, lambda _, key=(who, number): answers.put(key))

    threads = [threading.Thread(target=ask, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    begun.wait(10)
    book.close()
    for thread in threads:
        thread.join(10)
    got = [answers.get(timeout=5) for _ in range(4 * asked)]
    assert sorted(got) == [(who, number) for who in range(4) for number in range(asked)]
    assert answers.empty()


def test_a_closed_copy_answers_at_once_and_does_not_start_again(peer_book, shared_rankbookd, made):
    before = ours()
    book, outcomes = peer_book(shared_rankbookd), Outcomes()
    book.close()
    book.when("nobody", "", 60, outcomes)
    assert outcomes.next(0.1).reason is Reason.SHUTTING_DOWN
    book.start()
    made.eventually(lambda: ours() <= before, 5, "no thread is left behind")


def test_a_copy_that_never_started_answers_its_waiters_too(peer_book, shared_rankbookd):
    before = ours()
    book, outcomes = peer_book(shared_rankbookd, start=False), Outcomes()
    book.when("nobody", "", 60, outcomes)
    assert ours() == before
    book.close()
    assert outcomes.next(0.1).reason is Reason.SHUTTING_DOWN


def test_a_copy_closed_by_its_own_callback_ends(
    peer_book, client, made, engine_id, shared_rankbookd
):
    book = follows(made, peer_book(shared_rankbookd))
    others, closed = Outcomes(), threading.Event()

    def close(_):
        book.close()
        closed.set()

    book.when("nobody", "", 60, others)
    book.when(engine_id, "", 60, close)
    publish(client, made, engine_id)
    assert closed.wait(10)
    assert others.next().reason is Reason.SHUTTING_DOWN
