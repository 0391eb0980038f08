"""Worker and engine core against a real registry, without vLLM."""

import contextlib
import logging
import queue
import socket
import threading
import time

import pytest
from tests.unit.vllm_integration.facts import LAYOUT, facts

import rankbook
from rankbook import Address, BadRecord, Handshake, SealMismatch, State, Unavailable
from rankbook_vllm.config import load
from rankbook_vllm.publish import ChangeLog, Publisher
from rankbook_vllm.seal import check_grid
from rankbook_vllm.sealing import Sealer, serving_addresses

LOG = logging.getLogger("tests.signing_in")
WAIT_S = 20.0


class Start:
    """One start of an engine of two stages: its workers and its core, in this process."""

    def __init__(self, address, engine_id, core_addresses=(), **settings):
        self.engine_id = engine_id
        settings = {"endpoints": address, "ttl_s": 2.0, **settings}
        self.settings = load(settings, {})
        self.workers = [Publisher(self.settings, LOG) for _ in range(2)]
        start = self.workers[0].begin(engine_id)
        for worker in self.workers:
            worker.start = start
        self.core = Sealer(
            self.settings,
            LOG,
            engine_id=engine_id,
            connector="NixlPushConnector",
            addresses=core_addresses,
            clock=time.perf_counter,
        )

    def publish(self, payload=b"payload"):
        """Publishes both stages; what the engine core hears of it."""
        notes = {}
        for pp_rank, worker in enumerate(self.workers):
            handshake = Handshake("vllm.nixl", 14, payload + b" of %d" % pp_rank)
            made = facts(pp_rank, engine_id=self.engine_id, handshake=handshake)
            notes[(pp_rank, 0)] = (worker.publish(made),)
        return check_grid(notes, LAYOUT, {})

    def stop(self):
        for part in (*self.workers, self.core):
            part.stop()


@pytest.fixture
def begin(shared_rankbookd):
    """Makes starts that end with the test."""
    made = []

    def make(engine_id, address=shared_rankbookd.grpc, **settings):
        made.append(Start(address, engine_id, **settings))
        return made[-1]

    yield make
    for start in made:
        start.stop()


@pytest.fixture
def watch(shared_rankbookd):
    """Waits until an engine is in a state, as a peer sees it."""
    with contextlib.ExitStack() as stack:

        def until(engine_id, matches, timeout_s=WAIT_S):
            client = stack.enter_context(rankbook.Client(shared_rankbookd.grpc))
            found: queue.Queue = queue.Queue()

            def look():
                with contextlib.suppress(rankbook.RankbookError):
                    for event in client.watch(rankbook.EngineFilter(engine_id=engine_id)):
                        if matches(event.topology.engine):
                            found.put(event.topology)
                            return

            threading.Thread(target=look, daemon=True).start()
            return found.get(timeout=timeout_s)

        yield until


def ready(engine):
    return engine.state is State.READY


def test_an_engine_signs_in_seals_and_is_ready(begin, watch):
    start = begin("signs-in")
    start.core.seal(start.publish())
    topology = watch("signs-in", ready)
    assert topology.engine.generation == start.workers[0].start.generation
    assert topology.engine.epoch == start.workers[0].start.epoch == 1
    assert topology.worker(1, 0).handshake.payload == b"payload of 1"
    assert topology.engine.core.connector == "NixlPushConnector"
    clock = topology.engine.core.clock
    assert clock.local_s <= time.perf_counter()
    assert 0 < clock.error_s < 5


def test_an_engine_that_started_before_the_registry_is_ready_when_it_comes(begin, rankbookd):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    start = begin("too-early", address, begin_timeout_s=0.2)
    assert start.workers[0].start.epoch == 0
    start.core.seal(start.publish())
    rankbookd(listen=address)
    with rankbook.Client(address) as client:
        topology = client.get_topology("too-early", wait_s=WAIT_S)
    assert topology.engine.state is State.READY
    assert topology.engine.core.clock is not None


def test_stopping_takes_workers_and_core_out_at_once_and_twice_is_fine(
    begin, watch, shared_rankbookd
):
    start = begin("stops", ttl_s=60)
    start.core.seal(start.publish())
    watch("stops", ready)
    start.stop()
    start.stop()
    with rankbook.Client(shared_rankbookd.grpc) as client, pytest.raises(rankbook.Gone):
        client.get_topology("stops")


def test_a_worker_asleep_keeps_its_slot_and_comes_back_with_a_new_payload_and_seal(begin, watch):
    start = begin("sleeps")
    start.core.seal(start.publish())
    watch("sleeps", ready)
    for worker in start.workers:
        worker.withdraw()
    asleep = watch("sleeps", lambda engine: len(engine.asleep) == 2)
    assert asleep.engine.state is State.DEGRADED
    assert asleep.engine.present == 2
    start.core.seal(start.publish(b"after waking"))
    awake = watch("sleeps", ready)
    assert awake.worker(0, 0).handshake.payload == b"after waking of 0"
    assert awake.engine.seal.number == 2
    assert awake.engine.generation == asleep.engine.generation


