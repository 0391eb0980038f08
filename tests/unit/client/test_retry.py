"""Claims about `rankbook._retry` and the table of calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankbook import BadRequest, Conflict, RetryPolicy, SealMismatch, Unavailable
from rankbook._calls import METHODS
from rankbook._retry import Repeat, backoff_s, next_delay_s
from rankbook.v1 import registry_pb2

policies = st.builds(
    RetryPolicy,
    attempts=st.integers(1, 50),
    initial_s=st.floats(0, 1),
    multiplier=st.floats(1, 10),
    max_s=st.floats(1, 30),
    jitter=st.floats(0, 1),
    budget_s=st.floats(0, 60),
)
chances = st.floats(0, 1, exclude_max=True)


@given(policies, st.integers(1, 10_000), chances)
def test_a_wait_is_between_nothing_and_the_longest_one(policy, attempt, chance):
    assert 0 <= backoff_s(policy, attempt, lambda: chance) <= policy.max_s


@given(policies, st.integers(1, 60))
def test_without_luck_a_wait_never_shrinks_from_one_try_to_the_next(policy, attempt):
    assert backoff_s(policy, attempt, lambda: 0.0) <= backoff_s(policy, attempt + 1, lambda: 0.0)


@given(policies, st.integers(1, 60), chances)
def test_jitter_takes_off_at_most_its_part(policy, attempt, chance):
    full = backoff_s(policy, attempt, lambda: 0.0)
    assert backoff_s(policy, attempt, lambda: chance) >= full * (1 - policy.jitter) * 0.999


@given(policies, chances)
def test_waits_of_one_call_never_exceed_its_budget_nor_its_attempts(policy, chance):
    waited, attempt = 0.0, 1
    while True:
        delay = next_delay_s(
            policy,
            Unavailable("away"),
            Repeat.ALWAYS,
            sent=True,
            attempt=attempt,
            waited_s=waited,
            rng=lambda: chance,
        )
        if delay is None:
            break
        waited += delay
        attempt += 1
    assert waited <= policy.budget_s
    assert attempt <= policy.attempts


def delay(error, repeat, *, sent):
    return next_delay_s(
        RetryPolicy(), error, repeat, sent=sent, attempt=1, waited_s=0.0, rng=lambda: 0.0
    )


def test_only_what_may_pass_by_itself_is_repeated():
    assert delay(Unavailable("away"), Repeat.ALWAYS, sent=True) == 0.05
    for error in (BadRequest("no"), Conflict("held"), SealMismatch("differs")):
        assert delay(error, Repeat.ALWAYS, sent=False) is None


def test_a_call_that_names_no_moment_is_repeated_only_while_unsent():
    assert delay(Unavailable("away"), Repeat.IF_UNSENT, sent=False) is not None
    assert delay(Unavailable("away"), Repeat.IF_UNSENT, sent=True) is None
    assert delay(Unavailable("away"), Repeat.NEVER, sent=False) is None


def test_the_table_names_every_rpc_with_its_own_types():
    service = registry_pb2.DESCRIPTOR.services_by_name["Registry"]
    assert set(METHODS) == {method.name for method in service.methods}
    for method in service.methods:
        ours = METHODS[method.name]
        assert ours.request.DESCRIPTOR.full_name == method.input_type.full_name
        assert ours.reply.DESCRIPTOR.full_name == method.output_type.full_name


def test_every_call_of_the_session_is_in_the_table_once():
    request = METHODS["Session"].request.DESCRIPTOR
    carried = {field.name for field in request.oneofs_by_name["call"].fields} - {"cancel"}
    named = [method.field for method in METHODS.values() if method.field]
    assert sorted(named) == sorted(carried)


def test_writes_that_carry_no_number_are_not_repeated_once_sent():
    assert METHODS["DrainEngine"].repeat is Repeat.IF_UNSENT
    assert METHODS["EvictEngine"].repeat is Repeat.IF_UNSENT


@pytest.mark.parametrize(
    "wrong",
    [{"attempts": 0}, {"initial_s": -1}, {"multiplier": 0.5}, {"max_s": 0.01}, {"jitter": 2}],
)
def test_a_policy_out_of_range_is_refused_by_name(wrong):
    with pytest.raises(BadRequest, match=f"RetryPolicy.{next(iter(wrong))}"):
        RetryPolicy(**wrong)
