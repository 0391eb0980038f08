"""Claims about `rankbook.Registration` against a real registry."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading

import pytest

import rankbook
from rankbook import RegistrationState as State

TTL_S = 2.0
ANY = rankbook.Requirement.ANY

PUBLISHER = """
import os, sys
import rankbook
from rankbook.model import *
address, engine_id, mode = sys.argv[1:4]
record = WorkerRecord(
    group="prefill-a", engine_id=engine_id, generation="g1", role=Role.PRODUCER,
    layout=Layout(pp_size=1, tp_size=1, num_layers=8), slot=Slot(), layers=Layers(0, 8),
    handshake=Handshake("test", 1, b"agent"), process=Process(""),
)
registration = rankbook.Registration([record], endpoints=address, ttl_s=2.0, mode=mode)
registration.start()
registration.wait_registered(10)
print(registration.heartbeat_pid, flush=True)
"""


def until(changes: queue.Queue, wanted, timeout_s: float = 20.0):
    """The first change that is as wanted."""
    while True:
        change = changes.get(timeout=timeout_s)
        if wanted(change):
            return change


@pytest.fixture
def registration():
    """Makes registrations that end with the test."""
    made = []

    def make(*args, **kwargs):
        made.append(rankbook.Registration(*args, **{"ttl_s": TTL_S, **kwargs}))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def view(book):
    """A synced view of the shared server."""
    with rankbook.Client(book) as client, rankbook.TopologyView(client) as made:
        made.wait_synced(10)
        yield made


def is_out(view, engine_id):
    return lambda: view.get(engine_id) is None


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_records_are_in_the_book_until_stop_and_out_at_once_after_it(
    book, registration, view, made, engine_id, mode
):
    one = registration([made.record(engine_id)], endpoints=book, mode=mode)
    assert one.state is State.PENDING
    one.start()
    registered = one.wait_registered(10)
    assert one.state is State.REGISTERED
    made.eventually(lambda: view.get(engine_id) is not None, 2, "the engine is seen")
    topology = view.get(engine_id)
    assert registered.record_digests == (topology.statuses[0].record_digest,)
    assert topology.workers[0].handshake.payload == b"agent"
    one.stop()
    assert one.state is State.STOPPED
    assert made.eventually(is_out(view, engine_id), 1, "the engine is out") < TTL_S / 2


def test_a_missing_boot_id_is_filled_in(book, registration, view, made, engine_id):
    one = registration([made.record(engine_id, boot_id="")], endpoints=book)
    one.start()
    one.wait_registered(10)
    made.eventually(lambda: view.get(engine_id) is not None, 2, "the engine is seen")
    process = view.get(engine_id).workers[0].process
    assert (process.boot_id, process.pid) == (one.boot_id, os.getpid())
    assert process.hostname == socket.gethostname()


@pytest.mark.slow
def test_an_idle_registration_outlives_five_ttls(book, registration, made, engine_id):
    left = threading.Event()

    def watch_for_leaving(change):
        if change.state not in (State.PENDING, State.REGISTERED):
            left.set()

    one = registration([made.record(engine_id)], endpoints=book, on_change=watch_for_leaving)
    one.start()
    lease = one.wait_registered(10).lease
    assert not left.wait(5 * TTL_S)
    with rankbook.Client(book) as client:
        (status,) = client.renew_leases([lease.lease_id]).statuses
    assert status.state is rankbook.LeaseState.ALIVE


def test_a_worker_whose_interpreter_is_blocked_for_three_ttls_stays(
    book, program, view, made, engine_id
):
    # usleep by way of PyDLL keeps the interpreter's lock while it sleeps.
    hold = (
        "import ctypes\n"
        "ctypes.PyDLL(None).usleep(ctypes.c_uint(6_000_000))\n"
        "print(registration.state, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    changes = queue.Queue()
    worker = program(PUBLISHER + hold, book, engine_id, "process")
    worker.line()
    made.eventually(lambda: view.get(engine_id) is not None, 2, "the engine is seen")
    view.subscribe(lambda event: changes.put(event))
    assert worker.line() == "REGISTERED"
    seen = [changes.get() for _ in range(changes.qsize())]
    ours = [event for event in seen if event.topology.engine.engine_id == engine_id]
    assert [event.type for event in ours] == [rankbook.EventType.ADDED]


def test_a_killed_worker_is_out_within_two_seconds_though_a_forked_child_holds_its_pipes(
    book, program, view, made, engine_id
):
    forked = (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    import signal; signal.pause()\n"
        "print(child, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    worker = program(PUBLISHER + forked, book, engine_id, "process")
    heartbeat, child = int(worker.line()), int(worker.line())
    try:
        made.eventually(lambda: view.get(engine_id) is not None, 2, "the engine is seen")
        worker.kill()
        out_s = made.eventually(is_out(view, engine_id), 2.0, "the engine is out")
        gone_s = made.eventually(lambda: not made.is_running(heartbeat), 1.0, "it exits")
        assert made.is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)
    # Both well before the lease could have run out.
    assert out_s + gone_s < TTL_S


def test_an_engine_whose_worker_was_killed_has_not_lapsed(book, worker, made, engine_id):
    killed = worker(book, made.record(engine_id))
    with rankbook.Client(book) as client:
        engine = lambda: client.get_topology(engine_id, require=ANY).engine  # noqa: E731
        assert not engine().lapsed
        killed.kill()
        made.eventually(lambda: engine().state is rankbook.State.GONE, 2.0, "the engine is gone")
        assert not engine().lapsed


def test_an_engine_whose_worker_is_frozen_with_its_heartbeat_has_lapsed_and_stays_so(
    book, program, made, engine_id
):
    frozen = program(PUBLISHER + "sys.stdin.readline()\n", book, engine_id, "process")
    heartbeat = int(frozen.line())
    with rankbook.Client(book) as client:
        engine = lambda: client.get_topology(engine_id, require=ANY).engine  # noqa: E731
        frozen.process.send_signal(signal.SIGSTOP)
        os.kill(heartbeat, signal.SIGSTOP)
        try:
            made.eventually(
                lambda: engine().state is rankbook.State.GONE, TTL_S + 3, "its lease ran out"
            )
            assert engine().lapsed
        finally:
            os.kill(heartbeat, signal.SIGCONT)
            frozen.process.send_signal(signal.SIGCONT)
        made.eventually(lambda: engine().state is rankbook.State.COMPLETE, 10, "the worker is back")
        assert engine().lapsed


def test_a_heartbeat_process_ends_with_its_parent_also_while_the_registry_is_away(
    rankbookd, program, made, engine_id
):
    server = rankbookd()
    worker = program(PUBLISHER + "sys.stdin.readline()\n", server.grpc, engine_id, "process")
    heartbeat = int(worker.line())
    server.pause()
    worker.kill()
    made.eventually(lambda: not made.is_running(heartbeat), 1.0, "the heartbeat process exits")


def test_interrupting_a_terminal_leaves_the_heartbeat_to_its_parent(
    book, registration, made, engine_id
):
    one = registration([made.record(engine_id)], endpoints=book)
    one.start()
    one.wait_registered(10)
    assert os.getsid(one.heartbeat_pid) == one.heartbeat_pid
    os.kill(one.heartbeat_pid, signal.SIGINT)
    one.update(made.record(engine_id, payload=b"after"))
    assert one.wait_registered(5) is not None


def test_a_terminated_heartbeat_takes_the_records_out_and_stays_ended(
    book, registration, view, made, engine_id
):
    changes = queue.Queue()
    one = registration([made.record(engine_id)], endpoints=book, on_change=changes.put)
    one.start()
    one.wait_registered(10)
    made.eventually(lambda: view.get(engine_id) is not None, 2, "the engine is seen")
    os.kill(one.heartbeat_pid, signal.SIGTERM)
    stopped = until(changes, lambda change: change.state is State.STOPPED)
    assert "SIGTERM" in stopped.error.message
    made.eventually(is_out(view, engine_id), 1, "the engine is out")
    made.eventually(lambda: one.heartbeat_pid is None, 1, "no other heartbeat process starts")


def test_a_killed_heartbeat_is_replaced_before_the_lease_runs_out(
    book, registration, view, made, engine_id
):
    events = queue.Queue()
    one = registration([made.record(engine_id)], endpoints=book)
    one.start()
    lease = one.wait_registered(10).lease
    first = one.heartbeat_pid
    made.eventually(lambda: view.get(engine_id) is not None, 2, "the engine is seen")
    view.subscribe(
        lambda event: event.topology.engine.engine_id == engine_id and events.put(event.type)
    )
    os.kill(first, signal.SIGKILL)
    made.eventually(
        lambda: one.state is State.REGISTERED and one.heartbeat_pid not in (None, first),
        5,
        "another heartbeat process keeps it",
    )
    assert one.current.registered.lease.lease_id == lease.lease_id
    assert rankbook.EventType.REMOVED not in [events.get() for _ in range(events.qsize())]


def test_a_frozen_heartbeat_is_replaced_before_the_lease_runs_out(
    book, registration, made, engine_id
):
    one = registration([made.record(engine_id)], endpoints=book, ttl_s=6)
    one.start()
    lease = one.wait_registered(10).lease
    first = one.heartbeat_pid
    os.kill(first, signal.SIGSTOP)
    made.eventually(
        lambda: one.state is State.REGISTERED and one.heartbeat_pid not in (None, first),
        6,
        "another heartbeat process keeps it",
    )
    assert one.current.registered.lease.lease_id == lease.lease_id
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_registry_restarted_faster_than_a_heartbeat_is_noticed_and_has_kept_the_records(
    rankbookd, registration, made, engine_id, tmp_path
):
    changes = queue.Queue()
    server = rankbookd(store=f"sqlite:{tmp_path}/book.db")
    # A third of this TTL is far longer than the restart takes.
    one = registration(
        [made.record(engine_id)], endpoints=server.grpc, ttl_s=60, on_change=changes.put
    )
    one.start()
    registered = one.wait_registered(10)
    server.kill()
    server.start_again(same_port=True)
    after = until(
        changes,
        lambda change: (
            change.state is State.REGISTERED and change.boot_id not in ("", registered.boot_id)
        ),
    )
    assert after.book_id == registered.book_id
    assert after.registered.lease.lease_id == registered.lease.lease_id
    with rankbook.Client(server.grpc) as client:
        topology = client.get_topology(engine_id, require=rankbook.Requirement.COMPLETE)
    assert topology.statuses[0].revision == registered.revision


def test_a_lost_book_gets_records_and_seal_back_by_itself(rankbookd, registration, made, engine_id):
    server = rankbookd()
    worker = registration([made.record(engine_id)], endpoints=server.grpc)
    core = registration(endpoints=server.grpc)
    worker.start()
    core.start()
    digests = worker.wait_registered(10).record_digests
    core.seal(
        [rankbook.SealedSlot(rankbook.Slot(), f"{engine_id}-0-0", digests[0])],
        made.core("core"),
        engine_id=engine_id,
        generation="g1",
    )
    first = core.wait_sealed(10)
    book_id = worker.current.book_id
    server.kill()
    server.start_again(same_port=True)
    with rankbook.Client(server.grpc) as client:
        topology = client.get_topology(engine_id, wait_s=10)
        assert client.status().book_id != book_id
    assert topology.engine.state is rankbook.State.READY
    assert topology.engine.seal.digest == first.seal.digest


def test_a_publisher_that_was_there_first_is_registered_a_second_after_the_registry(
    rankbookd, registration, made, engine_id
):
    changes = queue.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    one = registration([made.record(engine_id)], endpoints=address, on_change=changes.put)
    one.start()
    waiting = until(changes, lambda change: change.error is not None)
    assert waiting.state is State.PENDING
    assert isinstance(waiting.error, rankbook.Unavailable)
    with pytest.raises(rankbook.Unavailable):
        one.wait_registered(0.1)
    rankbookd(listen=address)
    one.wait_registered(1.0)


def test_a_frozen_registry_ends_no_registration(rankbookd, registration, made, engine_id):
    changes = queue.Queue()
    server = rankbookd()
    one = registration([made.record(engine_id)], endpoints=server.grpc, on_change=changes.put)
    one.start()
    lease = one.wait_registered(10).lease
    server.pause()
    suspended = until(changes, lambda change: change.state is State.SUSPENDED)
    assert isinstance(suspended.error, rankbook.DeadlineExceeded | rankbook.Unavailable)
    assert not threading.Event().wait(2 * TTL_S)
    server.resume()
    back = until(changes, lambda change: change.state is State.REGISTERED)
    assert back.registered.lease.lease_id == lease.lease_id


def test_a_newer_start_fences_the_older_ones_registration(book, registration, made, engine_id):
    changes = queue.Queue()
    old = registration(
        [made.record(engine_id, boot_id="old")],
        endpoints=book,
        on_change=changes.put,
    )
    old.start()
    old.wait_registered(10)
    pid = old.heartbeat_pid
    new = registration(
        [made.record(engine_id, generation="g2", boot_id="new")],
        endpoints=book,
    )
    new.start()
    new.wait_registered(10)
    fenced = until(changes, lambda change: change.state is State.FENCED)
    assert isinstance(fenced.error, rankbook.Fenced)
    made.eventually(lambda: not made.is_running(pid), 1, "its heartbeat process exits")
    with pytest.raises(rankbook.Fenced):
        old.wait_registered(0)
    assert new.state is State.REGISTERED


def test_an_update_is_seen_and_a_withdrawn_payload_comes_back(
    book, registration, view, made, engine_id
):
    one = registration([made.record(engine_id)], endpoints=book)
    one.start()
    first = one.wait_registered(10)
    one.update(made.record(engine_id, payload=b"second"))
    second = one.wait_registered(5)
    assert second.record_digests != first.record_digests
    payload = lambda: view.get(engine_id).workers[0].handshake.payload  # noqa: E731
    made.eventually(lambda: payload() == b"second", 1, "the update is seen")
    one.withdraw(rankbook.Slot())
    one.wait_registered(5)
    made.eventually(lambda: view.get(engine_id).engine.asleep != (), 1, "it is asleep")
    assert payload() == b""
    one.update(made.record(engine_id, payload=b"third"))
    one.wait_registered(5)
    made.eventually(lambda: payload() == b"third", 1, "it is awake")
    assert view.get(engine_id).engine.asleep == ()


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_updates_from_many_threads_end_at_what_the_registration_holds(
    book, registration, made, engine_id, mode
):
    one = registration([made.record(engine_id)], endpoints=book, mode=mode)
    one.start()
    one.wait_registered(10)

    def write(writer: int):
        for turn in range(20):
            one.update(made.record(engine_id, payload=b"%d.%d" % (writer, turn)))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    one.wait_registered(10)
    (held,) = one._records.values()
    with rankbook.Client(book) as client:
        found = client.get_topology(engine_id, require=rankbook.Requirement.ANY)
    assert found.workers[0].handshake.payload == held.handshake.payload


def test_a_seal_waits_for_the_slot_that_is_missing(book, registration, made, engine_id):
    records = made.grid(engine_id, pp_size=1, tp_size=2)
    workers = [registration([r], endpoints=book) for r in records]
    for worker in workers:
        worker.start()
    slots = [
        rankbook.SealedSlot(r.slot, r.process.boot_id, w.wait_registered(10).record_digests[0])
        for r, w in zip(records, workers, strict=True)
    ]
    workers[1].stop()
    core = registration(endpoints=book)
    core.start()
    core.seal(slots, made.core("core"), engine_id=engine_id, generation="g1")
    made.eventually(lambda: core.current.seal_error is not None, 10, "the seal was refused")
    with pytest.raises(rankbook.Incomplete):
        core.wait_sealed(0)
    registration([records[1]], endpoints=book).start()
    assert core.wait_sealed(10).seal.number == 1
    assert core.current.seal_error is None


def test_the_clock_of_the_registry_is_known_with_a_bound(book, registration, made, engine_id):
    one = registration([made.record(engine_id)], endpoints=book)
    one.start()
    one.wait_registered(10)
    made.eventually(lambda: one.clock_offset is not None, 2, "a renewal was answered")
    import time

    offset = one.clock_offset
    here = time.time() - time.perf_counter()
    # One host, one clock: the two may differ by the error and by the clock's drift only.
    assert abs(offset.offset_s - here) <= offset.error_s + 0.05
    assert 0 < offset.error_s < 1


def test_a_longer_ttl_at_first_is_shortened_later(book, registration, made, engine_id):
    one = registration([made.record(engine_id)], endpoints=book, ttl_s=120)
    one.start()
    assert one.wait_registered(10).lease.ttl_s == 120
    one.set_ttl(10)
    made.eventually(lambda: one.current.registered.lease.ttl_s == 10, 5, "the TTL is shorter")


def test_where_no_process_can_be_started_a_thread_keeps_the_lease(
    book, registration, made, engine_id, monkeypatch
):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    one = registration([made.record(engine_id)], endpoints=book)
    one.start()
    assert one.wait_registered(10) is not None
    assert one.heartbeat_pid is None


def test_a_forked_child_cannot_end_its_parents_registration(book, program, view, made, engine_id):
    forked = (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    registration.stop()\n"
        "    try:\n"
        "        registration.set_ttl(5)\n"
        "    except rankbook.BadRequest:\n"
        "        print('refused', flush=True)\n"
        "    sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "print(registration.state, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    worker = program(PUBLISHER + forked, book, engine_id, "process")
    worker.line()
    assert worker.line() == "refused"
    assert worker.line() == "REGISTERED"
    made.eventually(lambda: view.get(engine_id) is not None, 2, "the engine is seen")


def test_an_on_change_that_raises_ends_nothing(book, registration, made, engine_id):
    def broken(change):
        raise RuntimeError("a fault of the caller's")

    one = registration([made.record(engine_id)], endpoints=book, on_change=broken)
    one.start()
    assert one.wait_registered(10) is not None


def test_a_registration_goes_on_at_the_other_endpoint(rankbookd, registration, made, engine_id):
    first, second = rankbookd(), rankbookd()
    changes = queue.Queue()
    one = registration(
        [made.record(engine_id)], endpoints=[first.grpc, second.grpc], on_change=changes.put
    )
    one.start()
    book_id = one.wait_registered(10).book_id
    first.kill()
    # The other one has another book, so it is signed in there anew.
    until(
        changes,
        lambda change: change.state is State.REGISTERED and change.book_id not in ("", book_id),
    )
    with rankbook.Client(second.grpc) as client:
        topology = client.get_topology(engine_id, require=rankbook.Requirement.COMPLETE)
    assert len(topology.workers) == 1


def test_a_peers_death_changes_nothing_of_ones_own_registration(
    book, registration, program, view, made, engine_id
):
    changes = queue.Queue()
    mine = registration([made.record(engine_id)], endpoints=book, on_change=changes.put)
    mine.start()
    mine.wait_registered(10)
    peer = program(PUBLISHER + "sys.stdin.readline()\n", book, f"{engine_id}-peer", "process")
    peer.line()
    made.eventually(lambda: view.get(f"{engine_id}-peer") is not None, 2, "the peer is seen")
    peer.kill()
    made.eventually(is_out(view, f"{engine_id}-peer"), 2, "the peer is out")
    assert mine.wait_registered(1) is not None
    assert {change.state for change in changes.queue} <= {State.PENDING, State.REGISTERED}


def test_a_batch_of_records_of_one_process_hangs_on_one_lease(
    book, registration, view, made, engine_id
):
    records = [made.record(engine_id, 0, tp, tp_size=100, boot_id="") for tp in range(100)]
    one = registration(records, endpoints=book)
    one.start()
    registered = one.wait_registered(10)
    assert len(registered.record_digests) == 100
    made.eventually(
        lambda: (t := view.get(engine_id)) is not None and len(t.workers) == 100, 2, "all are in"
    )
    topology = view.get(engine_id)
    assert {s.lease_id for s in topology.statuses} == {registered.lease.lease_id}
    assert registered.record_digests == tuple(s.record_digest for s in topology.statuses)
    one.stop()
    made.eventually(is_out(view, engine_id), 1, "all are out")


def test_without_a_pidfd_a_heartbeat_process_still_ends_within_a_second(program, made):
    text = (
        "import os, signal, subprocess, sys\n"
        "heartbeat = (\n"
        "    'import rankbook._heartbeat as h;'\n"
        "    'h._watch_parent = lambda pid: None; h.main()'\n"
        ")\n"
        "process = subprocess.Popen(\n"
        "    [sys.executable, '-c', heartbeat, str(os.getpid())],\n"
        "    stdin=subprocess.PIPE, stdout=subprocess.PIPE,\n"
        ")\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.pause()\n"
        "print(process.pid, child, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    parent = program(text)
    heartbeat, child = (int(pid) for pid in parent.line().split())
    try:
        made.eventually(lambda: made.is_running(heartbeat), 1, "it runs")
        parent.kill()
        made.eventually(lambda: not made.is_running(heartbeat), 1.0, "it exits")
    finally:
        os.kill(child, signal.SIGKILL)
