"""Mooncake's engine core with the book: vLLM's own scheduler object, no engine beside it."""

import importlib.util
import logging
import pickle
import warnings
from types import SimpleNamespace

import pytest
from tests.unit.vllm_integration.test_mooncake import ENGINE, Known, producer, worker

from rankbook.model import State
from rankbook_vllm.config import Settings

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as vllms
    from vllm.v1.request import RequestStatus

    from rankbook_vllm._vllm import mooncake

READY = producer(worker(0), worker(1))


def scheduler(topology=None, *, role="kv_consumer"):
    """vLLM's scheduler object as its `__init__` leaves it, and extended."""
    made = object.__new__(vllms.MooncakeConnectorScheduler)
    transfer = SimpleNamespace(engine_id=ENGINE)
    made.vllm_config = SimpleNamespace(kv_transfer_config=transfer)
    made.kv_cache_config = SimpleNamespace(transfer_group_ids=(0,))
    made.is_kv_producer, made.is_kv_consumer = role == "kv_producer", role == "kv_consumer"
    made._is_hma_required = made._has_mamba = made._bounded_replay = False
    made._reqs_need_recv, made._reqs_need_send, made._reqs_not_processed = {}, {}, set()
    mooncake.extend_scheduler(made, Settings(), Known(topology)).generation = "g1"
    return made


def request(**params):
    return SimpleNamespace(
        request_id="r1",
        prompt_token_ids=list(range(50)),
        num_prompt_tokens=50,
        kv_transfer_params=params,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
    )


def decode(**params):
    return request(do_remote_prefill=True, transfer_id="t1", remote_engine_id=ENGINE, **params)


def allocate(made, asked):
    """What vLLM's scheduler does with a request of which all tokens are to come."""
    made.on_new_request(asked)
    found = made.get_num_new_matched_tokens(asked, 0)
    blocks = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: ([7, 8],))
    made.update_state_after_alloc(asked, blocks, found[0])
    return found


def step(made):
    """What the workers get of a step."""
    return pickle.loads(pickle.dumps(made.build_connector_meta(None)))


def test_a_pull_goes_to_the_workers_bound_to_the_start_of_its_producer():
    made = scheduler(READY)
    assert allocate(made, decode()) == (50, True)
    meta = step(made)
    pull = meta.reqs_to_recv[ENGINE]["r1"]
    assert (pull.transfer_id, pull.local_block_ids) == ("t1", [[7, 8]])
    assert pull.rankbook_generation == "g1"
    assert meta.rankbook.failed == {}


def test_a_request_waits_in_the_queue_for_a_producer_that_is_not_there():
    made = scheduler(producer(worker(0), state=State.FORMING))
    made.on_new_request(decode())
    assert made.get_num_new_matched_tokens(decode(), 0) == (None, False)
    assert not step(made).reqs_to_recv


def test_a_request_of_an_older_start_goes_to_the_workers_to_be_failed():
    made = scheduler(READY)
    assert allocate(made, decode(remote_generation="g0")) == (50, True)
    meta = step(made)
    assert not meta.reqs_to_recv
    assert meta.rankbook.failed == {"r1": ([7, 8],)}
    assert step(made).rankbook.failed == {}


def test_a_prefill_that_nobody_named_gets_a_name_and_returns_what_its_consumer_needs():
    made = scheduler(role="kv_producer")
    asked = request(do_remote_decode=True)
    made.on_new_request(asked)
    made.update_state_after_alloc(asked, None, 0)
    assert step(made).reqs_to_send == {"r1": ("r1", [])}
    kept, returned = made.request_finished(asked, ([3, 4],))
    assert kept
    assert returned == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "r1",
        "remote_engine_id": ENGINE,
        "remote_generation": "g1",
    }
    assert step(made).reqs_to_send == {"r1": ("r1", [[3, 4]])}


def test_a_prefill_keeps_the_name_it_was_given():
    asked = request(do_remote_decode=True, transfer_id="given")
    scheduler(role="kv_producer").on_new_request(asked)
    assert asked.kv_transfer_params["transfer_id"] == "given"


def test_a_prefill_that_was_aborted_keeps_and_returns_nothing():
    made = scheduler(role="kv_producer")
    asked = request(do_remote_decode=True)
    made.on_new_request(asked)
    asked.status = RequestStatus.FINISHED_ABORTED
    assert made.request_finished(asked, ([3, 4],)) == (False, None)


def test_a_decode_aborted_in_the_queue_still_has_its_producer_free_the_blocks():
    made = scheduler(READY)
    asked = decode()
    made.on_new_request(asked)
    assert made.request_finished(asked, ([],)) == (False, None)
    assert step(made).reqs_to_recv[ENGINE]["r1"].local_block_ids == []


