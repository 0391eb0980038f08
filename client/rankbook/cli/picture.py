"""An engine drawn for people: facts on top, the grid, and what is wrong in words.

Pure: a topology, a moment and a width in; lines of rich text out.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

from rich.text import Text

from rankbook.cli.durations import duration_text
from rankbook.cli.grid import Glyphs, draw_grid
from rankbook.cli.output import wrapped
from rankbook.cli.words import (
    STATE_STYLES,
    address_text,
    age_text,
    clean,
    grid_text,
    slots_text,
)
from rankbook.model import Severity, State, Topology

__all__ = ["draw", "next_step"]

_SLOTS_SHOWN = 400
"""Characters of a list of missing slots."""
_LAPSED = "lease ran out (or evicted): a process that is gone from the book may still run"
_LEFT = "left: every worker that is gone has signed out, or was seen to end"
_WORDS_SHOWN = 12
"""Problems of one drawing before the rest is only counted."""


def draw(
    topology: Topology, *, now: dt.datetime, width: int, glyphs: Glyphs, wide: bool = False
) -> list[Text]:
    """The whole picture of an engine.

    Args:
        topology: The engine with its workers.
        now: The moment that ages are counted to.
        width: Columns to draw in; what cannot be broken may be wider.
        glyphs: Signs to draw with.
        wide: Also hosts, model and addresses.
    """
    head = _head(topology, now, glyphs, wide)
    lines = [*(part for line in head for part in wrapped(line, width)), Text()]
    if topology.workers:
        lines += [*draw_grid(topology, width, glyphs, wide), Text()]
    lines += _words(topology, now, glyphs, width)
    while lines and not lines[-1].plain:
        lines.pop()
    return lines


def _head(topology: Topology, now: dt.datetime, glyphs: Glyphs, wide: bool) -> Iterator[Text]:
    engine = topology.engine
    style = STATE_STYLES[engine.state]
    badge = f"{glyphs.badge} {engine.state}" if glyphs.badge else str(engine.state)
    yield Text.assemble((engine.engine_id, "bold"), "  ", str(engine.role), "  ", (badge, style))
    yield _facts(
        ("group", engine.group),
        ("replica", engine.replica),
        ("dp", str(engine.dp_rank)),
        ("namespace", engine.namespace),
    )
    seal = "not sealed"
    if engine.seal is not None:
        seal = f"sealed #{engine.seal.number} {age_text(engine.seal.time, now)} ago"
    yield _facts(("epoch", str(engine.epoch)), ("generation", engine.generation), ("", seal))
    whole = engine.present == engine.declared
    yield Text("  ").join(
        [
            Text(
                f"{engine.present}/{engine.declared} ranks ({grid_text(engine.layout)})",
                style="" if whole else "bold red",
            ),
            Text(f"{engine.layout.num_layers} layers"),
            Text(f"revision {engine.revision} (book {topology.book_revision})"),
            Text(f"up {age_text(engine.start_time, now)}"),
            Text(f"changed {age_text(engine.change_time, now)} ago"),
        ]
    )
    if engine.core is not None and (wide or engine.core.addresses or engine.core.connector):
        process = engine.core.process
        where = [address_text(address) for address in engine.core.addresses]
        name = process.hostname or process.boot_id
        name += f" pid {process.pid}" if process.pid else ""
        yield _facts(("core", " ".join([clean(name), *where])), ("", engine.core.connector))
    if wide and engine.model is not None:
        model = engine.model
        yield _facts(
            ("model", model.name or "-"),
            ("dtype", model.dtype or "-"),
            ("kv heads", str(model.total_num_kv_heads)),
            ("head size", str(model.head_size)),
            ("", "MLA" if model.is_mla else ""),
        )
    if wide and engine.labels:
        yield _facts(
            ("labels", " ".join(f"{k}={v}" for k, v in sorted(engine.labels.items()))),
        )


def _facts(*facts: tuple[str, str]) -> Text:
    parts = [
        Text.assemble((f"{name} ", "dim"), clean(value)) if name else Text(clean(value))
        for name, value in facts
        if value
    ]
    return Text("  ").join(parts)


def next_step(topology: Topology) -> str:
    """What the state means for who looks, and what to do, in one sentence."""
    engine = topology.engine
    name = engine.engine_id
    if engine.state is State.READY:
        return ""
    if engine.state is State.COMPLETE:
        return (
            "every rank is here; waits for the engine core to seal it "
            f"(by hand: rankbook seal {name})"
        )
    if engine.state is State.FORMING:
        if engine.asleep and not engine.missing:
            return "its workers sleep: wake the engine"
        return "waits for the missing ranks: nobody may use it; look at the logs of those ranks"
    if engine.state is State.DEGRADED:
        if engine.missing:
            return (
                "takes no new peers until the lost ranks are back (unchanged: READY again; "
                "changed: after a new seal) or the engine is restarted"
            )
        if engine.asleep:
            return "its workers sleep; it comes back when they publish again and are sealed"
        return "takes no new peers until its core seals it again"
    if engine.state is State.DRAINING:
        drain = engine.drain
        who = f" by {clean(drain.requested_by)}" if drain and drain.requested_by else ""
        why = f" ({clean(drain.reason)})" if drain and drain.reason else ""
        return f"drains{who}{why}: existing peers go on; rankbook drain --undo {name} ends it"
    if engine.state is State.INVALID:
        return "nobody may use it: the records contradict each other; restart the engine"
    successor = engine.successor
    if successor is None:
        return "no worker is alive, and nothing is known to have taken its place"
    return f"replaced by {successor.engine_id} epoch {successor.epoch}"


def _words(topology: Topology, now: dt.datetime, glyphs: Glyphs, width: int) -> Iterator[Text]:
    engine = topology.engine
    step = next_step(topology)
    if engine.missing and engine.state is not State.GONE:
        total = engine.declared - engine.present
        slots = slots_text(engine.missing, engine.layout.pcp_size)
        more = " ..." if total > len(engine.missing) or len(slots) > _SLOTS_SHOWN else ""
        slots = slots[:_SLOTS_SHOWN]
        yield from wrapped(
            Text(f"missing {total} of {engine.declared}: {slots}{more}", style="bold red"), width
        )
    if engine.missing and engine.state in (State.GONE, State.DEGRADED):
        yield from wrapped(Text(_LAPSED if engine.lapsed else _LEFT), width)
    if engine.drain is not None and engine.drain.deadline is not None:
        left = (engine.drain.deadline - now).total_seconds()
        words = f"in {duration_text(left)}" if left > 0 else "has passed"
        yield Text(f"drain deadline {words}")
    if step:
        yield from wrapped(Text(f"{glyphs.arrow} {step}"), width)
    looks = {
        Severity.ERROR: (glyphs.error, "bold red"),
        Severity.WARNING: (glyphs.warning, "yellow"),
        Severity.INFO: (glyphs.info, "dim"),
    }
    # The red line above already names the lost ranks.
    problems = [problem for problem in engine.problems if problem.reason != "RANKS_LOST"]
    for problem in problems[:_WORDS_SHOWN]:
        glyph, style = looks.get(problem.severity, (glyphs.info, "dim"))
        yield from wrapped(
            Text.assemble((f"{glyph} {problem.reason}", style), "  ", clean(problem.message)),
            width,
        )
    if len(problems) > _WORDS_SHOWN:
        rest = len(problems) - _WORDS_SHOWN
        yield Text(f"{rest} more problems: rankbook topology {engine.engine_id} -o json")
