"""Data on stdout, words on stderr, in the form asked for.

On a terminal tables are drawn with rich, in colour unless NO_COLOR is set.
Into a pipe or a file they are plain aligned text, one row a line, never cut.
JSON is one object (indented on a terminal, one line elsewhere). When the reader
of a pipe leaves, what follows is dropped without a word.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from rankbook.cli.words import clean
from rankbook.errors import RankbookError

__all__ = ["Column", "Output", "Table", "error_json", "open_output"]

_PIPED_WIDTH = 120
"""Where grids wrap when there is no terminal to measure; tables never wrap."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str
    right: bool = False
    """Numbers stand to the right."""


@dataclass(slots=True)
class Table:
    """Rows to show. A cell is text, or text with a rich style."""

    columns: Sequence[Column]
    rows: list[Sequence[str | Text]] = field(default_factory=list)
    title: str = ""

    def add(self, *cells: str | Text) -> None:
        """Adds a row."""
        self.rows.append(cells)


def error_json(error: RankbookError) -> dict[str, Any]:
    """An error as every JSON output shows it."""
    return {
        "reason": str(error.reason),
        "message": error.message,
        "metadata": error.metadata,
        "code": error.code,
    }


class Output:
    """Where the commands write. Not for several threads at once."""

    def __init__(
        self,
        stdout: TextIO,
        stderr: TextIO,
        *,
        form: str,
        terminal: bool,
        stderr_terminal: bool,
        unicode: bool,
        color: bool,
        width: int,
    ) -> None:
        self.form = form
        self.terminal = terminal
        self.stderr_terminal = stderr_terminal
        self.unicode = unicode
        self.color = color
        self.width = width
        self.reader_left = False
        self._stdout = stdout
        self._stderr = stderr

    @property
    def as_json(self) -> bool:
        """Whether data is to be JSON."""
        return self.form == "json"

    @property
    def wide(self) -> bool:
        """Whether every column is wanted."""
        return self.form == "wide"

    def json(self, value: Mapping[str, Any]) -> None:
        """Writes the one JSON object of a command."""
        self._write(json.dumps(value, indent=2 if self.terminal else None) + "\n")

    def json_line(self, value: Mapping[str, Any]) -> None:
        """Writes one object on one line, at once."""
        self._write(json.dumps(value, separators=(",", ":")) + "\n")

    def lines(self, lines: Iterable[str | Text]) -> None:
        """Writes lines; styles are kept only on a terminal."""
        if self.terminal and not self.as_json:
            console = self._console(self._stdout)
            with console.capture() as captured:
                for line in lines:
                    console.print(line, soft_wrap=True)
            self._write(captured.get())
        else:
            self._write("".join(f"{_plain(line)}\n" for line in lines))

    def table(self, table: Table) -> None:
        """Writes a table."""
        if self.terminal:
            self._rich(table)
        else:
            self._aligned(table)

    def note(self, words: str) -> None:
        """Writes words for people to stderr."""
        with contextlib.suppress(OSError, ValueError):
            self._stderr.write(words + "\n")
            self._stderr.flush()

    def progress(self, words: str) -> None:
        """Rewrites the one progress line on stderr; nothing unless it is a terminal."""
        if self.stderr_terminal:
            with contextlib.suppress(OSError, ValueError):
                self._stderr.write(f"\r\x1b[2K{clean(words)[: max(20, self.width - 1)]}")
                self._stderr.flush()

    def progress_done(self) -> None:
        """Takes the progress line away."""
        if self.stderr_terminal:
            with contextlib.suppress(OSError, ValueError):
                self._stderr.write("\r\x1b[2K")
                self._stderr.flush()

    def error(self, error: RankbookError, *, data: bool = True) -> None:
        """Writes an error: words to stderr and, in JSON and with `data`, the object."""
        if self.as_json and data:
            self.json({"error": error_json(error)})
        self.note(f"rankbook: {clean(error.message)} [{error.reason}]")

    def _write(self, text: str) -> None:
        if self.reader_left:
            return
        try:
            self._stdout.write(text)
            self._stdout.flush()
        except BrokenPipeError:
            self.reader_left = True
            # Python flushes stdout once more when it ends; that must not fail again.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stdout.fileno())

    def _console(self, file: TextIO) -> Console:
        return Console(
            file=file,
            force_terminal=True,
            color_system="auto" if self.color else None,
            highlight=False,
            markup=False,
            emoji=False,
            width=self.width,
        )

    def _rich(self, table: Table) -> None:
        shown = RichTable(
            box=box.SIMPLE_HEAD if self.unicode else box.ASCII,
            title=table.title or None,
            title_justify="left",
            header_style="bold",
            pad_edge=False,
            show_edge=False,
        )
        for column in table.columns:
            shown.add_column(
                column.name, justify="right" if column.right else "left", overflow="fold"
            )
        for row in table.rows:
            shown.add_row(*(cell if isinstance(cell, Text) else Text(clean(cell)) for cell in row))
        console = self._console(self._stdout)
        with console.capture() as captured:
            console.print(shown)
        self._write("".join(line.rstrip(" ") + "\n" for line in captured.get().splitlines()))

    def _aligned(self, table: Table) -> None:
        rows = [[column.name for column in table.columns]]
        rows += [[clean(_plain(cell)) or "-" for cell in row] for row in table.rows]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        lines = [table.title] if table.title else []
        for row in rows:
            cells = (
                cell.rjust(width) if column.right else cell.ljust(width)
                for cell, width, column in zip(row, widths, table.columns, strict=True)
            )
            lines.append("  ".join(cells).rstrip())
        self._write("\n".join(lines) + "\n")


def _plain(line: str | Text) -> str:
    return line.plain if isinstance(line, Text) else line


def open_output(stdout: TextIO, stderr: TextIO, form: str, environ: Mapping[str, str]) -> Output:
    """An output that fits the streams: their kind, encoding and width."""
    terminal = _is_terminal(stdout)
    for stream in (stdout, stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # A hostname that the locale cannot write must not end a command.
            reconfigure(errors="backslashreplace")
    encoding = (getattr(stdout, "encoding", "") or "").lower().replace("-", "")
    width = shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns if terminal else _PIPED_WIDTH
    return Output(
        stdout,
        stderr,
        form=form,
        terminal=terminal,
        stderr_terminal=_is_terminal(stderr) and environ.get("TERM") != "dumb",
        unicode=terminal and encoding.startswith("utf"),
        color=terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb",
        width=width,
    )


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        return False
