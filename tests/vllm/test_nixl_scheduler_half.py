"""NIXL's engine core with the book: vLLM's own scheduler objects, no engine beside them.

Stand-ins: a configuration with only what the objects read, and requests and block
tables with only the attributes used. The book is written by hand.
"""

import importlib.util
import pickle
import warnings
from types import SimpleNamespace

import pytest
from tests.unit.vllm_integration.books import HandBook, engine

from rankbook.model import Layout, Role, State
from rankbook_vllm.config import Settings

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
        NixlPullConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import (
        NixlPushConnectorScheduler,
    )
    from vllm.v1.request import RequestStatus

    from rankbook_vllm._vllm import nixl

PRODUCER = "prefill-a-0"
GRID = Layout(pp_size=2, tp_size=2, num_layers=4)
LISTENS = ("10.0.0.7", 5600)
TOKENS = 48
BLOCKS = ([7, 8, 9],)


class Told:
    """Goes before vLLM's: counts what it is told."""

    def __init__(self, *args):
        self.shown = []
        self.finished = []
        super().__init__(*args)

    def on_new_request(self, request):
        self.shown.append(request.request_id)
        super().on_new_request(request)

    def request_finished(self, request, block_ids):
        self.finished.append(request.request_id)
        return super().request_finished(request, block_ids)


class Push(Told, NixlPushConnectorScheduler):
    pass


class Pull(Told, NixlPullConnectorScheduler):
    pass


def config():
    """As much of vLLM's configuration as a scheduler object reads."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_index=0,
        ),
        cache_config=SimpleNamespace(block_size=16),
        kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both"),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        num_prefill_lookahead_tokens=0,
    )


class CacheConfig(SimpleNamespace):
    """One group of full attention, which is transferred whole."""

    transfer_groups = ()
    kv_cache_groups = ()
    has_mamba_layers = False

    def select_transfer_block_ids(self, block_ids):
        return block_ids


@pytest.fixture
def book():
    return HandBook()


@pytest.fixture
def make(book):
    def made(kind=Push, **settings):
        scheduler = kind(config(), "decode-a-0", CacheConfig())
        nixl.extend_scheduler(scheduler, Settings(**settings), book).generation = "d1"
        return scheduler

    return made


def producer(**changes):
    return engine(PRODUCER, **({"layout": GRID, "listens": LISTENS} | changes))


def decode(request_id="r1", **more):
    """What a proxy must send at least."""
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": PRODUCER,
        "remote_generation": "g1",
        "remote_request_id": "cmpl-r1",
        "remote_block_ids": ([1, 2, 3],),
    }
    return request(request_id, params | more)


def request(request_id, params):
    return SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=list(range(TOKENS)),
        num_prompt_tokens=TOKENS,
        num_computed_tokens=TOKENS,
        kv_transfer_params=params,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
    )


def blocks_of(ids):
    groups = [[SimpleNamespace(block_hash=None, is_null=False) for _ in group] for group in ids]
    return SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: ids, blocks=groups)


def schedule(scheduler, asked, *, cached=0):
    """What vLLM's engine core does with a waiting request at one step."""
    found = scheduler.get_num_new_matched_tokens(asked, cached)
    if found[0] is not None:
        scheduler.update_state_after_alloc(asked, blocks_of(BLOCKS), found[0])
    return found


def step(scheduler):
    """What the workers get of a step."""
    return pickle.loads(pickle.dumps(scheduler.build_connector_meta(None)))


def held(scheduler):
    """Every request that the book's side of a scheduler still remembers."""
    requests = scheduler.rankbook.requests
    kept = [value for name, value in vars(requests).items() if name != "counts"]
    return [one for value in kept if isinstance(value, dict) for one in value]


both = pytest.mark.parametrize("kind", [Push, Pull], ids=["push", "pull"])


# ------------------------------------------------------------- a producer that is READY


@both
def test_a_request_of_a_ready_producer_goes_on_at_once_and_is_shown_to_vllm_once(make, book, kind):
    book.put(producer())
    scheduler, asked = make(kind), decode()
    scheduler.on_new_request(asked)
    assert scheduler.shown == ["r1"]
    assert schedule(scheduler, asked) == (TOKENS, True)
    assert scheduler.shown == ["r1"]
    sent = {name: asked.kv_transfer_params[name] for name in ("remote_host", "remote_port")}
    assert sent == {"remote_host": PRODUCER, "remote_port": 0}
    sizes = {name: asked.kv_transfer_params[name] for name in ("tp_size", "dcp_size", "pp_size")}
    assert sizes == {"tp_size": 2, "dcp_size": 1, "pp_size": 2}


