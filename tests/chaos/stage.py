"""What all processes of a run agree on: a folder with small files.

The phase of the run, and the token of the newest start of each engine. The
tokens travel beside the registry, as they do in a real engine, whose rank 0
tells its own workers.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from .cast import Scale

__all__ = ["QUIET", "REPORT", "RUN", "STOP", "Stage"]

RUN = "run"
"""Publishers write, leave, crash and come back."""
QUIET = "quiet"
"""Publishers only see to it that what they publish is in the book."""
REPORT = "report"
"""Everybody has noted what it holds or has seen, and changes nothing."""
STOP = "stop"
"""Everybody ends."""


class Stage:
    """The folder of a run. Every file is replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        """Takes note of the folder."""
        self.folder = folder

    @property
    def journals(self) -> Path:
        """Where the journals are."""
        return self.folder / "journals"

    def phase(self) -> str:
        """The phase of the run."""
        return self._read("phase") or RUN

    def set_phase(self, phase: str) -> None:
        """Begins a phase."""
        self._write("phase", phase)

    def generation(self, engine_id: str) -> str:
        """The token of the newest start of an engine; empty before the first."""
        return self._read(f"{engine_id}.generation")

    def set_generation(self, engine_id: str, token: str) -> None:
        """Makes a start known."""
        self._write(f"{engine_id}.generation", token)

    @property
    def scale(self) -> Scale:
        """How many there are of each; written before anything starts."""
        return Scale(**json.loads(self._read("scale") or "{}"))

    def set_scale(self, scale: Scale) -> None:
        """Decides how many there are."""
        self._write("scale", json.dumps(dataclasses.asdict(scale)))

    def _read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError:
            return ""

    def _write(self, name: str, text: str) -> None:
        draft = self.folder / f".{name}.{os.getpid()}"
        draft.write_text(text)
        draft.replace(self.folder / name)
