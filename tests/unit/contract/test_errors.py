"""One table says what a reason means on every surface."""

from __future__ import annotations

import pickle
import re

import grpc
import pytest

from rankbook import errors
from rankbook.errors import TABLE, RankbookError, Reason, Retry, error_for

EXIT_CODES = {1, 2, 3, 4, 5, 6, 130}


def test_the_table_has_every_reason_and_no_other() -> None:
    assert set(TABLE) == set(Reason)


@pytest.mark.parametrize("reason", list(Reason))
def test_a_reason_has_a_code_a_class_a_retry_and_an_exit_code(reason: Reason) -> None:
    rule = TABLE[reason]

    assert re.fullmatch(r"[A-Z][A-Z0-9_]{0,62}", reason)
    assert rule.code in grpc.StatusCode.__members__
    assert rule.exit_code in EXIT_CODES
    assert isinstance(rule.retry, Retry)
    error = error_for(reason, "why", {"field": 7})
    assert type(error) is rule.error
    assert (error.reason, error.code, error.exit_code) == (reason, rule.code, rule.exit_code)
    assert error.metadata == {"field": "7"}
    assert str(error) == "why"


@pytest.mark.parametrize("reason", list(Reason))
def test_an_error_survives_pickling(reason: Reason) -> None:
    error = error_for(reason, "why", {"a": "b"})

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert (copy.reason, copy.message, copy.metadata) == (reason, "why", {"a": "b"})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.BadRequest, ValueError),
        (errors.BadRecord, errors.BadRequest),
        (errors.LimitExceeded, errors.BadRequest),
        (errors.TransferError, errors.BadRequest),
        (errors.Fenced, errors.Refused),
        (errors.Conflict, errors.Refused),
        (errors.Incomplete, errors.Refused),
        (errors.Gone, errors.Refused),
        (errors.SealMismatch, errors.Refused),
        (errors.Incompatible, errors.Refused),
        (errors.Overloaded, errors.Unavailable),
        (errors.DeadlineExceeded, TimeoutError),
    ],
)
def test_the_tree_is_the_one_that_is_drawn(error: type, kind: type) -> None:
    assert issubclass(error, kind)
    assert issubclass(error, RankbookError)


def test_a_class_raised_without_a_reason_has_one_of_its_own() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, RankbookError) and kind is not RankbookError:
            reason = kind("why").reason
            assert issubclass(kind, TABLE[reason].error), name


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("NOT_FOUND", {3}),
        ("UNAVAILABLE", {4}),
        ("PERMISSION_DENIED", {6}),
        ("UNAUTHENTICATED", {6}),
    ],
)
def test_codes_and_exit_codes_agree(code: str, exit_code: set[int]) -> None:
    assert {rule.exit_code for rule in TABLE.values() if rule.code == code} == exit_code


def test_what_is_away_may_be_tried_again_and_what_is_fenced_may_not() -> None:
    for reason, rule in TABLE.items():
        if rule.code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
            assert rule.retry is Retry.BACKOFF, reason
        if issubclass(rule.error, errors.Fenced | errors.BadRequest | errors.Denied):
            assert rule.retry is Retry.NEVER, reason
