"""GetTopology: what is asked for, whether it is so, and waiting until it is."""

from __future__ import annotations

from rankbook import v1
from rankbook.errors import BadRequest, Gone, Incomplete, NotFound, RankbookError, Reason, Refused
from rankbook.limits import (
    MAX_GRID_SLOTS,
    MAX_REPLY_BYTES,
    check_count,
    check_id,
    check_namespace,
    check_slot,
)
from rankbook_server.clock import Clock
from rankbook_server.core.keys import slot_text
from rankbook_server.registry import Registry
from rankbook_server.view import EngineView, View
from rankbook_server.waiters import Waiters
from rankbook_server.wire import Body, delimited, scalar, span

__all__ = ["TopologyReader", "require_usable"]

_COMPLETE = frozenset((v1.STATE_COMPLETE, v1.STATE_READY, v1.STATE_DRAINING))
_READY = frozenset((v1.STATE_READY,))
_SHOWN = 16
# Kept back of a caller's deadline so that the reason arrives before it.
_MARGIN_S = 0.05


def _state_name(state: v1.State.ValueType) -> str:
    return v1.State.Name(state).removeprefix("STATE_")


def _slots(slots: list[v1.Slot]) -> str:
    text = ", ".join(slot_text((s.pp_rank, s.pcp_rank, s.tp_rank)) for s in slots[:_SHOWN])
    return text if len(slots) <= _SHOWN else f"{text} and {len(slots) - _SHOWN} more"


def _facts(engine: v1.Engine) -> dict[str, object]:
    return {
        "engine_id": engine.engine_id,
        "state": _state_name(engine.state),
        "generation": engine.generation,
        "epoch": engine.epoch,
        "present": engine.present,
        "declared": engine.declared,
    }


def _gone(engine: v1.Engine, asked: str = "") -> Gone:
    facts = _facts(engine)
    if asked and engine.generation != asked:
        facts["asked_generation"] = asked
    successor = engine.successor if engine.HasField("successor") else None
    if successor is None and engine.state != v1.STATE_GONE:
        successor = v1.Successor(
            engine_id=engine.engine_id, epoch=engine.epoch, generation=engine.generation
        )
    what = (
        f"generation {asked} of engine {engine.engine_id}"
        if asked
        else (f"engine {engine.engine_id}")
    )
    if successor is None:
        return Gone(f"{what} is gone and nothing took its place yet", metadata=facts)
    facts["successor_engine_id"] = successor.engine_id
    facts["successor_epoch"] = successor.epoch
    facts["successor_generation"] = successor.generation
    return Gone(
        f"{what} is gone; {successor.engine_id} at epoch {successor.epoch} took its place: "
        "use that one",
        metadata=facts,
    )


def _invalid(engine: v1.Engine) -> Refused:
    errors = [p for p in engine.problems if p.severity == v1.SEVERITY_ERROR]
    words = "; ".join(problem.message for problem in errors)
    return Refused(
        f"engine {engine.engine_id} is INVALID: {words}",
        reason=Reason.ENGINE_INVALID,
        metadata={**_facts(engine), "problems": ",".join(problem.reason for problem in errors)},
    )


def _incomplete(engine: v1.Engine, wanted: str) -> Incomplete:
    missing = _slots(list(engine.missing))
    words = [f"{engine.present} of {engine.declared} ranks are present"]
    if missing:
        words.append(f"missing {missing}")
    words += [problem.message for problem in engine.problems[:4]]
    if engine.state == v1.STATE_COMPLETE:
        words.append("the engine core has not sealed it")
    state = _state_name(engine.state)
    return Incomplete(
        f"engine {engine.engine_id} is {state}, not {wanted}: {'; '.join(words)}",
        metadata={**_facts(engine), "required": wanted, "missing": missing},
    )


