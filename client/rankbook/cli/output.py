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
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from rankbook.cli.words import clean
from rankbook.errors import RankbookError

__all__ = ["Column", "Output", "Table", "error_json", "open_output", "wrapped"]

_PIPED_WIDTH = 120
"""Where grids wrap when there is no terminal to measure; tables never wrap."""
_UNBOUND = 10_000
_GAP = 2
_PROSE_WIDTH = 28
"""Words in less room than this stand below their row instead of beside it."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str
    right: bool = False
    """Numbers stand to the right."""
    optional: bool = False
    """Left out on a terminal that is too narrow, the last ones first."""
    prose: bool = False
    """Words that may be broken; nothing else ever is, so that an id can be copied."""


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
            self._write("".join(f"{line}\n" for line in self._drawn(table)))
        else:
            self._aligned(table)

    def stale(self, stale_s: float) -> None:
        """Warns of an answer from a server that is cut off from its store."""
        if stale_s:
            self.note(
                f"warning: the server has been cut off from its store for {stale_s:.0f} s; "
                "what others wrote since is not shown"
            )

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

    def _console(self, file: TextIO, width: int | None = None) -> Console:
        return Console(
            file=file,
            force_terminal=True,
            color_system="auto" if self.color else None,
            highlight=False,
            markup=False,
            emoji=False,
            width=width or self.width,
        )

    def _drawn(self, table: Table) -> list[str]:
        """The lines of a table on a terminal."""
        kept = self._fitting(table)
        prose = [at for at in kept if table.columns[at].prose]
        if prose and self._prose_room(table, kept) < _PROSE_WIDTH:
            return self._drawn_above_prose(table, prose)
        shown = RichTable(
            box=box.SIMPLE_HEAD if self.unicode else None,
            title=table.title or None,
            title_justify="left",
            header_style="bold",
            padding=(0, 1 if self.unicode else _GAP, 0, 0),
            pad_edge=False,
            show_edge=False,
        )
        for at in kept:
            column = table.columns[at]
            shown.add_column(
                column.name,
                justify="right" if column.right else "left",
                no_wrap=not column.prose,
                overflow="fold",
            )
        for row in table.rows:
            cells = [row[at] for at in kept]
            shown.add_row(
                *(cell if isinstance(cell, Text) else Text(clean(cell)) for cell in cells)
            )
        # Wider than the terminal it wraps there, as a whole; no cell is cut.
        return self._printed(shown, None if prose else _UNBOUND)

    def _drawn_above_prose(self, table: Table, prose: Sequence[int]) -> list[str]:
        """A table whose words stand below each row: beside it they would be a thin column."""
        others = [at for at in range(len(table.columns)) if at not in prose]
        upper = Table([table.columns[at] for at in others], title=table.title)
        upper.rows = [[row[at] for at in others] for row in table.rows]
        drawn = self._drawn(upper)
        # The rows come last, one a line: only prose is ever broken.
        head = len(drawn) - len(table.rows)
        lines = drawn[:head]
        for line, row in zip(drawn[head:], table.rows, strict=True):
            lines.append(line)
            for words in (clean(_plain(row[at])) for at in prose):
                for part in wrapped(Text(f"    {words}"), self.width) if words else ():
                    lines += self._printed(part, _UNBOUND)
        return lines

    def _printed(self, shown: RichTable | Text, width: int | None) -> list[str]:
        console = self._console(self._stdout, width)
        with console.capture() as captured:
            console.print(shown)
        return [line.rstrip(" ") for line in captured.get().splitlines()]

    def _prose_room(self, table: Table, kept: Sequence[int]) -> int:
        """Columns that are left for words beside everything else."""
        fixed = [at for at in kept if not table.columns[at].prose]
        return self.width - sum(self._width(table, at) + _GAP for at in fixed)

    @staticmethod
    def _width(table: Table, at: int) -> int:
        cells = (len(_plain(row[at])) for row in table.rows)
        return max(len(table.columns[at].name), *cells, 0)

    def _fitting(self, table: Table) -> list[int]:
        """Which columns to show: optional ones go until the rest fits the terminal."""
        widths = [self._width(table, at) for at in range(len(table.columns))]
        kept = list(range(len(table.columns)))
        for at in reversed(range(len(table.columns))):
            if self.wide or sum(widths[one] + _GAP for one in kept) - _GAP <= self.width:
                break
            if table.columns[at].optional:
                kept.remove(at)
        return kept

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


def wrapped(line: Text, width: int, indent: str = "    ") -> Iterator[Text]:
    """The line in lines of at most `width`, broken at spaces, the later ones indented."""
    breaks: list[int] = []
    start, room = 0, width
    for match in re.finditer(r"\S+", line.plain):
        if match.end() - start > room and match.start() > start:
            breaks.append(match.start())
            start, room = match.start(), width - len(indent)
    for number, part in enumerate(line.divide(breaks)):
        part.rstrip()
        yield Text.assemble(indent, part) if number else part


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