@both
def test_vllm_keeps_the_lease_alive_of_a_request_that_went_on(make, book, kind):
    book.put(producer())
    scheduler = make(kind)
    scheduler.on_new_request(decode())
    beat = step(scheduler).heartbeat_by_engine[PRODUCER]
    assert (beat.host, beat.port, beat.req_ids) == (PRODUCER, 0, {"cmpl-r1"})
    assert (beat.tp_size, beat.pp_size) == (2, 2)


@both
def test_the_workers_learn_which_start_each_request_is_of(make, book, kind):
    book.put(producer())
    scheduler, asked = make(kind), decode()
    scheduler.on_new_request(asked)
    schedule(scheduler, asked)
    meta = step(scheduler)
    assert meta.reqs_to_recv["r1"].remote.engine_id == PRODUCER
    assert meta.rankbook.generations == {"r1": "g1"}
    assert meta.rankbook.failed == {}


def test_a_registration_tells_both_starts(make, book):
    book.put(producer())
    scheduler, asked = make(Push), decode()
    scheduler.on_new_request(asked)
    schedule(scheduler, asked)
    sent = step(scheduler).push_registrations["r1"]
    assert sent["decode_generation"] == "d1"
    assert sent["remote_generation"] == "g1"
    assert (sent["remote_tp_size"], sent["remote_pp_size"]) == (2, 2)


@both
def test_a_request_that_was_preempted_is_not_asked_for_again(make, book, kind):
    book.put(producer())
    scheduler, asked = make(kind), decode()
    scheduler.on_new_request(asked)
    schedule(scheduler, asked)
    assert "r1" in step(scheduler).reqs_to_recv
    assert schedule(scheduler, asked) == (0, False)
    meta = step(scheduler)
    assert not meta.reqs_to_recv
    assert not meta.push_registrations
    assert scheduler.shown == ["r1"]


@both
def test_a_request_that_ended_is_forgotten(make, book, kind):
    book.put(producer())
    scheduler, asked = make(kind), decode()
    scheduler.on_new_request(asked)
    schedule(scheduler, asked)
    assert held(scheduler) == ["r1"]
    assert scheduler.request_finished(asked, ([],)) == (False, None)
    assert held(scheduler) == []


@both
def test_one_aborted_before_it_ran_has_its_producer_told_and_binds_nobody(make, book, kind):
    book.put(producer())
    scheduler, asked, other = make(kind), decode(), decode("r2")
    for one in (other, asked):
        scheduler.on_new_request(one)
    schedule(scheduler, other)
    assert scheduler.request_finished(asked, ([],)) == (False, None)
    meta = step(scheduler)
    assert not any(meta.reqs_to_recv["r1"].local_block_ids)
    assert meta.rankbook.generations == {"r2": "g1"}


# --------------------------------------------------------- a producer that is not there


@both
def test_a_request_of_a_forming_producer_waits_unseen_and_is_shown_once_later(make, book, kind):
    book.put(producer(state=State.FORMING, without=(1,)))
    scheduler, asked = make(kind), decode()
    scheduler.on_new_request(asked)
    assert schedule(scheduler, asked) == (None, False)
    assert schedule(scheduler, asked) == (None, False)
    assert scheduler.shown == []
    assert not step(scheduler).reqs_to_recv
    book.put(producer())
    assert schedule(scheduler, asked) == (TOKENS, True)
    assert scheduler.shown == ["r1"]
    assert step(scheduler).rankbook.generations == {"r1": "g1"}


@both
def test_one_aborted_while_it_waits_leaves_nothing_and_vllm_never_hears_of_it(make, book, kind):
    book.put(producer(state=State.FORMING, without=(1,)))
    scheduler, asked = make(kind), decode()
    scheduler.on_new_request(asked)
    schedule(scheduler, asked)
    assert held(scheduler) == ["r1"]
    assert scheduler.request_finished(asked, ([],)) == (False, None)
    assert scheduler.finished == []
    assert held(scheduler) == []
    meta = step(scheduler)
    assert not meta.reqs_to_recv
    assert meta.rankbook.failed == {}