def _not_found(namespace: str, engine_id: str) -> NotFound:
    return NotFound(
        f"engine {engine_id} is not in namespace {namespace}: no worker of it has registered, "
        "or it was forgotten",
        metadata={"engine_id": engine_id, "namespace": namespace},
    )


def _judge(engine: v1.Engine, require: v1.Requirement.ValueType) -> RankbookError | None:
    """What keeps an engine from being as required; None when nothing does."""
    if require == v1.REQUIREMENT_ANY:
        return None
    if engine.state == v1.STATE_GONE:
        return _gone(engine)
    if engine.state == v1.STATE_INVALID:
        return _invalid(engine)
    if require == v1.REQUIREMENT_COMPLETE:
        return None if engine.state in _COMPLETE else _incomplete(engine, "COMPLETE")
    return None if engine.state in _READY else _incomplete(engine, "READY")


def require_usable(view: EngineView | None, namespace: str, engine_id: str) -> v1.Engine:
    """The engine of a view, when it is COMPLETE or better.

    Raises:
        NotFound: There is none.
        Refused: It is not, in the subclass that says why.
    """
    if view is None:
        raise _not_found(namespace, engine_id)
    error = _judge(view.engine, v1.REQUIREMENT_COMPLETE)
    if error is not None:
        raise error
    return view.engine


class _NotYetError(Exception):
    """What is asked for may still come; carries the error to give when time is up."""

    def __init__(self, error: RankbookError) -> None:
        super().__init__(error.message)
        self.error = error


