"""Whatever a request or a record says, the engine core refuses it and goes on."""

import copy
import dataclasses
import logging

import pytest
from tests.unit.vllm_integration.books import engine

from rankbook.errors import BadRequest, DeadlineExceeded
from rankbook.model import State
from rankbook_vllm.config import Settings
from rankbook_vllm.requests import WAITED, Requests, Verdict

ENGINE = "prefill-a-0"
HUGE = "x" * 5_000_000
KEPT_S = 30.0


@pytest.fixture
def requests_of(book, clock):
    def make(*, pull=True, **settings):
        settings = Settings(**({"peer_timeout_s": 3600.0} | settings))
        log = logging.getLogger("rankbook")
        return Requests(book, settings, log, clock, needs_block_ids=pull, kept_s=KEPT_S)

    return make


def least(**more):
    """What a proxy must send at least for a pull."""
    return {
        "do_remote_prefill": True,
        "remote_engine_id": ENGINE,
        "remote_generation": "g1",
        "remote_request_id": "cmpl-1",
        "remote_block_ids": [[1]],
    } | more


def with_cache(**changes):
    """The engine, whose workers publish another KV cache: 256 blocks without a change."""
    whole = engine()
    kv = dataclasses.replace(whole.workers[0].kv, **changes)
    workers = tuple(dataclasses.replace(worker, kv=kv) for worker in whole.workers)
    return dataclasses.replace(whole, workers=workers)


# ------------------------------------------------------------------------ block ids


@pytest.mark.parametrize("blocks", [([3, 4],), [[3, 4], []]])
def test_pull_keeps_the_block_ids_that_it_was_sent(book, requests_of, blocks):
    book.put(engine())
    params = least(remote_block_ids=copy.deepcopy(blocks))
    assert requests_of().ask("r", params) is Verdict.GO
    assert params["remote_block_ids"] == blocks


def test_block_ids_in_one_list_are_of_one_group_as_vllm_has_them(book, requests_of):
    book.put(engine())
    params = least(remote_block_ids=[3, 4])
    assert requests_of().ask("r", params) is Verdict.GO
    assert params["remote_block_ids"] == [[3, 4]]


@pytest.mark.parametrize("blocks", [[128], [3, -1], ([3], [4, 1 << 40]), [[], [2**70]]], ids=repr)
def test_pull_of_a_block_that_the_producer_has_not_fails(book, requests_of, blocks):
    book.put(with_cache(physical_blocks_per_logical=2))
    requests = requests_of()
    assert requests.ask("r", least(remote_block_ids=[0, 127])) is Verdict.GO
    assert requests.ask("s", least(remote_block_ids=blocks)) is Verdict.FAIL
    error = requests.error("s")
    assert isinstance(error, BadRequest)
    assert (error.metadata["field"], error.metadata["rule"]) == ("remote_block_ids", "0 to 127")
    # Push ignores them.
    assert requests_of(pull=False).ask("s", least(remote_block_ids=blocks)) is Verdict.GO


def test_pull_takes_any_block_of_a_producer_that_does_not_say_how_many_it_has(book, requests_of):
    book.put(with_cache(num_blocks=0))
    assert requests_of().ask("r", least(remote_block_ids=[4096])) is Verdict.GO


def test_a_record_that_leaves_physical_blocks_open_means_one(book, requests_of):
    book.put(with_cache(physical_blocks_per_logical=0))
    assert requests_of().ask("r", least(remote_block_ids=[[255]])) is Verdict.GO
    assert requests_of().ask("r", least(remote_block_ids=[[256]])) is Verdict.FAIL


def test_more_block_ids_than_any_prompt_has_are_refused(requests_of):
    requests = requests_of()
    assert requests.ask("r", least(remote_block_ids=[[0] * (1 << 18)])) is Verdict.LATER
    assert requests.ask("s", least(remote_block_ids=[[0] * ((1 << 18) + 1)])) is Verdict.FAIL