def test_one_that_waited_too_long_goes_to_the_workers_to_be_failed(make, book):
    scheduler, asked = make(Push, side_channel=False, peer_timeout_s=0.0), decode()
    scheduler.on_new_request(asked)
    assert schedule(scheduler, asked) == (TOKENS, True)
    assert step(scheduler).rankbook.failed == {"r1": BLOCKS}


# ------------------------------------------------------------------------------ refused


@both
def test_a_refused_request_goes_to_the_workers_to_be_failed_and_to_no_producer(make, book, kind):
    book.put(producer(generation="g2", epoch=2))
    scheduler, asked = make(kind), decode()
    scheduler.on_new_request(asked)
    assert schedule(scheduler, asked) == (TOKENS, True)
    meta = step(scheduler)
    assert meta.rankbook.failed == {"r1": BLOCKS}
    assert not meta.reqs_to_recv
    assert not meta.push_registrations
    assert scheduler.shown == []
    assert step(scheduler).rankbook.failed == {}  # once


@both
def test_a_refused_request_leaves_nothing_when_it_ends(make, book, kind):
    book.put(producer(generation="g2", epoch=2))
    scheduler, asked = make(kind), decode()
    scheduler.on_new_request(asked)
    schedule(scheduler, asked)
    assert scheduler.request_finished(asked, ([],)) == (False, None)
    assert held(scheduler) == []
    assert not step(scheduler).reqs_to_recv


@both
def test_a_refused_request_whose_tokens_are_all_here_is_served(make, book, kind):
    book.put(producer(generation="g2", epoch=2))
    scheduler, asked = make(kind), decode()
    scheduler.on_new_request(asked)
    assert schedule(scheduler, asked, cached=TOKENS) == (0, False)
    meta = step(scheduler)
    assert meta.rankbook.failed == {}
    assert not meta.reqs_to_recv


@both
def test_a_producer_that_started_anew_before_the_request_got_blocks_fails_it(make, book, kind):
    book.put(producer())
    scheduler, asked = make(kind), decode()
    scheduler.on_new_request(asked)
    book.put(producer(generation="g2", epoch=2))
    assert schedule(scheduler, asked) == (TOKENS, True)
    meta = step(scheduler)
    assert meta.rankbook.failed == {"r1": BLOCKS}
    assert not meta.reqs_to_recv
    scheduler.request_finished(asked, ([],))
    assert held(scheduler) == []
    assert scheduler._heartbeat_by_engine == {}


# --------------------------------------------------------------- what passes untouched


@both
@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}], ids=str)
def test_a_request_that_needs_no_peer_passes_untouched(make, kind, params):
    scheduler = make(kind)
    asked = request("r1", params if params is None else dict(params))
    scheduler.on_new_request(asked)
    assert scheduler.shown == ["r1"]
    assert schedule(scheduler, asked) == (0, False)
    assert step(scheduler).rankbook.failed == {}
    assert scheduler.request_finished(asked, ([],))[0] is False
    assert scheduler.finished == ["r1"]
    assert asked.kv_transfer_params in (None, params, {"do_remote_prefill": False})
    assert held(scheduler) == []


@pytest.mark.parametrize("params", ["text", [1], 7], ids=str)
def test_parameters_that_are_no_table_are_never_ours(params):
    seen = []

    class Vllm:
        def on_new_request(self, request):
            seen.append(request)

    half = Vllm()
    half.rankbook = None  # whatever is asked of it would raise
    nixl.become(half, nixl.BookScheduler)
    half.on_new_request(request("r1", params))
    assert len(seen) == 1


@both
def test_what_a_producer_returns_carries_its_start(make, kind):
    scheduler, asked = make(kind), request("r1", {"do_remote_decode": True})
    scheduler.on_new_request(asked)
    assert schedule(scheduler, asked) == (0, False)
    assert "r1" in step(scheduler).reqs_in_batch
    kept, returned = scheduler.request_finished(asked, BLOCKS)
    assert kept
    assert returned["remote_generation"] == "d1"
    assert returned["remote_engine_id"] == "decode-a-0"
    assert returned["remote_port"] is not None


@both
def test_what_a_producer_without_a_listener_returns_names_no_address(make, kind):
    scheduler = make(kind, side_channel=False)
    asked = request("r1", {"do_remote_decode": True})
    scheduler.on_new_request(asked)
    schedule(scheduler, asked)
    _, returned = scheduler.request_finished(asked, BLOCKS)
    assert (returned["remote_host"], returned["remote_port"]) == (None, None)
    assert returned["remote_generation"] == "d1"


