"""Whom a request may go to, by what the book says now. No I/O and no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rankbook.model import Engine, Role, State, Topology
from rankbook_vllm.proxy.refusal import Refusal

__all__ = ["Rota", "Side", "Target", "serving_url", "standing"]

_SCHEMES = ("http", "https")


@dataclass(frozen=True, slots=True)
class Target:
    """One start of an engine that takes requests now."""

    engine_id: str
    generation: str
    connector: str
    """Class name of its connector, as its core tells it."""
    url: str
    """Where it takes requests: scheme, host and port."""


def serving_url(engine: Engine) -> str:
    """Where an engine takes requests; empty where its core does not say so."""
    for address in engine.core.addresses if engine.core is not None else ():
        if address.label == "serving" and address.port and address.scheme in _SCHEMES:
            host = f"[{address.host}]" if ":" in address.host else address.host
            return f"{address.scheme}://{host}:{address.port}"
    return ""


def standing(engine: Engine) -> str:
    """What an engine's record means for requests, in words."""
    name = f"{engine.engine_id} (generation {engine.generation})"
    if engine.state is not State.READY:
        return f"{name} is {engine.state}: nothing new goes there"
    url = serving_url(engine)
    if not url:
        return (
            f"{name} is READY, but nothing goes there: it does not say where it takes requests; "
            "give the engine the setting serving_address, HOST:PORT"
        )
    return f"{name} takes requests at {url}"


@dataclass(frozen=True, slots=True)
class Side:
    """Who can do one half of a request."""

    name: str
    """What the half is done by, in words: producer or consumer."""
    role: Role
    group: str = ""
    """Only engines of this group; empty takes every one."""

    def holds(self, engine: Engine) -> bool:
        """Whether an engine is of this side, whatever its state."""
        return engine.role in (self.role, Role.BOTH) and self.group in ("", engine.group)

    def engines(self, topologies: Iterable[Topology]) -> list[Engine]:
        """The engines of this side."""
        return [one.engine for one in topologies if self.holds(one.engine)]

    def targets(self, topologies: Iterable[Topology]) -> list[Target]:
        """Those that take new requests, by engine_id."""
        found = [
            Target(
                engine_id=engine.engine_id,
                generation=engine.generation,
                connector=engine.core.connector if engine.core is not None else "",
                url=serving_url(engine),
            )
            for engine in self.engines(topologies)
            if engine.state is State.READY and serving_url(engine)
        ]
        return sorted(found, key=lambda target: target.engine_id)

    def nobody(self, topologies: Sequence[Topology], besides: str = "") -> Refusal:
        """Why there is no target.

        Args:
            topologies: What the book says.
            besides: An engine that would be one, but has the other half to do.
        """
        states: dict[str, Counter[str]] = {}
        silent = 0
        for engine in self.engines(topologies):
            states.setdefault(engine.group, Counter())[engine.state] += 1
            silent += engine.state is State.READY and not serving_url(engine)
        whose = f"of group {self.group!r}" if self.group else "of any group"
        seen = "; ".join(
            f"{group} has " + ", ".join(f"{number} {state}" for state, number in found.items())
            for group, found in sorted(states.items())
        )
        message = f"no {self.name} {whose} takes requests: {seen or 'the book has none'}"
        if silent:
            message += f"; {silent} READY without serving_address"
        if besides:
            message += f"; {besides} does the prefill and cannot send to itself"
        return Refusal(
            503,
            f"NO_{self.name.upper()}",
            message,
            {"group": self.group, "states": {group: dict(n) for group, n in states.items()}},
        )


class Rota:
    """Whose turn it is. For one thread."""

    def __init__(self) -> None:
        self._last = ""

    def next(self, targets: Sequence[Target], without: Collection[str] = ()) -> Target | None:
        """The one after the last by engine_id, so that who comes and goes shifts nobody's turn.

        Args:
            targets: By engine_id.
            without: engine_ids that are passed over.
        """
        left = [target for target in targets if target.engine_id not in without]
        if not left:
            return None
        chosen = next((target for target in left if target.engine_id > self._last), left[0])
        self._last = chosen.engine_id
        return chosen
