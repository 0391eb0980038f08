"""One engine: the fold of its head and slots, and what follows from them.

Everything that decides an engine's state is in this file. The state is the
first line of this table that holds (DESIGN section 3):

    GONE      no slot of the current epoch is live, or the epoch was evicted
    INVALID   a problem of severity ERROR: layers differ inside a stage,
              overlap between stages, or leave a hole once every slot is filled
    DEGRADED  COMPLETE was reached in this epoch, and now a slot, a payload, or
              the core of a sealed engine is missing
    DRAINING  COMPLETE, and the drain flag is set
    READY     COMPLETE, the seal's digest is today's, the core is alive
    COMPLETE  every slot is live and awake, and the stages cover the layers
    FORMING   anything else

An engine that never was COMPLETE stays FORMING while the drain flag is set:
DRAINING may be used by existing peers, and half a grid may be used by nobody.

Sums over the workers are kept as they come and go, so that one change to an
engine of thousands of slots costs as little as one to a small one.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections import Counter
from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp

from rankbook import v1
from rankbook.limits import DEFAULT_TTL_S, grid_slots
from rankbook_server.core.keys import SlotKey

__all__ = [
    "MAX_MISSING_SHOWN",
    "EngineState",
    "SlotState",
    "WorkerView",
    "seal_digest",
    "slot_text",
]

MAX_MISSING_SHOWN = 1024
_MAX_PROBLEMS = 64
_MAX_HASHES = 16


def slot_text(slot: SlotKey) -> str:
    """A slot in words."""
    return f"pp{slot[0]} pcp{slot[1]} tp{slot[2]}" if slot[1] else f"pp{slot[0]} tp{slot[2]}"


def slot_message(slot: SlotKey) -> v1.Slot:
    """A slot as a message."""
    return v1.Slot(pp_rank=slot[0], pcp_rank=slot[1], tp_rank=slot[2])


def seal_piece(slot: SlotKey, boot_id: str, digest: bytes) -> bytes:
    """What one slot adds to an engine's digest."""
    return b"%d.%d.%d|%s|%s" % (*slot, boot_id.encode(), digest)


def seal_digest(pieces: list[bytes]) -> bytes:
    """Digest of an engine from its slots' pieces, in slot order."""
    return hashlib.sha256(b"".join(pieces)).digest()


@dataclass(slots=True)
class WorkerView:
    """A live worker as readers see it."""

    slot: SlotKey
    revision: int
    record: v1.WorkerRecord
    status: v1.WorkerStatus


@dataclass(slots=True)
class SlotState:
    """A slot as it is stored, with what is looked up often."""

    stored: v1.StoredWorker
    write_revision: int
    revision: int
    epoch: int
    live: bool
    size: int
    piece: bytes
    range: tuple[int, int]
    addresses: tuple[tuple[str, int], ...]
    exposed: bool


def _is_unreachable(host: str) -> bool:
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def fold_slot(stored: v1.StoredWorker, revision: int, slot: SlotKey) -> SlotState:
    """A stored slot, read once."""
    record = stored.record
    boot_id = stored.holders[-1].boot_id if stored.holders else ""
    hosts = [(a.host, a.port) for a in record.addresses]
    return SlotState(
        stored=stored,
        write_revision=revision,
        revision=stored.change_revision or revision,
        epoch=stored.epoch,
        live=stored.live,
        size=record.ByteSize() if stored.live else 0,
        piece=seal_piece(slot, boot_id, stored.record_digest),
        range=(record.layers.start_layer, record.layers.end_layer),
        addresses=tuple(pair for pair in hosts if pair[1]),
        exposed=not any(_is_unreachable(host) for host, _ in hosts),
    )


