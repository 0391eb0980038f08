"""A request names its producer; where that is, the sealed topology says."""

import copy
import logging

import pytest
from tests.unit.vllm_integration.books import engine

from rankbook.errors import (
    TABLE,
    BadRequest,
    Conflict,
    DeadlineExceeded,
    Gone,
    Incomplete,
    NotFound,
    RankbookError,
    Reason,
)
from rankbook.model import Layout, Role, Slot, State
from rankbook_vllm.config import Settings
from rankbook_vllm.requests import Requests, Verdict, address_of, transfer_tp_size

ENGINE = "prefill-a-0"
GRID = Layout(pp_size=2, tp_size=2, num_layers=4)
TIMEOUT_S = 30.0


@pytest.fixture
def requests_of(book, clock):
    def make(*, pull=False, **settings):
        return Requests(
            book,
            Settings(peer_timeout_s=TIMEOUT_S, **settings),
            logging.getLogger("rankbook"),
            clock,
            needs_block_ids=pull,
        )

    return make


def least(**more):
    """What a proxy must send at least."""
    return {
        "do_remote_prefill": True,
        "remote_engine_id": ENGINE,
        "remote_generation": "g1",
        "remote_request_id": "cmpl-1",
    } | more


def nothing_left(requests):
    """Every container of the object but the counts, which are by kind, is empty."""
    held = {
        name: value
        for name, value in vars(requests).items()
        if isinstance(value, dict | list | set) and name != "counts"
    }
    assert held  # it does hold something, somewhere
    return not any(held.values())


# ------------------------------------------------------------------- what is sent


def test_four_parameters_are_enough_for_push(book, requests_of):
    book.put(engine(layout=GRID, listens=("10.0.0.5", 5600)))
    params = least()
    assert requests_of().ask("r", params) is Verdict.GO
    assert params == {
        "do_remote_prefill": True,
        "remote_engine_id": ENGINE,
        "remote_generation": "g1",
        "remote_request_id": "cmpl-1",
        "remote_block_ids": (),
        # Two producers may listen at "localhost", which NIXL would take for one.
        "remote_host": ENGINE,
        "remote_port": 0,
        "tp_size": 2,
        "dcp_size": 1,
        "pp_size": 2,
    }


def test_a_producer_without_a_listener_is_told_apart_by_its_name(book, requests_of):
    book.put(engine())
    params = least()
    requests_of().ask("r", params)
    assert (params["remote_host"], params["remote_port"]) == (ENGINE, 0)


def test_a_parameter_that_is_null_is_one_that_is_absent(book, requests_of):
    book.put(engine())
    names = ("remote_host", "remote_port", "tp_size", "remote_block_ids", "remote_request_id")
    params = least(**dict.fromkeys(names))
    requests = requests_of(wrong_params="refuse")
    assert requests.ask("r", params) is Verdict.GO
    assert params["remote_request_id"] == "r"
    assert params["remote_block_ids"] == ()
    assert params["tp_size"] == 1


def test_a_request_without_a_start_is_bound_to_the_one_it_was_resolved_with(book, requests_of):
    book.put(engine(generation="g7"))
    params = least()
    del params["remote_generation"]
    requests = requests_of()
    assert requests.ask("r", params) is Verdict.GO
    assert requests.generation("r") == params["remote_generation"] == "g7"


def test_what_was_resolved_stays_so_though_the_producer_moves_on(book, requests_of):
    book.put(engine())
    requests, params = requests_of(), least()
    requests.ask("r", params)
    book.put(engine(generation="g2", epoch=2))
    assert requests.ask("r", params) is Verdict.GO
    assert requests.generation("r") == "g1"
    assert requests.counts["resolved"] == 1


# ---------------------------------------------------------------- what is wrong

WRONG = {"tp_size": 4, "dcp_size": 2, "pp_size": 1, "remote_host": "10.9.9.9", "remote_port": 1}


@pytest.mark.parametrize(("name", "value"), WRONG.items())
def test_what_differs_from_the_topology_is_corrected_and_counted(book, requests_of, name, value):
    book.put(engine(layout=GRID, listens=("10.0.0.5", 5600)))
    params, right = least(**{name: value}), least()
    requests = requests_of()
    assert requests.ask("r", params) is Verdict.GO
    assert requests.counts["corrected"] == 1
    requests.ask("other", right)
    assert params[name] == right[name]
    assert requests.counts["corrected"] == 1


