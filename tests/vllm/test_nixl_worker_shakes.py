"""NIXL\'s workers with the book: how hands are shaken, in advance and at last.

See `nixl_desk` for what is real in these tests.
"""

import collections
import importlib.util
import queue
import threading
import time
import warnings

import pytest

from rankbook.model import Role, Slot, State

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    import msgspec
    from tests.vllm.nixl_desk import (
        BLOCKS,
        OWN,
        PEER,
        STAGES,
        TABLES,
        Desk,
        Pull,
        Push,
        both,
        consumer,
        log,
        paired,
        producer,
        reached,
        said,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    from rankbook_vllm._vllm import nixl, nixl_socket, nixl_worker


# ------------------------------------------------------------------ failed handshakes


def test_a_handshake_that_fails_inside_vllm_leaves_nothing_and_the_next_runs_clean(producer):
    desk = producer()
    desk.book.put(desk.peer("g1"))
    desk.worker.fails_at = 1
    failed = desk.worker._ensure_handshake(PEER, PEER, 0, 1)
    desk.settle()
    assert "layouts differ" in str(failed.exception())
    assert desk.empty()
    assert desk.worker._handshake_futures == {}
    desk.worker.fails_at = None
    again = desk.worker._ensure_handshake(PEER, PEER, 0, 1)
    desk.settle()
    agents, _ = again.result()
    assert set(agents.values()) == desk.nixl.agents
    assert len(desk.nixl.handles) == 1


def test_a_handshake_that_fails_at_the_second_stage_gives_the_first_back(consumer):
    desk = consumer(Push)
    desk.book.put(desk.peer("g1", layout=STAGES))
    ask = {"pp_size": 2, "notif_agents_only": True}
    desk.nixl.agents_left = 1
    failed = desk.worker._ensure_handshake(PEER, PEER, 0, 1, **ask)
    desk.settle()
    assert "no more agents" in str(failed.exception())
    assert desk.empty()
    desk.nixl.agents_left = 2
    again = desk.worker._ensure_handshake(PEER, PEER, 0, 1, **ask)
    desk.settle()
    agents, _ = again.result()
    assert {key: name.rsplit(" #")[0] for key, name in agents.items()} == {
        (0, 0): "peer-0 g1 pp0 tp0",
        (1, 0): "peer-0 g1 pp1 tp0",
    }
    assert set(agents.values()) == desk.nixl.agents


def test_a_handshake_that_nixl_does_not_take_back_still_fails_with_its_own_error(producer):
    desk = producer()
    desk.book.put(desk.peer("g1"))
    desk.worker.fails_at = 1
    desk.nixl.refuses = ("remove", "release")
    failed = desk.worker._ensure_handshake(PEER, PEER, 0, 1)
    desk.settle()
    assert "layouts differ" in str(failed.exception())
    assert not any(getattr(desk.worker, name) for name in TABLES)


def test_a_peer_whose_clock_is_unknown_is_not_paired_where_clocks_are_compared(consumer):
    desk = consumer(Pull, bidirectional=True)
    desk.book.clocks = False
    desk.book.put(desk.peer("g1"))
    desk.step(r1="g1")
    desk.settle()
    assert desk.failed() == {"r1"}
    assert desk.empty()
    desk.book.clocks = True
    desk.step(r2="g1")
    desk.settle()
    desk.step()
    assert reached(desk) == {"r2": "g1"}


# ------------------------------------------------------------------------ the socket


def test_the_socket_answers_each_rank_with_the_peers_clock():
    socket = nixl_socket._BookSocket({(1, 3): b"stage", (0, 2): b"plain"}, 500.0)
    socket.setsockopt("whatever", 5000)
    for asked, expected in (((b"get", 1, 3), b"stage"), ((b"get", 2), b"plain")):
        socket.send(msgspec.msgpack.encode(asked))
        before = time.perf_counter()
        payload, clock = socket.recv_multipart()
        assert payload == expected
        assert before + 500 <= msgspec.msgpack.decode(clock) <= time.perf_counter() + 500


def test_vllm_takes_the_offset_of_the_peers_clock_from_it(consumer):
    desk = consumer(Pull)
    desk.book.offset_s = 500.0
    paired(desk)
    assert desk.worker._engine_clock_offset[PEER] == pytest.approx(500.0, abs=0.5)


@both
def test_a_handshake_without_a_registry_goes_by_the_copy_and_says_how_old_it_is(
    consumer, log, kind
):
    desk = consumer(kind)
    desk.book.put(desk.peer("g1"))
    desk.book.current, desk.book.age_s = False, 74.0
    desk.step(r1="g1")
    desk.settle()
    desk.step()
    assert reached(desk) == {"r1": "g1"}
    assert "shakes hands with peer-0 as it was 74 s ago: the registry is away" in log.text


def test_other_threads_still_get_vllms_own_socket(monkeypatch):
    original = base_worker.zmq_ctx
    opened = []

    class Real:
        def __init__(self, kind, address):
            opened.append(address)

        def __enter__(self):
            return "vllm's own"

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(base_worker, "zmq_ctx", Real)
    nixl_socket.answer_from_book()
    put = base_worker.zmq_ctx
    nixl_socket.answer_from_book()
    assert base_worker.zmq_ctx is put  # once
    found = {}

    def other():
        with put("kind", "tcp://elsewhere") as socket:
            found["other"] = socket

    monkeypatch.setattr(nixl_socket._local, "socket", "the book's", raising=False)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    with put("kind", "tcp://here") as socket:
        found["own"] = socket
    assert found == {"other": "vllm's own", "own": "the book's"}
    assert opened == ["tcp://elsewhere"]
    assert original is not put


# -------------------------------------------------------------------------- in advance


def asked(desk):
    """Notices only, by peer: what a handshake in advance was asked for."""
    seen = []
    real = desk.worker._nixl_handshake

    def handshake(
        host, port, remote_tp_size, expected_engine_id, remote_dcp_size=1, remote_pp_size=1,
        notif_agents_only=False,
    ):  # fmt: skip
        seen.append((expected_engine_id, remote_pp_size, notif_agents_only))
        return real(
            host, port, remote_tp_size, expected_engine_id, remote_dcp_size, remote_pp_size,
            notif_agents_only,
        )  # fmt: skip

    desk.worker._nixl_handshake = handshake
    return seen


@pytest.mark.parametrize(
    ("kind", "role", "expected"),
    [
        (Push, Role.CONSUMER, [(PEER, 1, True)]),
        (Push, Role.PRODUCER, [(PEER, 1, False)]),
        (Pull, Role.CONSUMER, [(PEER, 1, False)]),
        (Pull, Role.PRODUCER, []),
        (Push, Role.BOTH, [(PEER, 1, False)]),
        (Pull, Role.BOTH, [(PEER, 1, False)]),
    ],
    ids=[
        "push consumes",
        "push produces",
        "pull consumes",
        "pull produces",
        "push does both",
        "pull does both",
    ],
)
def test_hands_are_shaken_in_advance_by_whoever_will_need_it(kind, role, expected):
    desk = Desk(kind, role, prewarm=True)
    seen = asked(desk)
    desk.book.put(desk.peer("g1", state=State.FORMING))
    desk.settle()
    assert seen == []
    desk.book.put(desk.peer("g1"))
    desk.settle()
    assert seen == expected
    desk.book.tell(PEER)
    desk.settle()
    assert seen == expected


def test_every_peer_is_shaken_hands_with_when_this_engine_becomes_known(consumer):
    desk = consumer(prewarm=True)
    desk.book.forget(OWN)
    seen = asked(desk)
    desk.book.put(desk.peer("g1"), desk.peer("g1", engine_id="peer-1"))
    desk.settle()
    assert seen == []
    desk.book.put(desk.own())
    desk.settle()
    assert [one[0] for one in seen] == [PEER, "peer-1"]


def test_each_start_is_shaken_hands_with_once_though_it_fails(producer):
    desk = producer(prewarm=True)
    seen = asked(desk)
    desk.worker.fails_at = 1
    for generation in ("g1", "g1", "g2", "g2"):
        desk.book.put(desk.peer(generation))
        desk.settle()
    assert len(seen) == 2


def test_the_next_start_is_shaken_hands_with_in_advance_when_the_last_is_let_go(consumer):
    desk = consumer(prewarm=True)
    seen = asked(desk)
    desk.book.put(desk.peer("g1"))
    desk.settle()
    desk.book.put(desk.peer("g2"))
    desk.settle()
    assert len(seen) == 1
    desk.step()
    desk.settle()
    assert len(seen) == 2
    (agent,) = desk.nixl.agents
    assert agent.startswith("peer-0 g2")


def test_a_peer_that_does_not_fit_is_said_once_and_not_tried(consumer, log):
    desk = consumer(prewarm=True)
    seen = asked(desk)
    for _ in range(3):
        desk.book.put(desk.peer("g1", compat_hash="other"))
        desk.settle()
    assert seen == []
    assert said(log, "no handshake in advance") == 1


def test_peers_that_are_gone_are_not_remembered(consumer):
    desk = consumer(prewarm=True)
    for number in range(5):
        desk.book.put(desk.peer("g1", engine_id=f"peer-{number}"))
    assert len(desk.half.warmed) == 5
    desk.book.put(desk.peer("g1", engine_id="peer-0", state=State.GONE))
    for number in range(1, 5):
        desk.book.forget(f"peer-{number}")
    assert desk.half.warmed == {}


def test_nobody_shakes_hands_in_advance_while_asleep(consumer):
    desk = consumer(prewarm=True)
    desk.book.put(desk.own(asleep=(Slot(0, 0, 0),)))
    seen = asked(desk)
    desk.book.put(desk.peer("g1"))
    desk.settle()
    assert seen == []


def test_shaking_hands_in_advance_evicts_nobody(consumer):
    desk = paired(consumer(prewarm=True))
    desk.worker._engine_ttl = 0.001
    desk.worker._engine_last_active[PEER] = 0.0
    desk.book.put(desk.peer("g1", engine_id="peer-1"))
    desk.settle()
    assert desk.worker.cleaned == []
    desk.worker._ensure_handshake("peer-2", "peer-2", 0, 1)  # a request does
    assert [one for one, _ in desk.worker.cleaned] == [PEER]


# --------------------------------------------------------------------- asleep and awake


@both
def test_a_producer_that_slept_is_shaken_hands_with_anew(consumer, kind):
    desk = paired(consumer(kind))
    desk.book.put(desk.peer("g1", state=State.DEGRADED, asleep=(Slot(0, 0, 0),)))
    desk.step()
    assert len(desk.worker.cleaned) == 1
    desk.book.put(desk.peer("g1", said=" awake"))
    desk.step(r2="g1")
    desk.settle()
    desk.step()
    assert reached(desk) == {"r2": "g1"}
    (agent,) = desk.nixl.agents
    assert agent.startswith("peer-0 g1 awake")


# ---------------------------------------------------------------------------- vLLM 0.28


class Old:
    """How vLLM 0.28 takes failures: blocks at once, and an assertion at the end."""

    def __init__(self):
        self._failed_recv_reqs, self._recving_metadata = queue.Queue(), {}
        self.invalid = []

    def _handle_failed_transfer(self, request_id, handle):
        self.invalid.append(self._recving_metadata[request_id].local_block_ids)
        self._failed_recv_reqs.put(request_id)

    def get_finished(self):
        failed = set()
        while not self._failed_recv_reqs.empty():
            failed.add(self._failed_recv_reqs.get_nowait())
        for request_id in failed:
            assert self._recving_metadata.pop(request_id, None) is not None
        return set(), failed


def old_worker():
    worker = Old()
    desk = Desk(Push, Role.CONSUMER)
    worker.rankbook = desk.half
    nixl.become(worker, nixl_worker.BookWorker)
    return worker


def test_vllm_0_28_is_told_which_blocks_are_bad():
    worker = old_worker()
    nixl_worker._fail(worker, "r1", BLOCKS)
    assert worker.invalid == [BLOCKS]
    assert worker.get_finished() == (set(), {"r1"})


def test_a_second_failure_of_a_request_does_not_end_vllm_0_28():
    worker = old_worker()
    nixl_worker._fail(worker, "r1", BLOCKS)
    assert worker.get_finished() == (set(), {"r1"})
    worker._failed_recv_reqs.put("r1")  # a handshake that was waited for fails too
    nixl_worker._fail(worker, "r2", BLOCKS)
    assert worker.get_finished() == (set(), {"r2"})


# ------------------------------------------------------------- all threads at once

RESTARTS = 30
PER_START = 10
TOGETHER_S = 30.0


class Threads:
    """The book's thread, the handshakes' and the pushes', until the block ends."""

    def __init__(self, desk):
        self._desk = desk
        self._over = threading.Event()
        self._turns = queue.SimpleQueue()
        self.errors = []
        self._threads = [
            threading.Thread(target=self._loop, args=(work,))
            for work in (self._keep_book, desk.thread.run, desk.worker.write)
        ]

    def put(self, topology):
        """The book learns of it, on its own thread."""
        known = threading.Event()
        self._turns.put((topology, known))
        assert known.wait(TOGETHER_S)

    def _keep_book(self):
        if not self._turns.empty():
            topology, known = self._turns.get()
            self._desk.book.put(topology)
            known.set()
        self._desk.book.serve()

    def _loop(self, work):
        try:
            while not self._over.wait(0.0005):
                work()
        except Exception as error:  # noqa: BLE001 - told by the test
            self.errors.append(error)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join(TOGETHER_S)
        assert not any(thread.is_alive() for thread in self._threads)
        assert self.errors == []


def finish_transfers(desk):
    for handle in tuple(desk.nixl.transfers):
        desk.nixl.transfers[handle] = "DONE"


def test_reads_through_many_restarts_end_once_and_never_at_another_start(consumer):
    desk = consumer(Pull)
    of, ended = {}, collections.Counter()
    deadline = time.monotonic() + TOGETHER_S

    def turn(**receives):
        desk.step(**receives)
        finish_transfers(desk)
        ended.update(desk.results()[0].finished_recving)

    with Threads(desk) as threads:
        for number in range(RESTARTS):
            generation = f"g{number + 1}"
            threads.put(desk.peer(generation))
            for request in range(PER_START):
                of[f"r{number}-{request}"] = generation
                turn(**{f"r{number}-{request}": generation})
        while len(ended) < len(of) and time.monotonic() < deadline:
            turn()
    assert set(ended) == set(of)
    assert set(ended.values()) == {1}
    assert {request: of[request] for request in reached(desk)} == reached(desk)
    assert reached(desk)
    assert len(desk.nixl.agents) <= 1
    assert desk.half.held == {}


def test_pushes_through_many_restarts_never_reach_another_start(producer):
    desk = producer()
    of = {}
    deadline = time.monotonic() + TOGETHER_S

    def turn():
        desk.step()
        finish_transfers(desk)
        desk.results()

    with Threads(desk) as threads:
        for number in range(RESTARTS):
            generation = f"g{number + 1}"
            threads.put(desk.peer(generation))
            for request in range(PER_START):
                name = f"p{number}-{request}"
                of[name] = generation
                desk.worker._reqs_to_process.add(name)
                desk.step(finished=[name])
                registration = desk.registration(f"{name}-there", generation)
                desk.worker._deferred_push_inbox.put((name, BLOCKS, registration))
                turn()
        last = f"p{RESTARTS - 1}-{PER_START - 1}"
        while last not in reached(desk) and time.monotonic() < deadline:
            turn()
        for name in desk.worker._reqs_to_send:
            desk.worker._reqs_to_send[name] = 0.0  # the leases of the rest end
        while (desk.half.parked or desk.half.pushes) and time.monotonic() < deadline:
            turn()
    for _ in range(3):  # what the writer had before it yet
        desk.settle()
        turn()
    assert {name: of[name] for name in reached(desk)} == reached(desk)
    assert last in reached(desk)
    assert len(desk.nixl.agents) <= 1
    assert desk.half.parked == []
    assert desk.half.pushes == {}
