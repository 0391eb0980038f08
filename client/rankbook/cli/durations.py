"""Durations as people write them: 500ms, 60s, 2m, 1h, or plain seconds."""

from __future__ import annotations

import math
import re
from typing import Any

import click

__all__ = ["SECONDS", "Seconds", "duration_text", "parse_duration"]

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_FORM = re.compile(r"(-?\d+(?:\.\d+)?)(ms|s|m|h|)\Z")


def parse_duration(text: str) -> float:
    """Seconds of a duration such as "500ms", "60s", "2m", "1h" or "60".

    Negative ones are read too; whether they make sense is for who uses them.

    Raises:
        ValueError: It is none of these.
    """
    match = _FORM.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no duration: write 500ms, 60s, 2m, 1h or plain seconds")
    return float(match[1]) * _UNITS[match[2]]


def duration_text(seconds: float) -> str:
    """A duration in at most two units, for people: "0s", "12s", "3m4s", "2d5h"."""
    whole = max(0, math.floor(seconds))
    for size, unit, below, small in (
        (86_400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size}{unit}" + (f"{rest}{small}" if rest else "")
    return f"{whole}s"


class Seconds(click.ParamType[float]):
    """A click parameter that takes a duration and gives seconds."""

    name = "duration"

    def __init__(self, *, above_zero: bool = False) -> None:
        self._above_zero = above_zero

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Reads a duration; see `parse_duration`."""
        if isinstance(value, int | float):
            return float(value)
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if self._above_zero and seconds <= 0:
            self.fail(f"{value!r} is not above zero", param, ctx)
        return seconds


SECONDS = Seconds()
"""Any duration; the registry refuses what makes no sense."""