@pytest.mark.parametrize(("name", "value"), WRONG.items())
def test_what_differs_from_the_topology_is_refused_where_so_set(book, requests_of, name, value):
    book.put(engine(layout=GRID, listens=("10.0.0.5", 5600)))
    requests = requests_of(wrong_params="refuse")
    assert requests.ask("r", least(**{name: value})) is Verdict.FAIL
    error = requests.error("r")
    assert (type(error), error.reason) == (Conflict, Reason.LAYOUT_CONFLICT)
    assert repr(value) in error.message
    assert error.metadata[name].startswith(f"{value!r} != ")
    assert (requests.counts["refused"], requests.counts["corrected"]) == (1, 0)


def test_everything_wrong_is_named_at_once(book, requests_of):
    book.put(engine(layout=GRID, listens=("10.0.0.5", 5600)))
    requests = requests_of(wrong_params="refuse")
    requests.ask("r", least(**WRONG))
    assert WRONG.keys() <= requests.error("r").metadata.keys()


def test_another_spelling_of_the_host_is_not_wrong(book, requests_of):
    book.put(engine(listens=("fd00::1", 5600)))
    requests = requests_of(wrong_params="refuse")
    assert requests.ask("r", least(remote_host="[FD00:0::1]", remote_port=5600)) is Verdict.GO


def test_dcp_over_pcp_makes_ranks_of_its_own():
    layout = Layout(pp_size=1, tp_size=2, num_layers=4, pcp_size=4, dcp_size=4)
    assert transfer_tp_size(engine(layout=Layout(1, 2, 4))) == 2
    assert transfer_tp_size(engine(layout=layout)) == 4


def test_an_engine_without_a_core_listens_nowhere():
    assert address_of(engine(core=None)) is None


# ------------------------------------------------------------------ malformed ones

JUNK = (5, 1.5, True, [], ["x"], {}, {"a": []}, b"bytes")


@pytest.mark.parametrize("value", JUNK, ids=repr)
@pytest.mark.parametrize(
    "name", ["remote_engine_id", "remote_generation", "group", "remote_request_id"]
)
@pytest.mark.parametrize("known", [True, False])
def test_text_that_is_something_else_is_a_typed_error(book, requests_of, name, value, known):
    if known:
        book.put(engine())
    params = least(**{name: value})
    if name == "group":
        del params["remote_engine_id"]
    requests = requests_of()
    assert requests.ask("r", params) is Verdict.FAIL
    error = requests.error("r")
    assert isinstance(error, BadRequest)
    assert error.metadata["field"] == name


@pytest.mark.parametrize("value", [*JUNK, None, (), "12", [["a"]], [None], [[1], "b"]], ids=repr)
@pytest.mark.parametrize("known", [True, False])
def test_pull_without_block_ids_fails_before_vllm_asserts(book, requests_of, value, known):
    if known:
        book.put(engine())
    requests = requests_of(pull=True)
    assert requests.ask("r", least(remote_block_ids=value)) is Verdict.FAIL
    assert requests.error("r").metadata["field"] == "remote_block_ids"


@pytest.mark.parametrize("value", [*JUNK, "x"], ids=repr)
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("setting", ["correct", "refuse"])
def test_sizes_of_any_type_raise_nothing(book, requests_of, name, value, setting):
    book.put(engine(listens=("10.0.0.5", 5600)))
    params = least(**{name: value})
    verdict = requests_of(wrong_params=setting).ask("r", params)
    assert verdict in (Verdict.GO, Verdict.FAIL)
    if verdict is Verdict.GO:
        assert type(params[name]) in (int, str)


@pytest.mark.parametrize("empty", [{}, {"remote_engine_id": None}, {"remote_engine_id": ""}])
def test_a_request_that_names_nobody_is_refused(requests_of, empty):
    requests = requests_of()
    assert requests.ask("r", {"do_remote_prefill": True} | empty) is Verdict.FAIL
    assert requests.error("r").metadata["field"] == "remote_engine_id"


