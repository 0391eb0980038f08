"""How the values of the book read in words: slots, ranges, ages, addresses. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence

from rankbook.cli.durations import duration_text
from rankbook.model import Address, Layers, Layout, Slot, Stage, State

__all__ = [
    "STATE_STYLES",
    "address_text",
    "age_text",
    "bytes_text",
    "clean",
    "grid_text",
    "layers_text",
    "ranges_text",
    "shorten",
    "slots_text",
    "stages_text",
]

STATE_STYLES = {
    State.READY: "bold green",
    State.COMPLETE: "bold cyan",
    State.FORMING: "bold yellow",
    State.DRAINING: "bold blue",
    State.DEGRADED: "bold red",
    State.INVALID: "bold red",
    State.GONE: "dim",
    State.UNSPECIFIED: "dim",
}
"""How each state looks where there is colour."""


def clean(text: str) -> str:
    """The text with every control character replaced, so that a hostname that a
    stranger published cannot drive a terminal.
    """
    return "".join(char if char.isprintable() else "?" for char in text)


def ranges_text(numbers: Iterable[int]) -> str:
    """Sorted numbers with runs closed up: 0, 1, 2, 4 is "0-2,4"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def slots_text(slots: Iterable[Slot], pcp_size: int = 1) -> str:
    """Slots closed up by stage: "pp0-2 tp1, pp3 tp0-1"."""
    rows: dict[tuple[int, int], set[int]] = {}
    for slot in slots:
        rows.setdefault((slot.pp_rank, slot.pcp_rank), set()).add(slot.tp_rank)
    alike: dict[tuple[int, str], list[int]] = {}
    for (pp_rank, pcp_rank), tp_ranks in sorted(rows.items()):
        alike.setdefault((pcp_rank, ranges_text(tp_ranks)), []).append(pp_rank)
    parts = []
    for (pcp_rank, tp_ranks_text), pp_ranks in sorted(
        alike.items(), key=lambda item: (item[1], item[0])
    ):
        pcp = f" pcp{pcp_rank}" if pcp_size > 1 or pcp_rank else ""
        parts.append(f"pp{ranges_text(pp_ranks)}{pcp} tp{tp_ranks_text}")
    return ", ".join(parts)


def age_text(since: dt.datetime | None, now: dt.datetime) -> str:
    """How long ago, in at most two units; "-" when not known."""
    return "-" if since is None else duration_text((now - since).total_seconds())


def grid_text(layout: Layout) -> str:
    """The declared grid: "pp4xtp2", with pcp where there is one."""
    pcp = f"xpcp{layout.pcp_size}" if layout.pcp_size > 1 else ""
    return f"pp{layout.pp_size}{pcp}xtp{layout.tp_size}"


def stages_text(stages: Sequence[Stage]) -> str:
    """Layer counts of the stages: "15,15,16,15"; long lists are cut."""
    counts = [str(stage.end_layer - stage.start_layer) for stage in stages]
    return ",".join(counts) if len(counts) <= 8 else ",".join(counts[:7]) + ",..."


def layers_text(layers: Layers) -> str:
    """A worker's layers: "[0,15)", with extra layers named."""
    extra = "".join(f"+{layer.index}({layer.kind.lower()})" for layer in layers.extra)
    return f"[{layers.start_layer},{layers.end_layer}){extra}"


def address_text(address: Address) -> str:
    """An address as a URL, IPv6 in brackets."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    port = f":{address.port}" if address.port else ""
    return clean(f"{address.scheme}://{host}{port}" if address.scheme else f"{host}{port}")


def bytes_text(size: int) -> str:
    """A size: "812 B", "1.0 KiB", "512.0 KiB"."""
    if size < 1024:
        return f"{size} B"
    if size < 1024 * 1024:
        return f"{size / 1024:.1f} KiB"
    return f"{size / 1024 / 1024:.1f} MiB"


def shorten(text: str, length: int) -> str:
    """The text cut to `length` characters, the middle left out."""
    if len(text) <= length:
        return text
    head = (length - 2) // 2
    return f"{text[:head]}..{text[len(text) - (length - 2 - head) :]}"
