"""What engines of one namespace have to do with each other.

Three claims clash across engines: one place in a group taken twice, one grid
split over two names, one host and port advertised twice. Each is indexed as
records come and go, so that nothing looks through all engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rankbook import v1
from rankbook_server.core.engine import EngineState
from rankbook_server.core.keys import SlotKey, slot_text
from rankbook_server.core.problems import problem

__all__ = ["Neighbours"]

_SHOWN = 8
_MAX_FORMING = 16
"""Where more engines of a group form at once, they are many starts and no split."""

Place = tuple[str, str, int]
Address = tuple[str, int]


class Neighbours:
    """Indexes over the live engines of a namespace."""

    def __init__(
        self, engines: Mapping[str, EngineState], stir: Callable[[Iterable[str]], None]
    ) -> None:
        """Keeps `engines` by reference.

        Args:
            engines: Every engine by name.
            stir: Is told of engines whose problems may have changed.
        """
        self._engines = engines
        self._stir = stir
        self._places: dict[Place, set[str]] = {}
        self._place_of: dict[str, Place] = {}
        self._forming: dict[tuple[str, int], set[str]] = {}
        self._forming_of: dict[str, tuple[str, int]] = {}
        self._addresses: dict[Address, set[tuple[str, SlotKey]]] = {}
        self._shared: dict[str, set[Address]] = {}

    # --------------------------------------------------------------- keeping

    def enlist(self, engine_id: str, slot: SlotKey, addresses: Iterable[Address]) -> None:
        """Takes a live worker's addresses in."""
        for pair in addresses:
            owners = self._addresses.get(pair)
            if owners is None:
                self._addresses[pair] = {(engine_id, slot)}
                continue
            owners.add((engine_id, slot))
            if len(owners) > 1:
                names = {owner for owner, _ in owners}
                for name in names:
                    self._shared.setdefault(name, set()).add(pair)
                self._stir(names)

    def delist(self, engine_id: str, slot: SlotKey, addresses: Iterable[Address]) -> None:
        """Takes them out."""
        for pair in addresses:
            owners = self._addresses.get(pair)
            if owners is None:
                continue
            before = {owner for owner, _ in owners}
            shared = len(owners) > 1
            owners.discard((engine_id, slot))
            if not owners:
                del self._addresses[pair]
            if not shared:
                continue
            after = {owner for owner, _ in owners} if len(owners) > 1 else set()
            for name in before - after:
                pairs = self._shared.get(name, set())
                pairs.discard(pair)
                if not pairs:
                    self._shared.pop(name, None)
            self._stir(before)

    def file(self, engine: EngineState) -> None:
        """Takes note of an engine's place and of what it still lacks."""
        head, engine_id = engine.head, engine.engine_id
        present = len(engine.live)
        place = (head.group, head.replica, head.dp_rank) if present else None
        old = self._place_of.get(engine_id)
        if place != old:
            if old is not None:
                self._leave_place(engine_id, old)
            if place is not None:
                self._place_of[engine_id] = place
                members = self._places.setdefault(place, set())
                members.add(engine_id)
                self._stir(members)
        bucket = (head.group, head.dp_rank) if 0 < present < engine.declared else None
        was = self._forming_of.get(engine_id)
        if bucket != was:
            if was is not None:
                self._leave_forming(engine_id, was)
            if bucket is not None:
                self._forming_of[engine_id] = bucket
                self._forming.setdefault(bucket, set()).add(engine_id)
        if bucket is not None and len(self._forming[bucket]) > 1:
            self._stir_forming(bucket)

    def forget(self, engine_id: str) -> None:
        """Takes an engine out that is gone from the book."""
        place = self._place_of.get(engine_id)
        if place is not None:
            self._leave_place(engine_id, place)
        bucket = self._forming_of.get(engine_id)
        if bucket is not None:
            self._leave_forming(engine_id, bucket)

    def _leave_place(self, engine_id: str, place: Place) -> None:
        members = self._places[place]
        members.discard(engine_id)
        del self._place_of[engine_id]
        self._stir(members)
        if not members:
            del self._places[place]

    def _leave_forming(self, engine_id: str, bucket: tuple[str, int]) -> None:
        members = self._forming[bucket]
        members.discard(engine_id)
        del self._forming_of[engine_id]
        self._stir_forming(bucket)
        if not members:
            del self._forming[bucket]

    def _stir_forming(self, bucket: tuple[str, int]) -> None:
        members = self._forming[bucket]
        # One more than is looked at, for the step down from there.
        if len(members) <= _MAX_FORMING + 1:
            self._stir(members)

    # --------------------------------------------------------------- reading

    def rivals(self, engine_id: str) -> list[str]:
        """Other live engines that claim an engine's place, by name."""
        place = self._place_of.get(engine_id)
        return sorted(self._places[place] - {engine_id}) if place is not None else []

    def halves(self, engine: EngineState) -> list[str]:
        """Engines of the same group, layout and DP rank that hold other parts of
        the same grid, by name."""
        bucket = self._forming_of.get(engine.engine_id)
        members = self._forming.get(bucket, set()) if bucket is not None else set()
        if not 1 < len(members) <= _MAX_FORMING:
            return []
        others = [self._engines[name] for name in sorted(members - {engine.engine_id})]
        return [
            other.engine_id
            for other in others
            if other.head.layout == engine.head.layout and other.live.keys().isdisjoint(engine.live)
        ]

    def problems(self, engine: EngineState) -> list[v1.Problem]:
        """What is odd about an engine beside others."""
        head, engine_id, found = engine.head, engine.engine_id, []
        rivals = self.rivals(engine_id)
        if rivals:
            names = ", ".join(rivals[:_SHOWN])
            found.append(
                problem(
                    "PLACE_TAKEN_TWICE",
                    v1.SEVERITY_WARNING,
                    f"{names} also claim to be replica {head.replica} of group {head.group}, DP "
                    f"rank {head.dp_rank}: give each replica its own name",
                    engines=names,
                    group=head.group,
                    replica=head.replica,
                    dp_rank=head.dp_rank,
                )
            )
        halves = self.halves(engine)
        if halves:
            names = ", ".join(halves[:_SHOWN])
            found.append(
                problem(
                    "SPLIT_ENGINE",
                    v1.SEVERITY_WARNING,
                    f"two engine ids claim one group: {engine_id} and {names} of group "
                    f"{head.group} each hold a part of the same grid; give all nodes of one "
                    "engine the same engine_id",
                    engine_id=engine_id,
                    engines=names,
                    group=head.group,
                )
            )
        for host, port in sorted(self._shared.get(engine_id, ()))[:_SHOWN]:
            owners = sorted(self._addresses[host, port])
            mine = next(slot for name, slot in owners if name == engine_id)
            other_id, other = next(owner for owner in owners if owner != (engine_id, mine))
            found.append(
                problem(
                    "DUPLICATE_ADDRESS",
                    v1.SEVERITY_WARNING,
                    f"{_place_text(host, port)} is advertised by {slot_text(mine)} and by "
                    f"{slot_text(other)} of {other_id}: two workers cannot listen on one port",
                    host=host,
                    port=port,
                    slot=slot_text(mine),
                    other_engine=other_id,
                    other_slot=slot_text(other),
                )
            )
        return found


def _place_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