def test_a_failure_is_said_once_and_stays(book, requests_of):
    requests = requests_of()
    params = {"do_remote_prefill": True}
    assert {requests.ask("r", params) for _ in range(3)} == {Verdict.FAIL}
    assert requests.counts["refused"] == 1
    assert not requests.went_on("r")


# ------------------------------------------------------------------------ waiting


def test_a_request_that_waited_is_resolved_when_the_engine_seals(book, requests_of, clock):
    requests, params = requests_of(), least()
    for state in (None, State.FORMING, State.COMPLETE):
        if state is not None:
            book.put(engine(state=state))
        before = copy.deepcopy(params)
        assert requests.ask("r", params) is Verdict.LATER
        assert params == before
        assert not requests.went_on("r")
        clock.now_s += 1
    book.put(engine(state=State.READY))
    assert requests.ask("r", params) is Verdict.GO
    assert requests.went_on("r")
    assert params["tp_size"] == 1
    assert requests.counts["waited"] == 1


def test_a_deadline_says_what_was_missing(book, requests_of, clock):
    book.put(engine(state=State.FORMING, missing=(Slot(1, 0, 0),), layout=GRID))
    requests = requests_of()
    assert requests.ask("r", least()) is Verdict.LATER
    clock.now_s += TIMEOUT_S - 0.001
    assert requests.ask("r", least()) is Verdict.LATER
    clock.now_s += 0.001
    assert requests.ask("r", least()) is Verdict.FAIL
    error = requests.error("r")
    assert isinstance(error, DeadlineExceeded)
    assert error.metadata["missing"] == "pp1 tp0"
    assert error.metadata["why"] == "ENGINE_INCOMPLETE"
    assert "pp1 tp0" in error.message


def test_a_deadline_is_each_requests_own(book, requests_of, clock):
    requests = requests_of()
    requests.ask("first", least())
    clock.now_s += TIMEOUT_S / 2
    requests.ask("second", least())
    clock.now_s += TIMEOUT_S / 2
    assert requests.ask("first", least()) is Verdict.FAIL
    assert requests.ask("second", least()) is Verdict.LATER


def test_an_engine_that_comes_at_the_deadline_is_used(book, requests_of, clock):
    requests, params = requests_of(), least()
    requests.ask("r", params)
    clock.now_s += TIMEOUT_S
    book.put(engine())
    assert requests.ask("r", params) is Verdict.GO


@pytest.mark.parametrize(
    ("peer", "error"),
    [
        (engine(generation="g2", epoch=2), Gone),
        (engine(state=State.GONE), Gone),
        (engine(state=State.DEGRADED, missing=(Slot(0, 0, 0),)), Incomplete),
    ],
    ids=["another start", "dead", "half"],
)
def test_what_no_waiting_helps_fails_at_once(book, requests_of, peer, error):
    book.put(peer)
    requests, params = requests_of(), least()
    assert requests.ask("r", params) is Verdict.FAIL
    assert isinstance(requests.error("r"), error)
    assert params == least()
    assert (requests.counts["refused"], requests.counts["waited"]) == (1, 0)


def test_a_producer_that_dies_while_it_is_waited_for_ends_the_wait(book, requests_of):
    book.put(engine(state=State.FORMING))
    requests = requests_of()
    requests.ask("r", least())
    book.put(engine(state=State.GONE))
    assert requests.ask("r", least()) is Verdict.FAIL


def test_a_registry_that_is_away_leaves_the_last_word(book, requests_of):
    book.put(engine())
    book.current = False
    requests = requests_of()
    assert requests.ask("known", least()) is Verdict.GO
    assert requests.ask("newer", least(remote_generation="g2")) is Verdict.LATER


# ------------------------------------------------------------- asked again, before a read


@pytest.mark.parametrize(
    "now", [engine(state=State.GONE), engine(generation="g2", epoch=2)], ids=["dead", "restarted"]
)
def test_a_producer_that_died_since_ends_a_request_that_went_on(book, requests_of, now):
    book.put(engine())
    requests = requests_of()
    requests.ask("r", least())
    assert requests.recheck("r") is Verdict.GO
    book.put(now)
    assert requests.recheck("r") is Verdict.FAIL
    assert isinstance(requests.error("r"), Gone)
    # It stays so, and is said once.
    book.put(engine())
    assert requests.recheck("r") is requests.ask("r", least()) is Verdict.FAIL
    assert requests.counts["refused"] == 1
    # vLLM has it: what it holds of it is its own to give back.
    assert requests.forget("r")
    assert nothing_left(requests)


