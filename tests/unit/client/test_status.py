"""Claims about `rankbook._status`: errors are known by reason, never by text."""

from __future__ import annotations

import pytest
from google.rpc import error_details_pb2, status_pb2

from rankbook import Reason
from rankbook._status import CODES, error_of_code, error_of_status, has_reason
from rankbook.errors import TABLE


def status(code: str, reason: str, domain: str = "rankbook") -> status_pb2.Status:
    made = status_pb2.Status(code=CODES.index(code), message="words")
    made.details.add().Pack(
        error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata={"value": "7"})
    )
    return made


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_comes_back_as_its_own_class(reason):
    error = error_of_status(status(TABLE[reason].code, reason.value))
    assert type(error) is TABLE[reason].error
    assert (error.reason, error.message, error.metadata) == (reason, "words", {"value": "7"})


@pytest.mark.parametrize("code", CODES[1:])
def test_a_reason_of_a_newer_server_gets_the_class_of_its_code(code):
    error = error_of_status(status(code, "INVENTED_LATER"))
    assert error.metadata["server_reason"] == "INVENTED_LATER"
    assert error.metadata["value"] == "7"
    if code not in ("UNKNOWN", "DATA_LOSS"):
        assert error.code == code


def test_another_domains_reason_is_not_taken_for_ours():
    error = error_of_status(status("NOT_FOUND", "LEASE_NOT_FOUND", domain="elsewhere"))
    assert error.reason is Reason.ENGINE_NOT_FOUND
    assert "value" not in error.metadata


def test_details_that_are_no_status_are_no_reason():
    assert not has_reason(b"\xff\xff\xff")
    assert error_of_code("UNAVAILABLE", "gone", b"\xff\xff").reason is Reason.UNREACHABLE
    assert has_reason(status("ABORTED", "SEQUENCE_STALE").SerializeToString())
