"""Claims about `rankbook._pipe`: the heartbeat process is never held up by its parent."""

from __future__ import annotations

import contextlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankbook._pipe import LineReader, NoticeWriter, decode_bytes, encode_bytes, encode_line


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


values = st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=20)))


@given(st.lists(values, max_size=6), st.lists(st.integers(1, 40), min_size=1))
def test_objects_survive_any_cutting_of_the_stream(objects, cuts):
    data = b"".join(encode_line(value) for value in objects)
    reader, got, number = LineReader(), [], 0
    while data:
        size = cuts[number % len(cuts)]
        got += reader.feed(data[:size])
        data, number = data[size:], number + 1
    assert got == objects


@given(st.binary())
def test_bytes_survive_as_text(value):
    assert decode_bytes(encode_bytes(value)) == value


def test_a_parent_that_reads_nothing_holds_nothing_up_and_gets_the_newest_in_the_end(pipe):
    read_end, write_end = pipe
    writer = NoticeWriter(write_end)
    # Far more than any pipe takes.
    for number in range(500):
        writer.post("state", {"number": number, "filler": "x" * 4096})
        writer.post("clock", {"number": number})
    assert writer.pending
    reader, got = LineReader(), []
    while writer.pending:
        got += reader.feed(os.read(read_end, 1 << 16))
        writer.flush()
    got += reader.feed(os.read(read_end, 1 << 20))
    last = {notice["kind"]: notice["number"] for notice in got}
    assert last == {"state": 499, "clock": 499}
    states = [notice["number"] for notice in got if notice["kind"] == "state"]
    assert states == sorted(set(states))
    assert len(states) < 100


def test_a_reader_that_is_gone_is_no_error(pipe):
    read_end, write_end = pipe
    os.close(read_end)
    writer = NoticeWriter(write_end)
    writer.post("state", {})
    assert writer.broken
    writer.post("state", {})
    assert not writer.pending
