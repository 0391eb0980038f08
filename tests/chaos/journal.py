"""What a process did and saw, line by line, for the checker.

Each life of a process has a file of its own, of JSON lines. A line is given to
the system at once, so a kill -9 loses nothing that was noted; a call is noted
before it is made and again with its outcome. `t` is the machine's monotonic
clock, which all processes share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Journal", "Line", "read_journals"]

Line = dict[str, Any]


class Journal:
    """Writes one file. Safe from many threads."""

    def __init__(self, path: Path) -> None:
        """Opens it, to write after what is there."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, kind: str, **values: object) -> float:
        """Writes a line; returns its time."""
        now_s = time.monotonic()
        line = {"t": round(now_s, 6), "kind": kind, **values}
        os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")
        return now_s

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


def read_journals(folder: Path) -> Iterator[Line]:
    """Every line of every file of a folder, file by file; `from` names its file.

    A last line that a kill cut short is left out.
    """
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as file:
            for text in file:
                if text.endswith(b"\n"):
                    line: Line = json.loads(text)
                    line["from"] = path.stem
                    yield line
