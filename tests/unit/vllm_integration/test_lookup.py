"""Which state of a peer may be used by whom, and what is said where it may not."""

import itertools
import pickle

import pytest
from tests.unit.vllm_integration.books import engine

from rankbook.errors import TABLE, Gone, Incomplete, NotFound, Reason, Refused, Unavailable
from rankbook.model import Problem, Severity, Slot, State, Successor
from rankbook_vllm.lookup import Refuse, Use, Wait, judge

# The design's table of states, for a use without block ids and for one that has
# blocks of this very start already.
TABLE_OF_STATES = {
    State.READY: (Use, Use),
    State.DRAINING: (Refuse, Use),
    State.FORMING: (Wait, Wait),
    State.COMPLETE: (Wait, Wait),
    State.DEGRADED: (Refuse, Refuse),
    State.INVALID: (Refuse, Refuse),
    State.GONE: (Refuse, Refuse),
    State.UNSPECIFIED: (Refuse, Refuse),
}


def why(topology, generation="", *, current=True):
    return judge(topology, "prefill-a-0", generation=generation, current=current).why


def test_every_state_is_in_the_table():
    assert set(TABLE_OF_STATES) == set(State)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("current", [True, False])
def test_a_state_is_used_waited_for_or_refused_as_the_table_says(state, current):
    peer = engine(state=state)
    new, bound = TABLE_OF_STATES[state]
    assert type(judge(peer, "prefill-a-0", current=current)) is new
    assert type(judge(peer, "prefill-a-0", generation="g1", current=current)) is bound


@pytest.mark.parametrize("state", State)
def test_another_start_is_refused_in_every_state_and_both_starts_are_named(state):
    answer = judge(engine(state=state, epoch=3), "prefill-a-0", generation="g0", current=True)
    assert isinstance(answer, Refuse)
    assert isinstance(answer.why, Gone)
    assert answer.why.metadata == {
        "engine_id": "prefill-a-0",
        "generation": "g0",
        "successor_engine_id": "prefill-a-0",
        "successor_generation": "g1",
        "successor_epoch": "3",
    }
    assert "g0" in answer.why.message
    assert "prefill again" in answer.why.message


@pytest.mark.parametrize("state", State)
def test_an_old_copy_of_another_start_is_no_proof_against_a_request(state):
    answer = judge(engine(state=state), "prefill-a-0", generation="g2", current=False)
    assert isinstance(answer, Wait)


def test_what_is_used_is_what_was_seen():
    peer = engine()
    assert judge(peer, "prefill-a-0", current=True) == Use(peer)


def test_an_unknown_engine_is_waited_for_and_is_not_found_where_the_book_is_followed():
    answer = judge(None, "prefill-b-0", current=True)
    assert isinstance(answer, Wait)
    assert isinstance(answer.why, NotFound)
    assert answer.why.metadata == {"engine_id": "prefill-b-0"}
    assert "same registry" in answer.why.message


def test_an_unknown_engine_is_the_registrys_absence_where_it_is_away():
    answer = judge(None, "prefill-b-0", generation="g1", current=False)
    assert isinstance(answer, Wait)
    assert isinstance(answer.why, Unavailable)


def test_a_forming_engine_names_what_it_lacks():
    missing = (Slot(1, 0, 0), Slot(1, 0, 1))
    error = why(engine(state=State.FORMING, missing=missing, present=2, declared=4))
    assert isinstance(error, Incomplete)
    assert error.metadata["missing"] == "pp1 tp0, pp1 tp1"
    assert "2 of 4" in error.message


def test_a_complete_engine_lacks_its_seal_and_no_worker():
    error = why(engine(state=State.COMPLETE))
    assert isinstance(error, Incomplete)
    assert error.metadata["missing"] == ""
    assert "not sealed" in error.message


def test_a_degraded_engine_names_what_it_lost():
    error = why(engine(state=State.DEGRADED, missing=(Slot(1, 0, 0),)))
    assert isinstance(error, Incomplete)
    assert error.metadata["missing"] == "pp1 tp0"


def test_a_degraded_engine_with_every_worker_has_lost_its_core():
    assert "engine core" in why(engine(state=State.DEGRADED)).message


def test_an_engine_that_sleeps_is_to_be_woken():
    error = why(engine(state=State.DEGRADED, asleep=(Slot(0, 0, 0),)))
    assert isinstance(error, Incomplete)
    assert error.metadata["asleep"] == error.metadata["missing"] == "pp0 tp0"
    assert "wake it" in error.message


def test_a_dead_engine_names_the_one_that_took_its_place():
    heir = Successor("prefill-b-0", 4, "g9")
    error = why(engine(state=State.GONE, successor=heir))
    assert isinstance(error, Gone)
    assert error.metadata == {
        "engine_id": "prefill-a-0",
        "generation": "g1",
        "successor_engine_id": "prefill-b-0",
        "successor_generation": "g9",
        "successor_epoch": "4",
    }
    assert "prefill-b-0" in error.message


def test_a_dead_engine_without_a_successor_names_none():
    error = why(engine(state=State.GONE))
    assert error.metadata == {"engine_id": "prefill-a-0", "generation": "g1"}


def test_an_invalid_engine_says_every_contradiction():
    problems = (
        Problem("LAYERS_OVERLAP", Severity.ERROR, "layers 2 to 4 twice"),
        Problem("LAYERS_MISSING", Severity.ERROR, "layer 7 nowhere"),
    )
    error = why(engine(state=State.INVALID, problems=problems))
    assert (type(error), error.reason) == (Refused, Reason.ENGINE_INVALID)
    assert error.metadata["problems"] == "layers 2 to 4 twice; layer 7 nowhere"


def test_a_draining_engine_says_that_it_takes_no_new_peers():
    error = why(engine(state=State.DRAINING))
    assert error.metadata["state"] == "DRAINING"
    assert "no new peers" in error.message


def test_every_error_is_of_the_class_that_its_reason_has_everywhere():
    changes = ({}, {"asleep": (Slot(),)}, {"missing": (Slot(),)}, {"successor": Successor("b", 2)})
    peers = [engine(state=state, **more) for state, more in itertools.product(State, changes)]
    answers = [
        judge(peer, "prefill-a-0", generation=generation, current=current)
        for peer in [*peers, None]
        for generation in ("", "g0", "g1")
        for current in (True, False)
    ]
    errors = [answer.why for answer in answers if not isinstance(answer, Use)]
    assert errors
    for error in errors:
        assert type(error) is TABLE[error.reason].error
        # It survives the way from a worker to the engine core.
        assert type(pickle.loads(pickle.dumps(error))) is type(error)
