"""Framing by hand gives what protobuf gives."""

from __future__ import annotations

import pytest

from rankbook import v1
from rankbook_server.wire import Body, delimited, header, scalar


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 1 << 31, (1 << 63) - 1])
def test_a_number_field_reads_back(number: int) -> None:
    assert v1.WatchResponse.FromString(scalar(2, number)).book_revision == number


@pytest.mark.parametrize("size", [0, 1, 127, 128, 70_000])
def test_a_delimited_field_is_what_protobuf_writes(size: int) -> None:
    payload = b"x" * size
    written = v1.Handshake(payload=payload).SerializeToString()
    assert (delimited(3, payload) if size else b"") == written
    field = header(15, len(written)) + written
    assert v1.WorkerRecord.FromString(field).handshake.payload == payload


def test_pieces_join_to_the_whole() -> None:
    assert Body([b"a"], 1).join() == b"a"
    assert Body([b"a", b"", b"bc"], 3).join() == b"abc"
