"""What the book's word on a peer means for one who needs it now.

Pure. An answer is a topology to use, a reason to wait, or a reason to refuse.
Which state may be used by whom is the table of states in the README.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankbook.errors import Gone, Incomplete, NotFound, RankbookError, Reason, Refused, Unavailable
from rankbook.model import Slot, State, Successor, Topology
from rankbook_vllm.seal import listed, slot_name

__all__ = ["Answer", "Refuse", "Use", "Wait", "judge"]


@dataclass(frozen=True, slots=True)
class Use:
    """The peer is whole and sealed."""

    topology: Topology


@dataclass(frozen=True, slots=True)
class Wait:
    """Not yet: it may come within a deadline."""

    why: RankbookError
    """What to say when the deadline passes."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """No waiting helps."""

    why: RankbookError


Answer = Use | Wait | Refuse


def judge(
    topology: Topology | None, engine_id: str, *, generation: str = "", current: bool
) -> Answer:
    """What a peer's topology means for a new use of it.

    Args:
        topology: The peer as the local copy of the book has it; None where it
            has none.
        engine_id: The peer.
        generation: Start that the use is bound to, because it has block ids of
            it; empty where any will do.
        current: Whether the local copy follows the book now. An old copy that
            contradicts a request is no proof against it.
    """
    if topology is None:
        return Wait(_unknown(engine_id, current))
    engine = topology.engine
    if generation and generation != engine.generation:
        error = _replaced(topology, generation)
        return Refuse(error) if current else Wait(error)
    if engine.state is State.READY:
        return Use(topology)
    if engine.state is State.DRAINING and generation:
        # Its blocks are there already: what was begun is finished.
        return Use(topology)
    if engine.state in (State.FORMING, State.COMPLETE):
        return Wait(_forming(topology))
    return Refuse(_unusable(topology))


def _unknown(engine_id: str, current: bool) -> RankbookError:
    if current:
        return NotFound(
            f"engine {engine_id} has not signed in: check that it runs with the same registry "
            "and namespace",
            metadata={"engine_id": engine_id},
        )
    return Unavailable(
        f"engine {engine_id} is not known here and the registry is away: check that it is up "
        "and reachable from this host",
        metadata={"engine_id": engine_id},
    )


def _replaced(topology: Topology, generation: str) -> Gone:
    engine = topology.engine
    return Gone(
        f"the request is of start {generation} of {engine.engine_id}, whose start is now "
        f"{engine.generation} (epoch {engine.epoch}, {engine.state.name}): its blocks went with "
        "the old start; prefill again",
        metadata={
            "engine_id": engine.engine_id,
            "generation": generation,
            "successor_engine_id": engine.engine_id,
            "successor_generation": engine.generation,
            "successor_epoch": engine.epoch,
        },
    )


def _forming(topology: Topology) -> RankbookError:
    engine = topology.engine
    if engine.state is State.COMPLETE:
        return Incomplete(
            f"{engine.engine_id} has all {engine.declared} workers but is not sealed: its engine "
            "core is still starting, or its log says why it cannot seal",
            metadata={"engine_id": engine.engine_id, "missing": ""},
        )
    missing = _named(engine.missing)
    return Incomplete(
        f"{engine.engine_id} has {engine.present} of {engine.declared} workers, missing {missing}",
        metadata={"engine_id": engine.engine_id, "missing": missing},
    )


def _unusable(topology: Topology) -> RankbookError:
    engine = topology.engine
    about: dict[str, object] = {
        "engine_id": engine.engine_id,
        "generation": engine.generation,
    }
    if engine.state is State.GONE:
        heir = engine.successor
        more = f"; {heir.engine_id} (epoch {heir.epoch}) took its place" if heir else ""
        return Gone(
            f"{engine.engine_id} is gone: no worker of its start {engine.generation} is alive"
            f"{more}; prefill again elsewhere",
            metadata=about | (_heir(heir) if heir else {}),
        )
    if engine.state is State.INVALID:
        wrong = "; ".join(problem.message for problem in engine.problems)
        return Refused(
            f"{engine.engine_id} contradicts itself: {wrong}",
            reason=Reason.ENGINE_INVALID,
            metadata=about | {"problems": wrong},
        )
    if engine.asleep:
        asleep = _named(engine.asleep)
        return Incomplete(
            f"{engine.engine_id} is asleep: {asleep} took the KV cache out; wake it",
            metadata=about | {"asleep": asleep, "missing": asleep},
        )
    if engine.state is State.DEGRADED:
        missing = _named(engine.missing) or "its engine core"
        return Incomplete(
            f"{engine.engine_id} has lost {missing}: no token comes from part of an engine",
            metadata=about | {"missing": missing},
        )
    return Incomplete(
        f"{engine.engine_id} is {engine.state.name}: it takes no new peers",
        metadata=about | {"state": engine.state.name, "missing": ""},
    )


def _heir(heir: Successor) -> dict[str, object]:
    return {
        "successor_engine_id": heir.engine_id,
        "successor_generation": heir.generation,
        "successor_epoch": heir.epoch,
    }


def _named(slots: tuple[Slot, ...]) -> str:
    return listed([slot_name(slot) for slot in slots])