def test_what_waits_is_looked_at_once(requests_of):
    class Blocks(list):
        looked = 0

        def __iter__(self):
            self.looked += 1
            return super().__iter__()

    blocks, requests = Blocks([1, 2]), requests_of()
    for _ in range(3):
        assert requests.ask("r", least(remote_block_ids=blocks)) is Verdict.LATER
    assert blocks.looked == 1


# ----------------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    "change",
    [
        {"remote_engine_id": HUGE},
        {"remote_engine_id": [HUGE]},
        {"remote_generation": HUGE},
        {"remote_request_id": HUGE},
        {"group": HUGE},
        {"remote_block_ids": HUGE},
        {"remote_block_ids": [HUGE] * 100},
        {"remote_host": HUGE},
        {"tp_size": [HUGE]},
        {"pp_size": 10**4000},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("setting", ["correct", "refuse"])
def test_no_value_of_a_request_fills_the_log(book, requests_of, caplog, change, setting):
    book.put(engine(listens=("10.0.0.5", 5600)))
    requests = requests_of(wrong_params=setting)
    requests.ask("r", least(**change))
    assert caplog.text
    assert len(caplog.text) < 2_000
    assert len(str(requests.error("r"))) < 1_000


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_generation", "remote_request_id"])
def test_half_of_a_surrogate_pair_is_no_text(requests_of, name):
    """A heartbeat of it would end a worker."""
    requests = requests_of()
    assert requests.ask("r", least(**{name: "a\ud800"})) is Verdict.FAIL
    assert requests.error("r").metadata["field"] == name


def test_a_fault_of_our_own_fails_the_request_and_not_the_engine(book, requests_of, caplog):
    def judge(*_, **__):
        raise ZeroDivisionError("a record that nobody foresaw")

    book.judge = judge
    requests = requests_of()
    assert requests.ask("r", least()) is Verdict.FAIL
    assert "ZeroDivisionError" in str(requests.error("r"))
    assert "a record that nobody foresaw" in caplog.text


# ------------------------------------------------------------------------- how long


@pytest.mark.parametrize("pull", [True, False])
def test_blocks_are_not_waited_for_longer_than_they_are_kept(book, requests_of, clock, pull):
    book.put(engine(state=State.COMPLETE))
    requests = requests_of(pull=pull)
    assert requests.ask("r", least()) is Verdict.LATER
    clock.now_s += KEPT_S * WAITED - 0.1
    assert requests.ask("r", least()) is Verdict.LATER
    clock.now_s += 0.2
    assert requests.ask("r", least()) is Verdict.FAIL
    assert isinstance(requests.error("r"), DeadlineExceeded)


def test_a_push_that_names_no_start_waits_as_long_as_is_set(book, requests_of, clock):
    """The prefill may come after it."""
    book.put(engine(state=State.COMPLETE))
    requests, params = requests_of(pull=False), least(remote_generation=None)
    assert requests.ask("r", params) is Verdict.LATER
    clock.now_s += 3599.0
    assert requests.ask("r", params) is Verdict.LATER


# ---------------------------------------------------------------- peers without rankbook

VLLMS_OWN = {
    "remote_host": "10.0.0.9",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_generation": None,
}


def test_who_names_a_start_has_rankbook_and_is_not_dialled(requests_of):
    requests = requests_of()
    assert requests.ask("r", least(**VLLMS_OWN)) is Verdict.GO
    assert requests.ask("s", least(**VLLMS_OWN) | {"remote_generation": "g1"}) is Verdict.LATER


@pytest.mark.parametrize("name", ["tp_size", "dcp_size", "pp_size", "remote_port"])
@pytest.mark.parametrize("value", ["2", 0, -1, 2.0, True, [1], 65_536, None])
def test_sizes_that_vllm_would_die_of_are_not_given_to_it(requests_of, name, value):
    assert requests_of().ask("r", least(**VLLMS_OWN) | {name: value}) is not Verdict.GO


@pytest.mark.parametrize("value", ["", 7, ["10.0.0.9"], HUGE])
def test_a_host_that_is_no_text_is_not_given_to_vllm(requests_of, value):
    assert requests_of().ask("r", least(**VLLMS_OWN) | {"remote_host": value}) is not Verdict.GO