@pytest.mark.parametrize("state", [State.DEGRADED, State.DRAINING, State.COMPLETE])
def test_a_producer_that_may_come_back_ends_nothing_that_went_on(book, requests_of, state):
    book.put(engine())
    requests = requests_of()
    requests.ask("r", least())
    book.put(engine(state=state))
    assert requests.recheck("r") is Verdict.GO


def test_a_book_that_was_lost_or_is_old_ends_nothing_that_went_on(book, requests_of):
    book.put(engine())
    requests = requests_of()
    requests.ask("r", least())
    book.current = False
    book.put(engine(generation="g2", epoch=2))
    assert requests.recheck("r") is Verdict.GO
    book.forget(ENGINE)
    book.current = True
    assert requests.recheck("r") is Verdict.GO


def test_a_foreign_producer_is_not_asked_about_again(book, requests_of):
    requests = requests_of()
    requests.ask("r", least(remote_host="10.0.0.9", remote_port=5600, tp_size=1))
    book.put(engine(state=State.GONE))
    assert requests.recheck("r") is Verdict.GO


# -------------------------------------------------------------------------- groups


def in_group(**more):
    return {"do_remote_prefill": True, "group": "prefill-a"} | more


def test_a_group_stands_for_its_one_ready_producer(book, requests_of):
    book.put(
        engine(),
        engine("decode-a-0", role=Role.CONSUMER),
        engine("prefill-a-1", state=State.FORMING),
        engine("prefill-b-0", group="prefill-b"),
    )
    requests, params = requests_of(), in_group()
    assert requests.ask("r", params) is Verdict.GO
    assert (params["remote_engine_id"], params["remote_generation"]) == (ENGINE, "g1")
    assert requests.generation("r") == "g1"


def test_an_engine_that_does_both_counts_as_a_producer(book, requests_of):
    book.put(engine(role=Role.BOTH))
    assert requests_of().ask("r", in_group()) is Verdict.GO


def test_a_group_is_waited_for_until_it_has_a_producer(book, requests_of, clock):
    book.put(engine(state=State.FORMING))
    requests, params = requests_of(), in_group()
    assert requests.ask("r", params) is Verdict.LATER
    assert params == in_group()
    book.put(engine())
    assert requests.ask("r", params) is Verdict.GO


def test_a_group_that_never_comes_is_named(requests_of, clock):
    requests = requests_of()
    requests.ask("r", in_group())
    clock.now_s += TIMEOUT_S
    assert requests.ask("r", in_group()) is Verdict.FAIL
    error = requests.error("r")
    assert (error.metadata["group"], error.metadata["why"]) == ("prefill-a", "GROUP_NOT_FOUND")


def test_a_group_of_two_ready_producers_stands_for_neither(book, requests_of):
    book.put(engine(), engine("prefill-a-1"))
    requests, params = requests_of(), in_group()
    assert requests.ask("r", params) is Verdict.FAIL
    assert requests.error("r").metadata["engines"] == "prefill-a-0, prefill-a-1"
    assert params == in_group()


@pytest.mark.parametrize("pull", [True, False])
def test_a_group_never_stands_for_the_engine_of_block_ids(book, requests_of, pull):
    book.put(engine())
    requests = requests_of(pull=pull)
    assert requests.ask("r", in_group(remote_block_ids=[1, 2])) is Verdict.FAIL
    assert requests.error("r").metadata["field"] == "group"


@pytest.mark.parametrize("ready", [True, False])
def test_pull_takes_no_group_and_does_not_wait_to_say_so(book, requests_of, ready):
    if ready:
        book.put(engine())
    assert requests_of(pull=True).ask("r", in_group()) is Verdict.FAIL


