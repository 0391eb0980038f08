"""Claims about `rankbook._session`: whose answer is whose."""

from __future__ import annotations

from google.rpc import code_pb2, error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from rankbook import Fenced, Internal, v1
from rankbook._calls import Call
from rankbook._session import Session


def topology_call(name: str = "e") -> Call:
    return Call("GetTopology", v1.GetTopologyRequest(engine_id=name))


def part(request_id: int, revision: int, *, more: bool) -> v1.SessionResponse:
    return v1.SessionResponse(
        request_id=request_id,
        more=more,
        get_topology=v1.GetTopologyResponse(book_revision=revision),
    )


def test_a_frame_carries_its_number_and_its_call():
    session = Session()
    first, second = session.open(topology_call("a")), session.open(topology_call("b"))
    assert (first.request_id, first.get_topology.engine_id) == (1, "a")
    assert (second.request_id, second.get_topology.engine_id) == (2, "b")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.randoms())
def test_answers_in_any_order_and_in_parts_reach_their_own_calls(parts, random):
    session = Session()
    frames = []
    for index, count in enumerate(parts):
        number = session.open(topology_call(f"e{index}")).request_id
        frames.append([part(number, index * 100 + n, more=n < count - 1) for n in range(count)])
    got = {}
    while any(frames):
        queue = random.choice([queue for queue in frames if queue])
        outcome = session.receive(queue.pop(0))
        if outcome is not None:
            got[outcome.request_id] = [p.book_revision for p in outcome.parts]
    assert got == {
        index + 1: [index * 100 + n for n in range(count)] for index, count in enumerate(parts)
    }
    assert session.open_calls == 0


def test_a_status_fails_its_call_alone_with_the_typed_error():
    session = Session()
    failed, other = session.open(topology_call()), session.open(topology_call())
    status = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message="a newer start")
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(
            reason="GENERATION_FENCED", domain="rankbook", metadata={"current_epoch": "2"}
        )
    )
    outcome = session.receive(v1.SessionResponse(request_id=failed.request_id, status=status))
    assert isinstance(outcome.error, Fenced)
    assert outcome.error.metadata == {"current_epoch": "2"}
    good = session.receive(part(other.request_id, 7, more=False))
    assert good.error is None


def test_a_late_answer_to_a_given_up_call_is_dropped():
    session = Session()
    number = session.open(topology_call()).request_id
    frame = session.give_up(number)
    assert frame.cancel.request_id == number
    assert session.receive(part(number, 1, more=False)) is None
    assert session.open(topology_call()).request_id not in (number, frame.request_id)


def test_giving_up_a_call_that_has_ended_sends_nothing():
    session = Session()
    number = session.open(topology_call()).request_id
    session.receive(part(number, 1, more=False))
    assert session.give_up(number) is None


def test_an_answer_to_nobody_is_ignored():
    assert Session().receive(part(99, 1, more=False)) is None
    assert Session().receive(v1.SessionResponse()) is None


def test_an_answer_of_another_kind_is_a_fault_and_no_answer():
    session = Session()
    number = session.open(topology_call()).request_id
    outcome = session.receive(
        v1.SessionResponse(request_id=number, get_status=v1.GetStatusResponse())
    )
    assert isinstance(outcome.error, Internal)
    assert outcome.error.metadata["reply"] == "get_status"


def test_a_break_tells_every_open_call_whether_it_was_sent():
    session = Session()
    numbers = [session.open(topology_call()).request_id for _ in range(3)]
    session.receive(part(numbers[1], 1, more=False))
    broken = session.broke(unsent=[numbers[2]])
    assert [(b.request_id, b.sent) for b in broken] == [(numbers[0], True), (numbers[2], False)]
    assert session.open_calls == 0


def test_a_stream_is_left_at_the_second_call_in_silence_or_the_first_where_there_is_another():
    session = Session()
    session.heard(10.0)
    assert not session.is_silent(9.0, endpoints=2), "heard since the call went out"
    assert session.is_silent(11.0, endpoints=2)
    session.heard(20.0)
    assert not session.is_silent(21.0, endpoints=1)
    assert session.is_silent(22.0, endpoints=1)
    session.heard(30.0)
    assert not session.is_silent(31.0, endpoints=1), "hearing starts the count anew"
