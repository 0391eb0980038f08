from __future__ import annotations

import pytest

from rankbook.cli.durations import duration_text, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("60s", 60),
        ("2m", 120),
        ("1h", 3600),
        ("60", 60),
        ("1.5s", 1.5),
        ("0", 0),
        ("-3s", -3),
        (" 5s ", 5),
    ],
)
def test_durations_are_read_in_every_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5 s", "5d", "1m30s", "nan", "inf", "0x10", "--5s"])
def test_what_is_no_duration_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (0.9, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (184, "3m4s"),
        (3600, "1h"),
        (3720, "1h2m"),
        (86_400 * 2 + 5 * 3600 + 59, "2d5h"),
    ],
)
def test_durations_read_in_at_most_two_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