@both
def test_what_a_producer_without_a_listener_returns_is_enough_for_a_consumer(make, book, kind):
    producing = make(kind, side_channel=False)
    done = request("p1", {"do_remote_decode": True})
    producing.on_new_request(done)
    schedule(producing, done)
    _, returned = producing.request_finished(done, BLOCKS)
    book.put(engine("decode-a-0", role=Role.BOTH, generation="d1"))
    consuming, asked = make(kind, side_channel=False), request("r1", returned)
    consuming.on_new_request(asked)
    assert schedule(consuming, asked) == (TOKENS, True)
    remote = step(consuming).reqs_to_recv["r1"].remote
    assert (remote.engine_id, remote.host, remote.port) == ("decode-a-0", "decode-a-0", 0)


# ------------------------------------------------------------------------- the listener


def test_no_listener_is_started_where_none_is_wanted(make):
    scheduler = make(side_channel=False)
    scheduler.set_xfer_handshake_metadata({})
    assert scheduler._nixl_handshake_listener_t is None


def test_vllms_listener_is_started_where_it_is_wanted(make):
    scheduler = make()
    scheduler.side_channel_host, scheduler.side_channel_port = "127.0.0.1", 0
    scheduler.set_xfer_handshake_metadata({})
    assert scheduler._nixl_handshake_listener_t.is_alive()
    scheduler.shutdown()


def test_the_class_keeps_its_name_and_stays_vllms(make):
    scheduler = make(Push)
    assert type(scheduler).__name__ == "Push"
    assert isinstance(scheduler, NixlPushConnectorScheduler)
    assert type(make(Push)) is type(scheduler)


@both
@pytest.mark.parametrize("params", ["text", ["a", "list"], 7, True])
def test_parameters_that_are_no_object_end_no_engine_core(make, kind, params):
    scheduler, asked = make(kind), request("r1", params)
    scheduler.on_new_request(asked)
    assert schedule(scheduler, asked) == (0, False)
    assert scheduler.request_finished(asked, BLOCKS) == (False, None)
    assert held(scheduler) == []


# ------------------------------------------------------------- what is read back


def second_turn(**more):
    """A prefill whose prompt is partly at the decode engine of the turn before."""
    said = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": PRODUCER,
        "remote_generation": "g1",
        "remote_request_id": "cmpl-r1",
        "remote_block_ids": ([1, 2, 3],),
        "remote_num_tokens": TOKENS,
    }
    return request("r1", said | more)


@pytest.fixture
def reader(make):
    scheduler = make(Pull)
    scheduler.is_bidirectional_kv_xfer_enabled = True
    scheduler.kv_recompute_threshold = 0
    return scheduler


def test_what_a_decode_engine_kept_is_read_from_the_start_that_kept_it(reader, book):
    book.put(producer(role=Role.BOTH))
    asked = second_turn()
    reader.on_new_request(asked)
    assert schedule(reader, asked) == (TOKENS, True)
    meta = step(reader)
    assert meta.reqs_to_recv["r1"].remote.engine_id == PRODUCER
    assert meta.rankbook.generations == {"r1": "g1"}


@pytest.mark.parametrize("known", [None, {"generation": "g2", "epoch": 2}, {"state": State.GONE}])
def test_a_prompt_is_computed_where_what_was_kept_of_it_is_lost(reader, book, known):
    if known is not None:
        book.put(producer(role=Role.BOTH, **known))
    asked = second_turn()
    reader.on_new_request(asked)
    assert schedule(reader, asked) == (0, False)
    assert step(reader).reqs_to_recv == {}


def test_a_prompt_is_computed_where_what_was_kept_goes_while_it_waits(reader, book):
    book.put(producer(role=Role.BOTH))
    asked = second_turn()
    reader.on_new_request(asked)
    book.put(producer(role=Role.BOTH, generation="g2", epoch=2))
    assert schedule(reader, asked) == (0, False)


def test_nothing_is_counted_on_by_an_engine_that_reads_nothing_back(make, book):
    """vLLM would wait for KV that it has told no worker of."""
    book.put(producer(role=Role.BOTH))
    scheduler = make(Pull)
    asked = second_turn(remote_host="10.0.0.7", remote_port=5600)
    scheduler.on_new_request(asked)
    assert schedule(scheduler, asked) == (0, False)
    scheduler.request_finished(asked, BLOCKS)
    assert held(scheduler) == []
