"""Errors as statuses."""

from __future__ import annotations

import pytest
from google.rpc import error_details_pb2

from rankbook.errors import TABLE, Internal, NotFound, Reason, error_for
from rankbook_server.rpc.status import boundary, to_status


def info_of(error: object) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    status = to_status(error)  # type: ignore[arg-type]
    assert status.details[0].Unpack(info)
    return info


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_status_with_its_code_and_values(reason: Reason) -> None:
    import grpc

    error = error_for(reason, "what happened", {"field": "value"})
    status, info = to_status(error), info_of(error)
    assert status.code == grpc.StatusCode[TABLE[reason].code].value[0]
    assert (info.reason, info.domain, dict(info.metadata)) == (
        reason.value,
        "rankbook",
        {"field": "value"},
    )


def test_a_status_fits_into_trailers_however_long_its_values() -> None:
    error = NotFound("m" * 100_000, metadata={f"k{n}": "v" * 50_000 for n in range(20)})
    status = to_status(error)
    assert len(status.SerializeToString()) < 6000
    assert len(info_of(error).metadata) == 20


def test_a_fault_becomes_an_incident_without_its_insides() -> None:
    with pytest.raises(Internal) as caught, boundary("GetTopology", lambda: "incident-7"):
        raise KeyError("secret")
    assert caught.value.metadata == {"call": "GetTopology", "incident": "incident-7"}
    assert "secret" not in str(caught.value)


def test_an_error_of_ours_passes_the_boundary_as_it_is() -> None:
    error = NotFound("no")
    with pytest.raises(NotFound) as caught, boundary("GetTopology", lambda: "x"):
        raise error
    assert caught.value is error
