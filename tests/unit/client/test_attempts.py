"""The sends of one call: how long they are tried, and which error the caller gets."""

import pytest

from rankbook import v1
from rankbook._attempts import Attempts
from rankbook._calls import Call
from rankbook._retry import RetryPolicy
from rankbook.convert import duration, seconds
from rankbook.errors import BadRequest, DeadlineExceeded, Reason, Unavailable

POLICY = RetryPolicy(attempts=3, initial_s=1.0, multiplier=2.0, max_s=8.0, jitter=0.0)


def attempts(call, timeout_s=100.0):
    return Attempts(POLICY, call, now_s=1000.0, timeout_s=timeout_s)


def status():
    return Call("GetStatus", v1.GetStatusRequest())


def after(one, error, now_s=1000.0, *, sent=False):
    one.next_call(now_s)
    return one.delay_s(error, sent=sent, now_s=now_s, rng=lambda: 0.0)


def test_waits_grow_until_the_policy_has_enough_and_the_last_error_is_the_callers():
    one, last = attempts(status()), Unavailable("third")
    assert after(one, Unavailable("first")) == 1.0
    assert after(one, Unavailable("second")) == 2.0
    with pytest.raises(Unavailable) as caught:
        after(one, last)
    assert caught.value is last


def test_an_error_that_does_not_pass_by_itself_is_the_callers_at_once():
    with pytest.raises(BadRequest):
        after(attempts(status()), BadRequest("no"))


def test_no_wait_reaches_past_the_callers_time():
    with pytest.raises(Unavailable):
        after(attempts(status(), timeout_s=1.0), Unavailable("away"))
    assert after(attempts(status(), timeout_s=1.5), Unavailable("away")) == 1.0


def test_a_call_that_must_not_happen_twice_is_repeated_only_while_unsent():
    evict = Call("EvictEngine", v1.EvictEngineRequest(engine_id="e"))
    assert after(attempts(evict), Unavailable("away"), sent=False) == 1.0
    with pytest.raises(Unavailable):
        after(attempts(evict), Unavailable("away"), sent=True)


def test_a_repeat_waits_for_what_is_left_of_its_long_poll_and_no_longer():
    call = Call("GetTopology", v1.GetTopologyRequest(engine_id="e", wait=duration(30)), 30)
    one = attempts(call, timeout_s=35.0)
    assert one.next_call(1000.0) is call
    one.delay_s(Unavailable("away"), sent=True, now_s=1010.0, rng=lambda: 0.0)
    # 25 s of the caller's 35 are left, 5 of which were never the poll's.
    assert seconds(one.next_call(1010.0).request.wait) == 20.0


def test_a_deadline_that_cuts_a_wait_for_a_revision_short_says_what_was_waited_for():
    one = attempts(status())
    late = Unavailable("not yet", reason=Reason.REVISION_NOT_REACHED)
    after(one, late)
    with pytest.raises(Unavailable) as caught:
        after(one, DeadlineExceeded("over"), now_s=1099.9)
    assert caught.value is late


def test_waits_of_one_call_stay_within_the_policys_budget():
    tight = RetryPolicy(attempts=9, initial_s=1.0, multiplier=1.0, jitter=0.0, budget_s=2.5)
    one = Attempts(tight, status(), now_s=1000.0, timeout_s=100.0)
    assert [after(one, Unavailable("away")) for _ in range(2)] == [1.0, 1.0]
    with pytest.raises(Unavailable):
        after(one, Unavailable("away"))