class EngineState:
    """Head, slots and sums of one engine."""

    def __init__(self, engine_id: str, namespace: str) -> None:
        self.engine_id = engine_id
        self.namespace = namespace
        self.head = v1.StoredEngine()
        self.head_revision = 0
        self.revision = 0
        self.was_complete = False
        self.slots: dict[SlotKey, SlotState] = {}
        self.change_time = Timestamp()
        self._derived: v1.Engine | None = None
        self._reset_sums()

    def _reset_sums(self) -> None:
        self.live: dict[SlotKey, SlotState] = {}
        self.bytes = 0
        self.asleep: set[SlotKey] = set()
        self._unreachable: set[SlotKey] = set()
        self._ranges: dict[int, Counter[tuple[int, int]]] = {}
        self._hashes: Counter[str] = Counter()
        self._labels: Counter[tuple[str, str]] = Counter()
        self._order: list[SlotKey] | None = None

    # ------------------------------------------------------------------ fold

    def fold_head(self, head: v1.StoredEngine, revision: int) -> None:
        """Takes a stored head in."""
        fresh = head.epoch != self.head.epoch or head.evicted != self.head.evicted
        self.head = head
        self.head_revision = revision
        self._changed(head.change_revision or revision, head.change_time)
        if fresh:
            self.was_complete = head.was_complete
            self._reset_sums()
            if not head.evicted:
                for slot, state in self.slots.items():
                    if state.live and state.epoch == head.epoch:
                        self._count(slot, state)
        self.was_complete = self.was_complete or head.was_complete
        self.touch()
        self._note_complete()

    def fold_worker(self, slot: SlotKey, stored: v1.StoredWorker, revision: int) -> SlotState:
        """Takes a stored slot in; returns it."""
        state = fold_slot(stored, revision, slot)
        if slot in self.live:
            self._uncount(slot)
        self.slots[slot] = state
        if state.epoch == self.head.epoch and not self.head.evicted:
            self._changed(state.revision, stored.change_time)
            if state.live:
                self._count(slot, state)
        self.touch()
        self._note_complete()
        return state

    def drop_worker(self, slot: SlotKey) -> None:
        """Forgets a slot whose key was deleted."""
        if slot in self.live:
            self._uncount(slot)
        self.slots.pop(slot, None)
        self.touch()

    def _changed(self, revision: int, time: Timestamp) -> None:
        if revision > self.revision:
            self.revision, self.change_time = revision, time

    def touch(self) -> None:
        """Makes the next read derive anew."""
        self._derived = None

    def _count(self, slot: SlotKey, state: SlotState) -> None:
        if slot not in self.live:
            self._order = None
        self.live[slot] = state
        self.bytes += state.size
        record = state.stored.record
        self._ranges.setdefault(slot[0], Counter())[state.range] += 1
        if record.compat.hash:
            self._hashes[record.compat.hash] += 1
        self._labels.update(record.labels.items())
        if state.stored.asleep:
            self.asleep.add(slot)
        if not state.exposed:
            self._unreachable.add(slot)

    def _uncount(self, slot: SlotKey) -> None:
        state = self.live.pop(slot)
        self._order = None
        self.bytes -= state.size
        record = state.stored.record
        stage = self._ranges[slot[0]]
        stage[state.range] -= 1
        if not stage[state.range]:
            del stage[state.range]
        if not stage:
            del self._ranges[slot[0]]
        if record.compat.hash:
            self._hashes[record.compat.hash] -= 1
        self._labels.subtract(record.labels.items())
        self.asleep.discard(slot)
        self._unreachable.discard(slot)

    def _note_complete(self) -> None:
        # Kept in memory; the decision that first takes a slot away writes it.
        if not self.was_complete and self.complete():
            self.was_complete = True

    # ------------------------------------------------------------------ read

    @property
    def visible(self) -> bool:
        """Whether readers may see it: a start that has had a worker."""
        return self.head.epoch > 0

    @property
    def declared(self) -> int:
        """Slots of the grid."""
        return grid_slots(self.head.layout)

    def order(self) -> list[SlotKey]:
        """Live slots in grid order."""
        if self._order is None:
            self._order = sorted(self.live)
        return self._order

    def digest(self) -> bytes:
        """Digest over what is present now."""
        return seal_digest([self.live[slot].piece for slot in self.order()])

    def missing(self) -> list[SlotKey]:
        """Slots that are not filled, in grid order; the first 1,024."""
        layout = self.head.layout
        found: list[SlotKey] = []
        if len(self.live) == self.declared:
            return found
        for pp in range(layout.pp_size):
            for pcp in range(layout.pcp_size or 1):
                for tp in range(layout.tp_size):
                    if (pp, pcp, tp) not in self.live:
                        found.append((pp, pcp, tp))
                        if len(found) == MAX_MISSING_SHOWN:
                            return found
        return found

    def complete(self) -> bool:
        """Every slot live and awake, layers proven."""
        return (
            self.visible
            and bool(self.live)
            and len(self.live) == self.declared
            and not self.asleep
            and not self._layer_problems()
        )

    def sealed(self) -> bool:
        """The seal that stands is of what is present now."""
        return bool(self.head.seal.number) and self.head.seal.digest == self.digest()

    def workers(self) -> list[WorkerView]:
        """Live workers in slot order."""
        found = []
        for slot in self.order():
            state = self.live[slot]
            found.append(
                WorkerView(
                    slot,
                    state.revision,
                    state.stored.record,
                    v1.WorkerStatus(
                        record_digest=state.stored.record_digest,
                        revision=state.revision,
                        lease_id=state.stored.lease_id,
                        asleep=state.stored.asleep,
                    ),
                )
            )
        return found

    def emptied(self) -> list[tuple[SlotKey, int]]:
        """Slots of this epoch that were filled and are empty, with the revision."""
        return [
            (slot, state.revision)
            for slot, state in self.slots.items()
            if not state.live and state.epoch == self.head.epoch
        ]

    def shared_addresses(self) -> dict[tuple[str, int], SlotKey]:
        """Every advertised host and port, with one slot that has it."""
        return {pair: slot for slot, state in self.live.items() for pair in state.addresses}

    # -------------------------------------------------------------- problems

    def _layer_problems(self) -> list[v1.Problem]:
        problems = []
        spans: list[tuple[int, int, int]] = []
        for pp in sorted(self._ranges):
            ranges = sorted(self._ranges[pp])
            if len(ranges) > 1:
                problems.append(
                    _problem(
                        "LAYERS_DIFFER",
                        v1.SEVERITY_ERROR,
                        f"workers of stage {pp} hold different layers, {_spans(ranges)}: all "
                        "workers of a stage hold the same range; restart the ones that differ",
                        stage=pp,
                        ranges=_spans(ranges),
                    )
                )
            spans.extend((start, end, pp) for start, end in ranges if end > start)
        spans.sort()
        reached, owner = 0, -1
        holes = []
        for start, end, pp in spans:
            if start < reached and pp != owner:
                problems.append(
                    _problem(
                        "LAYERS_OVERLAP",
                        v1.SEVERITY_ERROR,
                        f"stage {owner} reaches layer {reached} and stage {pp} starts at {start}: "
                        "stages do not overlap; give all ranks one layer partition",
                        stage=pp,
                        other_stage=owner,
                        start_layer=start,
                        end_layer=reached,
                    )
                )
            if start > reached:
                holes.append((reached, start))
            if end > reached:
                reached, owner = end, pp
        if reached < self.head.layout.num_layers:
            holes.append((reached, self.head.layout.num_layers))
        if holes and len(self.live) == self.declared:
            problems.append(
                _problem(
                    "LAYERS_HOLE",
                    v1.SEVERITY_ERROR,
                    f"no stage holds the layers {_spans(holes)} of {self.head.layout.num_layers}, "
                    "and every rank is here: give all ranks one layer partition",
                    layers=_spans(holes),
                    num_layers=self.head.layout.num_layers,
                )
            )
        return problems

    def _other_problems(self) -> list[v1.Problem]:
        problems = []
        head, warning = self.head, v1.SEVERITY_WARNING
        times = [t.seconds + t.nanos / 1e9 for t in head.retired_alive]
        if len(times) > 1 and times[-1] - times[-2] <= DEFAULT_TTL_S:
            problems.append(
                _problem(
                    "TWO_STARTS",
                    warning,
                    f"two starts share one engine_id, {self.engine_id}: generations replaced "
                    "live ones more than once within a lease's time; give each its own engine_id",
                    engine_id=self.engine_id,
                    generation=head.generation,
                )
            )
        if self.was_complete and len(self.live) < self.declared:
            lost = self.missing()
            problems.append(
                _problem(
                    "RANKS_LOST",
                    warning,
                    f"{self.declared - len(self.live)} of {self.declared} ranks are gone since "
                    f"the engine was complete: {_slots(lost)}",
                    missing=_slots(lost),
                )
            )
        if self.asleep:
            slots = _slots(sorted(self.asleep))
            problems.append(
                _problem(
                    "ASLEEP", warning, f"payload withdrawn by {slots}: wake the engine", slots=slots
                )
            )
        if head.seal.number and not head.core.live:
            problems.append(
                _problem(
                    "CORE_LOST",
                    warning,
                    f"the engine core {head.seal.boot_id} that sealed is gone",
                    boot_id=head.seal.boot_id,
                )
            )
        elif head.seal.number and len(self.live) == self.declared and not self.sealed():
            problems.append(
                _problem(
                    "SEAL_OUTDATED",
                    warning,
                    f"records changed since seal {head.seal.number}: the core must seal again",
                    seal=head.seal.number,
                )
            )
        if self._unreachable:
            slots = _slots(sorted(self._unreachable))
            problems.append(
                _problem(
                    "LOOPBACK_ADDRESS",
                    warning,
                    f"{slots} advertise a loopback or wildcard address, which other hosts cannot "
                    "reach: set the host that peers should use (VLLM_HOST_IP)",
                    slots=slots,
                )
            )
        return problems

    # ----------------------------------------------------------------- state

    def state(self) -> v1.State.ValueType:
        """The state now."""
        return self._state(any(p.severity == v1.SEVERITY_ERROR for p in self._layer_problems()))

    def _state(self, invalid: bool) -> v1.State.ValueType:
        head = self.head
        if not self.live:
            return v1.STATE_GONE
        if invalid:
            return v1.STATE_INVALID
        complete = len(self.live) == self.declared and not self.asleep
        if self.was_complete and (not complete or (head.seal.number and not head.core.live)):
            return v1.STATE_DEGRADED
        if not complete:
            return v1.STATE_FORMING
        if head.HasField("drain"):
            return v1.STATE_DRAINING
        if head.core.live and self.sealed():
            return v1.STATE_READY
        return v1.STATE_COMPLETE

    def derive(self, neighbours: list[v1.Problem]) -> v1.Engine:
        """The engine as readers see it; kept until the next change.

        Args:
            neighbours: Problems that come from other engines.
        """
        if self._derived is not None:
            return self._derived
        head = self.head
        problems = self._layer_problems() if self.live else []
        invalid = any(p.severity == v1.SEVERITY_ERROR for p in problems)
        if self.live:
            problems += self._other_problems() + neighbours
        missing = self.missing()
        engine = v1.Engine(
            namespace=self.namespace,
            engine_id=self.engine_id,
            group=head.group,
            replica=head.replica,
            dp_rank=head.dp_rank,
            role=head.role,
            state=self._state(invalid),
            generation=head.generation,
            epoch=head.epoch,
            revision=self.revision,
            start_revision=head.start_revision or self.head_revision,
            layout=head.layout,
            present=len(self.live),
            declared=self.declared,
            missing=[slot_message(slot) for slot in missing],
            stages=[
                v1.Stage(pp_rank=pp, start_layer=span[0], end_layer=span[1])
                for pp in sorted(self._ranges)
                for span in [min(self._ranges[pp])]
            ],
            problems=problems[:_MAX_PROBLEMS],
            compat_hashes=sorted(h for h, n in self._hashes.items() if n > 0)[:_MAX_HASHES],
            labels={k: v for (k, v), n in self._labels.items() if n == len(self.live) and n},
            start_time=head.start_time,
            change_time=self.change_time,
            asleep=[slot_message(slot) for slot in sorted(self.asleep)],
        )
        if head.HasField("seal"):
            engine.seal.CopyFrom(head.seal)
        if head.core.live:
            engine.core.CopyFrom(head.core.record)
        if head.HasField("drain"):
            engine.drain.CopyFrom(head.drain)
        if not self.live and head.HasField("successor"):
            engine.successor.CopyFrom(head.successor)
        if self.live:
            first = self.live[self.order()[0]].stored
            if first.record.HasField("model"):
                engine.model.CopyFrom(first.record.model)
        self._derived = engine
        return engine


def _problem(
    reason: str, severity: v1.Severity.ValueType, message: str, **metadata: object
) -> v1.Problem:
    return v1.Problem(
        reason=reason,
        severity=severity,
        message=message,
        metadata={name: str(value) for name, value in metadata.items()},
    )


def _spans(ranges: list[tuple[int, int]]) -> str:
    return ", ".join(f"[{start}, {end})" for start, end in ranges)


def _slots(slots: list[SlotKey], shown: int = 16) -> str:
    text = ", ".join(slot_text(slot) for slot in slots[:shown])
    return text if len(slots) <= shown else f"{text} and {len(slots) - shown} more"