def live(made, asked, blocks=([3, 4],)):
    """All that vLLM's scheduler asks about a request, whose answer then has its full length."""
    found = allocate(made, asked)
    told = step(made)
    return found, told, made.request_finished(asked, blocks), step(made)


def served_without(made, asked):
    """Whether a request goes as one that names no peer, and leaves nothing behind."""
    found, told, finished, later = live(made, asked)
    assert (found, finished) == ((0, False), (False, None))
    for meta in (told, later):
        assert (meta.reqs_to_recv, meta.reqs_to_send, meta.reqs_not_processed) == ({}, {}, set())
        assert meta.rankbook.failed == {}
    return True


@pytest.fixture
def log(caplog):
    logger = logging.getLogger("vllm.rankbook")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("value", [True, 1, "yes", "x" * 10_000], ids=["true", "1", "yes", "long"])
@pytest.mark.parametrize(
    ("role", "flag"),
    [("kv_producer", "do_remote_prefill"), ("kv_consumer", "do_remote_decode")],
)
def test_a_request_for_the_other_role_is_served_without_kv_and_said(log, role, flag, value):
    """vLLM asserts on it, which ends the engine core."""
    asked = request(transfer_id="t1", remote_engine_id=ENGINE, **{flag: value})
    assert served_without(scheduler(READY, role=role), asked)
    assert (flag in log.text, role in log.text, len(log.text) < 1000) == (True, True, True)


@pytest.mark.parametrize(
    ("role", "flag"),
    [("kv_producer", "do_remote_prefill"), ("kv_consumer", "do_remote_decode")],
)
def test_a_request_for_the_other_role_may_be_aborted_in_the_queue(role, flag):
    made = scheduler(READY, role=role)
    asked = request(transfer_id="t1", remote_engine_id=ENGINE, **{flag: True})
    made.on_new_request(asked)
    asked.status = RequestStatus.FINISHED_ABORTED
    assert made.request_finished(asked, ([],)) == (False, None)
    assert not step(made).reqs_to_recv


def test_what_fits_the_role_is_done_beside_what_does_not():
    made = scheduler(READY)
    assert allocate(made, decode(do_remote_decode=True)) == (50, True)
    assert list(step(made).reqs_to_recv[ENGINE]) == ["r1"]
    made = scheduler(role="kv_producer")
    _, _, (kept, returned), _ = live(made, decode(do_remote_decode=True))
    assert (kept, returned["transfer_id"]) == (True, "t1")


def test_an_engine_of_both_roles_gets_the_kv_and_keeps_none_where_both_are_asked_for():
    """vLLM would keep the blocks for ever: its workers never hear that there is a transfer."""
    made = scheduler(READY, role="kv_both")
    found, told, finished, later = live(made, decode(do_remote_decode=True))
    assert (found, finished) == ((50, True), (False, None))
    assert list(told.reqs_to_recv[ENGINE]) == ["r1"]
    assert (told.reqs_to_send, later.reqs_to_send) == ({}, {})


@pytest.mark.parametrize("transfer_id", [[1], {"a": 1}, 7, 0, True, "x" * 513, "\ud800"])
@pytest.mark.parametrize("ends", [RequestStatus.FINISHED_ABORTED, None])
def test_a_prefill_whose_transfer_has_no_name_keeps_nothing(log, transfer_id, ends):
    """One that cannot be hashed ended the engine core when the request was aborted."""
    asked = request(do_remote_decode=True, transfer_id=transfer_id)
    asked.status = ends or asked.status
    assert served_without(scheduler(role="kv_producer"), asked)
    assert "transfer_id" in log.text


@pytest.mark.parametrize("params", ["text", 7, [{"do_remote_prefill": True}]])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_parameters_that_are_no_object_are_left_out(log, role, params):
    asked = request()
    asked.kv_transfer_params = params
    assert served_without(scheduler(READY, role=role), asked)
    assert asked.kv_transfer_params is None
    assert "no object" in log.text


@pytest.mark.parametrize("transfer_id", [[1], {"a": 1}, 7, "x" * 513])
def test_a_decode_whose_transfer_has_no_name_is_failed_with_its_blocks(transfer_id):
    made, asked = scheduler(READY), decode()
    asked.kv_transfer_params["transfer_id"] = transfer_id
    found, told, finished, later = live(made, asked)
    assert (found, finished) == ((50, True), (False, None))
    assert told.rankbook.failed == {"r1": ([7, 8],)}
    assert (told.reqs_to_recv, later.reqs_to_recv) == ({}, {})
