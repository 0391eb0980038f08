"""Logs: JSON where no person looks, words where one does."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from rankbook_server.logs import setup_logs


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_stream_that_is_no_terminal_gets_json_from_us_and_from_libraries() -> None:
    stream = io.StringIO()
    setup_logs("auto", "info", stream)
    structlog.get_logger("ours").info("something happened", count=3)
    structlog.get_logger("ours").debug("too small to mention")
    logging.getLogger("theirs").warning("and %s", "this")
    ours, theirs = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (ours["event"], ours["count"], ours["level"]) == ("something happened", 3, "info")
    assert (theirs["event"], theirs["level"]) == ("and this", "warning")


def test_a_fault_is_logged_on_one_line_of_json() -> None:
    stream = io.StringIO()
    setup_logs("json", "info", stream)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        structlog.get_logger("ours").exception("it broke")
    (line,) = stream.getvalue().splitlines()
    assert "ZeroDivisionError" in json.loads(line)["exception"]


def test_words_can_be_asked_for() -> None:
    stream = io.StringIO()
    setup_logs("console", "info", stream)
    structlog.get_logger("ours").info("something happened", count=3)
    assert "something happened" in stream.getvalue()
    assert "{" not in stream.getvalue()