class TopologyReader:
    """Answers GetTopology. For one event loop."""

    def __init__(self, registry: Registry, view: View, waiters: Waiters, clock: Clock) -> None:
        self._registry = registry
        self._view = view
        self._waiters = waiters
        self._clock = clock

    async def read(
        self, request: v1.GetTopologyRequest, wait_s: float, remaining_s: float | None
    ) -> list[Body]:
        """The reply in parts, now or once it is as required.

        Args:
            request: What is asked for.
            wait_s: Seconds to wait for the requirement.
            remaining_s: Seconds the caller still waits; None without end.

        Raises:
            RankbookError: Why there is no answer; after a wait, what was
                lacking at its end.
        """
        namespace = check_namespace(request.namespace)
        target = request.WhichOneof("target")
        if target is None:
            raise BadRequest(
                "target is not set: ask for an engine (engine_id) or a group (group)",
                metadata={"field": "target", "value": "", "rule": "required"},
            )
        name = check_id(target, getattr(request, target))
        if request.require not in v1.Requirement.values():
            raise BadRequest(
                f"require is {request.require}: READY, COMPLETE or ANY",
                metadata={"field": "require", "value": request.require, "rule": "a known value"},
            )
        if target == "group" and request.generation:
            raise BadRequest(
                "generation is set for a group: a generation is one engine's",
                metadata={"field": "generation", "value": request.generation, "rule": "engine_id"},
            )
        if request.generation:
            check_id("generation", request.generation)
        check_count("slots", len(request.slots), MAX_GRID_SLOTS, "slots")
        if remaining_s is not None:
            wait_s = min(wait_s, remaining_s - _MARGIN_S)
        until_s = self._clock.mono() + wait_s if wait_s > 0 else 0.0
        while True:
            try:
                if target == "engine_id":
                    return self._engine(request, namespace, name)
                return self._group(request, namespace, name)
            except _NotYetError as lacking:
                left_s = until_s - self._clock.mono() if until_s else 0.0
                if left_s <= 0:
                    raise lacking.error from None
            if target == "engine_id":
                await self._waiters.engine(namespace, name, left_s)
            else:
                await self._waiters.group(namespace, name, left_s)

    # ------------------------------------------------------------- one engine

    def _engine(self, request: v1.GetTopologyRequest, namespace: str, engine_id: str) -> list[Body]:
        view = self._view.engine(namespace, engine_id)
        if view is None:
            raise _NotYetError(_not_found(namespace, engine_id))
        engine, asked = view.engine, request.generation
        if asked and engine.generation != asked:
            if self._is_ahead(namespace, engine, asked):
                raise _NotYetError(
                    Incomplete(
                        f"generation {asked} of engine {engine_id} has begun and none of its "
                        "workers has registered",
                        metadata={**_facts(engine), "asked_generation": asked},
                    )
                )
            raise _gone(engine, asked)
        error = _judge(engine, request.require)
        if isinstance(error, Incomplete):
            raise _NotYetError(error)
        if error is not None:
            raise error
        if self._is_known(request, engine.revision):
            return self._reply([], not_modified=True)
        return self._reply(self._bodies(request, view))

    def _is_ahead(self, namespace: str, engine: v1.Engine, generation: str) -> bool:
        """Whether a generation has begun and its first worker is still to come."""
        head = self._registry.book(namespace).engines[engine.engine_id].head
        return any(s.generation == generation and s.epoch > engine.epoch for s in head.starts)

    # ---------------------------------------------------------------- a group

    def _group(self, request: v1.GetTopologyRequest, namespace: str, group: str) -> list[Body]:
        views = [
            view
            for engine_id in self._registry.book(namespace).group(group)
            if (view := self._view.engine(namespace, engine_id)) is not None
        ]
        if not views:
            raise _NotYetError(
                NotFound(
                    f"group {group} has no engine in namespace {namespace}",
                    reason=Reason.GROUP_NOT_FOUND,
                    metadata={"group": group, "namespace": namespace},
                )
            )
        alive = [view for view in views if view.engine.state != v1.STATE_GONE]
        found = [view for view in alive if _judge(view.engine, request.require) is None]
        if not found and request.require != v1.REQUIREMENT_ANY:
            states = ", ".join(
                f"{view.engine.engine_id} is {_state_name(view.engine.state)}"
                for view in views[:_SHOWN]
            )
            complete = request.require == v1.REQUIREMENT_COMPLETE
            wanted = "COMPLETE" if complete else "READY"
            raise _NotYetError(
                Incomplete(
                    f"no engine of group {group} is {wanted}: {states}",
                    metadata={"group": group, "required": wanted, "states": states},
                )
            )
        # Tombstones count, so that an engine's end is a change of its group.
        if self._is_known(request, max(view.revision for view in views)):
            return self._reply([], not_modified=True)
        return self._reply([body for view in found for body in self._bodies(request, view)])

    # ------------------------------------------------------------------ reply

    def _is_known(self, request: v1.GetTopologyRequest, revision: int) -> bool:
        return bool(
            request.known_revision
            and request.known_revision == revision
            and request.known_book_id == self._registry.book_id
        )

    @staticmethod
    def _bodies(request: v1.GetTopologyRequest, view: EngineView) -> list[Body]:
        if not request.slots:
            return view.topology(without_payload=request.without_payload)
        for slot in request.slots:
            check_slot(slot, view.engine.layout, "slots")
        keys = [(slot.pp_rank, slot.pcp_rank, slot.tp_rank) for slot in request.slots]
        return view.topology(without_payload=request.without_payload, slots=keys)

    def _reply(self, bodies: list[Body], *, not_modified: bool = False) -> list[Body]:
        """Packs topologies into as few parts as fit."""
        tail = (
            scalar(2, self._registry.revision)
            + delimited(3, self._registry.book_id.encode())
            + scalar(4, not_modified)
            + span(5, self._registry.stale_s)
        )
        parts: list[Body] = []
        pieces: list[bytes] = []
        size = 0
        for body in bodies:
            if pieces and size + body.size > MAX_REPLY_BYTES - 1024:
                parts.append(Body([*pieces, tail], size + len(tail)))
                pieces, size = [], 0
            pieces += body.pieces
            size += body.size
        parts.append(Body([*pieces, tail], size + len(tail)))
        return parts