def test_an_engine_that_is_named_wins_over_the_group(book, requests_of):
    book.put(engine(), engine("prefill-a-1"))
    params = in_group(remote_engine_id="prefill-a-1")
    assert requests_of().ask("r", params) is Verdict.GO
    assert params["remote_engine_id"] == "prefill-a-1"


# ------------------------------------------------------------------------- foreign

VLLMS_OWN = {
    "remote_host": "10.0.0.9",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_generation": None,  # which it does not know of
}


def test_a_peer_without_rankbook_is_left_to_vllm_untouched(requests_of):
    params = least(**VLLMS_OWN)
    before = copy.deepcopy(params)
    requests = requests_of()
    assert requests.ask("r", params) is Verdict.GO
    assert params == before
    assert requests.went_on("r")
    assert requests.generation("r") == ""
    assert (requests.counts["foreign"], requests.counts["resolved"]) == (1, 0)


@pytest.mark.parametrize("missing", ["remote_host", "remote_port", "tp_size", "remote_request_id"])
def test_a_peer_whom_vllm_could_not_ask_is_waited_for(requests_of, missing):
    params = least(**VLLMS_OWN) | {missing: None}
    assert requests_of().ask("r", params) is Verdict.LATER


def test_without_a_side_channel_nobody_is_foreign(requests_of):
    assert requests_of(side_channel=False).ask("r", least(**VLLMS_OWN)) is Verdict.LATER


def test_an_engine_of_the_book_is_never_foreign(book, requests_of):
    book.put(engine(state=State.FORMING))
    assert requests_of().ask("r", least(**VLLMS_OWN)) is Verdict.LATER


def test_a_group_is_never_foreign(requests_of):
    params = in_group(remote_request_id="cmpl-1", **VLLMS_OWN)
    assert requests_of().ask("r", params) is Verdict.LATER


# ----------------------------------------------------------------------- forgetting


def test_forgetting_leaves_nothing(book, requests_of):
    requests = requests_of()
    book.put(engine("prefill-b-0"))
    requests.ask("foreign", least(**VLLMS_OWN))
    requests.ask("waits", least())
    requests.ask("goes", least(remote_engine_id="prefill-b-0"))
    requests.ask("fails", least(remote_engine_id=None))
    assert not nothing_left(requests)
    went_on = {name: requests.forget(name) for name in ("foreign", "waits", "goes", "fails", "?")}
    assert went_on == {"foreign": True, "waits": False, "goes": True, "fails": False, "?": False}
    assert nothing_left(requests)


def test_a_wait_that_ends_leaves_nothing_of_itself(book, requests_of, clock):
    requests = requests_of()
    requests.ask("r", least())
    book.put(engine())
    requests.ask("r", least())
    requests.ask("late", least(remote_engine_id="nobody"))
    clock.now_s += TIMEOUT_S
    requests.ask("late", least(remote_engine_id="nobody"))
    assert requests.forget("r")
    assert not requests.forget("late")
    assert nothing_left(requests)


def test_a_name_that_comes_again_is_a_new_request(book, requests_of):
    requests = requests_of()
    requests.ask("r", {"do_remote_prefill": True})
    requests.forget("r")
    assert requests.error("r") is None
    book.put(engine())
    assert requests.ask("r", least()) is Verdict.GO


def test_every_error_is_of_the_class_that_its_reason_has_everywhere(book, requests_of, clock):
    book.put(engine(), engine("prefill-a-1"))
    requests = requests_of(wrong_params="refuse", pull=False)
    asked = {
        "sizes": least(tp_size=9),
        "two": in_group(),
        "blocks": in_group(remote_block_ids=[1]),
        "nobody": {},
        "old": least(remote_generation="g0"),
    }
    for name, params in asked.items():
        assert requests.ask(name, params) is Verdict.FAIL
    requests.ask("late", least(remote_engine_id="prefill-z-0"))
    clock.now_s += TIMEOUT_S
    requests.ask("late", least(remote_engine_id="prefill-z-0"))
    for name in (*asked, "late"):
        error = requests.error(name)
        assert isinstance(error, RankbookError)
        assert type(error) is TABLE[error.reason].error
    assert isinstance(requests.error("late"), DeadlineExceeded)
    assert not isinstance(requests.error("late"), NotFound)
