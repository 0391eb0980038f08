"""The grid of an engine: stages as rows, ranks as columns. Pure.

The same lines serve a terminal (colour, unicode) and a pipe (plain ASCII). Many
ranks stand in eights, and in blocks below each other where they do not fit.

    stage  layers    n   up  tp 0 1
    pp 0   [0,15)   15  2/2     # #
    pp 1   [15,30)  15  1/2     # x
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from rankbook.cli.output import wrapped
from rankbook.cli.words import STATE_STYLES, clean, ranges_text
from rankbook.model import Layout, Slot, Stage, State, Topology, WorkerRecord

__all__ = ["ASCII", "UNICODE", "Glyphs", "draw_grid"]


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The signs a drawing is made of; each is one column wide."""

    filled: str
    missing: str
    asleep: str
    odd: str
    badge: str
    bar: str
    edge: str
    error: str
    warning: str
    info: str
    arrow: str


UNICODE = Glyphs("●", "✗", "☾", "≠", "●", "█", "│", "✗", "▲", "·", "→")
ASCII = Glyphs("#", "x", "z", "!", "", "=", "|", "ERROR", "WARNING", "INFO", "->")

_BAR_COLUMNS = 20
_SPACED_RANKS = 16
"""Up to so many ranks each gets a numbered column; above, they stand in eights."""
_GROUP = 8
_MAX_CELLS = 4096
"""Above so many slots only the stages where something is wrong are drawn."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """Columns that stand together: ranks of one PCP rank."""

    pcp_rank: int
    tp_ranks: range


class _Cells:
    """What stands in each slot."""

    def __init__(self, topology: Topology, glyphs: Glyphs) -> None:
        engine = topology.engine
        self._glyphs = glyphs
        self._stages = {stage.pp_rank: stage for stage in engine.stages}
        self._workers = {worker.slot: worker for worker in topology.workers}
        self._asleep = set(engine.asleep)
        self._style = STATE_STYLES[engine.state] if engine.state is State.READY else "green"

    def glyph(self, slot: Slot) -> Text:
        worker = self._workers.get(slot)
        if worker is None:
            return Text(self._glyphs.missing, style="bold red")
        if slot in self._asleep:
            return Text(self._glyphs.asleep, style="bold magenta")
        if self._odd(worker):
            return Text(self._glyphs.odd, style="bold red")
        return Text(self._glyphs.filled, style=self._style)

    def _odd(self, worker: WorkerRecord) -> bool:
        stage = self._stages.get(worker.slot.pp_rank)
        return stage is not None and (stage.start_layer, stage.end_layer) != (
            worker.layers.start_layer,
            worker.layers.end_layer,
        )

    def of_stage(self, pp_rank: int) -> list[WorkerRecord]:
        return [worker for slot, worker in self._workers.items() if slot.pp_rank == pp_rank]

    def quiet(self, pp_rank: int, size: int) -> bool:
        """Whether nothing is missing, asleep or odd in a stage."""
        workers = self.of_stage(pp_rank)
        return len(workers) == size and not any(
            worker.slot in self._asleep or self._odd(worker) for worker in workers
        )


def draw_grid(topology: Topology, width: int, glyphs: Glyphs, wide: bool) -> Iterator[Text]:
    """The lines of the grid, with a legend and, if `wide`, the hosts.

    Args:
        topology: An engine with at least one worker.
        width: Columns to draw in.
        glyphs: Signs to draw with.
        wide: Name the hosts of each stage.
    """
    layout = topology.engine.layout
    cells = _Cells(topology, glyphs)
    per_stage = layout.pcp_size * layout.tp_size
    shown = list(range(layout.pp_size))
    if layout.pp_size * per_stage > _MAX_CELLS:
        shown = [pp for pp in shown if not cells.quiet(pp, per_stage)][:64]
    left = _left_part(topology, cells, shown, per_stage)
    bar = _bars(topology, shown, glyphs) if layout.pp_size > 1 else None
    left_width = left[0].cell_len
    spaced = layout.pcp_size * layout.tp_size <= _SPACED_RANKS
    bar_width = _BAR_COLUMNS + 4 if bar else 0
    # A lead of "  tp " stands before the cells.
    if bar and width - left_width - bar_width - 5 < min(_cells_width(layout, spaced), 40):
        bar, bar_width = None, 0
    blocks = _blocks(layout, spaced, max(24, width - left_width - bar_width - 5))
    hosts = [_hosts(cells.of_stage(pp)) for pp in shown] if wide else None
    beside = left_width + bar_width + 7 + _block_width(blocks[-1], spaced, layout)
    below = hosts is not None and beside + max(map(len, hosts), default=0) > width
    for index, block in enumerate(blocks):
        start = [left[0].copy()] if index == 0 else [Text(" " * left_width)]
        if bar:
            start.append(bar[0].copy() if index == 0 else Text(" " * (bar_width - 2)))
        if layout.pcp_size > 1:
            lead = Text(" " * sum(part.cell_len + 2 for part in start))
            yield Text.assemble(lead, "  ", _pcp_header(block, spaced, layout, glyphs))
        header = Text("  ").join([*start, Text("tp")])
        header.append_text(_tp_header(block, spaced, layout, glyphs))
        if hosts is not None and not below and index == len(blocks) - 1:
            header.append("  hosts")
        header.stylize("dim")
        yield _stripped(header)
        for row, pp_rank in enumerate(shown):
            if index == 0:
                parts = [left[row + 1].copy(), *([bar[row + 1]] if bar else []), Text("  ")]
            else:
                label = Text(f"pp {pp_rank}".ljust(left_width))
                parts = [label, *([Text(" " * (bar_width - 2))] if bar else []), Text("  ")]
            line = Text("  ").join(parts)
            line.append_text(_row(block, pp_rank, cells, spaced, layout, glyphs))
            if hosts is not None and not below and index == len(blocks) - 1:
                line.append(f"  {hosts[row]}", style="dim")
            yield _stripped(line)
    if len(shown) < layout.pp_size:
        yield Text(f"{layout.pp_size - len(shown)} more stages are not drawn", style="dim")
    legend = _legend(topology, cells, shown, layout, glyphs)
    if legend is not None:
        yield legend
    if hosts is not None and below:
        yield Text()
        yield Text("hosts", style="dim")
        for pp_rank, names in zip(shown, hosts, strict=True):
            yield from wrapped(Text(f"pp {pp_rank}  {names}"), width)


def _left_part(
    topology: Topology, cells: _Cells, shown: Sequence[int], per_stage: int
) -> list[Text]:
    stages = {stage.pp_rank: stage for stage in topology.engine.stages}
    rows: list[tuple[str, str, str, str]] = [("stage", "layers", "n", "up")]
    for pp_rank in shown:
        workers = cells.of_stage(pp_rank)
        stage = stages.get(pp_rank)
        extra = {layer.index for worker in workers for layer in worker.layers.extra}
        count = "?" if stage is None else str(stage.end_layer - stage.start_layer)
        rows.append(
            (
                f"pp {pp_rank}",
                "?" if stage is None else f"[{stage.start_layer},{stage.end_layer})",
                count + (f"+{len(extra)}" if extra else ""),
                f"{len(workers)}/{per_stage}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for number, (name, layers, count, up) in enumerate(rows):
        line = Text(f"{name:<{widths[0]}}  {layers:<{widths[1]}}  {count:>{widths[2]}}  ")
        short = number > 0 and up != f"{per_stage}/{per_stage}"
        line.append(f"{up:>{widths[3]}}", style="bold red" if short else "")
        lines.append(line)
    return lines


def _bars(topology: Topology, shown: Sequence[int], glyphs: Glyphs) -> list[Text]:
    layers = topology.engine.layout.num_layers
    stages = {stage.pp_rank: stage for stage in topology.engine.stages}
    lines = [Text(f" 0{layers:>{_BAR_COLUMNS - 1}} ")]
    for pp_rank in shown:
        stage = stages.get(pp_rank)
        first, last = _bar_columns(stage, layers) if stage is not None else (0, 0)
        line = Text(glyphs.edge, style="dim")
        line.append(" " * first)
        line.append(glyphs.bar * (last - first), style="cyan" if pp_rank % 2 else "blue")
        line.append(" " * (_BAR_COLUMNS - last))
        line.append(glyphs.edge, style="dim")
        lines.append(line)
    return lines


def _bar_columns(stage: Stage, layers: int) -> tuple[int, int]:
    if stage.end_layer <= stage.start_layer:
        return (0, 0)
    first = min(round(stage.start_layer * _BAR_COLUMNS / layers), _BAR_COLUMNS - 1)
    last = round(stage.end_layer * _BAR_COLUMNS / layers)
    return first, min(max(last, first + 1), _BAR_COLUMNS)


def _cell_width(layout: Layout) -> int:
    return len(str(layout.tp_size - 1)) + 1


def _cells_width(layout: Layout, spaced: bool) -> int:
    if spaced:
        return layout.pcp_size * (layout.tp_size * _cell_width(layout) + 2)
    return layout.pcp_size * (layout.tp_size + -(-layout.tp_size // _GROUP) + 2)


def _blocks(layout: Layout, spaced: bool, room: int) -> list[list[_Segment]]:
    """The columns in blocks that fit the room, each a list of segments."""
    segments = []
    step = layout.tp_size if spaced else _GROUP
    if spaced:
        step = max(1, min(step, room // _cell_width(layout)))
    for pcp_rank in range(layout.pcp_size):
        for first in range(0, layout.tp_size, step):
            tp_ranks = range(first, min(first + step, layout.tp_size))
            segments.append(_Segment(pcp_rank, tp_ranks))
    sizes = [_block_width([segment], spaced, layout) + 2 for segment in segments]
    count = max(1, -(-sum(sizes) // (room + 2)))
    while True:
        # As many segments in each block, so that no block is left with a few columns.
        share = -(-len(segments) // count)
        widest = max(sum(sizes[at : at + share]) for at in range(0, len(segments), share))
        if widest <= room + 2 or share == 1:
            return [segments[at : at + share] for at in range(0, len(segments), share)]
        count += 1


def _block_width(block: Sequence[_Segment], spaced: bool, layout: Layout) -> int:
    size = _cell_width(layout) if spaced else 1
    gaps = sum(2 for a, b in itertools.pairwise(block) if a.pcp_rank != b.pcp_rank)
    return gaps + sum(len(s.tp_ranks) * size + (0 if spaced else 1) for s in block)


def _join(block: Sequence[_Segment], parts: Sequence[Text], edge: str) -> Text:
    line = Text()
    for index, (segment, part) in enumerate(zip(block, parts, strict=True)):
        if index and block[index - 1].pcp_rank != segment.pcp_rank:
            line.append(f" {edge}", style="dim")
        line.append_text(part)
    return line


def _tp_header(block: Sequence[_Segment], spaced: bool, layout: Layout, glyphs: Glyphs) -> Text:
    parts = []
    for segment in block:
        if spaced:
            size = _cell_width(layout)
            parts.append(Text("".join(f"{tp:>{size}}" for tp in segment.tp_ranks)))
        else:
            parts.append(Text(" " + str(segment.tp_ranks[0]).ljust(len(segment.tp_ranks))))
    return _join(block, parts, glyphs.edge)


def _pcp_header(block: Sequence[_Segment], spaced: bool, layout: Layout, glyphs: Glyphs) -> Text:
    size = _cell_width(layout) if spaced else 1
    parts = []
    for index, segment in enumerate(block):
        first = index == 0 or block[index - 1].pcp_rank != segment.pcp_rank
        room = len(segment.tp_ranks) * size + (0 if spaced else 1)
        name = f" pcp {segment.pcp_rank}" if first else ""
        parts.append(Text(name[:room].ljust(room)))
    line = _join(block, parts, glyphs.edge)
    line.stylize("dim")
    return _stripped(line)


def _row(
    block: Sequence[_Segment],
    pp_rank: int,
    cells: _Cells,
    spaced: bool,
    layout: Layout,
    glyphs: Glyphs,
) -> Text:
    lead = " " * (_cell_width(layout) - 1)
    parts = []
    for segment in block:
        part = Text("" if spaced else " ")
        for tp_rank in segment.tp_ranks:
            if spaced:
                part.append(lead)
            part.append_text(cells.glyph(Slot(pp_rank, segment.pcp_rank, tp_rank)))
        parts.append(part)
    return _join(block, parts, glyphs.edge)


def _hosts(workers: Sequence[WorkerRecord]) -> str:
    """Hosts of a stage with the ranks each runs: "node-7 tp0-7, node-8 tp8-15"."""
    ranks: dict[str, set[int]] = {}
    for worker in workers:
        ranks.setdefault(worker.process.hostname or "?", set()).add(worker.slot.tp_rank)
    if len(ranks) == 1:
        return clean(next(iter(ranks)))
    return ", ".join(f"{clean(host)} tp{ranges_text(tp)}" for host, tp in ranks.items())


def _legend(
    topology: Topology, cells: _Cells, shown: Sequence[int], layout: Layout, glyphs: Glyphs
) -> Text | None:
    seen = {
        cells.glyph(Slot(pp, pcp, tp)).plain
        for pp in shown
        for pcp in range(layout.pcp_size)
        for tp in range(layout.tp_size)
    }
    names = {
        glyphs.missing: "missing",
        glyphs.asleep: "asleep (payload withdrawn)",
        glyphs.odd: "layers differ from its stage",
    }
    odd = [f"{glyph} {name}" for glyph, name in names.items() if glyph in seen]
    if not odd:
        return None
    return Text("   ".join([f"{glyphs.filled} here", *odd]), style="dim")


def _stripped(line: Text) -> Text:
    line.rstrip()
    return line
