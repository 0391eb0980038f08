"""`rankbook watch` and `rankbook wait`: what happens, as it happens."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Callable
from typing import Any

import click
from rich.text import Text

from rankbook import AsyncClient, _clock, convert, v1
from rankbook.cli.durations import SECONDS, duration_text
from rankbook.cli.engines import engine_json, filter_options, make_filter, state_text
from rankbook.cli.invocation import (
    Invocation,
    engine_argument,
    global_options,
    pass_invocation,
)
from rankbook.cli.output import Output
from rankbook.cli.topology import topology_json
from rankbook.cli.words import slots_text
from rankbook.errors import (
    BadRequest,
    DeadlineExceeded,
    RankbookError,
    Reason,
    Refused,
    Unavailable,
)
from rankbook.model import Engine, EngineFilter, EventType, State, WatchEvent

__all__ = ["event_json", "event_line", "is_reached", "wait", "watch"]


def event_json(event: WatchEvent, *, payload: bool = False) -> dict[str, Any]:
    """An event as every JSON output shows it.

    Args:
        event: The event.
        payload: Add the workers with their payloads.
    """
    shown: dict[str, Any] = {
        "type": str(event.type),
        "revision": event.revision,
        "engine": engine_json(event.topology.engine),
        "changed": [convert.to_json(convert.to_message(s, v1.Slot)) for s in event.changed],
        "removed": [convert.to_json(convert.to_message(s, v1.Slot)) for s in event.removed],
    }
    if payload:
        shown["workers"] = topology_json(event.topology)["workers"]
    return shown


def event_line(event: WatchEvent, before: Engine | None, at: dt.datetime) -> Text:
    """An event as one line for people: what it is now, and what it was.

    Args:
        event: The event.
        before: The engine as this watch knew it, if it did.
        at: The moment to show.
    """
    engine = event.topology.engine
    pcp = engine.layout.pcp_size
    line = Text(f"{at:%H:%M:%S}  {event.revision:>6}  {event.type:<8}  {engine.engine_id}  ")
    if before is not None and before.state is not engine.state:
        line.append_text(state_text(before.state))
        line.append(" -> ")
    line.append_text(state_text(engine.state))
    line.append(f"  {engine.present}/{engine.declared}")
    restarted = before is not None and before.epoch != engine.epoch
    if before is None or restarted:
        line.append(f"  {'new start, ' if restarted else ''}epoch {engine.epoch}")
    if event.removed and engine.state is not State.GONE and not restarted:
        line.append(f"  lost {slots_text(event.removed, pcp)}", style="red")
    if event.changed and event.type is EventType.MODIFIED and not restarted:
        line.append(f"  new or changed {slots_text(event.changed, pcp)}")
    if engine.state is State.GONE and engine.successor is not None:
        line.append(f"  replaced by {engine.successor.engine_id} epoch {engine.successor.epoch}")
    return line


@click.command()
@filter_options
@click.option("--engine", "engine_id", default="", help="This engine only.")
@click.option(
    "--from-revision",
    type=click.IntRange(min=0),
    default=0,
    metavar="REVISION",
    help="Only what changed after it; needs --book-id.",
)
@click.option("--book-id", default="", help="The book that revision is of.")
@click.option("--count", type=click.IntRange(min=1), help="End after so many events.")
@click.option("--payload", is_flag=True, help="In JSON, add the workers with their payloads.")
@global_options()
@pass_invocation
def watch(
    invocation: Invocation,
    group: str,
    role: str | None,
    states: tuple[str, ...],
    model: str,
    labels: tuple[str, ...],
    compat_hash: str,
    engine_id: str,
    from_revision: int,
    book_id: str,
    count: int | None,
    payload: bool,
) -> None:
    """Shows every engine now and then every change, a line each, until interrupted.

    Reconnects and resumes by itself. JSON is one object a line, written at once.

    \b
    RPC: Watch
    Example:
      rankbook watch --group prefill-a
      rankbook watch -o json | jq -r '.engine.engine_id + " " + .engine.state'
    """
    if from_revision and not book_id:
        # Another book's revisions say nothing of this one's: changes would be missed.
        raise click.UsageError("--from-revision needs --book-id, the book it is a revision of")
    wanted = make_filter(group, role, states, model, labels, compat_hash, engine_id)

    async def follow() -> None:
        known: dict[str, Engine] = {}
        left = count
        async with invocation.async_client() as client:
            events = client.watch(
                wanted,
                from_revision=from_revision,
                book_id=book_id,
                without_payload=not payload,
            )
            async for event in events:
                _show(invocation, event, known, payload)
                left = None if left is None else left - 1
                if left == 0 or invocation.out.reader_left:
                    return

    asyncio.run(follow())


def _show(
    invocation: Invocation, event: WatchEvent, known: dict[str, Engine], payload: bool
) -> None:
    engine = event.topology.engine
    out = invocation.out
    if out.as_json:
        out.json_line(event_json(event, payload=payload))
    else:
        out.lines([event_line(event, known.get(engine.engine_id), invocation.now.astimezone())])
    if event.type is EventType.REMOVED:
        known.pop(engine.engine_id, None)
    else:
        known[engine.engine_id] = engine


# ------------------------------------------------------------------------ wait

_REACHED = {
    "ready": frozenset((State.READY,)),
    "complete": frozenset((State.COMPLETE, State.READY, State.DRAINING)),
    "gone": frozenset((State.GONE,)),
}
_RETRY_S = 0.5
_TICK_S = 1.0


def is_reached(goal: str, engine: Engine | None) -> bool:
    """Whether an engine is what is waited for; one that is not known is not yet.

    Raises:
        Refused: It is INVALID, so it never will be (ENGINE_INVALID).
    """
    if engine is None:
        return False
    if engine.state is State.INVALID and goal != "gone":
        problems = "; ".join(problem.message for problem in engine.problems[:3])
        raise Refused(
            f"{engine.engine_id} is INVALID, so it will not be {goal.upper()}: {problems}",
            reason=Reason.ENGINE_INVALID,
            metadata={
                "engine_id": engine.engine_id,
                "state": engine.state,
                "epoch": engine.epoch,
                "problems": ",".join(problem.reason for problem in engine.problems),
            },
        )
    return engine.state in _REACHED[goal]


@click.command()
@engine_argument()
@click.option(
    "--for",
    "goal",
    type=click.Choice(list(_REACHED)),
    default="ready",
    show_default=True,
    help="What to wait for; complete is COMPLETE or better.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=SECONDS,
    default="60s",
    show_default=True,
    metavar="DURATION",
    help="How long: 500ms, 60s, 2m.",
)
@global_options(without=("timeout",))
@pass_invocation
def wait(invocation: Invocation, engine_id: str, goal: str, timeout_s: float) -> None:
    """Waits until an engine is ready, complete or gone. For scripts and init containers.

    An engine that is not known yet, or a registry that is not up yet, is waited
    for too. INVALID ends the wait at once with exit 5; the timeout is exit 1,
    or 4 when the registry was never reached.

    \b
    RPC: Watch
    Example:
      rankbook wait prefill-a-0 --for ready --timeout 5m
    """
    if timeout_s < 0:
        raise BadRequest(
            f"timeout is {timeout_s:g} s: a wait is not negative",
            metadata={"field": "timeout", "value": timeout_s, "rule": "not negative"},
        )
    out = invocation.out
    try:
        engine = asyncio.run(_Wait(invocation, engine_id, goal, timeout_s).run())
    finally:
        out.progress_done()
    if out.as_json:
        out.json({**engine_json(engine), "waited_for": goal})
    else:
        out.lines(
            [
                Text.assemble(
                    f"{engine_id}  ",
                    state_text(engine.state),
                    f"  {engine.present}/{engine.declared} ranks  epoch {engine.epoch}  "
                    f"revision {engine.revision}",
                )
            ]
        )


class _Wait:
    """One wait: follows one engine until it is as wished or the time is up."""

    def __init__(self, invocation: Invocation, engine_id: str, goal: str, timeout_s: float) -> None:
        self._invocation = invocation
        self._engine_id = engine_id
        self._goal = goal
        self._timeout_s = timeout_s
        self._started_s = _clock.mono_s()
        self._engine: Engine | None = None
        self._reached_registry = False
        self._trouble: Unavailable | DeadlineExceeded | None = None

    async def run(self) -> Engine:
        """The engine as wished.

        Raises:
            DeadlineExceeded: The time was up.
            Unavailable: It was up and the registry was never reached.
            Refused: The engine is INVALID.
        """
        async with self._invocation.async_client() as client:
            while True:
                try:
                    found = await self._follow(client)
                except (Unavailable, DeadlineExceeded) as trouble:
                    self._trouble = trouble
                    found = None
                    await self._pause(min(_RETRY_S, self._left_s))
                if found is not None:
                    return found
                if self._left_s <= 0:
                    raise self._too_late()

    async def _follow(self, client: AsyncClient) -> Engine | None:
        """Watches until the engine is as wished (it) or the time is up (None)."""
        wanted = EngineFilter(engine_id=self._engine_id)
        # A list first: a watch says nothing about an engine that is not there.
        listed = await client.list_engines(wanted, timeout_s=max(min(self._left_s, 5.0), 0.2))
        self._reached_registry, self._trouble = True, None
        self._engine = listed.engines[0] if listed.engines else None
        if is_reached(self._goal, self._engine):
            return self._engine
        events = client.watch(wanted, without_payload=True)
        try:
            async for event in _timed(events, self._tick, lambda: self._left_s):
                self._engine = event.topology.engine
                if event.type is EventType.REMOVED and self._engine.state is not State.GONE:
                    # Dropped from the book without a word of how it is now.
                    self._engine = None
                if is_reached(self._goal, self._engine):
                    return self._engine
        finally:
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()
        return None

    @property
    def _left_s(self) -> float:
        return self._timeout_s - (_clock.mono_s() - self._started_s)

    async def _pause(self, seconds: float) -> None:
        self._tick()
        if seconds > 0:
            await asyncio.sleep(seconds)

    def _tick(self) -> None:
        spent = duration_text(_clock.mono_s() - self._started_s)
        out: Output = self._invocation.out
        out.progress(f"waiting for {self._engine_id} to be {self._goal}: {self._seen} ({spent})")

    @property
    def _seen(self) -> str:
        if self._trouble is not None:
            return f"the registry is away ({self._trouble.reason})"
        engine = self._engine
        if engine is None:
            return "not known yet"
        words = f"{engine.state} {engine.present}/{engine.declared}"
        missing = slots_text(engine.missing, engine.layout.pcp_size)
        return f"{words}, missing {missing}" if missing else words

    def _too_late(self) -> RankbookError:
        if not self._reached_registry and self._trouble is not None:
            return self._trouble
        engine = self._engine
        values: dict[str, object] = {
            "engine_id": self._engine_id,
            "waited_for": self._goal,
            "timeout_s": self._timeout_s,
            "state": engine.state if engine else "not known",
        }
        if engine is not None and engine.missing:
            values["missing"] = slots_text(engine.missing, engine.layout.pcp_size)
        return DeadlineExceeded(
            f"{self._engine_id} is not {self._goal} after {self._timeout_s:g} s: {self._seen}",
            metadata=values,
        )


async def _timed(
    events: AsyncIterator[WatchEvent], tick: Callable[[], None], left_s: Callable[[], float]
) -> AsyncIterator[WatchEvent]:
    """The events until the time is up; calls `tick` about once a second meanwhile."""
    pending: asyncio.Future[WatchEvent] | None = None
    try:
        while (left := left_s()) > 0:
            tick()
            if pending is None:
                pending = asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({pending}, timeout=min(left, _TICK_S))
            if not done:
                continue
            try:
                event = pending.result()
            except StopAsyncIteration:
                return
            finally:
                pending = None
            yield event
    finally:
        if pending is not None:
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, RankbookError):
                await pending