def test_a_book_that_disagrees_is_named_in_the_log_and_sealed_once_it_agrees(begin, watch, caplog):
    start = begin("disagrees")
    told = start.publish(b"what the core was told")
    start.publish(b"what the book has")
    heard: queue.Queue = queue.Queue()
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: heard.put(record.getMessage())
    LOG.addHandler(handler)
    try:
        start.core.seal(told)
        said = heard.get(timeout=WAIT_S)
    finally:
        LOG.removeHandler(handler)
    assert "pp0 tp0 handshake.payload: other bytes" in said
    assert "what the" not in said
    start.publish(b"what the core was told")
    assert watch("disagrees", ready).engine.seal.number == 1


def test_where_required_a_book_that_disagrees_stops_the_engine(begin):
    start = begin("required-disagrees", required=True, seal_timeout_s=2)
    told = start.publish(b"what the core was told")
    start.publish(b"what the book has")
    with pytest.raises(SealMismatch):
        start.core.seal(told)


def test_where_required_the_engine_is_ready_when_sealing_returns(begin, shared_rankbookd):
    start = begin("required", required=True)
    start.core.seal(start.publish())
    with rankbook.Client(shared_rankbookd.grpc) as client:
        assert client.get_topology("required").engine.state is State.READY


def test_a_worker_that_could_not_publish_leaves_the_engine_unsealed_and_says_why(begin, caplog):
    start = begin("half")
    bad = start.workers[1].failed(facts(1).slot, 1, ValueError("no such layer"))
    first = start.workers[0].publish(facts(0, engine_id="half"))
    start.core.seal(check_grid({(0, 0): (first,), (1, 0): (bad,)}, LAYOUT, {}))
    assert "half is not sealed: pp1 tp0: no such layer" in caplog.text


def test_where_required_a_worker_that_could_not_publish_stops_the_engine(begin):
    start = begin("half-required", required=True)
    with pytest.raises(ValueError, match="no such layer"):
        start.workers[1].failed(facts(1).slot, 1, ValueError("no such layer"))


@pytest.fixture
def black_hole():
    """An address that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_core_whose_record_breaks_a_rule_is_an_error_that_names_it(begin, caplog):
    listens = (Address("zmq", "node 7", 5600, "side-channel"),)
    start = begin("core-breaks-a-rule", core_addresses=listens, required=True)
    whole = start.publish()
    with pytest.raises(BadRecord, match="node 7"):
        start.core.seal(whole)
    assert "cannot be sealed" in caplog.text


def test_a_registry_that_never_answers_holds_a_start_up_no_longer_than_allowed(black_hole):
    worker = Publisher(load({"endpoints": black_hole, "begin_timeout_s": 0.5}, {}), LOG)
    before = time.monotonic()
    worker.start = worker.begin("held-up")
    assert worker.start.epoch == 0
    worker.publish(facts(0, engine_id="held-up"))
    worker.stop()
    assert time.monotonic() - before < 5


def test_where_required_a_registry_that_never_answers_is_an_error_by_the_deadline(black_hole):
    settings = {"endpoints": black_hole, "begin_timeout_s": 0.2, "required": True}
    worker = Publisher(load({**settings, "register_timeout_s": 1}, {}), LOG)
    worker.start = worker.begin("held-up")
    before = time.monotonic()
    with pytest.raises((Unavailable, TimeoutError)):
        worker.publish(facts(0, engine_id="held-up"))
    assert time.monotonic() - before < 5
    worker.stop()


def test_the_log_says_each_change_once(caplog):
    say = ChangeLog(LOG, "e pp0 tp0")
    away = rankbook.RegistrationChange(
        state=rankbook.RegistrationState.PENDING, error=Unavailable("nobody at a:1")
    )
    for _ in range(3):
        say(away)
    say(rankbook.RegistrationChange(state=rankbook.RegistrationState.STOPPED))
    assert [record.getMessage() for record in caplog.records] == [
        "rankbook: e pp0 tp0: not signed in yet, going on trying: nobody at a:1"
    ]


@pytest.mark.parametrize(
    ("setting", "host", "port"),
    [
        ("10.0.0.5:8000", "10.0.0.5", 8000),
        ("[2001:db8::1]:8000", "2001:db8::1", 8000),
        ("prefill.example", "prefill.example", 0),
    ],
)
def test_a_serving_address_is_published_as_host_and_port(setting, host, port):
    (address,) = serving_addresses(setting)
    assert (address.scheme, address.host, address.port) == ("http", host, port)
    assert serving_addresses("") == ()
