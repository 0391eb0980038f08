"""Plain in a pipe, drawn on a terminal, JSON as one object."""

from __future__ import annotations

import io
import json
import os

import pytest
from rich.text import Text

from rankbook.cli.output import Column, Output, Table, open_output
from rankbook.errors import NotFound


def output(form: str = "table", **changes: object) -> tuple[Output, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    settings: dict[str, object] = {
        "terminal": False,
        "stderr_terminal": False,
        "unicode": False,
        "color": False,
        "width": 80,
        **changes,
    }
    return Output(out, err, form=form, **settings), out, err  # type: ignore[arg-type]


def sample() -> Table:
    table = Table([Column("NAME"), Column("N", right=True), Column("NOTE")])
    table.add("a", "1", Text("fine", style="green"))
    table.add("long-name", "1000", "")
    return table


def test_a_piped_table_is_aligned_with_a_sign_for_nothing() -> None:
    out, data, words = output()
    out.table(sample())
    assert data.getvalue() == (
        "NAME          N  NOTE\n"  #
        "a             1  fine\n"
        "long-name  1000  -\n"
    )
    assert words.getvalue() == ""


def test_a_table_on_a_terminal_is_coloured_and_without_colour_has_no_escapes() -> None:
    out, data, _ = output(terminal=True, unicode=True, color=True)
    out.table(sample())
    assert "\x1b[32mfine" in data.getvalue()
    out, data, _ = output(terminal=True, unicode=True, color=False)
    out.table(sample())
    assert "\x1b" not in data.getvalue()
    assert "fine" in data.getvalue()


def test_a_narrow_terminal_loses_optional_columns_and_breaks_no_id() -> None:
    table = Table([Column("ID"), Column("LESS", optional=True), Column("STATE")])
    table.add("x" * 30, "y" * 30, "READY")
    out, data, _ = output(terminal=True, unicode=True, width=70)
    out.table(table)
    assert "y" * 30 in data.getvalue()
    for width in (50, 20):
        out, data, _ = output(terminal=True, unicode=True, width=width)
        out.table(table)
        assert "LESS" not in data.getvalue()
        assert f"{'x' * 30}  READY\n" in data.getvalue()
    out, data, _ = output("wide", terminal=True, unicode=True, width=20)
    out.table(table)
    assert f"{'x' * 30}  {'y' * 30}  READY\n" in data.getvalue()


def test_prose_is_broken_at_the_width_of_the_terminal() -> None:
    table = Table([Column("RULE"), Column("WHAT", prose=True)])
    table.add("SOME_RULE_OF_OURS", "words " * 30)
    out, data, _ = output(terminal=True, unicode=True, width=40)
    out.table(table)
    lines = data.getvalue().splitlines()
    assert len(lines) > 5
    assert max(map(len, lines)) <= 40
    assert "SOME_RULE_OF_OURS" in data.getvalue()


@pytest.mark.parametrize("unicode", [True, False])
def test_words_that_have_no_room_beside_a_row_stand_below_it(unicode: bool) -> None:
    table = Table([Column("RULE"), Column("VALUE"), Column("WHAT", prose=True)])
    table.add(Text("RULE_ONE", style="red"), "v" * 40, "one two three " * 5)
    table.add("RULE_TWO", "w", "")
    out, data, _ = output(terminal=True, unicode=unicode, color=True, width=60)
    out.table(table)
    lines = data.getvalue().splitlines()
    first = next(at for at, line in enumerate(lines) if "v" * 40 in line)
    assert "RULE_ONE" in lines[first]
    assert lines[first + 1] == "    one two three one two three one two three one two three"
    assert lines[first + 2].strip() == "one two three"
    assert lines[first + 3].startswith("RULE_TWO")
    assert "WHAT" not in data.getvalue()


def test_json_is_one_object_on_one_line_and_indented_on_a_terminal() -> None:
    out, data, _ = output("json")
    out.json({"b": 1, "a": [1, 2]})
    assert data.getvalue() == '{"b": 1, "a": [1, 2]}\n'
    out, data, _ = output("json", terminal=True)
    out.json({"b": 1})
    assert data.getvalue() == '{\n  "b": 1\n}\n'


def test_an_error_is_words_on_stderr_and_an_object_on_stdout_only_in_json() -> None:
    error = NotFound("no engine e", metadata={"engine_id": "e"})
    out, data, words = output()
    out.error(error)
    assert data.getvalue() == ""
    assert words.getvalue() == "rankbook: no engine e [ENGINE_NOT_FOUND]\n"
    out, data, words = output("json")
    out.error(error)
    assert json.loads(data.getvalue()) == {
        "error": {
            "reason": "ENGINE_NOT_FOUND",
            "message": "no engine e",
            "metadata": {"engine_id": "e"},
            "code": "NOT_FOUND",
        }
    }
    assert words.getvalue() == "rankbook: no engine e [ENGINE_NOT_FOUND]\n"


def test_progress_is_for_terminals_only() -> None:
    out, _, words = output()
    out.progress("waiting")
    out.progress_done()
    assert words.getvalue() == ""
    out, data, words = output(stderr_terminal=True)
    out.progress("waiting")
    assert "waiting" in words.getvalue()
    assert data.getvalue() == ""


def test_a_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        out = Output(
            pipe,
            io.StringIO(),
            form="table",
            terminal=False,
            stderr_terminal=False,
            unicode=False,
            color=False,
            width=80,
        )
        out.lines(["one"])
        assert out.reader_left
        out.lines(["two"])


@pytest.mark.parametrize(
    ("environ", "color"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour_needs_a_terminal_that_wants_it(environ: dict[str, str], color: bool) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    assert open_output(Terminal(), io.StringIO(), "table", environ).color is color
    assert not open_output(io.StringIO(), io.StringIO(), "table", environ).color


def test_a_terminal_that_cannot_write_unicode_gets_ascii() -> None:
    class Terminal(io.StringIO):
        encoding = "ascii"

        def isatty(self) -> bool:
            return True

    assert not open_output(Terminal(), io.StringIO(), "table", {}).unicode
